//! A real Redis Cluster: three primaries, each with one replica.
//!
//! Upstream: tests. Downstream: the nodes are `redis` servers in one server directory.
//! Guarantees: a started cluster covers all slots, and every node knows every other node and its role.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::ports::{Port, with_free_ports};
use crate::proxy::Proxy;
use crate::redis::{Redis, RedisBuilder};
use crate::resp::{RedisConnection, RedisReply};
use crate::shared;
use crate::temp_server_dir::TempServerDir;
use crate::wait::wait_until;

const PRIMARIES: usize = 3;
const NODES: usize = 2 * PRIMARIES;
const SLOTS: usize = 16_384;
const FORM_LIMIT: Duration = Duration::from_secs(60);

/// A cluster of six nodes, killed and removed when dropped, unless it is the shared one.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Redis>,
}

/// Sets up a [`Cluster`]; made by [`Cluster::builder`].
#[derive(Debug, Clone)]
pub struct ClusterBuilder {
    node: RedisBuilder,
}

impl Cluster {
    /// Starts a cluster of your own, without persistence.
    pub fn start() -> Result<Cluster> {
        Cluster::builder().start()
    }

    /// Sets up a cluster of your own.
    pub fn builder() -> ClusterBuilder {
        let node = Redis::builder()
            .setting("cluster-enabled", "yes")
            .setting("cluster-node-timeout", "2000")
            .setting("cluster-announce-ip", "127.0.0.1")
            // CLUSTER SLOTS hides a replica until it has received something, if only a ping.
            .setting("repl-ping-replica-period", "1")
            // A replica that lost its primary long ago may still be promoted.
            .setting("cluster-replica-validity-factor", "0");
        ClusterBuilder { node }
    }

    /// The cluster all tests of this run share; use [`unique`](crate::unique) names in it.
    pub fn shared() -> Result<Cluster> {
        let start = |server_dir: &Arc<TempServerDir>| {
            // A node that is slow on a busy machine must not be failed over.
            let builder = Cluster::builder().setting("cluster-node-timeout", "15000");
            let nodes = builder.start_in(server_dir)?.nodes.into_iter();
            Ok(nodes.map(Redis::detach).collect::<Vec<_>>().join("\n"))
        };
        shared::server("cluster", start, |text| {
            let nodes = text.lines().map(Redis::open_shared).collect::<Result<Vec<_>>>()?;
            ensure!(nodes.len() == NODES, "the ready file names {} nodes", nodes.len());
            Ok(Cluster { nodes })
        })
    }

    /// The URL to give to a client: the first three nodes, which begin as primaries.
    pub fn url(&self) -> String {
        let seeds: Vec<String> =
            self.nodes[..PRIMARIES].iter().map(|node| node.addr().to_string()).collect();
        format!("redis-cluster://{}", seeds.join(","))
    }

    /// All six nodes: first those that begin as primaries, then their replicas in the same order.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// The slot of a key.
    pub fn slot_of(&self, key: &str) -> Result<u16> {
        let reply = self.any(&["CLUSTER", "KEYSLOT", key])?.int();
        Ok(u16::try_from(reply.context("CLUSTER KEYSLOT gave no number")?)?)
    }

    /// The current primary of this slot.
    pub fn primary_of_slot(&self, slot: u16) -> Result<&Redis> {
        self.member_of_slot(slot, 0)
    }

    /// The current replica of this slot.
    pub fn replica_of_slot(&self, slot: u16) -> Result<&Redis> {
        self.member_of_slot(slot, 1)
    }

    /// Moves a slot with its keys to another primary, one key at a time, as resharding tools do.
    pub fn move_slot(&self, slot: u16, to: &Redis) -> Result<()> {
        let from = self.primary_of_slot(slot)?;
        if from.port() == to.port() {
            return Ok(());
        }
        let id_of = |node: &Redis| anyhow::Ok(node.command(&["CLUSTER", "MYID"])?.text());
        let (from_id, to_id, number) = (id_of(from)?, id_of(to)?, slot.to_string());
        to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &from_id])?.ok()?;
        from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &to_id])?.ok()?;
        let port = to.port().to_string();
        loop {
            let keys = from.command(&["CLUSTER", "GETKEYSINSLOT", &number, "10"])?.ok()?;
            if keys.items().is_empty() {
                break;
            }
            for key in keys.items().iter().map(RedisReply::text) {
                // The key may have expired meanwhile: `NOKEY` is not an error.
                from.command(&["MIGRATE", "127.0.0.1", &port, &key, "0", "5000"])?.ok()?;
            }
        }
        for node in [to, from] {
            node.command(&["CLUSTER", "SETSLOT", &number, "NODE", &to_id])?.ok()?;
        }
        wait_until("all running nodes to know the new owner of the slot", FORM_LIMIT, || {
            let mut running = self.nodes.iter().filter(|node| node.pid().is_ok());
            running.all(|node| {
                node.command(&["CLUSTER", "SLOTS"]).is_ok_and(|slots| {
                    let owner = ranges(&slots)
                        .into_iter()
                        .find(|range| range.first <= slot.into() && i64::from(slot) <= range.last);
                    owner.is_some_and(|owner| owner.ports.first() == Some(&to.port().into()))
                })
            })
        })
    }

    /// Starts a proxy of every node, in the order of [`Cluster::nodes`], and makes the nodes announce its port to clients
    /// instead of theirs. Afterwards no node is found by slot.
    pub fn start_proxies(&self) -> Result<Vec<Proxy>> {
        let start = |node: &Redis| {
            let proxy = Proxy::start(node.addr())?;
            let port = proxy.addr().port().to_string();
            node.command(&["CONFIG", "SET", "cluster-announce-port", &port])?.ok()?;
            Ok(proxy)
        };
        let proxies = self.nodes.iter().map(start).collect::<Result<Vec<_>>>()?;
        let announced: BTreeSet<i64> =
            proxies.iter().map(|proxy| proxy.addr().port().into()).collect();
        wait_until("all nodes to announce the ports of the proxies", FORM_LIMIT, || {
            self.nodes.iter().all(|node| {
                node.command(&["CLUSTER", "SLOTS"]).is_ok_and(|slots| {
                    let ports = ranges(&slots).into_iter().flat_map(|range| range.ports);
                    ports.collect::<BTreeSet<i64>>() == announced
                })
            })
        })?;
        Ok(proxies)
    }

    /// Waits until all running nodes agree that all slots are served.
    pub fn wait_until_ok(&self, limit: Duration) -> Result<()> {
        wait_until("all running nodes to say cluster_state:ok", limit, || {
            let mut running = self.nodes.iter().filter(|node| node.pid().is_ok());
            running.all(|node| says(node, &["CLUSTER", "INFO"], "cluster_state:ok"))
        })
    }

    /// Asks the first node that runs and answers.
    fn any(&self, words: &[&str]) -> Result<RedisReply> {
        let running = self.nodes.iter().filter(|node| node.pid().is_ok());
        running
            .filter_map(|node| node.command(words).ok()?.ok().ok())
            .next()
            .with_context(|| format!("no node answers {}", words.join(" ")))
    }

    fn member_of_slot(&self, slot: u16, position: usize) -> Result<&Redis> {
        let port = ranges(&self.any(&["CLUSTER", "SLOTS"])?)
            .into_iter()
            .find(|range| range.first <= slot.into() && i64::from(slot) <= range.last)
            .and_then(|range| range.ports.get(position).copied())
            .with_context(|| format!("slot {slot} has no such node"))?;
        let node = self.nodes.iter().find(|node| i64::from(node.port()) == port);
        node.with_context(|| format!("port {port} is not one of our nodes"))
    }

    /// Connects the nodes with each other and waits until all of them see the complete cluster.
    fn form(&self) -> Result<()> {
        let mut connections =
            self.nodes.iter().map(Redis::connect).collect::<Result<Vec<RedisConnection>>>()?;
        for (number, connection) in connections.iter_mut().enumerate() {
            let epoch = (number + 1).to_string();
            connection.command(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch])?.ok()?;
            if number < PRIMARIES {
                // ADDSLOTSRANGE is not in Redis 6.2.
                let slots = SLOTS * number / PRIMARIES..SLOTS * (number + 1) / PRIMARIES;
                let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
                let mut words = vec!["CLUSTER", "ADDSLOTS"];
                words.extend(slots.iter().map(String::as_str));
                connection.command(&words)?.ok()?;
            }
            // MEET for every pair of nodes; gossip alone would take seconds.
            for other in &self.nodes[..number] {
                let port = other.port().to_string();
                connection.command(&["CLUSTER", "MEET", "127.0.0.1", &port])?.ok()?;
            }
        }

        let mut ids = Vec::new();
        for connection in &mut connections {
            ids.push(connection.command(&["CLUSTER", "MYID"])?.ok()?.text());
        }
        for (number, replica) in connections.iter_mut().enumerate().skip(PRIMARIES) {
            wait_until("a replica to know its primary", FORM_LIMIT, || {
                let primary = &ids[number - PRIMARIES];
                replica
                    .command(&["CLUSTER", "REPLICATE", primary])
                    .is_ok_and(|reply| reply.text() == "OK")
            })?;
        }
        wait_until("the cluster to form", FORM_LIMIT, || self.nodes.iter().all(sees_all))
    }
}

impl ClusterBuilder {
    /// Any line of `redis.conf`, for every node.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.node = self.node.setting(name, value);
        self
    }

    /// Starts the nodes and waits until the cluster is complete.
    pub fn start(self) -> Result<Cluster> {
        self.start_in(&Arc::new(TempServerDir::private()?))
    }

    fn start_in(&self, server_dir: &Arc<TempServerDir>) -> Result<Cluster> {
        with_free_ports(|| {
            let nodes = (0..NODES)
                .map(|_| self.node.launch(server_dir, Port::for_cluster_node()?))
                .collect::<Result<Vec<_>>>()?;
            for node in &nodes {
                node.wait_until_ready()?;
            }
            let cluster = Cluster { nodes };
            cluster.form()?;
            Ok(cluster)
        })
    }
}

/// Whether this node is healthy and sees three slot ranges with two nodes each.
fn sees_all(node: &Redis) -> bool {
    let complete = node.command(&["CLUSTER", "SLOTS"]).is_ok_and(|slots| {
        let ranges = ranges(&slots);
        ranges.len() == PRIMARIES && ranges.iter().all(|range| range.ports.len() == 2)
    });
    let no_strangers = node.command(&["CLUSTER", "NODES"]).is_ok_and(|nodes| {
        let nodes = nodes.text();
        let known = |line: &str| !line.contains("handshake") && !line.contains("fail");
        nodes.lines().count() == NODES && nodes.lines().all(known)
    });
    let linked = || {
        says(node, &["INFO", "replication"], "role:master")
            || says(node, &["INFO", "replication"], "master_link_status:up")
    };
    complete && no_strangers && says(node, &["CLUSTER", "INFO"], "cluster_state:ok") && linked()
}

fn says(node: &Redis, words: &[&str], line: &str) -> bool {
    node.command(words).is_ok_and(|reply| reply.text().lines().any(|said| said == line))
}

/// A range of slots and the ports that serve it, the primary first.
struct SlotRange {
    first: i64,
    last: i64,
    ports: Vec<i64>,
}

/// Reads the reply of CLUSTER SLOTS.
fn ranges(slots: &RedisReply) -> Vec<SlotRange> {
    let range = |items: &[RedisReply]| {
        let ports = items.iter().skip(2).filter_map(|node| node.items().get(1)?.int()).collect();
        Some(SlotRange { first: items.first()?.int()?, last: items.get(1)?.int()?, ports })
    };
    slots.items().iter().filter_map(|reply| range(reply.items())).collect()
}

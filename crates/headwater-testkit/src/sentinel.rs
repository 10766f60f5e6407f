//! A real Redis primary and replica, watched by three sentinels.
//!
//! Upstream: tests. Downstream: all five are `redis` servers in one server directory.
//! Guarantees: when started, each sentinel knows the replica and the two others, and can start a failover.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::ports::{Port, with_free_ports};
use crate::redis::Redis;
use crate::resp::RedisReply;
use crate::temp_server_dir::TempServerDir;
use crate::wait::wait_until;

const SERVICE: &str = "mymaster";
const SENTINELS: usize = 3;
const FORM_LIMIT: Duration = Duration::from_secs(60);

/// A primary, a replica and three sentinels, killed and removed when dropped.
#[derive(Debug)]
pub struct Sentinel {
    primary: Redis,
    replica: Redis,
    sentinels: Vec<Redis>,
}

impl Sentinel {
    /// Starts the five servers and waits until they know each other.
    pub fn start() -> Result<Sentinel> {
        Sentinel::start_with(None)
    }

    /// The same; the sentinels require this password, the primary and the replica none.
    pub fn start_with_password(password: &str) -> Result<Sentinel> {
        Sentinel::start_with(Some(password))
    }

    fn start_with(password: Option<&str>) -> Result<Sentinel> {
        let server_dir = Arc::new(TempServerDir::private()?);
        let primary = Redis::builder().start_in(&server_dir)?;
        let follow = format!("127.0.0.1 {}", primary.port());
        let replica = Redis::builder().setting("replicaof", &follow).start_in(&server_dir)?;
        let sentinels =
            with_free_ports(|| start_sentinels(&server_dir, &primary, &replica, password))?;
        let group = Sentinel { primary, replica, sentinels };
        wait_until("the sentinels to know each other", FORM_LIMIT, || group.is_complete())?;
        Ok(group)
    }

    /// Starts one more sentinel that does not know the others and names `primary`, like one that missed every failover.
    pub fn start_outdated(primary: &Redis) -> Result<Redis> {
        let server_dir = Arc::new(TempServerDir::private()?);
        let monitor = format!("monitor {SERVICE} 127.0.0.1 {} 2", primary.port());
        with_free_ports(|| {
            let builder = Redis::builder().sentinel().setting("sentinel", &monitor);
            let sentinel = builder.launch(&server_dir, Port::for_server()?)?;
            sentinel.wait_until_ready()?;
            Ok(sentinel)
        })
    }

    /// The URL to give to a client: the sentinels and the name of the service.
    pub fn url(&self) -> String {
        let addresses: Vec<String> =
            self.sentinels.iter().map(|sentinel| sentinel.addr().to_string()).collect();
        format!("redis-sentinel://{}/{SERVICE}", addresses.join(","))
    }

    /// The initial primary.
    pub fn primary(&self) -> &Redis {
        &self.primary
    }

    /// The initial replica.
    pub fn replica(&self) -> &Redis {
        &self.replica
    }

    /// The three sentinels.
    pub fn sentinels(&self) -> &[Redis] {
        &self.sentinels
    }

    /// The primary's address according to the first sentinel that runs.
    pub fn current_primary(&self) -> Result<SocketAddr> {
        let running = self.sentinels.iter().find(|sentinel| sentinel.pid().is_ok());
        let sentinel = running.context("no sentinel runs")?;
        let reply = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE])?.ok()?;
        let address: Vec<String> = reply.items().iter().map(|item| item.text()).collect();
        Ok(address.join(":").parse()?)
    }

    fn is_complete(&self) -> bool {
        let count = |sentinel: &Redis, what| {
            sentinel.command(&["SENTINEL", what, SERVICE]).map_or(0, |list| list.items().len())
        };
        // A sentinel does not promote a replica whose link status it does not know.
        let knows_the_link = |sentinel: &Redis| {
            let list = sentinel.command(&["SENTINEL", "REPLICAS", SERVICE]);
            list.is_ok_and(|list| {
                let replica = list.items().iter().flat_map(RedisReply::items).map(RedisReply::text);
                let words: Vec<String> = replica.collect();
                words.windows(2).any(|pair| pair == ["master-link-status", "ok"])
            })
        };
        let linked = self.replica.command(&["INFO", "replication"]);
        linked.is_ok_and(|info| info.text().contains("master_link_status:up"))
            && self.sentinels.iter().all(|sentinel| {
                let quorum = sentinel.command(&["SENTINEL", "CKQUORUM", SERVICE]);
                quorum.is_ok_and(|reply| reply.text().starts_with("OK 3 usable"))
                    && count(sentinel, "SENTINELS") == SENTINELS - 1
                    && count(sentinel, "REPLICAS") == 1
                    && knows_the_link(sentinel)
            })
    }
}

/// Starts the sentinels with the others already configured, because discovery takes several seconds.
fn start_sentinels(
    server_dir: &Arc<TempServerDir>,
    primary: &Redis,
    replica: &Redis,
    password: Option<&str>,
) -> Result<Vec<Redis>> {
    let ports = (0..SENTINELS).map(|_| Port::for_server()).collect::<Result<Vec<_>>>()?;
    let identities: Vec<(u16, String)> =
        ports.iter().map(|port| (port.number, format!("{:040x}", port.number))).collect();

    let mut sentinels = Vec::new();
    for (port, (_, identity)) in ports.into_iter().zip(&identities) {
        let monitor = format!("monitor {SERVICE} 127.0.0.1 {} 2", primary.port());
        let known_replica = format!("known-replica {SERVICE} 127.0.0.1 {}", replica.port());
        let mut builder = Redis::builder()
            .sentinel()
            .setting("sentinel", &format!("myid {identity}"))
            .setting("sentinel", &monitor)
            .setting("sentinel", &format!("down-after-milliseconds {SERVICE} 1000"))
            .setting("sentinel", &format!("failover-timeout {SERVICE} 3000"))
            .setting("sentinel", &known_replica);
        if let Some(password) = password {
            let between = format!("sentinel-pass \"{password}\"");
            builder = builder.password(password).setting("sentinel", &between);
        }
        for (number, other) in identities.iter().filter(|(number, _)| *number != port.number) {
            let known = format!("known-sentinel {SERVICE} 127.0.0.1 {number} {other}");
            builder = builder.setting("sentinel", &known);
        }
        sentinels.push(builder.launch(server_dir, port)?);
    }
    for sentinel in &sentinels {
        sentinel.wait_until_ready()?;
    }
    Ok(sentinels)
}

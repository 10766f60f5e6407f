//! The nodes of a cluster and the slot map.
//!
//! Upstream: `client`. Guarantees: a redirection updates the map at once; a refresh skips nodes that do not answer, asks
//! replicas too, and uses a connection of its own, so that a slow answer affects no other call; while no node answers, all
//! callers share one refresh after a delay, and its error; the connection of a redirection is kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::command::{Commands, EncodedCommands};
use super::connection::{ConnectError, ConnectionSettings};
use super::error::ReplyError;
use super::keys::SLOTS;
use super::node::{Node, NodeAddress};
use super::reconnect::ReconnectPacer;
use super::reply::{Cursor, RespReplies, RespValue};
use super::url::Address;
use crate::error::StreamError;

/// Timeout of `CLUSTER SLOTS` and other queries on one node before the next node is asked.
const NODE_QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// A refresh is skipped if the last one is younger than this: concurrent callers share it.
const FRESH: Duration = Duration::from_millis(50);
/// Nodes of redirections that are kept.
const OTHERS_MAX: usize = 64;
/// Marks a slot without a node.
const UNASSIGNED: u16 = u16::MAX;

/// The nodes of a cluster.
pub(super) struct ClusterNodes {
    seeds: Vec<Address>,
    settings: ConnectionSettings,
    map: Mutex<Arc<SlotMap>>,
    /// Nodes of redirections that are not in the map: a slot is being moved to a node that had none.
    others: Mutex<Vec<Arc<Node>>>,
    refreshed: tokio::sync::Mutex<TopologySource>,
    /// Paces the refreshes after one that no node answered.
    pacer: ReconnectPacer,
    /// The primaries again, with connections for queries with a short deadline.
    queried: Mutex<Vec<Arc<Node>>>,
}

/// Where the map comes from.
#[derive(Default)]
struct TopologySource {
    /// When it was last refreshed.
    at: Option<Instant>,
    /// The node that answered then, with a connection for this alone.
    node: Option<Arc<Node>>,
}

/// The primaries, and for each slot the index of its primary.
#[derive(Clone)]
struct SlotMap {
    primaries: Vec<Arc<Node>>,
    owners: Vec<u16>,
    /// They know the slots too, if no primary answers.
    replicas: Vec<Address>,
}

/// A range of slots, its primary and its replicas.
struct AssignedSlots {
    first: u16,
    last: u16,
    primary: Address,
    replicas: Vec<Address>,
}

impl ClusterNodes {
    pub(super) fn new(seeds: Vec<Address>, settings: ConnectionSettings) -> Self {
        let map = SlotMap::empty();
        Self {
            seeds,
            settings,
            map: Mutex::new(Arc::new(map)),
            others: Mutex::default(),
            refreshed: tokio::sync::Mutex::default(),
            pacer: ReconnectPacer::default(),
            queried: Mutex::default(),
        }
    }

    /// The primary of the slot, if known.
    pub(super) fn node_for_slot(&self, slot: u16) -> Option<Arc<Node>> {
        let map = self.lock();
        let owner = *map.owners.get(usize::from(slot))?;
        map.primaries.get(usize::from(owner)).cloned()
    }

    /// All known primaries.
    pub(super) fn primaries(&self) -> Vec<Arc<Node>> {
        self.lock().primaries.clone()
    }

    /// Records a `MOVED` redirection.
    pub(super) fn on_moved(&self, slot: u16, address: &Address) {
        let node = self.node(address);
        let mut current = self.lock();
        let mut map = SlotMap::clone(&current);
        let index = match map.primaries.iter().position(|known| Arc::ptr_eq(known, &node)) {
            Some(index) => index,
            None => {
                map.primaries.push(node);
                map.primaries.len() - 1
            }
        };
        if let (Some(owner), Ok(index)) =
            (map.owners.get_mut(usize::from(slot)), u16::try_from(index))
        {
            *owner = index;
        }
        *current = Arc::new(map);
    }

    /// The address of a redirection of this slot. A server that does not know its own host leaves it out: it is the host of the
    /// server that replied.
    pub(super) fn redirect_address(&self, slot: u16, text: &str) -> Option<Address> {
        let Some(port) = text.strip_prefix(':').or_else(|| text.strip_prefix("?:")) else {
            return Address::parse(text, 0).ok();
        };
        let replied = self.node_for_slot(slot);
        let replied = replied.as_ref().and_then(|node| node.address()).or(self.seeds.first())?;
        Some(Address { host: replied.host.clone(), port: port.parse().ok()? })
    }

    /// The known node at this address, or a new one.
    pub(super) fn node(&self, address: &Address) -> Arc<Node> {
        let is_same = |node: &&Arc<Node>| node.address() == Some(address);
        if let Some(known) = self.lock().primaries.iter().find(is_same) {
            return Arc::clone(known);
        }
        let mut others = self.others.lock().expect("no code panics while it holds this lock");
        if let Some(known) = others.iter().find(is_same) {
            return Arc::clone(known);
        }
        if others.len() >= OTHERS_MAX {
            others.clear();
        }
        let node = self.new_node(address);
        others.push(Arc::clone(&node));
        node
    }

    fn new_node(&self, address: &Address) -> Arc<Node> {
        Arc::new(Node::new(NodeAddress::Fixed(address.clone()), self.settings.clone()))
    }

    /// Refreshes the slot map from the first node that answers; `suspect` is asked last. Fails if none answers before the
    /// deadline, also if that was found by another caller meanwhile.
    pub(super) async fn refresh(
        &self,
        suspect: Option<&Address>,
        deadline: Instant,
    ) -> Result<(), ConnectError> {
        let failures = self.pacer.failures();
        let late = || ConnectError::NotReady {
            address: self.seeds[0].clone(),
            problem: "no node of the cluster answered within the deadline".to_owned(),
        };
        if deadline <= Instant::now() {
            return Err(late());
        }
        let refreshing = async {
            let mut refreshed = self.refreshed.lock().await;
            if refreshed.at.is_some_and(|at| at.elapsed() < FRESH) {
                return Ok(());
            }
            if let Some(error) = self.pacer.error_since(failures) {
                return Err(error);
            }
            self.pacer.run(deadline, self.refresh_now(&mut refreshed, suspect)).await
        };
        // An attempt that its caller has no time for says nothing about the nodes, so it is dropped and not recorded.
        timeout_at(deadline, refreshing).await.unwrap_or_else(|_| Err(late()))
    }

    async fn refresh_now(
        &self,
        refreshed: &mut TopologySource,
        suspect: Option<&Address>,
    ) -> Result<(), ConnectError> {
        let mut nodes: Vec<Arc<Node>> = refreshed.node.take().into_iter().collect();
        let (primaries, replicas) = (self.primaries(), self.lock().replicas.clone());
        let primaries = primaries.iter().filter_map(|node| node.address());
        for address in primaries.chain(&self.seeds).chain(&replicas) {
            if nodes.iter().all(|node| node.address() != Some(address)) {
                nodes.push(self.new_node(address));
            }
        }
        nodes.sort_by_key(|node| node.address() == suspect);
        let mut last = None;
        for node in nodes {
            match self.refresh_from(&node, Instant::now() + NODE_QUERY_TIMEOUT).await {
                Ok(()) => {
                    *refreshed = TopologySource { at: Some(Instant::now()), node: Some(node) };
                    return Ok(());
                }
                Err(error) => last = Some(error),
            }
        }
        last.map_or(Ok(()), Err)
    }

    /// Sends commands that every primary can answer, over connections for this alone, so that a late reply affects no other
    /// call. Returns the first replies without errors; `None` if all replies have some.
    pub(super) async fn query_any(
        &self,
        query: &EncodedCommands,
        deadline: Instant,
    ) -> Result<Option<RespReplies>, ConnectError> {
        if self.primaries().is_empty() {
            self.refresh(None, deadline).await?;
        }
        let (mut has_replied, mut last) = (false, None);
        for node in self.query_nodes() {
            let soon = deadline.min(Instant::now() + NODE_QUERY_TIMEOUT);
            match node.send(&query.bytes, query.len(), soon).await {
                Ok(Ok(replies)) if !replies.may_contain_errors() => return Ok(Some(replies)),
                Ok(Ok(_)) => has_replied = true,
                Ok(Err(error)) => {
                    last = node.address().map(|address| ConnectError::NotReady {
                        address: address.clone(),
                        problem: error.to_string(),
                    });
                }
                Err(error) => last = Some(error),
            }
        }
        match last {
            Some(error) if !has_replied => Err(error),
            _ => Ok(None),
        }
    }

    fn query_nodes(&self) -> Vec<Arc<Node>> {
        let primaries = self.primaries();
        let mut queried = self.queried.lock().expect("no code panics while it holds this lock");
        *queried = primaries
            .iter()
            .filter_map(|primary| primary.address())
            .map(|address| {
                let known = queried.iter().find(|node| node.address() == Some(address));
                known.map_or_else(|| self.new_node(address), Arc::clone)
            })
            .collect();
        queried.clone()
    }

    async fn refresh_from(&self, node: &Arc<Node>, deadline: Instant) -> Result<(), ConnectError> {
        let Some(address) = node.address() else { return Ok(()) };
        let query = Commands::one(&["CLUSTER", "SLOTS"]).encode();
        let not_ready =
            |problem: String| ConnectError::NotReady { address: address.clone(), problem };
        let replies = match node.send(&query.bytes, 1, deadline).await? {
            Ok(replies) => replies,
            Err(error) => return Err(not_ready(error.to_string())),
        };
        let ranges = read(&replies, address).map_err(|error| match error {
            ReplyError::Server(error) if error.text().contains("cluster support disabled") => {
                ConnectError::Fatal(StreamError::invalid(
                    "the stream URL",
                    "this server is not part of a cluster; use redis://",
                ))
            }
            error => not_ready(error.into_stream_error("CLUSTER SLOTS").to_string()),
        })?;
        if ranges.is_empty() {
            return Err(not_ready("no slots are assigned".to_owned()));
        }
        self.replace(ranges);
        Ok(())
    }

    fn replace(&self, ranges: Vec<AssignedSlots>) {
        let mut nodes: HashMap<Address, u16> = HashMap::new();
        let mut map = SlotMap::empty();
        for AssignedSlots { first, last, primary, replicas } in ranges {
            for replica in replicas {
                if !map.replicas.contains(&replica) {
                    map.replicas.push(replica);
                }
            }
            let index = *nodes.entry(primary).or_insert_with_key(|address| {
                map.primaries.push(self.node(address));
                (map.primaries.len() - 1) as u16
            });
            if let Some(owners) = map.owners.get_mut(usize::from(first)..=usize::from(last)) {
                owners.fill(index);
            }
        }
        let is_primary =
            |node: &Arc<Node>| map.primaries.iter().any(|known| Arc::ptr_eq(known, node));
        self.others
            .lock()
            .expect("no code panics while it holds this lock")
            .retain(|node| !is_primary(node));
        *self.lock() = Arc::new(map);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<SlotMap>> {
        self.map.lock().expect("no code panics while it holds this lock")
    }
}

impl SlotMap {
    fn empty() -> Self {
        let (primaries, replicas) = Default::default();
        Self { primaries, owners: vec![UNASSIGNED; SLOTS], replicas }
    }
}

/// Parses the reply of `CLUSTER SLOTS`: slot ranges with their primary and replicas.
fn read(replies: &RespReplies, queried: &Address) -> Result<Vec<AssignedSlots>, ReplyError> {
    let mut cursor = replies.cursor();
    let ranges = cursor.array()?;
    let slot = |number: u64| {
        u16::try_from(number)
            .ok()
            .filter(|slot| usize::from(*slot) < SLOTS)
            .ok_or_else(|| ReplyError::unexpected(format!("expected a slot, got {number}")))
    };
    let mut found = Vec::new();
    for _ in 0..ranges {
        let values = cursor.array()?;
        let (first, last) = (slot(cursor.count()?)?, slot(cursor.count()?)?);
        let primary = read_node(&mut cursor, queried)?;
        let replicas = (3..values).map(|_| read_node(&mut cursor, queried));
        let replicas = replicas.collect::<Result<_, _>>()?;
        if first <= last {
            found.push(AssignedSlots { first, last, primary, replicas });
        }
    }
    Ok(found)
}

/// Parses host and port of a node, and skips its id and further details.
fn read_node(cursor: &mut Cursor<'_>, queried: &Address) -> Result<Address, ReplyError> {
    let details = cursor.array()?;
    let host = match cursor.value()? {
        // The node does not know its own host name: use the address of this connection.
        RespValue::Nil | RespValue::Text(b"" | b"?") => queried.host.clone(),
        RespValue::Text(host) => String::from_utf8_lossy(host).into_owned(),
        _ => return Err(ReplyError::unexpected("expected a host")),
    };
    let port =
        u16::try_from(cursor.count()?).map_err(|_| ReplyError::unexpected("expected a port"))?;
    let rest = details.checked_sub(2).ok_or_else(|| ReplyError::unexpected("too few values"))?;
    cursor.skip(rest)?;
    Ok(Address { host, port })
}

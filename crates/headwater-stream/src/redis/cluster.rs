//! The nodes of a cluster and the slot map.
//!
//! Upstream: `client`. Guarantees: a redirection updates the map at once; a refresh skips nodes that do not answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::command::Commands;
use super::connection::ConnectError;
use super::error::ReplyError;
use super::keys::SLOTS;
use super::node::{ConnectionSettings, Node, NodeAddress};
use super::reply::{RespReplies, RespValue};
use super::url::Address;
use crate::error::StreamError;

/// Timeout of `CLUSTER SLOTS` on one node before the next node is asked.
pub(super) const NODE_QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// A refresh is skipped if the last one is younger than this: concurrent callers share it.
const FRESH: Duration = Duration::from_millis(50);
/// Marks a slot without a node.
const UNASSIGNED: u16 = u16::MAX;

/// The nodes of a cluster.
pub(super) struct ClusterNodes {
    seeds: Vec<Address>,
    settings: ConnectionSettings,
    map: Mutex<Arc<SlotMap>>,
    /// When the map was last refreshed.
    refreshed: tokio::sync::Mutex<Option<Instant>>,
}

/// The primaries, and for each slot the index of its primary.
#[derive(Clone)]
struct SlotMap {
    primaries: Vec<Arc<Node>>,
    owners: Vec<u16>,
}

impl ClusterNodes {
    pub(super) fn new(seeds: Vec<Address>, settings: ConnectionSettings) -> Self {
        let map = SlotMap { primaries: Vec::new(), owners: vec![UNASSIGNED; SLOTS] };
        Self {
            seeds,
            settings,
            map: Mutex::new(Arc::new(map)),
            refreshed: tokio::sync::Mutex::default(),
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

    /// The known node at this address, or a new one.
    pub(super) fn node(&self, address: &Address) -> Arc<Node> {
        let known = self.lock().primaries.iter().find(|n| n.address() == Some(address)).cloned();
        known.unwrap_or_else(|| {
            Arc::new(Node::new(NodeAddress::Fixed(address.clone()), self.settings.clone()))
        })
    }

    /// Refreshes the slot map from the first node that answers; `suspect` is asked last.
    pub(super) async fn refresh(
        &self,
        suspect: Option<&Address>,
        deadline: Instant,
    ) -> Result<(), ConnectError> {
        let Ok(mut refreshed) = timeout_at(deadline, self.refreshed.lock()).await else {
            return Ok(());
        };
        if refreshed.is_some_and(|at| at.elapsed() < FRESH) {
            return Ok(());
        }
        let mut nodes = self.primaries();
        for seed in &self.seeds {
            if nodes.iter().all(|node| node.address() != Some(seed)) {
                nodes.push(self.node(seed));
            }
        }
        nodes.sort_by_key(|node| node.address() == suspect);
        let mut last = None;
        for node in nodes {
            match self.refresh_from(&node, deadline.min(Instant::now() + NODE_QUERY_TIMEOUT)).await
            {
                Ok(()) => {
                    *refreshed = Some(Instant::now());
                    return Ok(());
                }
                Err(error) => last = Some(error),
            }
        }
        last.map_or(Ok(()), Err)
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

    fn replace(&self, ranges: Vec<(u16, u16, Address)>) {
        let mut nodes: HashMap<Address, u16> = HashMap::new();
        let mut map = SlotMap { primaries: Vec::new(), owners: vec![UNASSIGNED; SLOTS] };
        for (first, last, address) in ranges {
            let index = *nodes.entry(address).or_insert_with_key(|address| {
                map.primaries.push(self.node(address));
                (map.primaries.len() - 1) as u16
            });
            if let Some(owners) = map.owners.get_mut(usize::from(first)..=usize::from(last)) {
                owners.fill(index);
            }
        }
        *self.lock() = Arc::new(map);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<SlotMap>> {
        self.map.lock().expect("no code panics while it holds this lock")
    }
}

/// Parses the reply of `CLUSTER SLOTS`: slot ranges and the primary of each.
fn read(replies: &RespReplies, queried: &Address) -> Result<Vec<(u16, u16, Address)>, ReplyError> {
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
        let details = cursor.array()?;
        let host = match cursor.value()? {
            // The node does not know its own host name: use the address of this connection.
            RespValue::Nil | RespValue::Text(b"" | b"?") => queried.host.clone(),
            RespValue::Text(host) => String::from_utf8_lossy(host).into_owned(),
            _ => return Err(ReplyError::unexpected("expected a host")),
        };
        let port = u16::try_from(cursor.count()?)
            .map_err(|_| ReplyError::unexpected("expected a port"))?;
        let rest = |values: usize, read: usize| {
            values.checked_sub(read).ok_or_else(|| ReplyError::unexpected("too few values"))
        };
        cursor.skip(rest(details, 2)? + rest(values, 3)?)?;
        if first <= last {
            found.push((first, last, Address { host, port }));
        }
    }
    Ok(found)
}

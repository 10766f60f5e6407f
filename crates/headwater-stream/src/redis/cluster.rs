//! The nodes of a cluster and the slots they own.
//!
//! Upstream: `servers`. Promises: a redirection is learned at once; a node that does not answer is passed over when the
//! others are asked who owns what.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::command::Commands;
use super::connection::ConnectError;
use super::error::Failure;
use super::keys::SLOTS;
use super::node::{Manners, Node, Target};
use super::reply::{Replies, Value};
use super::url::Address;
use crate::error::StreamError;

/// How long one node may take to say who owns what before the next one is asked.
pub(super) const ASK_MAX: Duration = Duration::from_secs(1);
/// Callers that want to know at the same time share one answer for this long.
const FRESH: Duration = Duration::from_millis(50);
/// No node owns the slot.
const NOBODY: u16 = u16::MAX;

/// The nodes of a cluster.
pub(super) struct Cluster {
    seeds: Vec<Address>,
    manners: Manners,
    map: Mutex<Arc<SlotMap>>,
    /// When the map was last asked for.
    asked: tokio::sync::Mutex<Option<Instant>>,
}

/// Who owns what.
#[derive(Clone)]
struct SlotMap {
    primaries: Vec<Arc<Node>>,
    owners: Vec<u16>,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Address>, manners: Manners) -> Self {
        let map = SlotMap { primaries: Vec::new(), owners: vec![NOBODY; SLOTS] };
        Self {
            seeds,
            manners,
            map: Mutex::new(Arc::new(map)),
            asked: tokio::sync::Mutex::default(),
        }
    }

    /// The node that owns the slot, as far as is known.
    pub(super) fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        let map = self.lock();
        let owner = *map.owners.get(usize::from(slot))?;
        map.primaries.get(usize::from(owner)).cloned()
    }

    /// All primaries, as far as is known.
    pub(super) fn primaries(&self) -> Vec<Arc<Node>> {
        self.lock().primaries.clone()
    }

    /// Learns that the slot belongs to another node from now on.
    pub(super) fn moved(&self, slot: u16, address: &Address) {
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

    /// The node at this address: a known one, or a new one.
    pub(super) fn node(&self, address: &Address) -> Arc<Node> {
        let known = self.lock().primaries.iter().find(|n| n.address() == Some(address)).cloned();
        known.unwrap_or_else(|| {
            Arc::new(Node::new(Target::Fixed(address.clone()), self.manners.clone()))
        })
    }

    /// Asks the nodes who owns what, `suspect` last.
    pub(super) async fn refresh(
        &self,
        suspect: Option<&Address>,
        deadline: Instant,
    ) -> Result<(), ConnectError> {
        let Ok(mut asked) = timeout_at(deadline, self.asked.lock()).await else { return Ok(()) };
        if asked.is_some_and(|asked| asked.elapsed() < FRESH) {
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
            match self.ask(&node, deadline.min(Instant::now() + ASK_MAX)).await {
                Ok(()) => {
                    *asked = Some(Instant::now());
                    return Ok(());
                }
                Err(error) => last = Some(error),
            }
        }
        last.map_or(Ok(()), Err)
    }

    async fn ask(&self, node: &Arc<Node>, deadline: Instant) -> Result<(), ConnectError> {
        let Some(address) = node.address() else { return Ok(()) };
        let question = Commands::one(&["CLUSTER", "SLOTS"]).pack();
        let not_yet = |problem: String| ConnectError::NotYet { address: address.clone(), problem };
        let replies = match node.send(&question.bytes, 1, deadline).await? {
            Ok(replies) => replies,
            Err(broken) => return Err(not_yet(broken.to_string())),
        };
        let ranges = read(&replies, address).map_err(|failure| match failure {
            Failure::Refused(refusal) if refusal.text().contains("cluster support disabled") => {
                ConnectError::Refused(StreamError::invalid(
                    "the stream URL",
                    "this server is not part of a cluster; write redis://",
                ))
            }
            failure => not_yet(failure.about("CLUSTER SLOTS").to_string()),
        })?;
        if ranges.is_empty() {
            return Err(not_yet("it knows of no slots".to_owned()));
        }
        self.replace(ranges);
        Ok(())
    }

    fn replace(&self, ranges: Vec<(u16, u16, Address)>) {
        let mut nodes: HashMap<Address, u16> = HashMap::new();
        let mut map = SlotMap { primaries: Vec::new(), owners: vec![NOBODY; SLOTS] };
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

/// Reads the reply of `CLUSTER SLOTS`: ranges of slots and the primary of each.
fn read(replies: &Replies, asked: &Address) -> Result<Vec<(u16, u16, Address)>, Failure> {
    let mut cursor = replies.cursor();
    let ranges = cursor.array()?;
    let slot = |number: u64| {
        u16::try_from(number)
            .ok()
            .filter(|slot| usize::from(*slot) < SLOTS)
            .ok_or_else(|| Failure::shape(format!("{number} instead of a slot")))
    };
    let mut found = Vec::new();
    for _ in 0..ranges {
        let values = cursor.array()?;
        let (first, last) = (slot(cursor.count()?)?, slot(cursor.count()?)?);
        let details = cursor.array()?;
        let host = match cursor.value()? {
            // The node does not know its own name; it is where we asked.
            Value::Nil | Value::Text(b"" | b"?") => asked.host.clone(),
            Value::Text(host) => String::from_utf8_lossy(host).into_owned(),
            _ => return Err(Failure::shape("no host")),
        };
        let port = u16::try_from(cursor.count()?).map_err(|_| Failure::shape("no port"))?;
        let rest = |values: usize, read: usize| {
            values.checked_sub(read).ok_or_else(|| Failure::shape("too few values"))
        };
        cursor.skip(rest(details, 2)? + rest(values, 3)?)?;
        if first <= last {
            found.push((first, last, Address { host, port }));
        }
    }
    Ok(found)
}

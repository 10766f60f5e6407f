//! Deduplication records: which ids are in progress or done, and until when.
//!
//! Records are stored in shards behind shared pointers, so a snapshot is cheap. Each insert removes a few
//! expired records, so memory is proportional to the number of live records.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;

use crate::clock::Timestamp;

const SHARDS: usize = 256;

/// Expired records removed per insert: two, so that removal is faster than insertion.
const EXPIRED_PER_INSERT: usize = 2;

#[derive(Clone, Debug)]
pub(in crate::embedded) struct DedupTable {
    shards: Vec<Arc<Shard>>,
}

#[derive(Clone, Debug, Default)]
struct Shard {
    records: HashMap<Arc<str>, DedupRecord>,
    by_expiry: BTreeSet<(Timestamp, Arc<str>)>,
}

/// What is known of an id until it expires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::embedded) struct DedupRecord {
    /// The result value; `None` while the id is in progress.
    pub(in crate::embedded) done: Option<Bytes>,
    pub(in crate::embedded) until: Timestamp,
}

/// The scope for `append_once` on a stream. It cannot collide with a deduplication scope because names
/// contain no control characters.
pub(in crate::embedded) fn append_once_scope(stream: &str) -> String {
    format!("\u{1}{stream}")
}

/// Approximate memory use of a record in bytes.
pub(in crate::embedded) fn dedup_footprint(scope: &str, id: &str, done: Option<&Bytes>) -> u64 {
    const PER_MARK: usize = 160;
    (PER_MARK + scope.len() + id.len() + done.map_or(0, Bytes::len)) as u64
}

impl Default for DedupTable {
    fn default() -> Self {
        Self { shards: vec![Arc::default(); SHARDS] }
    }
}

impl DedupTable {
    /// The record of an id, unless it has expired.
    pub(in crate::embedded) fn get(
        &self,
        scope: &str,
        id: &str,
        now: Timestamp,
    ) -> Option<&DedupRecord> {
        let key = key(scope, id);
        let record = self.shards[shard_of(&key)].records.get(&*key)?;
        (record.until > now).then_some(record)
    }

    /// Sets a record. Returns the number of bytes added and freed.
    pub(super) fn set(
        &mut self,
        scope: &str,
        id: &str,
        record: DedupRecord,
        now: Timestamp,
    ) -> (u64, u64) {
        let key = key(scope, id);
        let shard = Arc::make_mut(&mut self.shards[shard_of(&key)]);
        let mut freed = shard.remove(&key);
        for _ in 0..EXPIRED_PER_INSERT {
            match shard.by_expiry.first() {
                Some((end, expired)) if *end <= now => {
                    let expired = expired.clone();
                    freed += shard.remove(&expired);
                }
                _ => break,
            }
        }
        let added = dedup_footprint(scope, id, record.done.as_ref());
        let key: Arc<str> = key.into();
        shard.by_expiry.insert((record.until, key.clone()));
        shard.records.insert(key, record);
        (added, freed)
    }

    /// Removes a record. Returns the number of bytes freed.
    pub(super) fn remove(&mut self, scope: &str, id: &str) -> u64 {
        let key = key(scope, id);
        Arc::make_mut(&mut self.shards[shard_of(&key)]).remove(&key)
    }

    /// All records, including expired ones that are not removed yet.
    pub(in crate::embedded) fn iter(&self) -> impl Iterator<Item = (&str, &str, &DedupRecord)> {
        self.shards.iter().flat_map(|shard| &shard.records).map(|(key, record)| {
            let (scope, id) = split(key);
            (scope, id, record)
        })
    }
}

impl Shard {
    fn remove(&mut self, key: &str) -> u64 {
        let Some((key, record)) = self.records.remove_entry(key) else { return 0 };
        let (scope, id) = split(&key);
        let freed = dedup_footprint(scope, id, record.done.as_ref());
        self.by_expiry.remove(&(record.until, key));
        freed
    }
}

// A scope contains no control characters, so the first one ends it.
fn key(scope: &str, id: &str) -> String {
    format!("{scope}\0{id}")
}

fn split(key: &str) -> (&str, &str) {
    key.split_once('\0').unwrap_or((key, ""))
}

fn shard_of(key: &str) -> usize {
    crc32fast::hash(key.as_bytes()) as usize % SHARDS
}

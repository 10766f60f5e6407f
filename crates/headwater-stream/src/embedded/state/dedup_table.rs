//! De-duplication marks: which ids were begun or done, until when.
//!
//! They lie in shards behind shared pointers, so that a snapshot is cheap, and lapsed marks go a few at a time with
//! every new one: the memory follows the number of marks that live.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;

use crate::clock::Timestamp;

const SHARDS: usize = 256;

/// How many lapsed marks one new mark clears away: two, so that clearing is faster than marking.
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

/// What is known of an id until a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::embedded) struct DedupRecord {
    /// The value it was done with; `None` while it is only begun.
    pub(in crate::embedded) done: Option<Bytes>,
    pub(in crate::embedded) until: Timestamp,
}

/// The scope of entries that were appended once to a stream. No scope of de-duplication begins like this, for names
/// hold no control characters.
pub(in crate::embedded) fn append_once_scope(stream: &str) -> String {
    format!("\u{1}{stream}")
}

/// About how many bytes of memory a mark takes.
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
    /// The mark of an id that has not lapsed.
    pub(in crate::embedded) fn get(
        &self,
        scope: &str,
        id: &str,
        now: Timestamp,
    ) -> Option<&DedupRecord> {
        let key = key(scope, id);
        let mark = self.shards[shard_of(&key)].records.get(&*key)?;
        (mark.until > now).then_some(mark)
    }

    /// Sets a mark. Returns by how many bytes the memory grew and shrank.
    pub(super) fn set(
        &mut self,
        scope: &str,
        id: &str,
        mark: DedupRecord,
        now: Timestamp,
    ) -> (u64, u64) {
        let key = key(scope, id);
        let shard = Arc::make_mut(&mut self.shards[shard_of(&key)]);
        let mut freed = shard.remove(&key);
        for _ in 0..EXPIRED_PER_INSERT {
            match shard.by_expiry.first() {
                Some((end, lapsed)) if *end <= now => {
                    let lapsed = lapsed.clone();
                    freed += shard.remove(&lapsed);
                }
                _ => break,
            }
        }
        let added = dedup_footprint(scope, id, mark.done.as_ref());
        let key: Arc<str> = key.into();
        shard.by_expiry.insert((mark.until, key.clone()));
        shard.records.insert(key, mark);
        (added, freed)
    }

    /// Takes a mark away. Returns how many bytes that freed.
    pub(super) fn remove(&mut self, scope: &str, id: &str) -> u64 {
        let key = key(scope, id);
        Arc::make_mut(&mut self.shards[shard_of(&key)]).remove(&key)
    }

    /// All marks, lapsed ones that were not cleared away yet included.
    pub(in crate::embedded) fn iter(&self) -> impl Iterator<Item = (&str, &str, &DedupRecord)> {
        self.shards.iter().flat_map(|shard| &shard.records).map(|(key, mark)| {
            let (scope, id) = split(key);
            (scope, id, mark)
        })
    }
}

impl Shard {
    fn remove(&mut self, key: &str) -> u64 {
        let Some((key, mark)) = self.records.remove_entry(key) else { return 0 };
        let (scope, id) = split(&key);
        let freed = dedup_footprint(scope, id, mark.done.as_ref());
        self.by_expiry.remove(&(mark.until, key));
        freed
    }
}

// A scope holds no control characters, so the first of them ends it.
fn key(scope: &str, id: &str) -> String {
    format!("{scope}\0{id}")
}

fn split(key: &str) -> (&str, &str) {
    key.split_once('\0').unwrap_or((key, ""))
}

fn shard_of(key: &str) -> usize {
    crc32fast::hash(key.as_bytes()) as usize % SHARDS
}

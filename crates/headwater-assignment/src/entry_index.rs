//! Index of pending input entries: which entry names which stream.
//!
//! A list of pending entries contains ids, not fields. Entries never change, so each is read once and looked
//! up here afterwards. The index may be stale: other consumers settle entries at any time.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use headwater_stream::{EntryId, StreamName};

/// Maximum number of entries: some hundred bytes each.
const ENTRIES_MAX: usize = 1_000_000;

#[derive(Debug, Default)]
pub(crate) struct EntryIndex {
    /// `None` for a malformed entry.
    entries: BTreeMap<EntryId, Option<StreamName>>,
    ids: HashMap<StreamName, BTreeSet<EntryId>>,
    /// How far scans have got. A group delivers in id order, so later deliveries have greater ids.
    scanned_to: Option<EntryId>,
}

impl EntryIndex {
    /// The stream of an entry: unknown, malformed, or known.
    pub(crate) fn get(&self, id: EntryId) -> Option<Option<&StreamName>> {
        self.entries.get(&id).map(Option::as_ref)
    }

    /// The entries that name a stream, oldest first.
    pub(crate) fn ids_of(&self, stream: &StreamName) -> Vec<EntryId> {
        self.ids.get(stream).map_or_else(Vec::new, |ids| ids.iter().copied().collect())
    }

    pub(crate) fn contains(&self, stream: &StreamName) -> bool {
        self.ids.contains_key(stream)
    }

    pub(crate) fn scanned_to(&self) -> Option<EntryId> {
        self.scanned_to
    }

    /// Records that everything pending up to this id has been scanned.
    pub(crate) fn set_scanned_to(&mut self, id: EntryId) {
        self.scanned_to = self.scanned_to.max(Some(id));
    }

    /// Adds an entry. Beyond the limit the oldest is evicted, and read again by the next scan.
    pub(crate) fn insert(&mut self, id: EntryId, stream: Option<StreamName>) {
        if self.entries.len() >= ENTRIES_MAX
            && let Some((oldest, _)) = self.entries.first_key_value()
        {
            self.remove(*oldest);
        }
        if let Some(stream) = &stream {
            self.ids.entry(stream.clone()).or_default().insert(id);
        }
        self.entries.insert(id, stream);
    }

    pub(crate) fn remove(&mut self, id: EntryId) {
        let Some(Some(stream)) = self.entries.remove(&id) else { return };
        if let Some(ids) = self.ids.get_mut(&stream) {
            ids.remove(&id);
            if ids.is_empty() {
                self.ids.remove(&stream);
            }
        }
    }

    /// Removes entries after `after` and up to `to` that are not in `scanned`.
    pub(crate) fn retain(
        &mut self,
        after: Option<EntryId>,
        to: EntryId,
        scanned: &HashSet<EntryId>,
    ) {
        let from = after.map_or(EntryId::MIN, EntryId::next);
        if from > to {
            return;
        }
        let settled: Vec<EntryId> = self
            .entries
            .range(from..=to)
            .map(|(id, _)| *id)
            .filter(|id| !scanned.contains(id))
            .collect();
        for id in settled {
            self.remove(id);
        }
    }

    /// Clears the index after the group was recreated.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The greatest id before this one; `None` for the first.
pub(crate) fn before(id: EntryId) -> Option<EntryId> {
    match (id.ms, id.seq) {
        (0, 0) => None,
        (ms, 0) => Some(EntryId::new(ms - 1, u64::MAX)),
        (ms, seq) => Some(EntryId::new(ms, seq - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(name: &str) -> StreamName {
        StreamName::new(name).unwrap()
    }

    #[test]
    fn a_stream_that_was_added_twice_has_both_entries() {
        let mut index = EntryIndex::default();
        for (ms, name) in [(2, "a"), (1, "a"), (3, "b")] {
            index.insert(EntryId::new(ms, 0), Some(stream(name)));
        }
        assert_eq!(index.ids_of(&stream("a")), [EntryId::new(1, 0), EntryId::new(2, 0)]);

        index.remove(EntryId::new(1, 0));
        assert!(index.contains(&stream("a")));
        index.remove(EntryId::new(2, 0));
        assert!(!index.contains(&stream("a")));
    }

    #[test]
    fn a_scan_removes_entries_in_its_range_that_are_no_longer_pending() {
        let mut index = EntryIndex::default();
        for ms in 1..=5 {
            index.insert(EntryId::new(ms, 0), (ms != 2).then(|| stream(&format!("s{ms}"))));
        }
        let scanned = HashSet::from([EntryId::new(3, 0)]);
        index.retain(Some(EntryId::new(1, 0)), EntryId::new(4, 0), &scanned);

        let left: Vec<u64> =
            (1..=5).filter(|ms| index.get(EntryId::new(*ms, 0)).is_some()).collect();
        assert_eq!(left, [1, 3, 5]);
        assert!(!index.contains(&stream("s4")));
        index.retain(Some(EntryId::new(9, 0)), EntryId::new(5, 0), &scanned);
        assert!(index.contains(&stream("s5")));
    }

    #[test]
    fn before_is_the_inverse_of_next() {
        for id in [EntryId::new(7, 3), EntryId::new(7, 0), EntryId::new(0, 1)] {
            assert_eq!(before(id).unwrap().next(), id);
        }
        assert_eq!(before(EntryId::MIN), None);
    }
}

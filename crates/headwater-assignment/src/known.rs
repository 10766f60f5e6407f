//! Which pending input entry names which stream, as far as this process has seen.
//!
//! A listing of pending entries tells ids, not what they say. Names never change, so each entry is read once; from
//! then on a listing is enough. It is a memory, not the truth: entries may be settled by others at any time.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use headwater_stream::{EntryId, StreamName};

/// Entries remembered at most: some hundred bytes each.
const KNOWN_MAX: usize = 1_000_000;

#[derive(Debug, Default)]
pub(crate) struct Known {
    /// `None` for an entry that names no stream.
    entries: BTreeMap<EntryId, Option<StreamName>>,
    ids: HashMap<StreamName, BTreeSet<EntryId>>,
    /// How far listings have got. A group delivers in id order, so what it delivers later comes after this.
    listed_to: Option<EntryId>,
}

impl Known {
    /// What is known of an entry: nothing, that it names no stream, or its stream.
    pub(crate) fn get(&self, id: EntryId) -> Option<Option<&StreamName>> {
        self.entries.get(&id).map(Option::as_ref)
    }

    /// The entries that name a stream, oldest first.
    pub(crate) fn ids_of(&self, stream: &StreamName) -> Vec<EntryId> {
        self.ids.get(stream).map_or_else(Vec::new, |ids| ids.iter().copied().collect())
    }

    pub(crate) fn knows(&self, stream: &StreamName) -> bool {
        self.ids.contains_key(stream)
    }

    pub(crate) fn listed_to(&self) -> Option<EntryId> {
        self.listed_to
    }

    /// Everything pending up to this id has been listed.
    pub(crate) fn set_listed_to(&mut self, id: EntryId) {
        self.listed_to = self.listed_to.max(Some(id));
    }

    /// Remembers an entry; beyond the maximum the oldest is forgotten, and read again when it is listed.
    pub(crate) fn learn(&mut self, id: EntryId, stream: Option<StreamName>) {
        if self.entries.len() >= KNOWN_MAX
            && let Some((oldest, _)) = self.entries.first_key_value()
        {
            self.forget(*oldest);
        }
        if let Some(stream) = &stream {
            self.ids.entry(stream.clone()).or_default().insert(id);
        }
        self.entries.insert(id, stream);
    }

    pub(crate) fn forget(&mut self, id: EntryId) {
        let Some(Some(stream)) = self.entries.remove(&id) else { return };
        if let Some(ids) = self.ids.get_mut(&stream) {
            ids.remove(&id);
            if ids.is_empty() {
                self.ids.remove(&stream);
            }
        }
    }

    /// Forgets what lies after `after` and up to `to`, except for `listed`.
    pub(crate) fn keep_only(
        &mut self,
        after: Option<EntryId>,
        to: EntryId,
        listed: &HashSet<EntryId>,
    ) {
        let from = after.map_or(EntryId::MIN, EntryId::next);
        if from > to {
            return;
        }
        let settled: Vec<EntryId> = self
            .entries
            .range(from..=to)
            .map(|(id, _)| *id)
            .filter(|id| !listed.contains(id))
            .collect();
        for id in settled {
            self.forget(id);
        }
    }

    /// Forgets everything, for when the group has begun anew.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The largest id before this one, to list from; `None` for the first.
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
        let mut known = Known::default();
        for (ms, name) in [(2, "a"), (1, "a"), (3, "b")] {
            known.learn(EntryId::new(ms, 0), Some(stream(name)));
        }
        assert_eq!(known.ids_of(&stream("a")), [EntryId::new(1, 0), EntryId::new(2, 0)]);

        known.forget(EntryId::new(1, 0));
        assert!(known.knows(&stream("a")));
        known.forget(EntryId::new(2, 0));
        assert!(!known.knows(&stream("a")));
    }

    #[test]
    fn a_listing_forgets_what_it_covers_and_does_not_show() {
        let mut known = Known::default();
        for ms in 1..=5 {
            known.learn(EntryId::new(ms, 0), (ms != 2).then(|| stream(&format!("s{ms}"))));
        }
        let listed = HashSet::from([EntryId::new(3, 0)]);
        known.keep_only(Some(EntryId::new(1, 0)), EntryId::new(4, 0), &listed);

        let left: Vec<u64> =
            (1..=5).filter(|ms| known.get(EntryId::new(*ms, 0)).is_some()).collect();
        assert_eq!(left, [1, 3, 5]);
        assert!(!known.knows(&stream("s4")));
        known.keep_only(Some(EntryId::new(9, 0)), EntryId::new(5, 0), &listed);
        assert!(known.knows(&stream("s5")));
    }

    #[test]
    fn the_id_before_is_the_one_whose_next_it_is() {
        for id in [EntryId::new(7, 3), EntryId::new(7, 0), EntryId::new(0, 1)] {
            assert_eq!(before(id).unwrap().next(), id);
        }
        assert_eq!(before(EntryId::MIN), None);
    }
}

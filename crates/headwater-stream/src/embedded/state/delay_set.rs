//! Entries that wait for their time, in the order they are due.

use std::collections::{BTreeMap, HashMap};

use super::entries::footprint;
use crate::clock::Timestamp;
use crate::entry::Fields;
use crate::name::StreamName;

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct DelaySet {
    waiting: BTreeMap<(Timestamp, u64), Waiting>,
    due_of: HashMap<u64, Timestamp>,
    bytes: u64,
}

/// One entry that waits.
#[derive(Clone, Debug)]
pub(in crate::embedded) struct Waiting {
    pub(in crate::embedded) to: StreamName,
    pub(in crate::embedded) fields: Fields,
}

/// About how many bytes of memory a waiting entry takes.
pub(in crate::embedded) fn footprint_aside(fields: &Fields) -> u64 {
    const PER_WAITING: u64 = 96;
    footprint(fields) + PER_WAITING
}

impl DelaySet {
    pub(in crate::embedded) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(in crate::embedded) fn contains(&self, id: u64) -> bool {
        self.due_of.contains_key(&id)
    }

    /// When the first entry is due.
    pub(in crate::embedded) fn next_due(&self) -> Option<Timestamp> {
        self.waiting.keys().next().map(|(due, _)| *due)
    }

    /// All entries with their due times and numbers, earliest first.
    pub(in crate::embedded) fn iter(&self) -> impl Iterator<Item = (Timestamp, u64, &Waiting)> {
        self.waiting.iter().map(|((due, id), waiting)| (*due, *id, waiting))
    }

    /// Returns whether the number was free.
    pub(super) fn insert(&mut self, id: u64, due: Timestamp, waiting: Waiting) -> bool {
        if self.due_of.contains_key(&id) {
            return false;
        }
        self.bytes += footprint_aside(&waiting.fields);
        self.due_of.insert(id, due);
        self.waiting.insert((due, id), waiting);
        true
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Waiting> {
        let due = self.due_of.remove(&id)?;
        let waiting = self.waiting.remove(&(due, id))?;
        self.bytes -= footprint_aside(&waiting.fields);
        Some(waiting)
    }
}

//! Scheduled entries, ordered by due time.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::entries::footprint;
use super::{EmbeddedState, NamedValue};
use crate::clock::Timestamp;
use crate::embedded::codec::RecordError;
use crate::entry::Fields;
use crate::name::StreamName;

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct DelaySet {
    waiting: BTreeMap<(Timestamp, u64), DelayedItem>,
    due_of: HashMap<u64, Timestamp>,
    bytes: u64,
}

/// A scheduled entry and its target stream.
#[derive(Clone, Debug)]
pub(in crate::embedded) struct DelayedItem {
    pub(in crate::embedded) to: StreamName,
    pub(in crate::embedded) fields: Fields,
}

/// Approximate memory use of a scheduled entry in bytes.
pub(in crate::embedded) fn delayed_footprint(fields: &Fields) -> u64 {
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

    /// Due time of the first entry.
    pub(in crate::embedded) fn next_due(&self) -> Option<Timestamp> {
        self.waiting.keys().next().map(|(due, _)| *due)
    }

    /// All entries with their due times and ids, earliest first.
    pub(in crate::embedded) fn iter(&self) -> impl Iterator<Item = (Timestamp, u64, &DelayedItem)> {
        self.waiting.iter().map(|((due, id), waiting)| (*due, *id, waiting))
    }

    /// Returns `false` if the id is in use.
    pub(super) fn insert(&mut self, id: u64, due: Timestamp, waiting: DelayedItem) -> bool {
        if self.due_of.contains_key(&id) {
            return false;
        }
        self.bytes += delayed_footprint(&waiting.fields);
        self.due_of.insert(id, due);
        self.waiting.insert((due, id), waiting);
        true
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<DelayedItem> {
        let due = self.due_of.remove(&id)?;
        let waiting = self.waiting.remove(&(due, id))?;
        self.bytes -= delayed_footprint(&waiting.fields);
        Some(waiting)
    }
}

impl EmbeddedState {
    pub(super) fn schedule(
        &mut self,
        name: &str,
        id: u64,
        due: Timestamp,
        waiting: DelayedItem,
    ) -> Result<(), RecordError> {
        let value =
            self.names.entry(name.into()).or_insert_with(|| NamedValue::Delays(Arc::default()));
        let NamedValue::Delays(delays) = value else {
            return Err("the name does not hold a delay set");
        };
        let delays = Arc::make_mut(delays);
        let before = delays.bytes();
        if !delays.insert(id, due, waiting) {
            return Err("duplicate delay id");
        }
        self.bytes = self.bytes - before + delays.bytes();
        self.next_delay = self.next_delay.max(id.saturating_add(1));
        Ok(())
    }

    pub(super) fn remove_delayed(
        &mut self,
        name: &str,
        id: u64,
    ) -> Result<DelayedItem, RecordError> {
        let Some(NamedValue::Delays(delays)) = self.names.get_mut(name) else {
            return Err("unknown delay set");
        };
        let delays = Arc::make_mut(delays);
        let before = delays.bytes();
        let waiting = delays.remove(id).ok_or("unknown delayed entry")?;
        self.bytes = self.bytes - before + delays.bytes();
        if delays.is_empty() {
            self.names.remove(name);
        }
        Ok(waiting)
    }
}

//! Validates a batch of events and computes their keys and digests, before any transaction begins.
//!
//! Upstream: `record` and `record_in` of both stores. Guarantees: an invalid event fails alone; each key is passed to
//! SQL once, even if a batch contains duplicates.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::dedup;
use crate::error::{IssueError, Result};
use crate::issue::{NewEvent, Recorded};
use crate::json::Storable;
use crate::limits::BATCH_MAX;
use crate::validate;

/// An event that can be stored.
#[derive(Debug)]
pub(crate) struct ValidatedEvent<'a> {
    pub(crate) event: &'a NewEvent,
    pub(crate) key: String,
    pub(crate) digest: Vec<u8>,
    /// The payload as stored, sanitized if necessary. Key and digest are those of the original.
    pub(crate) payload: Cow<'a, str>,
    /// The payload as received, if it differs from the stored one.
    pub(crate) original: Option<&'a str>,
}

/// What happens to an event of a batch. Indices refer to `EventBatch::events`.
#[derive(Debug)]
enum BatchSlot {
    Rejected(IssueError),
    /// The event is stored.
    Stored(usize),
    /// The same event occurs earlier in the batch.
    DuplicateOf(usize),
    /// A different event with the same key occurs earlier in the batch. If that event fails, this one is retried.
    Conflicting(usize, IssueError),
}

/// A validated batch: the events to store, and a slot for every event of the call.
#[derive(Debug)]
pub(crate) struct EventBatch<'a> {
    slots: Vec<BatchSlot>,
    pub(crate) events: Vec<ValidatedEvent<'a>>,
}

impl<'a> EventBatch<'a> {
    /// Validates all events. A batch over a limit is rejected as a whole.
    pub(crate) fn prepare(events: &'a [NewEvent]) -> Result<Self> {
        validate::count("events", events.len(), BATCH_MAX)?;
        validate::batch_bytes(events.iter().map(|event| event.payload.len()).sum())?;
        let mut batch = Self { slots: Vec::with_capacity(events.len()), events: Vec::new() };
        let mut seen: HashMap<(&str, String), usize> = HashMap::new();
        for event in events {
            let slot = match event.storable() {
                Err(error) => BatchSlot::Rejected(error),
                Ok(storable) => batch.slot(event, storable, &mut seen),
            };
            batch.slots.push(slot);
        }
        Ok(batch)
    }

    fn slot(
        &mut self,
        event: &'a NewEvent,
        storable: Storable<'a>,
        seen: &mut HashMap<(&'a str, String), usize>,
    ) -> BatchSlot {
        let (key, digest) = dedup::key_and_digest(event);
        match seen.get(&(event.integration.as_str(), key.clone())) {
            Some(first) if self.events[*first].digest == digest => BatchSlot::DuplicateOf(*first),
            Some(first) => BatchSlot::Conflicting(*first, conflict(event, &key)),
            None => {
                seen.insert((&event.integration, key.clone()), self.events.len());
                let Storable { text: payload, is_lossy } = storable;
                let original = is_lossy.then_some(event.payload.as_str());
                self.events.push(ValidatedEvent { event, key, digest, payload, original });
                BatchSlot::Stored(self.events.len() - 1)
            }
        }
    }

    /// Indices of events whose key a failed event of the batch also used: record them on their own.
    pub(crate) fn needs_retry(&self, stored: &[Result<Recorded>]) -> Vec<usize> {
        let needs_retry = |slot: &BatchSlot| matches!(slot, BatchSlot::Conflicting(first, _) if stored[*first].is_err());
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, slot)| needs_retry(slot)).map(|(index, _)| index).collect()
    }

    /// Results in the order of the call, from the results of the stored events.
    pub(crate) fn into_results(self, stored: &[Result<Recorded>]) -> Vec<Result<Recorded>> {
        let again =
            |recorded: &Recorded| Recorded { duplicate: true, nudge: false, ..recorded.clone() };
        let result = |slot| match slot {
            BatchSlot::Rejected(error) | BatchSlot::Conflicting(_, error) => Err(error),
            BatchSlot::Stored(index) => stored[index].clone(),
            BatchSlot::DuplicateOf(index) => {
                stored[index].as_ref().map(again).map_err(Clone::clone)
            }
        };
        self.slots.into_iter().map(result).collect()
    }
}

/// The key was already used for a different event.
pub(crate) fn conflict(event: &NewEvent, key: &str) -> IssueError {
    IssueError::DedupConflict { integration: event.integration.clone(), dedup_key: key.to_owned() }
}

/// The integration does not exist.
pub(crate) fn unknown_integration(event: &NewEvent) -> IssueError {
    IssueError::UnknownIntegration { integration: event.integration.clone() }
}

/// The same error for every event of a batch.
pub(crate) fn reject_all(count: usize, error: &IssueError) -> Vec<Result<Recorded>> {
    (0..count).map(|_| Err(error.clone())).collect()
}

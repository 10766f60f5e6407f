//! Events made ready for a store: checked, with their keys and digests, before any transaction begins.
//!
//! Upstream: `record` and `record_in` of both dialects. Promises: one bad event has its own error and its neighbours none; SQL
//! sees each key once, whatever a batch holds.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::check;
use crate::dedup;
use crate::error::{IssueError, Result};
use crate::issue::{NewEvent, Recorded};
use crate::json::Storable;
use crate::limits::BATCH_MAX;

/// An event that may be stored.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub(crate) event: &'a NewEvent,
    pub(crate) key: String,
    pub(crate) digest: Vec<u8>,
    /// The payload as it is stored, sanitized if necessary. Key and digest are those of the original.
    pub(crate) payload: Cow<'a, str>,
    /// The payload as it came, where the stored one is not the same.
    pub(crate) original: Option<&'a str>,
}

/// What is to become of each event of a batch.
#[derive(Debug)]
enum Place {
    Refused(IssueError),
    /// The event stands here among those to store.
    Stored(usize),
    /// The same event stands there.
    Repeats(usize),
    /// Another event with the same key stands there. If that one is refused, this one may be the rightful one.
    Rivals(usize, IssueError),
}

/// A batch of which each event has its place.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    places: Vec<Place>,
    pub(crate) events: Vec<Prepared<'a>>,
}

impl<'a> Batch<'a> {
    /// Checks all events. A batch that is too large is refused as a whole.
    pub(crate) fn prepare(events: &'a [NewEvent]) -> Result<Self> {
        check::count("events", events.len(), BATCH_MAX)?;
        check::batch_bytes(events.iter().map(|event| event.payload.len()).sum())?;
        let mut batch = Self { places: Vec::with_capacity(events.len()), events: Vec::new() };
        let mut seen: HashMap<(&str, String), usize> = HashMap::new();
        for event in events {
            let place = match event.storable() {
                Err(error) => Place::Refused(error),
                Ok(storable) => batch.place(event, storable, &mut seen),
            };
            batch.places.push(place);
        }
        Ok(batch)
    }

    fn place(
        &mut self,
        event: &'a NewEvent,
        storable: Storable<'a>,
        seen: &mut HashMap<(&'a str, String), usize>,
    ) -> Place {
        let (key, digest) = dedup::key_and_digest(event);
        match seen.get(&(event.integration.as_str(), key.clone())) {
            Some(first) if self.events[*first].digest == digest => Place::Repeats(*first),
            Some(first) => Place::Rivals(*first, conflict(event, &key)),
            None => {
                seen.insert((&event.integration, key.clone()), self.events.len());
                let Storable { text: payload, is_lossy } = storable;
                let original = is_lossy.then_some(event.payload.as_str());
                self.events.push(Prepared { event, key, digest, payload, original });
                Place::Stored(self.events.len() - 1)
            }
        }
    }

    /// Events whose key another of the batch claimed in vain: to be recorded on their own.
    pub(crate) fn undecided(&self, stored: &[Result<Recorded>]) -> Vec<usize> {
        let undecided =
            |place: &Place| matches!(place, Place::Rivals(first, _) if stored[*first].is_err());
        let places = self.places.iter().enumerate();
        places.filter(|(_, place)| undecided(place)).map(|(index, _)| index).collect()
    }

    /// The answers at the places of their questions, from those for the events to store.
    pub(crate) fn answer(self, stored: &[Result<Recorded>]) -> Vec<Result<Recorded>> {
        let again =
            |recorded: &Recorded| Recorded { duplicate: true, nudge: false, ..recorded.clone() };
        let answer = |place| match place {
            Place::Refused(error) | Place::Rivals(_, error) => Err(error),
            Place::Stored(index) => stored[index].clone(),
            Place::Repeats(index) => stored[index].as_ref().map(again).map_err(Clone::clone),
        };
        self.places.into_iter().map(answer).collect()
    }
}

/// The key was used for another event.
pub(crate) fn conflict(event: &NewEvent, key: &str) -> IssueError {
    IssueError::DedupConflict { integration: event.integration.clone(), dedup_key: key.to_owned() }
}

/// Nobody has created the integration.
pub(crate) fn unknown(event: &NewEvent) -> IssueError {
    IssueError::UnknownIntegration { integration: event.integration.clone() }
}

/// The same error for every event of a batch.
pub(crate) fn refuse_all(count: usize, error: &IssueError) -> Vec<Result<Recorded>> {
    (0..count).map(|_| Err(error.clone())).collect()
}

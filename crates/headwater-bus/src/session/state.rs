//! The state of a session: its folds and its position in the stream.
//!
//! Upstream: entries of the stream, in order. Downstream: `fold`; `snapshot` saves it.
//! Guarantees: an event counts once. Skipped are: entries that repeat another one for a group, and events whose id is
//! among the newest thousands already seen. Undecodable entries are recorded and change nothing.

use std::any::Any;
use std::collections::{BTreeSet, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_stream::{Entry, EntryId, StreamName};

use super::error::SessionError;
use crate::error::DecodeError;
use crate::event::{Envelope, Event, ReceivedEvent};
use crate::fold::{AllEvents, Fold, Folds, SessionEvent};
use crate::handler::{DeliveredEvent, panic_text};
use crate::limits::{SEEN_EVENT_IDS_MAX, UNREADABLE_MAX};
use crate::name::{EventId, SessionId};
use crate::registry::EventRegistry;

/// State of a session after a number of entries.
#[derive(Clone, Debug)]
pub struct SessionState {
    pub(crate) session: SessionId,
    pub(crate) folds: Folds,
    /// The last applied entry; `MIN` before the first.
    pub(crate) position: EntryId,
    /// Number of entries up to the position, including those that do not count.
    pub(crate) entries: u64,
    /// Number of events that count.
    pub(crate) events: u64,
    pub(crate) seen: SeenEventIds,
    pub(crate) unreadable: UnreadableIndex,
}

/// The newest event ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeenEventIds {
    pub(crate) order: VecDeque<EventId>,
    ids: HashSet<EventId>,
}

/// Entries that could not be decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnreadableIndex {
    /// Unknown types and versions, up to a limit.
    pub(crate) unknown_types: BTreeSet<(String, u32)>,
    /// Entries with an invalid payload of a registered type, up to a limit.
    pub(crate) invalid_payloads: Vec<EntryId>,
    /// Whether a limit was exceeded.
    pub(crate) is_truncated: bool,
    /// Total number.
    pub(crate) count: u64,
}

/// A decoded entry, before it is applied.
pub(crate) enum DecodedEntry {
    Event(DeliveredEvent),
    Undecodable { error: DecodeError, version: u32 },
}

impl SessionState {
    pub(crate) fn new(session: SessionId, folds: Folds) -> Self {
        Self {
            session,
            folds,
            position: EntryId::MIN,
            entries: 0,
            events: 0,
            seen: SeenEventIds::default(),
            unreadable: UnreadableIndex::default(),
        }
    }

    /// The newest event of type `E`, if [`Folds::latest`] or [`Folds::all`] keeps it.
    pub fn latest<E: Event>(&self) -> Option<ReceivedEvent<E>> {
        self.folds.get_latest::<E>()
    }

    /// The events of type `E` kept by [`Folds::all`]; `None` if there is no such fold.
    pub fn all<E: Event>(&self) -> Option<AllEvents<E>> {
        self.folds.get_all::<E>()
    }

    /// The state of a custom fold; `None` if there is no such fold.
    pub fn get<F: Fold>(&self) -> Option<&F> {
        self.folds.get::<F>()
    }

    /// The last applied entry; `EntryId::MIN` before the first.
    pub fn position(&self) -> EntryId {
        self.position
    }

    /// Number of events applied.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Number of undecodable entries. The first [`UNREADABLE_MAX`](crate::limits::UNREADABLE_MAX) of them are parked.
    pub fn unreadable(&self) -> u64 {
        self.unreadable.count
    }

    /// Applies the next entry.
    pub(crate) fn apply_decoded(
        &mut self,
        entry_id: EntryId,
        read: DecodedEntry,
    ) -> Result<(), SessionError> {
        match read {
            DecodedEntry::Undecodable { error, version } => {
                self.unreadable.add(entry_id, error, version);
            }
            DecodedEntry::Event(delivered) => {
                let is_copy = delivered.envelope.copy_of.is_some();
                if !is_copy && self.seen.insert(&delivered.envelope.event_id) {
                    self.apply(&SessionEvent(delivered), entry_id)?;
                    self.events += 1;
                }
            }
        }
        self.position = entry_id;
        self.entries += 1;
        Ok(())
    }

    fn apply(&mut self, event: &SessionEvent, entry_id: EntryId) -> Result<(), SessionError> {
        for fold in self.folds.iter_mut() {
            // Application code. After a panic the fold may be inconsistent; the caller drops the whole state.
            let applied = catch_unwind(AssertUnwindSafe(|| fold.apply(event)));
            applied.map_err(|panic: Box<dyn Any + Send>| SessionError::Fold {
                session: self.session.clone(),
                fold: fold.name().to_owned(),
                entry_id,
                reason: panic_text(&*panic).to_owned(),
            })?;
        }
        Ok(())
    }
}

/// Decodes an entry.
pub(crate) fn read(registry: &EventRegistry, stream: &StreamName, entry: &Entry) -> DecodedEntry {
    let envelope = match Envelope::from_entry(stream, entry.id, &entry.fields) {
        Ok(envelope) => envelope,
        Err(error) => return DecodedEntry::Undecodable { error, version: 0 },
    };
    match registry.decode_any(&envelope) {
        Ok(value) => DecodedEntry::Event(DeliveredEvent { value, envelope: Arc::new(envelope) }),
        Err(error) => DecodedEntry::Undecodable { error, version: envelope.version },
    }
}

impl SeenEventIds {
    /// Returns whether the id is new.
    fn insert(&mut self, id: &EventId) -> bool {
        if !self.ids.insert(id.clone()) {
            return false;
        }
        self.order.push_back(id.clone());
        if self.order.len() > SEEN_EVENT_IDS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        true
    }

    pub(crate) fn restore(ids: impl IntoIterator<Item = EventId>) -> Self {
        let mut seen = Self::default();
        ids.into_iter().for_each(|id| {
            seen.insert(&id);
        });
        seen
    }
}

impl UnreadableIndex {
    /// How many more undecodable entries may be parked: a session full of them must not push out the parked entries
    /// of other streams.
    pub(crate) fn parking_capacity(&self) -> usize {
        UNREADABLE_MAX.saturating_sub(usize::try_from(self.count).unwrap_or(usize::MAX))
    }

    fn add(&mut self, id: EntryId, error: DecodeError, version: u32) {
        self.count += 1;
        let is_recorded = match error {
            DecodeError::UnknownType { event_type }
            | DecodeError::UnknownVersion { event_type, .. } => {
                let kind = (event_type, version);
                let has_room =
                    self.unknown_types.len() < UNREADABLE_MAX || self.unknown_types.contains(&kind);
                has_room && {
                    self.unknown_types.insert(kind);
                    true
                }
            }
            // No registry can ever decode it.
            DecodeError::Malformed { .. } => true,
            DecodeError::Payload { .. } => {
                let has_room = self.invalid_payloads.len() < UNREADABLE_MAX;
                self.invalid_payloads.extend(has_room.then_some(id));
                has_room
            }
        };
        self.is_truncated |= !is_recorded;
    }

    /// Whether one of the unknown types is registered now.
    pub(crate) fn has_newly_registered_type(&self, registry: &EventRegistry) -> bool {
        self.unknown_types.iter().any(|(event_type, version)| registry.reads(event_type, *version))
    }
}

//! The state of a session: its folds, and how far its stream was read.
//!
//! Upstream: entries of the stream, in order. Downstream: `fold`; `snapshot` keeps it.
//! Promises: an entry counts once. Entries that repeat another one for a group are skipped, and so is a second copy
//! of an event, known by its id among the newest thousands. What cannot be read is remembered, and changes nothing;
//! nor does what somebody copied here who was taken for dead.

use std::any::Any;
use std::collections::{BTreeSet, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_stream::{Entry, EntryId, Fields, StreamName};

use super::error::SessionError;
use crate::error::DecodeError;
use crate::event::{Envelope, Event, ReceivedEvent};
use crate::fold::{AllEvents, Fold, Folds, SessionEvent};
use crate::handler::{DeliveredEvent, panic_text};
use crate::limits::{SEEN_EVENT_IDS_MAX, UNREADABLE_MAX};
use crate::name::{EventId, SessionId};
use crate::registry::EventRegistry;

/// What is known after a number of entries of a session.
#[derive(Clone, Debug)]
pub struct SessionState {
    pub(crate) session: SessionId,
    pub(crate) folds: Folds,
    /// The last entry that was read; `MIN` before the first.
    pub(crate) position: EntryId,
    /// Entries up to there since the session began, whether they counted or not.
    pub(crate) entries: u64,
    /// Events that counted.
    pub(crate) events: u64,
    pub(crate) seen: SeenEventIds,
    pub(crate) unreadable: UnreadableIndex,
    /// Whose copies count: of whoever made the session of another one or of a file. Empty if nobody did.
    pub(crate) copied_by: String,
}

/// The newest ids of events.
#[derive(Clone, Debug, Default)]
pub(crate) struct SeenEventIds {
    pub(crate) order: VecDeque<EventId>,
    ids: HashSet<EventId>,
}

/// Entries that no registered type fits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnreadableIndex {
    /// The types and versions that were not registered, so many at most.
    pub(crate) unknown_types: BTreeSet<(String, u32)>,
    /// Those whose type was registered and whose payload did not fit, so many at most.
    pub(crate) invalid_payloads: Vec<EntryId>,
    /// Whether there were more of either.
    pub(crate) is_truncated: bool,
    /// All of them.
    pub(crate) count: u64,
}

/// In a copied entry: who copied it.
pub(crate) const COPIED_BY: &str = "copied_by";

/// An entry as it is read, before it counts.
pub(crate) enum DecodedEntry {
    Event(DeliveredEvent),
    /// Somebody copied it here who was taken for dead.
    Stray,
    Undecodable {
        error: DecodeError,
        version: u32,
    },
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
            copied_by: String::new(),
        }
    }

    /// The newest event of type `E`, if [`Folds::latest`] or [`Folds::all`] keep it and there was one.
    pub fn latest<E: Event>(&self) -> Option<ReceivedEvent<E>> {
        self.folds.get_latest::<E>()
    }

    /// The events of type `E` that [`Folds::all`] keeps; `None` if no such fold was chosen.
    pub fn all<E: Event>(&self) -> Option<AllEvents<E>> {
        self.folds.get_all::<E>()
    }

    /// The state of a fold of the application's; `None` if it was not chosen.
    pub fn get<F: Fold>(&self) -> Option<&F> {
        self.folds.get::<F>()
    }

    /// The last entry that this state knows; `EntryId::MIN` before the first.
    pub fn position(&self) -> EntryId {
        self.position
    }

    /// How many events made this state.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// How many entries could not be read because no registered type fits them. The first
    /// [`UNREADABLE_MAX`](crate::limits::UNREADABLE_MAX) of them are parked.
    pub fn unreadable(&self) -> u64 {
        self.unreadable.count
    }

    /// Takes the next entry into account, as it was read.
    pub(crate) fn apply_decoded(
        &mut self,
        entry_id: EntryId,
        read: DecodedEntry,
    ) -> Result<(), SessionError> {
        match read {
            DecodedEntry::Stray => {}
            DecodedEntry::Undecodable { error, version } => {
                self.unreadable.add(entry_id, error, version)
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
            // Foreign code. Its state may be half changed afterwards, and is not used any more: the caller drops all
            // of it.
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

/// Reads an entry of a session whose copies are by `copied_by`.
pub(crate) fn read(
    registry: &EventRegistry,
    stream: &StreamName,
    copied_by: &str,
    entry: &Entry,
) -> DecodedEntry {
    if is_stray(copied_by, &entry.fields) {
        return DecodedEntry::Stray;
    }
    let envelope = match Envelope::from_entry(stream, entry.id, &entry.fields) {
        Ok(envelope) => envelope,
        Err(error) => return DecodedEntry::Undecodable { error, version: 0 },
    };
    match registry.decode_any(&envelope) {
        Ok(value) => DecodedEntry::Event(DeliveredEvent { value, envelope: Arc::new(envelope) }),
        Err(error) => DecodedEntry::Undecodable { error, version: envelope.version },
    }
}

/// Whether an entry was copied by somebody who has nothing to do here (any more).
pub(crate) fn is_stray(copied_by: &str, fields: &Fields) -> bool {
    fields.get(COPIED_BY).is_some_and(|by| by != copied_by.as_bytes())
}

impl SeenEventIds {
    /// Returns whether it is new.
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
    /// Of a session that is full of them the first tell all there is to know, and the others would push out what was
    /// parked elsewhere. So many more are to be parked.
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
            // No registry ever reads it.
            DecodeError::Malformed { .. } => true,
            DecodeError::Payload { .. } => {
                let has_room = self.invalid_payloads.len() < UNREADABLE_MAX;
                self.invalid_payloads.extend(has_room.then_some(id));
                has_room
            }
        };
        self.is_truncated |= !is_recorded;
    }

    /// Whether one of the types that were not registered is by now.
    pub(crate) fn has_newly_registered_type(&self, registry: &EventRegistry) -> bool {
        self.unknown_types.iter().any(|(event_type, version)| registry.reads(event_type, *version))
    }
}

//! The state of a session: its folds, and how far its stream was read.
//!
//! Upstream: entries of the stream, in order. Downstream: `fold`; `snapshot` keeps it.
//! Promises: an entry counts once. Entries that repeat another one for a group are skipped, and so is a second copy of an
//! event, known by its id among the newest thousands. What cannot be read is remembered, and changes nothing.

use std::any::Any;
use std::collections::{HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use headwater_stream::{Entry, EntryId, StreamName};

use super::error::SessionError;
use crate::error::Misfit;
use crate::event::{Envelope, Event, Received};
use crate::fold::{AllEvents, Fold, Folds, SessionEvent};
use crate::handler::{Delivered, panic_text};
use crate::limits::{SEEN_MAX, UNREADABLE_MAX};
use crate::name::{EventId, SessionId};
use crate::registry::Registry;

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
    pub(crate) seen: Seen,
    pub(crate) unreadable: Unreadable,
}

/// The newest ids of events.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) order: VecDeque<EventId>,
    ids: HashSet<EventId>,
}

/// Entries that no registered type fits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unreadable {
    /// The first of them.
    pub(crate) ids: Vec<EntryId>,
    /// All of them.
    pub(crate) count: u64,
}

impl SessionState {
    pub(crate) fn new(session: SessionId, folds: Folds) -> Self {
        Self {
            session,
            folds,
            position: EntryId::MIN,
            entries: 0,
            events: 0,
            seen: Seen::default(),
            unreadable: Unreadable::default(),
        }
    }

    /// The newest event of type `E`, if [`Folds::latest`] or [`Folds::all`] keep it and there was one.
    pub fn latest<E: Event>(&self) -> Option<Received<E>> {
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

    /// Takes the next entry into account. Returns why, if it cannot be read.
    pub(crate) fn take(
        &mut self,
        registry: &Registry,
        stream: &StreamName,
        entry: &Entry,
    ) -> Result<Option<Misfit>, SessionError> {
        let misfit = match read(registry, stream, entry) {
            Err(misfit) => {
                self.unreadable.add(entry.id);
                Some(misfit)
            }
            Ok(delivered) => {
                let is_copy = delivered.envelope.copy_of.is_some();
                if !is_copy && self.seen.insert(&delivered.envelope.event_id) {
                    self.apply(&SessionEvent(delivered), entry.id)?;
                    self.events += 1;
                }
                None
            }
        };
        self.position = entry.id;
        self.entries += 1;
        Ok(misfit)
    }

    fn apply(&mut self, event: &SessionEvent, entry_id: EntryId) -> Result<(), SessionError> {
        for fold in self.folds.iter_mut() {
            // Foreign code. Its state may be half changed afterwards, and is not used any more: the caller drops all of it.
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

fn read(registry: &Registry, stream: &StreamName, entry: &Entry) -> Result<Delivered, Misfit> {
    let envelope = Envelope::from_entry(stream, entry.id, &entry.fields)?;
    let value = registry.decode_any(&envelope)?;
    Ok(Delivered { value, envelope: Arc::new(envelope) })
}

/// Whether an entry can be read by now.
pub(crate) fn is_readable(registry: &Registry, stream: &StreamName, entry: &Entry) -> bool {
    read(registry, stream, entry).is_ok()
}

impl Seen {
    /// Returns whether it is new.
    fn insert(&mut self, id: &EventId) -> bool {
        if !self.ids.insert(id.clone()) {
            return false;
        }
        self.order.push_back(id.clone());
        if self.order.len() > SEEN_MAX
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

impl Unreadable {
    /// Whether the last of them is one to park. Of a session that is full of them the first tell all there is to know,
    /// and the others would push out what was parked elsewhere.
    pub(crate) fn is_to_be_parked(&self) -> bool {
        self.count <= UNREADABLE_MAX as u64
    }

    fn add(&mut self, id: EntryId) {
        if self.ids.len() < UNREADABLE_MAX {
            self.ids.push(id);
        }
        self.count += 1;
    }
}

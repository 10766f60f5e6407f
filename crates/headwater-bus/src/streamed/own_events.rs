//! Which entries this bus wrote itself: its live handlers have had them already.
//!
//! Upstream: `publish` says what it is about and how it went. Downstream: `tail` asks what to skip.
//! Promises: an event that was published here runs the live handlers of this bus once, also when the backend's answer
//! was lost: if the event turns out to be stored, it is handled then, by whoever finds out first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};

use headwater_stream::EntryId;

use crate::limits::UNCONFIRMED_MAX;
use crate::name::EventId;

/// This start of this bus.
pub(super) struct OwnEvents {
    origin: String,
    /// Events of this bus whose fate is open.
    unsettled: Mutex<UnsettledEvents>,
}

#[derive(Default)]
struct UnsettledEvents {
    events: HashMap<EventId, StoreState>,
    /// Those that failed, oldest first: the first to be forgotten. May hold events that are settled by now.
    failed: VecDeque<EventId>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum StoreState {
    /// It is being stored.
    InFlight,
    /// It is being stored, and was seen in its stream.
    Seen(EntryId),
    /// Storing it failed with an unknown outcome; no handler ran.
    Unconfirmed,
}

impl OwnEvents {
    pub(super) fn new(origin: String) -> Self {
        Self { origin, unsettled: Mutex::default() }
    }

    /// What events of this bus carry.
    pub(super) fn origin(&self) -> &str {
        &self.origin
    }

    /// An event is about to be stored. One that is unconfirmed stays so.
    pub(super) fn store_started(&self, event_id: &EventId) {
        self.lock().events.entry(event_id.clone()).or_insert(StoreState::InFlight);
    }

    /// It is stored, or certainly is not. Returns whether an earlier try to store it was unconfirmed until now.
    pub(super) fn settle(&self, event_id: &EventId) -> bool {
        self.lock().events.remove(event_id) == Some(StoreState::Unconfirmed)
    }

    /// This try certainly did not store it. Returns whether an earlier one may have: then it stays unconfirmed.
    pub(super) fn not_stored(&self, event_id: &EventId) -> bool {
        let mut unsettled = self.lock();
        let is_unconfirmed = unsettled.events.get(event_id) == Some(&StoreState::Unconfirmed);
        if !is_unconfirmed {
            unsettled.events.remove(event_id);
        }
        is_unconfirmed
    }

    /// Storing it failed with an unknown outcome. Returns its entry if it was seen in its stream all the same; then it
    /// is settled.
    pub(super) fn store_unconfirmed(&self, event_id: &EventId) -> Option<EntryId> {
        let mut unsettled = self.lock();
        if let Some(StoreState::Seen(entry_id)) = unsettled.events.get(event_id).copied() {
            unsettled.events.remove(event_id);
            return Some(entry_id);
        }
        if unsettled.events.insert(event_id.clone(), StoreState::Unconfirmed)
            != Some(StoreState::Unconfirmed)
        {
            unsettled.failed.push_back(event_id.clone());
        }
        if unsettled.failed.len() > UNCONFIRMED_MAX
            && let Some(oldest) = unsettled.failed.pop_front()
            && unsettled.events.get(&oldest) == Some(&StoreState::Unconfirmed)
        {
            unsettled.events.remove(&oldest);
        }
        None
    }

    /// An event of this bus was seen in its stream. Returns whether handlers are to run for it now.
    pub(super) fn observe(&self, event_id: &EventId, entry_id: EntryId) -> bool {
        let mut unsettled = self.lock();
        match unsettled.events.get_mut(event_id) {
            Some(StoreState::Unconfirmed) => {
                unsettled.events.remove(event_id);
                true
            }
            Some(state) => {
                *state = StoreState::Seen(entry_id);
                false
            }
            None => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, UnsettledEvents> {
        self.unsettled.lock().expect("no code panics while it holds this lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: EntryId = EntryId::new(1, 0);

    #[test]
    fn an_event_is_handled_once_whoever_learns_first_that_it_is_stored() {
        let own_events = OwnEvents::new("bus".to_owned());
        let id = EventId::random();

        // The ordinary way: the answer comes, before or after the event is seen.
        own_events.store_started(&id);
        assert!(!own_events.observe(&id, ENTRY));
        assert!(!own_events.settle(&id));
        assert!(!own_events.observe(&id, ENTRY));

        // The answer is lost, and the event was seen before that is known.
        own_events.store_started(&id);
        assert!(!own_events.observe(&id, ENTRY));
        assert_eq!(own_events.store_unconfirmed(&id), Some(ENTRY));

        // The answer is lost, and the event is seen afterwards.
        own_events.store_started(&id);
        assert_eq!(own_events.store_unconfirmed(&id), None);
        assert!(own_events.observe(&id, ENTRY));
        assert!(!own_events.observe(&id, ENTRY));

        // The answer is lost, and the caller publishes it again.
        own_events.store_started(&id);
        assert_eq!(own_events.store_unconfirmed(&id), None);
        own_events.store_started(&id);
        assert!(own_events.settle(&id));
        assert!(!own_events.observe(&id, ENTRY));
    }

    #[test]
    fn a_try_that_stored_nothing_does_not_undo_one_that_may_have() {
        let own_events = OwnEvents::new("bus".to_owned());
        let event_id = EventId::random();
        own_events.store_started(&event_id);
        assert!(!own_events.not_stored(&event_id), "there was no other");
        assert!(!own_events.observe(&event_id, ENTRY));
        own_events.store_started(&event_id);
        assert_eq!(own_events.store_unconfirmed(&event_id), None);
        own_events.store_started(&event_id);
        assert!(own_events.not_stored(&event_id));
        assert!(own_events.observe(&event_id, ENTRY), "it is handled when it turns up");
    }

    #[test]
    fn what_never_turns_up_is_forgotten_at_last() {
        let own_events = OwnEvents::new("bus".to_owned());
        for _ in 0..UNCONFIRMED_MAX + 100 {
            let id = EventId::random();
            own_events.store_started(&id);
            own_events.store_unconfirmed(&id);
        }
        assert_eq!(own_events.lock().events.len(), UNCONFIRMED_MAX);
    }
}

//! Tracks events published by this bus, so that its live handlers do not get them again from the stream.
//!
//! Upstream: `publish` reports stores and their results. Downstream: `tail` asks which entries to skip.
//! Guarantees: an event published here runs the live handlers of this bus once, also if the backend's reply was lost:
//! if the event turns out to be stored, its handlers run then.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};

use headwater_stream::EntryId;

use crate::limits::UNCONFIRMED_MAX;
use crate::name::EventId;

/// Origin and unsettled events of this bus.
pub(super) struct OwnEvents {
    origin: String,
    /// Events whose store is in flight or unconfirmed.
    unsettled: Mutex<UnsettledEvents>,
}

#[derive(Default)]
struct UnsettledEvents {
    events: HashMap<EventId, StoreState>,
    /// Unconfirmed events, oldest first, for eviction. May contain events that are settled.
    failed: VecDeque<EventId>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum StoreState {
    /// The store is in flight.
    InFlight,
    /// The store is in flight, and the event was read from its stream.
    Seen(EntryId),
    /// The result of the store is unknown; no handler ran.
    Unconfirmed,
}

impl OwnEvents {
    pub(super) fn new(origin: String) -> Self {
        Self { origin, unsettled: Mutex::default() }
    }

    /// Value of the field `origin`.
    pub(super) fn origin(&self) -> &str {
        &self.origin
    }

    /// A store starts. An unconfirmed event stays unconfirmed.
    pub(super) fn store_started(&self, event_id: &EventId) {
        self.lock().events.entry(event_id.clone()).or_insert(StoreState::InFlight);
    }

    /// The event is stored, or definitely not. Returns whether an earlier store was unconfirmed.
    pub(super) fn settle(&self, event_id: &EventId) -> bool {
        self.lock().events.remove(event_id) == Some(StoreState::Unconfirmed)
    }

    /// This store definitely failed. Returns whether an earlier one may have succeeded; then it stays unconfirmed.
    pub(super) fn not_stored(&self, event_id: &EventId) -> bool {
        let mut unsettled = self.lock();
        let is_unconfirmed = unsettled.events.get(event_id) == Some(&StoreState::Unconfirmed);
        if !is_unconfirmed {
            unsettled.events.remove(event_id);
        }
        is_unconfirmed
    }

    /// The result of the store is unknown. Returns its entry if it was read from its stream; then it is settled.
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

    /// An event of this bus was read from its stream. Returns whether its handlers must run now.
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
    fn an_event_is_handled_once_however_its_store_is_confirmed() {
        let own_events = OwnEvents::new("bus".to_owned());
        let id = EventId::random();

        // Normal case: the reply arrives before or after the event is read.
        own_events.store_started(&id);
        assert!(!own_events.observe(&id, ENTRY));
        assert!(!own_events.settle(&id));
        assert!(!own_events.observe(&id, ENTRY));

        // The reply is lost, and the event was read before.
        own_events.store_started(&id);
        assert!(!own_events.observe(&id, ENTRY));
        assert_eq!(own_events.store_unconfirmed(&id), Some(ENTRY));

        // The reply is lost, and the event is read afterwards.
        own_events.store_started(&id);
        assert_eq!(own_events.store_unconfirmed(&id), None);
        assert!(own_events.observe(&id, ENTRY));
        assert!(!own_events.observe(&id, ENTRY));

        // The reply is lost, and the caller publishes the event again.
        own_events.store_started(&id);
        assert_eq!(own_events.store_unconfirmed(&id), None);
        own_events.store_started(&id);
        assert!(own_events.settle(&id));
        assert!(!own_events.observe(&id, ENTRY));
    }

    #[test]
    fn a_failed_store_does_not_settle_an_earlier_unconfirmed_one() {
        let own_events = OwnEvents::new("bus".to_owned());
        let event_id = EventId::random();
        own_events.store_started(&event_id);
        assert!(!own_events.not_stored(&event_id), "there was no earlier store");
        assert!(!own_events.observe(&event_id, ENTRY));
        own_events.store_started(&event_id);
        assert_eq!(own_events.store_unconfirmed(&event_id), None);
        own_events.store_started(&event_id);
        assert!(own_events.not_stored(&event_id));
        assert!(own_events.observe(&event_id, ENTRY), "it is handled when it is read");
    }

    #[test]
    fn unconfirmed_events_are_evicted_at_the_limit() {
        let own_events = OwnEvents::new("bus".to_owned());
        for _ in 0..UNCONFIRMED_MAX + 100 {
            let id = EventId::random();
            own_events.store_started(&id);
            own_events.store_unconfirmed(&id);
        }
        assert_eq!(own_events.lock().events.len(), UNCONFIRMED_MAX);
    }
}

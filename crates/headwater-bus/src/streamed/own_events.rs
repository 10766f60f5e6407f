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
pub(super) struct Origin {
    name: String,
    /// Events of this bus whose fate is open.
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    events: HashMap<EventId, Fate>,
    /// Those that failed, oldest first: the first to be forgotten. May hold events that are settled by now.
    failed: VecDeque<EventId>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is being stored.
    UnderWay,
    /// It is being stored, and was seen in its stream.
    Seen(EntryId),
    /// Storing it failed with an unknown outcome; no handler ran.
    Unconfirmed,
}

impl Origin {
    pub(super) fn new(name: String) -> Self {
        Self { name, open: Mutex::default() }
    }

    /// What events of this bus carry.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// An event is about to be stored. One that is unconfirmed stays so.
    pub(super) fn begin(&self, event_id: &EventId) {
        self.lock().events.entry(event_id.clone()).or_insert(Fate::UnderWay);
    }

    /// It is stored, or certainly is not. Returns whether an earlier try to store it was unconfirmed until now.
    pub(super) fn settle(&self, event_id: &EventId) -> bool {
        self.lock().events.remove(event_id) == Some(Fate::Unconfirmed)
    }

    /// This try certainly did not store it. Returns whether an earlier one may have: then it stays unconfirmed.
    pub(super) fn abandon(&self, event_id: &EventId) -> bool {
        let mut open = self.lock();
        let is_unconfirmed = open.events.get(event_id) == Some(&Fate::Unconfirmed);
        if !is_unconfirmed {
            open.events.remove(event_id);
        }
        is_unconfirmed
    }

    /// Storing it failed with an unknown outcome. Returns its entry if it was seen in its stream all the same; then it
    /// is settled.
    pub(super) fn fail(&self, event_id: &EventId) -> Option<EntryId> {
        let mut open = self.lock();
        if let Some(Fate::Seen(entry_id)) = open.events.get(event_id).copied() {
            open.events.remove(event_id);
            return Some(entry_id);
        }
        if open.events.insert(event_id.clone(), Fate::Unconfirmed) != Some(Fate::Unconfirmed) {
            open.failed.push_back(event_id.clone());
        }
        if open.failed.len() > UNCONFIRMED_MAX
            && let Some(oldest) = open.failed.pop_front()
            && open.events.get(&oldest) == Some(&Fate::Unconfirmed)
        {
            open.events.remove(&oldest);
        }
        None
    }

    /// An event of this bus was seen in its stream. Returns whether handlers are to run for it now.
    pub(super) fn saw(&self, event_id: &EventId, entry_id: EntryId) -> bool {
        let mut open = self.lock();
        match open.events.get_mut(event_id) {
            Some(Fate::Unconfirmed) => {
                open.events.remove(event_id);
                true
            }
            Some(fate) => {
                *fate = Fate::Seen(entry_id);
                false
            }
            None => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().expect("no code panics while it holds this lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: EntryId = EntryId::new(1, 0);

    #[test]
    fn an_event_is_handled_once_whoever_learns_first_that_it_is_stored() {
        let origin = Origin::new("bus".to_owned());
        let id = EventId::random();

        // The ordinary way: the answer comes, before or after the event is seen.
        origin.begin(&id);
        assert!(!origin.saw(&id, ENTRY));
        assert!(!origin.settle(&id));
        assert!(!origin.saw(&id, ENTRY));

        // The answer is lost, and the event was seen before that is known.
        origin.begin(&id);
        assert!(!origin.saw(&id, ENTRY));
        assert_eq!(origin.fail(&id), Some(ENTRY));

        // The answer is lost, and the event is seen afterwards.
        origin.begin(&id);
        assert_eq!(origin.fail(&id), None);
        assert!(origin.saw(&id, ENTRY));
        assert!(!origin.saw(&id, ENTRY));

        // The answer is lost, and the caller publishes it again.
        origin.begin(&id);
        assert_eq!(origin.fail(&id), None);
        origin.begin(&id);
        assert!(origin.settle(&id));
        assert!(!origin.saw(&id, ENTRY));
    }

    #[test]
    fn a_try_that_stored_nothing_does_not_undo_one_that_may_have() {
        let origin = Origin::new("bus".to_owned());
        let event_id = EventId::random();
        origin.begin(&event_id);
        assert!(!origin.abandon(&event_id), "there was no other");
        assert!(!origin.saw(&event_id, ENTRY));
        origin.begin(&event_id);
        assert_eq!(origin.fail(&event_id), None);
        origin.begin(&event_id);
        assert!(origin.abandon(&event_id));
        assert!(origin.saw(&event_id, ENTRY), "it is handled when it turns up");
    }

    #[test]
    fn what_never_turns_up_is_forgotten_at_last() {
        let origin = Origin::new("bus".to_owned());
        for _ in 0..UNCONFIRMED_MAX + 100 {
            let id = EventId::random();
            origin.begin(&id);
            origin.fail(&id);
        }
        assert_eq!(origin.lock().events.len(), UNCONFIRMED_MAX);
    }
}

//! The ids of events that a local bus published, so that one that is published again counts once.
//!
//! Upstream: `local`, for events that were given an id. Promises: of two that are published at the same time under one id,
//! the second waits until it is known what became of the first. An id is known for ten minutes, and the newest of them
//! only if there are very many.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::EntryId;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::limits::LOCAL_IDS_MAX;
use crate::name::{EventId, SessionId};

/// How long an id is known; the same as on a bus on streams.
const KNOWN_FOR: Duration = Duration::from_secs(10 * 60);

/// An id, in the session or the namespace it was used in.
pub(super) type Place = (Option<SessionId>, EventId);

#[derive(Default)]
pub(super) struct Remembered {
    known: Mutex<Known>,
    /// It is known of an event what became of it.
    settled: Notify,
}

#[derive(Default)]
struct Known {
    ids: HashMap<Place, Fate>,
    /// Those that were published, oldest first.
    order: VecDeque<(Instant, Place)>,
}

#[derive(Clone, Copy)]
enum Fate {
    UnderWay,
    /// Its entry, if it has one.
    Published(Option<EntryId>),
}

/// Events that are being published. Those of which nothing is said until it is dropped were not.
pub(super) struct UnderWay<'a> {
    remembered: &'a Remembered,
    places: Vec<Place>,
}

impl Remembered {
    /// Begins to publish an event under an id, as one of those under way; or says that it was published before, and
    /// where it is, if it is anywhere.
    pub(super) async fn begin(
        &self,
        under_way: &mut UnderWay<'_>,
        place: Place,
    ) -> Result<(), Option<EntryId>> {
        // It stands twice in one batch, and the first one counts.
        if under_way.places.contains(&place) {
            return Err(None);
        }
        loop {
            let mut settled = std::pin::pin!(self.settled.notified());
            // From here on nothing is missed.
            settled.as_mut().enable();
            match self.lock().enter(&place) {
                None => {
                    under_way.places.push(place);
                    return Ok(());
                }
                Some(Fate::Published(entry_id)) => return Err(entry_id),
                Some(Fate::UnderWay) => {}
            }
            settled.await;
        }
    }

    pub(super) fn under_way(&self) -> UnderWay<'_> {
        UnderWay { remembered: self, places: Vec::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().expect("no code panics while it holds this lock")
    }
}

impl Known {
    /// What is known of an id; if nothing is, it is under way from now on.
    fn enter(&mut self, place: &Place) -> Option<Fate> {
        let now = Instant::now();
        while let Some((since, _)) = self.order.front()
            && (now.duration_since(*since) > KNOWN_FOR || self.order.len() > LOCAL_IDS_MAX)
            && let Some((_, oldest)) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        let fate = self.ids.get(place).copied();
        if fate.is_none() {
            self.ids.insert(place.clone(), Fate::UnderWay);
        }
        fate
    }
}

impl UnderWay<'_> {
    /// An event is published, and has this entry if it has one.
    pub(super) fn published(&mut self, place: &Place, entry_id: Option<EntryId>) {
        let Some(at) = self.places.iter().position(|one| one == place) else { return };
        let place = self.places.swap_remove(at);
        let mut known = self.remembered.lock();
        known.ids.insert(place.clone(), Fate::Published(entry_id));
        known.order.push_back((Instant::now(), place));
        drop(known);
        self.remembered.settled.notify_waiters();
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.places.is_empty() {
            return;
        }
        let mut known = self.remembered.lock();
        for place in &self.places {
            known.ids.remove(place);
        }
        drop(known);
        self.remembered.settled.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(id: &str) -> Place {
        (None, EventId::new(id).unwrap())
    }

    async fn publish(remembered: &Remembered, id: &str) -> Result<(), Option<EntryId>> {
        let mut under_way = remembered.under_way();
        remembered.begin(&mut under_way, place(id)).await?;
        under_way.published(&place(id), None);
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn ids_are_forgotten_after_a_while_and_when_there_are_too_many() {
        let remembered = Remembered::default();
        publish(&remembered, "a").await.unwrap();
        assert_eq!(publish(&remembered, "a").await, Err(None));
        tokio::time::advance(KNOWN_FOR + Duration::from_millis(1)).await;
        publish(&remembered, "a").await.unwrap();
        for number in 0..LOCAL_IDS_MAX + 10 {
            publish(&remembered, &number.to_string()).await.unwrap();
        }
        assert!(remembered.lock().ids.len() <= LOCAL_IDS_MAX + 1);
        publish(&remembered, "a").await.unwrap();
    }

    #[tokio::test]
    async fn of_two_at_once_the_second_counts_if_the_first_came_to_nothing() {
        for is_published in [true, false] {
            let remembered = Remembered::default();
            let mut first = remembered.under_way();
            remembered.begin(&mut first, place("a")).await.unwrap();
            let mut second = std::pin::pin!(publish(&remembered, "a"));
            assert!(futures_util::poll!(&mut second).is_pending());
            if is_published {
                first.published(&place("a"), Some(EntryId::new(7, 0)));
            }
            drop(first);
            let expected = if is_published { Err(Some(EntryId::new(7, 0))) } else { Ok(()) };
            assert_eq!(second.await, expected);
        }
    }
}

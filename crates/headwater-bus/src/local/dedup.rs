//! Deduplicates events by id on a local bus.
//!
//! Upstream: `local`, for events with an id set by the caller. Guarantees: of two concurrent publishes with the same
//! id, the second waits for the result of the first. An id is kept for ten minutes, unless newer ids exceed the
//! limit.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::EntryId;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::limits::LOCAL_IDS_MAX;
use crate::name::{EventId, SessionId};

/// How long an id is kept; the same as the default of a bus on streams.
const DEDUP_TTL: Duration = Duration::from_secs(10 * 60);

/// An event id, and the session it was published in.
pub(super) type DedupKey = (Option<SessionId>, EventId);

#[derive(Default)]
pub(super) struct DedupWindow {
    state: Mutex<DedupState>,
    /// Notified when a publish in flight ends.
    settled: Notify,
}

#[derive(Default)]
struct DedupState {
    ids: HashMap<DedupKey, DedupEntry>,
    /// Published ids, oldest first.
    order: VecDeque<(Instant, DedupKey)>,
}

#[derive(Clone, Copy)]
enum DedupEntry {
    InFlight,
    /// Its entry, if it is stored.
    Published(Option<EntryId>),
}

/// The ids of one publish call. Ids that are not marked as published are freed on drop.
pub(super) struct DedupBatch<'a> {
    window: &'a DedupWindow,
    keys: Vec<DedupKey>,
}

impl DedupWindow {
    /// Reserves an id for this batch. `Err` if an event with this id was published before, with its entry if it is
    /// stored.
    pub(super) async fn reserve(
        &self,
        begin_batch: &mut DedupBatch<'_>,
        key: DedupKey,
    ) -> Result<(), Option<EntryId>> {
        // A repeated id within one batch: the first event counts.
        if begin_batch.keys.contains(&key) {
            return Err(None);
        }
        loop {
            let mut settled = std::pin::pin!(self.settled.notified());
            // Notifications after this point are not missed.
            settled.as_mut().enable();
            match self.lock().reserve(&key) {
                None => {
                    begin_batch.keys.push(key);
                    return Ok(());
                }
                Some(DedupEntry::Published(entry_id)) => return Err(entry_id),
                Some(DedupEntry::InFlight) => {}
            }
            settled.await;
        }
    }

    pub(super) fn begin_batch(&self) -> DedupBatch<'_> {
        DedupBatch { window: self, keys: Vec::new() }
    }

    fn lock(&self) -> MutexGuard<'_, DedupState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

impl DedupState {
    /// The state of an id; if it is unknown, reserves it.
    fn reserve(&mut self, key: &DedupKey) -> Option<DedupEntry> {
        let now = Instant::now();
        while let Some((since, _)) = self.order.front()
            && (now.duration_since(*since) > DEDUP_TTL || self.order.len() > LOCAL_IDS_MAX)
            && let Some((_, oldest)) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        let entry = self.ids.get(key).copied();
        if entry.is_none() {
            self.ids.insert(key.clone(), DedupEntry::InFlight);
        }
        entry
    }
}

impl DedupBatch<'_> {
    /// Marks an event as published.
    pub(super) fn published(&mut self, key: &DedupKey, entry_id: Option<EntryId>) {
        let Some(at) = self.keys.iter().position(|one| one == key) else { return };
        let key = self.keys.swap_remove(at);
        let mut state = self.window.lock();
        state.ids.insert(key.clone(), DedupEntry::Published(entry_id));
        state.order.push_back((Instant::now(), key));
        drop(state);
        self.window.settled.notify_waiters();
    }
}

impl Drop for DedupBatch<'_> {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        let mut state = self.window.lock();
        for key in &self.keys {
            state.ids.remove(key);
        }
        drop(state);
        self.window.settled.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> DedupKey {
        (None, EventId::new(id).unwrap())
    }

    async fn publish(window: &DedupWindow, id: &str) -> Result<(), Option<EntryId>> {
        let mut begin_batch = window.begin_batch();
        window.reserve(&mut begin_batch, key(id)).await?;
        begin_batch.published(&key(id), None);
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn ids_expire_by_age_and_by_count() {
        let window = DedupWindow::default();
        publish(&window, "a").await.unwrap();
        assert_eq!(publish(&window, "a").await, Err(None));
        tokio::time::advance(DEDUP_TTL + Duration::from_millis(1)).await;
        publish(&window, "a").await.unwrap();
        for number in 0..LOCAL_IDS_MAX + 10 {
            publish(&window, &number.to_string()).await.unwrap();
        }
        assert!(window.lock().ids.len() <= LOCAL_IDS_MAX + 1);
        publish(&window, "a").await.unwrap();
    }

    #[tokio::test]
    async fn of_two_concurrent_publishes_the_second_counts_if_the_first_failed() {
        for is_published in [true, false] {
            let window = DedupWindow::default();
            let mut first = window.begin_batch();
            window.reserve(&mut first, key("a")).await.unwrap();
            let mut second = std::pin::pin!(publish(&window, "a"));
            assert!(futures_util::poll!(&mut second).is_pending());
            if is_published {
                first.published(&key("a"), Some(EntryId::new(7, 0)));
            }
            drop(first);
            let expected = if is_published { Err(Some(EntryId::new(7, 0))) } else { Ok(()) };
            assert_eq!(second.await, expected);
        }
    }
}

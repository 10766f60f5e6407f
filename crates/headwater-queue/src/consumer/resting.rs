//! A message that failed in its lane waits for its next try, and the lane with it.
//!
//! Upstream: `worker`, with [`Order::PerKey`](crate::Order::PerKey). Promises: the entry stays pending meanwhile; each
//! new try is a delivery that the backend counts, so the tries are bounded whoever makes them.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Entry, EntryId, Reclaim, ReclaimFrom, Reclaimed, Settlement, StreamError};
use tracing::{debug, warn};

use super::lanes::Item;
use super::upkeep::RELEASED_FOR;
use super::worker::{State, Worker};

const PAUSE: Duration = Duration::from_millis(100);

impl Worker {
    /// The message's lane waits.
    pub(super) fn rest(self: &Arc<Self>, state: &mut State, mut item: Item, after: Duration) {
        let id = item.delivery.id;
        item.failures += 1;
        state.lanes.rest(item);
        self.spawn(Arc::clone(self).wake_after(id, after));
    }

    /// The message was given back unhandled: it waits at the head of its lane, and neither failure nor delivery counts.
    pub(super) fn stay_in_lane(self: &Arc<Self>, state: &mut State, item: Item) {
        let (id, deliveries) = (item.delivery.id, item.delivery.deliveries);
        state.lanes.rest(item);
        let worker = Arc::clone(self);
        self.spawn(async move {
            tokio::time::sleep(RELEASED_FOR).await;
            let mut state = worker.lock();
            if state.lanes.wake(id, deliveries) {
                worker.start_runners(state);
            }
        });
    }

    /// A message of which only the id was kept was read again, or is there no more.
    pub(super) fn read_one_again(self: &Arc<Self>, id: EntryId, entry: Option<Entry>) {
        let mut state = self.lock();
        if state.lanes.fill(id, entry.map(|entry| entry.fields)) {
            self.meters.anomaly("deleted_while_pending", 1);
            warn!(stream = %self.rules.stream, entry_id = %id, "a pending entry was trimmed or deleted by somebody; it is gone");
            state.outcomes.push(Settlement::done(id));
            self.gave(1);
        }
        self.start_runners(state);
        self.settle_soon();
    }

    async fn wake_after(self: Arc<Self>, id: EntryId, after: Duration) {
        tokio::time::sleep(after).await;
        loop {
            match self.reclaim_one(id).await {
                Ok(reclaimed) => return self.wake(id, &reclaimed),
                Err(StreamError::Fenced { .. }) => return self.fenced(),
                Err(StreamError::NoGroup { .. }) => return self.wake(id, &Reclaimed::default()),
                Err(error) if self.lease.is_trusted() => {
                    warn!(stream = %self.rules.stream, entry_id = %id, %error, "next try is late");
                    tokio::time::sleep(PAUSE).await;
                }
                Err(_) => return,
            }
        }
    }

    fn wake(self: &Arc<Self>, id: EntryId, reclaimed: &Reclaimed) {
        let mut state = self.lock();
        let Some(item) = state.lanes.resting(id) else { return };
        let deliveries = match reclaimed.entries.first() {
            Some(entry) => entry.deliveries,
            // Trimmed, flushed or settled by an operator: the message in hand is all there is, so it goes on.
            None => {
                self.meters.anomaly("gone_while_waiting", 1);
                debug!(stream = %self.rules.stream, entry_id = %id, "an entry in hand is pending no more");
                item.delivery.deliveries + 1
            }
        };
        if state.lanes.wake(id, deliveries) {
            self.start_runners(state);
        }
    }

    async fn reclaim_one(&self, id: EntryId) -> Result<Reclaimed, StreamError> {
        let reclaim = Reclaim {
            stream: &self.rules.stream,
            group: &self.job.group,
            consumer: &self.consumer,
            fence: self.fence.as_ref(),
            from: ReclaimFrom::Ids(&[id]),
            min_idle: Duration::ZERO,
            after: None,
            count: 1,
        };
        self.job.backend.reclaim(reclaim).await
    }
}

//! Retries a failed message in place, with [`MessageOrder::PerKey`](crate::MessageOrder::PerKey): the message stays in
//! flight and blocks its key until the next attempt.
//!
//! Upstream: `partition_consumer`. Guarantees: the entry stays pending during the backoff; the backend counts each
//! attempt as a delivery, so the limit holds across consumers.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    Entry, EntryId, ReclaimFrom, ReclaimRequest, ReclaimResult, Settlement, StreamError,
};
use tracing::{debug, warn};

use super::key_queues::InFlightMessage;
use super::maintenance::RELEASED_PAUSE;
use super::partition_consumer::{PartitionConsumer, PartitionConsumerState};

const RETRY_PAUSE: Duration = Duration::from_millis(100);

impl PartitionConsumer {
    /// Counts a failed attempt and retries the message after a backoff.
    pub(super) fn retry_in_place(
        self: &Arc<Self>,
        state: &mut PartitionConsumerState,
        mut item: InFlightMessage,
        after: Duration,
    ) {
        let id = item.delivery.id;
        item.failures += 1;
        state.queues.start_backoff(item);
        self.spawn(Arc::clone(self).retry_after(id, after));
    }

    /// Keeps a released message at the head of its key's queue. Counts neither a failed attempt nor a delivery.
    pub(super) fn release_in_place(
        self: &Arc<Self>,
        state: &mut PartitionConsumerState,
        item: InFlightMessage,
    ) {
        let (id, deliveries) = (item.delivery.id, item.delivery.deliveries);
        state.queues.start_backoff(item);
        let consumer = Arc::clone(self);
        self.spawn(async move {
            tokio::time::sleep(RELEASED_PAUSE).await;
            let mut state = consumer.lock();
            if state.queues.end_backoff(id, deliveries) {
                consumer.start_handlers(state);
            }
        });
    }

    /// Restores a message whose payload was dropped while it was blocked; `None` if its entry is gone.
    pub(super) fn restore_evicted(self: &Arc<Self>, id: EntryId, entry: Option<Entry>) {
        let mut state = self.lock();
        if state.queues.restore(id, entry.map(|entry| entry.fields)) {
            self.metrics.record_anomaly("deleted_while_pending", 1);
            warn!(stream = %self.policy.stream, entry_id = %id, "pending entry was trimmed or deleted; the message is lost");
            state.unsettled.push(Settlement::ack(id));
            self.remove_in_flight(1);
        }
        self.start_handlers(state);
        self.settle_now();
    }

    async fn retry_after(self: Arc<Self>, id: EntryId, after: Duration) {
        tokio::time::sleep(after).await;
        loop {
            match self.reclaim_one(id).await {
                Ok(reclaimed) => return self.end_backoff(id, &reclaimed),
                Err(StreamError::Fenced { .. }) => return self.on_fenced(),
                Err(StreamError::NoGroup { .. }) => {
                    return self.end_backoff(id, &ReclaimResult::default());
                }
                Err(error) if self.lease.is_valid() => {
                    warn!(stream = %self.policy.stream, entry_id = %id, %error, "the next attempt is delayed: counting the delivery failed, retrying");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(_) => return,
            }
        }
    }

    fn end_backoff(self: &Arc<Self>, id: EntryId, reclaimed: &ReclaimResult) {
        let mut state = self.lock();
        let Some(item) = state.queues.in_backoff(id) else { return };
        let deliveries = match reclaimed.entries.first() {
            Some(entry) => entry.deliveries,
            // Trimmed, flushed or acknowledged by an operator. This process has the only copy, so it continues.
            None => {
                self.metrics.record_anomaly("gone_while_waiting", 1);
                debug!(stream = %self.policy.stream, entry_id = %id, "in-flight entry is no longer pending");
                item.delivery.deliveries + 1
            }
        };
        if state.queues.end_backoff(id, deliveries) {
            self.start_handlers(state);
        }
    }

    /// Counts one more delivery of an entry of this consumer.
    async fn reclaim_one(&self, id: EntryId) -> Result<ReclaimResult, StreamError> {
        let reclaim = ReclaimRequest {
            stream: &self.policy.stream,
            group: &self.context.group,
            consumer: &self.consumer_name,
            fence: self.fence.as_ref(),
            from: ReclaimFrom::Ids(&[id]),
            min_idle: Duration::ZERO,
            after: None,
            count: 1,
        };
        self.context.backend.reclaim(reclaim).await
    }
}

//! Batches settlements (acknowledge, retry, dead-letter, release): many finished deliveries in one backend call.
//!
//! Upstream: `partition_consumer` collects finished deliveries. Downstream:
//! [`Streams::settle`](headwater_stream::Streams::settle).
//! Guarantees: one call at a time per partition, with everything that finished meanwhile; the follow-up entry (retry,
//! dead letter) is written with the acknowledgement or before it; a failed call is retried while the lease is trusted,
//! which is idempotent. If the lease is lost, nothing is settled and the consumer terminates. Entries that Redis lost
//! are left to `data_loss_recovery`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX, FOLLOW_UP_BYTES_MAX};
use headwater_stream::{
    Backoff, EntryId, SettleAction, SettleBatch, SettleResult, Settlement, StreamError,
};
use tokio::time::Instant;
use tracing::{debug, error, warn};

use super::data_loss_recovery::LossRecovery;
use super::handler_task::yield_to_queue;
use super::partition_consumer::{PartitionConsumer, PartitionConsumerState};

/// A batch of this size is settled at once.
const SETTLE_BATCH: usize = 256;
/// While handlers are running, a finished delivery waits at most this long for a larger batch.
const SETTLE_AFTER: Duration = Duration::from_millis(1);
/// Backoff between attempts of a settle call.
const BACKOFF: Backoff = Backoff::doubling(Duration::from_millis(20), Duration::from_secs(2));
/// Bytes of follow-up entries in one call; the last entry may exceed it.
const FOLLOW_UP_BYTES_PER_CALL: usize = BATCH_BYTES_MAX - FOLLOW_UP_BYTES_MAX;

impl PartitionConsumer {
    /// Settles finished deliveries without waiting for a larger batch.
    pub(super) fn settle_now(self: &Arc<Self>) {
        let mut state = self.lock();
        self.start_settle_task(&mut state, true);
        drop(state);
        if self.context.skips_partitions() {
            self.request_fetch(true);
        }
    }

    /// Starts the settle task if a batch is due; `now` if no handler is about to finish. Returns whether it started.
    pub(super) fn start_settle_task(
        self: &Arc<Self>,
        state: &mut PartitionConsumerState,
        now: bool,
    ) -> bool {
        if !state.should_settle(now) {
            return false;
        }
        state.has_settle_task = true;
        self.spawn(Arc::clone(self).settle_all(state.generation));
        true
    }

    /// Settles until nothing is left to settle.
    async fn settle_all(self: Arc<Self>, generation: u64) {
        // Handlers of other partitions finish first, so that concurrent settle calls share one write.
        yield_to_queue().await;
        while let Some(batch) = self.take_batch(generation) {
            self.settle_batch(&batch).await;
        }
    }

    /// The next batch; `None` ends the settle task.
    fn take_batch(&self, generation: u64) -> Option<Arc<Vec<Settlement>>> {
        let mut state = self.lock();
        if state.generation != generation {
            return None;
        }
        let count = batch_len(&state);
        if count == 0 {
            state.has_settle_task = false;
            state.settling = Arc::default();
            self.wake_waiters(&state);
            return None;
        }
        let rest = state.unsettled.split_off(count);
        let batch = Arc::new(std::mem::replace(&mut state.unsettled, rest));
        state.settling = Arc::clone(&batch);
        Some(batch)
    }

    async fn settle_batch(self: &Arc<Self>, batch: &[Settlement]) {
        let started = Instant::now();
        match self.settle_with_retry(batch).await {
            Ok(settled) => {
                self.metrics.record_settled(settled.applied, started.elapsed());
                self.metrics.set_in_flight(self.context.in_flight.load(Ordering::Relaxed));
                if settled.stale > 0 {
                    self.loss_recovery().recover_stale(batch).await;
                }
            }
            Err(StreamError::Fenced { .. }) => self.on_fenced(),
            Err(error) if batch.len() > 1 => {
                debug!(stream = %self.policy.stream, %error, "settle failed for the batch, settling entries one by one");
                for one in batch.chunks(1) {
                    if let Err(error) = self.settle_with_retry(one).await {
                        self.on_settle_failed(one[0].id, &error);
                    }
                }
            }
            Err(error) => self.on_settle_failed(batch[0].id, &error),
        }
    }

    /// Settles; retries transient errors while the lease is trusted.
    async fn settle_with_retry(&self, batch: &[Settlement]) -> Result<SettleResult, StreamError> {
        let mut retry = BACKOFF.timer();
        loop {
            let settle = SettleBatch {
                stream: &self.policy.stream,
                group: &self.context.group,
                consumer: &self.consumer_name,
                fence: self.fence.as_ref(),
                entries: batch,
            };
            match self.context.backend.settle(settle).await {
                Err(error) if error.is_transient() && self.lease.is_valid() => {
                    self.metrics.record_anomaly("settle_failed", 1);
                    warn!(stream = %self.policy.stream, %error, "settle failed, retrying");
                    retry.wait().await;
                }
                result => return result,
            }
        }
    }

    pub(super) fn loss_recovery(&self) -> LossRecovery {
        LossRecovery {
            backend: Arc::clone(&self.context.backend),
            topic: self.context.topic.clone(),
            stream: self.policy.stream.clone(),
            group: self.context.group.clone(),
            data_epoch: Arc::clone(&self.data_epoch),
        }
    }

    /// The entry stays pending; the next owner of the partition reclaims it.
    fn on_settle_failed(self: &Arc<Self>, id: EntryId, error: &StreamError) {
        if matches!(error, StreamError::Fenced { .. }) {
            return self.on_fenced();
        }
        self.metrics.record_anomaly("unsettled", 1);
        error!(stream = %self.policy.stream, entry_id = %id, %error, "entry could not be settled and stays pending");
    }
}

impl PartitionConsumerState {
    /// Whether to start settling; `now` if no handler is about to finish.
    fn should_settle(&mut self, now: bool) -> bool {
        if self.has_settle_task || self.unsettled.is_empty() {
            return false;
        }
        if now || self.unsettled.len() >= SETTLE_BATCH {
            self.oldest_unsettled = None;
            return true;
        }
        let oldest = *self.oldest_unsettled.get_or_insert_with(Instant::now);
        if self.unsettled.len().is_multiple_of(16) && oldest.elapsed() >= SETTLE_AFTER {
            self.oldest_unsettled = None;
            return true;
        }
        false
    }
}

/// How many settlements fit into one call.
fn batch_len(state: &PartitionConsumerState) -> usize {
    let mut bytes = 0;
    let fits = |entry: &&Settlement| {
        let has_room = bytes < FOLLOW_UP_BYTES_PER_CALL;
        bytes += match &entry.action {
            SettleAction::Append { fields, .. } | SettleAction::Reschedule { fields, .. } => {
                fields.bytes()
            }
            SettleAction::Ack | SettleAction::Delete | SettleAction::Release => 0,
        };
        has_room
    };
    state.unsettled.iter().take(BATCH_MAX).take_while(fits).count()
}

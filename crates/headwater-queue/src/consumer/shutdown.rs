//! Shuts a partition consumer down: in order (`shut_down`), or at once when its lease is lost (`abandon`).
//!
//! Upstream: `partition_set`, when a partition is revoked or lost or the subscription stops.
//! Order of `shut_down`: stop reading, release what no handler has started, wait for the last read, wait for running
//! handlers up to the drain timeout and then abort them, settle everything, terminate.
//! Guarantees: no attempt is counted for a released message; when `shut_down` returns, nothing is in flight, everything
//! is settled (as long as the lease was valid) and no read can deliver to this consumer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_stream::{DeliveredEntry, Settlement};
use tokio::time::Instant;
use tracing::warn;

use super::partition_consumer::{PartitionConsumer, PartitionConsumerState, PartitionPhase};

/// Minimum time to wait for the last read if the backend does not answer.
const LAST_READ_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for settling after the last handler finished, if the backend does not answer.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

/// What was in flight in a consumer that terminated.
#[derive(Default)]
pub(super) struct Unfinished {
    pub(super) unhandled: Vec<DeliveredEntry>,
    pub(super) unsettled: Vec<Settlement>,
}

impl PartitionConsumer {
    /// Finishes what is in flight: with [`PartitionPhase::Stopping`] running handlers only, with
    /// [`PartitionPhase::Draining`] all messages.
    pub(super) async fn shut_down(self: &Arc<Self>, phase: PartitionPhase, drain: Duration) {
        let until = Instant::now() + drain;
        self.begin_shutdown(phase);
        let last_read = async {
            self.fetcher.remove(self).await;
            self.reclaim_unseen_before_shutdown().await;
        };
        if tokio::time::timeout(drain.max(LAST_READ_TIMEOUT), last_read).await.is_err() {
            // What the read still delivers is released, or stays pending for the next owner.
            warn!(stream = %self.policy.stream, "the last read did not return before its timeout");
        }
        let drained = self
            .wait_until(|state| state.phase == PartitionPhase::Terminated || state.is_drained());
        if tokio::time::timeout_at(until, drained).await.is_err() {
            warn!(stream = %self.policy.stream, ?drain, "handlers exceeded the drain timeout and are aborted");
            self.abort_handlers();
        }
        self.settle_now();
        let settled = self
            .wait_until(|state| state.phase == PartitionPhase::Terminated || state.is_settled());
        tokio::select! {
            _ = tokio::time::timeout(SETTLE_TIMEOUT, settled) => {}
            () = self.lease.lost() => {}
        }
        self.abandon();
    }

    /// Stops reading. While stopping, starts no handlers and releases what no handler has started.
    fn begin_shutdown(self: &Arc<Self>, phase: PartitionPhase) {
        self.is_reading.store(false, Ordering::Release);
        let mut state = self.lock();
        if state.phase == PartitionPhase::Terminated {
            return;
        }
        state.phase = phase;
        if phase == PartitionPhase::Stopping {
            let ids = state.queues.clear();
            self.remove_in_flight(ids.len());
            self.ready.store(0, Ordering::SeqCst);
            self.blocked.store(0, Ordering::SeqCst);
            state.release(ids);
        }
        // While draining, messages in flight are handled even if the subscription is paused.
        self.start_handlers(state);
        self.settle_now();
    }

    /// Aborts the handlers and releases their messages.
    fn abort_handlers(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.phase == PartitionPhase::Terminated {
            return;
        }
        state.phase = PartitionPhase::Stopping;
        self.abort_all_tasks(&mut state);
        let mut ids = state.queues.clear();
        ids.extend(state.running.drain(..).flatten().map(|delivery| delivery.id));
        state.idle_slots.clear();
        self.blocked.store(0, Ordering::SeqCst);
        self.remove_in_flight(ids.len());
        // The aborted settle task may have settled these already; settling is idempotent.
        let interrupted = std::mem::take(&mut state.settling);
        state.unsettled.splice(0..0, interrupted.iter().cloned());
        state.release(ids);
        drop(state);
        self.settle_now();
    }

    /// Terminates at once: aborts the handlers and settles nothing. What was in flight stays pending and is returned.
    pub(super) fn terminate(&self) -> Unfinished {
        self.is_reading.store(false, Ordering::Release);
        let mut state = self.lock();
        if state.phase == PartitionPhase::Terminated {
            return Unfinished::default();
        }
        state.phase = PartitionPhase::Terminated;
        self.abort_all_tasks(&mut state);
        let mut unhandled: Vec<DeliveredEntry> = state.running.drain(..).flatten().collect();
        unhandled.extend(state.queues.take_all());
        state.idle_slots.clear();
        self.blocked.store(0, Ordering::SeqCst);
        let mut unsettled = std::mem::take(&mut state.unsettled);
        unsettled.extend(std::mem::take(&mut state.settling).iter().cloned());
        self.remove_in_flight(self.in_flight());
        self.wake_waiters(&state);
        drop(state);
        self.fetcher.remove_now(self);
        Unfinished { unhandled, unsettled }
    }

    /// Aborts all tasks. A handler that blocks its thread keeps running, but its outcome is ignored.
    fn abort_all_tasks(&self, state: &mut PartitionConsumerState) {
        state.generation += 1;
        state.has_settle_task = false;
        self.tasks.lock().expect("no code panics while it holds the tasks").abort_all();
    }

    /// The backend rejected an effect as fenced: the partition has another owner.
    pub(super) fn on_fenced(&self) {
        warn!(stream = %self.policy.stream, consumer = %self.consumer_name, "fenced: the partition has another owner");
        self.metrics.record_anomaly("fenced", 1);
        self.fenced.signal();
        self.abandon();
    }

    /// Terminates after the lease was lost. The next owner reclaims what was in flight; if Redis lost it, it is
    /// appended again.
    pub(super) fn abandon(&self) {
        let Unfinished { unhandled, unsettled } = self.terminate();
        let recovery = self.loss_recovery();
        let requeued = unhandled.iter().map(|delivery| recovery.requeue(delivery));
        let left: Vec<Settlement> = unsettled.into_iter().chain(requeued).collect();
        if !left.is_empty() {
            self.context.spawn_recovery(recovery.recover_all(left));
        }
    }
}

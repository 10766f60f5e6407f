//! Periodic maintenance of all subscriptions of a process.
//!
//! Upstream: `subscription` registers. Downstream: `partition_consumer`.
//! Guarantees: in-flight entries are kept alive, so that other consumers do not take them for orphaned; released entries
//! are reclaimed; finished deliveries are settled even if a handler blocks the thread that would do so. The
//! `runtime_waker` ensures that a thread is available for that.
//! One task serves all subscriptions: a thousand idle topics cost one check each, not one task each.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use headwater_stream::EntryId;
use headwater_stream::limits::BATCH_MAX;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::warn;

use super::partition_consumer::PartitionConsumer;
use super::partition_set::PartitionSet;
use super::reclaim::ReclaimScope;
use super::runtime_waker::RuntimeWaker;
use crate::config::Mode;

/// How often subscriptions are checked.
const TICK: Duration = Duration::from_millis(500);
/// Minimum time between two searches of a partition for orphaned entries.
const RECLAIM_EVERY: Duration = Duration::from_secs(5);
/// How soon a message that was released here is reclaimed.
pub(super) const RELEASED_PAUSE: Duration = Duration::from_secs(1);
/// Maximum partitions searched per tick.
const RECLAIMS_PER_TICK: usize = 10;

#[derive(Default)]
pub(super) struct ConsumerMaintenance {
    shared: Arc<MaintenanceTask>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct MaintenanceTask {
    state: Mutex<MaintenanceState>,
}

#[derive(Default)]
struct MaintenanceState {
    partition_sets: Vec<Weak<PartitionSet>>,
    is_running: bool,
}

impl Drop for ConsumerMaintenance {
    fn drop(&mut self) {
        if let Some(task) = self.task.lock().expect("no code panics while it holds the task").take()
        {
            task.abort();
        }
    }
}

impl ConsumerMaintenance {
    /// Maintains this subscription until it is dropped.
    pub(super) fn register(&self, partition_set: &Arc<PartitionSet>) {
        let mut task = self.task.lock().expect("no code panics while it holds the task");
        let mut state = self.shared.lock();
        state.partition_sets.push(Arc::downgrade(partition_set));
        // If its runtime was shut down, the task has ended and `is_running` is stale.
        if !state.is_running || task.as_ref().is_none_or(JoinHandle::is_finished) {
            state.is_running = true;
            let running = Arc::clone(&self.shared).run(RuntimeWaker::start());
            *task = Some(tokio::spawn(running));
        }
    }
}

impl MaintenanceTask {
    fn lock(&self) -> std::sync::MutexGuard<'_, MaintenanceState> {
        self.state.lock().expect("no code panics while it holds the subscriptions")
    }

    /// Ends when no subscription is left.
    async fn run(self: Arc<Self>, _waker: Option<RuntimeWaker>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pass = MaintenancePass::default();
        loop {
            ticks.tick().await;
            let partition_sets: Vec<Arc<PartitionSet>> = {
                let mut state = self.lock();
                state.partition_sets.retain(|set| set.strong_count() > 0);
                if state.partition_sets.is_empty() {
                    state.is_running = false;
                    return;
                }
                state.partition_sets.iter().filter_map(Weak::upgrade).collect()
            };
            let consumers = partition_sets.iter().flat_map(|set| set.consumers());
            pass.run_once(&consumers.collect::<Vec<_>>());
        }
    }
}

#[derive(Default)]
struct MaintenancePass {
    /// The partition that was searched last.
    turn: usize,
}

impl MaintenancePass {
    fn run_once(&mut self, consumers: &[Arc<PartitionConsumer>]) {
        let now = Instant::now();
        for consumer in consumers {
            consumer.settle_now();
            consumer.keep_alive_if_due(now);
        }
        // Round robin, a few per tick: with more topics, the interval grows and not the cost.
        for _ in 0..RECLAIMS_PER_TICK.min(consumers.len()) {
            self.turn = (self.turn + 1) % consumers.len();
            consumers[self.turn].reclaim_orphans_if_due(now, RECLAIM_EVERY);
        }
        for consumer in consumers {
            consumer.start_waiting_handlers();
            if consumer.has_released() && consumer.reclaim_orphans_if_due(now, RELEASED_PAUSE) {
                consumer.clear_released();
            }
        }
    }
}

impl PartitionConsumer {
    /// Resets the idle time of in-flight entries, so that no other consumer reclaims them.
    fn keep_alive_if_due(self: &Arc<Self>, now: Instant) {
        let every = (self.context.config.reclaim_idle / 3).max(TICK);
        if self.in_flight() > 0 && self.timers.kept_alive.is_due(now, every) {
            self.spawn(Arc::clone(self).keep_alive());
        }
    }

    async fn keep_alive(self: Arc<Self>) {
        let ids: Vec<EntryId> = self.in_flight_ids().into_iter().collect();
        for ids in ids.chunks(BATCH_MAX) {
            let (stream, group) = (&self.policy.stream, &self.context.group);
            match self.context.backend.keep_alive(stream, group, &self.consumer_name, ids).await {
                Ok(gone) if gone.is_empty() => {}
                Ok(gone) => {
                    // Entries that were settled meanwhile are no longer in flight.
                    let in_flight = self.in_flight_ids();
                    let gone: HashSet<EntryId> =
                        gone.into_iter().filter(|id| in_flight.contains(id)).collect();
                    if !gone.is_empty() && !self.is_data_lost(&gone).await {
                        self.metrics.record_anomaly("taken_away", gone.len());
                        warn!(stream = %self.policy.stream, entries = gone.len(), "in-flight entries are no longer pending and are discarded");
                        self.discard(&gone);
                    }
                }
                Err(error) => {
                    warn!(stream = %self.policy.stream, %error, "keeping in-flight entries alive failed");
                }
            }
        }
    }

    /// Whether entries are no longer pending because the server lost its data. Then this process has the only copy. If
    /// the check fails, assume the data was lost; the next pass re-checks.
    async fn is_data_lost(&self, gone: &HashSet<EntryId>) -> bool {
        let is_lost = self.loss_recovery().data_was_lost().await.unwrap_or(true);
        if is_lost {
            self.metrics.record_anomaly("server_lost_all", 1);
            warn!(stream = %self.policy.stream, entries = gone.len(), "the server lost in-flight entries; they are kept");
        }
        is_lost
    }

    /// Searches for released and orphaned entries if the interval has passed. Returns whether it started a search.
    fn reclaim_orphans_if_due(self: &Arc<Self>, now: Instant, every: Duration) -> bool {
        // A search that waits for capacity continues on its own; a second one would only wait beside it.
        let is_free = self.is_reading() && !self.is_reclaiming();
        let is_due = is_free && self.timers.reclaimed.is_due(now, every);
        if is_due {
            self.spawn(Arc::clone(self).reclaim_orphans(now));
        }
        is_due
    }

    /// Searches for released and orphaned entries now.
    pub(super) async fn reclaim_orphans_now(self: Arc<Self>) {
        self.reclaim_orphans(Instant::now()).await;
    }

    async fn reclaim_orphans(self: Arc<Self>, now: Instant) {
        let mut scopes = Vec::new();
        match self.context.config.mode {
            // No other consumer may work on the partition.
            Mode::Owned => scopes.push(ReclaimScope::Others),
            Mode::Shared => {
                scopes.push(ReclaimScope::released());
                let idle = self.context.config.reclaim_idle;
                if self.timers.reclaimed_idle.is_due(now, idle / 3) {
                    scopes.push(ReclaimScope::Idle(idle));
                }
            }
        }
        for scope in scopes {
            if let Err(error) = self.reclaim(&scope).await {
                if matches!(error, headwater_stream::StreamError::Fenced { .. }) {
                    return self.on_fenced();
                }
                warn!(stream = %self.policy.stream, %error, "searching for orphaned entries failed");
            }
        }
    }
}

/// Limits how often something is done.
#[derive(Default)]
pub(super) struct IntervalTimer(Mutex<Option<Instant>>);

impl IntervalTimer {
    /// Whether the interval has passed; if so, it starts again. The first interval starts with the first call.
    fn is_due(&self, now: Instant, every: Duration) -> bool {
        let mut last = self.0.lock().expect("no code panics while it holds the time");
        let last = last.get_or_insert(now);
        let is_due = now.duration_since(*last) >= every;
        if is_due {
            *last = now;
        }
        is_due
    }
}

/// The maintenance timers of a partition.
#[derive(Default)]
pub(super) struct PartitionTimers {
    kept_alive: IntervalTimer,
    reclaimed: IntervalTimer,
    reclaimed_idle: IntervalTimer,
}

//! Periodic maintenance of all subscriptions of a process: partitions search for orphaned entries now and then.
//!
//! Upstream: `subscription` registers. Downstream: each `partition_driver`. The `runtime_waker` ensures that a thread is
//! available for drivers even if handlers block theirs.
//! One task serves all subscriptions: a thousand idle topics cost a few searches per tick, not one each.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;

use super::partition_set::PartitionSet;
use super::partition_state::PartitionEvent;
use super::runtime_waker::RuntimeWaker;

const TICK: Duration = Duration::from_millis(500);
/// Maximum partitions that search for orphaned entries, per tick.
const SEARCHES_PER_TICK: usize = 10;

#[derive(Default)]
pub(super) struct ConsumerMaintenance {
    shared: Arc<MaintenanceTask>,
    task: Mutex<Option<AbortOnDropHandle<()>>>,
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

impl ConsumerMaintenance {
    /// Maintains this subscription until it is dropped.
    pub(super) fn register(&self, partition_set: &Arc<PartitionSet>) {
        let mut task = self.task.lock().expect("no code panics while it holds the task");
        let mut state = self.shared.lock();
        state.partition_sets.push(Arc::downgrade(partition_set));
        // If its runtime was shut down, the task has ended and `is_running` is stale.
        if !state.is_running || task.as_ref().is_none_or(AbortOnDropHandle::is_finished) {
            state.is_running = true;
            let running = Arc::clone(&self.shared).run(RuntimeWaker::start());
            *task = Some(AbortOnDropHandle::new(tokio::spawn(running)));
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
        // The partition that searched last.
        let mut turn = 0;
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
            let partitions: Vec<_> =
                partition_sets.iter().flat_map(|set| set.partitions()).collect();
            // Round robin, a few per tick: with more topics, the interval grows and not the cost.
            for _ in 0..SEARCHES_PER_TICK.min(partitions.len()) {
                turn = (turn + 1) % partitions.len();
                partitions[turn].send(PartitionEvent::SearchOrphans);
            }
        }
    }
}

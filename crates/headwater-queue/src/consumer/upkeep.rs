//! Upkeep: what has to be done from time to time for all subscriptions of a process.
//!
//! Upstream: `subscription` registers. Downstream: `worker`.
//! Promises: entries in hand are kept alive, so that nobody takes live work for orphaned; what was released is taken up
//! again; outcomes that nobody settled because a handler blocks its thread are settled. A `pulse` sees to it that there is
//! a thread to do so.
//! One task for all subscriptions: a thousand idle topics cost a look at each, not a task each.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use headwater_stream::EntryId;
use headwater_stream::limits::BATCH_MAX;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::warn;

use super::adoption::Whose;
use super::pulse::Pulse;
use super::worker::Worker;
use super::workplace::Bench;
use crate::config::Mode;

/// How often subscriptions are looked at.
const TICK: Duration = Duration::from_millis(500);
/// How often a partition is searched for released entries, at most.
const SWEEP_EVERY: Duration = Duration::from_secs(5);
/// How soon what was released here is taken up again.
pub(super) const RELEASED_FOR: Duration = Duration::from_secs(1);
/// Partitions searched in one tick, at most.
const SWEPT_AT_ONCE: usize = 10;

#[derive(Default)]
pub(super) struct Upkeep {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    benches: Vec<Weak<Bench>>,
    /// Whether somebody looks after them.
    is_running: bool,
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        if let Some(task) = self.task.lock().expect("no code panics while it holds the task").take()
        {
            task.abort();
        }
    }
}

impl Upkeep {
    /// Looks after this subscription until it is gone.
    pub(super) fn add(&self, bench: &Arc<Bench>) {
        let mut task = self.task.lock().expect("no code panics while it holds the task");
        let mut state = self.shared.lock();
        state.benches.push(Arc::downgrade(bench));
        // If the runtime it was spawned on is gone, it has ended without saying so.
        if !state.is_running || task.as_ref().is_none_or(JoinHandle::is_finished) {
            state.is_running = true;
            let running = Arc::clone(&self.shared).run(Pulse::start());
            *task = Some(tokio::spawn(running));
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the subscriptions")
    }

    /// Ends when there is no subscription left.
    async fn run(self: Arc<Self>, _pulse: Option<Pulse>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sweep = Sweep::default();
        loop {
            ticks.tick().await;
            let benches: Vec<Arc<Bench>> = {
                let mut state = self.lock();
                state.benches.retain(|bench| bench.strong_count() > 0);
                if state.benches.is_empty() {
                    state.is_running = false;
                    return;
                }
                state.benches.iter().filter_map(Weak::upgrade).collect()
            };
            let workers = benches.iter().flat_map(|bench| bench.workers());
            sweep.run_once(&workers.collect::<Vec<_>>());
        }
    }
}

/// Whose turn it is.
#[derive(Default)]
struct Sweep {
    turn: usize,
}

impl Sweep {
    fn run_once(&mut self, workers: &[Arc<Worker>]) {
        let now = Instant::now();
        for worker in workers {
            worker.settle_soon();
            worker.keep_alive_if_due(now);
        }
        // Round robin, a few at a time: the cost does not grow with the number of topics, only the time between looks.
        for _ in 0..SWEPT_AT_ONCE.min(workers.len()) {
            self.turn = (self.turn + 1) % workers.len();
            workers[self.turn].sweep_if_due(now, SWEEP_EVERY);
        }
        for worker in workers {
            worker.go_on();
            if worker.has_released() && worker.sweep_if_due(now, RELEASED_FOR) {
                worker.forget_released();
            }
        }
    }
}

impl Worker {
    /// Tells the group that what is in hand is being worked on.
    fn keep_alive_if_due(self: &Arc<Self>, now: Instant) {
        let every = (self.job.config.reclaim_idle / 3).max(TICK);
        if self.in_hand() > 0 && self.dates.kept_alive.is_due(now, every) {
            self.spawn(Arc::clone(self).keep_alive());
        }
    }

    async fn keep_alive(self: Arc<Self>) {
        let ids: Vec<EntryId> = self.ids_in_hand().into_iter().collect();
        for ids in ids.chunks(BATCH_MAX) {
            let (stream, group) = (&self.rules.stream, &self.job.group);
            match self.job.backend.keep_alive(stream, group, &self.consumer, ids).await {
                Ok(gone) if gone.is_empty() => {}
                Ok(gone) => {
                    // Those that were settled meanwhile are not in hand any more, and nobody misses them.
                    let in_hand = self.ids_in_hand();
                    let gone: HashSet<EntryId> =
                        gone.into_iter().filter(|id| in_hand.contains(id)).collect();
                    if !gone.is_empty() && !self.are_lost(&gone).await {
                        self.meters.anomaly("taken_away", gone.len());
                        warn!(stream = %self.rules.stream, entries = gone.len(), "entries in hand are pending no more");
                        self.forget(&gone);
                    }
                }
                Err(error) => {
                    warn!(stream = %self.rules.stream, %error, "entries in hand were not kept alive");
                }
            }
        }
    }

    /// Whether entries are pending no more because the server lost everything: then they are in our hands only. While
    /// nobody can tell, they are taken for that: asked again, they will still be gone.
    async fn are_lost(&self, gone: &HashSet<EntryId>) -> bool {
        let is_lost = self.rescuer().has_lost_all().await.unwrap_or(true);
        if is_lost {
            self.meters.anomaly("server_lost_all", 1);
            warn!(stream = %self.rules.stream, entries = gone.len(), "the server lost entries in hand, they are kept");
        }
        is_lost
    }

    /// Looks for entries that somebody gave back or left behind.
    fn sweep_if_due(self: &Arc<Self>, now: Instant, every: Duration) -> bool {
        // One that waits for room goes on by itself; a second one would only wait beside it.
        let is_free = self.is_reading() && !self.is_adopting();
        let is_due = is_free && self.dates.swept.is_due(now, every);
        if is_due {
            self.spawn(Arc::clone(self).sweep(now));
        }
        is_due
    }

    /// Shared: what others gave back waits for us.
    pub(super) async fn sweep_at_once(self: Arc<Self>) {
        self.sweep(Instant::now()).await;
    }

    async fn sweep(self: Arc<Self>, now: Instant) {
        let mut whose = Vec::new();
        match self.job.config.mode {
            // Nobody else may work on the partition.
            Mode::Owned => whose.push(Whose::Others),
            Mode::Shared => {
                whose.push(Whose::released());
                let idle = self.job.config.reclaim_idle;
                if self.dates.searched_idle.is_due(now, idle / 3) {
                    whose.push(Whose::Idle(idle));
                }
            }
        }
        for whose in whose {
            if let Err(error) = self.adopt(&whose).await {
                if matches!(error, headwater_stream::StreamError::Fenced { .. }) {
                    return self.fenced();
                }
                warn!(stream = %self.rules.stream, %error, "the search for orphaned entries failed");
            }
        }
    }
}

/// When something was last done.
#[derive(Default)]
pub(super) struct Date(Mutex<Option<Instant>>);

impl Date {
    /// Whether it is to be done now; then it counts as done. The first time is one interval after the first look.
    fn is_due(&self, now: Instant, every: Duration) -> bool {
        let mut last = self.0.lock().expect("no code panics while it holds a date");
        let last = last.get_or_insert(now);
        let is_due = now.duration_since(*last) >= every;
        if is_due {
            *last = now;
        }
        is_due
    }
}

/// When the regular work on a partition was last done.
#[derive(Default)]
pub(super) struct Dates {
    kept_alive: Date,
    swept: Date,
    searched_idle: Date,
}

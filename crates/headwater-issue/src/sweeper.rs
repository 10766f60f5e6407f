//! The sweeper: sends overdue nudges again and requeues issues with expired claims.
//!
//! Upstream: every process that has a store runs one. Downstream: `store`, `nudge`, and the worker of this process.
//! Guarantees: a queued issue is nudged until a worker claims it; an expired claim is requeued. While the stream is
//! unavailable or the local worker is idle, issues are also passed to the local worker directly: the sweep is the
//! guarantee, a nudge only a hint. A full page is a backlog: the local worker gets all of it, and the sweep goes on as soon as
//! the worker has begun most of it.

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use tokio::time::timeout;
use tracing::{debug, error, warn};

use crate::claim::{Nudge, SweepOptions, SweepReport};
use crate::error::{IssueError, Result};
use crate::limits::{DELAY_MAX, NUDGE_OVERDUE_MIN, NUDGES_UNREAD_MAX};
use crate::metrics::{SWEEP_NUDGES, SWEEP_QUARANTINED, SWEEP_REQUEUED};
use crate::nudge::Nudger;
use crate::store::Store;
use crate::worker::Worker;

/// Consecutive sweeps of one `run_once`.
const SWEEPS_PER_RUN_MAX: usize = 64;

/// Factor of `nudge_overdue` while the stream has a backlog of unread nudges.
const BACKLOG_OVERDUE_FACTOR: u32 = 12;

/// Minimum of `nudge_overdue` while the stream has a backlog.
const BACKLOG_OVERDUE_MIN: Duration = Duration::from_secs(60);

/// Timeout of stream calls.
const STREAM_DEADLINE: Duration = Duration::from_secs(2);

/// Configuration of a sweeper.
#[derive(Clone, Copy, Debug)]
pub struct SweeperConfig {
    /// Interval of sweeps. Default: 5 s.
    pub every: Duration,
    /// Options of each sweep.
    pub options: SweepOptions,
}

impl Default for SweeperConfig {
    fn default() -> Self {
        Self { every: Duration::from_secs(5), options: SweepOptions::default() }
    }
}

/// Sweeps a store.
#[derive(Debug)]
pub struct Sweeper {
    store: Arc<dyn Store>,
    nudger: Nudger,
    worker: Option<Worker>,
    config: SweeperConfig,
}

impl Sweeper {
    /// Creates a sweeper. `worker` receives issues directly while it is idle or the stream is unavailable; without one,
    /// issues wait for the sweeper of a process with a worker.
    pub fn new(
        store: Arc<dyn Store>,
        nudger: Nudger,
        worker: Option<Worker>,
        config: SweeperConfig,
    ) -> Result<Self> {
        config.options.validate()?;
        if config.every.is_zero() {
            return Err(IssueError::invalid("every", "must be greater than zero"));
        }
        if config.options.nudge_overdue < NUDGE_OVERDUE_MIN {
            let problem = format!("must be at least {NUDGE_OVERDUE_MIN:?}");
            return Err(IssueError::invalid("nudge_overdue", problem));
        }
        Ok(Self { store, nudger, worker, config })
    }

    /// Sweeps until nothing is left or the local worker has enough to do, at most 64 times. Returns the combined report.
    pub async fn run_once(&self) -> Result<SweepReport> {
        let mut all = SweepReport::default();
        for _ in 0..SWEEPS_PER_RUN_MAX {
            let report = self.store.sweep(&self.options().await).await?;
            self.dispatch(&report).await;
            all.nudges.extend(report.nudges);
            all.quarantined.extend(report.quarantined);
            all.requeued += report.requeued;
            all.pruned += report.pruned;
            all.more = report.more;
            if !report.more || self.is_worker_busy() {
                break;
            }
        }
        Ok(all)
    }

    /// Whether the local worker has not begun most of a full page.
    fn is_worker_busy(&self) -> bool {
        let due_max = self.config.options.limit / 2;
        self.worker.as_ref().is_some_and(|worker| worker.local_queue().has_more_due_than(due_max))
    }

    /// Waits until the local worker can begin more issues, at most until the next regular sweep.
    async fn until_worker_is_free(&self) {
        if let Some(worker) = &self.worker {
            let waiting = worker.local_queue().until_due_at_most(self.config.options.limit / 2);
            let _ = timeout(self.config.every, waiting).await;
        }
        // In any case let other tasks run first.
        tokio::task::yield_now().await;
    }

    /// Sweeps until `shutdown` completes. Failed sweeps are retried.
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let sweeping = async {
            loop {
                match self.run_once().await {
                    // More work is left: continue as soon as it can be done.
                    Ok(SweepReport { more: true, .. }) => self.until_worker_is_free().await,
                    Ok(_) => tokio::time::sleep(self.config.every).await,
                    Err(error) => {
                        warn!(%error, "sweep failed, retrying");
                        tokio::time::sleep(self.config.every).await;
                    }
                }
            }
        };
        // Cancel-safe: nudges of a dropped sweep become overdue again.
        tokio::select! {
            () = shutdown => {}
            () = sweeping => {}
        }
    }

    /// The options, with a longer `nudge_overdue` while the stream has a backlog of unread nudges or the local worker has
    /// enough to do. Bounded, because a nudge may be lost.
    async fn options(&self) -> SweepOptions {
        let unread = timeout(STREAM_DEADLINE, self.nudger.unread()).await;
        let has_backlog = matches!(unread, Ok(Ok(unread)) if unread > NUDGES_UNREAD_MAX);
        if !has_backlog && !self.is_worker_busy() {
            return self.config.options;
        }
        let nudge_overdue =
            self.config.options.nudge_overdue.saturating_mul(BACKLOG_OVERDUE_FACTOR);
        let nudge_overdue = nudge_overdue.clamp(BACKLOG_OVERDUE_MIN, DELAY_MAX);
        SweepOptions { nudge_overdue, ..self.config.options }
    }

    async fn dispatch(&self, report: &SweepReport) {
        counter!(SWEEP_REQUEUED).increment(report.requeued as u64);
        counter!(SWEEP_QUARANTINED).increment(report.quarantined.len() as u64);
        for issue_id in &report.quarantined {
            error!(%issue_id, "issue quarantined because too many workers died or hung while processing it");
        }
        if !report.nudges.is_empty() {
            debug!(count = report.nudges.len(), requeued = report.requeued, "sweep found issues");
            self.nudge(&report.nudges, report.more).await;
        }
    }

    async fn nudge(&self, nudges: &[Nudge], is_full_page: bool) {
        let count = nudges.len() as u64;
        let is_direct = is_full_page || self.nudger.is_full();
        if let Some(worker) = self.worker.as_ref().filter(|_| is_direct) {
            // Not sent: every process with a worker sweeps, and finds the issues again if this one does not get to them.
            let taken = worker.offer(nudges.iter().map(|nudge| nudge.issue_id));
            counter!(SWEEP_NUDGES, "result" => "direct").increment(taken as u64);
            return;
        }
        if self.nudger.is_full() {
            debug!(
                count,
                "the stream has enough nudges, these wait for a sweep of a process with a worker"
            );
            return;
        }
        let sent = timeout(STREAM_DEADLINE, self.nudger.send(nudges)).await;
        if matches!(sent, Ok(Ok(()))) {
            counter!(SWEEP_NUDGES, "result" => "stream").increment(count);
            // The stream may accept nudges without delivering them, so an idle local worker gets the issues too. If the
            // nudge is also delivered, one of the two finds nothing to do.
            if let Some(worker) = &self.worker {
                let free_slots = worker.free_slots();
                worker.offer(nudges.iter().take(free_slots).map(|nudge| nudge.issue_id));
            }
        } else if let Some(worker) = &self.worker {
            let taken = worker.offer(nudges.iter().map(|nudge| nudge.issue_id));
            counter!(SWEEP_NUDGES, "result" => "direct").increment(taken as u64);
            warn!(count, "the stream is unavailable, issues are passed to the local worker");
        } else {
            warn!(count, "the stream is unavailable, nudges wait for the next sweep");
        }
    }
}

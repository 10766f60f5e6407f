//! The sweeper: finds what nobody was nudged for, and what a dead worker has left.
//!
//! Upstream: every process that has a store runs one. Downstream: `store`, `nudge`, and the worker of this process.
//! Promises: a queued issue is nudged again and again until somebody claims it; a claim that ran out is requeued. When the
//! stream is away, issues go straight to the worker of this process, and so they do if it is idle: the sweep is the guarantee, a nudge only a hint.
//! Not here: work.

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

/// Sweeps in a row before others get a turn.
const SWEEPS_PER_RUN_MAX: usize = 64;

/// How many times as long a nudge may take while the stream is full of unread ones.
const BACKLOG_OVERDUE_FACTOR: u32 = 12;

/// How long it may take then at least.
const BACKLOG_OVERDUE_MIN: Duration = Duration::from_secs(60);

/// How long a stream may take before it counts as away.
const STREAM_DEADLINE: Duration = Duration::from_secs(2);

/// Settings of a sweeper.
#[derive(Clone, Copy, Debug)]
pub struct SweeperConfig {
    /// How often to sweep. Default: 5 s.
    pub every: Duration,
    /// What to look for.
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
    /// A sweeper of a store. `worker` is the one to feed when it is idle or the stream is away; without one, issues wait for the sweep
    /// of a process that has one.
    pub fn new(
        store: Arc<dyn Store>,
        nudger: Nudger,
        worker: Option<Worker>,
        config: SweeperConfig,
    ) -> Result<Self> {
        config.options.validate()?;
        if config.every.is_zero() {
            return Err(IssueError::invalid("every", "it is zero"));
        }
        if config.options.nudge_overdue < NUDGE_OVERDUE_MIN {
            let problem = format!("it is shorter than {NUDGE_OVERDUE_MIN:?}");
            return Err(IssueError::invalid("nudge_overdue", problem));
        }
        Ok(Self { store, nudger, worker, config })
    }

    /// Sweeps once, and once more as long as there is more. Returns everything that was found.
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
            if !report.more {
                break;
            }
        }
        Ok(all)
    }

    /// Sweeps until `shutdown` completes. A database that is away is asked again.
    pub async fn run(&self, shutdown: impl Future<Output = ()>) {
        let sweeping = async {
            loop {
                match self.run_once().await {
                    // There is more: others get a turn, but nobody waits.
                    Ok(SweepReport { more: true, .. }) => tokio::task::yield_now().await,
                    Ok(_) => tokio::time::sleep(self.config.every).await,
                    Err(error) => {
                        warn!(%error, "sweep failed, trying again");
                        tokio::time::sleep(self.config.every).await;
                    }
                }
            }
        };
        // A sweep that is dropped half way has nudged nobody; the issues are overdue again soon.
        tokio::select! {
            () = shutdown => {}
            () = sweeping => {}
        }
    }

    /// While workers have plenty of nudges to read, more of the same would only fill the stream: then a nudge is given
    /// more time. Not for ever: it may be lost.
    async fn options(&self) -> SweepOptions {
        match timeout(STREAM_DEADLINE, self.nudger.unread()).await {
            Ok(Ok(unread)) if unread > NUDGES_UNREAD_MAX => {
                let nudge_overdue =
                    self.config.options.nudge_overdue.saturating_mul(BACKLOG_OVERDUE_FACTOR);
                let nudge_overdue = nudge_overdue.clamp(BACKLOG_OVERDUE_MIN, DELAY_MAX);
                SweepOptions { nudge_overdue, ..self.config.options }
            }
            _ => self.config.options,
        }
    }

    async fn dispatch(&self, report: &SweepReport) {
        counter!(SWEEP_REQUEUED).increment(report.requeued as u64);
        counter!(SWEEP_QUARANTINED).increment(report.quarantined.len() as u64);
        for issue_id in &report.quarantined {
            error!(%issue_id, "issue quarantined: too many workers died or hung with it");
        }
        if !report.nudges.is_empty() {
            debug!(count = report.nudges.len(), requeued = report.requeued, "sweep found issues");
            self.nudge(&report.nudges).await;
        }
    }

    async fn nudge(&self, nudges: &[Nudge]) {
        let count = nudges.len() as u64;
        let sent = timeout(STREAM_DEADLINE, self.nudger.send(nudges)).await;
        if matches!(sent, Ok(Ok(()))) {
            counter!(SWEEP_NUDGES, "result" => "stream").increment(count);
            // A stream that takes nudges need not hand them out. Whoever is idle here looks by himself; if the nudge comes
            // too, one of the two finds nothing to do.
            if let Some(worker) = &self.worker {
                let free_slots = worker.free_slots();
                worker.offer(nudges.iter().take(free_slots).map(|nudge| nudge.issue_id));
            }
        } else if let Some(worker) = &self.worker {
            let taken = worker.offer(nudges.iter().map(|nudge| nudge.issue_id));
            counter!(SWEEP_NUDGES, "result" => "direct").increment(taken as u64);
            warn!(count, "the stream is away, issues go straight to the worker");
        } else {
            warn!(count, "the stream is away, issues wait for the next sweep");
        }
    }
}

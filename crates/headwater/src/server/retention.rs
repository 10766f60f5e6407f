//! Deletes old events, runs, issues, metrics and replay plans, in small batches, and sums up the model runs of past days.
//!
//! Upstream: `run.rs`. Downstream: `headwater_issue::history`, `tickets`, `telemetry::history` and `plans`. Guarantees: what is pending is never
//! deleted; each batch is one short transaction; a failed pass is repeated after `retention.every`. Several processes may run it at
//! once. `tables` says which setting bounds which table; the doctor warns about those that grow. Not here: outbox rows and dead
//! letters (the sweep), sessions (their own maintenance), the audit log (its writer).

use std::time::Duration;

use headwater_issue::history::{self, DeleteCondition};
use headwater_issue::{EventLogId, IssueId};
use headwater_stream::clock::{Clock, SystemClock};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::api::doctor::tables;
use crate::config::RetentionSettings;
use crate::server::plans;
use crate::telemetry::history::rows;
use crate::tickets::{TicketError, Tickets};

/// Rows of one batch.
const BATCH: usize = 500;

/// Pause between two batches, so that deletion does not compete with work.
const PAUSE: Duration = Duration::from_millis(20);

/// Deletes old events and issues.
pub(super) struct HistoryRetention {
    tickets: Tickets,
    settings: RetentionSettings,
}

impl HistoryRetention {
    pub(super) fn new(tickets: Tickets, settings: RetentionSettings) -> Self {
        Self { tickets, settings }
    }

    /// Deletes at every interval. Runs until it is dropped; a dropped batch is rolled back.
    pub(super) async fn run(self) {
        loop {
            // Processes that started together do not delete together.
            sleep(self.settings.every.mul_f64(0.5 + fastrand::f64() * 0.5)).await;
            match self.run_once().await {
                Ok((0, 0)) => {}
                Ok((events, issues)) => info!(events, issues, "deleted after their retention"),
                Err(error) => warn!(%error, "deletion after the retention failed, retrying later"),
            }
        }
    }

    /// One pass over all events and issues. Returns how many were deleted.
    async fn run_once(&self) -> Result<(usize, usize), TicketError> {
        let store = self.tickets.store().as_ref();
        let (mut events, mut issues) = (0, 0);
        // Also if what follows fails each time: every call of a model adds rows.
        let usage = self.tickets.delete_old_usage().await;
        let reservations = self.tickets.delete_old_reservations().await;
        let waits = self.tickets.delete_budget_waits().await;
        if let Some(keep) = (tables::EVENTS.keep)(&self.settings) {
            let mut next = Some(EventLogId::default());
            while let Some(after) = next {
                let page = history::delete_event_logs(store, after, keep, BATCH).await?;
                (events, next) = (events + page.found.len(), page.next);
                sleep(PAUSE).await;
            }
            let mut next = Some(Default::default());
            while let Some(after) = next {
                next = history::delete_runs(store, after, keep, BATCH).await?.next;
                sleep(PAUSE).await;
            }
        }
        let keep_issues = (tables::ISSUES.keep)(&self.settings);
        if let Some(idle_for) = keep_issues {
            let mut next = Some(IssueId::default());
            while let Some(after) = next {
                let page = history::idle_issues(store, after, idle_for, BATCH).await?;
                for issue_id in page.found {
                    // One that fails, for example because it is locked, is tried again in the next pass.
                    let condition = DeleteCondition::IdleFor(idle_for);
                    match self.tickets.delete_issue(issue_id, condition).await {
                        Ok(is_deleted) => issues += usize::from(is_deleted),
                        Err(error) => debug!(%issue_id, %error, "issue was not deleted"),
                    }
                }
                next = page.next;
                sleep(PAUSE).await;
            }
        }
        // Before runs of these days are deleted. Without the sums a report takes longer.
        if let Err(error) = self.tickets.sum_model_runs().await {
            warn!(%error, "summing up model runs failed, retrying later");
        }
        if let Some(keep) = keep_issues {
            self.tickets.delete_model_runs(keep).await?;
        }
        usage.and(reservations).and(waits)?;
        let keep = self.settings.metrics.unwrap_or_default();
        while rows::delete_batch(store, SystemClock.now().before(keep)).await? > 0 {
            sleep(PAUSE).await;
        }
        plans::rows::delete_old(store).await?;
        Ok((events, issues))
    }
}

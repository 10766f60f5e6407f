//! The seam to SQL: the transitions of issues and of the outbox, each call one transaction over a batch.
//!
//! Upstream: `inbox`, `worker`, `outbox`, `sweeper`. Downstream: the folders `sqlite` and `postgres`; `conformance` says what
//! they promise, `state` what each transition does.
//!
//! Promises, for every method:
//! - A batch is one transaction. An answer stands at the place of its question. An issue named twice in a batch is
//!   handled in the order of the batch, as if in two calls; an empty batch does nothing.
//! - All times are the database's; no worker's clock matters.
//! - Bad input is [`Invalid`](crate::IssueError::Invalid) before anything happens. After
//!   [`Unavailable`](crate::IssueError::Unavailable) the effect is unknown, and repeating the call is safe.
//! - Batches wait for each other at most for a moment and never dead-lock; nothing is open when a call has returned.
//! - Dropping a call is safe: it happens wholly or not at all.
//!
//! Not here: nudges, handlers, deliveries. A store knows nothing of streams.

use std::time::Duration;

use async_trait::async_trait;

use crate::claim::{
    Beat, Claim, ClaimOptions, Completed, Completion, Failed, Failure, GiveBack, GivenBack,
    SweepOptions, Swept,
};
use crate::delivery::{OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake};
use crate::error::Result;
use crate::issue::{ClaimEpoch, EventLogId, IssueId, NewEvent, Quiet, Recorded};
use crate::migrations::Migration;
use crate::operator::Operator;
use crate::transaction::{ReadConnection, Transaction};

/// A database with issues in it. `connect` opens one.
#[async_trait]
pub trait Store: Operator + std::fmt::Debug {
    /// Stores events, each once per integration and de-duplication key, and queues their issues.
    ///
    /// At most [`BATCH_MAX`](crate::limits::BATCH_MAX) events. One bad event never fails its neighbours, so each has a
    /// result of its own: `Invalid`, `UnknownIntegration`, `DedupConflict`, or `Unavailable` for all.
    async fn record(&self, events: &[NewEvent], quiet: &Quiet) -> Vec<Result<Recorded>>;

    /// Tries to claim issues for one worker: those that are queued and due, and those whose claim has run out.
    ///
    /// Brings the unprocessed event logs of what was won. Waits for a record that holds an issue for a moment, rather
    /// than pass it by. Of an issue named twice, the second answer is `Taken`.
    async fn claim(&self, issues: &[IssueId], options: &ClaimOptions) -> Result<Vec<Claim>>;

    /// Lets claims live for another `ttl`, and tells whether newer events have arrived.
    async fn heartbeat(&self, claims: &[(IssueId, ClaimEpoch)], ttl: Duration)
    -> Result<Vec<Beat>>;

    /// Ends runs with success: event logs processed, fields changed, outbox written, and the issue `queued` if event
    /// logs are left, else `idle`; all of a completion or, if it is fenced, nothing of it.
    ///
    /// An event log that is not an unprocessed one of the issue is passed by. A repeated completion says so. A bad
    /// completion (see [`limits`](crate::limits)) is `Invalid` for the whole batch: check with
    /// [`Completion::check`](crate::Completion::check) before sharing a batch with others.
    async fn complete(&self, completions: &[Completion]) -> Result<Vec<Completed>>;

    /// Ends runs with a failure: queued again after a while, or quarantined with the `attempts_max`-th.
    async fn fail(&self, failures: &[Failure], attempts_max: u32) -> Result<Vec<Failed>>;

    /// Ends claims that came to nothing, without counting an attempt.
    async fn give_back(&self, claims: &[GiveBack]) -> Result<Vec<GivenBack>>;

    /// Requeues claims that have run out, finds queued issues whose nudge is overdue, and removes what was kept for long
    /// enough. Passes by what others hold at the moment.
    async fn sweep(&self, options: &SweepOptions) -> Result<Swept>;

    /// Takes rows that are due for delivery: of each kind and issue only the oldest undelivered one, so that order is kept,
    /// for at most `ttl`. Skips rows that other transactions have locked. The cost grows with the number of targets that
    /// have undelivered rows, not with the number of rows.
    async fn take_outbox_from(&self, take: &OutboxTake) -> Result<Vec<OutboxRow>>;

    /// The same without a limit per target.
    async fn take_outbox(
        &self,
        worker: &str,
        limit: usize,
        ttl: Duration,
    ) -> Result<Vec<OutboxRow>> {
        self.take_outbox_from(&OutboxTake::any(worker, limit, ttl)).await
    }

    /// Ends deliveries.
    async fn settle_outbox(&self, settlements: &[OutboxSettlement]) -> Result<Vec<OutboxSettled>>;

    /// Returns when something was put into the outbox, by any process, or after `wait`. A hint: it may be lost or
    /// come for nothing. Cancel-safe; what came between two calls ends the next at once.
    async fn outbox_wake(&self, wait: Duration);

    /// Shows that a worker is alive for another `ttl`; zero: it is gone.
    async fn beat_worker(&self, worker: &str, ttl: Duration) -> Result<()>;

    /// Which of these event logs are not committed, as a connection sees it that wrote none of them. At most
    /// [`PAGE_MAX`](crate::limits::PAGE_MAX) ids.
    async fn missing_event_logs(&self, ids: &[EventLogId]) -> Result<Vec<EventLogId>>;

    /// Begins a transaction of the caller's own; see [`Transaction`]. Commit it soon.
    async fn begin(&self) -> Result<Box<dyn Transaction>>;

    /// Migrates tables of your own, in one transaction, after the tables of this crate. Idempotent; several processes may call
    /// it at once. Fails with `Schema`, and changes nothing, if the database has a newer version of these tables or
    /// if the text of an applied migration has changed.
    async fn migrate(&self, migrations: &[Migration]) -> Result<()>;

    /// A connection, for reading tables of your own.
    async fn read_connection(&self) -> Result<ReadConnection>;

    /// Ends all connections, after what is under way. Later calls are `Unavailable`.
    async fn close(&self);
}

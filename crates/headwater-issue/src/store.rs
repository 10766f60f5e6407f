//! The interface to the database: transitions of issues and outbox rows. Each call is one transaction over a batch.
//!
//! Upstream: `inbox`, `worker`, `outbox`, `sweeper`. Downstream: `sqlite` and `postgres`. `state` defines each
//! transition, and `conformance` tests the contract.
//!
//! Guarantees of every method:
//! - A batch is one transaction. Results are in the order of the arguments. An issue named twice in a batch is handled
//!   in the order of the batch, as if in two calls. An empty batch does nothing.
//! - All times are the database's; the clocks of workers do not matter.
//! - Invalid arguments fail with [`Invalid`](crate::IssueError::Invalid) before any effect. After
//!   [`Unavailable`](crate::IssueError::Unavailable) the effect is unknown, and the call can be retried.
//! - Batches do not deadlock and hold locks only briefly; no transaction is open when a call has returned.
//! - Cancel-safe: a dropped call takes effect completely or not at all.
//!
//! Not here: nudges, handlers, deliveries. A store does not use streams.

use std::time::Duration;

use async_trait::async_trait;

use crate::admin::AdminStore;
use crate::claim::{
    Claim, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal, CompletionOutcome,
    FailureOutcome, RunCompletion, RunFailure, SweepOptions, SweepReport,
};
use crate::error::Result;
use crate::issue::{ClaimEpoch, DebounceWindow, EventLogId, IssueId, NewEvent, Recorded};
use crate::migrations::Migration;
use crate::outbox::types::{OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake};
use crate::transaction::{ReadConnection, Transaction};

/// A database of issues. Open one with [`connect`](fn@crate::connect).
#[async_trait]
pub trait Store: AdminStore + std::fmt::Debug {
    /// Stores events, each once per integration and de-duplication key, and queues their issues.
    ///
    /// At most [`BATCH_MAX`](crate::limits::BATCH_MAX) events. Every event has its own result, so that an invalid event
    /// does not fail the others: `Invalid`, `UnknownIntegration`, `DedupConflict`, or `Unavailable` for all.
    async fn record(&self, events: &[NewEvent], debounce: &DebounceWindow)
    -> Vec<Result<Recorded>>;

    /// Tries to claim issues for one worker: queued issues that are due, and issues with an expired claim.
    ///
    /// Returns the unprocessed event logs of claimed issues. Waits briefly for a lock held by a record instead of
    /// skipping the issue. If an issue is named twice, the second result is `Taken`.
    async fn claim(&self, issues: &[IssueId], options: &ClaimOptions) -> Result<Vec<Claim>>;

    /// Renews claims for another `ttl`, and returns whether newer events have arrived.
    async fn heartbeat(
        &self,
        claims: &[(IssueId, ClaimEpoch)],
        ttl: Duration,
    ) -> Result<Vec<ClaimRenewal>>;

    /// Reads claims without renewing them: which are held, and how many events are pending.
    async fn check_claims(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<Vec<ClaimRenewal>>;

    /// Ends runs with success: marks event logs as processed, merges fields, writes outbox rows, and sets the issue to
    /// `queued` if event logs are pending, else to `idle`. A fenced completion changes nothing.
    ///
    /// Event logs that are processed or belong to another issue are ignored. A repeated completion is reported as
    /// `repeated`. An invalid completion (see [`limits`](crate::limits)) fails the whole batch with `Invalid`: call
    /// [`RunCompletion::validate`](crate::RunCompletion::validate) before batching.
    async fn complete(&self, completions: &[RunCompletion]) -> Result<Vec<CompletionOutcome>>;

    /// Ends runs with a failure: the issue is queued again after a delay, or quarantined after `attempts_max` attempts.
    async fn fail(&self, failures: &[RunFailure], attempts_max: u32)
    -> Result<Vec<FailureOutcome>>;

    /// Releases claims without a result and without counting an attempt.
    async fn release_claims(&self, claims: &[ClaimRelease]) -> Result<Vec<ClaimReleased>>;

    /// Requeues issues with expired claims, finds queued issues whose nudge is overdue, and removes rows after their
    /// retention. Skips rows locked by other transactions.
    async fn sweep(&self, options: &SweepOptions) -> Result<SweepReport>;

    /// Takes rows that are due for delivery, for at most `ttl`: per kind and issue only the oldest undelivered row, to
    /// keep the order. Skips rows locked by other transactions. The cost depends on the number of targets with
    /// undelivered rows, not on the number of rows.
    async fn take_outbox_from(&self, take: &OutboxTake) -> Result<Vec<OutboxRow>>;

    /// Like [`take_outbox_from`](Self::take_outbox_from), without a limit per target.
    async fn take_outbox(
        &self,
        worker: &str,
        limit: usize,
        ttl: Duration,
    ) -> Result<Vec<OutboxRow>> {
        self.take_outbox_from(&OutboxTake::any(worker, limit, ttl)).await
    }

    /// Settles deliveries.
    async fn settle_outbox(&self, settlements: &[OutboxSettlement]) -> Result<Vec<OutboxSettled>>;

    /// Completes when a row was written to the outbox, by any process, or after `wait`. A hint: wake-ups may be lost or
    /// spurious. Cancel-safe; a row written between two calls completes the next call at once.
    async fn outbox_wake(&self, wait: Duration);

    /// Registers a worker as alive for another `ttl`; zero deregisters it.
    async fn heartbeat_worker(&self, worker: &str, ttl: Duration) -> Result<()>;

    /// Returns those of these event logs that are not committed, as seen by a separate connection. At most
    /// [`PAGE_MAX`](crate::limits::PAGE_MAX) ids.
    async fn missing_event_logs(&self, ids: &[EventLogId]) -> Result<Vec<EventLogId>>;

    /// Begins a caller's transaction; see [`Transaction`]. Commit it soon: it holds locks.
    async fn begin(&self) -> Result<Box<dyn Transaction>>;

    /// Migrates the caller's own tables, in one transaction, after the tables of this crate. Idempotent; several processes may
    /// call it at once. Fails with `Schema`, and changes nothing, if the database has a newer version of these tables or
    /// if the text of an applied migration has changed.
    async fn migrate(&self, migrations: &[Migration]) -> Result<()>;

    /// A connection for reading the caller's own tables.
    async fn read_connection(&self) -> Result<ReadConnection>;

    /// Closes all connections after the calls in flight. Later calls fail with `Unavailable`.
    async fn close(&self);
}

//! What an operator asks a store and tells it: listings, the facts behind "why", the audit, release and retry.
//!
//! Upstream: `why`, `audit`, the command line and HTTP. Downstream: a store. Promises: reads see one consistent moment and
//! change nothing; listings come in pages. Not here: the hot path (see `store`).

use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::Timestamp;

use crate::delivery::OutboxRow;
use crate::error::Result;
use crate::issue::{
    DeadLetterId, EventLog, EventLogId, IntegrationId, Issue, IssueId, OutboxId, ProcessingStatus,
};

/// An integration, a row of `integrations`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Integration {
    /// Its id.
    pub id: IntegrationId,
    /// Its name, unique.
    pub name: String,
    /// The kind of the other side: `github`, `gitlab`, `desk` and so on.
    pub provider: String,
}

/// Which issues to list, in id order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IssueFilter {
    /// Only those that stand here.
    pub status: Option<ProcessingStatus>,
    /// Only those that are, or are not, quarantined.
    pub quarantined: Option<bool>,
    /// Only those of this integration, by name.
    pub integration: Option<String>,
    /// Only those with a larger id: the last of the page before.
    pub after: Option<IssueId>,
}

/// Which event logs of an issue to list, in id order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct EventLogFilter {
    /// Only those that are, or are not, processed.
    pub processed: Option<bool>,
    /// Only those with a larger id: the last of the page before.
    pub after: Option<EventLogId>,
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// It is queued again, with all its counts at zero. Nudge, or leave it to the next sweep.
    Queued,
    /// It is free, but nothing is pending.
    Idle,
    /// It was not quarantined; nothing was changed.
    NotQuarantined,
}

/// What became of a wish to try now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retried {
    /// It can be claimed now. Nudge, or leave it to the next sweep. A quarantined one is released.
    Queued,
    /// A worker has it; nothing was changed.
    Processing,
    /// Nothing is pending; nothing was changed.
    Idle,
}

/// A worker that has shown itself, a row of `workers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Its name, unique per process start.
    pub worker: String,
    /// When it first showed itself.
    pub started_at: Timestamp,
    /// When it last showed itself.
    pub seen_at: Timestamp,
    /// Until when it counts as alive.
    pub expires_at: Timestamp,
    /// Issues it holds claims on.
    pub claims: u64,
}

/// Everything needed to say why an issue is not being worked on, seen at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WhyFacts {
    /// The issue.
    pub issue: Issue,
    /// When its oldest unprocessed event log was recorded.
    pub oldest_pending_at: Option<Timestamp>,
    /// Workers that are alive.
    pub workers_alive: u64,
    /// Whether the owner of the claim is among them.
    pub owner_alive: bool,
    /// The time of the database.
    pub now: Timestamp,
}

/// An issue whose books do not balance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discrepancy {
    /// The issue.
    pub issue_id: IssueId,
    /// Where it stands.
    pub status: ProcessingStatus,
    /// What its row counts as pending.
    pub pending_events: i64,
    /// Event logs without `processed_at`.
    pub unprocessed: u64,
    /// Whether it is quarantined.
    pub quarantined: bool,
    /// What does not add up, in words.
    pub problem: String,
}

/// The books of all issues, seen at one moment: recorded = processed + pending + quarantined.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Audit {
    /// Issues.
    pub issues: u64,
    /// Event logs.
    pub recorded: u64,
    /// Event logs processed.
    pub processed: u64,
    /// Event logs that wait or are in a run, by the counters of their issues.
    pub pending: u64,
    /// Event logs of quarantined issues, by the counters of their issues.
    pub quarantined: u64,
    /// What does not add up, at most a page of it.
    pub discrepancies: Vec<Discrepancy>,
    /// How many there are in all.
    pub discrepancies_total: u64,
}

/// How much there is to do, for gauges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Backlog {
    /// Issues queued.
    pub queued: u64,
    /// Issues being processed.
    pub processing: u64,
    /// Issues quarantined.
    pub quarantined: u64,
    /// Outbox rows not yet delivered.
    pub outbox_pending: u64,
    /// Outbox rows that failed for good.
    pub outbox_dead: u64,
    /// How long the oldest undelivered row has waited.
    pub outbox_lag: Duration,
}

/// An issue that was quarantined, a row of `dead_letters`: written with the quarantine, and kept after its end. Its events
/// are the unprocessed event logs of the issue, each with the error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// Its id.
    pub id: DeadLetterId,
    /// The issue.
    pub issue_id: IssueId,
    /// The integration of that issue, by name.
    pub integration: String,
    /// The provider of that integration.
    pub provider: String,
    /// The project of that issue, in the provider's words.
    pub external_project_id: String,
    /// That issue, in the provider's words.
    pub external_issue_id: String,
    /// What went wrong the last time.
    pub error: String,
    /// Failed tries.
    pub attempts: u32,
    /// Claims that ran out.
    pub crashes: u32,
    /// Event logs that were pending.
    pub pending_events: u64,
    /// The oldest of them; 0 if there is none.
    pub event_log_id: EventLogId,
    /// When it was quarantined.
    pub quarantined_at: Timestamp,
    /// When an operator ended that.
    pub released_at: Option<Timestamp>,
}

/// An outbox row that failed for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadOutbox {
    /// The row.
    pub row: OutboxRow,
    /// What went wrong the last time.
    pub error: String,
}

/// The operator's side of a store.
#[async_trait]
pub trait Operator: Send + Sync {
    /// Creates the integration if there is none of this name. With another provider it is
    /// [`OtherProvider`](crate::IssueError::OtherProvider).
    async fn ensure_integration(&self, name: &str, provider: &str) -> Result<IntegrationId>;

    /// All integrations by name; at most [`PAGE_MAX`](crate::limits::PAGE_MAX), those after `after`.
    async fn integrations(&self, after: Option<&str>) -> Result<Vec<Integration>>;

    /// One issue, if it exists.
    async fn issue(&self, id: IssueId) -> Result<Option<Issue>>;

    /// The issue of these outside names, if it exists.
    async fn find_issue(
        &self,
        integration: &str,
        external_project_id: &str,
        external_issue_id: &str,
    ) -> Result<Option<Issue>>;

    /// One page of issues in id order, at most `limit`.
    async fn issues(&self, filter: &IssueFilter, limit: usize) -> Result<Vec<Issue>>;

    /// One page of the event logs of an issue in id order, at most `limit`; none if there is no such issue.
    async fn event_logs(
        &self,
        issue_id: IssueId,
        filter: &EventLogFilter,
        limit: usize,
    ) -> Result<Vec<EventLog>>;

    /// The payload of an event log exactly as it was recorded, where [`EventLog::payload`] differs from it in more than
    /// spaces, the order of keys and the notation of numbers. `None`: it does not, or there is no such event log.
    async fn original_payload(&self, id: EventLogId) -> Result<Option<String>>;

    /// The newest event log that the issue of this reply had when the reply was committed; none if there is no such reply,
    /// or it was written by a version of this program that did not note it.
    async fn newest_event_log_at_commit(&self, id: OutboxId) -> Result<Option<EventLogId>>;

    /// Ends a quarantine. [`NotFound`](crate::IssueError::NotFound) if there is no such issue.
    async fn release(&self, id: IssueId) -> Result<Released>;

    /// Makes an issue claimable now: ends a quarantine or a wait. `NotFound` if there is no such issue.
    async fn retry(&self, id: IssueId) -> Result<Retried>;

    /// Why an issue is not being worked on; none if there is no such issue.
    async fn facts_for_why(&self, id: IssueId) -> Result<Option<WhyFacts>>;

    /// Counts everything, and names up to `limit` issues that do not add up. Reads all event logs.
    async fn audit(&self, limit: usize) -> Result<Audit>;

    /// How much there is to do.
    async fn backlog(&self) -> Result<Backlog>;

    /// Workers that are alive, by name; at most [`PAGE_MAX`](crate::limits::PAGE_MAX).
    async fn workers(&self) -> Result<Vec<WorkerInfo>>;

    /// One page of the quarantines there were, newest last, at most `limit`, those after `after`.
    async fn dead_letters(
        &self,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>>;

    /// One page of the dead rows of the outbox in id order, at most `limit`, those after `after`.
    async fn dead_outbox(&self, after: Option<OutboxId>, limit: usize) -> Result<Vec<DeadOutbox>>;

    /// Lets a dead row be delivered again, with no attempts counted. `NotFound` if there is no such dead row.
    async fn retry_outbox(&self, id: OutboxId) -> Result<()>;
}

//! The administrative interface of a store: listings, diagnosis, consistency check, release and retry.
//!
//! Upstream: `explain`, `consistency_check`, the command line and HTTP. Downstream: `sqlite` and `postgres`.
//! Guarantees: a read sees one consistent snapshot and changes nothing; listings are paged. Not here: the hot path (see
//! `store`).

use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::Timestamp;

use crate::claim::IssueRun;
use crate::consistency_check::next_page;
use crate::error::Result;
use crate::issue::{
    ClaimEpoch, DeadLetterId, EventLog, EventLogId, IntegrationId, Issue, IssueId, OutboxId,
    ProcessingStatus,
};
use crate::limits::{CONSISTENCY_PAGE, CONSISTENCY_PAGE_IF_SLOW};
use crate::outbox::types::{OutboxKind, OutboxRow};

/// An integration, a row of `integrations`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntegrationInfo {
    /// Id of the integration.
    pub id: IntegrationId,
    /// Unique name.
    pub name: String,
    /// Provider: `github`, `gitlab`, `desk` and so on.
    pub provider: String,
}

/// Filter of issues, listed by id.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IssueFilter {
    /// Only issues with this status.
    pub status: Option<ProcessingStatus>,
    /// Only issues that are, or are not, quarantined.
    pub quarantined: Option<bool>,
    /// Only issues of the integration with this name.
    pub integration: Option<String>,
    /// Only issues whose last error contains this text, in upper or lower case.
    pub error: Option<String>,
    /// Only issues that are queued and wait: for a backoff, a budget or further events. Quarantined ones do not.
    pub waiting: bool,
    /// Only issues behind this one: the last id of the previous page.
    pub after: Option<IssueId>,
    /// Largest ids first.
    pub newest_first: bool,
}

/// Filter of outbox rows, listed by id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct OutboxFilter {
    /// Only rows with this status.
    pub status: Option<OutboxStatus>,
    /// Only rows of this issue.
    pub issue: Option<IssueId>,
    /// Only rows behind this one: the last id of the previous page.
    pub after: Option<OutboxId>,
    /// Largest ids first.
    pub newest_first: bool,
}

/// Filter of the event logs of an issue, listed in id order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct EventLogFilter {
    /// Only event logs that are, or are not, processed.
    pub processed: Option<bool>,
    /// Only event logs after this one in the order of the list: the last id of the previous page.
    pub after: Option<EventLogId>,
    /// The newest first instead of the oldest.
    pub newest_first: bool,
}

/// Result of releasing an issue from quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuarantineCleared {
    /// The issue is queued again, with its counters reset. Nudge, or leave it to the next sweep.
    Queued,
    /// The quarantine ended, but the issue has no pending events.
    Idle,
    /// The issue was not quarantined; nothing was changed.
    NotQuarantined,
}

/// Result of retrying an issue now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IssueRetried {
    /// The issue can be claimed now; a quarantined one was released. Nudge, or leave it to the next sweep.
    Queued,
    /// A worker is processing the issue; nothing was changed.
    Processing,
    /// The issue has no pending events; nothing was changed.
    Idle,
}

/// A worker that is alive, a row of `workers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Name, unique per process start.
    pub worker: String,
    /// Time of its first heartbeat.
    pub started_at: Timestamp,
    /// Time of its last heartbeat.
    pub seen_at: Timestamp,
    /// Until when it counts as alive.
    pub expires_at: Timestamp,
    /// Number of claims it holds.
    pub claims: u64,
}

/// The facts from which [`explain`](fn@crate::explain) diagnoses an issue, from one snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssueFacts {
    /// The issue.
    pub issue: Issue,
    /// Time of its oldest unprocessed event log.
    pub oldest_pending_at: Option<Timestamp>,
    /// Number of workers that are alive.
    pub workers_alive: u64,
    /// Whether the owner of the claim is alive.
    pub owner_alive: bool,
    /// Last heartbeat of the owner of the claim, if it is known.
    pub owner_seen_at: Option<Timestamp>,
    /// When its last reply was delivered.
    pub reply_delivered_at: Option<Timestamp>,
    /// Replies and events that are not delivered, oldest first; at most [`UNDELIVERED_MAX`](crate::limits::UNDELIVERED_MAX).
    pub undelivered: Vec<UndeliveredRow>,
    /// Current time of the database.
    pub now: Timestamp,
}

/// An outbox row that is not delivered: it waits, is being delivered, or is dead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndeliveredRow {
    /// Id of the row.
    pub id: OutboxId,
    /// Reply or event.
    pub kind: OutboxKind,
    /// Its target.
    pub target: String,
    /// Whether its delivery failed permanently.
    pub is_dead: bool,
    /// Failed deliveries.
    pub attempts: u32,
    /// When it is tried next, unless it is dead or waits for an older row.
    pub due_at: Timestamp,
    /// Error of the last delivery.
    pub error: Option<String>,
}

/// State of an outbox row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboxStatus {
    /// An older row of the same issue and kind comes first.
    Waiting,
    /// To be delivered when it is due.
    Pending,
    /// A process is delivering it.
    Taken,
    /// Delivered.
    Delivered,
    /// Its delivery failed permanently.
    Dead,
}

impl OutboxStatus {
    const ALL: [Self; 5] = [Self::Waiting, Self::Pending, Self::Taken, Self::Delivered, Self::Dead];

    /// The name in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Pending => "pending",
            Self::Taken => "taken",
            Self::Delivered => "delivered",
            Self::Dead => "dead",
        }
    }

    /// Parses the name in SQL.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == name)
    }
}

/// The facts from which [`OutboxDiagnosis`](crate::OutboxDiagnosis) explains an outbox row, from one snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxFacts {
    /// Id of the row.
    pub id: OutboxId,
    /// Its issue.
    pub issue_id: IssueId,
    /// Name of the integration of the issue.
    pub integration: String,
    /// Reply or event.
    pub kind: OutboxKind,
    /// Its target.
    pub target: String,
    /// Its state.
    pub status: OutboxStatus,
    /// Failed deliveries.
    pub attempts: u32,
    /// Deliveries without a result.
    pub crashes: u32,
    /// When it is due; while it is taken, when the lease ends.
    pub due_at: Timestamp,
    /// The process that took it last.
    pub taken_by: Option<String>,
    /// Error of the last delivery.
    pub error: Option<String>,
    /// When it was committed.
    pub created_at: Timestamp,
    /// When it was delivered.
    pub delivered_at: Option<Timestamp>,
    /// The oldest undelivered row of the same issue and kind, if that is another one.
    pub behind: Option<OutboxId>,
    /// Current time of the database.
    pub now: Timestamp,
}

/// An issue whose counters or status are inconsistent with its event logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discrepancy {
    /// The issue.
    pub issue_id: IssueId,
    /// Processing status.
    pub status: ProcessingStatus,
    /// `pending_events` of the issue.
    pub pending_events: i64,
    /// Number of event logs without `processed_at`.
    pub unprocessed: u64,
    /// Whether it is quarantined.
    pub quarantined: bool,
    /// Description of the inconsistency.
    pub problem: String,
}

/// Totals of the checked issues. Consistent if recorded = processed + pending + quarantined. Each page of issues is read in
/// one snapshot, and an event belongs to one issue, so the totals are also consistent if issues change between pages.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ConsistencyReport {
    /// Number of issues.
    pub issues: u64,
    /// Number of event logs.
    pub recorded: u64,
    /// Number of processed event logs.
    pub processed: u64,
    /// Pending event logs, by the counters of their issues.
    pub pending: u64,
    /// Pending event logs of quarantined issues, by the counters of their issues.
    pub quarantined: u64,
    /// Inconsistent issues, in id order. A whole check keeps only the first of them.
    pub discrepancies: Vec<Discrepancy>,
    /// Total number of inconsistent issues.
    pub discrepancies_total: u64,
    /// The last checked issue, if there may be more after it; `None` when the check is complete.
    pub resume_after: Option<IssueId>,
}

/// Size of the backlog, for gauges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Backlog {
    /// Queued issues.
    pub queued: u64,
    /// Issues in processing.
    pub processing: u64,
    /// Quarantined issues.
    pub quarantined: u64,
    /// Longest time that a queued issue has waited since its first unprocessed event. Of the
    /// [`OLDEST_WAIT_ISSUES`](crate::limits::OLDEST_WAIT_ISSUES) queued issues with the lowest ids; if more are queued, another
    /// one may have waited longer.
    pub oldest_wait: Duration,
    /// Undelivered outbox rows.
    pub outbox_pending: u64,
    /// Dead outbox rows.
    pub outbox_dead: u64,
    /// Age of the oldest undelivered outbox row.
    pub outbox_lag: Duration,
}

/// Record of a quarantine, a row of `dead_letters`. It is retained after the release. The unprocessed event logs of the
/// issue carry the error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssueDeadLetter {
    /// Id of the dead letter.
    pub id: DeadLetterId,
    /// The issue.
    pub issue_id: IssueId,
    /// Name of the issue's integration.
    pub integration: String,
    /// Provider of the integration.
    pub provider: String,
    /// Project id at the provider.
    pub external_project_id: String,
    /// Issue id at the provider.
    pub external_issue_id: String,
    /// Error of the last attempt.
    pub error: String,
    /// Failed attempts.
    pub attempts: u32,
    /// Expired claims.
    pub crashes: u32,
    /// Pending event logs at that time.
    pub pending_events: u64,
    /// The oldest of them; 0 if none.
    pub event_log_id: EventLogId,
    /// Time of the quarantine.
    pub quarantined_at: Timestamp,
    /// Time of the release by an operator.
    pub released_at: Option<Timestamp>,
}

/// An outbox row whose delivery failed permanently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadOutboxRow {
    /// The row.
    pub row: OutboxRow,
    /// Error of the last attempt.
    pub error: String,
}

/// Administrative operations of a store.
#[async_trait]
pub trait AdminStore: Send + Sync {
    /// Creates the integration if it does not exist. Fails with [`OtherProvider`](crate::IssueError::OtherProvider) if
    /// it exists with a different provider.
    async fn ensure_integration(&self, name: &str, provider: &str) -> Result<IntegrationId>;

    /// Ends the leases of all claims and taken outbox rows, so that their work continues at once. Only for a
    /// process that knows that it is the only one on this database: the holders are dead.
    async fn expire_leases(&self) -> Result<()>;

    /// One page of integrations in name order, after `after`; at most [`PAGE_MAX`](crate::limits::PAGE_MAX).
    async fn integrations(&self, after: Option<&str>) -> Result<Vec<IntegrationInfo>>;

    /// The issue with this id, if it exists.
    async fn issue(&self, id: IssueId) -> Result<Option<Issue>>;

    /// The issue with these ids at the provider, if it exists.
    async fn find_issue(
        &self,
        integration: &str,
        external_project_id: &str,
        external_issue_id: &str,
    ) -> Result<Option<Issue>>;

    /// One page of issues by id, at most `limit`.
    async fn issues(&self, filter: &IssueFilter, limit: usize) -> Result<Vec<Issue>>;

    /// How many issues match, whatever `after` is; counting ends at `max`. With `error`, all issues may be read.
    async fn count_issues(&self, filter: &IssueFilter, max: usize) -> Result<usize>;

    /// One page of the event logs of an issue in id order, at most `limit`; empty if the issue does not exist.
    async fn event_logs(
        &self,
        issue_id: IssueId,
        filter: &EventLogFilter,
        limit: usize,
    ) -> Result<Vec<EventLog>>;

    /// One page of the ended runs of an issue, newest first, at most `limit`. `before` is the last epoch of the previous page.
    async fn runs(
        &self,
        issue_id: IssueId,
        before: Option<ClaimEpoch>,
        limit: usize,
    ) -> Result<Vec<IssueRun>>;

    /// The event logs that runs ended from `from` to `to` have processed, in id order, without their payloads; at most `limit`,
    /// among the newest [`RUN_EVENTS_SCANNED_MAX`](crate::limits::RUN_EVENTS_SCANNED_MAX) of the issue.
    async fn processed_event_logs(
        &self,
        issue_id: IssueId,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<EventLog>>;

    /// The event log with this id, if it exists.
    async fn event_log(&self, id: EventLogId) -> Result<Option<EventLog>>;

    /// The payload of an event log exactly as received, if [`EventLog::payload`] differs from it in more than
    /// whitespace, key order and number notation. `None` if it does not, or if the event log does not exist.
    async fn original_payload(&self, id: EventLogId) -> Result<Option<String>>;

    /// The newest event log of the issue when this outbox row was committed. A deliverer compares it with the current
    /// newest event log to detect a stale reply. `None` if the row does not exist or was written by a version without
    /// this column.
    async fn newest_event_log_at_commit(&self, id: OutboxId) -> Result<Option<EventLogId>>;

    /// Ends a quarantine. [`NotFound`](crate::IssueError::NotFound) if the issue does not exist.
    async fn release(&self, id: IssueId) -> Result<QuarantineCleared>;

    /// Makes an issue claimable now: ends a quarantine, a backoff or a debounce window. `NotFound` if it does not
    /// exist.
    async fn retry(&self, id: IssueId) -> Result<IssueRetried>;

    /// Facts for [`explain`](fn@crate::explain); `None` if the issue does not exist.
    async fn issue_facts(&self, id: IssueId) -> Result<Option<IssueFacts>>;

    /// Counts the event logs of up to `issues_max` issues after `after`, in id order and in one snapshot. To go on, or to resume
    /// a check later, pass [`resume_after`](ConsistencyReport::resume_after) of the last page.
    async fn check_consistency_page(
        &self,
        after: Option<IssueId>,
        issues_max: usize,
    ) -> Result<ConsistencyReport>;

    /// Like [`check_consistency_page`](Self::check_consistency_page), but with fewer issues if the page does not end within the
    /// deadline of a call, as with very many event logs per issue.
    async fn check_fitting_page(
        &self,
        after: Option<IssueId>,
        issues_max: usize,
    ) -> Result<ConsistencyReport> {
        match self.check_consistency_page(after, issues_max).await {
            Err(error) if error.is_transient() && issues_max > CONSISTENCY_PAGE_IF_SLOW => {
                self.check_consistency_page(after, CONSISTENCY_PAGE_IF_SLOW).await
            }
            checked => checked,
        }
    }

    /// Checks all issues, page by page, and keeps up to `discrepancies_max` inconsistent issues. Reads all event logs, but no
    /// snapshot is held longer than a page.
    async fn check_consistency(&self, discrepancies_max: usize) -> Result<ConsistencyReport> {
        let mut report = ConsistencyReport::default();
        let mut issues_max = CONSISTENCY_PAGE;
        loop {
            let page = self.check_fitting_page(report.resume_after, issues_max).await?;
            issues_max = next_page(page.issues, issues_max);
            report.add_page(page, discrepancies_max);
            if report.resume_after.is_none() {
                return Ok(report);
            }
        }
    }

    /// Size of the backlog.
    async fn backlog(&self) -> Result<Backlog>;

    /// Workers that are alive, in name order; at most [`PAGE_MAX`](crate::limits::PAGE_MAX).
    async fn workers(&self) -> Result<Vec<WorkerInfo>>;

    /// One page of dead letters in id order, after `after`, at most `limit`.
    async fn dead_letters(
        &self,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<IssueDeadLetter>>;

    /// One page of dead outbox rows in id order, after `after`, at most `limit`.
    async fn dead_outbox(
        &self,
        after: Option<OutboxId>,
        limit: usize,
    ) -> Result<Vec<DeadOutboxRow>>;

    /// One page of facts about outbox rows in id order, at most `limit`.
    async fn outbox_rows(&self, filter: &OutboxFilter, limit: usize) -> Result<Vec<OutboxFacts>>;

    /// Facts about an outbox row; `None` if it does not exist, or no longer: delivered rows are removed after their retention.
    async fn outbox_facts(&self, id: OutboxId) -> Result<Option<OutboxFacts>>;

    /// Facts about the retained outbox rows of an issue that were committed from `from` to `to`, in id order; at most `limit`. Rows
    /// of a run have the time of its end.
    async fn committed_outbox(
        &self,
        issue_id: IssueId,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<OutboxFacts>>;

    /// Makes a dead outbox row deliverable again, with its attempts reset. `NotFound` if there is no such dead row.
    async fn retry_outbox(&self, id: OutboxId) -> Result<()>;
}

//! Data types of claims and runs: claim, renew, complete, fail, release and sweep.
//!
//! Every result is an enum of what the caller does next; a lost claim is a result, not an error. A result of `Fenced`
//! means that the run is stale: its claim epoch is no longer the current one. Not here: executing runs (see `worker`).

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::issue::{ClaimEpoch, EventLog, EventLogId, Issue, IssueId};
use crate::limits::{CLAIM_TTL_DEFAULT, RUN_EVENTS_DEFAULT};
use crate::outbox::types::NewOutboxRow;

/// Options of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimOptions {
    /// Name of the claiming worker; unique per process start.
    pub worker: String,
    /// TTL of the claim; a heartbeat renews it. Default: 60 s.
    pub ttl: Duration,
    /// Maximum number of event logs to return. Default: 200.
    pub events_max: usize,
    /// Expired claims after which the issue is quarantined. Default: 5.
    pub crashes_max: u32,
}

impl ClaimOptions {
    /// Default options for a worker.
    pub fn new(worker: impl Into<String>) -> Self {
        Self {
            worker: worker.into(),
            ttl: CLAIM_TTL_DEFAULT,
            events_max: RUN_EVENTS_DEFAULT,
            crashes_max: 5,
        }
    }
}

/// A claimed issue with its unprocessed event logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedIssue {
    /// The issue after the claim.
    pub issue: Issue,
    /// Fencing token of the claim, presented with every effect.
    pub epoch: ClaimEpoch,
    /// When the claim expires, by the database's clock. Use the local clock and the requested TTL to schedule renewals.
    pub expires_at: Timestamp,
    /// Newest event log of the issue when its last run was completed; `None` before the first completion. An event log
    /// of this claim with an id up to it arrived before that completion without being part of its run. Compare ids, not
    /// times.
    pub completed_event_log_id: Option<EventLogId>,
    /// Unprocessed event logs in id order, at most `events_max`. Empty only if the tables were changed by hand.
    pub events: Vec<EventLog>,
}

impl ClaimedIssue {
    /// Whether this number of pending events, from a heartbeat, means that events arrived after the claim.
    pub fn has_newer_events(&self, pending_events: u64) -> bool {
        pending_events > self.issue.pending_events
    }
}

/// Result of an attempt to claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The claim was acquired.
    Won(Box<ClaimedIssue>),
    /// Another worker holds the claim. A nudge is a no-op: the completion of that run requeues pending events.
    Taken {
        /// Worker that holds the claim.
        owner: String,
        /// When the claim expires unless it is renewed.
        expires_at: Timestamp,
    },
    /// A debounce window or a backoff is not over. Retry after it.
    NotYet {
        /// Earliest time of a claim.
        not_before: Timestamp,
        /// Time until then, by the database's clock.
        wait: Duration,
    },
    /// The issue has no pending events.
    Idle,
    /// The issue is quarantined until an operator releases it.
    Quarantined {
        /// When it was quarantined.
        since: Timestamp,
        /// Whether this call quarantined it, because too many claims had expired.
        just_now: bool,
    },
    /// The issue does not exist.
    Missing,
}

/// Result of renewing or checking a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimRenewal {
    /// The claim is held.
    Kept {
        /// Its expiry time, by the database's clock.
        expires_at: Timestamp,
        /// See [`ClaimedIssue::has_newer_events`].
        pending_events: u64,
    },
    /// The claim is lost: cancel the handler.
    Lost,
}

/// Successful end of a run.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RunCompletion {
    /// Issue of the run.
    pub issue_id: IssueId,
    /// Epoch of the claim.
    pub epoch: ClaimEpoch,
    /// Event logs processed by the run.
    pub event_log_ids: Vec<EventLogId>,
    /// JSON object merged into the issue's fields; `null` removes a field.
    pub fields: Option<String>,
    /// JSON that replaces the issue's discussions.
    pub discussions: Option<String>,
    /// Replies and events in delivery order.
    pub outbox: Vec<NewOutboxRow>,
}

/// Result of a [`RunCompletion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionOutcome {
    /// The completion is committed.
    Committed {
        /// Whether event logs are pending, so the issue is queued again: nudge.
        requeued: bool,
        /// Earliest time of the next claim, if it is queued.
        not_before: Option<Timestamp>,
        /// Whether an earlier call with this epoch had committed it; this call changed nothing then.
        repeated: bool,
    },
    /// The claim is no longer held. Nothing was changed.
    Fenced,
}

/// Action after a failed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// Retry, unless the attempts are exhausted.
    Retry {
        /// Delay; see [`IssueRetryPolicy::backoff`](crate::IssueRetryPolicy::backoff).
        after: Duration,
    },
    /// Retry without counting an attempt: a resource that every run needs is unavailable.
    Defer {
        /// Delay.
        after: Duration,
    },
    /// Quarantine the issue: a retry cannot succeed.
    Quarantine,
}

/// Failed end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFailure {
    /// Issue of the run.
    pub issue_id: IssueId,
    /// Epoch of the claim.
    pub epoch: ClaimEpoch,
    /// Error text, stored on the issue and on its unprocessed event logs.
    pub error: String,
    /// What to do next.
    pub then: AfterFailure,
}

/// Result of a [`RunFailure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureOutcome {
    /// The issue is queued again and can be claimed at `not_before`.
    Requeued {
        /// Failed attempts so far.
        attempts: u32,
        /// Earliest time of the next claim.
        not_before: Timestamp,
    },
    /// The issue is quarantined until an operator releases it.
    Quarantined {
        /// Failed attempts.
        attempts: u32,
    },
    /// The claim is no longer held. Nothing was changed.
    Fenced,
}

/// Why a claim is released without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// The worker is shutting down.
    Shutdown,
    /// The handler was cancelled because newer events arrived. Counted in `superseded`.
    Superseded,
}

/// Release of a claim without counting an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimRelease {
    /// Issue of the run.
    pub issue_id: IssueId,
    /// Epoch of the claim.
    pub epoch: ClaimEpoch,
    /// Reason.
    pub reason: ReleaseReason,
}

/// Result of a [`ClaimRelease`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimReleased {
    /// The issue is queued again: nudge.
    Requeued {
        /// Earliest time of the next claim.
        not_before: Option<Timestamp>,
    },
    /// The claim is no longer held. Nothing was changed.
    Fenced,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunResult {
    /// Its result was committed.
    Done,
    /// It failed and is retried.
    Failed,
    /// It failed because a resource that every run needs was unavailable; no attempt was counted.
    Deferred,
    /// It failed or its claim expired, and the issue was quarantined.
    Quarantined,
    /// Newer events arrived.
    Superseded,
    /// The worker released its claim without a result: it was shutting down, or the database was unavailable.
    Released,
    /// Its claim expired: the worker died, hung or was cut off.
    Expired,
    /// Its claim expired, and the worker presented a result later, which was discarded.
    Fenced,
}

impl RunResult {
    const ALL: [Self; 8] = [
        Self::Done,
        Self::Failed,
        Self::Deferred,
        Self::Quarantined,
        Self::Superseded,
        Self::Released,
        Self::Expired,
        Self::Fenced,
    ];

    /// The name in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Deferred => "deferred",
            Self::Quarantined => "quarantined",
            Self::Superseded => "superseded",
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Fenced => "fenced",
        }
    }

    /// Parses the name in SQL.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|result| result.as_str() == name)
    }
}

/// A run that has ended, a row of `issue_runs`. The run in progress is the claim of its [`Issue`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssueRun {
    /// The issue.
    pub issue_id: IssueId,
    /// Epoch of its claim: the number of the run.
    pub epoch: ClaimEpoch,
    /// Worker that held the claim.
    pub worker: String,
    /// When the issue was claimed.
    pub claimed_at: Timestamp,
    /// When the run ended. Event logs that it processed have this time.
    pub ended_at: Timestamp,
    /// How it ended.
    pub result: RunResult,
    /// Error of a failure. A quarantined run without one had expired.
    pub error: Option<String>,
    /// Event logs marked as processed.
    pub events: u64,
}

impl IssueRun {
    /// What the result means, with the error.
    pub fn explain(&self) -> String {
        let Self { worker, events, .. } = self;
        let error = self.error.as_deref().unwrap_or("no error is stored");
        match self.result {
            RunResult::Done => format!("its result was committed; events processed: {events}"),
            RunResult::Failed => format!("it failed and was retried: {error}"),
            RunResult::Deferred => format!("it was deferred without counting an attempt: {error}"),
            RunResult::Quarantined => match &self.error {
                Some(error) => format!("it failed and the issue was quarantined: {error}"),
                None => format!("claim of worker `{worker}` expired and the issue was quarantined"),
            },
            RunResult::Superseded => {
                "newer events arrived; the next run answers all of them".into()
            }
            RunResult::Released => {
                let why = "it was stopping, or the database was unavailable";
                format!("worker `{worker}` released its claim without a result: {why}")
            }
            RunResult::Expired => {
                format!("claim of worker `{worker}` expired: it died, hung or was cut off")
            }
            RunResult::Fenced => {
                format!(
                    "claim of worker `{worker}` expired; its result came later and was discarded"
                )
            }
        }
    }
}

/// Options of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SweepOptions {
    /// Maximum number of issues to requeue, of issues to nudge, and of rows to remove. Default: 256.
    pub limit: usize,
    /// A queued issue is nudged again when its last nudge is older than this. Default: 5 s.
    pub nudge_overdue: Duration,
    /// Expired claims after which the issue is quarantined. Default: 5.
    pub crashes_max: u32,
    /// Retention of delivered outbox rows, including their keys, and of dead letters after their release. Default: 7
    /// days.
    pub keep: Duration,
}

impl Default for SweepOptions {
    fn default() -> Self {
        let keep = Duration::from_secs(7 * 24 * 60 * 60);
        Self { limit: 256, nudge_overdue: Duration::from_secs(5), crashes_max: 5, keep }
    }
}

/// A nudge: an entry of the stream `issue_work` that asks a worker to process an issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nudge {
    /// Issue of the run.
    pub issue_id: IssueId,
    /// Oldest unprocessed event log; 0 if unknown.
    pub event_log_id: EventLogId,
}

/// Result of a sweep.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SweepReport {
    /// Issues to nudge now: overdue and just requeued ones. Their `nudged_at` is already updated.
    pub nudges: Vec<Nudge>,
    /// Number of issues requeued because their claim expired.
    pub requeued: usize,
    /// Issues quarantined because too many of their claims expired.
    pub quarantined: Vec<IssueId>,
    /// Number of rows removed after their retention.
    pub pruned: usize,
    /// Whether a limit was reached; run another sweep at once.
    pub more: bool,
}

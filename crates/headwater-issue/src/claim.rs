//! The data of a run: how an issue is claimed, kept, ended and swept.
//!
//! Upstream: `store` speaks in these types. Promises: every answer is an enum of what the caller does next; a lost claim is
//! an answer, not an error. Not here: who runs the handler (see `worker`).

use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::delivery::NewOutbox;
use crate::issue::{ClaimEpoch, EventLog, EventLogId, Issue, IssueId};
use crate::limits::{CLAIM_TTL_DEFAULT, RUN_EVENTS_DEFAULT};

/// How to claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimOptions {
    /// Who claims; unique per process start.
    pub worker: String,
    /// How long the claim lasts without a heartbeat. Default: 60 s.
    pub ttl: Duration,
    /// The most event logs to bring. Default: 200.
    pub events_max: usize,
    /// Claims that may run out before the issue is quarantined. Default: 5.
    pub crashes_max: u32,
}

impl ClaimOptions {
    /// The defaults, for this worker.
    pub fn new(worker: impl Into<String>) -> Self {
        Self {
            worker: worker.into(),
            ttl: CLAIM_TTL_DEFAULT,
            events_max: RUN_EVENTS_DEFAULT,
            crashes_max: 5,
        }
    }
}

/// An issue in the hands of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedIssue {
    /// The issue, as it is with this claim.
    pub issue: Issue,
    /// The right to work on it, presented with every effect.
    pub epoch: ClaimEpoch,
    /// When the claim runs out by the database's clock. Go by your own clock and the life you asked for.
    pub expires_at: Timestamp,
    /// The newest event log that the issue had when its last run was completed. An event log of this claim up to it was
    /// there already, but in no run: the order of ids tells that, not that of times. `None` if no run was.
    pub completed_event_log_id: Option<EventLogId>,
    /// Its unprocessed event logs in id order, at most as many as asked for. Never empty, unless somebody changed the
    /// tables by hand.
    pub events: Vec<EventLog>,
}

impl ClaimedIssue {
    /// Whether a heartbeat that tells of this many pending events tells of newer ones than those known at the claim.
    pub fn has_newer(&self, pending_events: u64) -> bool {
        pending_events > self.issue.pending_events
    }
}

/// What became of an attempt to claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Yours.
    Won(Box<ClaimedIssue>),
    /// Another worker has it. A nudge for it is a no-op: its completion requeues what is left.
    Taken {
        /// Who.
        owner: String,
        /// Until when, unless a heartbeat comes.
        expires_at: Timestamp,
    },
    /// A quiet window or a backoff is not over. Come back then.
    NotYet {
        /// From when it can be claimed.
        not_before: Timestamp,
        /// How long that is from now, by the database's clock.
        wait: Duration,
    },
    /// Nothing to do.
    Idle,
    /// Out of the way until an operator releases it.
    Quarantined {
        /// Since when.
        since: Timestamp,
        /// Whether this very call did it, because too many claims had run out.
        just_now: bool,
    },
    /// There is no such issue.
    Missing,
}

/// What a heartbeat found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beat {
    /// The claim holds for another life.
    Kept {
        /// Until when, by the database's clock.
        expires_at: Timestamp,
        /// See [`ClaimedIssue::has_newer`].
        pending_events: u64,
    },
    /// Somebody else has it, or nobody: cancel the handler.
    Lost,
}

/// The successful end of a run.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Completion {
    /// The issue.
    pub issue_id: IssueId,
    /// The claim.
    pub epoch: ClaimEpoch,
    /// The event logs that the run handled.
    pub event_log_ids: Vec<EventLogId>,
    /// A JSON object whose members replace those of the issue's fields; `null` removes one.
    pub fields: Option<String>,
    /// JSON that replaces the issue's discussions.
    pub discussions: Option<String>,
    /// Replies and events, in the order in which to deliver them.
    pub outbox: Vec<NewOutbox>,
}

/// What became of a [`Completion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completed {
    /// Everything of it is committed.
    Committed {
        /// Whether event logs are left, so the issue is queued again: nudge.
        requeued: bool,
        /// No claim before this time, if it is queued.
        not_before: Option<Timestamp>,
        /// Whether an earlier call with this epoch had done it already; then this one changed nothing.
        repeated: bool,
    },
    /// The claim is not held any more. Nothing was changed.
    Fenced,
}

/// What to do after a failed run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// Try again, unless the attempts are used up.
    Retry {
        /// After this long; see [`RetryPolicy::delay`](crate::RetryPolicy::delay).
        after: Duration,
    },
    /// Try again, and blame nobody: what the run needs is not to be had now, whichever issue asks for it. No attempt is
    /// counted.
    PutOff {
        /// After this long.
        after: Duration,
    },
    /// Trying again is of no use.
    Quarantine,
}

/// The failed end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The issue.
    pub issue_id: IssueId,
    /// The claim.
    pub epoch: ClaimEpoch,
    /// What went wrong; kept on the issue and on its unprocessed event logs.
    pub error: String,
    /// What to do next.
    pub then: AfterFailure,
}

/// What became of a [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// It is queued again and can be claimed later: nudge then.
    Requeued {
        /// Failed tries so far.
        attempts: u32,
        /// From when.
        not_before: Timestamp,
    },
    /// It is out of the way until an operator releases it.
    Quarantined {
        /// Failed tries.
        attempts: u32,
    },
    /// The claim is not held any more. Nothing was changed.
    Fenced,
}

/// Why a claim ends without success and without blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveBackReason {
    /// The worker stops.
    Shutdown,
    /// Newer events have arrived, and the handler was cancelled for them. Counted.
    Superseded,
}

/// The end of a claim that counts no attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiveBack {
    /// The issue.
    pub issue_id: IssueId,
    /// The claim.
    pub epoch: ClaimEpoch,
    /// Why.
    pub reason: GiveBackReason,
}

/// What became of a [`GiveBack`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// It is queued again: nudge.
    Requeued {
        /// No claim before this time.
        not_before: Option<Timestamp>,
    },
    /// The claim is not held any more. Nothing was changed.
    Fenced,
}

/// How to sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SweepOptions {
    /// The most issues to requeue, the most to nudge, and the most rows to remove. Default: 256.
    pub limit: usize,
    /// A queued issue is nudged again if its nudge is older than this. Default: 5 s.
    pub nudge_overdue: Duration,
    /// Claims that may run out before the issue is quarantined. Default: 5.
    pub crashes_max: u32,
    /// How long delivered rows of the outbox are kept, and dead letters after their release; so long the key of a row is
    /// remembered. Default: 7 days.
    pub keep: Duration,
}

impl Default for SweepOptions {
    fn default() -> Self {
        let keep = Duration::from_secs(7 * 24 * 60 * 60);
        Self { limit: 256, nudge_overdue: Duration::from_secs(5), crashes_max: 5, keep }
    }
}

/// "Look at this issue": what a stream entry of `issue_work` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nudge {
    /// The issue.
    pub issue_id: IssueId,
    /// Its oldest unprocessed event log; 0 if there is none.
    pub event_log_id: EventLogId,
}

/// What a sweep found.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Swept {
    /// Issues to nudge now: overdue ones and those just requeued. They count as nudged.
    pub nudges: Vec<Nudge>,
    /// How many claims had run out and were requeued.
    pub requeued: usize,
    /// Issues quarantined because too many of their claims had run out.
    pub quarantined: Vec<IssueId>,
    /// Rows removed because they were kept for long enough.
    pub pruned: usize,
    /// Whether a limit was reached, so that another sweep should follow at once.
    pub more: bool,
}

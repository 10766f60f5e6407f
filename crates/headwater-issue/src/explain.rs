//! Why an issue is not being worked on: one struct, and one sentence.
//!
//! Upstream: operators. Downstream: the facts that `operator` reads at one moment. Promises: pure but for that read.

use std::fmt;
use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::admin::IssueFacts;
use crate::error::{IssueError, Result};
use crate::issue::{IssueId, ProcessingStatus};
use crate::store::Store;

/// Why an issue is where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssueDiagnosis {
    /// The issue.
    pub issue_id: IssueId,
    /// Events that wait or are in a run.
    pub pending_events: u64,
    /// How long the oldest of them has waited.
    pub waiting_for: Option<Duration>,
    /// The reason.
    pub reason: DiagnosisReason,
}

/// What keeps an issue from being worked on, or that nothing does.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiagnosisReason {
    /// Nothing is pending.
    Idle,
    /// A worker has it.
    Claimed {
        /// Who.
        owner: String,
        /// Until when, unless a heartbeat comes.
        until: Timestamp,
        /// How long that is from now.
        left: Duration,
        /// Whether the worker still shows itself.
        owner_alive: bool,
    },
    /// A worker had it, and its claim has run out: the next claim or sweep takes it over.
    ClaimExpired {
        /// Who.
        owner: String,
        /// Since when.
        since: Timestamp,
    },
    /// It is out of the way until an operator releases it.
    Quarantined {
        /// Since when.
        since: Timestamp,
        /// What the last failure said.
        error: Option<String>,
    },
    /// No worker shows itself.
    NoWorker,
    /// A debounce window or a backoff is not over.
    Waiting {
        /// From when it can be claimed.
        not_before: Timestamp,
        /// How long that is from now.
        left: Duration,
        /// What the last failure said, if it waits for that.
        error: Option<String>,
    },
    /// It waits for one of the workers.
    Queued {
        /// Workers that are alive.
        workers: u64,
        /// When it was last nudged for.
        nudged_at: Option<Timestamp>,
    },
}

/// Says why an issue is not being worked on. `NotFound` if there is no such issue.
pub async fn explain(store: &dyn Store, issue_id: IssueId) -> Result<IssueDiagnosis> {
    let facts = store.issue_facts(issue_id).await?;
    let facts = facts.ok_or_else(|| IssueError::NotFound { what: format!("issue {issue_id}") })?;
    Ok(IssueDiagnosis::from_facts(&facts))
}

impl IssueDiagnosis {
    /// The reason that these facts show.
    pub fn from_facts(facts: &IssueFacts) -> Self {
        Self {
            issue_id: facts.issue.id,
            pending_events: facts.issue.pending_events,
            waiting_for: facts.oldest_pending_at.map(|since| facts.now.since(since)),
            reason: reason(facts),
        }
    }
}

fn reason(facts: &IssueFacts) -> DiagnosisReason {
    let IssueFacts { issue, now, .. } = facts;
    let error = || issue.last_error.clone();
    if let Some(since) = issue.quarantined_at {
        return DiagnosisReason::Quarantined { since, error: error() };
    }
    match (issue.status, issue.not_before) {
        (ProcessingStatus::Idle, _) => DiagnosisReason::Idle,
        (ProcessingStatus::Processing, _) => {
            let owner = issue.claim_owner.clone().unwrap_or_default();
            // A claim without an end, which another program must have written, counts as over from the start.
            let until = issue.claim_expires_at.or(issue.processing_started_at).unwrap_or_default();
            if until <= *now {
                return DiagnosisReason::ClaimExpired { owner, since: until };
            }
            let (left, owner_alive) = (until.since(*now), facts.owner_alive);
            DiagnosisReason::Claimed { owner, until, left, owner_alive }
        }
        // Nobody would take it when its time has come.
        (ProcessingStatus::Queued, _) if facts.workers_alive == 0 => DiagnosisReason::NoWorker,
        (ProcessingStatus::Queued, Some(not_before)) if not_before > *now => {
            DiagnosisReason::Waiting { not_before, left: not_before.since(*now), error: error() }
        }
        (ProcessingStatus::Queued, _) => {
            DiagnosisReason::Queued { workers: facts.workers_alive, nudged_at: issue.nudged_at }
        }
    }
}

fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

impl fmt::Display for IssueDiagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { issue_id, pending_events, .. } = self;
        let pending = counted(*pending_events, "event");
        let so =
            |error: &Option<String>| error.as_ref().map_or(String::new(), |e| format!(" ({e})"));
        match &self.reason {
            DiagnosisReason::Idle => write!(f, "issue {issue_id} is idle: nothing is pending"),
            DiagnosisReason::Claimed { owner, until, owner_alive, .. } => {
                let until = until.to_rfc3339();
                let state = if *owner_alive { "" } else { ", which does not show itself any more" };
                write!(f, "issue {issue_id} is claimed by {owner} until {until}{state}")
            }
            DiagnosisReason::ClaimExpired { owner, since } => {
                let since = since.to_rfc3339();
                write!(
                    f,
                    "issue {issue_id} was claimed by {owner}, whose claim ran out at {since}; the next sweep requeues it"
                )
            }
            DiagnosisReason::Quarantined { since, error } => {
                let since = since.to_rfc3339();
                write!(
                    f,
                    "issue {issue_id} is quarantined since {since}{}; release it when it is mended",
                    so(error)
                )
            }
            DiagnosisReason::NoWorker => write!(
                f,
                "issue {issue_id} is queued with {pending}, but no worker is alive; start one"
            ),
            DiagnosisReason::Waiting { not_before, error, .. } => {
                write!(f, "issue {issue_id} waits until {}{}", not_before.to_rfc3339(), so(error))
            }
            DiagnosisReason::Queued { workers, nudged_at } => {
                let workers = counted(*workers, "worker");
                let nudged = nudged_at.map_or("not nudged for yet".to_owned(), |at| {
                    format!("nudged for at {}", at.to_rfc3339())
                });
                write!(
                    f,
                    "issue {issue_id} is queued with {pending}, {nudged}, and waits for {workers}"
                )
            }
        }
    }
}

//! Diagnoses why an issue is not being processed, as a struct and as one sentence.
//!
//! Upstream: operators. Downstream: `admin`, which reads the facts in one snapshot. Pure apart from that read.

use std::fmt;
use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::admin::IssueFacts;
use crate::error::{IssueError, Result};
use crate::issue::{IssueId, ProcessingStatus};
use crate::store::Store;

/// Diagnosis of an issue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssueDiagnosis {
    /// The issue.
    pub issue_id: IssueId,
    /// Pending events, including those of a run in progress.
    pub pending_events: u64,
    /// Age of the oldest pending event.
    pub waiting_for: Option<Duration>,
    /// Why the issue is not being processed.
    pub reason: DiagnosisReason,
}

/// Why an issue is not being processed, or that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiagnosisReason {
    /// No events are pending.
    Idle,
    /// A worker is processing the issue.
    Claimed {
        /// Name of the worker.
        owner: String,
        /// When the claim expires unless it is renewed.
        until: Timestamp,
        /// Time until then.
        left: Duration,
        /// Whether the worker sends heartbeats.
        owner_alive: bool,
    },
    /// The claim of a worker has expired: the next claim or sweep takes over.
    ClaimExpired {
        /// Name of the worker.
        owner: String,
        /// When the claim expired.
        since: Timestamp,
    },
    /// The issue is quarantined until an operator releases it.
    Quarantined {
        /// When it was quarantined.
        since: Timestamp,
        /// Error of the last failure.
        error: Option<String>,
    },
    /// No worker is alive.
    NoWorker,
    /// A debounce window or a backoff is not over.
    Waiting {
        /// Earliest time of a claim.
        not_before: Timestamp,
        /// Time until then.
        left: Duration,
        /// Error of the last failure, if it waits for a backoff.
        error: Option<String>,
    },
    /// The issue waits for a worker.
    Queued {
        /// Number of workers that are alive.
        workers: u64,
        /// Time of the last nudge.
        nudged_at: Option<Timestamp>,
    },
}

/// Diagnoses why an issue is not being processed. `NotFound` if it does not exist.
pub async fn explain(store: &dyn Store, issue_id: IssueId) -> Result<IssueDiagnosis> {
    let facts = store.issue_facts(issue_id).await?;
    let facts = facts.ok_or_else(|| IssueError::NotFound { what: format!("issue {issue_id}") })?;
    Ok(IssueDiagnosis::from_facts(&facts))
}

impl IssueDiagnosis {
    /// Derives the diagnosis from the facts.
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
            // A claim without expiry, which only another program can write, counts as expired from its start.
            let until = issue.claim_expires_at.or(issue.processing_started_at).unwrap_or_default();
            if until <= *now {
                return DiagnosisReason::ClaimExpired { owner, since: until };
            }
            let (left, owner_alive) = (until.since(*now), facts.owner_alive);
            DiagnosisReason::Claimed { owner, until, left, owner_alive }
        }
        // Before `Waiting`: without a worker the issue would not be processed after its wait either.
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
        let reason =
            |error: &Option<String>| error.as_ref().map_or(String::new(), |e| format!(" ({e})"));
        match &self.reason {
            DiagnosisReason::Idle => write!(f, "issue {issue_id} is idle: nothing is pending"),
            DiagnosisReason::Claimed { owner, until, owner_alive, .. } => {
                let until = until.to_rfc3339();
                let state = if *owner_alive { "" } else { " (worker heartbeat missing)" };
                write!(f, "issue {issue_id} is claimed by {owner} until {until}{state}")
            }
            DiagnosisReason::ClaimExpired { owner, since } => {
                let since = since.to_rfc3339();
                write!(
                    f,
                    "issue {issue_id} was claimed by {owner}, the claim expired at {since}; the next sweep requeues it"
                )
            }
            DiagnosisReason::Quarantined { since, error } => {
                let since = since.to_rfc3339();
                write!(
                    f,
                    "issue {issue_id} has been quarantined since {since}{}; fix the cause, then release it",
                    reason(error)
                )
            }
            DiagnosisReason::NoWorker => write!(
                f,
                "issue {issue_id} is queued with {pending}, but no worker is alive; start one"
            ),
            DiagnosisReason::Waiting { not_before, error, .. } => {
                write!(
                    f,
                    "issue {issue_id} waits until {}{}",
                    not_before.to_rfc3339(),
                    reason(error)
                )
            }
            DiagnosisReason::Queued { workers, nudged_at } => {
                let workers = counted(*workers, "worker");
                let nudged = nudged_at.map_or("not nudged yet".to_owned(), |at| {
                    format!("last nudged at {}", at.to_rfc3339())
                });
                write!(
                    f,
                    "issue {issue_id} is queued with {pending}, {nudged}, and waits for {workers}"
                )
            }
        }
    }
}

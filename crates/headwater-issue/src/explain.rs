//! Diagnoses why an issue has no answer yet: waits, claims, workers and the delivery of replies, as a struct and as one
//! sentence with the command that helps.
//!
//! Upstream: operators. Downstream: `admin`, which reads the facts. Pure apart from that read. Not here: what a handler
//! knows, such as its model (the desk adds it).

use std::fmt;
use std::time::Duration;

use headwater_stream::clock::Timestamp;

use crate::admin::{IssueFacts, UndeliveredRow};
use crate::error::{IssueError, Result};
use crate::issue::{IssueId, OutboxId, ProcessingStatus};
use crate::outbox::types::OutboxKind;
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
    /// No events are pending, and every reply is delivered.
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
        /// Time since the last heartbeat of the worker, if it is known.
        heartbeat_age: Option<Duration>,
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
        /// Failed attempts; 0 after a deferral, which counts none.
        attempts: u32,
        /// Error of the last failure, if it waits for a backoff or after a deferral. `None`: it waits for further events.
        error: Option<String>,
    },
    /// The issue waits for a worker.
    Queued {
        /// Number of workers that are alive.
        workers: u64,
        /// Time of the last nudge.
        nudged_at: Option<Timestamp>,
    },
    /// All events are processed, but the delivery of a reply or event failed permanently.
    DeliveryDead {
        /// The outbox row.
        row: OutboxId,
        /// Reply or event.
        kind: OutboxKind,
        /// What the receiver answered.
        error: String,
    },
    /// All events are processed, and a reply waits for its delivery.
    DeliveryWaiting {
        /// The outbox row.
        row: OutboxId,
        /// When it is tried next.
        due_at: Timestamp,
        /// Failed deliveries.
        attempts: u32,
        /// Error of the last delivery.
        error: Option<String>,
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

    /// The command that helps, or that shows more.
    pub fn command(&self) -> String {
        let issue_id = self.issue_id;
        match &self.reason {
            DiagnosisReason::Quarantined { .. } => format!("headwater issue release {issue_id}"),
            DiagnosisReason::Waiting { .. } => format!("headwater issue retry {issue_id}"),
            DiagnosisReason::NoWorker | DiagnosisReason::ClaimExpired { .. } => {
                "headwater worker".to_owned()
            }
            DiagnosisReason::Claimed { owner_alive: false, .. } => "headwater worker".to_owned(),
            DiagnosisReason::DeliveryDead { row, .. } => format!("headwater outbox retry {row}"),
            DiagnosisReason::Queued { .. } => "headwater doctor".to_owned(),
            DiagnosisReason::Idle
            | DiagnosisReason::Claimed { .. }
            | DiagnosisReason::DeliveryWaiting { error: None, .. } => {
                format!("headwater issue show {issue_id}")
            }
            DiagnosisReason::DeliveryWaiting { .. } => "headwater config".to_owned(),
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
        (ProcessingStatus::Idle, _) => delivery(&facts.undelivered),
        (ProcessingStatus::Processing, _) => {
            let owner = issue.claim_owner.clone().unwrap_or_default();
            // A claim without expiry, which only another program can write, counts as expired from its start.
            let until = issue.claim_expires_at.or(issue.processing_started_at).unwrap_or_default();
            if until <= *now {
                return DiagnosisReason::ClaimExpired { owner, since: until };
            }
            let (left, owner_alive) = (until.since(*now), facts.owner_alive);
            let heartbeat_age = facts.owner_seen_at.map(|seen| now.since(seen));
            DiagnosisReason::Claimed { owner, until, left, owner_alive, heartbeat_age }
        }
        // Before `Waiting`: without a worker the issue would not be processed after its wait either.
        (ProcessingStatus::Queued, _) if facts.workers_alive == 0 => DiagnosisReason::NoWorker,
        (ProcessingStatus::Queued, Some(not_before)) if not_before > *now => {
            let (left, attempts) = (not_before.since(*now), issue.attempts);
            DiagnosisReason::Waiting { not_before, left, attempts, error: error() }
        }
        (ProcessingStatus::Queued, _) => {
            DiagnosisReason::Queued { workers: facts.workers_alive, nudged_at: issue.nudged_at }
        }
    }
}

/// What is not delivered: replies before events, the newest dead row first.
fn delivery(undelivered: &[UndeliveredRow]) -> DiagnosisReason {
    let is_reply = |row: &&UndeliveredRow| row.kind == OutboxKind::Reply;
    let dead = undelivered.iter().rev().filter(|row| row.is_dead);
    let waiting = undelivered.iter().filter(|row| !row.is_dead);
    if let Some(row) = waiting.clone().find(is_reply) {
        let UndeliveredRow { id, due_at, attempts, error, .. } = row.clone();
        return DiagnosisReason::DeliveryWaiting { row: id, due_at, attempts, error };
    }
    match dead.clone().find(is_reply).or_else(|| dead.clone().next()) {
        Some(row) => DiagnosisReason::DeliveryDead {
            row: row.id,
            kind: row.kind,
            error: row.error.clone().unwrap_or_else(|| "unknown error".to_owned()),
        },
        None => DiagnosisReason::Idle,
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
        let command = self.command();
        let reason =
            |error: &Option<String>| error.as_ref().map_or(String::new(), |e| format!(" ({e})"));
        match &self.reason {
            DiagnosisReason::Idle => write!(
                f,
                "issue {issue_id} is idle: nothing is pending, and every reply is delivered; `{command}` shows its events"
            ),
            DiagnosisReason::Claimed { owner, until, owner_alive: true, heartbeat_age, .. } => {
                let age = heartbeat_age.unwrap_or_default().as_secs();
                write!(
                    f,
                    "issue {issue_id} is being processed: claimed by {owner} until {}, last heartbeat {age} s ago; \
                     `{command}` shows its events",
                    until.to_rfc3339()
                )
            }
            DiagnosisReason::Claimed { owner, until, .. } => write!(
                f,
                "issue {issue_id} is claimed by {owner}, which is dead: worker heartbeat missing; the claim expires at {}, \
                 then another worker takes over; start one with `{command}`",
                until.to_rfc3339()
            ),
            DiagnosisReason::ClaimExpired { owner, since } => write!(
                f,
                "issue {issue_id} was claimed by {owner}, the claim expired at {}; the next sweep requeues it; if no \
                 worker runs, start one with `{command}`",
                since.to_rfc3339()
            ),
            DiagnosisReason::Quarantined { since, error } => write!(
                f,
                "issue {issue_id} has been quarantined since {}{}; fix the cause, then run `{command}`",
                since.to_rfc3339(),
                reason(error)
            ),
            DiagnosisReason::NoWorker => write!(
                f,
                "issue {issue_id} is queued with {pending}, but no worker is alive; start `headwater serve` or `{command}`"
            ),
            DiagnosisReason::Waiting { not_before, error: None, .. } => write!(
                f,
                "issue {issue_id} waits for further events until {}; to process it now, run `{command}`",
                not_before.to_rfc3339()
            ),
            DiagnosisReason::Waiting { not_before, attempts, error, .. } => {
                let why = match attempts {
                    0 => "is deferred".to_owned(),
                    attempts => {
                        format!("failed {} and waits", counted(u64::from(*attempts), "time"))
                    }
                };
                write!(
                    f,
                    "issue {issue_id} {why} until {}{}; to try now, run `{command}`",
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
                    "issue {issue_id} is queued with {pending}, {nudged}, and waits for {workers}; if it stays so, run \
                     `{command}`"
                )
            }
            DiagnosisReason::DeliveryDead { kind, error, .. } => write!(
                f,
                "issue {issue_id} is processed, but the delivery of its {} failed permanently: {error}; fix the cause, then run `{command}`",
                kind.as_str()
            ),
            DiagnosisReason::DeliveryWaiting { row, due_at, error: None, .. } => write!(
                f,
                "issue {issue_id} is processed; its reply (outbox row {row}) is to be delivered at {}; `{command}` shows \
                 its events",
                due_at.to_rfc3339()
            ),
            DiagnosisReason::DeliveryWaiting { row, due_at, error: Some(error), .. } => write!(
                f,
                "issue {issue_id} is processed, but its reply (outbox row {row}) is not delivered: {error}; it is sent \
                 again by itself, next at {}; if the address or the token of the integration is wrong, `{command}` shows \
                 where it is set",
                due_at.to_rfc3339()
            ),
        }
    }
}

//! Diagnoses why a reply or event of the outbox is not delivered, as a struct and as one sentence with the command that
//! helps.
//!
//! Upstream: operators. Downstream: `admin`, which reads the facts. Pure.

use std::fmt;

use headwater_stream::clock::Timestamp;

use crate::admin::{OutboxFacts, OutboxStatus};
use crate::issue::{IssueId, OutboxId};
use crate::outbox::types::OutboxKind;

/// Diagnosis of an outbox row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxDiagnosis {
    /// The row.
    pub id: OutboxId,
    /// Its issue.
    pub issue_id: IssueId,
    /// Reply or event.
    pub kind: OutboxKind,
    /// Name of the integration of the issue.
    pub integration: String,
    /// Failed deliveries.
    pub attempts: u32,
    /// Why it is not delivered, or that it is.
    pub reason: OutboxReason,
}

/// Why an outbox row is not delivered, or that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutboxReason {
    /// It is delivered.
    Delivered {
        /// When, if it is known.
        at: Option<Timestamp>,
    },
    /// Its delivery failed permanently.
    Dead {
        /// Error of the last delivery.
        error: String,
    },
    /// An older row of the same issue and kind comes first.
    Behind {
        /// That row.
        row: OutboxId,
    },
    /// A process is delivering it.
    Taken {
        /// The process.
        by: String,
        /// When its lease ends.
        until: Timestamp,
    },
    /// The process that was delivering it did not report a result in time.
    LeaseExpired {
        /// The process.
        by: String,
        /// When its lease ended.
        since: Timestamp,
    },
    /// A delivery failed, and the next one is not due yet.
    Retrying {
        /// When it is due.
        due_at: Timestamp,
        /// Error of the last delivery.
        error: Option<String>,
    },
    /// It is due and waits for a process that delivers.
    Due {
        /// Since when.
        since: Timestamp,
    },
}

impl OutboxDiagnosis {
    /// Derives the diagnosis from the facts.
    pub fn from_facts(facts: &OutboxFacts) -> Self {
        Self {
            id: facts.id,
            issue_id: facts.issue_id,
            kind: facts.kind,
            integration: facts.integration.clone(),
            attempts: facts.attempts,
            reason: reason(facts),
        }
    }

    /// The command that helps, or that shows more.
    pub fn command(&self) -> String {
        match &self.reason {
            OutboxReason::Delivered { .. } => format!("headwater issue show {}", self.issue_id),
            OutboxReason::Dead { .. } => format!("headwater outbox retry {}", self.id),
            OutboxReason::Behind { row } => format!("headwater outbox why {row}"),
            OutboxReason::Taken { .. } => format!("headwater outbox why {}", self.id),
            OutboxReason::Retrying { .. } => "headwater config".to_owned(),
            OutboxReason::LeaseExpired { .. } | OutboxReason::Due { .. } => {
                "headwater worker".to_owned()
            }
        }
    }
}

fn reason(facts: &OutboxFacts) -> OutboxReason {
    let (due_at, by) = (facts.due_at, facts.taken_by.clone().unwrap_or_default());
    match facts.status {
        OutboxStatus::Delivered => OutboxReason::Delivered { at: facts.delivered_at },
        OutboxStatus::Dead => OutboxReason::Dead {
            error: facts.error.clone().unwrap_or_else(|| "unknown error".to_owned()),
        },
        OutboxStatus::Taken if due_at > facts.now => OutboxReason::Taken { by, until: due_at },
        OutboxStatus::Taken => OutboxReason::LeaseExpired { by, since: due_at },
        OutboxStatus::Waiting | OutboxStatus::Pending => match facts.behind {
            Some(row) => OutboxReason::Behind { row },
            None if due_at > facts.now => {
                OutboxReason::Retrying { due_at, error: facts.error.clone() }
            }
            None => OutboxReason::Due { since: due_at },
        },
    }
}

impl fmt::Display for OutboxDiagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, issue_id, integration, attempts, .. } = self;
        let (kind, command) = (self.kind.as_str(), self.command());
        let times = format!("{attempts} time{}", if *attempts == 1 { "" } else { "s" });
        write!(f, "{kind} {id} of issue {issue_id} ")?;
        match &self.reason {
            OutboxReason::Delivered { at: Some(at) } => {
                write!(f, "was delivered at {}; `{command}` shows its issue", at.to_rfc3339())
            }
            OutboxReason::Delivered { at: None } => {
                write!(f, "was delivered; `{command}` shows its issue")
            }
            OutboxReason::Dead { error } => {
                write!(
                    f,
                    "was given up after it failed {times}: {error}; fix the cause, then run `{command}`"
                )
            }
            OutboxReason::Behind { row } => write!(
                f,
                "waits for {kind} {row} of the same issue, which is delivered first; `{command}` says why that one waits"
            ),
            OutboxReason::Taken { by, until } => write!(
                f,
                "is being delivered by {by}, until {} at most; `{command}` shows the result then",
                until.to_rfc3339()
            ),
            OutboxReason::LeaseExpired { by, since } => write!(
                f,
                "was being delivered by {by}, which reported no result until {}; another process delivers it again; if none \
                 runs, start one with `{command}`",
                since.to_rfc3339()
            ),
            OutboxReason::Retrying { due_at, error } => {
                let error = error.as_deref().unwrap_or("unknown error");
                // An unreachable receiver counts no attempt.
                let failed = match attempts {
                    0 => "could not be delivered".to_owned(),
                    _ => format!("failed {times}"),
                };
                write!(
                    f,
                    "{failed}: {error}; it is sent again by itself, next at {}; if the address or the token of integration \
                     `{integration}` is wrong, `{command}` shows where it is set",
                    due_at.to_rfc3339()
                )
            }
            OutboxReason::Due { since } => write!(
                f,
                "is due since {} and waits for a process that delivers; if it stays so, start one with `{command}`",
                since.to_rfc3339()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(status: OutboxStatus, due_ms: u64) -> OutboxFacts {
        let at = Timestamp::from_millis;
        OutboxFacts {
            id: OutboxId(7),
            issue_id: IssueId(3),
            integration: "shop".to_owned(),
            kind: OutboxKind::Reply,
            target: "acme/shop#1".to_owned(),
            status,
            attempts: 2,
            crashes: 0,
            due_at: at(due_ms),
            taken_by: Some("worker-1".to_owned()),
            error: Some("status 403".to_owned()),
            created_at: at(0),
            delivered_at: Some(at(5_000)),
            behind: None,
            now: at(10_000),
        }
    }

    #[test]
    fn each_state_has_a_sentence_with_the_command_that_helps() {
        let behind = OutboxFacts { behind: Some(OutboxId(5)), ..facts(OutboxStatus::Waiting, 0) };
        for (facts, parts) in [
            (
                facts(OutboxStatus::Delivered, 0),
                ["was delivered at 1970-01-01T00:00:05", "`headwater issue show 3`"],
            ),
            (
                facts(OutboxStatus::Dead, 0),
                ["was given up after it failed 2 times: status 403", "`headwater outbox retry 7`"],
            ),
            (behind, ["waits for reply 5 of the same issue", "`headwater outbox why 5`"]),
            (
                facts(OutboxStatus::Taken, 20_000),
                ["is being delivered by worker-1", "`headwater outbox why 7`"],
            ),
            (
                facts(OutboxStatus::Taken, 9_000),
                ["reported no result until 1970-01-01T00:00:09", "`headwater worker`"],
            ),
            (
                facts(OutboxStatus::Pending, 20_000),
                ["failed 2 times: status 403; it is sent again", "`headwater config`"],
            ),
            (
                facts(OutboxStatus::Pending, 10_000),
                ["is due since 1970-01-01T00:00:10", "`headwater worker`"],
            ),
        ] {
            let sentence = OutboxDiagnosis::from_facts(&facts).to_string();
            assert!(sentence.starts_with("reply 7 of issue 3 "), "{sentence}");
            assert!(parts.iter().all(|part| sentence.contains(part)), "{sentence} lacks {parts:?}");
        }
    }
}

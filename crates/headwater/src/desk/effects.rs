//! The effect ledger: what tools that change something were asked to do, and what became of it.
//!
//! Upstream: `tool_calls`. Downstream: `tickets::effects` keeps it in SQL.
//!
//! Guarantees: the intent of a call is committed before the call, by a run that holds the claim of its issue, and the
//! outcome after it. A call is identified by its issue, its request, its tool and its arguments: however often runs
//! ask for it, it has one row and one idempotency key.

use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::{ClaimEpoch, EventLogId, IssueId};
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// Outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EffectStatus {
    /// A person has approved it; the next run makes it.
    Approved,
    /// It was begun, and has no known outcome yet.
    Started,
    /// It was carried out.
    Done,
    /// It was not carried out, and never will be.
    Failed,
    /// A person has rejected it.
    Rejected,
    /// It is unknown whether it was carried out; a person has to find out.
    Unknown,
}

impl EffectStatus {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Approved, Self::Started, Self::Done, Self::Failed, Self::Rejected, Self::Unknown];

    /// The name in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Approved => "approved",
            Self::Started => "started",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Rejected => "rejected",
            Self::Unknown => "unknown",
        }
    }

    /// Parses a name; `None` if it is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

/// A call of a tool that changes something, or that a person has to approve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedCall {
    /// The tool.
    pub tool: String,
    /// Its arguments.
    pub arguments: Json,
    /// The request of the user that it belongs to: the oldest event log without an answer.
    pub request: i64,
}

impl PlannedCall {
    /// Identifies the call within its issue and request: equal for equal tools and arguments, whatever the order of keys.
    pub fn digest(&self) -> String {
        let call = format!("{}\n{}", self.tool, canonical_json(&self.arguments));
        hex::encode(Sha256::digest(call))
    }
}

/// JSON with sorted keys.
pub(crate) fn canonical_json(value: &Json) -> String {
    let text = |text: &str| Json::from(text).to_string();
    match value {
        Json::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            let fields = fields
                .iter()
                .map(|(name, field)| format!("{}:{}", text(name), canonical_json(field)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        Json::Array(items) => {
            let items: Vec<String> = items.iter().map(canonical_json).collect();
            format!("[{}]", items.join(","))
        }
        other => other.to_string(),
    }
}

/// A call in the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Effect {
    /// Sequence number; grows.
    pub number: i64,
    /// The idempotency key: the same for every attempt.
    pub key: Uuid,
    /// Its issue.
    pub issue_id: IssueId,
    /// The integration of the issue.
    pub integration: String,
    /// What is called.
    pub call: PlannedCall,
    /// Its outcome.
    pub status: EffectStatus,
    /// Attempts so far.
    pub attempts: i64,
    /// Epoch of the claim of the last attempt.
    pub epoch: Option<i64>,
    /// What the model is told, as JSON; `None` without an outcome.
    pub result: Option<String>,
    /// Why there is no outcome yet, why it is unknown, or why an approved call was not made in time.
    pub problem: Option<String>,
    /// Number of the draft that named it.
    pub draft: Option<i64>,
    /// Who approved or rejected it.
    pub decided_by: Option<String>,
    /// When it was approved or begun.
    pub created_at: Timestamp,
    /// When its first attempt began.
    pub started_at: Option<Timestamp>,
    /// When its outcome was recorded.
    pub ended_at: Option<Timestamp>,
    /// How long an attempt may still be in progress; zero if none can be.
    pub lease_left: Duration,
    /// Since its first attempt, or since its approval if there was none.
    pub age: Duration,
}

impl Effect {
    /// Whether it was approved, and ended without an attempt.
    pub(crate) fn was_not_made(&self) -> bool {
        self.status == EffectStatus::Failed && self.attempts == 0
    }

    /// What is stored when a person was told about it.
    pub(crate) fn told(&self) -> ToldEffect {
        ToldEffect { number: self.number, draft: self.draft }
    }
}

/// A call that a person was told about. A call that is approved again keeps its number; its draft is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldEffect {
    /// Its number in the ledger.
    pub number: i64,
    /// The draft that named it, if it needed an approval.
    pub draft: Option<i64>,
}

/// Result of [`EffectLedger::begin_effect`].
#[derive(Clone, Debug, PartialEq)]
pub enum EffectBegin {
    /// The intent of this attempt is committed: make the call, then record its outcome.
    Started(Effect),
    /// It has an outcome: do not call.
    Ended(Effect),
    /// Another attempt may still be in progress, for this long: do not call.
    InProgress(Duration),
    /// The claim of the issue is lost: do not call.
    Fenced,
}

/// Outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EffectOutcome {
    /// It was carried out; what the model is told, as JSON.
    Done(String),
    /// It was not carried out; what the model is told, as JSON.
    Failed(String),
    /// It was approved and is not begun, for this reason. It waits.
    Waiting(String),
    /// It was approved, has waited too long, and is never begun. A person has to be told.
    Expired {
        /// What the model is told, as JSON.
        result: String,
        /// Why it could not be made.
        problem: String,
    },
    /// There is no outcome yet, for this reason. Another attempt follows.
    Open(String),
    /// There is none, and a person has to find out.
    Unknown(String),
}

/// Keeps intents and outcomes. All methods are idempotent, and fail only if the database does.
#[async_trait]
pub trait EffectLedger: Send + Sync + std::fmt::Debug {
    /// The calls of an issue that have no outcome, and all of this request, oldest first.
    async fn effects_of(
        &self,
        issue_id: IssueId,
        request: EventLogId,
    ) -> Result<Vec<Effect>, String>;

    /// Commits the intent of an attempt, for at most `lease`, if the claim with this epoch is held.
    async fn begin_effect(
        &self,
        issue_id: IssueId,
        epoch: ClaimEpoch,
        call: &PlannedCall,
        lease: Duration,
    ) -> Result<EffectBegin, String>;

    /// Records the outcome of an attempt. Only [`Done`](EffectOutcome::Done) counts from an attempt that is not the newest one.
    async fn end_effect(
        &self,
        key: Uuid,
        attempt: i64,
        outcome: &EffectOutcome,
    ) -> Result<(), String>;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_calls_have_equal_digests_whatever_the_order_of_keys() {
        let call = |tool: &str, arguments: &str| {
            let arguments = serde_json::from_str(arguments).unwrap();
            PlannedCall { tool: tool.into(), arguments, request: 1 }.digest()
        };
        let digest = call("refund", r#"{"a": {"x": 1, "y": [true, null]}, "b": "ä"}"#);
        assert_eq!(digest, call("refund", r#"{"b":"\u00e4","a":{"y":[true,null],"x":1}}"#));
        for other in [
            call("refunds", r#"{"a": {"x": 1, "y": [true, null]}, "b": "ä"}"#),
            call("refund", r#"{"a": {"x": 1, "y": [null, true]}, "b": "ä"}"#),
            call("refund", r#"{"a": {"x": "1", "y": [true, null]}, "b": "ä"}"#),
        ] {
            assert_ne!(digest, other);
        }
        assert_eq!(canonical_json(&json!({"b": 1, "a\"": []})), r#"{"a\"":[],"b":1}"#);
    }
}

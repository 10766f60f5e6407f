//! What a run of the desk puts into the outbox, and the deliverers read from it.
//!
//! Upstream: `handler`. Downstream: `replies`. Promises: what is written here is read here, so both sides agree.

use headwater_analytics::RunFigures;
use headwater_issue::{NewOutbox, OutboxKind};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Where a row of kind `reply` goes: its `target`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyTarget {
    /// The answer, for whoever asked.
    Answer,
    /// The ticket is to be closed.
    Close,
    /// A person is to take over.
    HandOver,
}

impl ReplyTarget {
    /// The name in the outbox.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Answer => "",
            Self::Close => "close",
            Self::HandOver => "hand_over",
        }
    }

    /// The target of this name, if there is one.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Answer, Self::Close, Self::HandOver].into_iter().find(|one| one.as_str() == name)
    }
}

/// What a reply carries. Any handler may write one; only `content` is needed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// The text.
    pub content: String,
    /// The message it becomes in a ticket. Default: made of the row's idempotency key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<Uuid>,
    /// The session in which it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// The newest event log that the run had seen: if newer ones came before the commit, the reply is not sent. `None`: it
    /// is sent in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_to: Option<i64>,
    /// What the run took, for whoever counts.
    #[serde(flatten)]
    pub run: RunFigures,
}

impl Reply {
    /// The row that carries it.
    pub fn into_row(self, target: ReplyTarget) -> NewOutbox {
        let payload = serde_json::to_string(&self).expect("texts and numbers are JSON");
        NewOutbox { kind: OutboxKind::Reply, target: target.as_str().to_owned(), payload }
    }
}

//! The outbox payload of a reply: written by the desk, read by the deliverers.
//!
//! Upstream: `handler`. Downstream: `outbound`.

use headwater_analytics::RunMetrics;
use headwater_issue::{NewOutboxRow, OutboxKind};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The `target` of an outbox row of kind `reply`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyTarget {
    /// An answer for the user.
    Answer,
    /// Closes the ticket.
    Close,
    /// Hands the issue over to a person.
    HandOver,
    /// An answer that waits for the approval of a person. It is stored, and never sent.
    Draft,
    /// An internal note. It is stored, and never sent.
    Note,
}

impl ReplyTarget {
    /// The name in the outbox.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Answer => "",
            Self::Close => "close",
            Self::HandOver => "hand_over",
            Self::Draft => "draft",
            Self::Note => "note",
        }
    }

    /// Parses a name; `None` if it is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Answer, Self::Close, Self::HandOver, Self::Draft, Self::Note]
            .into_iter()
            .find(|one| one.as_str() == name)
    }
}

/// Payload of a reply. Any handler may write one; only `content` is required.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeskReply {
    /// The text.
    pub content: String,
    /// The id of the ticket message. Default: derived from the row's idempotency key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_id: Option<Uuid>,
    /// The session of the model run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// Id of the newest event log that the run has seen. If newer ones were recorded before the commit, the reply is
    /// stale and is not sent. `None`: it is always sent. A hand-over is never stale; only a ticket that was reopened
    /// after this event log is not handed over, unless a person has to be told about tool calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_to: Option<i64>,
    /// Events, tokens and cost of the run, for analytics.
    #[serde(flatten)]
    pub run: RunMetrics,
}

/// Payload of a hand-over with facts that only the people of the support team may see. `reply.content` is for everybody.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct HandOverReply {
    #[serde(flatten)]
    pub(crate) reply: DeskReply,
    /// The facts. `None`: `reply.content` has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) internal: Option<String>,
}

impl HandOverReply {
    /// Encodes it as an outbox row.
    pub(crate) fn into_row(self) -> NewOutboxRow {
        let payload = serde_json::to_string(&self).expect("texts and numbers are JSON");
        NewOutboxRow { payload, ..self.reply.into_row(ReplyTarget::HandOver) }
    }
}

impl DeskReply {
    /// Encodes the reply as an outbox row.
    pub fn into_row(self, target: ReplyTarget) -> NewOutboxRow {
        let payload = serde_json::to_string(&self).expect("texts and numbers are JSON");
        NewOutboxRow { kind: OutboxKind::Reply, target: target.as_str().to_owned(), payload }
    }
}

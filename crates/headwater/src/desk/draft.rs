//! Drafts: answers that are posted only when a person approves them, and notes, which are never posted.
//!
//! Upstream: `handler` commits a draft with its run, as an outbox row. Downstream: `tickets::drafts` keeps drafts in SQL,
//! where people decide about them. Guarantees: the row of a draft is never sent to a receiver; only the transaction of an
//! approval writes the row that is.

use async_trait::async_trait;
use headwater_issue::{IssueId, NewOutboxRow};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::desk::effects::PlannedCall;
use crate::desk::reply::{DeskReply, ReplyTarget};

/// Source of the events that tell an issue what a person has decided about the calls of a draft. No provider has it.
pub(crate) const DECISION_SOURCE: &str = "headwater.decision";

/// The outbox payload of a draft or a note. `reply.message_id` is the id of the draft, `reply.up_to` the newest event log
/// that its run has seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DraftReply {
    /// The answer.
    #[serde(flatten)]
    pub reply: DeskReply,
    /// What else is done when it is approved.
    #[serde(default)]
    pub effects: Vec<DraftEffect>,
    /// What chose the mode, such as a rule.
    #[serde(default)]
    pub chosen_by: String,
    /// The calls that are made when it is approved. Then its text is not posted: the run after them answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<PlannedCall>,
}

/// An effect of a tool that users see, so it needs the approval, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftEffect {
    /// Target of its outbox row, see [`ReplyTarget::as_str`].
    pub target: String,
    /// The reason that the model gave. It is sent, so everybody may see it, also if a process of an older version sends it.
    pub reason: String,
    /// What only the people of the support team may see. `None`: `reason` has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal: Option<String>,
}

impl DraftEffect {
    /// An effect for this reason. With a `public` text, only the people of the support team see the reason.
    pub(crate) fn new(target: ReplyTarget, reason: String, public: Option<String>) -> Self {
        let (reason, internal) = match public {
            Some(public) => (public, Some(reason)),
            None => (reason, None),
        };
        Self { target: target.as_str().to_owned(), reason, internal }
    }
}

impl DraftReply {
    /// Encodes it as an outbox row.
    pub fn into_row(self, target: ReplyTarget) -> NewOutboxRow {
        let payload = serde_json::to_string(&self).expect("texts and numbers are JSON");
        NewOutboxRow { payload, ..self.reply.into_row(target) }
    }
}

/// What became of a draft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftOutcome {
    /// It was approved, and this text was posted.
    Sent(String),
    /// A person rejected it, perhaps with a reason.
    Rejected(Option<String>),
    /// It was not decided about before newer events came, and never will be.
    Outdated,
    /// It names calls, and a person has approved or rejected them; the effect ledger has them.
    CallsDecided,
}

/// Tells runs what became of the drafts of earlier runs.
#[async_trait]
pub trait DraftLookup: Send + Sync + std::fmt::Debug {
    /// What became of a draft of an issue that has newer events. A draft without a decision is outdated from now on.
    async fn draft_outcome(&self, issue_id: IssueId, draft: Uuid) -> Result<DraftOutcome, String>;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_process_that_knows_no_internal_facts_sends_none() {
        let effect = |public: Option<&str>| {
            let public = public.map(str::to_owned);
            DraftEffect::new(ReplyTarget::HandOver, "refund 7 is open".to_owned(), public)
        };
        let stored = json!(effect(Some("a person has to check it")));
        let expected = json!({"target": "hand_over", "reason": "a person has to check it", "internal": "refund 7 is open"});
        assert_eq!(stored, expected);
        let stored = json!(effect(None));
        assert_eq!(stored, json!({"target": "hand_over", "reason": "refund 7 is open"}));
    }
}

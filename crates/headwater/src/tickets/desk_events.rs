//! Events of the desk for people of the team: a draft waits, or an issue is handed over.
//!
//! Upstream: transactions that store a draft or hand an issue over write them to the outbox. Downstream:
//! `outbound::notifications` sends them to the receivers that chose them.
//! Guarantees: an event is committed together with what it reports, once. It is in a stream of its own, because `ticket_events` has
//! a fixed format that other programs read (decision 87). It has no text of users and no link that decides something: those who can
//! read the stream need not be those who may decide.

use headwater_issue::{IssueId, KeyedOutboxRow, NewOutboxRow, OutboxKind, Transaction};
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::tickets::ticket::TicketError;

/// The stream of these events, and the target of their outbox rows.
pub const DESK_EVENTS: &str = "desk_events";

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DeskEventType {
    /// A draft waits for a decision.
    DraftWaiting,
    /// A draft waits longer than `desk.draft_max_wait`.
    DraftOverdue,
    /// A ticket, or an issue of another program, was handed over to a person.
    IssueHandedOver,
}

impl DeskEventType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::DraftWaiting, Self::DraftOverdue, Self::IssueHandedOver];

    /// The name in JSON and settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DraftWaiting => "DRAFT_WAITING",
            Self::DraftOverdue => "DRAFT_OVERDUE",
            Self::IssueHandedOver => "ISSUE_HANDED_OVER",
        }
    }

    /// Parses a name; `None` if it is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

/// An event of the desk, as JSON in the field `data` of an entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeskEvent {
    /// What happened.
    pub event_type: DeskEventType,
    /// Unique; the same in every copy of the event.
    pub event_id: Uuid,
    /// The integration of the issue.
    pub integration: String,
    /// The issue.
    pub issue_id: i64,
    /// Its project at the provider; empty for a ticket.
    pub external_project_id: String,
    /// Its id at the provider.
    pub external_issue_id: String,
    /// The ticket, if the issue is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket_id: Option<Uuid>,
    /// The draft of `DRAFT_WAITING` and `DRAFT_OVERDUE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<NamedDraft>,
    /// Why the issue was handed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Time in RFC 3339.
    pub timestamp: String,
}

/// The draft of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedDraft {
    /// Its number, as in `headwater draft show`.
    pub id: i64,
    /// Id of the message that it becomes.
    pub draft_id: Uuid,
    /// Its version when the event was written.
    pub version: i64,
}

/// The issue that an event is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventIssue<'a> {
    pub(crate) id: IssueId,
    pub(crate) integration: &'a str,
    pub(crate) external_project_id: &'a str,
    pub(crate) external_issue_id: &'a str,
}

impl DeskEvent {
    /// An event about an issue.
    pub(crate) fn new(event_type: DeskEventType, issue: EventIssue<'_>, at: Timestamp) -> Self {
        let is_ticket = issue.integration == crate::tickets::INTEGRATION;
        let ticket_id = Uuid::parse_str(issue.external_issue_id).ok().filter(|_| is_ticket);
        Self {
            event_type,
            event_id: Uuid::now_v7(),
            integration: issue.integration.to_owned(),
            issue_id: issue.id.0,
            external_project_id: issue.external_project_id.to_owned(),
            external_issue_id: issue.external_issue_id.to_owned(),
            ticket_id,
            draft: None,
            reason: None,
            timestamp: at.to_rfc3339(),
        }
    }

    /// A hand-over of an issue.
    pub(crate) fn handed_over(issue: EventIssue<'_>, reason: &str, at: Timestamp) -> Self {
        let event = Self::new(DeskEventType::IssueHandedOver, issue, at);
        Self { reason: Some(reason.to_owned()), ..event }
    }

    /// Its outbox row.
    pub(crate) fn row(&self) -> NewOutboxRow {
        let payload = serde_json::to_string(self).expect("names, texts and UUIDs are JSON");
        NewOutboxRow { kind: OutboxKind::Event, target: DESK_EVENTS.to_owned(), payload }
    }

    /// Its outbox row with a key that no other event has.
    pub(crate) fn keyed_row(&self) -> KeyedOutboxRow {
        let key = format!("{}:{}", self.event_type.as_str(), self.event_id);
        KeyedOutboxRow { key, row: self.row() }
    }

    /// Writes its outbox row.
    pub(crate) async fn write(&self, transaction: &mut dyn Transaction) -> Result<(), TicketError> {
        transaction.write_outbox(IssueId(self.issue_id), &[self.keyed_row()]).await?;
        Ok(())
    }
}

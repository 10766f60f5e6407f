//! Imports ticket events that other programs appended to `ticket_events`.
//!
//! Upstream: `inbound::ticket_events_consumer`. Downstream: the same transactions as for the HTTP API, but nothing is
//! published: the entry is already in the stream. Guarantees: a message id is imported at most once, without a time
//! limit; the caller acknowledges after the commit.

use headwater_issue::IssueError;
use uuid::Uuid;

use crate::limits::TITLE_BYTES_MAX;
use crate::text;
use crate::tickets::sql::statements;
use crate::tickets::store::{TicketChange, Tickets, retry_on_conflict};
use crate::tickets::ticket::TicketError;
use crate::tickets::{TicketEvent, TicketEventType};

/// Result of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The event was stored.
    Imported,
    /// The event was stored before; nothing was changed.
    Duplicate,
    /// The event is invalid, for this reason.
    Rejected(String),
}

impl Tickets {
    /// Whether a message is stored.
    pub async fn has_message(&self, message_id: Uuid) -> Result<bool, TicketError> {
        Ok(self
            .read(async |connection| statements::message(connection, message_id).await)
            .await?
            .is_some())
    }

    /// Stores an event of another program. Idempotent by message id.
    pub async fn import_event(&self, event: &TicketEvent) -> Result<ImportOutcome, TicketError> {
        retry_on_conflict(|| self.import_event_once(event)).await
    }

    async fn import_event_once(&self, event: &TicketEvent) -> Result<ImportOutcome, TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = statements::lock_ticket(transaction.connection(), event.ticket_id).await?;
        if let Some(known) = statements::message(transaction.connection(), event.message_id).await?
        {
            if known.ticket_id == event.ticket_id {
                return Ok(ImportOutcome::Duplicate);
            }
            return Ok(ImportOutcome::Rejected(
                "`message_id` belongs to another ticket".to_owned(),
            ));
        }
        let opens = matches!(
            event.event_type,
            TicketEventType::TicketCreated | TicketEventType::MessageReceived
        );
        let recorded = match &ticket {
            Some(ticket) if event.event_type == TicketEventType::TicketClosed => {
                let change = TicketChange { event, source: SOURCE, publish: false };
                let recorded = self.record(transaction.as_mut(), &change).await;
                if matches!(&recorded, Ok(recorded) if !recorded.duplicate) {
                    self.set_status(transaction.as_mut(), ticket, true).await?;
                }
                recorded
            }
            Some(ticket) => {
                let user_id = event.user_id.clone().or_else(|| ticket.user_id.clone());
                let event = TicketEvent { user_id, ..event.clone() };
                let change = TicketChange { event: &event, source: SOURCE, publish: false };
                self.add_to(transaction.as_mut(), ticket, &change).await
            }
            None if opens => {
                let mut event = event.clone();
                event.payload.title = Some(title(&event));
                let change = TicketChange { event: &event, source: SOURCE, publish: false };
                self.open_with(transaction.as_mut(), &change).await
            }
            None => return Ok(ImportOutcome::Rejected("the ticket does not exist".to_owned())),
        };
        match recorded {
            Ok(recorded) if recorded.duplicate => Ok(ImportOutcome::Duplicate),
            Ok(recorded) => {
                self.commit(transaction, event.ticket_id, &recorded).await?;
                Ok(ImportOutcome::Imported)
            }
            // The id was used for an event that is not a message.
            Err(TicketError::Issue(IssueError::DedupConflict { .. })) => {
                Ok(ImportOutcome::Duplicate)
            }
            Err(error) => Err(error),
        }
    }
}

const SOURCE: &str = "ticket_events";

fn title(event: &TicketEvent) -> String {
    let given = event.payload.title.as_deref().unwrap_or_default();
    let first = event.payload.content.lines().find(|line| !line.trim().is_empty());
    let title = if given.is_empty() { first.unwrap_or_default() } else { given };
    let title = text::one_line(title, TITLE_BYTES_MAX.min(120));
    if title.is_empty() { "No title".to_owned() } else { title }
}

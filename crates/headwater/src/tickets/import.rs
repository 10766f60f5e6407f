//! What other programs say of tickets, by way of the stream.
//!
//! Upstream: `ticket_events`. Downstream: the same transactions as for our own API, but nobody is told again: the entry is in
//! the stream already. Promises: a message id counts once, for good; the caller acknowledges after the commit.

use headwater_issue::IssueError;
use uuid::Uuid;

use crate::limits::TITLE_BYTES_MAX;
use crate::text;
use crate::tickets::store::{Said, Tickets, look, on, repeated};
use crate::tickets::ticket::TicketError;
use crate::tickets::{TicketEvent, TicketEventType};

/// What became of an event of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakenIn {
    /// It is in the tables now.
    New,
    /// It was there before.
    Known,
    /// It makes no sense here, for this reason.
    Refused(String),
}

impl Tickets {
    /// Whether a message is in the tables.
    pub async fn knows(&self, message_id: Uuid) -> Result<bool, TicketError> {
        Ok(look!(self.store, message(message_id))?.is_some())
    }

    /// Takes in an event of another program.
    pub async fn take_in(&self, event: &TicketEvent) -> Result<TakenIn, TicketError> {
        repeated!(self.take_in_once(event))
    }

    async fn take_in_once(&self, event: &TicketEvent) -> Result<TakenIn, TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = on!(transaction.connection(), lock_ticket(event.ticket_id))?;
        if let Some(known) = on!(transaction.connection(), message(event.message_id))? {
            if known.ticket_id == event.ticket_id {
                return Ok(TakenIn::Known);
            }
            return Ok(TakenIn::Refused("message_id belongs to another ticket".to_owned()));
        }
        let opens = matches!(
            event.event_type,
            TicketEventType::TicketCreated | TicketEventType::MessageReceived
        );
        let taken = match &ticket {
            Some(ticket) if event.event_type == TicketEventType::TicketClosed => {
                let said = Said { event, source: SOURCE, told: false };
                let recorded = self.record(transaction.as_mut(), &said).await;
                if matches!(&recorded, Ok(recorded) if !recorded.duplicate) {
                    self.set_status(transaction.as_mut(), ticket, true).await?;
                }
                recorded
            }
            Some(ticket) => {
                let user_id = event.user_id.clone().or_else(|| ticket.user_id.clone());
                let event = TicketEvent { user_id, ..event.clone() };
                let said = Said { event: &event, source: SOURCE, told: false };
                self.add_to(transaction.as_mut(), ticket, &said).await
            }
            None if opens => {
                let mut event = event.clone();
                event.payload.title = Some(title(&event));
                let said = Said { event: &event, source: SOURCE, told: false };
                self.open_with(transaction.as_mut(), &said).await
            }
            None => return Ok(TakenIn::Refused("there is no such ticket".to_owned())),
        };
        match taken {
            Ok(recorded) if recorded.duplicate => Ok(TakenIn::Known),
            Ok(recorded) => {
                self.commit(transaction, event.ticket_id, &recorded).await?;
                Ok(TakenIn::New)
            }
            // The id was used for an event that was no message.
            Err(TicketError::Issue(IssueError::DedupConflict { .. })) => Ok(TakenIn::Known),
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

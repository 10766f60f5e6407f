//! Imports ticket events that other programs appended to `ticket_events`.
//!
//! Upstream: `inbound::ticket_events_consumer`. Downstream: the same transactions as for the HTTP API, but nothing is
//! published: the entry is already in the stream. Guarantees: a message id is imported at most once, without a time
//! limit; the caller acknowledges after the commit. Status, title and user of a ticket are those of the order of its
//! entries in the stream, in whatever order several processes import them. The same holds for changes over HTTP: they
//! are published, and the entry that is read back has its place in that order. Only reopening is not published; no entry
//! of an earlier change undoes it.

use headwater_issue::{IssueError, Recorded, Transaction};
use headwater_stream::EntryId;
use uuid::Uuid;

use crate::limits::TITLE_BYTES_MAX;
use crate::text;
use crate::tickets::sql::statements;
use crate::tickets::store::{TicketChange, Tickets, retry_on_conflict};
use crate::tickets::ticket::{Ticket, TicketError, TicketStatus};
use crate::tickets::{Author, TicketEvent, TicketEventType};

/// Result of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImportOutcome {
    /// The event was stored.
    Imported,
    /// The event was stored before; nothing was changed.
    Duplicate,
    /// The ticket of the event does not exist; the entry that opens it may be imported later.
    NoTicket,
    /// The event is invalid, for this reason.
    Rejected(String),
}

/// What a message does whose ticket does not exist.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MissingTicket {
    Open,
    Report,
}

impl Tickets {
    /// Whether a message is stored.
    pub async fn has_message(&self, message_id: Uuid) -> Result<bool, TicketError> {
        Ok(self
            .read(async |connection| statements::message(connection, message_id).await)
            .await?
            .is_some())
    }

    /// Stores an event of another program, from the entry `entry_id`. Idempotent by message id. A message opens the ticket if
    /// it does not exist.
    pub async fn import_event(
        &self,
        event: &TicketEvent,
        entry_id: EntryId,
    ) -> Result<ImportOutcome, TicketError> {
        retry_on_conflict(|| self.import_event_once(event, entry_id, MissingTicket::Open)).await
    }

    /// The same, and opens no ticket.
    pub(crate) async fn import_into_existing(
        &self,
        event: &TicketEvent,
        entry_id: EntryId,
    ) -> Result<ImportOutcome, TicketError> {
        retry_on_conflict(|| self.import_event_once(event, entry_id, MissingTicket::Report)).await
    }

    async fn import_event_once(
        &self,
        event: &TicketEvent,
        entry_id: EntryId,
        missing: MissingTicket,
    ) -> Result<ImportOutcome, TicketError> {
        let mut transaction = self.store.begin().await?;
        let creates = event.event_type == TicketEventType::TicketCreated;
        let entry = sortable(entry_id);
        let ticket = statements::lock_ticket(transaction.connection(), event.ticket_id).await?;
        if let Some(ticket) = &ticket
            && self.order_own_change(transaction.as_mut(), ticket, event, &entry).await?
        {
            transaction.commit().await?;
            self.notify_changed(event.ticket_id);
            return Ok(ImportOutcome::Duplicate);
        }
        if let Some(known) = statements::message(transaction.connection(), event.message_id).await?
        {
            if known.ticket_id == event.ticket_id {
                // A message may share its id with the `TICKET_CREATED` that follows it.
                if let Some(ticket) = ticket.filter(|_| creates)
                    && self.describe(transaction.as_mut(), &ticket, event).await?
                {
                    transaction.commit().await?;
                    self.notify_changed(event.ticket_id);
                }
                return Ok(ImportOutcome::Duplicate);
            }
            return Ok(ImportOutcome::Rejected(
                "`message_id` belongs to another ticket".to_owned(),
            ));
        }
        let closes = event.event_type == TicketEventType::TicketClosed;
        let decides_status = closes || event.author() == Author::User;
        let mut event = event.clone();
        event.payload.entry = Some(entry.clone());
        let recorded = match &ticket {
            Some(ticket) => {
                // Also if the event names another user: it would give access to the tickets of that user.
                event.user_id = ticket.user_id.clone().or(event.user_id.filter(|_| creates));
                let decided =
                    statements::status_entry(transaction.connection(), ticket.ticket_id).await?;
                let is_older = decided.as_ref().is_some_and(|decided| *decided > entry);
                event.payload.late = is_older && (closes || ticket.status == TicketStatus::Closed);
                if creates {
                    self.describe(transaction.as_mut(), ticket, &event).await?;
                }
                let change = TicketChange { event: &event, source: SOURCE, publish: false };
                let recorded = match closes {
                    true => self.record(transaction.as_mut(), &change).await,
                    false => self.add_to(transaction.as_mut(), ticket, &change).await,
                };
                if decides_status && !is_older && is_new(&recorded) {
                    if closes {
                        self.set_status(transaction.as_mut(), ticket, true).await?;
                    }
                    let id = ticket.ticket_id;
                    statements::set_status_entry(transaction.connection(), id, &entry).await?;
                }
                recorded
            }
            None if missing == MissingTicket::Report => return Ok(ImportOutcome::NoTicket),
            None if creates || event.event_type == TicketEventType::MessageReceived => {
                event.payload.title = Some(title(&event));
                let change = TicketChange { event: &event, source: SOURCE, publish: false };
                let recorded = self.open_with(transaction.as_mut(), &change).await;
                if is_new(&recorded) {
                    let id = event.ticket_id;
                    statements::set_status_entry(transaction.connection(), id, &entry).await?;
                }
                recorded
            }
            None => return Ok(ImportOutcome::NoTicket),
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

    /// Gives the last change of the status over HTTP its place among the entries, if this is its entry. Returns whether it
    /// is. An entry of an earlier change decides nothing: the last one has a later entry, or reopened the ticket.
    async fn order_own_change(
        &self,
        transaction: &mut dyn Transaction,
        ticket: &Ticket,
        event: &TicketEvent,
        entry: &str,
    ) -> Result<bool, TicketError> {
        let id = ticket.ticket_id;
        let changed_by = statements::status_event(transaction.connection(), id).await?;
        if changed_by != Some(event.message_id.to_string()) {
            return Ok(false);
        }
        let decided = statements::status_entry(transaction.connection(), id).await?;
        if decided.is_none_or(|decided| decided.as_str() < entry) {
            let status = match event.event_type {
                TicketEventType::TicketClosed => TicketStatus::Closed,
                _ => TicketStatus::Open,
            };
            // An entry before this one was imported after the change.
            if status != ticket.status {
                let handed_over = ticket.handed_over;
                statements::change_ticket(transaction.connection(), id, status, handed_over)
                    .await?;
            }
            statements::set_status_entry(transaction.connection(), id, entry).await?;
        }
        statements::set_status_event(transaction.connection(), id, None).await?;
        Ok(true)
    }

    /// Gives a ticket that a message opened the title and user of its `TICKET_CREATED`. A user that is known stays.
    /// Returns whether anything may have changed.
    async fn describe(
        &self,
        transaction: &mut dyn Transaction,
        ticket: &Ticket,
        event: &TicketEvent,
    ) -> Result<bool, TicketError> {
        let is_described =
            event.payload.title.is_some() || !event.payload.content.trim().is_empty();
        let title = if is_described { title(event) } else { ticket.title.clone() };
        let user_id = ticket.user_id.clone().or_else(|| event.user_id.clone());
        if title == ticket.title && user_id == ticket.user_id {
            return Ok(false);
        }
        let id = ticket.ticket_id;
        statements::set_title(transaction.connection(), id, &title, user_id.as_deref()).await?;
        Ok(true)
    }
}

const SOURCE: &str = "ticket_events";

fn is_new(recorded: &Result<Recorded, TicketError>) -> bool {
    recorded.as_ref().is_ok_and(|recorded| !recorded.duplicate)
}

/// An entry id as text that sorts like the id.
fn sortable(entry_id: EntryId) -> String {
    format!("{:020}-{:020}", entry_id.ms, entry_id.seq)
}

fn title(event: &TicketEvent) -> String {
    let given = event.payload.title.as_deref().unwrap_or_default();
    let first = event.payload.content.lines().find(|line| !line.trim().is_empty());
    let title = if given.is_empty() { first.unwrap_or_default() } else { given };
    let title = text::one_line(title, TITLE_BYTES_MAX.min(120));
    if title.is_empty() { "No title".to_owned() } else { title }
}

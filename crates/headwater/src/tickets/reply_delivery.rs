//! Replies of the desk on their way into tickets.
//!
//! Upstream: `replies` brings rows of the outbox, maybe twice. Downstream: the same tables, in one transaction with what other
//! programs are told. Promises: a row that comes again changes nothing; what newer events have overtaken is not done: a ticket
//! that was written to, or opened again, since the model wanted it closed stays open.

use headwater_issue::{
    DeliverError, EventLogFilter, EventLogId, IssueError, OutboxRow, Store, Transaction,
};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use uuid::Uuid;

use crate::desk::{Reply, ReplyTarget};
use crate::tickets::sql::rows::NewMessageRow;
use crate::tickets::store::{INTEGRATION, Said, Tickets, now, on, repeated, status_event, tell};
use crate::tickets::ticket::{Ticket, TicketError, TicketStatus};
use crate::tickets::{Author, TicketEvent, TicketEventType, TicketPayload};

impl Tickets {
    /// Puts a reply of the desk into its ticket.
    pub async fn deliver(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        reply: &Reply,
    ) -> Result<(), DeliverError> {
        let ticket_id = Uuid::parse_str(&row.external_issue_id)
            .map_err(|_| DeliverError::Dead(format!("`{}` is no ticket", row.external_issue_id)))?;
        let delivered = match target {
            ReplyTarget::Answer => {
                repeated!(self.answer_once(ticket_id, row, reply))
            }
            ReplyTarget::Close | ReplyTarget::HandOver
                if overtaken(&self.store, row, reply).await? =>
            {
                Ok(())
            }
            ReplyTarget::Close => {
                repeated!(self.close_once(ticket_id, row, reply))
            }
            ReplyTarget::HandOver => repeated!(self.hand_over_once(ticket_id)),
        };
        delivered.map_err(|error| match error {
            // Our own database: no fault of the row, so no attempt is counted.
            error if error.is_transient() => DeliverError::Away(error.to_string()),
            error => DeliverError::Dead(error.to_string()),
        })
    }

    async fn answer_once(
        &self,
        ticket_id: Uuid,
        row: &OutboxRow,
        reply: &Reply,
    ) -> Result<(), TicketError> {
        let message_id = message_id(row, reply);
        let mut transaction = self.store.begin().await?;
        let ticket = self.locked(transaction.as_mut(), ticket_id).await?;
        if on!(transaction.connection(), message(message_id))?.is_some() {
            return Ok(());
        }
        let (run, now) = (reply.run, now());
        let message = NewMessageRow {
            message_id,
            ticket_id,
            author: Author::Assistant,
            content: &reply.content,
            run,
            now,
        };
        on!(transaction.connection(), insert_message(&message))?;
        let (status, handed_over) = (ticket.status, ticket.handed_over);
        on!(transaction.connection(), change_ticket(ticket_id, status, handed_over, now))?;
        let event = TicketEvent {
            event_type: TicketEventType::AiResponseGenerated,
            ticket_id,
            message_id,
            user_id: ticket.user_id,
            payload: TicketPayload { run, ..TicketPayload::new(&reply.content, now) },
        };
        tell(transaction.as_mut(), ticket.issue_id, &event).await?;
        transaction.commit().await?;
        self.changed(ticket_id);
        Ok(())
    }

    async fn close_once(
        &self,
        ticket_id: Uuid,
        row: &OutboxRow,
        reply: &Reply,
    ) -> Result<(), TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = self.locked(transaction.as_mut(), ticket_id).await?;
        if ticket.status == TicketStatus::Closed {
            return Ok(());
        }
        let event = status_event(TicketEventType::TicketClosed, ticket_id, message_id(row, reply));
        let event = TicketEvent { user_id: ticket.user_id.clone(), ..event };
        let said = Said { event: &event, source: INTEGRATION, told: true };
        let recorded = match self.record(transaction.as_mut(), &said).await {
            // It was closed by this very row before, and somebody opened it again.
            Ok(recorded) if recorded.duplicate => return Ok(()),
            Err(TicketError::Issue(IssueError::DedupConflict { .. })) => return Ok(()),
            recorded => recorded?,
        };
        self.set_status(transaction.as_mut(), &ticket, true).await?;
        self.commit(transaction, ticket_id, &recorded).await
    }

    async fn hand_over_once(&self, ticket_id: Uuid) -> Result<(), TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = self.locked(transaction.as_mut(), ticket_id).await?;
        on!(transaction.connection(), change_ticket(ticket_id, ticket.status, true, now()))?;
        transaction.commit().await?;
        self.changed(ticket_id);
        Ok(())
    }

    async fn locked(
        &self,
        transaction: &mut dyn Transaction,
        ticket_id: Uuid,
    ) -> Result<Ticket, TicketError> {
        let ticket = on!(transaction.connection(), lock_ticket(ticket_id))?;
        ticket.ok_or(TicketError::NotFound(ticket_id))
    }
}

/// Whether the thread went on since the run that wanted this.
async fn overtaken(
    store: &Arc<dyn Store>,
    row: &OutboxRow,
    reply: &Reply,
) -> Result<bool, DeliverError> {
    let Some(up_to) = reply.up_to else { return Ok(false) };
    let filter = EventLogFilter { processed: None, after: Some(EventLogId(up_to)) };
    let newer = store.event_logs(row.issue_id, &filter, 1).await;
    Ok(!newer.map_err(|error| DeliverError::Away(error.to_string()))?.is_empty())
}

/// The message that a reply becomes: the one it names, or one made of the row's key, so that it is the same at every try.
fn message_id(row: &OutboxRow, reply: &Reply) -> Uuid {
    reply.message_id.unwrap_or_else(|| {
        let hash = Sha256::digest(row.idempotency_key.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash[..16]);
        uuid::Builder::from_custom_bytes(bytes).into_uuid()
    })
}

//! Delivers replies of the desk to their tickets.
//!
//! Upstream: `outbound` passes outbox rows, possibly more than once. Downstream: the ticket tables, in one transaction
//! with the published event. Guarantees: a repeated row changes nothing. A close that newer events supersede is
//! discarded: a ticket that got a message, or was reopened, since the run stays open. A hand-over is applied, whatever
//! users write meanwhile, because the desk is silent after it; only reopening the ticket ends it, for the desk, too.

use headwater_issue::{
    DeliverError, EventLogFilter, EventLogId, IssueError, OutboxRow, Store, Transaction,
};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use uuid::Uuid;

use crate::desk::reply::HandOverReply;
use crate::desk::{DeskReply, ReplyTarget};
use crate::tickets::sql::statements::{self, NewMessageRow};
use crate::tickets::store::{
    INTEGRATION, TicketChange, Tickets, now, report_hand_over, retry_on_conflict, status_event,
    write_event_row,
};
use crate::tickets::ticket::{Ticket, TicketError, TicketStatus};
use crate::tickets::{Author, TicketEvent, TicketEventType, TicketPayload};

impl Tickets {
    /// Applies a reply to its ticket, or stores a draft or note of any integration. Idempotent.
    pub async fn deliver(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        reply: &DeskReply,
    ) -> Result<(), DeliverError> {
        if matches!(target, ReplyTarget::Draft | ReplyTarget::Note) {
            return self.store_draft(row, target).await;
        }
        let ticket_id = Uuid::parse_str(&row.external_issue_id).map_err(|_| {
            DeliverError::Dead(format!("`{}` is not a ticket id", row.external_issue_id))
        })?;
        let delivered = match target {
            ReplyTarget::Answer => {
                retry_on_conflict(|| self.add_answer_once(ticket_id, row, reply)).await
            }
            ReplyTarget::Close if is_superseded(&self.store, row, reply).await? => Ok(()),
            ReplyTarget::Close => {
                retry_on_conflict(|| self.close_once(ticket_id, row, reply)).await
            }
            ReplyTarget::HandOver => {
                let payload = serde_json::from_str::<HandOverReply>(&row.payload).ok();
                let internal = payload.and_then(|payload| payload.internal);
                let has_facts = internal.is_some();
                let reason = internal.as_ref().unwrap_or(&reply.content);
                retry_on_conflict(|| self.hand_over_once(ticket_id, reply, reason, has_facts)).await
            }
            ReplyTarget::Draft | ReplyTarget::Note => Ok(()),
        };
        delivered.map_err(|error| match error {
            // A database failure is not the fault of the row, so no attempt is counted.
            error if error.is_transient() => DeliverError::Unavailable(error.to_string()),
            error => DeliverError::Dead(error.to_string()),
        })
    }

    async fn add_answer_once(
        &self,
        ticket_id: Uuid,
        row: &OutboxRow,
        reply: &DeskReply,
    ) -> Result<(), TicketError> {
        let message_id = message_id(row, reply);
        let mut transaction = self.store.begin().await?;
        let ticket = self.locked(transaction.as_mut(), ticket_id).await?;
        if statements::message(transaction.connection(), message_id).await?.is_some() {
            return Ok(());
        }
        let run = reply.run;
        let message = NewMessageRow {
            message_id,
            ticket_id,
            author: Author::Assistant,
            agent: None,
            content: &reply.content,
            entry: None,
            run,
        };
        statements::insert_message(transaction.connection(), &message).await?;
        // The event has the time of the row, so that a rebuild of the analytics gives the same figures.
        let stored = statements::message(transaction.connection(), message_id).await?;
        let at = stored.map_or_else(now, |stored| stored.created_at);
        let (status, handed_over) = (ticket.status, ticket.handed_over);
        statements::change_ticket(transaction.connection(), ticket_id, status, handed_over).await?;
        let event = TicketEvent {
            event_type: TicketEventType::AiResponseGenerated,
            ticket_id,
            message_id,
            user_id: ticket.user_id,
            payload: TicketPayload { run, ..TicketPayload::new(&reply.content, at) },
        };
        write_event_row(transaction.as_mut(), ticket.issue_id, &event).await?;
        transaction.commit().await?;
        self.notify_changed(ticket_id);
        Ok(())
    }

    async fn close_once(
        &self,
        ticket_id: Uuid,
        row: &OutboxRow,
        reply: &DeskReply,
    ) -> Result<(), TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = self.locked(transaction.as_mut(), ticket_id).await?;
        if ticket.status == TicketStatus::Closed {
            return Ok(());
        }
        let event = status_event(TicketEventType::TicketClosed, ticket_id, message_id(row, reply));
        let event = TicketEvent { user_id: ticket.user_id.clone(), ..event };
        let change = TicketChange { event: &event, source: INTEGRATION, publish: true };
        let recorded = match self.record(transaction.as_mut(), &change).await {
            // This row closed the ticket before, and it was reopened since.
            Ok(recorded) if recorded.duplicate => return Ok(()),
            Err(TicketError::Issue(IssueError::DedupConflict { .. })) => return Ok(()),
            recorded => recorded?,
        };
        self.set_status(transaction.as_mut(), &ticket, true).await?;
        let decided_by = Some(event.message_id);
        statements::set_status_event(transaction.connection(), ticket_id, decided_by).await?;
        self.commit(transaction, ticket_id, &recorded).await
    }

    /// Hands a ticket over. `has_facts`: the reason says what became of tool calls, so a person is told, too, who has the
    /// ticket for another reason.
    async fn hand_over_once(
        &self,
        ticket_id: Uuid,
        reply: &DeskReply,
        reason: &str,
        has_facts: bool,
    ) -> Result<(), TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = self.locked(transaction.as_mut(), ticket_id).await?;
        // The next run, or one since, sees the reopening, too, and ends the hand-over of the issue. A person who
        // reopened it before did not know the facts, and no run tells them again. A repeated delivery may tell them twice.
        if !has_facts
            && let Some(up_to) = reply.up_to
            && statements::was_reopened(transaction.connection(), ticket.issue_id, up_to).await?
        {
            return Ok(());
        }
        statements::change_ticket(transaction.connection(), ticket_id, ticket.status, true).await?;
        let known = ticket.hand_over_reason.as_deref().unwrap_or_default();
        let adds_facts = ticket.handed_over && has_facts && !known.contains(reason);
        if !ticket.handed_over || adds_facts {
            report_hand_over(transaction.as_mut(), &ticket, reason).await?;
        }
        let connection = transaction.connection();
        if adds_facts {
            statements::add_hand_over_reason(connection, ticket_id, reason).await?;
        } else {
            statements::describe_hand_over(connection, ticket_id, reason, None).await?;
        }
        transaction.commit().await?;
        self.notify_changed(ticket_id);
        Ok(())
    }

    async fn locked(
        &self,
        transaction: &mut dyn Transaction,
        ticket_id: Uuid,
    ) -> Result<Ticket, TicketError> {
        let ticket = statements::lock_ticket(transaction.connection(), ticket_id).await?;
        ticket.ok_or(TicketError::NotFound(ticket_id))
    }
}

/// Whether the issue has events that the run of this reply had not seen.
async fn is_superseded(
    store: &Arc<dyn Store>,
    row: &OutboxRow,
    reply: &DeskReply,
) -> Result<bool, DeliverError> {
    let Some(up_to) = reply.up_to else { return Ok(false) };
    let filter = EventLogFilter { after: Some(EventLogId(up_to)), ..Default::default() };
    let newer = store.event_logs(row.issue_id, &filter, 1).await;
    Ok(!newer.map_err(|error| DeliverError::Unavailable(error.to_string()))?.is_empty())
}

/// The message id of a reply: given, or derived from the row's key, so that it is the same for every attempt.
fn message_id(row: &OutboxRow, reply: &DeskReply) -> Uuid {
    reply.message_id.unwrap_or_else(|| {
        let hash = Sha256::digest(row.idempotency_key.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash[..16]);
        uuid::Builder::from_custom_bytes(bytes).into_uuid()
    })
}

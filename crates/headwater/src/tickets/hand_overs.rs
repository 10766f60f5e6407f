//! The queue of tickets that are handed over: who answers them.
//!
//! Upstream: the routes of tickets; the gauges of the server. Downstream: the columns of `tickets` that `change_ticket` sets
//! when a hand-over begins and clears when it ends.
//! Guarantees: only a ticket that is handed over has an assignee; of several people who take it, one gets it. Repeating a
//! call changes nothing.

use headwater_issue::SqlRow;
use uuid::Uuid;

use crate::tickets::sql::statements::{self, list};
use crate::tickets::store::{Tickets, retry_on_conflict};
use crate::tickets::ticket::{Ticket, TicketError, checked_assignee};

/// A change of the assignee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TicketAssignment {
    /// This person takes the ticket, unless another one has it.
    Take(String),
    /// The ticket is given to this person, whoever has it.
    Assign(String),
    /// Nobody has it any more.
    Unassign,
}

/// Result of an assignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedTicket {
    /// The ticket after it.
    pub ticket: Ticket,
    /// Whether the assignee was different before.
    pub changed: bool,
}

/// Open tickets that are handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HandOverCounts {
    pub(crate) unassigned: i64,
    pub(crate) assigned: i64,
}

impl Tickets {
    /// Changes who answers a ticket that is handed over.
    pub async fn assign(
        &self,
        ticket_id: Uuid,
        assignment: TicketAssignment,
    ) -> Result<AssignedTicket, TicketError> {
        let assignment = match assignment {
            TicketAssignment::Take(name) => TicketAssignment::Take(checked_assignee(name)?),
            TicketAssignment::Assign(name) => TicketAssignment::Assign(checked_assignee(name)?),
            TicketAssignment::Unassign => TicketAssignment::Unassign,
        };
        retry_on_conflict(|| self.assign_once(ticket_id, &assignment)).await
    }

    async fn assign_once(
        &self,
        ticket_id: Uuid,
        assignment: &TicketAssignment,
    ) -> Result<AssignedTicket, TicketError> {
        let mut transaction = self.store.begin().await?;
        let ticket = statements::lock_ticket(transaction.connection(), ticket_id).await?;
        let ticket = ticket.ok_or(TicketError::NotFound(ticket_id))?;
        if !ticket.handed_over {
            return Err(TicketError::NotHandedOver(ticket_id));
        }
        let assignee = match (assignment, &ticket.assignee) {
            (TicketAssignment::Take(name), Some(assignee)) if assignee != name => {
                let assignee = assignee.clone();
                return Err(TicketError::Assigned { ticket_id, assignee });
            }
            (TicketAssignment::Take(name) | TicketAssignment::Assign(name), _) => Some(name),
            (TicketAssignment::Unassign, _) => None,
        };
        if assignee == ticket.assignee.as_ref() {
            return Ok(AssignedTicket { ticket, changed: false });
        }
        let name = assignee.map(String::as_str);
        statements::set_assignee(transaction.connection(), ticket_id, name).await?;
        let ticket = statements::lock_ticket(transaction.connection(), ticket_id).await?;
        let ticket = ticket.ok_or(TicketError::NotFound(ticket_id))?;
        transaction.commit().await?;
        self.notify_changed(ticket_id);
        Ok(AssignedTicket { ticket, changed: true })
    }

    /// How many open tickets are handed over.
    pub(crate) async fn hand_over_counts(&self) -> Result<HandOverCounts, TicketError> {
        let select = "SELECT count(*) - count(assignee), count(assignee) FROM tickets
             WHERE handed_over AND status = 'open'";
        let read =
            |row: &SqlRow| Ok(HandOverCounts { unassigned: row.get(0)?, assigned: row.get(1)? });
        let found =
            self.read(async |connection| list(connection, "hand-overs", select, &[], read).await);
        Ok(found.await?.pop().unwrap_or_default())
    }
}

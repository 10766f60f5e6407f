//! Tickets: issues of our own, whose messages are rows and events at once.
//!
//! Upstream: HTTP and `ticket_events`. Downstream: the tables, in transactions of `headwater-issue`; from there on a ticket is
//! an issue like any other.

// In dependency order: each module uses only those above it.
mod event;
mod ticket;

mod sql;

mod store;

mod export;
mod import;
mod ledger;
mod reply_delivery;

pub use self::event::{Author, TICKET_EVENTS, TicketEvent, TicketEventType, TicketPayload};

pub(crate) use crate::tickets::export::History;
pub use crate::tickets::import::TakenIn;
pub(crate) use crate::tickets::sql::migrations::apply as migrate;
pub(crate) use crate::tickets::store::prepare;
pub use crate::tickets::store::{INTEGRATION, Tickets};
pub use crate::tickets::ticket::{
    NewTicket, NewTicketMessage, Posted, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus,
};

//! Tickets: issues of our own, whose messages are rows and events at once.
//!
//! Upstream: HTTP and `ticket_events`. Downstream: the tables, in transactions of `headwater-issue`; from there on a ticket is
//! an issue like any other.

// In dependency order: each module uses only those above it.
mod rows;
mod ticket;

mod statements;

mod postgres;
mod sqlite;

mod store;

mod desk_side;
mod foreign;
mod history;
mod inside;

pub use self::foreign::TakenIn;
pub(crate) use self::history::History;
pub(crate) use self::store::prepare;
pub use self::store::{INTEGRATION, Tickets};
pub use self::ticket::{
    NewTicket, NewTicketMessage, Posted, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus,
};

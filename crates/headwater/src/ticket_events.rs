//! The stream `ticket_events`: what happens to tickets, for other programs and from them.
//!
//! Upstream: the outbox brings our events, other programs append theirs. Downstream: `ai_processor_group` takes those of
//! others into the ticket tables; `analytics_group` counts.

// In dependency order: each module uses only those above it.
mod event;
mod outlet;

pub use self::event::{Author, TicketEvent, TicketEventType, TicketPayload};
pub use self::outlet::{Outlet, TICKET_EVENTS};

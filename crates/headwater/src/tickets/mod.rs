//! Tickets: issues of the desk, whose messages are both rows and events.
//!
//! Upstream: HTTP and `ticket_events`. Downstream: SQL tables, written in transactions of `headwater-issue`; from
//! there a ticket is processed like any other issue. Drafts and prompts of all integrations are here, too.

// In dependency order: each module uses only those above it.
mod event;
mod ticket;

pub mod desk_events;

mod sql;

mod store;

mod day_usage;
mod draft_deadlines;
pub mod effects;

pub mod drafts;
mod export;
pub mod hand_overs;
mod import;
mod ledger;
mod model_runs;
pub mod prompts;
mod reply_delivery;
mod search;

pub use self::event::{Author, TICKET_EVENTS, TicketEvent, TicketEventType, TicketPayload};

pub(crate) use crate::tickets::draft_deadlines::OverdueAction;
pub(crate) use crate::tickets::export::TicketExport;
pub use crate::tickets::import::ImportOutcome;
pub(crate) use crate::tickets::model_runs::{IssueUsage, StoredModelRun, tokens_and_cost};
pub(crate) use crate::tickets::search::SEARCHED_MAX;
pub use crate::tickets::search::{TicketSearchPage, TicketWords};
pub(crate) use crate::tickets::sql::migrations::apply as migrate;
pub(crate) use crate::tickets::store::ensure_schema;
pub use crate::tickets::store::{INTEGRATION, Tickets};
pub use crate::tickets::ticket::{
    NewTicket, NewTicketMessage, PostedMessage, Ticket, TicketError, TicketFilter, TicketMessage,
    TicketStatus,
};
pub(crate) use crate::tickets::ticket::{checked_user, sort_imported};

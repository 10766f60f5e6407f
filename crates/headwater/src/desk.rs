//! The support desk: a language model that answers issues.
//!
//! Upstream: `headwater-issue` runs [`Desk`] for each issue with pending events. Downstream: a [`LanguageModel`], and the
//! outbox rows that `replies` delivers. `docs/desk.md` says how to write a model or a handler of one's own.

// In dependency order: each module uses only those above it.
pub mod model;
mod sse;

mod books;
pub mod budget;
pub mod reply;
pub mod thread;

pub mod prompt;
pub mod tools;

pub mod openai;
pub mod scripted;

mod late_sessions;

mod session;

pub mod handler;

pub use self::budget::{Budget, Ledger, MemoryLedger};
pub use self::handler::{Desk, DeskConfig, Prices};
pub use self::model::{LanguageModel, ModelError};
pub use self::openai::{OpenAiConfig, OpenAiModel};
pub use self::reply::{Reply, ReplyTarget};
pub use self::scripted::ScriptedModel;
pub use self::tools::{NoTickets, SearchScope, TicketSearch};

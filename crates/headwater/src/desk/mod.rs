//! The support desk: answers issues with a language model.
//!
//! Upstream: `headwater-issue` runs [`Desk`] for each issue with pending events. Downstream: a [`LanguageModel`], and
//! the outbox rows that `outbound` delivers. See `docs/desk.md` for custom models and handlers.

// In dependency order: each module uses only those above it.
pub mod model;

mod breaker;
pub mod budget;
pub mod policy;
pub mod reply;
mod token_reservations;

pub mod effects;

pub mod draft;
pub(crate) mod draft_links;

pub mod conversation;

pub mod model_runs;

pub mod model_endpoints;

pub mod prompt;
pub mod prompt_template;
pub mod provider;
pub mod provider_conformance;
pub mod tool;
pub mod tools;

pub mod toolbox;

mod tool_template;

pub mod http_tool;

pub(crate) mod redaction;

pub(crate) mod effect_call;
mod tool_calls;

pub mod prompt_versions;

pub(crate) mod session;

pub(crate) mod provisional;

mod resolution;

pub mod desk_config;

pub mod handler;

pub(crate) mod build;

pub use crate::desk::budget::{Ledger, MemoryLedger, TokenBudget};
pub use crate::desk::desk_config::DeskConfig;
pub use crate::desk::effects::EffectLedger;
pub use crate::desk::handler::Desk;
pub use crate::desk::http_tool::{HttpTool, HttpToolConfig};
pub use crate::desk::model::openai::{OpenAiConfig, OpenAiModel};
pub use crate::desk::model::scripted::ScriptedModel;
pub use crate::desk::model::{LanguageModel, ModelError};
pub use crate::desk::model_endpoints::{ModelEndpoint, ModelEndpointState};
pub use crate::desk::model_runs::Prices;
pub use crate::desk::policy::{IntegrationPolicy, ModeRule, ReplyMode};
pub use crate::desk::provider::Provider;
pub use crate::desk::reply::{DeskReply, ReplyTarget};
pub use crate::desk::tool::{Tool, ToolDefinition, ToolError, ToolRecovery, ToolRequest};
pub use crate::desk::toolbox::{InvalidTool, Toolbox};
pub use crate::desk::tools::{NoTickets, SearchScope, TicketSearch};

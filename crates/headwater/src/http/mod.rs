//! HTTP server and middleware shared by all routes.
//!
//! Flow of a request: `server.rs` (accept, headers; limited by `connections.rs` and `write_timeout.rs`; `client_address.rs` says
//! who it is) -> `timeouts.rs` (timeout, body
//! memory, metrics) -> `rate_limit.rs` (429) -> `auth.rs` (401, 403) and `token_scope.rs` (tokens of some integrations) -> `audit/` (log of changes) -> a route of
//! `api/` or `inbound/`, which reads its parameters with `extract.rs` and its body with `body.rs` (408, 413, 415,
//! 400), pages lists with `paging.rs` and runs long jobs in `background_jobs.rs` -> `error.rs`, the shape of every
//! error. `router.rs` composes the routes, `openapi.rs` describes them. `console.rs` and `console_session.rs` log people in to
//! the web console, which calls the API in this process. `draft_pages.rs` serves the pages of links to drafts.

pub(crate) mod audit;
pub(crate) mod auth;
mod background_jobs;
pub(crate) mod body;
mod body_memory;
mod client_address;
mod connections;
mod console;
mod console_session;
mod draft_pages;
mod error;
pub(crate) mod extract;
pub(crate) mod openapi;
pub(crate) mod paging;
pub(crate) mod rate_limit;
pub(crate) mod router;
mod server;
pub(crate) mod timeouts;
pub(crate) mod token_scope;
mod write_timeout;

pub(crate) use crate::http::auth::Authenticator;
pub(crate) use crate::http::background_jobs::BackgroundJobs;
pub(crate) use crate::http::body_memory::{BodyBudget, BodyMemory, decoded_bytes};
pub(crate) use crate::http::error::{ApiError, ErrorCause, ErrorResponse, NOT_FOUND_MESSAGE};
pub(crate) use crate::http::rate_limit::RateLimiter;
pub(crate) use crate::http::server::BoundListener;

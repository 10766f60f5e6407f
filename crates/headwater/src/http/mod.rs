//! HTTP: what all routes have in common.
//!
//! Flow of a request: `server` (connections, headers) -> `limits` (time, memory, measuring) -> `rate` (429) -> `access` (401, 403)
//! -> a route, which reads its body with `body` (408, 413, 415, 400) -> `error`, the one shape of every refusal.
//! Not here: the routes themselves; `router` puts them together.

pub(crate) mod audit;
pub(crate) mod auth;
mod background_jobs;
pub(crate) mod body;
mod body_memory;
mod connections;
mod error;
pub(crate) mod extract;
pub(crate) mod openapi;
pub(crate) mod paging;
pub(crate) mod rate_limit;
pub(crate) mod router;
mod server;
pub(crate) mod timeouts;

pub(crate) use crate::http::auth::Access;
pub(crate) use crate::http::background_jobs::LongWork;
pub(crate) use crate::http::body_memory::{BodyBudget, BodyMemory, decoded_bytes};
pub(crate) use crate::http::error::{ApiError, NOTHING_HERE, Refusal};
pub(crate) use crate::http::rate_limit::Rate;
pub(crate) use crate::http::server::{Listening, Peer};

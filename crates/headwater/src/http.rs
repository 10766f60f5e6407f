//! HTTP: what all routes have in common.
//!
//! Flow of a request: `server` (connections, headers) -> `limits` (time, memory, measuring) -> `rate` (429) -> `access` (401, 403)
//! -> a route, which reads its body with `body` (408, 413, 415, 400) -> `error`, the one shape of every refusal.
//! Not here: the routes themselves; `router` puts them together.

pub(crate) mod access;
pub(crate) mod body;
mod body_memory;
mod connections;
mod error;
pub(crate) mod extract;
pub(crate) mod limits;
mod long_work;
pub(crate) mod paging;
pub(crate) mod rate;
mod server;

pub(crate) use self::access::Access;
pub(crate) use self::body_memory::{BodyBudget, BodyMemory, decoded_bytes};
pub(crate) use self::error::{ApiError, NOTHING_HERE, Refusal};
pub(crate) use self::long_work::LongWork;
pub(crate) use self::rate::Rate;
pub(crate) use self::server::{Listening, Peer};

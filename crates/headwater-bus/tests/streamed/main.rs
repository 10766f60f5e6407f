//! The bus on streams: several processes, outages, spools.
#![cfg(all(feature = "conformance", feature = "redis"))]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

#[path = "../backends/mod.rs"]
#[macro_use]
mod backends;

mod away;
mod place;

#[path = "../backends/behind.rs"]
mod behind;

mod bad_input;
mod breaker;
mod closing;
mod crashes;
mod damaged;
mod groups;
mod health;
mod live;
mod lost_answers;
mod metrics;
mod others;
mod parked;
mod policies;
mod replay;
mod spool;
mod traces;

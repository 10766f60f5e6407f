//! The bus on streams: several processes, outages, spools.
#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

#[path = "../backends/mod.rs"]
#[macro_use]
mod backends;

mod fixture;
mod outage_fixture;

#[path = "../backends/proxied_fixture.rs"]
mod proxied_fixture;

mod bad_input;
mod breaker;
mod closing;
mod corrupt_spool;
mod crashes;
mod groups;
mod health;
mod live;
mod lost_replies;
mod metrics;
mod other_processes;
mod parked;
mod policies;
mod spool;
mod spool_drain;
mod traces;

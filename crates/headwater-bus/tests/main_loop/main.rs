//! The main loop: requests, replies, limits, cancellation, crashes; on every bus.
#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

#[path = "../backends/mod.rs"]
#[macro_use]
mod backends;

#[macro_use]
mod fixture;

#[path = "../backends/proxied_fixture.rs"]
mod proxied_fixture;

mod bad_input;
mod cancellation;
mod crashes;
mod deadlines;
mod limits;
mod metrics;
mod replies;
mod requests;
mod shutdown;

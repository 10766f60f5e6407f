//! The main loop: requests, replies, limits, cancellation, crashes; on every bus.
#![cfg(all(feature = "conformance", feature = "redis"))]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

#[path = "../backends/mod.rs"]
#[macro_use]
mod backends;

#[macro_use]
mod place;

#[path = "../backends/behind.rs"]
mod behind;

mod bad_input;
mod cancelling;
mod crashes;
mod deadlines;
mod limits;
mod replies;
mod requests;
mod stopping;
mod watching;

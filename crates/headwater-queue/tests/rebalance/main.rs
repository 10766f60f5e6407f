//! Consumers that come, go, die and stand still, with real messages.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod env;
mod processes;
mod sequence;
mod subscriptions;

//! Consumers that join, leave, die and freeze, with real messages.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod fixture;
mod processes;
mod sequence;
mod subscriptions;

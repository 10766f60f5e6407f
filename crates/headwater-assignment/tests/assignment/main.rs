//! Stream assignment on every backend: each scenario is written once and runs everywhere.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

#[macro_use]
mod place;

mod ending;
mod failover;
mod input;
mod many;
mod notifications;
mod sharing;

mod cluster_layout;
mod metrics;
mod notify_flags;
mod outages;
mod processes;

//! Stream assignment on every backend: each scenario is written once and runs on all of them.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

#[macro_use]
mod fixture;

mod failover;
mod input;
mod inspect;
mod notifications;
mod ownership_end;
mod scale;
mod sharing;

mod cluster_layout;
mod metrics;
mod notify_flags;
mod outages;
mod processes;

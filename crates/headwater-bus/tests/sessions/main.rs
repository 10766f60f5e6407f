//! Sessions: recovery, snapshots, compaction, forks, exports; on every bus.
#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

#[path = "../backends/mod.rs"]
#[macro_use]
mod backends;

#[macro_use]
mod fixture;

mod outage_fixture;

mod copies;
mod crashes;
mod data_loss;
mod expiry;
mod large;
mod maintenance;
mod outages;
mod processes;
mod recovery;
mod snapshots;
mod unreadable;

#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it.
mod config;
mod error;
mod input;
mod metrics;
mod names;

mod owned;
mod owned_set;

mod entry_index;
mod notification;

mod member;

mod acquire;
mod pending_scan;
mod release;

mod heartbeat;
mod input_reader;
mod rebalance;

mod reassignment;
mod sweep;

mod client;
mod inspect;

#[cfg(test)]
mod tests;

pub use client::{Assignment, add};
pub use config::{AssignmentConfig, OnExpired, Rebalance, STREAMS_MAX};
pub use error::{ClaimError, EndError, ReleaseError};
pub use input::INPUT_FIELD;
pub use inspect::{
    AssignedState, AssignedStream, AssignedStreams, LIST_MAX, OperatorRelease, ServiceSummary,
    describe, list, release, summarize,
};
pub use notification::{Disowned, Notification, Notifications, Terminated};
pub use owned::{Owned, WorkGuard};

#![doc = include_str!("../README.md")]

// In dependency order: each module uses only those above it.
mod config;
mod error;
mod input;
mod metrics;
mod names;

mod owned;
mod slots;

mod known;
mod notification;

mod member;

mod ending;
mod listing;
mod taking;

mod heartbeat;
mod intake;
mod rebalance;

mod offers;
mod sweep;

mod client;

#[cfg(test)]
mod steps;

pub use client::{Assignment, add};
pub use config::{AssignmentConfig, OnExpired, Rebalance, STREAMS_MAX};
pub use error::{ClaimError, EndError};
pub use input::INPUT_FIELD;
pub use notification::{Disowned, Notification, Notifications, Terminated};
pub use owned::{Owned, Work};

//! Stream assignment: whole streams to one consumer each, with fail-over.
//!
//! A service has an input stream whose entries say "here is a data stream". Each data stream goes to one consumer of
//! the service, which holds a lease for it and keeps it by heartbeats. When a consumer dies, its leases run out and
//! the survivors are told; one of them claims the stream. What is in a data stream is none of our business.
//!
//! Upstream: your program, through [`Assignment`] and [`Notifications`]. Downstream: [`Backend`](crate::Backend) and
//! [`LeaseKeeper`](crate::LeaseKeeper), nothing of a particular backend.
//!
//! The life of a data stream:
//!
//! ```text
//!  add ──► input entry ──► intake: lease + Added ──► work ──► done: entry deleted, lease released
//!                             ▲                       │
//!                             │ offered: taken by     ├──► release, shutdown, rebalance: entry given back
//!                             └─ whoever has room ◄───┘
//!                                                     └──► owner dies: lease runs out ──► Expired ──► claim
//! ```
//!
//! Promises:
//! - One owner per epoch. Whoever ends a stream (`done`, `release`) presents the epoch; an old one changes nothing.
//! - An input entry is deleted by `done` and by nothing else. Whatever dies, and wherever, the entry is found again: a
//!   notification is a hint, the sweep is the guarantee.
//! - An owner hears `Disowned` exactly once, and its guard fires before the lease can have another holder.
//! - Heartbeats are one flight per interval for all streams of a process, and wait for no reader.
//! - A malformed input entry goes to the dead letters with its bytes intact; so does a stream whose owners keep dying.
//!
//! Not here: what a data stream holds, and how it is read.

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

#[cfg(all(test, feature = "embedded"))]
mod steps;

pub use client::{Assignment, add};
pub use config::{AssignmentConfig, OnExpired, Rebalance, STREAMS_MAX};
pub use error::{ClaimError, EndError};
pub use input::INPUT_FIELD;
pub use notification::{Disowned, Notification, Notifications, Terminated};
pub use owned::{Owned, Work};

//! Delays: entries put aside until they are due, then moved to their stream.
//!
//! Upstream: retries with backoff and delayed messages of `headwater-queue`. Downstream: a backend.
//! Promises: an entry leaves the set and enters its stream in one atomic step, once; a waiter wakes when the
//! first entry is due, also when an earlier one is put aside meanwhile by another process.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};
use crate::error::Result;
use crate::name::{DelayName, StreamName};

/// Sets of entries that wait for their time.
#[async_trait]
pub trait Delays: Send + Sync {
    /// Puts entries aside, all or none. The ids it returns grow.
    async fn put_aside(&self, delays: &DelayName, items: &[PutAside]) -> Result<Vec<DelayId>>;

    /// Takes an entry out before it is due. Returns whether it was still there.
    async fn cancel(&self, delays: &DelayName, id: DelayId) -> Result<bool>;

    /// Moves up to `count` due entries to their streams, earliest first, those of one due time in the order they were
    /// put aside. An entry whose stream cannot take it stays where it is.
    async fn take_due(&self, delays: &DelayName, count: usize) -> Result<Vec<Returned>>;

    /// Waits until an entry is due, at most `wait`. Returns whether one is. Cancel-safe.
    async fn wait_due(&self, delays: &DelayName, wait: Duration) -> Result<bool>;

    /// How many entries wait, and the next due time.
    async fn delay_stats(&self, delays: &DelayName) -> Result<DelayStats>;

    /// Lists waiting entries, earliest first, skipping `offset` of them.
    async fn delayed(
        &self,
        delays: &DelayName,
        offset: usize,
        count: usize,
    ) -> Result<Vec<Delayed>>;

    /// Removes the set with all that waits in it. Returns whether there was anything.
    async fn delete_delays(&self, delays: &DelayName) -> Result<bool>;
}

/// The number of an entry in a set of delayed entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DelayId(pub u64);

impl fmt::Display for DelayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// When an entry is due, by the backend's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// This long from now.
    After(Duration),
    /// At this time; a past one is due at once.
    At(Timestamp),
}

/// An entry to put aside.
#[derive(Clone, Debug)]
pub struct PutAside {
    /// The stream it goes to when it is due.
    pub to: StreamName,
    /// When that is.
    pub due: Due,
    /// What it carries.
    pub fields: Fields,
}

/// An entry that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delayed {
    /// Its number in the set.
    pub id: DelayId,
    /// The stream it goes to.
    pub to: StreamName,
    /// When it is due.
    pub due_at: Timestamp,
    /// What it carries.
    pub fields: Fields,
}

/// An entry that was due and is in its stream now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Its number in the set it left.
    pub delay: DelayId,
    /// The stream it entered.
    pub stream: StreamName,
    /// Its id there.
    pub id: EntryId,
}

/// What there is to know of a set of delayed entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayStats {
    /// How many entries wait, due ones included.
    pub waiting: u64,
    /// When the first of them is due.
    pub next_due: Option<Timestamp>,
}

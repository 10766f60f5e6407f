//! Delay sets: entries that wait until they are due, then move to their stream.
//!
//! Upstream: retries with backoff and delayed messages of `headwater-queue`. Downstream: a backend.
//! Guarantees: an entry leaves the delay set and enters its stream in one atomic step, once; a waiting caller wakes when the
//! first entry is due, also if another process schedules an earlier one meanwhile.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};
use crate::error::Result;
use crate::name::{DelayName, StreamName};

/// Delay sets: entries ordered by due time.
#[async_trait]
pub trait Delays: Send + Sync {
    /// Schedules entries, all or none. Returns their ids, which increase.
    async fn schedule(&self, delays: &DelayName, items: &[ScheduleRequest])
    -> Result<Vec<DelayId>>;

    /// Removes an entry before it is due. Returns whether it was still in the delay set.
    async fn cancel(&self, delays: &DelayName, id: DelayId) -> Result<bool>;

    /// Moves up to `count` due entries to their streams, earliest first; entries with one due time in the order they were
    /// scheduled. An entry whose stream cannot take it stays in the delay set.
    async fn promote_due(&self, delays: &DelayName, count: usize) -> Result<Vec<PromotedEntry>>;

    /// Waits up to `wait` until an entry is due. Returns whether one is. Cancel-safe.
    async fn wait_until_due(&self, delays: &DelayName, wait: Duration) -> Result<bool>;

    /// Number of entries and the next due time.
    async fn delay_stats(&self, delays: &DelayName) -> Result<DelayStats>;

    /// Lists entries, earliest first, after skipping `offset` of them. Fewer than `count` are the last ones.
    async fn delayed(
        &self,
        delays: &DelayName,
        offset: usize,
        count: usize,
    ) -> Result<Vec<DelayedEntry>>;

    /// Deletes the delay set with all its entries. Returns whether it existed.
    async fn delete_delay_set(&self, delays: &DelayName) -> Result<bool>;
}

/// Id of an entry within a delay set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DelayId(pub u64);

impl fmt::Display for DelayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// When an entry is due, by the backend's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DueTime {
    /// This long from now.
    After(Duration),
    /// At this time; due at once if it is in the past.
    At(Timestamp),
}

/// An entry to schedule.
#[derive(Clone, Debug)]
pub struct ScheduleRequest {
    /// The stream it moves to when it is due.
    pub to: StreamName,
    /// When it is due.
    pub due: DueTime,
    /// The fields of the entry.
    pub fields: Fields,
}

/// An entry in a delay set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayedEntry {
    /// Its id in the delay set.
    pub id: DelayId,
    /// The stream it moves to.
    pub to: StreamName,
    /// When it is due.
    pub due_at: Timestamp,
    /// The fields of the entry.
    pub fields: Fields,
}

/// An entry that was due and is now in its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromotedEntry {
    /// Its id in the delay set it left.
    pub delay: DelayId,
    /// The stream it entered.
    pub stream: StreamName,
    /// Its id in the stream.
    pub id: EntryId,
}

/// Statistics of a delay set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayStats {
    /// Number of entries, including due ones.
    pub waiting: u64,
    /// The earliest due time.
    pub next_due: Option<Timestamp>,
}

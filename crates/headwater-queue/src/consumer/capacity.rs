//! Capacity of a partition: how many more messages may be in flight, and when more capacity wakes the fetcher.
//!
//! Upstream: `fetch_plan` asks before it reads, `reclaim` before it takes entries. Downstream: `fetcher` is woken when
//! a read is worth it.
//! Guarantees: never more in flight than the limit of the partition, or than the bulk size while it is read in bulk; a
//! partition that a read skipped for lack of capacity is read again when it has some.
//! A *bulk* read asks few partitions for many entries. It pays where a backlog is waiting at the server and messages
//! are handled fast ([`BacklogTracker`]); elsewhere it would hold messages that other consumers could have.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::partition_consumer::PartitionConsumer;
use crate::limits::BLOCKED_IDS_MAX;

/// A handler that takes this long wakes the fetcher at once when it finishes.
pub(super) const SLOW_HANDLER: Duration = Duration::from_millis(1);
/// A message that completes this soon after it was received was handled fast.
const FAST_WITHIN: Duration = Duration::from_millis(20);
/// Without free capacity for this long, a partition is no longer treated as fast.
const SATURATED_FOR: Duration = Duration::from_millis(50);

/// How many entries may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capacity {
    None,
    /// Not enough for a bulk read yet, but soon.
    BulkSoon,
    /// Little, but no message is waiting for a handler.
    Scarce(usize),
    Ample(usize),
    /// Enough for a bulk read.
    Bulk(usize),
}

impl PartitionConsumer {
    /// How many entries may be read now. From here on, new capacity wakes the fetcher.
    pub(super) fn capacity(&self, now: Instant) -> Capacity {
        self.is_fetch_requested.store(false, Ordering::SeqCst);
        let may_read = self.is_reading.load(Ordering::Acquire) && !self.context.is_paused();
        if !may_read || !self.lease.is_valid() {
            return Capacity::None;
        }
        let capacity = self.free_capacity();
        if matches!(capacity, Capacity::BulkSoon | Capacity::Bulk(_)) {
            self.backlog.record_capacity(capacity != Capacity::BulkSoon, now);
        }
        capacity
    }

    /// The next read includes this partition.
    pub(super) fn mark_fetch_requested(&self) {
        self.is_fetch_requested.store(true, Ordering::SeqCst);
    }

    fn free_capacity(&self) -> Capacity {
        let blocked = self.blocked.load(Ordering::SeqCst);
        if blocked >= BLOCKED_IDS_MAX {
            return Capacity::None;
        }
        let in_flight = self.in_flight().saturating_sub(blocked);
        let may_be_bulk = |size: &usize| {
            self.backlog.allows_bulk() && *size <= self.context.config.partition_in_flight_max()
        };
        if let Some(bulk_size) = self.context.bulk_size().filter(may_be_bulk) {
            let free = bulk_size.saturating_sub(in_flight);
            return if free * 2 >= bulk_size { Capacity::Bulk(free) } else { Capacity::BulkSoon };
        }
        self.regular_capacity(in_flight)
    }

    /// How many entries a regular read may take, although there is a backlog.
    pub(super) fn capacity_without_bulk(&self) -> usize {
        let in_flight = self.in_flight().saturating_sub(self.blocked.load(Ordering::SeqCst));
        match self.regular_capacity(in_flight) {
            Capacity::Scarce(free) | Capacity::Ample(free) => free,
            Capacity::None | Capacity::BulkSoon | Capacity::Bulk(_) => 0,
        }
    }

    fn regular_capacity(&self, in_flight: usize) -> Capacity {
        let limit = self.in_flight_limit();
        let free = limit.saturating_sub(in_flight);
        if free > 0 && free * 4 >= limit {
            Capacity::Ample(free)
        } else if free > 0 && self.ready.load(Ordering::SeqCst) == 0 {
            Capacity::Scarce(free)
        } else {
            Capacity::None
        }
    }

    /// How many messages may be in flight without a bulk read.
    fn in_flight_limit(&self) -> usize {
        let limit = self.context.in_flight_per_partition.load(Ordering::Relaxed);
        limit.min(self.context.config.partition_in_flight_max())
    }

    /// How many pending entries may be reclaimed now. Blocked messages take no capacity here either.
    pub(super) fn reclaim_capacity(&self) -> usize {
        let blocked = self.blocked.load(Ordering::SeqCst);
        if blocked >= BLOCKED_IDS_MAX {
            return 0;
        }
        let limit = self.context.in_flight_per_partition.load(Ordering::Relaxed);
        limit.saturating_sub(self.in_flight().saturating_sub(blocked))
    }

    /// Wakes the fetcher, once, if there is enough capacity to be worth a read. Returns whether it did.
    pub(super) fn request_fetch(&self, is_slow: bool) -> bool {
        if self.is_fetch_requested.load(Ordering::SeqCst) {
            return false;
        }
        let limit = self.in_flight_limit();
        let is_worth_it = match self.free_capacity() {
            // Capacity that this partition frees may be awaited by another one.
            _ if self.context.is_capacity_awaited(is_slow) => true,
            Capacity::None | Capacity::BulkSoon => false,
            Capacity::Scarce(_) => true,
            Capacity::Bulk(_) => self.context.bulk_capacity() > 0,
            // Not for a few entries: a small read costs as much as a large one. But if no message is ready, idle
            // handlers would have to wait for the slow ones.
            Capacity::Ample(free) => free * 2 >= limit || self.ready.load(Ordering::SeqCst) == 0,
        };
        if is_worth_it && !self.is_fetch_requested.swap(true, Ordering::SeqCst) {
            self.fetcher.wake();
            return true;
        }
        false
    }

    pub(super) fn add_in_flight(&self, entries: usize) {
        self.in_flight.fetch_add(entries, Ordering::SeqCst);
        self.context.in_flight.fetch_add(entries, Ordering::SeqCst);
    }

    pub(super) fn remove_in_flight(&self, entries: usize) {
        self.in_flight.fetch_sub(entries, Ordering::SeqCst);
        self.context.in_flight.fetch_sub(entries, Ordering::SeqCst);
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }
}

/// Tracks whether a partition has a backlog at the server and whether its messages are handled fast.
#[derive(Debug, Default)]
pub(super) struct BacklogTracker {
    has_more: AtomicBool,
    is_fast: AtomicBool,
    /// The turn of the fetcher in which the partition was read last.
    turn: AtomicU64,
    saturated: SaturatedSince,
}

/// Since when there is no capacity for a bulk read.
#[derive(Debug, Default)]
pub(super) struct SaturatedSince(Mutex<Option<Instant>>);

impl SaturatedSince {
    /// Records whether there is capacity. Returns whether there has been none for longer than [`SATURATED_FOR`].
    pub(super) fn record(&self, has_capacity: bool, now: Instant) -> bool {
        let mut since = self.0.lock().expect("no code panics while it holds the time");
        if has_capacity {
            *since = None;
            return false;
        }
        now.duration_since(*since.get_or_insert(now)) > SATURATED_FOR
    }
}

impl BacklogTracker {
    /// Records a read in this turn, and whether more entries may be waiting at the server.
    pub(super) fn record_fetch(&self, turn: u64, has_more: bool) {
        self.turn.store(turn, Ordering::Relaxed);
        self.has_more.store(has_more, Ordering::Relaxed);
    }

    /// Records the completion of a message that was received at this time.
    pub(super) fn record_completed(&self, received_at: Instant) {
        self.is_fast.store(received_at.elapsed() <= FAST_WITHIN, Ordering::Relaxed);
    }

    /// The turn in which the partition was read last.
    pub(super) fn last_turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }

    /// Whether bulk reads pay: there is a backlog and messages are handled fast.
    pub(super) fn allows_bulk(&self) -> bool {
        self.has_more.load(Ordering::Relaxed) && self.is_fast.load(Ordering::Relaxed)
    }

    /// Records free capacity. After [`SATURATED_FOR`] without any, the partition is no longer treated as fast.
    fn record_capacity(&self, has_capacity: bool, now: Instant) {
        if self.saturated.record(has_capacity, now) {
            self.is_fast.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bulk_reads_need_a_backlog_that_is_handled_fast() {
        let backlog = BacklogTracker::default();
        assert!(!backlog.allows_bulk());
        backlog.record_fetch(1, true);
        assert!(!backlog.allows_bulk(), "no message has completed yet");
        backlog.record_completed(Instant::now());
        assert!(backlog.allows_bulk());
        let received_at = Instant::now();
        tokio::time::advance(FAST_WITHIN * 2).await;
        backlog.record_completed(received_at);
        assert!(!backlog.allows_bulk(), "handling is slow");
        backlog.record_completed(Instant::now());
        backlog.record_fetch(2, false);
        assert!(!backlog.allows_bulk(), "there is no backlog");
    }

    #[tokio::test(start_paused = true)]
    async fn a_saturated_partition_is_no_longer_treated_as_fast() {
        let backlog = BacklogTracker::default();
        backlog.record_fetch(1, true);
        backlog.record_completed(Instant::now());
        backlog.record_capacity(false, Instant::now());
        tokio::time::advance(SATURATED_FOR * 2).await;
        backlog.record_capacity(true, Instant::now());
        backlog.record_capacity(false, Instant::now());
        assert!(backlog.allows_bulk(), "it had capacity meanwhile");
        tokio::time::advance(SATURATED_FOR * 2).await;
        backlog.record_capacity(false, Instant::now());
        assert!(!backlog.allows_bulk());
    }
}

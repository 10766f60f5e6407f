//! The capacity of a subscription: how many messages all its partitions may have in flight together, and each of them.
//! A read cannot be limited in bytes, so the limit in bytes is a limit in messages of the size of recent ones. When the
//! sizes grow suddenly, one read exceeds it, at most to [`OVERSHOOT_MAX`] times the limit or one message for each partition.
//!
//! Upstream: `subscription_context` creates it. Downstream: the `fetcher` takes capacity when it delivers, each
//! `partition_driver` returns it when messages are completed.
//! A *bulk* read asks few partitions for many entries. It pays where a backlog is waiting at the server and messages
//! are handled fast; elsewhere it would hold messages that other consumers could have.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use headwater_stream::DeliveredEntry;
use headwater_stream::limits::PAYLOAD_BYTES_MAX;

use crate::config::ConsumerConfig;

/// How many times the limit in bytes one read has if all its messages are as large as possible.
const OVERSHOOT_MAX: usize = 4;

/// The size of the largest recent message.
#[derive(Debug)]
pub(super) struct RecentSize(AtomicUsize);

impl Default for RecentSize {
    fn default() -> Self {
        // Unknown: the largest.
        Self(AtomicUsize::new(PAYLOAD_BYTES_MAX))
    }
}

impl RecentSize {
    /// Messages were received at once, the largest of them with so many bytes. Each read of smaller ones halves the size.
    pub(super) fn record(&self, bytes: usize) {
        let known = self.0.load(Ordering::Relaxed);
        let bytes = bytes.max(known / 2).max(1);
        // If two readers store at once, the next read corrects it.
        self.0.store(bytes, Ordering::Relaxed);
    }

    /// How many messages of this size fit into so many bytes.
    pub(super) fn fitting(&self, bytes: usize) -> usize {
        bytes / self.0.load(Ordering::Relaxed)
    }
}

/// How many messages one read may ask for if their bytes together should not exceed a limit: also if they are larger than
/// recent ones, they have at most [`OVERSHOOT_MAX`] times as many.
pub(super) const fn read_max(bytes_max: usize) -> usize {
    let most = bytes_max.saturating_mul(OVERSHOOT_MAX) / PAYLOAD_BYTES_MAX;
    if most > 0 { most } else { 1 }
}

#[derive(Debug)]
pub(super) struct CapacityPool {
    in_flight_max: usize,
    bytes_max: usize,
    concurrency: usize,
    batch: usize,
    partition_max: usize,
    /// Partitions that share the capacity.
    partitions: AtomicUsize,
    /// Partitions of the topic, which may all be assigned at any time.
    topic_partitions: AtomicUsize,
    message_size: RecentSize,
    /// Messages in flight, of all partitions.
    in_flight: AtomicUsize,
    /// Those of them that a barrier blocks. They take no capacity.
    blocked: AtomicUsize,
    /// Whether a fetcher skipped partitions because too little capacity was free.
    is_awaited: AtomicBool,
}

/// How many messages one partition may have in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartitionLimits {
    pub(super) regular: usize,
    /// While it is read in bulk; `None` if the regular limit is as good.
    pub(super) bulk: Option<usize>,
}

impl CapacityPool {
    pub(super) fn new(config: &ConsumerConfig) -> Self {
        Self {
            in_flight_max: config.in_flight_max,
            bytes_max: config.in_flight_bytes_max,
            message_size: RecentSize::default(),
            concurrency: config.concurrency,
            batch: config.batch,
            partition_max: config.partition_in_flight_max(),
            partitions: AtomicUsize::new(1),
            topic_partitions: AtomicUsize::new(1),
            in_flight: AtomicUsize::new(0),
            blocked: AtomicUsize::new(0),
            is_awaited: AtomicBool::new(false),
        }
    }

    /// How many messages may be in flight by number and by bytes. The limits of partitions follow the number alone: they
    /// are reported to partitions only when partitions are assigned or revoked.
    fn in_flight_max(&self) -> usize {
        self.in_flight_max.min(self.message_size.fitting(self.bytes_max).max(1))
    }

    /// How many messages one read may ask for, or one for each partition.
    pub(super) fn read_max(&self) -> usize {
        read_max(self.bytes_max)
    }

    /// Messages were received at once, the largest of them with so many bytes.
    pub(super) fn record_largest(&self, bytes: usize) {
        self.message_size.record(bytes);
    }

    /// Divides the capacity among so many partitions of a topic. Returns the limits of each.
    pub(super) fn divide(&self, partitions: usize, topic_partitions: usize) -> PartitionLimits {
        self.partitions.store(partitions.max(1), Ordering::Relaxed);
        self.topic_partitions.store(topic_partitions.max(1), Ordering::Relaxed);
        self.limits()
    }

    /// The limits of each partition: at least enough for its handlers, so that capacity reserved for idle partitions
    /// does not limit a busy one.
    pub(super) fn limits(&self) -> PartitionLimits {
        let each = self.each();
        let bulk = self.batch.min(self.in_flight_max / 4);
        PartitionLimits {
            regular: each.min(self.partition_max),
            bulk: (bulk >= 2 * each && bulk <= self.partition_max).then_some(bulk),
        }
    }

    fn each(&self) -> usize {
        let partitions = self.partitions.load(Ordering::Relaxed);
        (self.in_flight_max / partitions).max(self.concurrency).clamp(1, self.in_flight_max)
    }

    /// How many more messages may be in flight.
    pub(super) fn free(&self) -> usize {
        let blocked = self.blocked.load(Ordering::SeqCst);
        let used = self.in_flight().saturating_sub(blocked);
        self.in_flight_max().saturating_sub(used)
    }

    /// Capacity reserved for messages that a handler takes at once, one for each partition: messages that wait for
    /// stalled handlers cannot take all of it, not even in partitions that were assigned before the others.
    pub(super) fn reserve(&self) -> usize {
        let others = self.topic_partitions.load(Ordering::Relaxed) - 1;
        others.min(self.in_flight_max() / 4)
    }

    /// How many more messages bulk reads may fetch; 0 if too few to be worth one. Some capacity is kept for the handlers
    /// of all partitions.
    pub(super) fn free_for_bulk(&self) -> usize {
        let partitions = self.partitions.load(Ordering::Relaxed);
        let in_flight_max = self.in_flight_max();
        let reserve = partitions.saturating_mul(self.concurrency).min(in_flight_max / 2);
        let free = self.free().saturating_sub(reserve.max(self.reserve()));
        if free * 4 >= in_flight_max { free } else { 0 }
    }

    /// Concurrent handlers of each partition.
    pub(super) fn concurrency(&self) -> usize {
        self.concurrency
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    pub(super) fn add_in_flight(&self, messages: usize) {
        self.in_flight.fetch_add(messages, Ordering::SeqCst);
    }

    pub(super) fn remove_in_flight(&self, messages: usize) {
        self.in_flight.fetch_sub(messages, Ordering::SeqCst);
    }

    /// A partition had so many blocked messages, and has so many now.
    pub(super) fn change_blocked(&self, before: usize, now: usize) {
        if now > before {
            self.blocked.fetch_add(now - before, Ordering::SeqCst);
        } else if before > now {
            self.blocked.fetch_sub(before - now, Ordering::SeqCst);
        }
    }

    /// Sets whether a fetcher waits for free capacity. To be set before the capacity is read, so that capacity freed
    /// meanwhile wakes the fetcher.
    pub(super) fn set_awaited(&self, is_awaited: bool) {
        self.is_awaited.store(is_awaited, Ordering::SeqCst);
    }

    pub(super) fn is_awaited(&self) -> bool {
        self.is_awaited.load(Ordering::SeqCst)
    }
}

/// The size of the largest of these entries.
pub(super) fn largest_bytes(entries: &[DeliveredEntry]) -> usize {
    entries.iter().map(|entry| entry.fields.bytes()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_capacity_at_most_is_reserved() {
        let pool = CapacityPool::new(&ConsumerConfig::default());
        for _ in 0..100 {
            pool.record_largest(1000);
        }
        for (topic_partitions, reserve) in [(1, 0), (24, 23), (5000, 250)] {
            pool.divide(1, topic_partitions);
            assert_eq!((pool.free(), pool.reserve()), (1000, reserve));
        }
    }

    #[test]
    fn the_limit_in_bytes_follows_the_largest_recent_message() {
        let config = ConsumerConfig { in_flight_bytes_max: 8 * 1024 * 1024, ..Default::default() };
        let pool = CapacityPool::new(&config);
        assert_eq!(pool.free(), 8, "the size is unknown");
        for _ in 0..100 {
            pool.record_largest(1000);
        }
        assert_eq!(pool.free(), 1000, "the limit in messages");
        pool.add_in_flight(10);
        pool.record_largest(512 * 1024);
        assert_eq!(pool.free(), 6);
        pool.record_largest(usize::MAX / 2);
        assert_eq!(pool.free(), 0);
        pool.remove_in_flight(10);
        assert_eq!(pool.free(), 1, "one message at a time");
    }
}

//! The capacity of a subscription: how many messages all its partitions may have in flight together, and each of them.
//!
//! Upstream: `subscription_context` creates it. Downstream: the `fetcher` takes capacity when it delivers, each
//! `partition_driver` returns it when messages are completed.
//! A *bulk* read asks few partitions for many entries. It pays where a backlog is waiting at the server and messages
//! are handled fast; elsewhere it would hold messages that other consumers could have.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::config::ConsumerConfig;

#[derive(Debug)]
pub(super) struct CapacityPool {
    in_flight_max: usize,
    concurrency: usize,
    batch: usize,
    partition_max: usize,
    /// Partitions that share the capacity.
    partitions: AtomicUsize,
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
            concurrency: config.concurrency,
            batch: config.batch,
            partition_max: config.partition_in_flight_max(),
            partitions: AtomicUsize::new(1),
            in_flight: AtomicUsize::new(0),
            blocked: AtomicUsize::new(0),
            is_awaited: AtomicBool::new(false),
        }
    }

    /// Divides the capacity among so many partitions. Returns the limits of each.
    pub(super) fn divide(&self, partitions: usize) -> PartitionLimits {
        self.partitions.store(partitions.max(1), Ordering::Relaxed);
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
        self.in_flight_max.saturating_sub(used)
    }

    /// How many more messages bulk reads may fetch; 0 if too few to be worth one. Some capacity is kept for the handlers
    /// of all partitions.
    pub(super) fn free_for_bulk(&self) -> usize {
        let partitions = self.partitions.load(Ordering::Relaxed);
        let reserve = partitions.saturating_mul(self.concurrency).min(self.in_flight_max / 2);
        let free = self.free().saturating_sub(reserve);
        if free * 4 >= self.in_flight_max { free } else { 0 }
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

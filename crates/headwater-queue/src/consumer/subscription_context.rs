//! State shared by all partitions of a subscription: handler, settings, in-flight capacity and counters.
//!
//! Upstream: `subscription` creates it. Downstream: every `partition_consumer` of the subscription.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use headwater_stream::{Backend, Epoch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::capacity::SaturatedSince;
use super::repartition_barrier::Barriers;
use super::retry_or_dead_letter::{DeliveryResult, MessagePolicy};
use crate::config::ConsumerConfig;
use crate::handler::Handler;
use crate::topic::{GroupName, Partition, Topic, TopicName};
use crate::trace::TraceBridge;

pub(super) struct SubscriptionContext {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) topic: TopicName,
    pub(super) group: GroupName,
    pub(super) handler: Arc<dyn Handler>,
    pub(super) config: ConsumerConfig,
    pub(super) trace: Option<Arc<dyn TraceBridge>>,
    pub(super) barriers: Arc<Barriers>,
    /// Whether no handler may start.
    pub(super) paused: AtomicBool,
    /// Messages that each partition may have in flight.
    pub(super) in_flight_per_partition: AtomicUsize,
    /// Capacity kept free of bulk reads, for the handlers of all partitions.
    handler_reserve: AtomicUsize,
    /// Whether all partitions together could exceed `in_flight_max`.
    is_oversubscribed: AtomicBool,
    /// Messages in flight, of all partitions.
    pub(super) in_flight: AtomicUsize,
    /// Tasks that append again what Redis lost. They end with the subscription.
    recoveries: Mutex<JoinSet<()>>,
    /// Whether the last read skipped partitions for lack of capacity.
    skips_partitions: AtomicBool,
    /// Whether partitions wait for capacity for a bulk read.
    awaits_bulk: AtomicBool,
    saturated: SaturatedSince,
    counters: SubscriptionCounters,
}

#[derive(Default)]
struct SubscriptionCounters {
    done: AtomicU64,
    retried: AtomicU64,
    released: AtomicU64,
    dead_letters: AtomicU64,
}

/// Counts of a subscription in this process, since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriptionStats {
    /// Partitions that this process consumes.
    pub partitions: usize,
    /// Messages in flight: prefetched, being handled or waiting for a retry in place.
    pub in_flight: usize,
    /// Messages that were handled.
    pub done: u64,
    /// Failed attempts that were followed by a retry.
    pub retried: u64,
    /// Messages that were released unhandled.
    pub released: u64,
    /// Messages that became dead letters.
    pub dead_letters: u64,
}

impl SubscriptionContext {
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        topic: Arc<Topic>,
        group: GroupName,
        handler: Arc<dyn Handler>,
        config: ConsumerConfig,
        trace: Option<Arc<dyn TraceBridge>>,
    ) -> Self {
        let in_flight_per_partition = AtomicUsize::new(config.in_flight_max);
        Self {
            backend,
            barriers: Arc::new(Barriers::new(config.order, Arc::clone(&topic))),
            topic: topic.name.clone(),
            group,
            handler,
            config,
            trace,
            paused: AtomicBool::new(false),
            in_flight_per_partition,
            handler_reserve: AtomicUsize::new(0),
            is_oversubscribed: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            recoveries: Mutex::default(),
            skips_partitions: AtomicBool::new(false),
            awaits_bulk: AtomicBool::new(false),
            saturated: SaturatedSince::default(),
            counters: SubscriptionCounters::default(),
        }
    }

    /// Divides `in_flight_max` among so many partitions. Each gets at least enough for its handlers, so that capacity
    /// reserved for idle partitions does not limit a busy one.
    pub(super) fn divide_capacity(&self, partitions: usize) {
        let ConsumerConfig { in_flight_max, concurrency, .. } = self.config;
        let partitions = partitions.max(1);
        let each = (in_flight_max / partitions).max(concurrency).clamp(1, in_flight_max);
        self.in_flight_per_partition.store(each, Ordering::Relaxed);
        let reserve = partitions.saturating_mul(concurrency).min(in_flight_max / 2);
        self.handler_reserve.store(reserve, Ordering::Relaxed);
        let is_oversubscribed =
            each.saturating_mul(partitions) > in_flight_max || self.bulk_size().is_some();
        self.is_oversubscribed.store(is_oversubscribed, Ordering::Relaxed);
    }

    /// How many messages a partition that is read in bulk may have in flight; `None` if its regular limit is as good.
    pub(super) fn bulk_size(&self) -> Option<usize> {
        let ConsumerConfig { batch, in_flight_max, .. } = self.config;
        let bulk_size = batch.min(in_flight_max / 4);
        let regular = self.in_flight_per_partition.load(Ordering::Relaxed);
        (bulk_size >= 2 * regular).then_some(bulk_size)
    }

    /// Whether all partitions together could exceed `in_flight_max`.
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.is_oversubscribed.load(Ordering::Relaxed)
    }

    /// How many more messages may be in flight.
    pub(super) fn free_capacity(&self) -> usize {
        self.config.in_flight_max.saturating_sub(self.in_flight.load(Ordering::SeqCst))
    }

    /// How many more messages bulk reads may fetch; 0 if too few to be worth one.
    pub(super) fn bulk_capacity(&self) -> usize {
        let reserve = self.handler_reserve.load(Ordering::Relaxed);
        let capacity = self.free_capacity().saturating_sub(reserve);
        if capacity * 4 >= self.config.in_flight_max { capacity } else { 0 }
    }

    /// Registers that bulk reads wait for capacity: from here on, freed capacity wakes the fetcher. Returns the
    /// capacity, and whether the subscription has been saturated so long that it is to be read without bulk.
    pub(super) fn request_bulk_capacity(&self, now: Instant) -> (usize, bool) {
        self.awaits_bulk.store(true, Ordering::SeqCst);
        let capacity = self.bulk_capacity();
        (capacity, self.saturated.record(capacity > 0, now))
    }

    /// Sets whether partitions wait for capacity for a bulk read.
    pub(super) fn set_awaits_bulk(&self, awaits: bool) {
        self.awaits_bulk.store(awaits, Ordering::SeqCst);
    }

    /// Sets whether the last read skipped partitions for lack of capacity.
    pub(super) fn set_skips_partitions(&self, skips: bool) {
        self.skips_partitions.store(skips, Ordering::SeqCst);
    }

    /// Whether other partitions wait for capacity that is free now. A little capacity counts only after a slow handler:
    /// fast handlers free more in a moment.
    pub(super) fn is_capacity_awaited(&self, is_slow: bool) -> bool {
        let skips = self.skips_partitions.load(Ordering::SeqCst);
        (skips && is_slow)
            || ((skips || self.awaits_bulk.load(Ordering::SeqCst)) && self.bulk_capacity() > 0)
    }

    /// Whether the last read skipped partitions for lack of capacity.
    pub(super) fn skips_partitions(&self) -> bool {
        self.skips_partitions.load(Ordering::SeqCst)
    }

    /// The message policy of one partition.
    pub(super) fn policy(
        &self,
        topic: Arc<Topic>,
        partition: Partition,
        epoch: Option<Epoch>,
    ) -> MessagePolicy {
        MessagePolicy::new(topic, partition, self.group.clone(), &self.config, epoch)
    }

    /// Starts a task that appends again what Redis lost.
    pub(super) fn spawn_recovery(&self, recovery: impl Future<Output = ()> + Send + 'static) {
        let mut recoveries =
            self.recoveries.lock().expect("no code panics while it holds the recoveries");
        while recoveries.try_join_next().is_some() {}
        recoveries.spawn(recovery);
    }

    /// Waits until all recoveries have finished.
    pub(super) async fn wait_for_recoveries(&self) {
        let mut recoveries = std::mem::take(
            &mut *self.recoveries.lock().expect("no code panics while it holds the recoveries"),
        );
        while recoveries.join_next().await.is_some() {}
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    pub(super) fn count(&self, result: DeliveryResult) {
        let counter = match result {
            DeliveryResult::Done => &self.counters.done,
            DeliveryResult::Retry => &self.counters.retried,
            DeliveryResult::Release => &self.counters.released,
            DeliveryResult::DeadLetter(_) => &self.counters.dead_letters,
            DeliveryResult::Skipped => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stats(&self, partitions: usize) -> SubscriptionStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        SubscriptionStats {
            partitions,
            in_flight: self.in_flight.load(Ordering::Relaxed),
            done: read(&self.counters.done),
            retried: read(&self.counters.retried),
            released: read(&self.counters.released),
            dead_letters: read(&self.counters.dead_letters),
        }
    }
}

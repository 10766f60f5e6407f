//! State shared by all partitions of a subscription: handler, settings, capacity and counters.
//!
//! Upstream: `subscription` creates it. Downstream: every `partition_driver` of the subscription.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use headwater_stream::{Backend, Epoch, GroupStart};
use tokio::task::JoinSet;

use super::capacity_pool::CapacityPool;
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
    /// Partitions that could not be reached when the subscription started: their group begins where it should have then.
    pub(super) unreached: Vec<Partition>,
    /// Whether the topic was created when the subscription started. If it is deleted, it counts as a plain topic.
    pub(super) is_created_topic: bool,
    pub(super) barriers: Arc<Barriers>,
    /// Retries of a message that sets no limit, by the topic as it was read last.
    pub(super) max_retries: Arc<AtomicU32>,
    /// Whether no handler may start.
    pub(super) paused: AtomicBool,
    pub(super) pool: Arc<CapacityPool>,
    /// Tasks that append again what Redis lost. They end with the subscription.
    recoveries: Mutex<JoinSet<()>>,
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
        unreached: Vec<Partition>,
    ) -> Self {
        Self {
            backend,
            barriers: Arc::new(Barriers::new(config.order, Arc::clone(&topic))),
            max_retries: Arc::new(topic.policies.max_retries.into()),
            is_created_topic: !topic.layout.is_plain(),
            topic: topic.name.clone(),
            group,
            handler,
            pool: Arc::new(CapacityPool::new(&config)),
            config,
            trace,
            unreached,
            paused: AtomicBool::new(false),
            recoveries: Mutex::default(),
            counters: SubscriptionCounters::default(),
        }
    }

    /// Where the group begins on a partition on which it does not exist. A partition that is new to it was added later: the
    /// group has handled nothing of it.
    pub(super) fn group_start(&self, partition: Partition) -> GroupStart {
        match self.unreached.contains(&partition) {
            true => self.config.start,
            false => GroupStart::Beginning,
        }
    }

    /// The message policy of one partition.
    pub(super) fn policy(
        &self,
        topic: Arc<Topic>,
        partition: Partition,
        epoch: Option<Epoch>,
    ) -> MessagePolicy {
        let (group, max_retries) = (self.group.clone(), Arc::clone(&self.max_retries));
        MessagePolicy::new(topic, partition, group, &self.config, max_retries, epoch)
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
            in_flight: self.pool.in_flight(),
            done: read(&self.counters.done),
            retried: read(&self.counters.retried),
            released: read(&self.counters.released),
            dead_letters: read(&self.counters.dead_letters),
        }
    }
}

//! What is the same for all partitions of a subscription: its handler, its settings, its counts.
//!
//! Upstream: `subscription` makes it. Downstream: every `worker` of the subscription.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use headwater_stream::{Backend, Epoch};
use tokio::task::JoinSet;

use super::gate::Gates;
use super::verdict::{Ended, Rules};
use crate::config::ConsumerConfig;
use crate::retry::Handler;
use crate::topic::{GroupName, Partition, Topic, TopicName};
use crate::trace::TraceBridge;

pub(super) struct Job {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) topic: TopicName,
    pub(super) group: GroupName,
    pub(super) handler: Arc<dyn Handler>,
    pub(super) config: ConsumerConfig,
    pub(super) trace: Option<Arc<dyn TraceBridge>>,
    pub(super) gates: Arc<Gates>,
    /// Whether handlers are to be left alone for now.
    pub(super) paused: AtomicBool,
    /// Messages that each partition may have in hand.
    pub(super) share: AtomicUsize,
    /// Whether all partitions together could have more in hand than is allowed.
    pub(super) is_bound: AtomicBool,
    /// Messages in hand, of all partitions.
    pub(super) in_hand: AtomicUsize,
    /// Those who write again what the server lost. They end with the subscription.
    rescues: Mutex<JoinSet<()>>,
    tally: Tally,
}

#[derive(Default)]
struct Tally {
    done: AtomicU64,
    retried: AtomicU64,
    released: AtomicU64,
    dead_letters: AtomicU64,
}

/// What a subscription of this process has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriptionStats {
    /// Partitions this process works on.
    pub partitions: usize,
    /// Messages in hand: read ahead, being handled or waiting for their next try.
    pub in_flight: usize,
    /// Messages that were handled.
    pub done: u64,
    /// Failures that were followed by another try.
    pub retried: u64,
    /// Messages that were given back unhandled.
    pub released: u64,
    /// Messages that became dead letters.
    pub dead_letters: u64,
}

impl Job {
    pub(super) fn new(
        backend: Arc<dyn Backend>,
        topic: Arc<Topic>,
        group: GroupName,
        handler: Arc<dyn Handler>,
        config: ConsumerConfig,
        trace: Option<Arc<dyn TraceBridge>>,
    ) -> Self {
        let share = AtomicUsize::new(config.in_flight_max);
        Self {
            backend,
            gates: Arc::new(Gates::new(config.order, Arc::clone(&topic))),
            topic: topic.name.clone(),
            group,
            handler,
            config,
            trace,
            paused: AtomicBool::new(false),
            share,
            is_bound: AtomicBool::new(false),
            in_hand: AtomicUsize::new(0),
            rescues: Mutex::default(),
            tally: Tally::default(),
        }
    }

    /// Splits what may be in hand between so many partitions. Each gets enough for its handlers, so that a busy one is
    /// not held up by room that idle ones keep.
    pub(super) fn split(&self, partitions: usize) {
        let ConsumerConfig { in_flight_max, concurrency, .. } = self.config;
        let partitions = partitions.max(1);
        let share = (in_flight_max / partitions).max(concurrency).clamp(1, in_flight_max);
        self.share.store(share, Ordering::Relaxed);
        self.is_bound.store(share.saturating_mul(partitions) > in_flight_max, Ordering::Relaxed);
    }

    /// The rules of one of its partitions.
    pub(super) fn rules(
        &self,
        topic: Arc<Topic>,
        partition: Partition,
        epoch: Option<Epoch>,
    ) -> Rules {
        Rules::new(topic, partition, self.group.clone(), &self.config, epoch)
    }

    /// Starts a rescue.
    pub(super) fn rescue(&self, rescue: impl Future<Output = ()> + Send + 'static) {
        let mut rescues = self.rescues.lock().expect("no code panics while it holds the rescues");
        while rescues.try_join_next().is_some() {}
        rescues.spawn(rescue);
    }

    /// Waits until what the server lost is written again.
    pub(super) async fn rescued(&self) {
        let mut rescues = std::mem::take(
            &mut *self.rescues.lock().expect("no code panics while it holds the rescues"),
        );
        while rescues.join_next().await.is_some() {}
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    pub(super) fn count(&self, result: Ended) {
        let tally = match result {
            Ended::Done => &self.tally.done,
            Ended::Retry => &self.tally.retried,
            Ended::Release => &self.tally.released,
            Ended::DeadLetter(_) => &self.tally.dead_letters,
            Ended::Skipped => return,
        };
        tally.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stats(&self, partitions: usize) -> SubscriptionStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        SubscriptionStats {
            partitions,
            in_flight: self.in_hand.load(Ordering::Relaxed),
            done: read(&self.tally.done),
            retried: read(&self.tally.retried),
            released: read(&self.tally.released),
            dead_letters: read(&self.tally.dead_letters),
        }
    }
}

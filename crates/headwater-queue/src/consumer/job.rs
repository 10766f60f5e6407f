//! What is the same for all partitions of a subscription: its handler, its settings, its counts.
//!
//! Upstream: `subscription` makes it. Downstream: every `worker` of the subscription.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use headwater_stream::{Backend, Epoch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::gate::Gates;
use super::pace::Full;
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
    /// What is kept free for the handlers of all partitions when some are read deep.
    reserve: AtomicUsize,
    /// Whether all partitions together could have more in hand than is allowed.
    is_bound: AtomicBool,
    /// Messages in hand, of all partitions.
    pub(super) in_hand: AtomicUsize,
    /// Those who write again what the server lost. They end with the subscription.
    rescues: Mutex<JoinSet<()>>,
    /// Whether partitions were left out because so much is in hand already.
    is_short: AtomicBool,
    /// Whether partitions wait for room for a deep read, and since when there is none.
    awaits_depth: AtomicBool,
    full: Full,
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
            reserve: AtomicUsize::new(0),
            is_bound: AtomicBool::new(false),
            in_hand: AtomicUsize::new(0),
            rescues: Mutex::default(),
            is_short: AtomicBool::new(false),
            awaits_depth: AtomicBool::new(false),
            full: Full::default(),
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
        let reserve = partitions.saturating_mul(concurrency).min(in_flight_max / 2);
        self.reserve.store(reserve, Ordering::Relaxed);
        let is_bound = share.saturating_mul(partitions) > in_flight_max || self.depth().is_some();
        self.is_bound.store(is_bound, Ordering::Relaxed);
    }

    /// What a partition may have in hand that is read deep; `None` where its share is as good.
    pub(super) fn depth(&self) -> Option<usize> {
        let ConsumerConfig { batch, in_flight_max, .. } = self.config;
        let depth = batch.min(in_flight_max / 4);
        (depth >= 2 * self.share.load(Ordering::Relaxed)).then_some(depth)
    }

    /// Whether all partitions together could have more in hand than is allowed.
    pub(super) fn is_bound(&self) -> bool {
        self.is_bound.load(Ordering::Relaxed)
    }

    /// How many more may be in hand.
    pub(super) fn free_room(&self) -> usize {
        self.config.in_flight_max.saturating_sub(self.in_hand.load(Ordering::SeqCst))
    }

    /// How many more may be in hand by deep reads; none where it would be too few to be worth one.
    pub(super) fn deep_room(&self) -> usize {
        let room = self.free_room().saturating_sub(self.reserve.load(Ordering::Relaxed));
        if room * 4 >= self.config.in_flight_max { room } else { 0 }
    }

    /// Looks for room for deep reads. From here on, those who make room tell the feed. Returns how much there is, and
    /// whether there has been none for so long that its partitions are to be read as if they had no backlog.
    pub(super) fn seek_depth(&self, now: Instant) -> (usize, bool) {
        self.awaits_depth.store(true, Ordering::SeqCst);
        let room = self.deep_room();
        (room, self.full.lasts(room > 0, now))
    }

    /// Whether partitions wait for room for a deep read.
    pub(super) fn note_awaits_depth(&self, awaits: bool) {
        self.awaits_depth.store(awaits, Ordering::SeqCst);
    }

    /// Whether partitions were left out because so much is in hand already.
    pub(super) fn note_short(&self, is_short: bool) {
        self.is_short.store(is_short, Ordering::SeqCst);
    }

    /// Whether somebody waits for room that is there now. A little is told of only after handlers that took long:
    /// where they are quick, there is more in a moment.
    pub(super) fn is_room_awaited(&self, is_slow: bool) -> bool {
        let is_short = self.is_short.load(Ordering::SeqCst);
        (is_short && is_slow)
            || ((is_short || self.awaits_depth.load(Ordering::SeqCst)) && self.deep_room() > 0)
    }

    /// Whether partitions were left out.
    pub(super) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::SeqCst)
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

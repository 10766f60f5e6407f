//! The topic cache of a producer: metadata of topics and a handle for each of their partitions.
//!
//! Upstream: `producer`. Downstream: the metadata cache of the queue, which shares one read among concurrent callers.
//! Guarantees: cached metadata is at most `refresh` old, unless it cannot be read and the message permits an older copy.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use metrics::counter;
use tokio::time::Instant;

use super::budget::ByteBudget;
use super::partition_handle::PartitionHandle;
use crate::error::Result;
use crate::limits::PRODUCER_TOPICS_MAX;
use crate::metrics::PRODUCED;
use crate::queue::{Queue, TopicCopy, UseExpired};
use crate::topic::{Partition, Resize, Topic, TopicName};

/// A topic as it was at one moment.
pub(super) struct CachedTopic {
    pub(super) topic: Arc<Topic>,
    /// Its partitions were those of the topic at this time.
    read_at: Instant,
    /// The queue's invalidation count before the read.
    invalidations: u64,
    partitions: Arc<PartitionHandles>,
    /// The byte budget, if the topic has one.
    pub(super) budget: Option<Arc<ByteBudget>>,
    /// Whether a slow send has checked if this is still the state of the topic.
    was_checked: AtomicBool,
}

/// Created on first use, kept while the topic does not change.
type PartitionHandles = Vec<OnceLock<PartitionHandle>>;

impl CachedTopic {
    /// The handle of an existing partition.
    pub(super) fn partition(&self, partition: Partition) -> &PartitionHandle {
        let make = || PartitionHandle::new(&self.topic, partition);
        self.partitions[usize::from(partition)].get_or_init(make)
    }

    /// Counts messages that were not sent because they, or another one of their batch, exceed a limit.
    pub(super) fn count_rejected(&self, messages: usize) {
        let topic = self.topic.name.to_string();
        counter!(PRODUCED, "topic" => topic, "partition" => "", "result" => "refused")
            .increment(messages as u64);
    }

    /// Whether the metadata is so old that a resize may have completed without this producer; true only once.
    pub(super) fn needs_check(&self) -> bool {
        self.read_at.elapsed() >= Resize::propagation_time(self.topic.policies.refresh)
            && !self.was_checked.swap(true, Ordering::Relaxed)
    }
}

pub(super) struct TopicCache {
    queue: Queue,
    slots: RwLock<HashMap<TopicName, Arc<TopicCacheSlot>>>,
}

/// The latest metadata of one topic.
type TopicCacheSlot = Mutex<Option<Arc<CachedTopic>>>;

const NOT_POISONED: &str = "no code panics while it holds the topic cache";

impl TopicCache {
    pub(super) fn new(queue: Queue) -> Self {
        Self { queue, slots: RwLock::default() }
    }

    /// The cached topic, unless it is too old.
    pub(super) fn fresh(&self, topic: &str, now: Instant) -> Option<Arc<CachedTopic>> {
        let slots = self.slots.read().expect(NOT_POISONED);
        let cached = slots.get(topic)?.lock().expect(NOT_POISONED).clone()?;
        self.is_fresh(&cached, now).then_some(cached)
    }

    fn is_fresh(&self, cached: &CachedTopic, now: Instant) -> bool {
        cached.invalidations == self.queue.invalidations()
            && now.duration_since(cached.read_at) < cached.topic.policies.refresh
    }

    /// Reads the topic again. Returns the expired copy if it cannot be read in time and `use_expired` permits that.
    /// Cancel-safe.
    pub(super) async fn refresh(
        &self,
        topic: &str,
        use_expired: UseExpired,
    ) -> Result<Arc<CachedTopic>> {
        let name = TopicName::new(topic)?;
        let slot = self.slot(&name);
        // Before the read, so that an invalidation during the read is not missed.
        let invalidations = self.queue.invalidations();
        let TopicCopy { topic, read_at } = self.queue.topic_copy(&name, use_expired).await?;
        let mut latest = slot.lock().expect(NOT_POISONED);
        let (partitions, budget) = match &*latest {
            // Stored by a concurrent call, or expired and still the latest.
            Some(cached) if (cached.read_at, cached.invalidations) >= (read_at, invalidations) => {
                return Ok(Arc::clone(cached));
            }
            Some(cached) if cached.topic == topic => {
                (Arc::clone(&cached.partitions), cached.budget.clone())
            }
            _ => {
                let partitions = (0..topic.partitions).map(|_| OnceLock::new()).collect();
                let budget = topic.policies.byte_budget.map(ByteBudget::new).map(Arc::new);
                (Arc::new(partitions), budget)
            }
        };
        let was_checked = AtomicBool::new(false);
        let cached = CachedTopic { topic, read_at, invalidations, partitions, budget, was_checked };
        let cached = Arc::new(cached);
        *latest = Some(Arc::clone(&cached));
        Ok(cached)
    }

    fn slot(&self, name: &TopicName) -> Arc<TopicCacheSlot> {
        let mut slots = self.slots.write().expect(NOT_POISONED);
        if slots.len() >= PRODUCER_TOPICS_MAX && !slots.contains_key(name) {
            // Evicts topics that are not fresh; if all are, evicts all of them.
            let now = Instant::now();
            slots.retain(|_, slot| {
                let latest = slot.lock().expect(NOT_POISONED);
                latest.as_ref().is_some_and(|cached| self.is_fresh(cached, now))
            });
            if slots.len() >= PRODUCER_TOPICS_MAX {
                slots.clear();
            }
        }
        slots.entry(name.clone()).or_default().clone()
    }
}

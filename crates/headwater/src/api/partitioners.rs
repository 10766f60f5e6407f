//! The partitioner that a sender chooses by name, with a producer for each.
//!
//! Upstream: `messages.rs`. Downstream: producers of `headwater-queue`, which have no tasks and connections of their own.

use std::sync::Arc;

use headwater_queue::{
    ConsistentHash, HashPartitioner, Partitioner, Producer, ProducerConfig, Queue, QueueError,
    RandomPartitioner, RoundRobin,
};
use serde::Deserialize;
use utoipa::ToSchema;

/// How the partition of a message without `partition` is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PartitionerName {
    /// By the hash of the key; without a key, round robin.
    #[default]
    Hash,
    /// Round robin, ignoring the key: no order per key.
    RoundRobin,
    /// At random, ignoring the key: no order per key.
    Random,
    /// By consistent hashing of the key; without a key, round robin. When the topic grows, few keys move.
    Consistent,
}

/// A producer for each partitioner.
#[derive(Clone, Debug)]
pub(super) struct Producers {
    hash: Producer,
    round_robin: Producer,
    random: Producer,
    consistent: Producer,
}

impl Producers {
    pub(super) fn new(queue: &Queue) -> Result<Self, QueueError> {
        let with = |partitioner: Arc<dyn Partitioner>| {
            queue.producer(ProducerConfig { partitioner, ..ProducerConfig::default() })
        };
        Ok(Self {
            hash: with(Arc::new(HashPartitioner::default()))?,
            round_robin: with(Arc::new(RoundRobin::default()))?,
            random: with(Arc::new(RandomPartitioner))?,
            consistent: with(Arc::new(ConsistentHash::default()))?,
        })
    }

    pub(super) fn get(&self, name: PartitionerName) -> &Producer {
        match name {
            PartitionerName::Hash => &self.hash,
            PartitionerName::RoundRobin => &self.round_robin,
            PartitionerName::Random => &self.random,
            PartitionerName::Consistent => &self.consistent,
        }
    }
}

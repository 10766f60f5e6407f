//! Topic statistics.

use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;

use super::Inspector;
use crate::error::Result;
use crate::keys::{self, Layout};
use crate::topic::{Partition, Policies};

/// Statistics of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicView {
    /// Its name.
    pub name: String,
    /// The key layout; plain if the topic was not created.
    pub layout: Layout,
    /// When it was created; `None` for a plain topic.
    pub created_at: Option<Timestamp>,
    /// When its newest message was stored; `None` if it is empty.
    pub updated_at: Option<Timestamp>,
    /// Number of messages.
    pub length: u64,
    /// The oldest message of all partitions.
    pub first_id: Option<EntryId>,
    /// The newest message of all partitions.
    pub last_id: Option<EntryId>,
    /// Approximate size in bytes without dead letters; `None` if the backend does not report it.
    pub bytes: Option<u64>,
    /// Delayed messages: retries and delayed sends.
    pub delayed: u64,
    /// When the first delayed message is due.
    pub next_due: Option<Timestamp>,
    /// Number of dead letters.
    pub dead_letters: u64,
    /// Whether a resize is in progress that not every producer knows of yet.
    pub is_growing: bool,
    /// When its deletion started; delete it again to finish an interrupted deletion.
    pub deleting_since: Option<Timestamp>,
    /// Retention and limits.
    pub policies: Policies,
    /// The names of its groups, sorted.
    pub groups: Vec<String>,
    /// Its partitions, by number.
    pub partitions: Vec<PartitionView>,
}

/// Statistics of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionView {
    /// Its number.
    pub partition: Partition,
    /// Number of messages.
    pub length: u64,
    /// The oldest message.
    pub first_id: Option<EntryId>,
    /// The newest message.
    pub last_id: Option<EntryId>,
    /// Approximate size in bytes; `None` if the backend does not report it.
    pub bytes: Option<u64>,
}

impl Inspector {
    /// Statistics of a topic.
    pub async fn topic(&self, name: &str) -> Result<TopicView> {
        let topic = self.queue.existing_topic(name).await?;
        let backend = &self.queue.inner.backend;
        let stats = self.queue.partition_stats(&topic).await?;
        let (mut delayed, mut next_due) = (0, None);
        for delays in keys::all_delays(&topic) {
            let found = backend.delay_stats(&delays).await?;
            delayed += found.waiting;
            next_due = earliest(next_due, found.next_due);
        }
        let dead_letters = backend.stats(&keys::dead_letters(&topic)).await?;
        let mut groups: Vec<String> = stats
            .iter()
            .flatten()
            .flat_map(|stats| stats.groups.iter().map(|group| group.name.to_string()))
            .collect();
        groups.sort();
        groups.dedup();
        let partitions: Vec<PartitionView> = (0..)
            .zip(stats)
            .map(|(partition, stats)| PartitionView {
                partition,
                length: stats.as_ref().map_or(0, |stats| stats.length),
                first_id: stats.as_ref().and_then(|stats| stats.first_id),
                last_id: stats.as_ref().and_then(|stats| stats.last_id),
                // A partition without a stream has no size.
                bytes: stats.map_or(Some(0), |stats| stats.bytes),
            })
            .collect();
        let last_id = partitions.iter().filter_map(|partition| partition.last_id).max();
        Ok(TopicView {
            name: topic.name.to_string(),
            layout: topic.layout,
            created_at: topic.created_at,
            updated_at: last_id.map(|id| Timestamp::from_millis(id.ms)),
            length: partitions.iter().map(|partition| partition.length).sum(),
            first_id: partitions.iter().filter_map(|partition| partition.first_id).min(),
            last_id,
            bytes: partitions.iter().map(|partition| partition.bytes).sum(),
            delayed,
            next_due,
            dead_letters: dead_letters.map_or(0, |stats| stats.length),
            deleting_since: topic.deleting_since,
            is_growing: topic.resizes.last().is_some_and(|resize| resize.last_ids.is_none()),
            policies: topic.policies.clone(),
            groups,
            partitions,
        })
    }
}

fn earliest(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

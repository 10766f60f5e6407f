//! A topic and its partitions in numbers.

use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;

use super::Inspector;
use crate::error::Result;
use crate::keys::{self, Layout};
use crate::topic::{Partition, Policies};

/// A topic in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicView {
    /// Its name.
    pub name: String,
    /// How its keys are spelled; a plain layout if nobody created it.
    pub layout: Layout,
    /// When it was created; `None` for a plain topic.
    pub created_at: Option<Timestamp>,
    /// When its newest message was sent; `None` if it holds none.
    pub updated_at: Option<Timestamp>,
    /// Messages it holds.
    pub length: u64,
    /// The oldest message of all partitions.
    pub first_id: Option<EntryId>,
    /// The newest message of all partitions.
    pub last_id: Option<EntryId>,
    /// About how many bytes of memory it takes, without dead letters; `None` where the backend does not tell.
    pub bytes: Option<u64>,
    /// Messages that wait for their time: retries and delayed sends.
    pub delayed: u64,
    /// When the first of them is due.
    pub next_due: Option<Timestamp>,
    /// Its dead letters.
    pub dead_letters: u64,
    /// Whether a growth is under way that not every producer knows of yet.
    pub is_growing: bool,
    /// Since when it is being deleted; delete it again to finish a deletion that was interrupted.
    pub deleting_since: Option<Timestamp>,
    /// What it keeps and how it is used.
    pub policies: Policies,
    /// The names of its groups, sorted.
    pub groups: Vec<String>,
    /// Its partitions, by number.
    pub partitions: Vec<PartitionView>,
}

/// A partition in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionView {
    /// Its number.
    pub partition: Partition,
    /// Messages it holds.
    pub length: u64,
    /// The oldest one.
    pub first_id: Option<EntryId>,
    /// The newest one.
    pub last_id: Option<EntryId>,
    /// About how many bytes of memory it takes; `None` where the backend does not tell.
    pub bytes: Option<u64>,
}

impl Inspector {
    /// A topic in numbers.
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
                // A partition that nothing was sent to takes no memory.
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

//! Trimming a topic on request: by count, age or size.
//!
//! Upstream: administrators. Downstream: the streams of a topic.
//! Guarantees: messages that a group has not read or not settled are kept, unless [`TrimGuard::Force`] is set. Not here:
//! retention on send (see `Policies::retention`) and dead letters (see `DeadLetters::purge`).

use headwater_stream::{Retention, TrimGuard};

use crate::error::{QueueError, Result};
use crate::inspect::select_partitions;
use crate::keys;
use crate::queue::Queue;
use crate::topic::Partition;

/// What to trim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trim {
    /// What to keep of each partition. Required: the default, keep everything, is rejected.
    pub keep: Retention,
    /// Whether unread and pending messages are kept. Default: [`TrimGuard::Safe`].
    pub guard: TrimGuard,
    /// Only this partition.
    pub partition: Option<Partition>,
}

impl Default for Trim {
    fn default() -> Self {
        Self { keep: Retention::KEEP_ALL, guard: TrimGuard::Safe, partition: None }
    }
}

/// The result of a trim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrimReport {
    /// Messages removed.
    pub removed: u64,
    /// Whether messages were kept only because a group still needs them.
    pub held_back: bool,
    /// Partition by partition, by number.
    pub partitions: Vec<TrimmedPartition>,
}

/// The result of a trim on one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimmedPartition {
    /// The partition.
    pub partition: Partition,
    /// Messages removed.
    pub removed: u64,
    /// Whether messages were kept only because a group still needs them.
    pub held_back: bool,
}

impl Queue {
    /// Removes the oldest messages of a topic that exceed `keep`, exactly. After an error some partitions may already
    /// be trimmed; repeat the call.
    pub async fn trim(&self, topic: &str, trim: &Trim) -> Result<TrimReport> {
        trim.check()?;
        let topic = self.existing_topic(topic).await?;
        let mut partitions = Vec::new();
        for partition in select_partitions(&topic, trim.partition)? {
            let stream = keys::stream(&topic, partition);
            let trimmed = self.inner.backend.trim(&stream, &trim.keep, trim.guard).await?;
            let (removed, held_back) = (trimmed.removed, trimmed.held_back);
            partitions.push(TrimmedPartition { partition, removed, held_back });
        }
        Ok(TrimReport {
            removed: partitions.iter().map(|partition| partition.removed).sum(),
            held_back: partitions.iter().any(|partition| partition.held_back),
            partitions,
        })
    }
}

impl Trim {
    /// Fails if it keeps everything, or has a limit of nothing.
    pub fn check(&self) -> Result<()> {
        let problem = if self.keep == Retention::KEEP_ALL {
            "it keeps everything; set a count, an age or a size"
        } else if self.keep.max_age.is_some_and(|age| age.as_millis() == 0) {
            "the age is below 1 ms; omit it for no age limit"
        } else if self.keep.max_bytes == Some(0) {
            "the size is 0 bytes; omit it for no size limit"
        } else {
            return Ok(());
        };
        Err(QueueError::invalid("what a trim keeps", problem))
    }
}

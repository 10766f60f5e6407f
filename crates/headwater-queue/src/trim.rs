//! Trimming a topic by request: by count and by age.
//!
//! Upstream: administrators. Downstream: the streams of a topic.
//! Promises: what a group has not read or not settled stays, unless [`TrimGuard::Force`] is named. Not here: trimming
//! along with sends (see `Policies::retention`) and dead letters (see `DeadLetters::purge`).

use headwater_stream::{Retention, TrimGuard};

use crate::error::{QueueError, Result};
use crate::inspect::select_partitions;
use crate::keys;
use crate::queue::Queue;
use crate::topic::Partition;

/// What to trim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trim {
    /// What stays of each partition; everything else may go. Default: everything, which is refused as no wish at all.
    pub keep: Retention,
    /// What may not go. Default: [`TrimGuard::Safe`].
    pub guard: TrimGuard,
    /// Only this partition.
    pub partition: Option<Partition>,
}

impl Default for Trim {
    fn default() -> Self {
        Self { keep: Retention::KEEP_ALL, guard: TrimGuard::Safe, partition: None }
    }
}

/// What a trim did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrimReport {
    /// Messages that went.
    pub removed: u64,
    /// Whether messages stayed only because some group still needs them.
    pub held_back: bool,
    /// Partition by partition, by number.
    pub partitions: Vec<TrimmedPartition>,
}

/// What a trim did to one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimmedPartition {
    /// The partition.
    pub partition: Partition,
    /// Messages that went.
    pub removed: u64,
    /// Whether messages stayed only because some group still needs them.
    pub held_back: bool,
}

impl Queue {
    /// Removes the oldest messages of a topic that are not to be kept, exactly. After an error, some partitions may be
    /// trimmed: repeat it.
    pub async fn trim(&self, topic: &str, trim: &Trim) -> Result<TrimReport> {
        check(&trim.keep)?;
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

fn check(keep: &Retention) -> Result<()> {
    let problem = if *keep == Retention::KEEP_ALL {
        "everything is to be kept; give a count, an age or bytes"
    } else if keep.max_age.is_some_and(|age| age.as_millis() == 0) {
        "its age is below 1 ms; leave it out to keep every age"
    } else if keep.max_bytes == Some(0) {
        "its bytes are 0; leave them out to keep every size"
    } else {
        return Ok(());
    };
    Err(QueueError::invalid("what a trim keeps", problem))
}

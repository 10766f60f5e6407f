//! The streams that a driver of pulls reads, and its group on them.
//!
//! Upstream: `pull_driver` asks which streams the next read includes, and reports what was delivered.
//! Guarantees: a stream that was deleted does not come back through a pull; a group that was removed by hand continues
//! after what was delivered to it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use headwater_stream::{
    Backend, EntryId, GroupCondition, GroupName, GroupStart, StreamError, StreamName,
};
use tracing::warn;

use super::pull::metrics;
use super::pull_driver::READ_MAX;
use crate::error::Result;
use crate::keys;
use crate::topic::{Partition, Topic};

pub(super) struct PullStreams {
    backend: Arc<dyn Backend>,
    group: GroupName,
    /// Where the next read begins, if one read cannot include all streams.
    next: usize,
    /// Partitions whose stream was deleted. They are not read until a producer creates it again.
    missing: BTreeSet<Partition>,
    /// The newest entry of each partition that was delivered to the group, as far as this process knows.
    read_through: HashMap<Partition, EntryId>,
}

impl PullStreams {
    pub(super) fn new(backend: &Arc<dyn Backend>, group: &GroupName) -> Self {
        let (missing, read_through) = Default::default();
        let (backend, group) = (Arc::clone(backend), group.clone());
        Self { backend, group, next: 0, missing, read_through }
    }

    /// The streams of the next read: all that exist, or some of them in turns.
    pub(super) fn next(&mut self, topic: &Topic) -> Vec<StreamName> {
        let existing = (0..topic.partitions).filter(|partition| !self.missing.contains(partition));
        let mut streams: Vec<_> = existing.map(|p| keys::stream(topic, p)).collect();
        if streams.len() > READ_MAX {
            self.next %= streams.len();
            streams.rotate_left(self.next);
            streams.truncate(READ_MAX);
            self.next += READ_MAX;
        }
        streams
    }

    /// Entries up to this one were delivered to the group.
    pub(super) fn record_read(&mut self, partition: Partition, through: EntryId) {
        let known = self.read_through.entry(partition).or_insert(through);
        *known = through.max(*known);
    }

    /// Looks whether streams that were deleted exist again.
    pub(super) async fn check_missing(&mut self, topic: &Topic) -> Result<()> {
        self.missing.retain(|partition| *partition < topic.partitions);
        for partition in self.missing.clone() {
            self.restore_group(topic, partition).await?;
        }
        Ok(())
    }

    /// Creates the group where it is missing: on a new partition from the beginning; if it was removed, after what was
    /// delivered. A stream that was deleted is not created.
    pub(super) async fn restore_group(
        &mut self,
        topic: &Topic,
        partition: Partition,
    ) -> Result<()> {
        let Self { backend, group, .. } = self;
        let stream = keys::stream(topic, partition);
        let read_through = self.read_through.get(&partition);
        let start = read_through.map_or(GroupStart::Beginning, |id| GroupStart::After(*id));
        let has_existed = read_through.is_some() || self.missing.contains(&partition);
        let ensured = if has_existed || topic.layout.is_plain() {
            let exists = GroupCondition::StreamExists;
            backend.ensure_group_if(&stream, group, start, exists).await
        } else {
            topic.ensure_group(&**backend, partition, group, start).await
        };
        match ensured {
            Ok(is_new) => {
                if is_new && read_through.is_some() {
                    metrics(topic, partition, group).record_anomaly("group_removed", 1);
                    warn!(%stream, %group, ?start, "the consumer group was removed while it was pulled; it was created again");
                }
                self.missing.remove(&partition);
            }
            Err(StreamError::NoGroup { .. }) => {
                self.read_through.remove(&partition);
                if self.missing.insert(partition) {
                    metrics(topic, partition, group).record_anomaly("stream_deleted", 1);
                    warn!(%stream, %group, "the stream was deleted; waiting until a producer creates it again");
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The same for the partition with this stream.
    pub(super) async fn restore_group_of(&mut self, topic: &Topic, stream: &str) -> Result<()> {
        match partition_of(topic, stream) {
            Some(partition) => self.restore_group(topic, partition).await,
            None => Ok(()),
        }
    }
}

/// The partition with this stream.
pub(super) fn partition_of(topic: &Topic, stream: &str) -> Option<Partition> {
    (0..topic.partitions).find(|partition| keys::stream(topic, *partition).as_str() == stream)
}

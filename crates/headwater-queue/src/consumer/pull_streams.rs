//! The streams that a driver of pulls reads, and its group on them.
//!
//! Upstream: `pull_driver` asks which streams the next read includes, and reports what was delivered and what failed.
//! Guarantees: a stream that was deleted does not come back through a pull; a group that was removed by hand continues
//! after what was delivered to it. A partition whose server cannot be reached, or whose stream has the wrong type, is
//! excluded from reads and probed in the background until the probe succeeds; the others are read meanwhile.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use headwater_stream::{
    Backend, EntryId, GroupCondition, GroupName, GroupStart, Result as StreamResult, StreamError,
    StreamName,
};
use tokio::task::{JoinError, JoinSet};
use tracing::{info, warn};

use super::pull::metrics;
use super::pull_driver::READ_MAX;
use crate::error::Result;
use crate::keys;
use crate::topic::{Partition, Topic};

/// Partitions that are probed at once.
const PROBES_MAX: usize = 64;

pub(super) struct PullStreams {
    backend: Arc<dyn Backend>,
    group: GroupName,
    /// Where the next read begins, if one read cannot include all streams.
    next: usize,
    /// Partitions whose stream was deleted. They are not read until a producer creates it again.
    missing: BTreeSet<Partition>,
    /// Partitions whose last call failed. They are not read until a probe succeeds.
    unreachable: BTreeSet<Partition>,
    /// Partitions with a running probe.
    probing: BTreeSet<Partition>,
    probes: JoinSet<PullProbe>,
    /// The newest entry of each partition that was delivered to the group, as far as this process knows.
    read_through: HashMap<Partition, EntryId>,
}

/// The result of a probe, which creates the group if it is missing.
type PullProbe = (Partition, StreamResult<bool>);

impl PullStreams {
    /// `unreachable`: partitions whose server could not be reached when the driver joined the group.
    pub(super) fn new(
        backend: &Arc<dyn Backend>,
        group: &GroupName,
        unreachable: Vec<Partition>,
    ) -> Self {
        let (missing, probing, probes, read_through) = Default::default();
        let (backend, group) = (Arc::clone(backend), group.clone());
        let unreachable = unreachable.into_iter().collect();
        Self { backend, group, next: 0, missing, unreachable, probing, probes, read_through }
    }

    pub(super) fn is_readable(&self, partition: Partition) -> bool {
        !self.missing.contains(&partition) && !self.unreachable.contains(&partition)
    }

    fn has_readable(&self, topic: &Topic) -> bool {
        (0..topic.partitions).any(|partition| self.is_readable(partition))
    }

    /// The streams of the next read: all that can be read, or some of them in turns.
    pub(super) fn next(&mut self, topic: &Topic) -> Vec<StreamName> {
        let readable = (0..topic.partitions).filter(|partition| self.is_readable(*partition));
        let mut streams: Vec<_> = readable.map(|p| keys::stream(topic, p)).collect();
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

    /// Excludes a partition from reads until a probe succeeds. Returns the error if no partition is left to read, or if
    /// retrying does not help.
    pub(super) fn exclude(
        &mut self,
        topic: &Topic,
        partition: Partition,
        error: StreamError,
    ) -> Result<()> {
        let is_wrong_type = matches!(error, StreamError::WrongType { .. });
        if !is_wrong_type && !error.is_transient() {
            return Err(error.into());
        }
        if self.unreachable.insert(partition) {
            if is_wrong_type {
                metrics(topic, partition, &self.group).record_anomaly("wrong_type", 1);
            }
            warn!(topic = %topic.name, partition, group = %self.group, %error, "the partition cannot be pulled; the others are, and this one is retried");
        }
        match self.has_readable(topic) {
            true => Ok(()),
            false => Err(error.into()),
        }
    }

    /// Applies the results of finished probes, and starts new ones if they are due. Waits only while no partition can be
    /// read; fails if the probes fail then.
    pub(super) async fn probe(&mut self, topic: &Arc<Topic>, is_due: bool) -> Result<()> {
        self.missing.retain(|partition| *partition < topic.partitions);
        self.unreachable.retain(|partition| *partition < topic.partitions);
        while let Some(probed) = self.probes.try_join_next() {
            self.on_probed(topic, probed)?;
        }
        if is_due || !self.has_readable(topic) {
            let excluded = self.unreachable.iter().chain(&self.missing).copied();
            let idle: Vec<_> = excluded.filter(|p| !self.probing.contains(p)).collect();
            for partition in idle.into_iter().take(PROBES_MAX.saturating_sub(self.probes.len())) {
                let ensuring = self.ensure_group(topic, partition);
                self.probing.insert(partition);
                self.probes.spawn(async move { (partition, ensuring.await) });
            }
        }
        let mut failure = None;
        while !self.unreachable.is_empty() && !self.has_readable(topic) {
            let Some(probed) = self.probes.join_next().await else { break };
            failure = self.on_probed(topic, probed)?.or(failure);
        }
        match failure.filter(|_| !self.has_readable(topic)) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    /// Returns the error if the partition stays excluded and a retry may help.
    fn on_probed(
        &mut self,
        topic: &Topic,
        probed: Result<PullProbe, JoinError>,
    ) -> Result<Option<StreamError>> {
        let (partition, ensured) = probed.expect("a probe does not panic and is not cancelled");
        self.probing.remove(&partition);
        match self.on_ensured(topic, partition, ensured) {
            Err(error) if error.is_transient() => Ok(Some(error)),
            Err(error @ StreamError::WrongType { .. }) => Ok(Some(error)),
            ensured => Ok(ensured.map(|()| None)?),
        }
    }

    /// Creates the group where it is missing: on a new partition from the beginning; if it was removed, after what was
    /// delivered. A stream that was deleted is not created.
    pub(super) async fn restore_group(
        &mut self,
        topic: &Arc<Topic>,
        partition: Partition,
    ) -> StreamResult<()> {
        let ensured = self.ensure_group(topic, partition).await;
        self.on_ensured(topic, partition, ensured)
    }

    /// Where the group begins if it is missing.
    fn start(&self, partition: Partition) -> GroupStart {
        let read_through = self.read_through.get(&partition);
        read_through.map_or(GroupStart::Beginning, |id| GroupStart::After(*id))
    }

    fn ensure_group(
        &self,
        topic: &Arc<Topic>,
        partition: Partition,
    ) -> impl Future<Output = StreamResult<bool>> + Send + use<> {
        let (backend, group) = (Arc::clone(&self.backend), self.group.clone());
        let (topic, start) = (Arc::clone(topic), self.start(partition));
        let has_existed =
            self.read_through.contains_key(&partition) || self.missing.contains(&partition);
        async move {
            if has_existed || topic.layout.is_plain() {
                let (stream, exists) =
                    (keys::stream(&topic, partition), GroupCondition::StreamExists);
                backend.ensure_group_if(&stream, &group, start, exists).await
            } else {
                topic.ensure_group(&*backend, partition, &group, start).await
            }
        }
    }

    fn on_ensured(
        &mut self,
        topic: &Topic,
        partition: Partition,
        ensured: StreamResult<bool>,
    ) -> StreamResult<()> {
        let (group, stream) = (&self.group, keys::stream(topic, partition));
        match ensured {
            Ok(is_new) => {
                if is_new && self.read_through.contains_key(&partition) {
                    metrics(topic, partition, group).record_anomaly("group_removed", 1);
                    let start = self.start(partition);
                    warn!(%stream, %group, ?start, "the consumer group was removed while it was pulled; it was created again");
                }
                self.missing.remove(&partition);
                if self.unreachable.remove(&partition) {
                    info!(%stream, %group, "the partition can be pulled again");
                }
            }
            Err(StreamError::NoGroup { .. }) => {
                self.read_through.remove(&partition);
                self.unreachable.remove(&partition);
                if self.missing.insert(partition) {
                    metrics(topic, partition, group).record_anomaly("stream_deleted", 1);
                    warn!(%stream, %group, "the stream was deleted; waiting until a producer creates it again");
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// The partition with this stream.
pub(super) fn partition_of(topic: &Topic, stream: &str) -> Option<Partition> {
    (0..topic.partitions).find(|partition| keys::stream(topic, *partition).as_str() == stream)
}

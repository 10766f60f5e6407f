//! The live tail of a topic: messages as they arrive, without a consumer group.
//!
//! Upstream: command line and HTTP interface. Downstream: a reader of the backend that belongs to no group.
//! Guarantees: every message after the start is returned once, those of one partition in order; new partitions are read
//! within the topic's `refresh`, or as soon as its metadata can be read. Not promised: order between partitions, beyond one batch.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::limits::WAIT_MAX;
use headwater_stream::{EntryId, StreamName, TailReader};
use tokio::time::Instant;

use crate::error::{QueueError, Result};
use crate::inspect::{StoredMessage, select_partitions};
use crate::keys;
use crate::limits::PAGE_MAX;
use crate::pagination::{check_limit, previous};
use crate::queue::Queue;
use crate::topic::{Partition, Topic, TopicName};

/// Where a tail starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TailStart {
    /// At the oldest message.
    Beginning,
    /// After the newest message.
    #[default]
    End,
    /// At the first message stored at this time or later.
    Time(Timestamp),
}

/// Settings of a tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailConfig {
    /// Where it starts. Default: after the newest message.
    pub start: TailStart,
    /// Only this partition. Default: all.
    pub partition: Option<Partition>,
    /// Approximate messages per batch, at least one per partition. Default: 256, limit: 1000.
    pub batch: usize,
}

impl Default for TailConfig {
    fn default() -> Self {
        Self { start: TailStart::End, partition: None, batch: 256 }
    }
}

const _: () = assert!(PAGE_MAX >= 256);

/// A live tail of a topic.
pub struct Tail {
    queue: Queue,
    topic: TopicName,
    config: TailConfig,
    reader: Box<dyn TailReader>,
    /// The last entry read per stream. A stream without an entry here is read from its beginning.
    read_to: HashMap<StreamName, EntryId>,
    /// The current streams and their partitions.
    streams: HashMap<StreamName, Partition>,
    refresh_at: Instant,
}

impl fmt::Debug for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tail").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl Queue {
    /// Follows a topic. A topic that was not created is plain and need not exist yet.
    pub async fn tail(&self, topic: &str, config: TailConfig) -> Result<Tail> {
        check_limit(config.batch)?;
        let topic = self.read_topic(&TopicName::new(topic)?).await?;
        select_partitions(&topic, config.partition)?;
        let mut tail = Tail {
            queue: self.clone(),
            topic: topic.name.clone(),
            config,
            reader: self.inner.backend.tail().await?,
            read_to: HashMap::new(),
            streams: HashMap::new(),
            refresh_at: Instant::now(),
        };
        tail.update_streams(&topic)?;
        tail.read_to = start_positions(self, &topic, &tail.streams, config.start).await?;
        Ok(tail)
    }
}

impl Tail {
    /// Returns the next messages, oldest first. Waits up to `wait` (limit: one minute) and returns an empty list if
    /// none arrive. Cancel-safe.
    pub async fn next(&mut self, wait: Duration) -> Result<Vec<StoredMessage>> {
        if wait > WAIT_MAX {
            return Err(QueueError::invalid("wait", format!("{wait:?}; at most {WAIT_MAX:?}")));
        }
        let until = Instant::now() + wait;
        loop {
            if Instant::now() >= self.refresh_at {
                let topic = self.queue.topic_or_expired(&self.topic).await?;
                self.update_streams(&topic)?;
            }
            let positions: Vec<(StreamName, EntryId)> = self
                .streams
                .keys()
                .map(|stream| {
                    (stream.clone(), self.read_to.get(stream).copied().unwrap_or_default())
                })
                .collect();
            let count = (self.config.batch / positions.len()).max(1);
            let now = Instant::now();
            let wait = until.min(self.refresh_at).saturating_duration_since(now);
            let batches = self.reader.read(&positions, count, wait).await?;
            // No await from here on, so that no message read is lost on cancellation.
            let mut messages = Vec::new();
            for batch in batches {
                let Some(partition) = self.streams.get(&batch.stream).copied() else { continue };
                if let Some(last) = batch.entries.last() {
                    self.read_to.insert(batch.stream, last.id);
                }
                let read = |entry| StoredMessage::read(&self.topic, partition, entry);
                messages.extend(batch.entries.into_iter().map(read));
            }
            if !messages.is_empty() || Instant::now() >= until {
                messages.sort_by_key(|message| (message.id, message.partition));
                return Ok(messages);
            }
        }
    }

    /// Updates the streams from the topic.
    fn update_streams(&mut self, topic: &Topic) -> Result<()> {
        // A topic that was deleted and created again may have fewer partitions.
        let partitions = select_partitions(topic, self.config.partition)?;
        self.streams =
            partitions.map(|partition| (keys::stream(topic, partition), partition)).collect();
        self.read_to.retain(|stream, _| self.streams.contains_key(stream));
        self.refresh_at = Instant::now() + topic.policies.refresh;
        Ok(())
    }
}

/// The last entry per stream that counts as read at the start.
async fn start_positions(
    queue: &Queue,
    topic: &Topic,
    streams: &HashMap<StreamName, Partition>,
    start: TailStart,
) -> Result<HashMap<StreamName, EntryId>> {
    match start {
        TailStart::Beginning => Ok(HashMap::new()),
        TailStart::Time(at) => {
            let before = previous(EntryId::new(at.as_millis(), 0)).unwrap_or(EntryId::MIN);
            Ok(streams.keys().map(|stream| (stream.clone(), before)).collect())
        }
        TailStart::End => {
            let stats = queue.partition_stats(topic).await?;
            let last = |partition: Partition| stats.get(usize::from(partition))?.as_ref()?.last_id;
            let position = |(stream, partition): (&StreamName, &Partition)| {
                (stream.clone(), last(*partition).unwrap_or_default())
            };
            Ok(streams.iter().map(position).collect())
        }
    }
}

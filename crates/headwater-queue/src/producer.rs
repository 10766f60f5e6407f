//! Sends messages: validates, chooses the partition, appends.
//!
//! Upstream: applications. Downstream: the streams of a topic.
//! Guarantees: an invalid message is rejected before anything is sent; the number of partitions that a key or an id is
//! hashed to is never older than the topic's `refresh`, also while the metadata cannot be read; a confirmed message is in
//! its partition, and every other result is an error.
//! Not here: retrying a failed send. A caller that retries gives the message an id, so that duplicates are dropped.

mod batch;
mod budget;
mod delayed;
mod idempotent;
mod partition_handle;
mod timestamp;
mod topic_cache;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use headwater_stream::{EntryId, Fields, StreamError};
use metrics::counter;
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument, Span, warn};

pub use self::delayed::DelayedMessage;
use self::idempotent::IdempotencyKey;
use self::partition_handle::PartitionHandle;
use self::timestamp::TimestampCache;
use self::topic_cache::{CachedTopic, TopicCache};
use crate::config::ProducerConfig;
use crate::error::{QueueError, Result};
use crate::message::{NewMessage, OutgoingMessage, PartitionFields};
use crate::metrics::ANOMALIES;
use crate::queue::{Queue, UseExpired};
use crate::topic::Partition;
use crate::trace::{self, TraceBridge, TraceContext};

/// Sends messages to topics. Clones share one producer, and concurrent sends share round trips.
#[derive(Clone)]
pub struct Producer {
    inner: Arc<Inner>,
}

struct Inner {
    queue: Queue,
    config: ProducerConfig,
    topics: TopicCache,
    timestamps: TimestampCache,
}

/// A message that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The id of its entry in the partition.
    pub id: EntryId,
    /// The partition.
    pub partition: Partition,
    /// Whether a message with the same id was sent before, within the idempotence window. Then nothing was appended,
    /// and `id` is that of the first message.
    pub duplicate: bool,
}

/// A message encoded for its partition.
struct PreparedMessage {
    partition: Partition,
    idempotency_key: Option<IdempotencyKey>,
    fields: Fields,
}

impl Queue {
    /// Creates a producer. One is enough for a process.
    pub fn producer(&self, config: ProducerConfig) -> Result<Producer> {
        config.validate()?;
        let topics = TopicCache::new(self.clone());
        let timestamps = TimestampCache::default();
        let inner = Inner { queue: self.clone(), config, topics, timestamps };
        Ok(Producer { inner: Arc::new(inner) })
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("queue", &self.inner.queue)
            .field("config", &self.inner.config)
            .finish_non_exhaustive()
    }
}

impl Producer {
    /// Sends a message and returns when it is in its partition. A topic that was not created is plain.
    ///
    /// After [`QueueError::DeadlineExceeded`], or a transient error of the backend, the message may have been sent:
    /// retry with the same id. The same holds if the future is dropped before it completes.
    pub async fn send(&self, topic: &str, message: NewMessage) -> Result<Sent> {
        let until = Instant::now() + self.inner.config.deadline;
        let use_expired = use_expired(std::slice::from_ref(&message));
        let cached = self.cached_topic(topic, use_expired, until).await?;
        let (prepared, span) = self.prepare(&cached, message)?;
        let PreparedMessage { partition, idempotency_key, fields } = prepared;
        let handle = cached.partition(partition);
        let sending = async {
            if cached.budget.is_some() {
                self.reserve_budget(&cached, fields.bytes()).await?;
            }
            let sent = match idempotency_key {
                None => self.append(&cached, handle, fields).await?,
                Some(key) => self.append_idempotent(&cached, handle, key, fields).await?,
            };
            self.warn_if_stale(&cached);
            Ok(sent)
        };
        let sent = timeout_at(until, sending.instrument(span))
            .await
            .unwrap_or_else(|_| Err(self.deadline_exceeded(topic)));
        handle.count(std::slice::from_ref(&sent));
        sent
    }

    /// Validates a message and encodes it for its partition. Has no effect at the backend.
    fn prepare(
        &self,
        cached: &CachedTopic,
        message: NewMessage,
    ) -> Result<(PreparedMessage, Span)> {
        self.validate_and_encode(cached, message).inspect_err(|_| cached.count_rejected(1))
    }

    fn validate_and_encode(
        &self,
        cached: &CachedTopic,
        message: NewMessage,
    ) -> Result<(PreparedMessage, Span)> {
        message.validate(&cached.topic)?;
        let partition = self.resolve_partition(cached, &message)?;
        let traced =
            trace::send_span(self.bridge(), &cached.topic.name, Some(partition), &message.headers);
        let (idempotency_key, outgoing) = self.split(cached, message, partition, traced.context)?;
        let partition_fields = &cached.partition(partition).partition_fields;
        let fields = outgoing.encode(partition_fields, &self.timestamp(partition_fields));
        Ok((PreparedMessage { partition, idempotency_key, fields }, traced.span))
    }

    /// The text of the current time, if entries with these fields have a timestamp.
    fn timestamp(&self, partition_fields: &PartitionFields) -> Bytes {
        match partition_fields {
            PartitionFields::Full { .. } => self.inner.timestamps.now(),
            PartitionFields::Compact => Bytes::new(),
        }
    }

    /// Splits a valid message into its idempotency key, if it has an id, and the parts of its entry.
    fn split(
        &self,
        cached: &CachedTopic,
        mut message: NewMessage,
        partition: Partition,
        trace: Option<TraceContext>,
    ) -> Result<(Option<IdempotencyKey>, OutgoingMessage)> {
        let idempotency_key = self.take_idempotency_key(cached, &mut message, partition);
        Ok((idempotency_key, message.into_outgoing(trace)?))
    }

    fn bridge(&self) -> Option<&dyn TraceBridge> {
        self.inner.queue.inner.config.trace.as_deref()
    }

    async fn append(
        &self,
        cached: &CachedTopic,
        handle: &PartitionHandle,
        fields: Fields,
    ) -> Result<Sent> {
        let retention = &cached.topic.policies.retention;
        // The backend batches concurrent appends. Batching them here was measured to cost more than it saves (2.6 us of
        // processor time per message, against 2.2).
        let backend = self.inner.queue.backend();
        let id = single(backend.append(&handle.stream, &[fields], retention).await?)?;
        Ok(handle.sent(id))
    }

    /// Fails with [`QueueError::BudgetExceeded`] if the topic holds as many bytes as it may.
    async fn reserve_budget(&self, cached: &CachedTopic, bytes: usize) -> Result<()> {
        match &cached.budget {
            None => Ok(()),
            Some(budget) => budget.reserve(&self.inner.queue, &cached.topic, bytes).await,
        }
    }

    /// Warns if the topic was resized during a slow send: the message is safe, but its key may be out of order, because
    /// the resize may have completed without waiting for it. In the background: a message that was sent is confirmed even
    /// if the metadata cannot be read.
    fn warn_if_stale(&self, cached: &CachedTopic) {
        if !cached.needs_check() {
            return;
        }
        let (queue, sent_to) = (self.inner.queue.clone(), Arc::clone(&cached.topic));
        tokio::spawn(async move {
            let topic = &sent_to.name;
            let now = queue.topic(topic).await;
            if now.is_ok_and(|now| now.partitions != sent_to.partitions) {
                let name = topic.to_string();
                counter!(ANOMALIES, "topic" => name, "group" => "", "result" => "late_send")
                    .increment(1);
                warn!(%topic, "the topic was resized during a send; messages of one key may be out of order");
            }
        });
    }

    /// The cached metadata of a topic, refreshed if it is too old.
    async fn cached_topic(
        &self,
        topic: &str,
        use_expired: UseExpired,
        until: Instant,
    ) -> Result<Arc<CachedTopic>> {
        // The deadline was set just now.
        let now = until - self.inner.config.deadline;
        if let Some(cached) = self.inner.topics.fresh(topic, now) {
            return Ok(cached);
        }
        let refresh = self.inner.topics.refresh(topic, use_expired);
        timeout_at(until, refresh).await.unwrap_or_else(|_| Err(self.deadline_exceeded(topic)))
    }

    /// The partition of a valid message.
    fn resolve_partition(&self, cached: &CachedTopic, message: &NewMessage) -> Result<Partition> {
        if let Some(partition) = message.partition {
            return Ok(partition);
        }
        let partitions = cached.topic.partitions;
        let chosen = self.choose_partition(message, partitions);
        if chosen >= partitions {
            let problem = format!(
                "the partitioner chose {chosen}; topic `{}` has partitions 0 to {}",
                cached.topic.name,
                partitions - 1
            );
            return Err(QueueError::invalid("partition", problem));
        }
        Ok(chosen)
    }

    fn deadline_exceeded(&self, topic: &str) -> QueueError {
        let deadline = self.inner.config.deadline;
        QueueError::DeadlineExceeded { topic: topic.to_owned(), deadline }
    }
}

/// Which metadata is good enough for messages while the current one cannot be read. The partition of a key or an id depends
/// on the number of partitions; with an old one, a message could overtake others of its key, or not find its duplicate.
fn use_expired(messages: &[NewMessage]) -> UseExpired {
    let is_hashed = |message: &NewMessage| {
        message.partition.is_none() && (message.key.is_some() || message.id.is_some())
    };
    match messages.iter().any(is_hashed) {
        true => UseExpired::IfCurrent,
        false => UseExpired::UnlessChanged,
    }
}

/// The single result of a call with one argument.
fn single<T>(results: Vec<T>) -> Result<T> {
    results.into_iter().next().ok_or_else(missing_result)
}

fn missing_result() -> QueueError {
    let problem = "the backend returned fewer results than entries".to_owned();
    StreamError::Protocol { problem }.into()
}

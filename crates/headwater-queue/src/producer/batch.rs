//! Batch sends: many messages in one call, one append per partition, one result per message.
//!
//! Guarantees: messages of one partition keep their order, even if some fail: after the first failure, nothing later of
//! its partition is sent. Partitions are independent of each other.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use futures_util::future::join_all;
use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX, ENTRY_BYTES_MAX};
use headwater_stream::{AppendRequest, EntrySize, EntrySource, Fields, StreamName, TakeParts};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::idempotent::IdempotencyKey;
use super::partition_handle::PartitionHandle;
use super::topic_cache::CachedTopic;
use super::{Producer, Sent, missing_result, single, use_expired};
use crate::error::{QueueError, Result};
use crate::limits::SEND_BATCH_MAX;
use crate::message::{MessageHeaders, NewMessage, OutgoingMessage, PartitionFields};
use crate::topic::Partition;
use crate::trace::{self, TraceContext};

/// Messages ready to be sent, grouped by partition and in order within a partition.
struct SendBatch {
    messages: Vec<OutgoingMessage>,
    /// The index of each message in the caller's batch.
    indices: Vec<usize>,
    /// The messages with an id, by index in the caller's batch.
    idempotency_keys: BTreeMap<usize, IdempotencyKey>,
    partitions: Vec<PartitionBatch>,
    timestamp: Bytes,
}

/// The range of messages for one partition.
struct PartitionBatch {
    partition: Partition,
    messages: Range<usize>,
}

/// Messages of one partition as entries, which are encoded while they are sent.
struct EntryRun<'a> {
    messages: &'a [OutgoingMessage],
    partition_fields: &'a PartitionFields,
    timestamp: &'a Bytes,
}

impl EntrySource for EntryRun<'_> {
    fn len(&self) -> usize {
        self.messages.len()
    }

    fn size(&self, at: usize) -> EntrySize {
        self.messages[at].size(self.partition_fields, self.timestamp)
    }

    fn entry(&self, at: usize) -> Cow<'_, Fields> {
        Cow::Owned(self.messages[at].encode(self.partition_fields, self.timestamp))
    }

    fn parts(&self, at: usize, take: &mut TakeParts<'_>) {
        self.messages[at].with_parts(self.partition_fields, self.timestamp, take);
    }
}

impl EntryRun<'_> {
    /// Truncates the run to what fits into one append: at least one, because each entry fits alone.
    fn truncate_to_fit(mut self) -> Self {
        // So few entries fit at any size.
        if self.len() > BATCH_BYTES_MAX / ENTRY_BYTES_MAX {
            let mut bytes = 0;
            let fits = |at: &usize| {
                bytes += self.size(*at).bytes;
                bytes <= BATCH_BYTES_MAX
            };
            let fitting = (0..self.len()).take(BATCH_MAX).take_while(fits).count();
            self.messages = &self.messages[..fitting];
        }
        self
    }
}

/// Results by index in the caller's batch; `None` until known.
type SendResults = Vec<Option<Result<Sent>>>;

impl SendBatch {
    fn with_capacity(messages: usize, timestamp: Bytes) -> Self {
        Self {
            messages: Vec::with_capacity(messages),
            indices: Vec::with_capacity(messages),
            idempotency_keys: BTreeMap::new(),
            partitions: Vec::new(),
            timestamp,
        }
    }

    /// Adds a message. Messages must be added partition by partition.
    fn add(&mut self, partition: Partition, message: OutgoingMessage, index: usize) {
        let at = self.messages.len();
        match self.partitions.last_mut() {
            Some(last) if last.partition == partition => last.messages.end = at + 1,
            _ => self.partitions.push(PartitionBatch { partition, messages: at..at + 1 }),
        }
        self.messages.push(message);
        self.indices.push(index);
    }

    /// Messages of one partition as entries.
    fn run<'a>(&'a self, handle: &'a PartitionHandle, messages: Range<usize>) -> EntryRun<'a> {
        let (partition_fields, timestamp) = (&handle.partition_fields, &self.timestamp);
        EntryRun { messages: &self.messages[messages], partition_fields, timestamp }
    }

    fn has_id(&self, at: usize) -> bool {
        self.idempotency_keys.contains_key(&self.indices[at])
    }

    /// Stores the results of consecutive messages, starting with message `from`.
    fn record(
        &self,
        results: &mut SendResults,
        from: usize,
        new: impl Iterator<Item = Result<Sent>>,
    ) {
        for (index, result) in self.indices[from..].iter().zip(new) {
            results[*index] = Some(result);
        }
    }
}

impl Producer {
    /// Sends messages, grouped by partition. If one message is invalid, the call fails and none is sent; otherwise
    /// there is one result per message, in order.
    ///
    /// Messages of one partition keep their order: after a failed one, nothing later of its partition is sent.
    pub async fn send_batch(
        &self,
        topic: &str,
        messages: Vec<NewMessage>,
    ) -> Result<Vec<Result<Sent>>> {
        let until = Instant::now() + self.inner.config.deadline;
        let count = messages.len();
        if count > SEND_BATCH_MAX {
            let problem = format!("{count} messages; the limit is {SEND_BATCH_MAX}");
            return Err(QueueError::invalid("batch", problem));
        }
        let cached = self.cached_topic(topic, use_expired(&messages), until).await?;
        let traced =
            trace::send_span(self.bridge(), &cached.topic.name, None, &MessageHeaders::new());
        let batch = self
            .prepare_batch(&cached, messages, traced.context)
            .inspect_err(|_| cached.count_rejected(count))?;
        let sending = async {
            self.reserve_batch_budget(&cached, &batch, until).await?;
            // Without ids and on one server, one request serves all partitions. With several servers, an unavailable
            // one must not delay the results of the others.
            let in_one_request =
                !cached.topic.layout.is_spread() && batch.idempotency_keys.is_empty();
            let results = match &batch.partitions[..] {
                // It has all messages, in the caller's order.
                [only] => self.send_partition(&cached, &batch, only, until).await,
                _ if in_one_request => {
                    complete(self.send_in_one_request(&cached, &batch, until).await)
                }
                _ => complete(self.send_per_partition(&cached, &batch, until).await),
            };
            self.warn_if_stale(&cached);
            Ok(results)
        };
        sending.instrument(traced.span).await
    }

    /// Validates all messages and groups them by partition.
    fn prepare_batch(
        &self,
        cached: &CachedTopic,
        mut messages: Vec<NewMessage>,
        trace: Option<TraceContext>,
    ) -> Result<SendBatch> {
        let mut order = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let partition = message
                .validate(&cached.topic)
                .and_then(|()| self.resolve_partition(cached, message))
                .map_err(|error| with_index(index, error))?;
            order.push((partition, index));
        }
        // By partition; within a partition in the caller's order.
        order.sort_unstable();
        let mut batch = SendBatch::with_capacity(messages.len(), self.inner.timestamps.now());
        for (partition, index) in order {
            let message = std::mem::take(&mut messages[index]);
            let (idempotency_key, outgoing) = self
                .split(cached, message, partition, trace)
                .map_err(|error| with_index(index, error))?;
            if let Some(key) = idempotency_key {
                batch.idempotency_keys.insert(index, key);
            }
            batch.add(partition, outgoing, index);
        }
        Ok(batch)
    }

    async fn reserve_batch_budget(
        &self,
        cached: &CachedTopic,
        batch: &SendBatch,
        until: Instant,
    ) -> Result<()> {
        if cached.budget.is_none() {
            return Ok(());
        }
        let bytes_of = |part: &PartitionBatch| {
            let run = batch.run(cached.partition(part.partition), part.messages.clone());
            (0..run.len()).map(|at| run.size(at).bytes).sum::<usize>()
        };
        let bytes = batch.partitions.iter().map(bytes_of).sum();
        timeout_at(until, self.reserve_budget(cached, bytes))
            .await
            .unwrap_or_else(|_| Err(self.deadline_exceeded(cached.topic.name.as_str())))
    }

    /// Sends to all partitions in one request; what does not fit into it goes into further requests.
    async fn send_in_one_request(
        &self,
        cached: &CachedTopic,
        batch: &SendBatch,
        until: Instant,
    ) -> SendResults {
        let retention = &cached.topic.policies.retention;
        let mut results = unknown_results(batch.messages.len());
        // The unsent messages of each partition.
        let mut left: Vec<(Range<usize>, &PartitionHandle)> = batch
            .partitions
            .iter()
            .map(|part| (part.messages.clone(), cached.partition(part.partition)))
            .collect();
        while !left.is_empty() {
            let runs: Vec<(&StreamName, EntryRun<'_>)> = left
                .iter()
                .map(|(range, handle)| {
                    (&handle.stream, batch.run(handle, range.clone()).truncate_to_fit())
                })
                .collect();
            let appends: Vec<AppendRequest<'_>> = runs
                .iter()
                .map(|(stream, run)| AppendRequest { stream, entries: run, retention })
                .collect();
            let sending = self.inner.queue.backend().append_many(&appends);
            let mut sent = timeout_at(until, sending).await.map(Vec::into_iter);
            left.retain_mut(|(range, handle)| {
                let result = match &mut sent {
                    Ok(sent) => sent.next().unwrap_or_else(|| Ok(Vec::new())).map_err(Into::into),
                    Err(_) => Err(self.deadline_exceeded(cached.topic.name.as_str())),
                };
                let ids = result
                    .and_then(|ids| if ids.is_empty() { Err(missing_result()) } else { Ok(ids) });
                match ids {
                    Ok(ids) => {
                        let count = ids.len().min(range.len());
                        let sent = ids.into_iter().take(count).map(|id| Ok(handle.sent(id)));
                        batch.record(&mut results, range.start, sent);
                        handle.count_sent(count);
                        range.start += count;
                    }
                    Err(error) => {
                        handle.errors.increment(range.len() as u64);
                        batch.record(
                            &mut results,
                            range.start,
                            range.clone().map(|_| Err(error.duplicate())),
                        );
                        range.start = range.end;
                    }
                }
                range.start < range.end
            });
        }
        results
    }

    /// Sends to each partition in its own requests.
    async fn send_per_partition(
        &self,
        cached: &CachedTopic,
        batch: &SendBatch,
        until: Instant,
    ) -> SendResults {
        let parts = batch.partitions.iter();
        let each = parts.map(|part| self.send_partition(cached, batch, part, until));
        let mut results = unknown_results(batch.messages.len());
        for (part, new) in batch.partitions.iter().zip(join_all(each).await) {
            batch.record(&mut results, part.messages.start, new.into_iter());
        }
        results
    }

    async fn send_partition(
        &self,
        cached: &CachedTopic,
        batch: &SendBatch,
        part: &PartitionBatch,
        until: Instant,
    ) -> Vec<Result<Sent>> {
        let handle = cached.partition(part.partition);
        let mut results = Vec::with_capacity(part.messages.len());
        while results.len() < part.messages.len() {
            let left = part.messages.start + results.len()..part.messages.end;
            let error =
                match timeout_at(until, self.send_run(cached, handle, batch, left.clone())).await {
                    Ok(Ok(sent)) if sent.is_empty() => missing_result(),
                    Ok(Ok(sent)) => {
                        results.extend(sent.into_iter().map(Ok));
                        continue;
                    }
                    Ok(Err(error)) => error,
                    Err(_) => self.deadline_exceeded(cached.topic.name.as_str()),
                };
            // The rest of the partition is not sent.
            results.extend(left.map(|_| Err(error.duplicate())));
        }
        handle.count(&results);
        results
    }

    /// Sends the longest prefix that fits into one append: all with ids, or all without.
    async fn send_run(
        &self,
        cached: &CachedTopic,
        handle: &PartitionHandle,
        batch: &SendBatch,
        left: Range<usize>,
    ) -> Result<Vec<Sent>> {
        let mut run = batch.run(handle, left.clone()).truncate_to_fit();
        let has_id = batch.has_id(left.start);
        if !batch.idempotency_keys.is_empty() {
            let alike = left.clone().take_while(|at| batch.has_id(*at) == has_id).count();
            run.messages = &run.messages[..alike.min(run.len())];
        }
        if has_id {
            let indices = &batch.indices[left.start..left.start + run.len()];
            let keys = indices.iter().filter_map(|index| batch.idempotency_keys.get(index));
            let entries = (0..run.len()).map(|at| run.entry(at).into_owned());
            let entries = keys.cloned().zip(entries).collect();
            return self.append_idempotent_all(cached, handle, entries).await;
        }
        let retention = &cached.topic.policies.retention;
        let append = AppendRequest { stream: &handle.stream, entries: &run, retention };
        let ids = single(self.inner.queue.backend().append_many(&[append]).await)??;
        Ok(ids.into_iter().map(|id| handle.sent(id)).collect())
    }
}

/// The result of each message.
fn complete(results: SendResults) -> Vec<Result<Sent>> {
    results.into_iter().map(|result| result.unwrap_or_else(|| Err(missing_result()))).collect()
}

fn unknown_results(count: usize) -> SendResults {
    std::iter::repeat_with(|| None).take(count).collect()
}

fn with_index(index: usize, error: QueueError) -> QueueError {
    match error {
        QueueError::Invalid { what, problem } => {
            QueueError::Invalid { what: format!("{what} (message {index} of the batch)"), problem }
        }
        other => other,
    }
}

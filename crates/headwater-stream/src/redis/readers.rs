//! Reads new entries for one consumer of a group (`XREADGROUP`), or entries after given positions (`XREAD`).
//!
//! Upstream: `streams`. Downstream: `read_connections`. Guarantees: a dropped read loses nothing; the next read returns what
//! it fetched.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::client::{Idempotency, RedisClient};
use super::command::Commands;
use super::connection::Connection;
use super::disconnect_reader;
use super::error::{ReplyError, ServerError};
use super::keys::Keyspace;
use super::read_connections::ReadConnections;
use super::reply::RespReplies;
use super::streams::create_group;
use crate::entry::{DeliveredEntry, Entry, EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::limits::COUNT_MAX;
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{GroupReader, GroupStart, StreamBatch, StreamReadFailure, TailReader};
use crate::validate;

/// Reads for one consumer of a group.
pub(super) struct RedisGroupReader {
    group: ReaderGroup,
    connections: ReadConnections,
}

/// Reads entries after given positions.
pub(super) struct RedisTailReader {
    connections: ReadConnections,
}

/// A read of streams that share a slot.
#[derive(Clone, PartialEq)]
pub(super) struct StreamRead {
    /// The group that reads; `None` for a read by position.
    group: Option<ReaderGroup>,
    streams: Vec<StreamName>,
    /// The positions of the streams; empty for a group, which has its own.
    positions: Vec<EntryId>,
    count: usize,
}

/// A group and the consumer that reads for it.
#[derive(Clone, PartialEq)]
struct ReaderGroup {
    group: GroupName,
    consumer: ConsumerName,
    /// Whether a missing group fails a read instead of being created.
    is_required: bool,
}

impl RedisGroupReader {
    pub(super) fn new(
        client: &Arc<RedisClient>,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Self {
        let (group, consumer) = (group.clone(), consumer.clone());
        let group = ReaderGroup { group, consumer, is_required: false };
        Self { group, connections: ReadConnections::new(client) }
    }

    /// The completed reads as batches in the order of `streams`. Streams that are no longer requested come last.
    fn batches(&mut self, streams: &[StreamName]) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        let delivered = |id, fields: Option<Fields>| match fields {
            Some(fields) => Ok(Some(DeliveredEntry { id, fields, deliveries: 1 })),
            None => Err(ReplyError::unexpected("new entry without fields")),
        };
        let completed = self.connections.take_completed();
        read_batches(self.connections.client().keys(), completed, streams, delivered)
    }
}

#[async_trait]
impl GroupReader for RedisGroupReader {
    fn require_groups(&mut self) {
        self.group.is_required = true;
    }

    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        validate::read(streams, count, wait)?;
        let reads = by_slot(self.connections.client(), streams, &[], Some(&self.group), count);
        self.connections.read(&reads, wait).await?;
        self.batches(streams)
    }

    fn take_failures(&mut self) -> Vec<StreamReadFailure> {
        let failures = self.connections.take_failures().into_iter();
        failures.map(|(read, error)| StreamReadFailure { streams: read.streams, error }).collect()
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        self.connections.close().await?;
        self.batches(&[])
    }
}

impl RedisTailReader {
    pub(super) fn new(client: &Arc<RedisClient>) -> Self {
        Self { connections: ReadConnections::new(client) }
    }
}

#[async_trait]
impl TailReader for RedisTailReader {
    async fn read(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<Entry>>> {
        let (streams, positions): (Vec<StreamName>, Vec<EntryId>) =
            positions.iter().cloned().unzip();
        validate::read(&streams, count, wait)?;
        let reads = by_slot(self.connections.client(), &streams, &positions, None, count);
        loop {
            self.connections.read(&reads, wait).await?;
            let mut completed = self.connections.take_completed();
            let failure = self.connections.take_failures().into_iter().next();
            if let (true, Some((_, error))) = (completed.is_empty(), failure) {
                return Err(error);
            }
            let is_empty = completed.is_empty();
            // Replies to earlier, different reads are dropped.
            completed.retain(|(read, _)| reads.iter().any(|(_, wanted)| wanted == read));
            let entry = |id, fields: Option<Fields>| Ok(fields.map(|fields| Entry { id, fields }));
            let keys = self.connections.client().keys();
            let batches = read_batches(keys, completed, &streams, entry)?;
            if is_empty || !batches.is_empty() {
                return Ok(batches);
            }
        }
    }
}

impl StreamRead {
    /// Prepares a new connection before the first read. Returns whether the consumer was disconnected meanwhile.
    pub(super) async fn on_connect(
        &self,
        client: &RedisClient,
        connection: &mut Connection,
        deadline: Instant,
    ) -> Result<bool> {
        let Some(ReaderGroup { group, consumer, .. }) = &self.group else { return Ok(false) };
        let reader = (group, consumer);
        disconnect_reader::register_reader(client, connection, &self.streams, reader, deadline)
            .await
    }

    /// Encodes the command; with `block_ms` it blocks up to that many milliseconds.
    pub(super) fn command(&self, keys: &Keyspace, block_ms: Option<u64>) -> Commands {
        let words = 4
            + if self.group.is_some() { 3 } else { 0 }
            + if block_ms.is_some() { 2 } else { 0 }
            + self.streams.len() * 2;
        let bytes: usize = self.streams.iter().map(|stream| stream.as_str().len() + 52).sum();
        let mut commands = Commands::with_capacity(160 + bytes);
        commands.begin(words);
        match &self.group {
            None => commands.arg("XREAD"),
            Some(ReaderGroup { group, consumer, .. }) => {
                let words = ["XREADGROUP", "GROUP", group.as_str(), consumer.as_str()];
                words.iter().for_each(|word| commands.arg(word));
            }
        }
        commands.arg("COUNT");
        commands.arg_number(self.count as u64);
        if let Some(ms) = block_ms {
            commands.arg("BLOCK");
            commands.arg_number(ms);
        }
        commands.arg("STREAMS");
        self.streams.iter().for_each(|stream| commands.arg_key(&keys.of(stream)));
        match &self.group {
            None => self.positions.iter().for_each(|id| commands.arg_id(*id)),
            Some(_) => self.streams.iter().for_each(|_| commands.arg(">")),
        }
        commands
    }

    /// Fixes the cause of an error: creates a missing group from the beginning, unless it is required. Returns whether the
    /// read should be re-sent.
    pub(super) async fn recover(
        &self,
        client: &RedisClient,
        slot: u16,
        error: &ServerError,
    ) -> Result<bool> {
        let Some(ReaderGroup { group, is_required: false, .. }) = &self.group else {
            return Ok(false);
        };
        if !error.is_no_group() {
            return Ok(false);
        }
        for stream in &self.streams {
            let commands = create_group(client.keys(), stream, group, GroupStart::Beginning);
            let replies = client.call(slot, commands, Idempotency::Idempotent).await?;
            replies.cursor().number().map_err(|error| error.into_stream_error(stream))?;
        }
        Ok(true)
    }

    /// The error for the caller.
    pub(super) async fn to_error(
        &self,
        client: &RedisClient,
        slot: u16,
        error: ServerError,
    ) -> StreamError {
        let stream = self.failing_stream(client, slot, &error).await;
        match &self.group {
            Some(ReaderGroup { group, .. }) => {
                ReplyError::Server(error).into_group_error(stream, group)
            }
            None => ReplyError::Server(error).into_stream_error(stream),
        }
    }

    /// The stream that an error is about: the one it names, the first whose key holds another type, or the first.
    async fn failing_stream(
        &self,
        client: &RedisClient,
        slot: u16,
        error: &ServerError,
    ) -> &StreamName {
        let keys = client.keys();
        let is_named =
            |stream: &StreamName| error.text().contains(&format!("'{}'", keys.of(stream)));
        let mut found = self.streams.iter().position(is_named).unwrap_or(0);
        if error.is_wrong_type() && self.streams.len() > 1 {
            let mut commands = Commands::new();
            for stream in &self.streams {
                commands.add_on_key(&["TYPE"], &keys.of(stream), &[""; 0]);
            }
            if let Ok(replies) = client.call(slot, commands, Idempotency::Idempotent).await {
                let mut cursor = replies.cursor();
                let wrong_type = |_: &_| !matches!(cursor.text(), Ok(b"stream" | b"none"));
                found = self.streams.iter().position(wrong_type).unwrap_or(0);
            }
        }
        &self.streams[found]
    }
}

/// One read per slot, without duplicate streams.
fn by_slot(
    client: &RedisClient,
    streams: &[StreamName],
    positions: &[EntryId],
    group: Option<&ReaderGroup>,
    count: usize,
) -> Vec<(u16, StreamRead)> {
    let mut seen = HashSet::new();
    let mut reads: Vec<(u16, StreamRead)> = Vec::new();
    for (at, stream) in streams.iter().enumerate() {
        if streams.len() > 1 && !seen.insert(stream) {
            continue;
        }
        let slot = client.slot(stream.as_str());
        let known = reads.iter().position(|(known, _)| *known == slot).unwrap_or_else(|| {
            let (streams, positions) = (Vec::new(), Vec::new());
            reads.push((slot, StreamRead { group: group.cloned(), streams, positions, count }));
            reads.len() - 1
        });
        let (_, read) = &mut reads[known];
        read.streams.push(stream.clone());
        read.positions.extend(positions.get(at));
    }
    reads
}

/// Parses completed reads into batches in the order of `streams`. `entry` returns `None` for an entry to skip.
fn read_batches<T>(
    keys: &Keyspace,
    completed: Vec<(StreamRead, RespReplies)>,
    streams: &[StreamName],
    entry: impl Fn(EntryId, Option<Fields>) -> Result<Option<T>, ReplyError>,
) -> Result<Vec<StreamBatch<T>>> {
    let mut batches = Vec::new();
    for (read, replies) in completed {
        let mut parse = || {
            let mut cursor = replies.cursor();
            // Streams come in the order of the command, so the search continues where it stopped.
            let mut requested = read.streams.iter();
            for _ in 0..cursor.array()? {
                cursor.array_of(2)?;
                let name = cursor.text()?;
                let stream =
                    requested.find(|stream| keys.of(*stream).is(name)).ok_or_else(|| {
                        ReplyError::unexpected("entries of a stream that was not requested")
                    })?;
                let count = cursor.array()?;
                let mut entries = Vec::with_capacity(count.min(COUNT_MAX));
                for _ in 0..count {
                    let (id, fields) = cursor.entry()?;
                    entries.extend(entry(id, fields)?);
                }
                if !entries.is_empty() {
                    batches.push(StreamBatch { stream: stream.clone(), entries });
                }
            }
            Ok(())
        };
        parse().map_err(|error: ReplyError| error.into_stream_error("a read"))?;
    }
    if batches.len() > 1 {
        let position = |batch: &StreamBatch<T>| streams.iter().position(|s| *s == batch.stream);
        batches.sort_by_key(|batch| position(batch).unwrap_or(usize::MAX));
    }
    Ok(batches)
}

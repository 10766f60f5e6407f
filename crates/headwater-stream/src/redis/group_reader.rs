//! Reads new entries for one consumer of a group (`XREADGROUP`).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::blocking_connection::ReadCommand;
use super::client::{Idempotency, RedisClient};
use super::command::Commands;
use super::connection::Connection;
use super::disconnect_reader;
use super::error::{ReplyError, ServerError};
use super::read_connections::{CompletedRead, ReadConnections};
use super::streams::create_group;
use crate::entry::DeliveredEntry;
use crate::error::{Result, StreamError};
use crate::limits::COUNT_MAX;
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{GroupReader, GroupStart, StreamBatch};
use crate::validate;

/// A reader with its own connections.
pub(super) struct RedisGroupReader {
    group: GroupName,
    consumer: ConsumerName,
    connections: ReadConnections<GroupRead>,
}

/// A read of new entries of these streams, which share a slot.
#[derive(Clone, PartialEq)]
struct GroupRead {
    group: GroupName,
    consumer: ConsumerName,
    streams: Vec<StreamName>,
    count: usize,
}

impl RedisGroupReader {
    pub(super) fn new(
        client: &Arc<RedisClient>,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Self {
        Self {
            group: group.clone(),
            consumer: consumer.clone(),
            connections: ReadConnections::new(client),
        }
    }

    /// Groups the streams into one read per slot.
    fn reads(&self, streams: &[StreamName], count: usize) -> Vec<(u16, GroupRead)> {
        let grouped = by_slot(self.connections.client(), streams, StreamName::as_str);
        let read = |streams: Vec<StreamName>| GroupRead {
            group: self.group.clone(),
            consumer: self.consumer.clone(),
            streams,
            count,
        };
        grouped.into_iter().map(|(slot, streams)| (slot, read(streams))).collect()
    }

    /// The completed reads as batches in the order of `streams`.
    fn batches(&mut self, streams: &[StreamName]) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        let mut batches = Vec::new();
        for completed in self.connections.take_completed() {
            read_batches(&completed, &mut batches)
                .map_err(|error| error.into_stream_error("a read"))?;
        }
        if batches.len() > 1 {
            let position = |batch: &StreamBatch<_>| streams.iter().position(|s| *s == batch.stream);
            // Streams that are no longer requested come last.
            batches.sort_by_key(|batch| position(batch).unwrap_or(usize::MAX));
        }
        Ok(batches)
    }
}

#[async_trait]
impl GroupReader for RedisGroupReader {
    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        validate::read(streams, count, wait)?;
        let reads = self.reads(streams, count);
        self.connections.read(&reads, wait).await?;
        self.batches(streams)
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        self.connections.close().await?;
        self.batches(&[])
    }
}

#[async_trait]
impl ReadCommand for GroupRead {
    async fn on_connect(
        &self,
        client: &RedisClient,
        connection: &mut Connection,
        deadline: Instant,
    ) -> Result<bool> {
        let reader = (&self.group, &self.consumer);
        disconnect_reader::register_reader(client, connection, &self.streams, reader, deadline)
            .await
    }

    fn command(&self, block_ms: Option<u64>) -> Commands {
        let blocks = if block_ms.is_some() { 2 } else { 0 };
        let bytes: usize = self.streams.iter().map(|stream| stream.as_str().len() + 24).sum();
        let mut commands = Commands::with_capacity(160 + bytes);
        commands.begin(7 + blocks + self.streams.len() * 2);
        commands.arg("XREADGROUP");
        commands.arg("GROUP");
        commands.arg(self.group.as_str());
        commands.arg(self.consumer.as_str());
        commands.arg("COUNT");
        commands.arg_number(self.count as u64);
        if let Some(ms) = block_ms {
            commands.arg("BLOCK");
            commands.arg_number(ms);
        }
        commands.arg("STREAMS");
        self.streams.iter().for_each(|stream| commands.arg(stream.as_str()));
        self.streams.iter().for_each(|_| commands.arg(">"));
        commands
    }

    /// Creates a lost group again from the beginning.
    async fn recover(&self, client: &RedisClient, slot: u16, error: &ServerError) -> Result<bool> {
        if !error.is_no_group() {
            return Ok(false);
        }
        for stream in &self.streams {
            let commands = create_group(stream, &self.group, GroupStart::Beginning);
            let replies = client.call(slot, commands, Idempotency::Idempotent).await?;
            match replies.cursor().text() {
                Ok(_) => {}
                Err(ReplyError::Server(error)) if error.code() == "BUSYGROUP" => {}
                Err(error) => return Err(error.into_stream_error(stream)),
            }
        }
        Ok(true)
    }

    async fn to_error(&self, client: &RedisClient, slot: u16, error: ServerError) -> StreamError {
        let stream = failing_stream(client, slot, &self.streams, &error).await;
        ReplyError::Server(error).into_group_error(stream, &self.group)
    }
}

/// The stream that an error is about: the first whose key holds another type, or the first.
pub(super) async fn failing_stream<'a>(
    client: &RedisClient,
    slot: u16,
    streams: &'a [StreamName],
    error: &ServerError,
) -> &'a StreamName {
    let mut found = 0;
    if error.is_wrong_type() && streams.len() > 1 {
        let mut commands = Commands::new();
        streams.iter().for_each(|stream| commands.add(&["TYPE", stream.as_str()]));
        if let Ok(replies) = client.call(slot, commands, Idempotency::Idempotent).await {
            let mut cursor = replies.cursor();
            let wrong_type = |_: &_| !matches!(cursor.text(), Ok(b"stream" | b"none"));
            found = streams.iter().position(wrong_type).unwrap_or(0);
        }
    }
    &streams[found]
}

/// Groups items by the slot of their name, without duplicates.
pub(super) fn by_slot<T: Clone>(
    client: &RedisClient,
    all: &[T],
    name: impl Fn(&T) -> &str,
) -> Vec<(u16, Vec<T>)> {
    let mut seen = HashSet::new();
    let mut grouped: Vec<(u16, Vec<T>)> = Vec::new();
    for each in all {
        if all.len() > 1 && !seen.insert(name(each).to_owned()) {
            continue;
        }
        let slot = client.slot(name(each));
        match grouped.iter_mut().find(|(known, _)| *known == slot) {
            Some((_, group)) => group.push(each.clone()),
            None => grouped.push((slot, vec![each.clone()])),
        }
    }
    grouped
}

fn read_batches(
    completed: &CompletedRead<GroupRead>,
    batches: &mut Vec<StreamBatch<DeliveredEntry>>,
) -> Result<(), ReplyError> {
    let mut cursor = completed.replies.cursor();
    cursor.skip(completed.prefix_replies)?;
    // Streams come in the order of the command, so the search continues where it stopped.
    let mut requested = completed.read.streams.iter();
    for _ in 0..cursor.array()? {
        cursor.array_of(2)?;
        let name = cursor.text()?;
        let stream = requested
            .find(|stream| stream.as_str().as_bytes() == name)
            .ok_or_else(|| ReplyError::unexpected("entries of a stream that was not requested"))?;
        let count = cursor.array()?;
        let mut entries = Vec::with_capacity(count.min(COUNT_MAX));
        for _ in 0..count {
            let (id, fields) = cursor.entry()?;
            let fields =
                fields.ok_or_else(|| ReplyError::unexpected("new entry without fields"))?;
            entries.push(DeliveredEntry { id, fields, deliveries: 1 });
        }
        if !entries.is_empty() {
            batches.push(StreamBatch { stream: stream.clone(), entries });
        }
    }
    Ok(())
}

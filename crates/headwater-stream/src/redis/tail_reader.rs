//! Reads entries after given positions, without a consumer group (`XREAD`).

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::blocking_connection::ReadCommand;
use super::client::RedisClient;
use super::command::Commands;
use super::connection::Connection;
use super::error::{ReplyError, ServerError};
use super::group_reader::{by_slot, failing_stream};
use super::read_connections::{CompletedRead, ReadConnections};
use crate::entry::{Entry, EntryId};
use crate::error::{Result, StreamError};
use crate::name::StreamName;
use crate::streams::{StreamBatch, TailReader};
use crate::validate;

/// A reader with its own connections.
pub(super) struct RedisTailReader {
    connections: ReadConnections<TailRead>,
}

/// A read of entries after these positions, which share a slot.
#[derive(Clone, PartialEq)]
struct TailRead {
    positions: Vec<(StreamName, EntryId)>,
    count: usize,
}

impl RedisTailReader {
    pub(super) fn new(client: &Arc<RedisClient>) -> Self {
        Self { connections: ReadConnections::new(client) }
    }

    /// The completed reads as batches in the order of `positions`. Replies to earlier, different reads are dropped.
    fn batches(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
    ) -> Result<Vec<StreamBatch<Entry>>> {
        let mut batches: Vec<StreamBatch<Entry>> = Vec::new();
        for completed in self.connections.take_completed() {
            let wanted = completed.read.count == count
                && completed.read.positions.iter().all(|position| positions.contains(position));
            if wanted {
                read_batches(&completed, &mut batches)
                    .map_err(|error| error.into_stream_error("a read"))?;
            }
        }
        if batches.len() > 1 {
            let position =
                |batch: &StreamBatch<_>| positions.iter().position(|(s, _)| *s == batch.stream);
            batches.sort_by_key(position);
        }
        Ok(batches)
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
        let streams: Vec<StreamName> = positions.iter().map(|(stream, _)| stream.clone()).collect();
        validate::read(&streams, count, wait)?;
        let grouped = by_slot(self.connections.client(), positions, |(stream, _)| stream.as_str());
        let reads: Vec<(u16, TailRead)> = grouped
            .into_iter()
            .map(|(slot, positions)| (slot, TailRead { positions, count }))
            .collect();
        loop {
            self.connections.read(&reads, wait).await?;
            let completed = self.connections.has_completed();
            let batches = self.batches(positions, count)?;
            // Only replies to an earlier read arrived: read again.
            if batches.is_empty() && completed {
                continue;
            }
            return Ok(batches);
        }
    }
}

#[async_trait]
impl ReadCommand for TailRead {
    async fn on_connect(
        &self,
        _client: &RedisClient,
        _connection: &mut Connection,
        _deadline: Instant,
    ) -> Result<bool> {
        Ok(false)
    }

    fn command(&self, block_ms: Option<u64>) -> Commands {
        let blocks = if block_ms.is_some() { 2 } else { 0 };
        let mut commands = Commands::new();
        commands.begin(4 + blocks + self.positions.len() * 2);
        commands.arg("XREAD");
        commands.arg("COUNT");
        commands.arg_number(self.count as u64);
        if let Some(ms) = block_ms {
            commands.arg("BLOCK");
            commands.arg_number(ms);
        }
        commands.arg("STREAMS");
        self.positions.iter().for_each(|(stream, _)| commands.arg(stream.as_str()));
        self.positions.iter().for_each(|(_, id)| commands.arg_id(*id));
        commands
    }

    async fn recover(
        &self,
        _client: &RedisClient,
        _slot: u16,
        _refusal: &ServerError,
    ) -> Result<bool> {
        Ok(false)
    }

    async fn to_error(&self, client: &RedisClient, slot: u16, error: ServerError) -> StreamError {
        let streams: Vec<_> = self.positions.iter().map(|(stream, _)| stream.clone()).collect();
        let stream = failing_stream(client, slot, &streams, &error).await;
        ReplyError::Server(error).into_stream_error(stream)
    }
}

fn read_batches(
    completed: &CompletedRead<TailRead>,
    batches: &mut Vec<StreamBatch<Entry>>,
) -> Result<(), ReplyError> {
    let mut cursor = completed.replies.cursor();
    cursor.skip(completed.prefix_replies)?;
    let mut requested = completed.read.positions.iter();
    for _ in 0..cursor.array()? {
        cursor.array_of(2)?;
        let name = cursor.text()?;
        let (stream, _) = requested
            .find(|(stream, _)| stream.as_str().as_bytes() == name)
            .ok_or_else(|| ReplyError::unexpected("entries of a stream that was not requested"))?;
        let entries = (0..cursor.array()?)
            .map(|_| cursor.entry())
            .filter_map(|entry| match entry {
                Ok((id, Some(fields))) => Some(Ok(Entry { id, fields })),
                Ok((_, None)) => None,
                Err(error) => Some(Err(error)),
            })
            .collect::<Result<Vec<_>, _>>()?;
        if !entries.is_empty() {
            batches.push(StreamBatch { stream: stream.clone(), entries });
        }
    }
    Ok(())
}

//! Reads entries after given positions, for nobody in particular.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::command::Commands;
use super::connection::Connection;
use super::error::{Failure, Refusal};
use super::lane::Question;
use super::lanes::{Arrived, Lanes};
use super::reader::{by_slot, foreign_stream};
use super::servers::Servers;
use crate::check;
use crate::entry::{Entry, EntryId};
use crate::error::{Result, StreamError};
use crate::name::StreamName;
use crate::streams::{Batch, TailReader};

/// A reader with lanes of its own.
pub(super) struct RedisTailReader {
    lanes: Lanes<TailQuestion>,
}

/// Entries after these positions, which share a slot.
#[derive(Clone, PartialEq)]
struct TailQuestion {
    positions: Vec<(StreamName, EntryId)>,
    count: usize,
}

impl RedisTailReader {
    pub(super) fn new(servers: &Arc<Servers>) -> Self {
        Self { lanes: Lanes::new(servers) }
    }

    /// What has arrived, as batches in the order of `positions`. Answers to old questions are not wanted any more.
    fn batches(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
    ) -> Result<Vec<Batch<Entry>>> {
        let mut batches: Vec<Batch<Entry>> = Vec::new();
        for arrived in self.lanes.take() {
            let wanted = arrived.question.count == count
                && arrived.question.positions.iter().all(|position| positions.contains(position));
            if wanted {
                read_batches(&arrived, &mut batches).map_err(|failure| failure.about("a read"))?;
            }
        }
        if batches.len() > 1 {
            let place = |batch: &Batch<_>| positions.iter().position(|(s, _)| *s == batch.stream);
            batches.sort_by_key(place);
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
    ) -> Result<Vec<Batch<Entry>>> {
        let streams: Vec<StreamName> = positions.iter().map(|(stream, _)| stream.clone()).collect();
        check::read(&streams, count, wait)?;
        let grouped = by_slot(self.lanes.servers(), positions, |(stream, _)| stream.as_str());
        let questions: Vec<(u16, TailQuestion)> = grouped
            .into_iter()
            .map(|(slot, positions)| (slot, TailQuestion { positions, count }))
            .collect();
        loop {
            self.lanes.ask(&questions, wait).await?;
            let arrived = self.lanes.has_arrived();
            let batches = self.batches(positions, count)?;
            // Only answers to an old question came: ask anew.
            if batches.is_empty() && arrived {
                continue;
            }
            return Ok(batches);
        }
    }
}

#[async_trait]
impl Question for TailQuestion {
    async fn introduce(
        &self,
        _servers: &Servers,
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

    async fn mend(&self, _servers: &Servers, _slot: u16, _refusal: &Refusal) -> Result<bool> {
        Ok(false)
    }

    async fn refused(&self, servers: &Servers, slot: u16, refusal: Refusal) -> StreamError {
        let streams: Vec<_> = self.positions.iter().map(|(stream, _)| stream.clone()).collect();
        let stream = foreign_stream(servers, slot, &streams, &refusal).await;
        Failure::Refused(refusal).about(stream)
    }
}

fn read_batches(
    arrived: &Arrived<TailQuestion>,
    batches: &mut Vec<Batch<Entry>>,
) -> Result<(), Failure> {
    let mut cursor = arrived.replies.cursor();
    cursor.skip(arrived.skips)?;
    let mut asked = arrived.question.positions.iter();
    for _ in 0..cursor.array()? {
        cursor.array_of(2)?;
        let name = cursor.text()?;
        let (stream, _) = asked
            .find(|(stream, _)| stream.as_str().as_bytes() == name)
            .ok_or_else(|| Failure::shape("a stream that nobody asked for"))?;
        let entries = (0..cursor.array()?)
            .map(|_| cursor.entry())
            .filter_map(|entry| match entry {
                Ok((id, Some(fields))) => Some(Ok(Entry { id, fields })),
                Ok((_, None)) => None,
                Err(failure) => Some(Err(failure)),
            })
            .collect::<Result<Vec<_>, _>>()?;
        if !entries.is_empty() {
            batches.push(Batch { stream: stream.clone(), entries });
        }
    }
    Ok(())
}

//! Reads new entries for one consumer of a group.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::command::Commands;
use super::connection::Connection;
use super::error::{Failure, Refusal};
use super::lane::Question;
use super::lanes::{Arrived, Lanes};
use super::servers::{Effect, Servers};
use super::silence;
use super::streams::create_group;
use crate::check;
use crate::entry::Delivery;
use crate::error::{Result, StreamError};
use crate::limits::COUNT_MAX;
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{Batch, GroupReader, GroupStart};

/// A reader with lanes of its own.
pub(super) struct RedisGroupReader {
    group: GroupName,
    consumer: ConsumerName,
    lanes: Lanes<GroupQuestion>,
}

/// New entries of these streams, which share a slot.
#[derive(Clone, PartialEq)]
struct GroupQuestion {
    group: GroupName,
    consumer: ConsumerName,
    streams: Vec<StreamName>,
    count: usize,
}

impl RedisGroupReader {
    pub(super) fn new(servers: &Arc<Servers>, group: &GroupName, consumer: &ConsumerName) -> Self {
        Self { group: group.clone(), consumer: consumer.clone(), lanes: Lanes::new(servers) }
    }

    /// The streams as one question per slot.
    fn questions(&self, streams: &[StreamName], count: usize) -> Vec<(u16, GroupQuestion)> {
        let grouped = by_slot(self.lanes.servers(), streams, StreamName::as_str);
        let question = |streams: Vec<StreamName>| GroupQuestion {
            group: self.group.clone(),
            consumer: self.consumer.clone(),
            streams,
            count,
        };
        grouped.into_iter().map(|(slot, streams)| (slot, question(streams))).collect()
    }

    /// What has arrived, as batches in the order of `streams`.
    fn batches(&mut self, streams: &[StreamName]) -> Result<Vec<Batch<Delivery>>> {
        let mut batches = Vec::new();
        for arrived in self.lanes.take() {
            read_batches(&arrived, &mut batches).map_err(|failure| failure.about("a read"))?;
        }
        if batches.len() > 1 {
            let place = |batch: &Batch<_>| streams.iter().position(|s| *s == batch.stream);
            // Streams that are no longer asked for come last.
            batches.sort_by_key(|batch| place(batch).unwrap_or(usize::MAX));
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
    ) -> Result<Vec<Batch<Delivery>>> {
        check::read(streams, count, wait)?;
        let questions = self.questions(streams, count);
        self.lanes.ask(&questions, wait).await?;
        self.batches(streams)
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<Batch<Delivery>>> {
        self.lanes.close().await?;
        self.batches(&[])
    }
}

#[async_trait]
impl Question for GroupQuestion {
    async fn introduce(
        &self,
        servers: &Servers,
        connection: &mut Connection,
        deadline: Instant,
    ) -> Result<bool> {
        let who = (&self.group, &self.consumer);
        silence::introduce(servers, connection, &self.streams, who, deadline).await
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

    /// A group that is lost is created again from the beginning.
    async fn mend(&self, servers: &Servers, slot: u16, refusal: &Refusal) -> Result<bool> {
        if !refusal.is_no_group() {
            return Ok(false);
        }
        for stream in &self.streams {
            let commands = create_group(stream, &self.group, GroupStart::Beginning);
            let replies = servers.call(slot, commands, Effect::Repeatable).await?;
            match replies.cursor().text() {
                Ok(_) => {}
                Err(Failure::Refused(refusal)) if refusal.code() == "BUSYGROUP" => {}
                Err(failure) => return Err(failure.about(stream)),
            }
        }
        Ok(true)
    }

    async fn refused(&self, servers: &Servers, slot: u16, refusal: Refusal) -> StreamError {
        let stream = foreign_stream(servers, slot, &self.streams, &refusal).await;
        Failure::Refused(refusal).in_group(stream, &self.group)
    }
}

/// The stream that a refusal is about: the first that holds something else, or the first.
pub(super) async fn foreign_stream<'a>(
    servers: &Servers,
    slot: u16,
    streams: &'a [StreamName],
    refusal: &Refusal,
) -> &'a StreamName {
    let mut found = 0;
    if refusal.is_wrong_type() && streams.len() > 1 {
        let mut commands = Commands::new();
        streams.iter().for_each(|stream| commands.add(&["TYPE", stream.as_str()]));
        if let Ok(replies) = servers.call(slot, commands, Effect::Repeatable).await {
            let mut cursor = replies.cursor();
            let foreign = |_: &_| !matches!(cursor.text(), Ok(b"stream" | b"none"));
            found = streams.iter().position(foreign).unwrap_or(0);
        }
    }
    &streams[found]
}

/// Sorts what is to be read by slot; each thing once.
pub(super) fn by_slot<T: Clone>(
    servers: &Servers,
    all: &[T],
    name: impl Fn(&T) -> &str,
) -> Vec<(u16, Vec<T>)> {
    let mut seen = HashSet::new();
    let mut grouped: Vec<(u16, Vec<T>)> = Vec::new();
    for each in all {
        if all.len() > 1 && !seen.insert(name(each).to_owned()) {
            continue;
        }
        let slot = servers.slot(name(each));
        match grouped.iter_mut().find(|(known, _)| *known == slot) {
            Some((_, group)) => group.push(each.clone()),
            None => grouped.push((slot, vec![each.clone()])),
        }
    }
    grouped
}

fn read_batches(
    arrived: &Arrived<GroupQuestion>,
    batches: &mut Vec<Batch<Delivery>>,
) -> Result<(), Failure> {
    let mut cursor = arrived.replies.cursor();
    cursor.skip(arrived.skips)?;
    // Streams come in the order they were asked for, so the search goes on where it stopped.
    let mut asked = arrived.question.streams.iter();
    for _ in 0..cursor.array()? {
        cursor.array_of(2)?;
        let name = cursor.text()?;
        let stream = asked
            .find(|stream| stream.as_str().as_bytes() == name)
            .ok_or_else(|| Failure::shape("a stream that nobody asked for"))?;
        let count = cursor.array()?;
        let mut entries = Vec::with_capacity(count.min(COUNT_MAX));
        for _ in 0..count {
            let (id, fields) = cursor.entry()?;
            let fields = fields.ok_or_else(|| Failure::shape("a new entry without fields"))?;
            entries.push(Delivery { id, fields, deliveries: 1 });
        }
        if !entries.is_empty() {
            batches.push(Batch { stream: stream.clone(), entries });
        }
    }
    Ok(())
}

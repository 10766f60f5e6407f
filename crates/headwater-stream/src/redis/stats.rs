//! What there is to know of a stream, in one round trip where the server can tell.

use std::time::Duration;

use super::RedisBackend;
use super::command::Commands;
use super::error::Failure;
use super::foreign_name;
use super::reply::{Cursor, Replies, Value, parse_id};
use super::scripts;
use super::servers::Effect;
use crate::entry::EntryId;
use crate::error::Result;
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{ConsumerStats, GroupStats, Range, StreamStats, Streams};

/// Entries counted one by one where the server cannot tell how many a group has not read.
const COUNTED_MAX: u64 = 10_000;
/// Entries counted in one round trip.
const COUNTED_AT_ONCE: usize = 500;

impl RedisBackend {
    pub(super) async fn stream_stats(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        let commands = Commands::run(&scripts::STATS, &[stream], &[""; 0]);
        let replies = self.call(stream, commands, Effect::Repeatable).await?;
        let Some(mut stats) = read(&replies).map_err(|failure| failure.about(stream))? else {
            return Ok(None);
        };
        for index in 0..stats.groups.len() {
            let GroupStats { lag, last_delivered, .. } = stats.groups[index];
            // Servers err in their own count after deletes, so what the ends of the stream tell comes first.
            let lag = match (lag_by_ends(&stats, last_delivered), lag) {
                (Some(lag), _) => Some(lag),
                (None, Some(lag)) if lag < stats.length => Some(lag),
                _ => self.count_lag(stream, last_delivered).await?,
            };
            stats.groups[index].lag = lag;
        }
        Ok(Some(stats))
    }

    /// How many entries there are after `read_to`; `None` if they are too many to count.
    async fn count_lag(&self, stream: &StreamName, read_to: EntryId) -> Result<Option<u64>> {
        let mut counted = 0;
        let mut from = read_to.next();
        loop {
            let page = Range { from, ..Range::first(COUNTED_AT_ONCE) };
            let entries = self.range(stream, page).await?;
            counted += entries.len() as u64;
            match entries.last() {
                Some(last) if entries.len() == COUNTED_AT_ONCE => from = last.id.next(),
                _ => return Ok(Some(counted)),
            }
            if counted >= COUNTED_MAX {
                return Ok(None);
            }
        }
    }
}

/// How many entries a group has not read, if it has read none or all of them.
fn lag_by_ends(stats: &StreamStats, read_to: EntryId) -> Option<u64> {
    match (stats.first_id, stats.last_id) {
        (Some(first), _) if read_to < first => Some(stats.length),
        (_, Some(last)) if read_to < last => None,
        _ => Some(0),
    }
}

fn read(replies: &Replies) -> Result<Option<StreamStats>, Failure> {
    let mut cursor = replies.cursor();
    if cursor.array_or_nil()?.is_none() {
        return Ok(None);
    }
    let length = cursor.count()?;
    let (first_id, last_id) = (optional_id(&mut cursor)?, optional_id(&mut cursor)?);
    let last_generated_id = cursor.id()?;
    let entries_added = optional_count(&mut cursor)?;
    let max_deleted_id = optional_id(&mut cursor)?.filter(|id| *id > EntryId::MIN);
    let bytes = optional_count(&mut cursor)?;
    let mut groups =
        (0..cursor.array()?).map(|_| read_group(&mut cursor)).collect::<Result<Vec<_>, _>>()?;
    groups.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Some(StreamStats {
        length,
        first_id,
        last_id,
        last_generated_id,
        entries_added,
        max_deleted_id,
        bytes,
        groups,
    }))
}

fn read_group(cursor: &mut Cursor<'_>) -> Result<GroupStats, Failure> {
    cursor.array_of(5)?;
    let name = foreign_name(cursor.text()?, GroupName::new)?;
    let pending = cursor.count()?;
    let lag = optional_count(cursor)?;
    let last_delivered = cursor.id()?;
    let mut consumers = Vec::new();
    for _ in 0..cursor.array()? {
        cursor.array_of(3)?;
        consumers.push(ConsumerStats {
            name: foreign_name(cursor.text()?, ConsumerName::new)?,
            pending: cursor.count()?,
            idle: Duration::from_millis(cursor.count()?),
        });
    }
    consumers.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(GroupStats { name, pending, lag, last_delivered, consumers })
}

fn optional_id(cursor: &mut Cursor<'_>) -> Result<Option<EntryId>, Failure> {
    cursor
        .text_or_nil()?
        .map(|text| parse_id(text).ok_or_else(|| Failure::shape("an id that is none")))
        .transpose()
}

fn optional_count(cursor: &mut Cursor<'_>) -> Result<Option<u64>, Failure> {
    match cursor.value()? {
        Value::Nil => Ok(None),
        Value::Number(number) => Ok(u64::try_from(number).ok()),
        _ => Err(Failure::shape("no count")),
    }
}

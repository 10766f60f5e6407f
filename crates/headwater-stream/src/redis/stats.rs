//! Statistics of a stream, in one round trip where the server can report the lag.

use std::time::Duration;

use super::RedisBackend;
use super::command::Commands;
use super::error::ReplyError;
use super::reply::{Cursor, RespValue, parse_id};
use super::sanitized_name;
use super::scripts;
use crate::entry::EntryId;
use crate::error::Result;
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{ConsumerStats, GroupStats, Range, StreamStats, Streams};

/// Maximum number of entries that are counted to compute a lag the server cannot report.
const COUNTED_MAX: u64 = 10_000;
/// Entries counted per round trip.
const COUNT_BATCH: usize = 500;

impl RedisBackend {
    /// Statistics with what the server itself says about the lag.
    pub(super) async fn reported_stats(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        let commands = Commands::run(&scripts::STATS, &[self.key(stream)], &[""; 0]);
        self.call_idempotent(stream, commands, read).await
    }

    pub(super) async fn stream_stats(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        let Some(mut stats) = self.reported_stats(stream).await? else { return Ok(None) };
        for index in 0..stats.groups.len() {
            let GroupStats { lag, last_delivered, .. } = stats.groups[index];
            // The server's lag can be wrong after deletes, so the ends of the stream are checked first.
            let lag = match (lag_by_ends(&stats, last_delivered), lag) {
                (Some(lag), _) => Some(lag),
                (None, Some(lag)) if lag < stats.length => Some(lag),
                _ => self.count_lag(stream, last_delivered).await?,
            };
            stats.groups[index].lag = lag;
        }
        Ok(Some(stats))
    }

    /// Counts the entries after `read_to`; `None` if there are more than `COUNTED_MAX`.
    async fn count_lag(&self, stream: &StreamName, read_to: EntryId) -> Result<Option<u64>> {
        let mut counted = 0;
        let mut from = read_to.next();
        loop {
            let page = Range { from, ..Range::first(COUNT_BATCH) };
            let entries = self.range(stream, page).await?;
            counted += entries.len() as u64;
            match entries.last() {
                Some(last) if entries.len() == COUNT_BATCH => from = last.id.next(),
                _ => return Ok(Some(counted)),
            }
            if counted >= COUNTED_MAX {
                return Ok(None);
            }
        }
    }
}

/// The lag of a group that has read none or all of the entries; otherwise `None`.
fn lag_by_ends(stats: &StreamStats, read_to: EntryId) -> Option<u64> {
    match (stats.first_id, stats.last_id) {
        (Some(first), _) if read_to < first => Some(stats.length),
        (_, Some(last)) if read_to < last => None,
        _ => Some(0),
    }
}

fn read(cursor: &mut Cursor<'_>) -> Result<Option<StreamStats>, ReplyError> {
    if cursor.array_or_nil()?.is_none() {
        return Ok(None);
    }
    let length = cursor.count()?;
    let (first_id, last_id) = (optional_id(cursor)?, optional_id(cursor)?);
    let last_generated_id = cursor.id()?;
    let entries_added = optional_count(cursor)?;
    let max_deleted_id = optional_id(cursor)?.filter(|id| *id > EntryId::MIN);
    let bytes = optional_count(cursor)?;
    let mut groups = cursor.list(read_group)?;
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

fn read_group(cursor: &mut Cursor<'_>) -> Result<GroupStats, ReplyError> {
    cursor.array_of(5)?;
    let name = sanitized_name(cursor.text()?, GroupName::new)?;
    let pending = cursor.count()?;
    let lag = optional_count(cursor)?;
    let last_delivered = cursor.id()?;
    let mut consumers = cursor.list(|cursor| {
        cursor.array_of(3)?;
        Ok(ConsumerStats {
            name: sanitized_name(cursor.text()?, ConsumerName::new)?,
            pending: cursor.count()?,
            idle: Duration::from_millis(cursor.count()?),
        })
    })?;
    consumers.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(GroupStats { name, pending, lag, last_delivered, consumers })
}

fn optional_id(cursor: &mut Cursor<'_>) -> Result<Option<EntryId>, ReplyError> {
    cursor
        .text_or_nil()?
        .map(|text| parse_id(text).ok_or_else(|| ReplyError::unexpected("invalid entry id")))
        .transpose()
}

fn optional_count(cursor: &mut Cursor<'_>) -> Result<Option<u64>, ReplyError> {
    match cursor.value()? {
        RespValue::Nil => Ok(None),
        RespValue::Number(number) => Ok(u64::try_from(number).ok()),
        _ => Err(ReplyError::unexpected("expected a count")),
    }
}

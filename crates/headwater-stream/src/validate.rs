//! Argument checks that every backend makes before a call has any effect; one function per call.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::delays::{DueTime, ScheduleRequest};
use crate::entry::{EntryId, EntrySize, Fields};
use crate::error::{Result, StreamError};
use crate::leases::Fence;
use crate::limits::*;
use crate::name::StreamName;
use crate::registry::RegistryMap;
use crate::streams::{
    EntrySource, IdempotentEntry, ReclaimFrom, ReclaimRequest, Retention, SettleAction, SettleBatch,
};

/// Returns the total size of the entries.
pub(crate) fn append(entries: &dyn EntrySource, retention: &Retention) -> Result<EntrySize> {
    self::retention(retention)?;
    sizes_of("entries", (0..entries.len()).map(|at| entries.size(at)))
}

pub(crate) fn append_once(
    entries: &[IdempotentEntry],
    keep: Duration,
    retention: &Retention,
) -> Result<()> {
    sizes_of("entries", entries.iter().map(|entry| entry.fields.size()))?;
    entries.iter().try_for_each(|entry| idempotency_id("an entry's id", &entry.id))?;
    self::keep("keep", keep)?;
    self::retention(retention)
}

pub(crate) fn idempotency_ids(ids: &[&str]) -> Result<()> {
    at_most("ids", ids.len(), BATCH_MAX, "ids in one call")?;
    ids.iter().try_for_each(|id| idempotency_id("an entry's id", id))
}

pub(crate) fn retention(retention: &Retention) -> Result<()> {
    if retention.max_age.is_some_and(|age| age.is_zero()) {
        return Err(StreamError::invalid("max_age", "it is zero; omit it for no limit"));
    }
    if retention.max_bytes == Some(0) {
        return Err(StreamError::invalid("max_bytes", "it is zero; omit it for no limit"));
    }
    Ok(())
}

pub(crate) fn read(streams: &[StreamName], count: usize, wait: Duration) -> Result<()> {
    if streams.is_empty() {
        return Err(StreamError::invalid("streams", "the list is empty; give at least one"));
    }
    at_most("streams", streams.len(), READ_STREAMS_MAX, "streams in one read")?;
    self::count(count)?;
    self::wait(wait)
}

pub(crate) fn settle(settle: &SettleBatch<'_>) -> Result<()> {
    at_most("entries", settle.entries.len(), BATCH_MAX, "entries in one settle")?;
    let mut bytes = 0;
    let (mut streams, mut delay_sets) = (BTreeSet::new(), BTreeSet::new());
    for settlement in settle.entries {
        match &settlement.action {
            SettleAction::Ack | SettleAction::Delete | SettleAction::Release => {}
            SettleAction::Append { to, fields } => {
                streams.insert(to.as_str());
                bytes += follow_up(fields)?;
            }
            SettleAction::Reschedule { delays, due, fields, .. } => {
                delay_sets.insert(delays.as_str());
                self::due(*due)?;
                bytes += follow_up(fields)?;
            }
        }
    }
    // The first of them would create it, and the other one fail: half of the batch would be settled.
    if let Some(name) = streams.intersection(&delay_sets).next() {
        let problem = format!("`{name}` is named as a stream and as a delay set");
        return Err(StreamError::invalid("entries", problem));
    }
    at_most("entries", bytes, BATCH_BYTES_MAX, "bytes in one settle")
}

pub(crate) fn ids(ids: &[EntryId]) -> Result<()> {
    at_most("ids", ids.len(), COUNT_MAX, "entries in one call")
}

pub(crate) fn reclaim(reclaim: &ReclaimRequest<'_>) -> Result<()> {
    if let ReclaimFrom::Ids(list) = reclaim.from {
        ids(list)?;
    }
    count(reclaim.count)
}

pub(crate) fn count(count: usize) -> Result<()> {
    if count == 0 {
        return Err(StreamError::invalid("count", "it is 0; the minimum is 1"));
    }
    at_most("count", count, COUNT_MAX, "items in one call")
}

pub(crate) fn wait(wait: Duration) -> Result<()> {
    within("wait", wait, Duration::ZERO, WAIT_MAX)
}

pub(crate) fn schedule(items: &[ScheduleRequest]) -> Result<()> {
    items.iter().try_for_each(|item| due(item.due))?;
    sizes_of("items", items.iter().map(|item| item.fields.size())).map(|_| ())
}

pub(crate) fn lease_ttl(ttl: Duration) -> Result<()> {
    within("ttl", ttl, LEASE_TTL_MIN, LEASE_TTL_MAX)
}

pub(crate) fn leases(len: usize) -> Result<()> {
    at_most("leases", len, LEASES_MAX, "leases in one call")
}

pub(crate) fn renew(leases: &[Fence], ttl: Duration) -> Result<()> {
    self::leases(leases.len())?;
    lease_ttl(ttl)
}

pub(crate) fn members(members: &[&str], ttl: Option<Duration>) -> Result<()> {
    at_most("members", members.len(), BATCH_MAX, "members in one call")?;
    members.iter().try_for_each(|member| value("a member", member.as_bytes()))?;
    ttl.map_or(Ok(()), |ttl| keep("ttl", ttl))
}

pub(crate) fn map(fields: &RegistryMap) -> Result<()> {
    if fields.is_empty() {
        return Err(StreamError::invalid("fields", "the map is empty; give at least one field"));
    }
    at_most("fields", fields.len(), FIELDS_MAX, "fields in one map")?;
    fields.iter().try_for_each(|(name, bytes)| {
        value("a field name", name.as_bytes())?;
        value("a field", bytes)
    })
}

pub(crate) fn dedup<'a>(
    ids: impl ExactSizeIterator<Item = (&'a str, &'a [u8])>,
    keep_for: Option<Duration>,
) -> Result<()> {
    at_most("ids", ids.len(), BATCH_MAX, "ids in one call")?;
    for (id, bytes) in ids {
        idempotency_id("a de-duplication id", id)?;
        value("a de-duplication value", bytes)?;
    }
    keep_for.map_or(Ok(()), |duration| keep("the time to live", duration))
}

fn idempotency_id(what: &str, id: &str) -> Result<()> {
    if id.is_empty() {
        return Err(StreamError::invalid(what, "it is empty"));
    }
    at_most(what, id.len(), NAME_BYTES_MAX, "bytes")
}

fn keep(what: &str, duration: Duration) -> Result<()> {
    within(what, duration, Duration::from_millis(1), KEEP_MAX)
}

fn due(due: DueTime) -> Result<()> {
    match due {
        DueTime::After(delay) => within("the delay", delay, Duration::ZERO, DELAY_MAX),
        // Redis stores due times as 64-bit floating point numbers, which are exact up to 2^53.
        DueTime::At(at) if at.as_millis() > (1 << 53) => {
            Err(StreamError::invalid("the due time", format!("{at} ms is after the year 280 000")))
        }
        DueTime::At(_) => Ok(()),
    }
}

fn value(what: &str, bytes: &[u8]) -> Result<()> {
    at_most(what, bytes.len(), VALUE_BYTES_MAX, "bytes")
}

/// Checks the sizes of several entries and returns their total.
fn sizes_of(what: &str, all: impl ExactSizeIterator<Item = EntrySize>) -> Result<EntrySize> {
    at_most(what, all.len(), BATCH_MAX, "entries in one call")?;
    let mut total = EntrySize::default();
    for size in all {
        self::size(size)?;
        total.fields += size.fields;
        total.bytes += size.bytes;
    }
    at_most(what, total.bytes, BATCH_BYTES_MAX, "bytes in one call")?;
    Ok(total)
}

/// Checks a follow-up entry and returns its bytes. It has larger limits than an append, so that large entries of other programs
/// can be settled.
fn follow_up(fields: &Fields) -> Result<usize> {
    let EntrySize { fields, bytes } = fields.size();
    if fields == 0 {
        return Err(no_fields());
    }
    at_most("an entry", fields, FOLLOW_UP_FIELDS_MAX, "fields")?;
    at_most("an entry", bytes, FOLLOW_UP_BYTES_MAX, "bytes")?;
    Ok(bytes)
}

/// Checks the size of one entry.
fn size(EntrySize { fields, bytes }: EntrySize) -> Result<()> {
    if fields == 0 {
        return Err(no_fields());
    }
    at_most("an entry", fields, FIELDS_MAX, "fields")?;
    at_most("an entry", bytes, ENTRY_BYTES_MAX, "bytes")
}

fn no_fields() -> StreamError {
    StreamError::invalid("an entry", "it has no fields; give at least one")
}

fn within(what: &str, value: Duration, min: Duration, max: Duration) -> Result<()> {
    if value < min || value > max {
        let problem = format!("{value:?} is not between {min:?} and {max:?}");
        return Err(StreamError::invalid(what, problem));
    }
    Ok(())
}

fn at_most(what: &str, value: usize, max: usize, unit: &str) -> Result<()> {
    if value > max {
        return Err(StreamError::invalid(what, format!("{value} {unit}; the limit is {max}")));
    }
    Ok(())
}

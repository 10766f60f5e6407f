//! Appending and trimming, shared by append, settle and due delays.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;

use super::redo_record::RedoRecord;
use super::state::dedup_table::{DedupRecord, append_once_scope, dedup_footprint};
use super::state::entries::footprint;
use super::state::stream::StreamState;
use super::transaction::{ReadTx, Tx};
use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::name::StreamName;
use crate::streams::{AppendedEntry, IdempotentEntry, Retention, TrimGuard, TrimResult};

/// Appends entries and trims the stream to its retention.
pub(super) fn append(
    tx: &mut Tx<'_>,
    name: &StreamName,
    entries: &[Fields],
    retention: &Retention,
) -> Result<Vec<EntryId>> {
    append_with_extra(tx, name, entries, retention, 0)
}

/// Same as `append`, with capacity for `extra_bytes` more bytes.
fn append_with_extra(
    tx: &mut Tx<'_>,
    name: &StreamName,
    entries: &[Fields],
    retention: &Retention,
    extra_bytes: u64,
) -> Result<Vec<EntryId>> {
    let first = next_id(tx, name)?;
    let bytes = extra_bytes + entries.iter().map(footprint).sum::<u64>();
    trim_to_fit(tx, name, retention, entries.len(), bytes)?;
    tx.remove_expired(name.as_str());
    let (stream, entries) = (name.as_str(), Cow::Borrowed(entries));
    let ids =
        std::iter::successors(Some(first), |id| Some(id.next())).take(entries.len()).collect();
    tx.apply(&RedoRecord::Append { stream, first, entries });
    if *retention != Retention::KEEP_ALL {
        trim(tx, name, retention, TrimGuard::Safe)?;
    }
    Ok(ids)
}

/// Appends entries with unknown ids and records the ids.
pub(super) fn append_once(
    tx: &mut Tx<'_>,
    name: &StreamName,
    entries: &[IdempotentEntry],
    keep: Duration,
    retention: &Retention,
) -> Result<Vec<AppendedEntry>> {
    tx.state().stream(name.as_str(), tx.now)?;
    let scope = append_once_scope(name.as_str());
    // A known id maps to its entry id, a new one to its index in `new`.
    let mut new: Vec<&IdempotentEntry> = Vec::new();
    let mut positions: HashMap<&str, usize> = HashMap::new();
    let mut known = Vec::with_capacity(entries.len());
    for entry in entries {
        let record = tx.state().dedup.get(&scope, &entry.id, tx.now);
        known.push(record.map(decode_entry_id).transpose()?);
        if record.is_none() && !positions.contains_key(entry.id.as_str()) {
            positions.insert(&entry.id, new.len());
            new.push(entry);
        }
    }
    let mut ids = Vec::new();
    if !new.is_empty() {
        let fields: Vec<Fields> = new.iter().map(|entry| entry.fields.clone()).collect();
        let value = encode_entry_id(EntryId::MAX);
        let dedup_bytes =
            new.iter().map(|entry| dedup_footprint(&scope, &entry.id, Some(&value))).sum();
        ids = append_with_extra(tx, name, &fields, retention, dedup_bytes)?;
        let (at, until) = (tx.now, tx.now.after(keep));
        for (entry, id) in new.iter().zip(&ids) {
            let (scope, id, done) = (scope.as_str(), entry.id.as_str(), Some(encode_entry_id(*id)));
            tx.apply(&RedoRecord::SetDedup { scope, id, done, until, at });
        }
    }
    let mut first_of = vec![true; ids.len()];
    let to_appended = |(entry, known): (&IdempotentEntry, Option<EntryId>)| match known {
        Some(id) => AppendedEntry { id, duplicate: true },
        None => {
            let position = positions[entry.id.as_str()];
            let duplicate = !std::mem::replace(&mut first_of[position], false);
            AppendedEntry { id: ids[position], duplicate }
        }
    };
    Ok(entries.iter().zip(known).map(to_appended).collect())
}

/// The entry ids recorded for these ids.
pub(super) fn appended(
    tx: &ReadTx<'_>,
    name: &StreamName,
    ids: &[&str],
) -> Result<Vec<Option<EntryId>>> {
    let scope = append_once_scope(name.as_str());
    let find = |id: &&str| tx.state.dedup.get(&scope, id, tx.now).map(decode_entry_id).transpose();
    ids.iter().map(find).collect()
}

/// Value of a deduplication record: the entry id.
fn encode_entry_id(id: EntryId) -> Bytes {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&id.ms.to_be_bytes());
    bytes[8..].copy_from_slice(&id.seq.to_be_bytes());
    Bytes::copy_from_slice(&bytes)
}

fn decode_entry_id(record: &DedupRecord) -> Result<EntryId> {
    let bytes = record.done.as_deref().unwrap_or_default();
    let read = |bytes: &[u8]| Some(u64::from_be_bytes(bytes.try_into().ok()?));
    let id = bytes.split_at_checked(8).and_then(|(ms, seq)| Some((read(ms)?, read(seq)?)));
    let (ms, seq) = id.ok_or_else(|| StreamError::Protocol {
        problem: "a deduplication record contains no entry id".to_owned(),
    })?;
    Ok(EntryId::new(ms, seq))
}

/// The next entry id of a stream, which need not exist.
pub(super) fn next_id(tx: &Tx<'_>, name: &StreamName) -> Result<EntryId> {
    let stream = tx.state().stream(name.as_str(), tx.now)?;
    let last = stream.map_or(EntryId::MIN, |stream| stream.last_id);
    StreamState::next_id(last, tx.now).ok_or_else(|| StreamError::Full {
        problem: format!("stream `{name}` has no entry ids left"),
    })
}

/// Trims a stream exactly, if it exists.
pub(super) fn trim(
    tx: &mut Tx<'_>,
    name: &StreamName,
    retention: &Retention,
    guard: TrimGuard,
) -> Result<TrimResult> {
    let Some(stream) = tx.state().stream(name.as_str(), tx.now)? else {
        return Ok(TrimResult { removed: 0, held_back: false });
    };
    let plan = TrimPlan::new(stream, retention, guard, tx.now, IncomingEntries::default());
    let trimmed = TrimResult { removed: plan.removed(stream), held_back: plan.held_back };
    if trimmed.removed > 0 {
        tx.apply(&RedoRecord::Trim { stream: name.as_str(), before: plan.before });
    }
    Ok(trimmed)
}

/// If memory is short, removes entries outside the retention before the append. Fails without effect if that
/// does not free enough.
fn trim_to_fit(
    tx: &mut Tx<'_>,
    name: &StreamName,
    retention: &Retention,
    len: usize,
    bytes: u64,
) -> Result<()> {
    let Err(full) = tx.ensure_capacity(bytes) else { return Ok(()) };
    let Some(stream) = tx.state().stream(name.as_str(), tx.now)? else { return Err(full) };
    let coming = IncomingEntries { len: len as u64, bytes };
    let plan = TrimPlan::new(stream, retention, TrimGuard::Safe, tx.now, coming);
    let going = stream.entries.from(EntryId::MIN).take_while(|(id, _)| *id < plan.before);
    let freed = going.map(|(_, fields)| footprint(fields)).sum();
    tx.ensure_capacity(bytes.saturating_sub(freed)).map_err(|_| full)?;
    tx.apply(&RedoRecord::Trim { stream: name.as_str(), before: plan.before });
    Ok(())
}

/// Size of an append.
#[derive(Clone, Copy, Default)]
struct IncomingEntries {
    len: u64,
    bytes: u64,
}

struct TrimPlan {
    /// Entries before this id are removed.
    before: EntryId,
    held_back: bool,
}

impl TrimPlan {
    fn new(
        stream: &StreamState,
        retention: &Retention,
        guard: TrimGuard,
        now: Timestamp,
        coming: IncomingEntries,
    ) -> Self {
        let by_len = retention.max_len.map(|max| keep_len(stream, max, coming.len));
        let by_age = retention.max_age.map(|age| EntryId::new(now.before(age).as_millis(), 0));
        let by_bytes = retention.max_bytes.map(|max| keep_bytes(stream, max, coming.bytes));
        let wanted = by_len.max(by_age).max(by_bytes).unwrap_or(EntryId::MIN);
        let needed = match guard {
            TrimGuard::Safe => stream.needed_from(),
            TrimGuard::Force => None,
        };
        match needed {
            Some(needed) if needed < wanted => {
                let first_kept = stream.entries.from(needed).next();
                let held_back = first_kept.is_some_and(|(id, _)| *id < wanted);
                Self { before: needed, held_back }
            }
            _ => Self { before: wanted, held_back: false },
        }
    }

    fn removed(&self, stream: &StreamState) -> u64 {
        // Counts from the front because most trims remove few entries.
        stream.entries.from(EntryId::MIN).take_while(|(id, _)| *id < self.before).count() as u64
    }
}

fn keep_len(stream: &StreamState, max: u64, coming: u64) -> EntryId {
    let excess = (stream.entries.len() as u64 + coming).saturating_sub(max);
    if excess == 0 {
        return EntryId::MIN;
    }
    let index = usize::try_from(excess).unwrap_or(usize::MAX);
    stream.entries.nth_id(index).unwrap_or(EntryId::MAX)
}

fn keep_bytes(stream: &StreamState, max: u64, coming: u64) -> EntryId {
    let mut bytes = stream.entries.bytes() + coming;
    for (id, fields) in stream.entries.from(EntryId::MIN) {
        if bytes <= max {
            return *id;
        }
        bytes -= footprint(fields);
    }
    EntryId::MAX
}

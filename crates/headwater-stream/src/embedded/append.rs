//! Appending to a stream and trimming it: the part that append, settle and due delays share.

use std::borrow::Cow;

use super::change::Change;
use super::effect::Effect;
use super::state::entries::footprint;
use super::state::stream::Stream;
use crate::clock::Timestamp;
use crate::entry::{EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::name::StreamName;
use crate::streams::{Retention, TrimGuard, Trimmed};

/// Appends entries and trims what the retention no longer covers.
pub(super) fn append(
    change: &mut Change<'_>,
    name: &StreamName,
    entries: &[Fields],
    retention: &Retention,
) -> Result<Vec<EntryId>> {
    let first = next_id(change, name)?;
    let bytes = entries.iter().map(footprint).sum();
    make_room(change, name, retention, entries.len(), bytes)?;
    change.vacate(name.as_str());
    let (stream, entries) = (name.as_str(), Cow::Borrowed(entries));
    let ids =
        std::iter::successors(Some(first), |id| Some(id.next())).take(entries.len()).collect();
    change.apply(&Effect::Append { stream, first, entries });
    if *retention != Retention::KEEP_ALL {
        trim(change, name, retention, TrimGuard::Safe)?;
    }
    Ok(ids)
}

/// The id that the next entry of a stream gets, whether the stream exists or not.
pub(super) fn next_id(change: &Change<'_>, name: &StreamName) -> Result<EntryId> {
    let stream = change.state().stream(name.as_str(), change.now)?;
    let last = stream.map_or(EntryId::MIN, |stream| stream.last_id);
    Stream::next_id(last, change.now).ok_or_else(|| StreamError::Full {
        problem: format!("stream `{name}` has given out its last id"),
    })
}

/// Trims a stream that exists, exactly.
pub(super) fn trim(
    change: &mut Change<'_>,
    name: &StreamName,
    retention: &Retention,
    guard: TrimGuard,
) -> Result<Trimmed> {
    let Some(stream) = change.state().stream(name.as_str(), change.now)? else {
        return Ok(Trimmed { removed: 0, held_back: false });
    };
    let plan = Plan::new(stream, retention, guard, change.now, Coming::default());
    let trimmed = Trimmed { removed: plan.removed(stream), held_back: plan.held_back };
    if trimmed.removed > 0 {
        change.apply(&Effect::Trim { stream: name.as_str(), before: plan.before });
    }
    Ok(trimmed)
}

/// When the memory is short, removes what the retention will not cover any more, before anything is appended. Fails
/// without effect if that is not enough.
fn make_room(
    change: &mut Change<'_>,
    name: &StreamName,
    retention: &Retention,
    len: usize,
    bytes: u64,
) -> Result<()> {
    let Err(full) = change.room_for(bytes) else { return Ok(()) };
    let Some(stream) = change.state().stream(name.as_str(), change.now)? else { return Err(full) };
    let coming = Coming { len: len as u64, bytes };
    let plan = Plan::new(stream, retention, TrimGuard::Safe, change.now, coming);
    let going = stream.entries.from(EntryId::MIN).take_while(|(id, _)| *id < plan.before);
    let freed = going.map(|(_, fields)| footprint(fields)).sum();
    change.room_for(bytes.saturating_sub(freed)).map_err(|_| full)?;
    change.apply(&Effect::Trim { stream: name.as_str(), before: plan.before });
    Ok(())
}

/// What is about to be appended.
#[derive(Clone, Copy, Default)]
struct Coming {
    len: u64,
    bytes: u64,
}

/// What to trim.
struct Plan {
    /// All entries before this id go.
    before: EntryId,
    held_back: bool,
}

impl Plan {
    fn new(
        stream: &Stream,
        retention: &Retention,
        guard: TrimGuard,
        now: Timestamp,
        coming: Coming,
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

    fn removed(&self, stream: &Stream) -> u64 {
        // Counted from the front: most trims remove little.
        stream.entries.from(EntryId::MIN).take_while(|(id, _)| *id < self.before).count() as u64
    }
}

fn keep_len(stream: &Stream, max: u64, coming: u64) -> EntryId {
    let excess = (stream.entries.len() as u64 + coming).saturating_sub(max);
    if excess == 0 {
        return EntryId::MIN;
    }
    let index = usize::try_from(excess).unwrap_or(usize::MAX);
    stream.entries.nth_id(index).unwrap_or(EntryId::MAX)
}

fn keep_bytes(stream: &Stream, max: u64, coming: u64) -> EntryId {
    let mut bytes = stream.entries.bytes() + coming;
    for (id, fields) in stream.entries.from(EntryId::MIN) {
        if bytes <= max {
            return *id;
        }
        bytes -= footprint(fields);
    }
    EntryId::MAX
}

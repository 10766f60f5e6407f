//! Reads a session's stream page by page into a state, and detects gaps.
//!
//! Upstream: `recovery` and open sessions. Downstream: `state`.
//! Guarantees: every page starts with the last entry of the previous one. Streams are trimmed from the beginning only: as
//! long as that entry exists, nothing after it was trimmed. If it does not, the replay stops and reports a gap.

use headwater_stream::clock::Timestamp;
use headwater_stream::{Direction, Entry, EntryId, Fields, Range, StreamName};

use super::error::SessionError;
use super::meta;
use super::state::{self, DecodedEntry, SessionState};
use crate::error::DecodeError;
use crate::limits::{REPLAY_PAGE_BYTES, REPLAY_PAGE_MAX};
use crate::name::SessionId;
use crate::registry::EventRegistry;
use crate::session_backend::SessionBackend;
use crate::unknown_events::UnknownEvents;

/// Entries of the first page; later pages are sized by bytes.
const FIRST_PAGE: usize = 256;

/// Field of a copied entry: its original id.
pub(crate) const ORIGINAL_ENTRY_ID: &str = "original_entry_id";

/// How far to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayUntil {
    /// To the end.
    End,
    /// To this entry, which must exist.
    Entry(EntryId),
    /// To the last entry stored at or before this time, by the clock of the backend.
    Time(Timestamp),
}

/// Result of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplayOutcome {
    /// Complete.
    Done,
    /// The entry at the position is gone, and possibly others before this one (`MAX` if none remain).
    Gap(EntryId),
}

/// Pages of a stream, each starting with the last entry of the previous one.
pub(crate) struct ReplayPages<'a> {
    storage: &'a SessionBackend,
    stream: &'a StreamName,
    count: usize,
    /// Last entry when reading started. Without it, a reader might never reach the end of a stream that is being
    /// written.
    end: Option<EntryId>,
    is_at_end: bool,
}

/// The entries after a position.
pub(crate) enum ReplayPage {
    /// These entries; empty at the end.
    Entries(Vec<Entry>),
    Gap(EntryId),
}

impl<'a> ReplayPages<'a> {
    /// Reads the whole stream, or up to this existing entry.
    pub(crate) fn new(
        storage: &'a SessionBackend,
        stream: &'a StreamName,
        end: Option<EntryId>,
    ) -> Self {
        Self { storage, stream, count: FIRST_PAGE, end, is_at_end: false }
    }

    /// The entries after a position, up to and including `to`.
    pub(crate) async fn next(
        &mut self,
        after: EntryId,
        to: EntryId,
    ) -> Result<ReplayPage, SessionError> {
        let has_anchor = after != EntryId::MIN;
        let count = self.count + usize::from(has_anchor);
        let to = self.end.map_or(to, |end| end.min(to));
        // `to` must not be before the anchor, or the anchor would seem to be gone.
        let to = to.max(after);
        let range = Range { from: after, to, direction: Direction::Forward, count };
        let mut entries = self.storage.backend.range(self.stream, range).await?;
        self.find_end(&entries, count).await?;
        if has_anchor {
            if entries.first().is_none_or(|entry| entry.id != after) {
                return Ok(ReplayPage::Gap(entries.first().map_or(EntryId::MAX, |entry| entry.id)));
            }
            entries.remove(0);
        }
        let bytes: usize = entries.iter().map(|entry| entry.fields.bytes()).sum();
        if let Some(each) = bytes.checked_div(entries.len()) {
            self.count = (REPLAY_PAGE_BYTES / each.max(1)).clamp(1, REPLAY_PAGE_MAX);
        }
        Ok(ReplayPage::Entries(entries))
    }

    /// A page that is not full is the last one. After a full one, the end of the stream must be looked up.
    async fn find_end(&mut self, entries: &[Entry], count: usize) -> Result<(), SessionError> {
        self.is_at_end = entries.len() < count;
        if self.is_at_end {
            return Ok(());
        }
        if self.end.is_none() {
            let stats = self.storage.backend.stats(self.stream).await?;
            self.end = stats.and_then(|stats| stats.last_id);
        }
        self.is_at_end = entries.last().map(|entry| entry.id) >= self.end;
        Ok(())
    }

    /// Whether the last page reached the end.
    pub(crate) fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    /// The end of the stream, if it was looked up.
    pub(crate) fn end(&self) -> Option<EntryId> {
        self.end
    }
}

/// What to do with undecodable entries, besides counting them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parking {
    /// Nothing (read-only).
    No,
    /// Park those after this entry; earlier ones are parked already.
    After(EntryId),
}

/// Replays into a state, up to `end` if the caller knows the end of the stream. An empty state must start with
/// `first`, if that is known.
pub(crate) async fn replay(
    storage: &SessionBackend,
    registry: &EventRegistry,
    state: &mut SessionState,
    (first, end): (Option<EntryId>, Option<EntryId>),
    until: ReplayUntil,
    parking: Parking,
) -> Result<ReplayOutcome, SessionError> {
    let stream = storage.keys.session(&state.session);
    let mut pages = ReplayPages::new(storage, &stream, end);
    loop {
        let mut entries = match pages.next(state.position, until.last_id()).await? {
            ReplayPage::Gap(before) => return Ok(ReplayOutcome::Gap(before)),
            ReplayPage::Entries(entries) => entries,
        };
        if state.position == EntryId::MIN && !until.begins_with(first, &entries) {
            return Ok(ReplayOutcome::Gap(entries.first().map_or(EntryId::MAX, |entry| entry.id)));
        }
        let wanted = entries.iter().take_while(|entry| until.includes(entry)).count();
        let is_done = wanted < entries.len() || pages.is_at_end();
        entries.truncate(wanted);
        apply(storage, registry, state, &entries, parking).await?;
        if is_done {
            return Ok(ReplayOutcome::Done);
        }
    }
}

/// Applies entries to a state, after undecodable ones are parked.
pub(crate) async fn apply(
    storage: &SessionBackend,
    registry: &EventRegistry,
    state: &mut SessionState,
    entries: &[Entry],
    parking: Parking,
) -> Result<(), SessionError> {
    let stream = storage.keys.session(&state.session);
    let read = |entry| state::read(registry, &stream, entry);
    let read: Vec<DecodedEntry> = entries.iter().map(read).collect();
    if let Parking::After(after) = parking {
        let max = state.unreadable.parking_capacity();
        park(storage, &state.session, entries, &read, after, max).await?;
    }
    entries.iter().zip(read).try_for_each(|(entry, read)| state.apply_decoded(entry.id, read))
}

/// Parks the first `max` undecodable entries and records how far that went, so that it is not repeated.
pub(crate) async fn park(
    storage: &SessionBackend,
    session: &SessionId,
    entries: &[Entry],
    read: &[DecodedEntry],
    after: EntryId,
    max: usize,
) -> Result<(), SessionError> {
    let undecodable = entries.iter().zip(read).filter_map(|(entry, read)| match read {
        DecodedEntry::Undecodable { error, .. } => Some((entry, error)),
        _ => None,
    });
    let undecodable = undecodable.take(max).filter(|(entry, _)| entry.id > after);
    let undecodable: Vec<(&Entry, &DecodeError)> = undecodable.collect();
    let Some((last, _)) = undecodable.last() else { return Ok(()) };
    let backend = std::sync::Arc::clone(&storage.backend);
    let now = backend.now().await?;
    let parked = UnknownEvents { backend, stream: storage.keys.unknown() };
    let stream = storage.keys.session(session);
    for (entry, error) in &undecodable {
        parked.park(&stream, entry.id, &entry.fields, error, now).await?;
    }
    let through = meta::parked_through(last.id);
    storage.backend.map_update(&storage.keys.session_meta(session), None, &through).await?;
    Ok(())
}

impl ReplayUntil {
    /// The last entry id that can be included.
    pub(crate) fn last_id(self) -> EntryId {
        match self {
            Self::Entry(id) => id,
            // Copied entries keep their original time; their ids are later.
            Self::End | Self::Time(_) => EntryId::MAX,
        }
    }

    /// Whether a first page starts with the known first entry.
    pub(crate) fn begins_with(self, first: Option<EntryId>, page: &[Entry]) -> bool {
        match first {
            Some(first) if first <= self.last_id() => {
                page.first().is_some_and(|entry| entry.id == first)
            }
            _ => true,
        }
    }

    pub(crate) fn includes(self, entry: &Entry) -> bool {
        match self {
            Self::End => true,
            Self::Entry(id) => entry.id <= id,
            Self::Time(time) => stored_at(entry.id, &entry.fields) <= time,
        }
    }
}

/// The time at which an entry was originally stored.
pub(crate) fn stored_at(id: EntryId, fields: &Fields) -> Timestamp {
    Timestamp::from_millis(original_id(id, fields).ms)
}

/// The original id of an entry.
pub(crate) fn original_id(id: EntryId, fields: &Fields) -> EntryId {
    let text = fields.get(ORIGINAL_ENTRY_ID).and_then(|id| std::str::from_utf8(id).ok());
    text.and_then(|id| id.parse().ok()).unwrap_or(id)
}

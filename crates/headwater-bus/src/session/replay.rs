//! The replay: reads a session's stream page by page into a state, and notices when something is missing.
//!
//! Upstream: `session`, to recover or to catch up. Downstream: `state`.
//! Promises: every page begins with the last entry of the page before. Streams are trimmed from their beginning only: as
//! long as that entry is there, nothing after it is gone. If it is not, the replay stops and says so.

use headwater_stream::clock::Timestamp;
use headwater_stream::{Direction, Entry, EntryId, Fields, Range, StreamName};

use super::error::SessionError;
use super::state::SessionState;
use crate::journal::Journal;
use crate::limits::{REPLAY_PAGE_BYTES, REPLAY_PAGE_MAX};
use crate::parked::Parked;
use crate::registry::Registry;

/// Entries of the first page; later ones are as large as their bytes allow.
const FIRST_PAGE: usize = 256;

/// In a copied entry: the id it had when it was first stored.
pub(crate) const ORIGINAL_ENTRY_ID: &str = "original_entry_id";

/// How far to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// To the end.
    End,
    /// To this entry, which must be there.
    Entry(EntryId),
    /// To the last entry that was stored at this time or before, by the clock of the backend.
    Time(Timestamp),
}

/// How a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replayed {
    /// It came as far as it was to.
    Done,
    /// The entry it stood at is gone, and so may be others up to this one (`MAX` if there are none).
    Gap(EntryId),
}

/// Pages of a stream, each beginning with the last entry of the one before.
pub(crate) struct Pages<'a> {
    journal: &'a Journal,
    stream: &'a StreamName,
    count: usize,
    is_at_end: bool,
}

/// What follows a position.
pub(crate) enum Page {
    /// These entries; none at the end.
    Entries(Vec<Entry>),
    Gap(EntryId),
}

impl<'a> Pages<'a> {
    pub(crate) fn new(journal: &'a Journal, stream: &'a StreamName) -> Self {
        Self { journal, stream, count: FIRST_PAGE, is_at_end: false }
    }

    /// The entries after a position, `to` included.
    pub(crate) async fn next(&mut self, after: EntryId, to: EntryId) -> Result<Page, SessionError> {
        let has_witness = after != EntryId::MIN;
        let count = self.count + usize::from(has_witness);
        // `to` never lies before the witness, or a witness that is there would seem to be gone.
        let to = to.max(after);
        let range = Range { from: after, to, direction: Direction::Forward, count };
        let mut entries = self.journal.backend.range(self.stream, range).await?;
        self.is_at_end = entries.len() < count;
        if has_witness {
            if entries.first().is_none_or(|entry| entry.id != after) {
                return Ok(Page::Gap(entries.first().map_or(EntryId::MAX, |entry| entry.id)));
            }
            entries.remove(0);
        }
        let bytes: usize = entries.iter().map(|entry| entry.fields.bytes()).sum();
        if let Some(each) = bytes.checked_div(entries.len()) {
            self.count = (REPLAY_PAGE_BYTES / each.max(1)).clamp(1, REPLAY_PAGE_MAX);
        }
        Ok(Page::Entries(entries))
    }
}

impl Pages<'_> {
    /// Whether the last page went to the end, as it was then. Whoever reads on until a page is empty may never be done
    /// with a stream that others write to.
    pub(crate) fn is_at_end(&self) -> bool {
        self.is_at_end
    }
}

/// Brings a state forward. One that has seen nothing yet must begin with `first`, if that is known.
pub(crate) async fn replay(
    journal: &Journal,
    registry: &Registry,
    state: &mut SessionState,
    first: Option<EntryId>,
    until: Until,
) -> Result<Replayed, SessionError> {
    let stream = journal.keys.session(&state.session);
    let mut pages = Pages::new(journal, &stream);
    loop {
        let entries = match pages.next(state.position, until.last_id()).await? {
            Page::Gap(before) => return Ok(Replayed::Gap(before)),
            Page::Entries(entries) => entries,
        };
        if state.position == EntryId::MIN && !until.begins_with(first, &entries) {
            return Ok(Replayed::Gap(entries.first().map_or(EntryId::MAX, |entry| entry.id)));
        }
        for entry in &entries {
            if !until.includes(entry) {
                return Ok(Replayed::Done);
            }
            take(journal, registry, state, &stream, entry).await?;
        }
        if pages.is_at_end() {
            return Ok(Replayed::Done);
        }
    }
}

/// Takes one entry into a state, and parks what cannot be read.
pub(crate) async fn take(
    journal: &Journal,
    registry: &Registry,
    state: &mut SessionState,
    stream: &StreamName,
    entry: &Entry,
) -> Result<(), SessionError> {
    if let Some(misfit) = state.take(registry, stream, entry)?
        && state.unreadable.is_to_be_parked()
    {
        park(journal, stream, entry, &misfit).await?;
    }
    Ok(())
}

/// Parks an entry that cannot be read.
pub(crate) async fn park(
    journal: &Journal,
    stream: &StreamName,
    entry: &Entry,
    misfit: &crate::error::Misfit,
) -> Result<(), SessionError> {
    let backend = std::sync::Arc::clone(&journal.backend);
    let now = backend.now().await?;
    let parked = Parked { backend, stream: journal.keys.unknown() };
    Ok(parked.park(stream, entry.id, &entry.fields, misfit, now).await?)
}

impl Until {
    /// No entry after this one is wanted.
    pub(crate) fn last_id(self) -> EntryId {
        match self {
            Self::Entry(id) => id,
            // Copied entries keep the time they were first stored at; their ids are later.
            Self::End | Self::Time(_) => EntryId::MAX,
        }
    }

    /// Whether a first page is what it must be, if the first entry is known.
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

/// When an entry was first stored.
pub(crate) fn stored_at(id: EntryId, fields: &Fields) -> Timestamp {
    Timestamp::from_millis(original_id(id, fields).ms)
}

/// The id that an entry had when it was first stored.
pub(crate) fn original_id(id: EntryId, fields: &Fields) -> EntryId {
    let text = fields.get(ORIGINAL_ENTRY_ID).and_then(|id| std::str::from_utf8(id).ok());
    text.and_then(|id| id.parse().ok()).unwrap_or(id)
}

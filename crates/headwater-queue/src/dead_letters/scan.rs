//! Scans dead letters in batches and detects copies.

use std::collections::{HashSet, VecDeque};

use headwater_stream::limits::{BATCH_BYTES_MAX, ENTRY_BYTES_MAX};
use headwater_stream::{Direction, Entry, EntryId, Range};

use super::{DeadLetterFilter, DeadLetters};
use crate::dead_letter::DeadLetter;
use crate::error::Result;
use crate::limits::COPIES_WITHIN;
use crate::merge_pages::IdRange;

/// Dead letters fetched, replayed or purged per call; they fit into one call even at maximum size.
pub(super) const BATCH: usize = 24;

const _: () = assert!(BATCH * ENTRY_BYTES_MAX <= BATCH_BYTES_MAX);

/// A scan over the dead letters of a topic.
pub(super) struct DeadLetterScan<'a> {
    letters: &'a DeadLetters,
    filter: &'a DeadLetterFilter,
    direction: Direction,
    /// The id range still to be fetched; `None` at the end.
    rest: Option<IdRange>,
    fetched: VecDeque<Entry>,
    last_id: Option<EntryId>,
    scanned: usize,
    seen: RecentLetters,
}

/// One scanned dead letter.
pub(super) struct ScannedLetter {
    /// The dead letter, if it matches the filter.
    pub(super) matching: Option<DeadLetter>,
    /// Whether another copy of it was scanned shortly before.
    pub(super) is_copy: bool,
}

impl<'a> DeadLetterScan<'a> {
    pub(super) fn new(
        letters: &'a DeadLetters,
        filter: &'a DeadLetterFilter,
        range: IdRange,
        direction: Direction,
    ) -> Self {
        Self {
            letters,
            filter,
            direction,
            rest: Some(range),
            fetched: VecDeque::new(),
            last_id: None,
            scanned: 0,
            seen: RecentLetters::default(),
        }
    }

    /// Starts after `after`, where an earlier scan stopped, and restores its copy detection.
    pub(super) async fn resume_after(&mut self, after: EntryId) -> Result<()> {
        let Some(range) = self.rest else { return Ok(()) };
        let (before, back) = match self.direction {
            Direction::Forward => {
                (IdRange { to: after.min(range.to), ..range }, Direction::Backward)
            }
            Direction::Backward => {
                (IdRange { from: after.max(range.from), ..range }, Direction::Forward)
            }
        };
        let mut look_back = DeadLetterScan::new(self.letters, self.filter, before, back);
        let mut seen = Vec::new();
        while look_back.scanned < COPIES_WITHIN
            && let Some(found) = look_back.next_letter().await?
        {
            seen.extend(found.map(|letter| letter.identity()));
        }
        seen.into_iter().rev().for_each(|identity| {
            self.seen.is_copy(identity);
        });
        self.rest = range.after(after, self.direction);
        Ok(())
    }

    /// The next dead letter, whether it matches or not; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<ScannedLetter>> {
        let Some(matching) = self.next_letter().await? else { return Ok(None) };
        let is_copy = matching.as_ref().is_some_and(|letter| self.seen.is_copy(letter.identity()));
        Ok(Some(ScannedLetter { matching, is_copy }))
    }

    async fn next_letter(&mut self) -> Result<Option<Option<DeadLetter>>> {
        if self.fetched.is_empty()
            && let Some(IdRange { from, to }) = self.rest
        {
            let range = Range { from, to, direction: self.direction, count: BATCH };
            let backend = &self.letters.queue.inner.backend;
            self.fetched = backend.range(&self.letters.stream, range).await?.into();
            let last = self.fetched.back().filter(|_| self.fetched.len() == BATCH);
            self.rest = last.and_then(|last| IdRange { from, to }.after(last.id, self.direction));
        }
        let Some(entry) = self.fetched.pop_front() else { return Ok(None) };
        self.last_id = Some(entry.id);
        self.scanned += 1;
        let letter = DeadLetter::read(entry);
        Ok(Some(self.filter.matches(&letter).then_some(letter)))
    }

    pub(super) fn last_id(&self) -> Option<EntryId> {
        self.last_id
    }

    pub(super) fn scanned(&self) -> usize {
        self.scanned
    }

    pub(super) fn has_ended(&self) -> bool {
        self.rest.is_none() && self.fetched.is_empty()
    }
}

impl DeadLetterFilter {
    /// Whether a dead letter matches. The time range is checked by the id range of the scan.
    fn matches(&self, letter: &DeadLetter) -> bool {
        self.reason.as_ref().is_none_or(|reason| letter.reason.contains(reason.as_str()))
            && self.key.as_ref().is_none_or(|key| letter.key.as_ref() == Some(key))
            && self.partition.is_none_or(|partition| letter.partition == Some(partition))
    }
}

/// Identities of the last scanned dead letters.
#[derive(Default)]
struct RecentLetters {
    order: VecDeque<String>,
    identities: HashSet<String>,
}

impl RecentLetters {
    /// Records an identity; returns whether it was already present.
    fn is_copy(&mut self, identity: String) -> bool {
        if !self.identities.insert(identity.clone()) {
            return true;
        }
        self.order.push_back(identity);
        if self.order.len() > COPIES_WITHIN
            && let Some(oldest) = self.order.pop_front()
        {
            self.identities.remove(&oldest);
        }
        false
    }
}

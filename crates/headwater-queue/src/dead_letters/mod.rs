//! Dead-letter administration: browse, show, replay, purge; replay in batches (`batches`) and its outcomes (`outcomes`).
//!
//! Upstream: command line and HTTP interface. Downstream: the dead letters of a topic, one stream for all partitions.
//! Guarantees: copies of one dead letter are shown once and replayed once; every entry of the stream is shown, also
//! malformed ones; memory is bounded by a page. Not here: writing dead letters (see `consumer`).

mod batches;
mod outcomes;
mod purge;
mod replay;
mod scan;

use std::collections::BTreeMap;
use std::sync::Arc;

use headwater_stream::clock::Timestamp;
use headwater_stream::{Direction, EntryId, Range, StreamName};

use self::scan::DeadLetterScan;
use crate::dead_letter::DeadLetter;
use crate::error::{QueueError, Result};
use crate::inspect::select_partitions;
use crate::keys;
use crate::limits::{COPIES_WITHIN, LETTERS_MAX, PAGE_BYTES_MAX, SCANNED_MAX};
use crate::merge_pages::IdRange;
use crate::pagination::{CursorScope, PAGE_DEFAULT, Page, check_limit};
use crate::queue::Queue;
use crate::topic::{Partition, Topic};

pub use batches::{CandidatePage, ReplayCandidate, ReplayOrder, ReplayReadiness};
pub use outcomes::{ReplayOutcomes, ReplayedLetter, ReplayedLetterOutcome};
pub use purge::{PurgeConfig, PurgeReport};
pub use replay::{ReplayConfig, ReplayRefusal, ReplayReport};

/// The dead letters of one topic.
#[derive(Clone, Debug)]
pub struct DeadLetters {
    queue: Queue,
    topic: Arc<Topic>,
    stream: StreamName,
}

/// Selects dead letters. Default: all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeadLetterFilter {
    /// Only those whose reason contains this text.
    pub reason: Option<String>,
    /// Only those with this key.
    pub key: Option<String>,
    /// Only those of this partition.
    pub partition: Option<Partition>,
    /// Only those that failed at this time or later.
    pub from: Option<Timestamp>,
    /// Only those that failed at this time or earlier.
    pub to: Option<Timestamp>,
}

/// A query for a page of dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterQuery {
    /// Which dead letters. Default: all.
    pub filter: DeadLetterFilter,
    /// The order. Default: oldest first.
    pub direction: Direction,
    /// Page size. Default: 100, limit: 1000. A page has fewer if the letters are large or few match.
    pub limit: usize,
    /// `next` of the previous page.
    pub cursor: Option<String>,
}

impl Default for DeadLetterQuery {
    fn default() -> Self {
        Self {
            filter: DeadLetterFilter::default(),
            direction: Direction::Forward,
            limit: PAGE_DEFAULT,
            cursor: None,
        }
    }
}

/// A state of the dead letters of a topic: while the revision is the same, so are the dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadLettersRevision {
    // Adding one raises the newest id for ever; removing one lowers the number, and only adding raises it again.
    length: u64,
    newest: EntryId,
}

/// The dead letters to replay or purge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeadLetterSelection {
    /// These and their copies; at most 100.
    Ids(Vec<EntryId>),
    /// All that match and exist when the operation starts.
    Matching(DeadLetterFilter),
}

impl Queue {
    /// The dead letters of a topic.
    pub async fn dead_letters(&self, topic: &str) -> Result<DeadLetters> {
        let topic = self.existing_topic(topic).await?;
        Ok(DeadLetters { queue: self.clone(), stream: keys::dead_letters(&topic), topic })
    }
}

impl DeadLetters {
    /// Lists a page of dead letters.
    pub async fn browse(&self, query: &DeadLetterQuery) -> Result<Page<DeadLetter>> {
        check_limit(query.limit)?;
        let range = self.range(&query.filter)?;
        let scope = CursorScope::new(
            "dead letters",
            &[self.topic.name.as_str(), &format!("{:?} {:?}", query.filter, query.direction)],
        );
        let after = scope.position(query.cursor.as_deref())?.map(|(id, _)| id);
        let mut scan = DeadLetterScan::new(self, &query.filter, range, query.direction);
        if let Some(after) = after {
            scan.resume_after(after).await?;
        }
        let (mut items, mut bytes) = (Vec::new(), 0);
        while items.len() < query.limit
            && bytes < PAGE_BYTES_MAX
            && scan.scanned() < SCANNED_MAX
            && let Some(found) = scan.next().await?
        {
            if let Some(letter) = found.matching.filter(|_| !found.is_copy) {
                bytes += letter.fields.bytes();
                items.push(letter);
            }
        }
        let position = scan.last_id().filter(|_| !scan.has_ended());
        Ok(Page { items, next: position.map(|id| scope.cursor((id, 0))) })
    }

    /// The current revision, without reading a dead letter. Read it before the dead letters, so that a change in between is
    /// noticed the next time.
    pub async fn revision(&self) -> Result<DeadLettersRevision> {
        let stats = self.queue.inner.backend.stats_without_lag(&self.stream).await?;
        let (length, newest) =
            stats.map_or((0, EntryId::MIN), |stats| (stats.length, stats.last_generated_id));
        Ok(DeadLettersRevision { length, newest })
    }

    /// Returns one dead letter, or [`QueueError::NoDeadLetter`].
    pub async fn show(&self, id: EntryId) -> Result<DeadLetter> {
        let range = Range { from: id, to: id, ..Range::first(1) };
        let found = self.queue.inner.backend.range(&self.stream, range).await?;
        let entry = found.into_iter().next().ok_or_else(|| QueueError::NoDeadLetter {
            topic: self.topic.name.to_string(),
            id: id.to_string(),
        })?;
        Ok(DeadLetter::read(entry))
    }

    /// The id range of a filter; an error if the filter is invalid.
    fn range(&self, filter: &DeadLetterFilter) -> Result<IdRange> {
        select_partitions(&self.topic, filter.partition)?;
        let range = IdRange {
            from: filter.from.map_or(EntryId::MIN, |at| EntryId::new(at.as_millis(), 0)),
            to: filter.to.map_or(EntryId::MAX, |at| EntryId::new(at.as_millis(), u64::MAX)),
        };
        if range.from > range.to {
            let problem = "it ends before it starts; swap `from` and `to`";
            return Err(QueueError::invalid("a time range", problem));
        }
        Ok(range)
    }

    /// The dead letters with these ids and their copies, oldest first; an error if one does not exist.
    async fn named(&self, ids: &[EntryId]) -> Result<Vec<DeadLetter>> {
        if !(1..=LETTERS_MAX).contains(&ids.len()) {
            let problem = format!("{}; pass 1 to {LETTERS_MAX} ids", ids.len());
            return Err(QueueError::invalid("the number of dead letters", problem));
        }
        let mut ids = ids.to_vec();
        ids.sort();
        ids.dedup();
        let mut letters = BTreeMap::new();
        for id in ids {
            letters.insert(id, self.show(id).await?);
        }
        let named: Vec<DeadLetter> = letters.values().cloned().collect();
        for letter in named {
            self.add_copies(&letter, &mut letters).await?;
        }
        Ok(letters.into_values().collect())
    }

    async fn add_copies(
        &self,
        letter: &DeadLetter,
        letters: &mut BTreeMap<EntryId, DeadLetter>,
    ) -> Result<()> {
        let (identity, all) = (letter.identity(), DeadLetterFilter::default());
        for direction in [Direction::Backward, Direction::Forward] {
            let Some(range) = IdRange::ALL.after(letter.id, direction) else { continue };
            let mut scan = DeadLetterScan::new(self, &all, range, direction);
            while scan.scanned() < COPIES_WITHIN
                && let Some(found) = scan.next().await?
            {
                let copy = found.matching.filter(|found| found.identity() == identity);
                letters.extend(copy.map(|copy| (copy.id, copy)));
            }
        }
        Ok(())
    }

    /// The id range of a filter, limited to the entries that exist now.
    async fn range_until_now(&self, filter: &DeadLetterFilter) -> Result<IdRange> {
        let range = self.range(filter)?;
        let stats = self.queue.inner.backend.stats_without_lag(&self.stream).await?;
        let newest = stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN);
        Ok(IdRange { to: range.to.min(newest), ..range })
    }
}

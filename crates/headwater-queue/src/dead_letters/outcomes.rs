//! Outcomes of replayed dead letters: settled by their group, failed again, or still open.
//!
//! Upstream: the replay plans of the server, about once a second. Downstream: the backend, which is only read.
//!
//! How: a replayed message carries the id of its dead letter (`replayedFrom`), and so do its retries and the dead letter
//! that it becomes. At any time it is in one of four places, and it moves from one to the next in one step: not delivered
//! or pending in the stream, in the delay set, again in the stream under a newer id, or gone from them. The places are
//! read in this order, so that a message that moves meanwhile is found in a later one; the dead letters are read last.
//!
//! Guarantees: exact while groups are neither reset nor deleted, Redis loses no data, and dead letters are not deleted
//! within a second. Estimates: a message without a group (of another program) is settled when every group has
//! acknowledged its newest entry; in a partition with more than 10,000 delayed messages a retry may be
//! taken for settled. Costs: the entries that were appended to the partitions of open messages are read once.

use std::collections::{BTreeMap, HashMap, HashSet};

use headwater_stream::{
    Direction, EntryId, Fields, GroupName, PendingDeliveryQuery, Range, StreamError, StreamName,
    StreamStats,
};
use std::time::Duration;

use super::scan::{BATCH, DeadLetterScan};
use super::{DeadLetterFilter, DeadLetters};
use crate::error::Result;
use crate::keys;
use crate::merge_pages::IdRange;
use crate::message::{self, REPLAYED_FROM};
use crate::pagination::previous;
use crate::topic::Partition;

/// Delayed messages of a partition that are searched for retries, earliest first.
const DELAYED_SCANNED_MAX: usize = 10_000;

/// Entries of a partition and dead letters that one call reads; a call that does not reach the end decides nothing.
const SCANNED_PER_CALL: usize = 20_000;

/// Entries of one read: few while they may be large.
const PAGE_OF_LARGE: usize = BATCH;
const PAGE_OF_SMALL: usize = 256;

/// Mean bytes up to which entries are small.
const SMALL_BYTES: usize = 4096;

/// Pending and delayed entries of one read.
const PENDING_PAGE: usize = 256;
const DELAYED_PAGE: usize = 100;

/// A replayed dead letter whose outcome is awaited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayedLetter {
    /// The dead letter.
    pub letter: EntryId,
    /// The partition of its message.
    pub partition: Partition,
    /// The entry of its message; `None` while it is being sent.
    pub entry: Option<EntryId>,
    /// The group that it is for; `None` for all.
    pub group: Option<String>,
}

/// Outcome of a replayed dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayedLetterOutcome {
    /// Its group has handled it.
    Settled,
    /// It became a dead letter again.
    FailedAgain {
        /// The new dead letter.
        letter: EntryId,
        /// Its reason.
        reason: String,
    },
}

/// How far the streams of a topic have been read for outcomes. A new value reads them again from the start.
#[derive(Debug)]
pub struct ReplayOutcomes {
    /// Position in the dead letters.
    letters: EntryId,
    /// Position in each partition.
    partitions: HashMap<Partition, EntryId>,
    /// The newest entry of each open message.
    newest: HashMap<EntryId, EntryId>,
    /// Those that failed again.
    failed: HashMap<EntryId, ReplayedLetterOutcome>,
}

impl ReplayOutcomes {
    /// Looks for dead letters after `after`: the newest one before anything was replayed.
    pub fn new(after: EntryId) -> Self {
        let (partitions, newest, failed) = Default::default();
        Self { letters: after, partitions, newest, failed }
    }

    fn current(&self, (letter, entry): (EntryId, EntryId)) -> EntryId {
        self.newest.get(&letter).map_or(entry, |newest| entry.max(*newest))
    }

    fn note(&mut self, letter: EntryId, entry: EntryId) {
        let newest = self.newest.entry(letter).or_insert(entry);
        *newest = entry.max(*newest);
    }
}

impl DeadLetters {
    /// The outcomes that are known now, by dead letter. Those that are not included are still open. `open` has to contain
    /// every dead letter that is being sent, too. After an error, call it again: nothing is forgotten.
    pub async fn outcomes(
        &self,
        seen: &mut ReplayOutcomes,
        open: &[ReplayedLetter],
    ) -> Result<Vec<(EntryId, ReplayedLetterOutcome)>> {
        let known: HashSet<EntryId> = open.iter().map(|one| one.letter).collect();
        seen.newest.retain(|letter, _| known.contains(letter));
        seen.failed.retain(|letter, _| known.contains(letter));
        let mut by_partition: BTreeMap<Partition, Vec<(&ReplayedLetter, EntryId)>> =
            BTreeMap::new();
        for one in open.iter().filter(|one| one.partition < self.topic.partitions) {
            if let Some(entry) = one.entry {
                by_partition.entry(one.partition).or_default().push((one, entry));
            }
        }
        seen.partitions.retain(|partition, _| by_partition.contains_key(partition));
        let mut gone = HashSet::new();
        for (partition, open) in by_partition {
            gone.extend(self.gone(seen, partition, &open, &known).await?);
        }
        let is_complete = self.find_failed(seen, &known).await?;
        let mut outcomes = Vec::new();
        for one in open.iter().filter(|one| one.entry.is_some()) {
            if let Some(failed) = seen.failed.get(&one.letter) {
                outcomes.push((one.letter, failed.clone()));
            } else if is_complete && gone.contains(&one.letter) {
                outcomes.push((one.letter, ReplayedLetterOutcome::Settled));
            }
        }
        Ok(outcomes)
    }

    /// The messages that are neither in the stream nor in the delay set: they are settled or dead letters.
    async fn gone(
        &self,
        seen: &mut ReplayOutcomes,
        partition: Partition,
        open: &[(&ReplayedLetter, EntryId)],
        known: &HashSet<EntryId>,
    ) -> Result<HashSet<EntryId>> {
        let stream = keys::stream(&self.topic, partition);
        let stats = self.queue.inner.backend.stats(&stream).await?;
        let currents: Vec<EntryId> =
            open.iter().map(|(one, entry)| seen.current((one.letter, *entry))).collect();
        let mut acknowledged = Vec::new();
        let mut pending: HashMap<GroupName, HashSet<EntryId>> = HashMap::new();
        for ((one, _), current) in open.iter().zip(&currents) {
            let Some(groups) = delivered_to(stats.as_ref(), one, *current) else { continue };
            let mut is_pending = false;
            for group in groups {
                if !pending.contains_key(&group) {
                    let found = self.pending_among(&stream, &group, &currents).await?;
                    pending.insert(group.clone(), found);
                }
                is_pending |= pending.get(&group).is_some_and(|found| found.contains(current));
            }
            if !is_pending {
                acknowledged.push((one.letter, *current));
            }
        }
        if acknowledged.is_empty() {
            return Ok(HashSet::new());
        }
        let delayed = self.delayed_among(partition, known).await?;
        // Messages that were retried and are in the stream again have a newer entry.
        let first = open.iter().map(|(_, entry)| *entry).min().unwrap_or(EntryId::MIN);
        let mut position = *seen.partitions.entry(partition).or_insert(first);
        let mut scan = StreamScan { left: SCANNED_PER_CALL, count: PAGE_OF_LARGE };
        while let Some(entries) = self.next_page(&stream, position, &mut scan).await? {
            for (entry, fields) in entries {
                position = entry;
                if let Some(letter) = replayed_from(&fields).filter(|from| known.contains(from)) {
                    seen.note(letter, entry);
                }
            }
            seen.partitions.insert(partition, position);
        }
        let is_complete = scan.left > 0;
        let is_gone = |(letter, current): &(EntryId, EntryId)| {
            let newer = seen.newest.get(letter).is_some_and(|newest| newest > current);
            is_complete && !newer && !delayed.contains(letter)
        };
        Ok(acknowledged.into_iter().filter(is_gone).map(|(letter, _)| letter).collect())
    }

    /// The entries after `position`; `None` at the end, or if the call has read enough.
    async fn next_page(
        &self,
        stream: &StreamName,
        position: EntryId,
        scan: &mut StreamScan,
    ) -> Result<Option<Vec<(EntryId, Fields)>>> {
        let Some(range) = IdRange::ALL.after(position, Direction::Forward) else { return Ok(None) };
        if scan.left == 0 {
            return Ok(None);
        }
        let count = scan.count.min(scan.left);
        let range = Range { from: range.from, to: range.to, direction: Direction::Forward, count };
        let entries = self.queue.inner.backend.range(stream, range).await?;
        if entries.is_empty() {
            return Ok(None);
        }
        let bytes: usize = entries.iter().map(|entry| entry.fields.bytes()).sum();
        scan.count =
            if bytes / entries.len() <= SMALL_BYTES { PAGE_OF_SMALL } else { PAGE_OF_LARGE };
        scan.left -= entries.len();
        Ok(Some(entries.into_iter().map(|entry| (entry.id, entry.fields)).collect()))
    }

    /// Which of these entries are pending for a group.
    async fn pending_among(
        &self,
        stream: &StreamName,
        group: &GroupName,
        entries: &[EntryId],
    ) -> Result<HashSet<EntryId>> {
        let (Some(first), Some(last)) = (entries.iter().min(), entries.iter().max()) else {
            return Ok(HashSet::new());
        };
        let (mut found, mut after) = (HashSet::new(), previous(*first));
        loop {
            let query = PendingDeliveryQuery {
                stream,
                group,
                consumer: None,
                min_idle: Duration::ZERO,
                after,
                count: PENDING_PAGE,
            };
            let page = match self.queue.inner.backend.pending(query).await {
                Ok(page) => page,
                // Deleted just now: every entry counts as pending until the next call.
                Err(StreamError::NoGroup { .. }) => return Ok(entries.iter().copied().collect()),
                Err(error) => return Err(error.into()),
            };
            let (is_last, newest) = (page.len() < PENDING_PAGE, page.last().map(|one| one.id));
            found.extend(page.into_iter().map(|one| one.id));
            if is_last || newest.is_none_or(|newest| newest >= *last) {
                return Ok(found);
            }
            after = newest;
        }
    }

    /// Which of these letters have a retry in the delay set.
    async fn delayed_among(
        &self,
        partition: Partition,
        letters: &HashSet<EntryId>,
    ) -> Result<HashSet<EntryId>> {
        let (backend, delays) = (&self.queue.inner.backend, keys::delays(&self.topic, partition));
        // From the last to the first, because entries that become due move the others towards the start; what leaves the
        // set so is in the stream. Overlapping, because new ones move the others towards the end.
        let waiting = backend.delay_stats(&delays).await?.waiting;
        let waiting = usize::try_from(waiting).unwrap_or(usize::MAX).min(DELAYED_SCANNED_MAX);
        let mut found = HashSet::new();
        for offset in (0..waiting).step_by(DELAYED_PAGE / 2).rev() {
            let entries = backend.delayed(&delays, offset, DELAYED_PAGE).await?;
            let from = entries.iter().filter_map(|one| replayed_from(&one.fields));
            found.extend(from.filter(|letter| letters.contains(letter)));
        }
        Ok(found)
    }

    /// Finds the letters that became dead letters again. Returns whether the end was reached.
    async fn find_failed(
        &self,
        seen: &mut ReplayOutcomes,
        known: &HashSet<EntryId>,
    ) -> Result<bool> {
        let all = DeadLetterFilter::default();
        let Some(range) = IdRange::ALL.after(seen.letters, Direction::Forward) else {
            return Ok(true);
        };
        let mut scan = DeadLetterScan::new(self, &all, range, Direction::Forward);
        while scan.scanned() < SCANNED_PER_CALL
            && let Some(found) = scan.next().await?
        {
            let Some(letter) = found.matching else { continue };
            if let Some(from) = letter.replayed_from.filter(|from| known.contains(from)) {
                let outcome =
                    ReplayedLetterOutcome::FailedAgain { letter: letter.id, reason: letter.reason };
                seen.failed.insert(from, outcome);
            }
            seen.letters = letter.id;
        }
        Ok(scan.has_ended())
    }
}

/// How much of a stream a call may still read.
struct StreamScan {
    left: usize,
    count: usize,
}

fn replayed_from(fields: &Fields) -> Option<EntryId> {
    fields.get(REPLAYED_FROM).and_then(message::read_id)
}

/// The groups that must have handled it, if it was delivered to all of them; else `None`.
fn delivered_to(
    stats: Option<&StreamStats>,
    one: &ReplayedLetter,
    current: EntryId,
) -> Option<Vec<GroupName>> {
    let groups = stats?
        .groups
        .iter()
        .filter(|group| one.group.as_ref().is_none_or(|name| group.name.as_str() == name));
    let groups: Vec<_> = groups.collect();
    let is_delivered =
        !groups.is_empty() && groups.iter().all(|group| group.last_delivered >= current);
    is_delivered.then(|| groups.into_iter().map(|group| group.name.clone()).collect())
}

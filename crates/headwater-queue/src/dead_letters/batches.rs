//! Replay in batches that the caller chooses and records before they are sent, for replay plans.
//!
//! Upstream: the replay plans of the server. Downstream: the partitions of the topic.
//! Guarantees: a batch that was recorded can be sent any number of times, by any process, within the week for which a
//! replay is remembered: each message is appended once, and the answer is the same. Not here: the outcome of a message
//! afterwards (see `outcomes`).

use std::collections::BTreeMap;

use bytes::Bytes;
use headwater_stream::limits::{ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{Direction, EntryId, IdempotentEntry, Range};

use super::replay::{REMEMBERED, replay_id};
use super::scan::{BATCH, DeadLetterScan};
use super::{DeadLetterFilter, DeadLetters};
use crate::dead_letter::DeadLetter;
use crate::error::{QueueError, Result};
use crate::keys;
use crate::merge_pages::IdRange;
use crate::message::{PAYLOAD, replace_bytes};
use crate::topic::Partition;

/// Dead letters that one call of [`DeadLetters::candidates`] scans.
const CANDIDATES_SCANNED_MAX: usize = 1000;

/// A dead letter that a replay may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayCandidate {
    /// The dead letter.
    pub letter: DeadLetter,
    /// Whether it can be replayed.
    pub readiness: ReplayReadiness,
}

/// Whether a dead letter can be replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayReadiness {
    /// It can, to this partition.
    Ready(Partition),
    /// It is a copy, or was replayed before: its message was sent and only the letter is left.
    Replayed,
    /// It cannot or must not be replayed, for this reason.
    Refused(String),
}

/// A page of candidates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidatePage {
    /// Those that match, oldest first.
    pub items: Vec<ReplayCandidate>,
    /// The last dead letter that was scanned, matching or not; `None` if there was none.
    pub last: Option<EntryId>,
    /// Whether the end of the range was reached.
    pub has_ended: bool,
}

/// A dead letter to send again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayOrder {
    /// The dead letter.
    pub letter: EntryId,
    /// Its partition.
    pub partition: Partition,
    /// Its [`DeadLetter::identity`].
    pub identity: String,
}

impl DeadLetters {
    /// The id of the newest dead letter, existing or deleted; `None` if there never was one.
    pub async fn last_id(&self) -> Result<Option<EntryId>> {
        let stats = self.queue.inner.backend.stats(&self.stream).await?;
        Ok(stats.and_then(|stats| stats.last_id))
    }

    /// Dead letters after `after` and up to `to`, oldest first: at most `limit` that match, and at most 1000 scanned.
    pub async fn candidates(
        &self,
        filter: &DeadLetterFilter,
        (after, to): (EntryId, EntryId),
        limit: usize,
        max_replays: u32,
    ) -> Result<CandidatePage> {
        let mut page = CandidatePage { items: Vec::new(), last: None, has_ended: true };
        let within = self.range(filter)?;
        let rest = IdRange { from: EntryId::MIN, to }.after(after, Direction::Forward);
        let Some(rest) = rest else { return Ok(page) };
        let range = IdRange { from: rest.from.max(within.from), to: rest.to.min(within.to) };
        if range.from > range.to {
            return Ok(page);
        }
        let mut scan = DeadLetterScan::new(self, filter, range, Direction::Forward);
        while page.items.len() < limit
            && scan.scanned() < CANDIDATES_SCANNED_MAX
            && let Some(found) = scan.next().await?
        {
            let Some(letter) = found.matching else { continue };
            let readiness = match self.prepare(&letter, max_replays) {
                Err(problem) => ReplayReadiness::Refused(problem),
                Ok(_) if found.is_copy => ReplayReadiness::Replayed,
                Ok((partition, _)) => ReplayReadiness::Ready(partition),
            };
            page.items.push(ReplayCandidate { letter, readiness });
        }
        (page.last, page.has_ended) = (scan.last_id(), scan.has_ended());
        self.find_replayed(&mut page.items).await?;
        Ok(page)
    }

    /// Marks the candidates whose message was sent before.
    async fn find_replayed(&self, items: &mut [ReplayCandidate]) -> Result<()> {
        let mut by_partition: BTreeMap<Partition, Vec<&mut ReplayCandidate>> = BTreeMap::new();
        for item in items {
            if let ReplayReadiness::Ready(partition) = item.readiness {
                by_partition.entry(partition).or_default().push(item);
            }
        }
        for (partition, items) in by_partition {
            let ids: Vec<String> =
                items.iter().map(|item| replay_id(&item.letter.identity())).collect();
            let found = self.appended(partition, &ids).await?;
            for (item, _) in items.into_iter().zip(found).filter(|(_, found)| found.is_some()) {
                item.readiness = ReplayReadiness::Replayed;
            }
        }
        Ok(())
    }

    async fn appended(&self, partition: Partition, ids: &[String]) -> Result<Vec<Option<EntryId>>> {
        let stream = keys::stream(&self.topic, partition);
        let mut found = Vec::new();
        for ids in ids.chunks(BATCH) {
            let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
            found.extend(self.queue.inner.backend.appended(&stream, &ids).await?);
        }
        Ok(found)
    }

    /// Where the messages of these dead letters are, in order; `None` for those that were not sent within the last week.
    pub async fn replayed_entries(&self, orders: &[ReplayOrder]) -> Result<Vec<Option<EntryId>>> {
        let mut entries = Vec::new();
        for order in orders {
            let ids = [replay_id(&order.identity)];
            entries.push(self.appended(order.partition, &ids).await?.pop().flatten());
        }
        Ok(entries)
    }

    /// Sends dead letters again and deletes them. Returns where their messages are, in order; `None` for those that are
    /// gone and were not sent, and for those whose partition does not exist. Idempotent.
    pub async fn send_again(&self, orders: &[ReplayOrder]) -> Result<Vec<Option<EntryId>>> {
        let mut entries = vec![None; orders.len()];
        for (entries, orders) in entries.chunks_mut(BATCH).zip(orders.chunks(BATCH)) {
            let mut by_partition: BTreeMap<Partition, Vec<(usize, EntryId, IdempotentEntry)>> =
                BTreeMap::new();
            for (at, order) in orders.iter().enumerate() {
                match self.find_letter(order.letter).await? {
                    Some(letter) => {
                        if let Ok((partition, fields)) = self.prepare(&letter, u32::MAX) {
                            let id = replay_id(&letter.identity());
                            let once = IdempotentEntry { id, fields };
                            by_partition.entry(partition).or_default().push((at, letter.id, once));
                        }
                    }
                    None => {
                        entries[at] = self
                            .replayed_entries(std::slice::from_ref(order))
                            .await?
                            .pop()
                            .flatten();
                    }
                }
            }
            for (partition, batch) in by_partition {
                let once: Vec<IdempotentEntry> =
                    batch.iter().map(|(_, _, once)| once.clone()).collect();
                let letters: Vec<EntryId> = batch.iter().map(|(_, letter, _)| *letter).collect();
                let appended = self.append_and_delete(partition, &once, &letters).await?;
                for ((at, _, _), entry) in batch.iter().zip(appended) {
                    entries[*at] = Some(entry);
                }
            }
        }
        Ok(entries)
    }

    /// Sends one dead letter again with another payload, and deletes it. Returns where its message is, and whether this
    /// call sent it; if not, it had been replayed before, and nothing was sent.
    pub async fn replay_edited(&self, id: EntryId, payload: Bytes) -> Result<(EntryId, bool)> {
        let letter = self.show(id).await?;
        let refused = |problem: String| {
            QueueError::invalid(format!("the replay of dead letter `{id}`"), problem)
        };
        let (partition, fields) = self.prepare(&letter, u32::MAX).map_err(refused)?;
        let fields = replace_bytes(&fields, PAYLOAD, payload);
        if fields.len() > FIELDS_MAX || fields.bytes() > ENTRY_BYTES_MAX {
            return Err(refused("it exceeds the size limit of an entry".to_owned()));
        }
        let replay_id = replay_id(&letter.identity());
        let known = self.appended(partition, std::slice::from_ref(&replay_id)).await?.pop();
        let once = IdempotentEntry { id: replay_id, fields };
        let sent = self.append_and_delete(partition, &[once], &[id]).await?;
        Ok((sent[0], known.flatten().is_none()))
    }

    /// Deletes dead letters whose messages were sent before.
    pub async fn delete_replayed(&self, ids: &[EntryId]) -> Result<()> {
        for ids in ids.chunks(BATCH) {
            self.queue.inner.backend.delete_entries(&self.stream, ids).await?;
        }
        Ok(())
    }

    async fn append_and_delete(
        &self,
        partition: Partition,
        once: &[IdempotentEntry],
        letters: &[EntryId],
    ) -> Result<Vec<EntryId>> {
        let backend = &self.queue.inner.backend;
        let (stream, retention) =
            (keys::stream(&self.topic, partition), &self.topic.policies.retention);
        let appended = backend.append_once(&stream, once, REMEMBERED, retention).await?;
        // Append first, delete second: a crash in between leaves a letter whose replay has no effect.
        backend.delete_entries(&self.stream, letters).await?;
        Ok(appended.into_iter().map(|one| one.id).collect())
    }

    async fn find_letter(&self, id: EntryId) -> Result<Option<DeadLetter>> {
        let range = Range { from: id, to: id, ..Range::first(1) };
        let found = self.queue.inner.backend.range(&self.stream, range).await?;
        Ok(found.into_iter().next().map(DeadLetter::read))
    }
}

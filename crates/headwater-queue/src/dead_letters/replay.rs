//! Replay: sends dead letters again as messages, to their original partition.
//!
//! Guarantees: partition, key, headers and payload are unchanged. The message is appended before the dead letter is
//! deleted, and the append is idempotent for a week, so a replay can be repeated after a crash. A message that was
//! replayed too often is refused.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use headwater_stream::limits::{ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{Direction, EntryId, Fields, IdempotentEntry};
use tokio::time::Instant;
use tracing::info;

use super::scan::{BATCH, DeadLetterScan};
use super::{DeadLetterSelection, DeadLetters};
use crate::dead_letter::DeadLetter;
use crate::error::{QueueError, Result};
use crate::keys;
use crate::topic::Partition;

/// How long a replay is remembered for deduplication.
pub(crate) const REMEMBERED: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The deduplication id of the replay of a dead letter. The prefix separates it from those of producers.
pub(super) fn replay_id(identity: &str) -> String {
    format!("~replay:{identity}")
}

/// Refusals listed in a report.
const REFUSALS_MAX: usize = 100;

/// Options of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayConfig {
    /// Report what would happen without changing anything.
    pub dry_run: bool,
    /// Maximum messages per second. Default: unlimited.
    pub per_second: Option<NonZeroU32>,
    /// Messages replayed this many times are refused. Default: 3.
    pub max_replays: u32,
    /// Maximum messages replayed by this call. Default: all.
    pub limit: Option<u64>,
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self { dry_run: false, per_second: None, max_replays: 3, limit: None }
    }
}

/// The result of a replay or its dry run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplayReport {
    /// Messages sent again.
    pub replayed: u64,
    /// Dead letters whose message was already sent by an earlier replay or through a copy; only the letter is deleted.
    pub already_replayed: u64,
    /// Dead letters that were kept because they cannot or must not be replayed.
    pub refused: u64,
    /// The first refused ones, with the reason.
    pub refusals: Vec<ReplayRefusal>,
    /// Whether it was done; `false` after a dry run.
    pub is_done: bool,
}

/// A dead letter that is not replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayRefusal {
    /// The dead letter.
    pub id: EntryId,
    /// Why it was refused.
    pub problem: String,
}

impl DeadLetters {
    /// Sends messages again and deletes their dead letters, oldest first.
    ///
    /// With ids, fails without effect if one of them does not exist or is refused. With a filter, refused ones are kept
    /// and counted. After a backend error, repeat the call.
    pub async fn replay(
        &self,
        letters: DeadLetterSelection,
        config: &ReplayConfig,
    ) -> Result<ReplayReport> {
        self.replay_with_progress(letters, config, &|_| ()).await
    }

    /// Like [`Self::replay`]; calls `on_progress` after each batch.
    pub async fn replay_with_progress(
        &self,
        letters: DeadLetterSelection,
        config: &ReplayConfig,
        on_progress: &(dyn Fn(&ReplayReport) + Send + Sync),
    ) -> Result<ReplayReport> {
        if config.limit == Some(0) {
            return Err(QueueError::invalid("limit", "0; at least 1"));
        }
        let mut replay = Replay {
            letters: self,
            config,
            report: ReplayReport { is_done: !config.dry_run, ..Default::default() },
            rate: ReplayRate { started: Instant::now(), per_second: config.per_second },
        };
        match letters {
            DeadLetterSelection::Ids(ids) => replay.named(&ids).await?,
            DeadLetterSelection::Matching(filter) => {
                // Messages that fail again meanwhile are not included.
                let range = self.range_until_now(&filter).await?;
                let mut scan = DeadLetterScan::new(self, &filter, range, Direction::Forward);
                while !scan.has_ended() && replay.batch_size() > 0 {
                    let mut batch = Vec::new();
                    while batch.len() < replay.batch_size()
                        && let Some(found) = scan.next().await?
                    {
                        batch.extend(found.matching.map(|letter| (letter, found.is_copy)));
                    }
                    replay.run(batch).await?;
                    on_progress(&replay.report);
                }
            }
        }
        let report = replay.report;
        info!(
            topic = %self.topic.name,
            replayed = report.replayed,
            refused = report.refused,
            dry_run = config.dry_run,
            "dead letters replayed"
        );
        Ok(report)
    }

    /// The partition and fields to replay it with, or the reason for refusing it.
    pub(super) fn prepare(
        &self,
        letter: &DeadLetter,
        max_replays: u32,
    ) -> std::result::Result<(Partition, Fields), String> {
        let topic = &self.topic;
        let Some(partition) = letter.partition else {
            return Err("it has no partition, so this program did not write it".to_owned());
        };
        if partition >= topic.partitions {
            let last = topic.partitions - 1;
            return Err(format!("its partition is {partition}; the topic has 0 to {last}"));
        }
        if let Some(of) = letter.original_topic.as_ref().filter(|of| *of != topic.name.as_str()) {
            return Err(format!("it belongs to topic `{of}`"));
        }
        if letter.replays >= max_replays {
            return Err(format!("it has already been replayed {} times", letter.replays));
        }
        let fields = letter.to_replay();
        if fields.len() > FIELDS_MAX || fields.bytes() > ENTRY_BYTES_MAX {
            return Err("it exceeds the size limit of an entry".to_owned());
        }
        Ok((partition, fields))
    }
}

/// A replay in progress.
struct Replay<'a> {
    letters: &'a DeadLetters,
    config: &'a ReplayConfig,
    report: ReplayReport,
    rate: ReplayRate,
}

/// A dead letter that can be replayed.
struct PreparedReplay {
    id: EntryId,
    once: IdempotentEntry,
    is_copy: bool,
}

impl Replay<'_> {
    /// How many letters may be replayed next.
    fn batch_size(&self) -> usize {
        let left =
            self.config.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.report.replayed));
        usize::try_from(left).unwrap_or(usize::MAX).min(self.rate.batch_size())
    }

    async fn named(&mut self, ids: &[EntryId]) -> Result<()> {
        let named = self.letters.named(ids).await?;
        for letter in &named {
            if let Err(problem) = self.letters.prepare(letter, self.config.max_replays) {
                let what = format!("the replay of dead letter `{}`", letter.id);
                return Err(QueueError::invalid(what, problem));
            }
        }
        let mut seen = HashSet::new();
        let mut named: VecDeque<(DeadLetter, bool)> = named
            .into_iter()
            .map(|letter| {
                let is_new = seen.insert(letter.identity());
                (letter, !is_new)
            })
            .collect();
        while !named.is_empty() && self.batch_size() > 0 {
            let count = self.batch_size().min(named.len());
            self.run(named.drain(..count).collect()).await?;
        }
        Ok(())
    }

    async fn run(&mut self, letters: Vec<(DeadLetter, bool)>) -> Result<()> {
        let mut by_partition: BTreeMap<Partition, Vec<PreparedReplay>> = BTreeMap::new();
        for (letter, is_copy) in letters {
            match self.letters.prepare(&letter, self.config.max_replays) {
                Ok((partition, fields)) => {
                    let once = IdempotentEntry { id: replay_id(&letter.identity()), fields };
                    by_partition.entry(partition).or_default().push(PreparedReplay {
                        id: letter.id,
                        once,
                        is_copy,
                    });
                }
                Err(problem) => {
                    self.report.refused += 1;
                    if self.report.refusals.len() < REFUSALS_MAX {
                        self.report.refusals.push(ReplayRefusal { id: letter.id, problem });
                    }
                }
            }
        }
        for (partition, prepared) in by_partition {
            if self.config.dry_run {
                self.check(partition, &prepared).await?;
            } else {
                self.send(partition, prepared).await?;
            }
        }
        Ok(())
    }

    async fn check(&mut self, partition: Partition, prepared: &[PreparedReplay]) -> Result<()> {
        let stream = keys::stream(&self.letters.topic, partition);
        let ids: Vec<&str> = prepared.iter().map(|one| one.once.id.as_str()).collect();
        let appended = self.letters.queue.inner.backend.appended(&stream, &ids).await?;
        for (one, appended) in prepared.iter().zip(appended) {
            if appended.is_some() || one.is_copy {
                self.report.already_replayed += 1;
            } else {
                self.report.replayed += 1;
            }
        }
        Ok(())
    }

    async fn send(&mut self, partition: Partition, prepared: Vec<PreparedReplay>) -> Result<()> {
        let DeadLetters { queue, topic, stream: letters, .. } = self.letters;
        let backend = &queue.inner.backend;
        let (ids, once): (Vec<EntryId>, Vec<IdempotentEntry>) =
            prepared.into_iter().map(|one| (one.id, one.once)).unzip();
        let stream = keys::stream(topic, partition);
        self.rate.wait(self.report.replayed).await;
        let appended =
            backend.append_once(&stream, &once, REMEMBERED, &topic.policies.retention).await?;
        // Append first, delete second: a crash in between leaves a letter whose replay has no effect.
        backend.delete_entries(letters, &ids).await?;
        let known = appended.iter().filter(|one| one.duplicate).count() as u64;
        self.report.already_replayed += known;
        self.report.replayed += appended.len() as u64 - known;
        Ok(())
    }
}

/// Limits the rate of a replay.
struct ReplayRate {
    started: Instant,
    per_second: Option<NonZeroU32>,
}

impl ReplayRate {
    /// Messages per batch: at most a tenth of a second's worth.
    fn batch_size(&self) -> usize {
        let tenth = self.per_second.map_or(BATCH, |rate| rate.get() as usize / 10);
        tenth.clamp(1, BATCH)
    }

    /// Waits until `sent` messages are within the rate.
    async fn wait(&self, sent: u64) {
        if let Some(rate) = self.per_second {
            let due = Duration::from_secs_f64(sent as f64 / f64::from(rate.get()));
            tokio::time::sleep_until(self.started + due).await;
        }
    }
}

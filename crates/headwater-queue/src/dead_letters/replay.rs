//! Replay: dead letters become messages again, in the partition they came from.
//!
//! Promises: partition, key, headers and payload stay as they were; the message is appended before the dead letter goes,
//! and once however often the replay is repeated (within a week), so a crash in between does no harm; a message
//! that was replayed often already is refused, because it would only fail again.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use headwater_stream::limits::{ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{Direction, EntryId, Fields, Once};
use tokio::time::Instant;
use tracing::info;

use super::scan::{BATCH, DeadLetterScan};
use super::{DeadLetterSelection, DeadLetters};
use crate::dead_letter::DeadLetter;
use crate::error::{QueueError, Result};
use crate::keys;
use crate::topic::Partition;

/// How long a replay is remembered, so that repeating it does nothing.
pub(crate) const REMEMBERED: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Refusals that a report names one by one.
const REFUSALS_MAX: usize = 100;

/// How to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayConfig {
    /// Only says what would happen.
    pub dry_run: bool,
    /// Messages per second, at most. Default: as fast as it goes.
    pub per_second: Option<NonZeroU32>,
    /// A message that was replayed this often is refused. Default: 3.
    pub max_replays: u32,
    /// Messages in this call, at most; further dead letters stay. Default: all.
    pub limit: Option<u64>,
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self { dry_run: false, per_second: None, max_replays: 3, limit: None }
    }
}

/// What a replay did, or would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplayReport {
    /// Messages that were sent again.
    pub replayed: u64,
    /// Dead letters whose message was sent again before, by an earlier replay or as a copy: only the letter goes.
    pub already_replayed: u64,
    /// Dead letters that stay because they cannot or must not be replayed.
    pub refused: u64,
    /// The first of them, and why.
    pub refusals: Vec<ReplayRefusal>,
    /// Whether it was done; `false` after a dry run.
    pub is_done: bool,
}

/// A dead letter that is not replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayRefusal {
    /// The dead letter.
    pub id: EntryId,
    /// Why it stays.
    pub problem: String,
}

impl DeadLetters {
    /// Sends messages again and removes their dead letters, oldest first.
    ///
    /// Named ones are replayed all or not at all: if one is not there or refused, that is the error. Of matching ones,
    /// those that are refused stay and are counted. After an error of the backend: repeat it.
    pub async fn replay(
        &self,
        letters: DeadLetterSelection,
        config: &ReplayConfig,
    ) -> Result<ReplayReport> {
        self.replay_with_progress(letters, config, &|_| ()).await
    }

    /// The same, and tells how far it is whenever some more are done.
    pub async fn replay_with_progress(
        &self,
        letters: DeadLetterSelection,
        config: &ReplayConfig,
        on_progress: &(dyn Fn(&ReplayReport) + Send + Sync),
    ) -> Result<ReplayReport> {
        if config.limit == Some(0) {
            return Err(QueueError::invalid("limit", "it is 0; ask for at least 1"));
        }
        let mut replay = Replay {
            letters: self,
            config,
            report: ReplayReport { is_done: !config.dry_run, ..Default::default() },
            pace: ReplayRate { started: Instant::now(), per_second: config.per_second },
        };
        match letters {
            DeadLetterSelection::Ids(ids) => replay.named(&ids).await?,
            DeadLetterSelection::Matching(filter) => {
                // What fails again meanwhile is left for the next time.
                let range = self.range_until_now(&filter).await?;
                let mut scan = DeadLetterScan::new(self, &filter, range, Direction::Forward);
                while !scan.has_ended() && replay.room() > 0 {
                    let mut batch = Vec::new();
                    while batch.len() < replay.room()
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

    /// The partition and the fields it is replayed with, or why it is not.
    fn prepare(
        &self,
        letter: &DeadLetter,
        max_replays: u32,
    ) -> std::result::Result<(Partition, Fields), String> {
        let topic = &self.topic;
        let Some(partition) = letter.partition else {
            return Err("it names no partition, so it is no dead letter of ours".to_owned());
        };
        if partition >= topic.partitions {
            let last = topic.partitions - 1;
            return Err(format!("it is of partition {partition}; there are 0 to {last}"));
        }
        if let Some(of) = letter.original_topic.as_ref().filter(|of| *of != topic.name.as_str()) {
            return Err(format!("it is of topic `{of}`"));
        }
        if letter.replays >= max_replays {
            return Err(format!("it was replayed {} times already", letter.replays));
        }
        let fields = letter.to_replay();
        if fields.len() > FIELDS_MAX || fields.bytes() > ENTRY_BYTES_MAX {
            return Err("it is too large to be sent again".to_owned());
        }
        Ok((partition, fields))
    }
}

/// A replay under way.
struct Replay<'a> {
    letters: &'a DeadLetters,
    config: &'a ReplayConfig,
    report: ReplayReport,
    pace: ReplayRate,
}

/// A dead letter that can be replayed.
struct PreparedReplay {
    id: EntryId,
    once: Once,
    is_copy: bool,
}

impl Replay<'_> {
    /// How many may be replayed next.
    fn room(&self) -> usize {
        let left =
            self.config.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.report.replayed));
        usize::try_from(left).unwrap_or(usize::MAX).min(self.pace.at_once())
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
        while !named.is_empty() && self.room() > 0 {
            let count = self.room().min(named.len());
            self.run(named.drain(..count).collect()).await?;
        }
        Ok(())
    }

    async fn run(&mut self, letters: Vec<(DeadLetter, bool)>) -> Result<()> {
        let mut by_partition: BTreeMap<Partition, Vec<PreparedReplay>> = BTreeMap::new();
        for (letter, is_copy) in letters {
            match self.letters.prepare(&letter, self.config.max_replays) {
                Ok((partition, fields)) => {
                    // Other ids of this stream are the producers'.
                    let once = Once { id: format!("~replay:{}", letter.identity()), fields };
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
                self.look(partition, &prepared).await?;
            } else {
                self.send(partition, prepared).await?;
            }
        }
        Ok(())
    }

    async fn look(&mut self, partition: Partition, prepared: &[PreparedReplay]) -> Result<()> {
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
        let (ids, once): (Vec<EntryId>, Vec<Once>) =
            prepared.into_iter().map(|one| (one.id, one.once)).unzip();
        let stream = keys::stream(topic, partition);
        self.pace.keep(self.report.replayed).await;
        let appended =
            backend.append_once(&stream, &once, REMEMBERED, &topic.policies.retention).await?;
        // The message first, the dead letter second: a crash in between leaves a letter whose replay does nothing.
        backend.delete_entries(letters, &ids).await?;
        let known = appended.iter().filter(|one| one.duplicate).count() as u64;
        self.report.already_replayed += known;
        self.report.replayed += appended.len() as u64 - known;
        Ok(())
    }
}

/// Keeps to a number of messages per second.
struct ReplayRate {
    started: Instant,
    per_second: Option<NonZeroU32>,
}

impl ReplayRate {
    /// Messages that may go at once: those of a tenth of a second.
    fn at_once(&self) -> usize {
        let tenth = self.per_second.map_or(BATCH, |rate| rate.get() as usize / 10);
        tenth.clamp(1, BATCH)
    }

    /// Waits until so many may have been sent.
    async fn keep(&self, sent: u64) {
        if let Some(rate) = self.per_second {
            let due = Duration::from_secs_f64(sent as f64 / f64::from(rate.get()));
            tokio::time::sleep_until(self.started + due).await;
        }
    }
}

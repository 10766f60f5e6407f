//! What topics did in the last hour, in memory: messages in, settled, the lag of each group, and partitions that moved.
//!
//! Upstream: `server/run.rs` passes on what its sampler measured. Downstream: the queue, for the owners of partitions; `api/history.rs`,
//! `api/topics.rs` and `api/partition_moves.rs` read it. Every process measures the same streams, so nothing is stored. Guarantees: memory is
//! bounded: the busiest [`TOPICS_MAX`] topics, [`GROUPS_MAX`] groups of each, one hour, [`MOVES_MAX`] moves; one call for the owners
//! of at most [`WATCHED_PARTITIONS_MAX`] partitions every ten seconds. A time without a measurement is a gap.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_queue::{GroupMeasure, OwnerView, Queue, TopicMeasure};
use headwater_stream::LeaseInfo;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::time::timeout;
use tracing::debug;

use crate::telemetry::history::{HistoryRange, SAMPLE_MS, SAMPLES_MAX};

/// Topics with a history: the busiest.
pub(crate) const TOPICS_MAX: usize = 50;

/// Groups of a topic with a history: those with the most messages left.
pub(crate) const GROUPS_MAX: usize = 8;

/// Moves of partitions; the oldest are dropped.
const MOVES_MAX: usize = 1000;

/// Partitions of all groups whose owners are read.
const WATCHED_PARTITIONS_MAX: usize = 2048;

/// Time for the call that reads the owners.
const OWNERS_TIME_MAX: Duration = Duration::from_secs(5);

/// Samples of a rate: one minute.
const RATE_SAMPLES: u64 = 6;

/// Steps of a curve, and samples of each: one hour.
const CURVE_STEPS: usize = 30;
const CURVE_STEP_SAMPLES: usize = 12;

const _: () = assert!(CURVE_STEPS * CURVE_STEP_SAMPLES == SAMPLES_MAX);

/// The history of the topics of this installation, as one process measured it.
#[derive(Debug, Default)]
pub(crate) struct TopicHistory {
    state: Mutex<TopicHistoryState>,
}

#[derive(Debug, Default)]
struct TopicHistoryState {
    last: Option<Measurement>,
    series: BTreeMap<String, TopicSeries>,
    /// By topic and group.
    owners: HashMap<(String, String), LastOwners>,
    /// Oldest first.
    moves: VecDeque<PartitionMove>,
    /// When the newest of the moves was noticed that were forgotten because there were too many.
    last_dropped: Option<Timestamp>,
    /// When owners were read for the first time.
    watched_since: Option<Timestamp>,
    /// Whether the owners of all groups are read.
    is_all_watched: bool,
}

/// The last known owner of each partition of a group, with its epoch.
type LastOwners = Vec<Option<(String, u64)>>;

/// What was measured at one time.
#[derive(Debug)]
struct Measurement {
    /// Number of ten seconds since 1970.
    slot: u64,
    /// Whether a topic that is absent did not exist.
    is_complete: bool,
    topics: BTreeMap<String, TopicMeasure>,
}

/// Samples of a topic, oldest first.
#[derive(Debug, Default)]
struct TopicSeries {
    /// Messages added in each ten seconds; `None` if that is unknown.
    added: VecDeque<(u64, Option<u64>)>,
    groups: BTreeMap<String, VecDeque<(u64, GroupPoint)>>,
}

/// What a topic did in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TopicPoint {
    /// Number of samples of ten seconds.
    pub(crate) samples: u64,
    /// Messages added; `None` if that is unknown.
    pub(crate) added: Option<u64>,
    pub(crate) groups: BTreeMap<String, GroupPoint>,
}

/// What a group of a topic did in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupPoint {
    /// Messages settled, or skipped by a reset; `None` if that is unknown.
    pub(crate) settled: Option<u64>,
    /// Most messages not delivered yet; `None` if the server cannot tell.
    pub(crate) lag: Option<u64>,
    /// Most messages delivered and not settled.
    pub(crate) pending: u64,
}

impl GroupPoint {
    fn merge(&mut self, other: Self) {
        self.settled = add(self.settled, other.settled);
        self.lag = self.lag.max(other.lag);
        self.pending = self.pending.max(other.pending);
    }
}

/// The beginning of the history at a time.
fn hour_before(now: Timestamp) -> Timestamp {
    now.before(Duration::from_millis(SAMPLE_MS * SAMPLES_MAX as u64))
}

/// The sum of what is known.
fn add(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.saturating_add(other)),
        (one, other) => one.or(other),
    }
}

/// How busy a topic is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TopicRates {
    /// Messages in per second, over the last minute; `None` if that is unknown.
    pub(crate) added_per_second: Option<f64>,
    /// Messages settled per second by all groups, over the last minute.
    pub(crate) settled_per_second: Option<f64>,
    /// Messages added in each two minutes of the last hour, oldest first.
    pub(crate) curve: Vec<u64>,
}

/// A partition that has a new owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartitionMove {
    /// When it was noticed, up to ten seconds later.
    pub(crate) at: Timestamp,
    pub(crate) topic: String,
    pub(crate) group: String,
    pub(crate) partition: u16,
    /// The owner before; `None` if there was none.
    pub(crate) from: Option<String>,
    pub(crate) to: String,
    pub(crate) epoch: u64,
}

/// Partitions of a group that moved at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupRebalance {
    pub(crate) at: Timestamp,
    pub(crate) topic: String,
    pub(crate) group: String,
    pub(crate) partitions: u64,
}

/// A group whose owners are read.
#[derive(Debug)]
struct WatchedGroup {
    topic: String,
    group: String,
    /// Whether it is known that it did not exist before.
    is_new: bool,
}

impl TopicHistory {
    fn state(&self) -> MutexGuard<'_, TopicHistoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what was measured just now, once in ten seconds. `is_complete`: whether no topic failed.
    pub(crate) async fn sample(
        &self,
        queue: &Queue,
        measured: &BTreeMap<String, TopicMeasure>,
        is_complete: bool,
    ) {
        if measured.is_empty() && !is_complete {
            return;
        }
        let now = SystemClock.now();
        let Some(watched) = self.record(now, measured, is_complete) else { return };
        let groups: Vec<_> =
            watched.iter().map(|one| (one.topic.clone(), one.group.clone())).collect();
        let inspect = queue.inspect();
        match timeout(OWNERS_TIME_MAX, inspect.owners(&groups)).await {
            Ok(Ok(owners)) => self.note_owners(now, watched, owners),
            Ok(Err(error)) => debug!(%error, "failed to read the owners of partitions"),
            Err(_) => debug!("the owners of partitions were not read in time"),
        }
    }

    /// Returns the groups whose owners are to be read; `None` if these ten seconds have a measurement already.
    fn record(
        &self,
        now: Timestamp,
        measured: &BTreeMap<String, TopicMeasure>,
        is_complete: bool,
    ) -> Option<Vec<WatchedGroup>> {
        let slot = now.as_millis() / SAMPLE_MS;
        let state = &mut *self.state();
        if state.last.as_ref().is_some_and(|last| last.slot == slot) {
            return None;
        }
        // If the clock was set back, what it says of later times is wrong. Topics that cannot be measured age, too.
        let is_kept = |of: u64| of + 1 < slot && of + SAMPLES_MAX as u64 >= slot;
        state.series.retain(|_, series| {
            series.forget(is_kept);
            !series.added.is_empty()
        });
        let last = state.last.take();
        let new_topic = TopicMeasure { added: Some(0), ..Default::default() };
        let at_last = |name: &str, measure: &TopicMeasure| {
            let last = last.as_ref()?;
            // A plain stream may have existed for long before it was listed.
            let is_new = last.is_complete && measure.is_created;
            last.topics.get(name).or(is_new.then_some(&new_topic))
        };
        // After a longer pause it is unknown when messages were added.
        let is_recent = last.as_ref().is_some_and(|last| last.slot < slot && slot - last.slot <= 2);
        let before =
            |name: &str, measure: &TopicMeasure| at_last(name, measure).filter(|_| is_recent);
        let increase = |name: &str, measure: &TopicMeasure| {
            let before = before(name, measure)?.added?;
            Some(measure.added?.saturating_sub(before))
        };

        let kept = state.busiest(measured, is_complete, &increase);
        state.series.retain(|name, _| kept.contains(name));
        let mut watched = Vec::new();
        let (mut partitions, mut is_all_watched) = (0, kept.len() >= measured.len());
        for (name, measure) in measured.iter().filter(|(name, _)| kept.contains(*name)) {
            let series = state.series.entry(name.clone()).or_default();
            series.added.push_back((slot - 1, increase(name, measure)));
            let chosen = most_left(measure);
            is_all_watched &= chosen.len() == measure.groups.len();
            for (group, now) in &chosen {
                let earlier = before(name, measure);
                let settled_before = earlier.and_then(|earlier| match earlier.groups.get(*group) {
                    Some(group) => settled(earlier, group),
                    // Of a group that is new on a topic with messages it is unknown what it skipped.
                    None => (earlier.added == Some(0)).then_some(0),
                });
                let settled = match (settled(measure, now), settled_before) {
                    // It has neither settled nor skipped any message.
                    (Some(0), _) => Some(0),
                    (now, before) => {
                        now.zip(before).map(|(now, before)| now.saturating_sub(before))
                    }
                };
                let point = GroupPoint { settled, lag: now.lag, pending: now.pending };
                let samples = series.groups.entry((*group).to_owned()).or_default();
                samples.push_back((slot - 1, point));
                partitions += usize::from(measure.partitions);
                if partitions > WATCHED_PARTITIONS_MAX {
                    is_all_watched = false;
                    continue;
                }
                let is_new =
                    at_last(name, measure).is_some_and(|last| !last.groups.contains_key(*group));
                let (topic, group) = (name.clone(), (*group).to_owned());
                watched.push(WatchedGroup { topic, group, is_new });
            }
            if series.groups.len() > GROUPS_MAX {
                series
                    .groups
                    .retain(|name, _| chosen.iter().any(|(group, _)| *group == name.as_str()));
            }
        }
        state.is_all_watched = is_all_watched;
        state.last = Some(Measurement { slot, is_complete, topics: measured.clone() });
        Some(watched)
    }

    fn note_owners(
        &self,
        now: Timestamp,
        watched: Vec<WatchedGroup>,
        owners: Vec<Vec<Option<OwnerView>>>,
    ) {
        let state = &mut *self.state();
        state.watched_since.get_or_insert(now);
        let mut known = HashMap::new();
        for (WatchedGroup { topic, group, is_new }, owners) in watched.into_iter().zip(owners) {
            let key = (topic, group);
            let before = state.owners.remove(&key);
            let is_first = before.is_none() && !is_new;
            let mut last = before.unwrap_or_default();
            last.resize(owners.len().max(last.len()), None);
            for ((partition, last), owner) in (0..).zip(&mut last).zip(owners) {
                // The last owner is remembered while a partition has none.
                let Some(owner) = owner.filter(|owner| owner.holder != LeaseInfo::UNKNOWN) else {
                    continue;
                };
                let new = (owner.holder, owner.epoch);
                if last.as_ref() == Some(&new) {
                    continue;
                }
                let from = last.replace(new.clone()).map(|(holder, _)| holder);
                if is_first {
                    continue;
                }
                let (topic, group) = key.clone();
                let (to, epoch) = new;
                state.moves.push_back(PartitionMove {
                    at: now,
                    topic,
                    group,
                    partition,
                    from,
                    to,
                    epoch,
                });
            }
            known.insert(key, last);
        }
        state.owners = known;
        let since = hour_before(now);
        while state.moves.front().is_some_and(|oldest| oldest.at < since) {
            state.moves.pop_front();
        }
        while state.moves.len() > MOVES_MAX {
            state.last_dropped = state.moves.pop_front().map(|dropped| dropped.at);
        }
    }

    /// The steps of a topic; `None` if it has no history.
    pub(crate) fn points(
        &self,
        topic: &str,
        range: HistoryRange,
    ) -> Option<BTreeMap<u64, TopicPoint>> {
        let state = self.state();
        let series = state.series.get(topic)?;
        let mut points: BTreeMap<u64, TopicPoint> = BTreeMap::new();
        for (slot, added) in &series.added {
            if let Some(step) = range.step_of(slot * SAMPLE_MS) {
                let point = points.entry(step).or_default();
                point.samples += 1;
                point.added = add(point.added, *added);
            }
        }
        for (name, samples) in &series.groups {
            for (slot, sample) in samples {
                if let Some(step) = range.step_of(slot * SAMPLE_MS) {
                    let groups = &mut points.entry(step).or_default().groups;
                    groups.entry(name.clone()).or_default().merge(*sample);
                }
            }
        }
        Some(points)
    }

    /// How busy a topic is; `None` if it has no history.
    pub(crate) fn rates(&self, topic: &str, now: Timestamp) -> Option<TopicRates> {
        let newest = (now.as_millis() / SAMPLE_MS).checked_sub(1)?;
        let state = self.state();
        let series = state.series.get(topic)?;
        let is_recent = |slot: u64| slot + RATE_SAMPLES > newest;
        let added = series.added.iter().filter(|(slot, _)| is_recent(*slot));
        let settled = series.groups.values().filter_map(|samples| {
            let recent = samples.iter().filter(|(slot, _)| is_recent(*slot));
            per_second(recent.map(|(_, sample)| sample.settled))
        });
        let settled: Vec<f64> = settled.collect();
        let mut curve = vec![0_u64; CURVE_STEPS];
        let step = |slot: u64| slot / CURVE_STEP_SAMPLES as u64;
        for (slot, added) in &series.added {
            let age =
                usize::try_from(step(newest).saturating_sub(step(*slot))).unwrap_or(usize::MAX);
            if let Some(index) = (CURVE_STEPS - 1).checked_sub(age) {
                curve[index] = curve[index].saturating_add(added.unwrap_or(0));
            }
        }
        Some(TopicRates {
            added_per_second: per_second(added.map(|(_, added)| *added)),
            settled_per_second: (!settled.is_empty()).then(|| settled.iter().sum()),
            curve,
        })
    }

    /// The moves of the last hour, newest first; since when they are watched, at most an hour ago; and whether those of all
    /// groups since then are here.
    pub(crate) fn moves(&self, now: Timestamp) -> (Vec<PartitionMove>, Option<Timestamp>, bool) {
        let state = self.state();
        let hour_ago = hour_before(now);
        let recent = state.moves.iter().rev().filter(|moved| moved.at >= hour_ago);
        let since = state.watched_since.map(|since| since.max(hour_ago));
        let is_any_missing = state.last_dropped.is_some_and(|dropped| dropped >= hour_ago);
        (recent.cloned().collect(), since, state.is_all_watched && !is_any_missing)
    }

    /// Moves in a range, those of a group at the same time as one, oldest first.
    pub(crate) fn rebalances(&self, range: HistoryRange) -> Vec<GroupRebalance> {
        let state = self.state();
        let mut found: Vec<GroupRebalance> = Vec::new();
        let is_within =
            |at: Timestamp| (range.from_ms..range.to_ms + range.step_ms).contains(&at.as_millis());
        for moved in state.moves.iter().filter(|moved| is_within(moved.at)) {
            match found.last_mut() {
                Some(last)
                    if (last.at, &last.topic, &last.group)
                        == (moved.at, &moved.topic, &moved.group) =>
                {
                    last.partitions += 1;
                }
                _ => found.push(GroupRebalance {
                    at: moved.at,
                    topic: moved.topic.clone(),
                    group: moved.group.clone(),
                    partitions: 1,
                }),
            }
        }
        found
    }
}

impl TopicHistoryState {
    /// The topics that have a history from now on.
    fn busiest(
        &self,
        measured: &BTreeMap<String, TopicMeasure>,
        is_complete: bool,
        increase: &dyn Fn(&str, &TopicMeasure) -> Option<u64>,
    ) -> HashSet<String> {
        // A topic that could not be measured keeps its history.
        let failed = self.series.keys().filter(|_| !is_complete);
        let all: HashSet<&String> = measured.keys().chain(failed).collect();
        let score = |name: &String| {
            let known = self.series.get(name).map_or(0, TopicSeries::total);
            let measure = measured.get(name);
            let new = measure.and_then(|measure| increase(name, measure)).unwrap_or(0);
            let left = measure.map_or(0, |measure| {
                measure.groups.values().map(|group| group.lag.unwrap_or(0)).max().unwrap_or(0)
            });
            (known.saturating_add(new), left)
        };
        let mut ranked: Vec<_> = all.into_iter().map(|name| (score(name), name)).collect();
        // The name decides between equals, so that they do not take turns.
        ranked.sort_by(|(a, first), (b, second)| b.cmp(a).then(first.cmp(second)));
        ranked.into_iter().take(TOPICS_MAX).map(|(_, name)| name.clone()).collect()
    }
}

impl TopicSeries {
    /// Messages added and settled in the last hour.
    fn total(&self) -> u64 {
        let settled = self.groups.values().flatten().filter_map(|(_, point)| point.settled);
        let added = self.added.iter().filter_map(|(_, added)| *added);
        added.chain(settled).fold(0, u64::saturating_add)
    }

    /// Forgets samples whose time is not to be kept.
    fn forget(&mut self, is_kept: impl Fn(u64) -> bool) {
        self.added.retain(|(slot, _)| is_kept(*slot));
        self.groups.values_mut().for_each(|samples| samples.retain(|(slot, _)| is_kept(*slot)));
        self.groups.retain(|_, samples| !samples.is_empty());
    }
}

/// The groups with the most messages left.
fn most_left(measure: &TopicMeasure) -> Vec<(&str, &GroupMeasure)> {
    let mut groups: Vec<_> =
        measure.groups.iter().map(|(name, group)| (name.as_str(), group)).collect();
    groups.sort_by_key(|(name, group)| {
        (std::cmp::Reverse(group.lag.unwrap_or(u64::MAX).saturating_add(group.pending)), *name)
    });
    groups.truncate(GROUPS_MAX);
    groups
}

/// Messages that a group has neither left nor in progress; `None` if the server cannot tell.
fn settled(topic: &TopicMeasure, group: &GroupMeasure) -> Option<u64> {
    Some(topic.added?.saturating_sub(group.lag?.saturating_add(group.pending)))
}

/// The rate of samples of ten seconds; `None` if none is known.
fn per_second(samples: impl Iterator<Item = Option<u64>>) -> Option<f64> {
    let known: Vec<u64> = samples.flatten().collect();
    let seconds = known.len() as u64 * SAMPLE_MS / 1000;
    (seconds > 0).then(|| known.iter().sum::<u64>() as f64 / seconds as f64)
}

#[cfg(test)]
mod tests;

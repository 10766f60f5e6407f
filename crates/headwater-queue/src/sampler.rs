//! The sampler: periodically sets the gauges `topic_length` and `pending` of all topics, and keeps what it measured for the
//! application.
//!
//! Upstream: an application starts it, in one process or in all. Downstream: the registry and the streams of a backend,
//! which are only read. Plain topics are measured if listed.
//! Guarantees: the gauges of a removed topic or group are set to 0; what is kept is of the last run.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{EntryId, StreamStats};
use tokio::time::MissedTickBehavior;
use tracing::warn;

use crate::error::{QueueError, Result};
use crate::inspect::{group_names, group_of_partition, read_each};
use crate::limits::SAMPLED_MAX;
use crate::metrics::{PENDING, TOPIC_LENGTH};
use crate::queue::Queue;
use crate::topic::{Partition, Topic, TopicName};

/// Topics read concurrently, and those whose statistics are in memory at a time.
const TOPICS_AT_ONCE: usize = 4;
const TOPICS_IN_MEMORY: usize = 256;

/// Measures the topics of a queue.
#[derive(Debug)]
pub struct Sampler {
    queue: Queue,
    plain: Vec<TopicName>,
    /// Gauges whose current value is not 0.
    nonzero: HashMap<GaugeKey, u64>,
    measured: BTreeMap<String, TopicMeasure>,
    /// What the last run found of each partition whose backend does not count the messages added.
    counted: HashMap<(String, Partition), CountedPartition>,
}

/// What a sampler measured of a topic, over all partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicMeasure {
    /// Number of partitions.
    pub partitions: Partition,
    /// Whether it was created as a topic; otherwise it is a plain stream.
    pub is_created: bool,
    /// Messages ever added. Where the backend does not count them (the embedded one, and Redis before 7.0): those added since
    /// the first run of this sampler, and `None` if the oldest messages of a partition were removed since the last run, because
    /// nothing tells how many were added meanwhile.
    pub added: Option<u64>,
    /// Its groups, by name.
    pub groups: BTreeMap<String, GroupMeasure>,
}

/// What a sampler measured of a group of a topic, over all partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupMeasure {
    /// Messages delivered and not settled.
    pub pending: u64,
    /// Messages not delivered yet; `None` if the server cannot tell for some partition.
    pub lag: Option<u64>,
}

/// A partition as the last run found it.
#[derive(Clone, Copy, Debug)]
struct CountedPartition {
    length: u64,
    first_id: Option<EntryId>,
    /// Messages added since the first run, as far as the growth of the partition shows them; at least `length`.
    added: u64,
    /// Its oldest messages were removed since the run before, so its growth does not show how many were added.
    is_removed: bool,
}

impl CountedPartition {
    fn after(last: Option<&Self>, &StreamStats { length, first_id, .. }: &StreamStats) -> Self {
        let Some(last) = last else {
            return Self { length, first_id, added: length, is_removed: false };
        };
        let growth = length.saturating_sub(last.length);
        Self {
            length,
            first_id,
            added: last.added.saturating_add(growth).max(length),
            is_removed: last.first_id.is_some() && last.first_id != first_id,
        }
    }
}

/// Identifies a gauge: topic, partition, and the group for `pending`.
type GaugeKey = (String, Partition, Option<String>);

impl Queue {
    /// A sampler of all created topics and of the plain ones listed here.
    pub fn sampler(&self, plain: &[&str]) -> Result<Sampler> {
        let plain = plain.iter().map(TopicName::new).collect::<Result<Vec<_>>>()?;
        let (nonzero, measured, counted) = Default::default();
        Ok(Sampler { queue: self.clone(), plain, nonzero, measured, counted })
    }
}

impl Sampler {
    /// Measures all topics once. A topic that fails keeps its values; the others are still measured. Topics of a server that does
    /// not answer delay the others little.
    pub async fn run_once(&mut self) -> Result<()> {
        self.measured.clear();
        let mut topics: Vec<TopicName> = self.plain.clone();
        // Ignore invalid names registered by other programs.
        topics.extend(
            self.queue.topics().list().await?.iter().filter_map(|t| TopicName::new(t).ok()),
        );
        topics.sort();
        topics.dedup();
        topics.truncate(SAMPLED_MAX);
        let mut found = HashMap::new();
        let mut failed = None;
        let mut failed_topics = BTreeSet::new();
        for some in topics.chunks(TOPICS_IN_MEMORY) {
            let reads = some.iter().map(|name| read(&self.queue, name)).collect();
            let results = read_each(TOPICS_AT_ONCE, reads).await;
            for (name, result) in some.iter().zip(results) {
                match result {
                    Ok((topic, stats)) => self.record(&topic, &stats, &mut found),
                    Err(error) => {
                        warn!(topic = %name, %error, "measuring the topic failed");
                        let kept =
                            self.nonzero.iter().filter(|((topic, ..), _)| topic == name.as_str());
                        found.extend(kept.map(|(gauge, value)| (gauge.clone(), *value)));
                        failed = Some(error);
                        failed_topics.insert(name.to_string());
                    }
                }
            }
        }
        for gauge in self.nonzero.keys().filter(|gauge| !found.contains_key(gauge)) {
            set_gauge(gauge, 0);
        }
        self.counted.retain(|(topic, partition), _| {
            failed_topics.contains(topic) || found.contains_key(&(topic.clone(), *partition, None))
        });
        found.iter().for_each(|(gauge, value)| set_gauge(gauge, *value));
        found.retain(|_, value| *value > 0);
        self.nonzero = found;
        failed.map_or(Ok(()), Err)
    }

    /// What the last run measured, by name of the topic. A topic that failed is absent.
    pub fn measured(&self) -> &BTreeMap<String, TopicMeasure> {
        &self.measured
    }

    /// Measures at this interval until `shutdown` completes.
    pub async fn run(mut self, every: Duration, shutdown: impl Future<Output = ()>) -> Result<()> {
        if every.is_zero() {
            return Err(QueueError::invalid("every", "it is zero"));
        }
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return Ok(()),
                _ = ticks.tick() => {}
            }
            // A run only reads, so it can be cancelled.
            tokio::select! {
                () = &mut shutdown => return Ok(()),
                result = self.run_once() => {
                    if let Err(error) = result {
                        warn!(%error, "measuring topics failed");
                    }
                }
            }
        }
    }

    fn record(
        &mut self,
        topic: &Topic,
        stats: &[Option<StreamStats>],
        found: &mut HashMap<GaugeKey, u64>,
    ) {
        let name = &topic.name;
        let mut measure = TopicMeasure {
            partitions: topic.partitions,
            is_created: !topic.layout.is_plain(),
            added: Some(0),
            ..Default::default()
        };
        for (partition, stats) in (0..).zip(stats) {
            let length = stats.as_ref().map_or(0, |stats| stats.length);
            found.insert((name.to_string(), partition, None), length);
            let added = stats.as_ref().map_or(Some(0), |stats| {
                stats.entries_added.or_else(|| {
                    let key = (name.to_string(), partition);
                    let found = CountedPartition::after(self.counted.get(&key), stats);
                    self.counted.insert(key, found);
                    (!found.is_removed).then_some(found.added)
                })
            });
            measure.added = measure.added.zip(added).map(|(sum, added)| sum + added);
            for group in stats.iter().flat_map(|stats| &stats.groups) {
                let gauge = (name.to_string(), partition, Some(group.name.to_string()));
                found.insert(gauge, group.pending);
            }
        }
        for group in group_names(stats) {
            let views = stats.iter().map(|stats| group_of_partition(&group, stats));
            let views: Vec<_> = views.collect();
            let pending = views.iter().map(|(pending, _)| pending).sum();
            let lag = views.iter().map(|(_, lag)| *lag).sum();
            measure.groups.insert(group.to_string(), GroupMeasure { pending, lag });
        }
        self.measured.insert(name.to_string(), measure);
    }
}

/// The topic and the statistics of its partitions.
async fn read(queue: &Queue, name: &TopicName) -> Result<(Arc<Topic>, Vec<Option<StreamStats>>)> {
    let topic = queue.topic_or_expired(name).await?;
    let stats = queue.partition_stats(&topic).await?;
    Ok((topic, stats))
}

fn set_gauge((topic, partition, group): &GaugeKey, value: u64) {
    let (topic, partition) = (topic.clone(), partition.to_string());
    let gauge = match group {
        None => ::metrics::gauge!(TOPIC_LENGTH, "topic" => topic, "partition" => partition),
        Some(group) => {
            let group = group.clone();
            ::metrics::gauge!(PENDING, "topic" => topic, "partition" => partition, "group" => group)
        }
    };
    gauge.set(value as f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_added_are_unknown_while_old_ones_are_removed() {
        let stats = |length, first_ms: u64| StreamStats {
            length,
            first_id: (length > 0).then(|| EntryId::new(first_ms, 0)),
            last_id: None,
            last_generated_id: EntryId::MIN,
            entries_added: None,
            max_deleted_id: None,
            bytes: None,
            groups: Vec::new(),
        };
        let mut last = None;
        let mut added = |length, first_ms| {
            let found = CountedPartition::after(last.as_ref(), &stats(length, first_ms));
            last = Some(found);
            (!found.is_removed).then_some(found.added)
        };

        assert_eq!(added(0, 0), Some(0));
        assert_eq!(added(3, 1), Some(3));
        assert_eq!(added(5, 1), Some(5));
        // A trim to five messages: as long as before, but with others.
        assert_eq!(added(5, 4), None);
        assert_eq!(added(5, 9), None);
        assert_eq!(added(6, 9), Some(6), "known again while none is removed");
        assert_eq!(added(0, 0), None, "all were removed");
        assert_eq!(added(2, 20), Some(8));
    }
}

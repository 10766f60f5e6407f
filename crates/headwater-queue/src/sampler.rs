//! The sampler: periodically sets the gauges `topic_length` and `pending` of all topics.
//!
//! Upstream: an application starts it, in one process or in all. Downstream: the registry and the streams of a backend,
//! which are only read. Plain topics are measured if listed.
//! Guarantees: the gauges of a removed topic or group are set to 0.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tracing::warn;

use crate::error::{QueueError, Result};
use crate::limits::SAMPLED_MAX;
use crate::metrics::{PENDING, TOPIC_LENGTH};
use crate::queue::Queue;
use crate::topic::{Partition, TopicName};

/// Measures the topics of a queue.
#[derive(Debug)]
pub struct Sampler {
    queue: Queue,
    plain: Vec<TopicName>,
    /// Gauges whose current value is not 0.
    nonzero: HashMap<GaugeKey, u64>,
}

/// Identifies a gauge: topic, partition, and the group for `pending`.
type GaugeKey = (String, Partition, Option<String>);

impl Queue {
    /// A sampler of all created topics and of the plain ones listed here.
    pub fn sampler(&self, plain: &[&str]) -> Result<Sampler> {
        let plain = plain.iter().map(TopicName::new).collect::<Result<Vec<_>>>()?;
        Ok(Sampler { queue: self.clone(), plain, nonzero: HashMap::new() })
    }
}

impl Sampler {
    /// Measures all topics once. A topic that fails keeps its values; the others are still measured.
    pub async fn run_once(&mut self) -> Result<()> {
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
        for name in topics {
            if let Err(error) = self.measure(&name, &mut found).await {
                warn!(topic = %name, %error, "measuring the topic failed");
                let kept = self.nonzero.iter().filter(|((topic, ..), _)| topic == name.as_str());
                found.extend(kept.map(|(gauge, value)| (gauge.clone(), *value)));
                failed = Some(error);
            }
        }
        for gauge in self.nonzero.keys().filter(|gauge| !found.contains_key(gauge)) {
            set_gauge(gauge, 0);
        }
        found.iter().for_each(|(gauge, value)| set_gauge(gauge, *value));
        found.retain(|_, value| *value > 0);
        self.nonzero = found;
        failed.map_or(Ok(()), Err)
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

    async fn measure(&self, name: &TopicName, found: &mut HashMap<GaugeKey, u64>) -> Result<()> {
        let topic = self.queue.topic(name).await?;
        let stats = self.queue.partition_stats(&topic).await?;
        for (partition, stats) in (0..).zip(stats) {
            let length = stats.as_ref().map_or(0, |stats| stats.length);
            found.insert((name.to_string(), partition, None), length);
            for group in stats.iter().flat_map(|stats| &stats.groups) {
                let gauge = (name.to_string(), partition, Some(group.name.to_string()));
                found.insert(gauge, group.pending);
            }
        }
        Ok(())
    }
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

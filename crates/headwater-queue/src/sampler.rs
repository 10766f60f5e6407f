//! The sampler measures topics: how long they are, how much of them is pending.
//!
//! Upstream: an application that wants the gauges `topic_length` and `pending` starts it, in one process or in all.
//! Downstream: the registry and the streams of a backend, which are only read. Plain topics are measured if they are named.
//! Promises: what is gone shows 0, and not its last value for ever.

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
    /// What shows another value than 0 now.
    nonzero: HashMap<GaugeKey, u64>,
}

/// Which gauge: a topic's partition, and for what is pending the group.
type GaugeKey = (String, Partition, Option<String>);

impl Queue {
    /// A sampler of all topics that were created, and of these plain ones.
    pub fn sampler(&self, plain: &[&str]) -> Result<Sampler> {
        let plain = plain.iter().map(TopicName::new).collect::<Result<Vec<_>>>()?;
        Ok(Sampler { queue: self.clone(), plain, nonzero: HashMap::new() })
    }
}

impl Sampler {
    /// Measures everything once. A topic that cannot be measured keeps its values and does not hinder others.
    pub async fn run_once(&mut self) -> Result<()> {
        let mut topics: Vec<TopicName> = self.plain.clone();
        // A name of another program that makes no topic is none of ours.
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
                warn!(topic = %name, %error, "a topic cannot be measured");
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

    /// Measures again and again until `shutdown` is done.
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
            // A run only reads, so it can be dropped half way.
            tokio::select! {
                () = &mut shutdown => return Ok(()),
                result = self.run_once() => {
                    if let Err(error) = result {
                        warn!(%error, "topics were not measured");
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

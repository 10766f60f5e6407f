//! The life of topics: create, list, describe, grow, delete.
//!
//! Upstream: administrators and producers that create what they need. Downstream: the registry of the backend.
//! Promises: a topic's meta is written before its name is in the registry, and leaves after it; partition counts only
//! grow. Growing keeps the order per key: see [`Topics::grow`].

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{EntryId, RegistryMap, SetName};

use crate::error::{QueueError, Result};
use crate::group;
use crate::keys::{self, Layout};
use crate::limits::{GROWTHS_MAX, PARTITIONS_MAX};
use crate::queue::Queue;
use crate::topic::{self, Growth, Partition, Policies, Topic, TopicName};

/// Creates, lists, describes, grows and deletes topics.
#[derive(Clone, Debug)]
pub struct Topics {
    queue: Queue,
}

/// A topic and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// What the registry says of it.
    pub topic: Topic,
    /// Its partitions, by number.
    pub partitions: Vec<DescribedPartition>,
    /// The key of its dead letters.
    pub dead_letters_key: String,
    /// The slot of its dead letters on a Redis Cluster.
    pub dead_letters_slot: Option<u16>,
}

/// A partition and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedPartition {
    /// Its number.
    pub partition: Partition,
    /// The key of its stream.
    pub stream_key: String,
    /// The key of its delayed messages.
    pub delays_key: String,
    /// The slot of both on a Redis Cluster.
    pub slot: Option<u16>,
}

impl Queue {
    /// The topics of this queue.
    pub fn topics(&self) -> Topics {
        Topics { queue: self.clone() }
    }
}

impl Topics {
    /// Creates a topic. Returns `false` if it was there already, the same; fails if it is there with other settings.
    pub async fn create(&self, name: &str, partitions: u16, policies: Policies) -> Result<bool> {
        let name = TopicName::new(name)?;
        check_partitions(partitions)?;
        policies.validate()?;
        let backend = &self.queue.inner.backend;
        let topic = Topic {
            layout: self.queue.layout(),
            partitions,
            created_at: Some(backend.now().await?),
            policies,
            ..Topic::plain(name.clone(), Layout::Plain)
        };
        let is_new = backend.map_create(&keys::meta(&name), &topic.to_meta()).await?;
        let topic = if is_new {
            Arc::new(topic)
        } else {
            let found = self.queue.read_topic(&name).await?;
            check_same(&found, &topic)?;
            found
        };
        // Also when it was there: whoever created it may have died between the two steps.
        self.register(&topic).await?;
        self.queue.forget(&name);
        if is_new {
            // It may have been consumed as a plain topic before.
            self.ring(&name).await;
        }
        Ok(is_new)
    }

    /// The names of all topics that were created, sorted.
    pub async fn list(&self) -> Result<Vec<String>> {
        Ok(self.queue.inner.backend.set_members(&keys::registry()).await?)
    }

    /// A topic as it is now, with its keys. A topic that nobody created is plain.
    pub async fn describe(&self, name: &str) -> Result<Described> {
        let topic = self.queue.read_topic(&TopicName::new(name)?).await?;
        let slot = |key: &str| self.queue.inner.backend.cluster_slot(key);
        let partitions = (0..topic.partitions)
            .map(|partition| {
                let stream_key = keys::stream(&topic, partition).to_string();
                DescribedPartition {
                    partition,
                    slot: slot(&stream_key),
                    stream_key,
                    delays_key: keys::delays(&topic, partition).to_string(),
                }
            })
            .collect();
        let dead_letters_key = keys::dead_letters(&topic).to_string();
        Ok(Described {
            partitions,
            dead_letters_slot: slot(&dead_letters_key),
            dead_letters_key,
            topic: Topic::clone(&topic),
        })
    }

    /// Gives a topic more partitions, and returns when every producer knows of it: after twice its `refresh`.
    ///
    /// Where keys are bound to partitions by their hash, a key whose partition changes is not handled from the new one
    /// before its older messages in the old one are done (with `Order::PerKey`). If this process dies meanwhile, the
    /// next `grow`, or a consumer, finishes the growth.
    pub async fn grow(&self, name: &str, partitions: u16) -> Result<()> {
        let name = TopicName::new(name)?;
        check_partitions(partitions)?;
        loop {
            self.settle_growth(&name).await?;
            let topic = self.queue.read_topic(&name).await?;
            if matches!(topic.layout, Layout::Plain | Layout::PlainClustered) {
                return Err(QueueError::NoTopic { topic: name.to_string() });
            }
            if partitions == topic.partitions {
                return Ok(());
            }
            if partitions < topic.partitions {
                let problem = format!(
                    "{partitions}; topic `{name}` has {} and partition counts only grow",
                    topic.partitions
                );
                return Err(QueueError::invalid("partitions", problem));
            }
            // Somebody else may have grown it meanwhile; then what they did is looked at first.
            self.begin_growth(&topic, partitions).await?;
        }
    }

    /// Removes a topic with all its messages, groups, delayed messages and dead letters. Returns whether there was one.
    pub async fn delete(&self, name: &str) -> Result<bool> {
        let name = TopicName::new(name)?;
        let backend = &self.queue.inner.backend;
        let topic = self.queue.read_topic(&name).await?;
        // The name goes first: nobody who lists topics finds one that is half gone.
        let was_listed = backend.set_remove(&keys::registry(), &[name.as_str()]).await? > 0;
        let had_meta = backend.map_delete(&keys::meta(&name)).await?;
        self.queue.forget(&name);
        let mut had_data = backend.delete_stream(&keys::dead_letters(&topic)).await?;
        for delays in keys::all_delays(&topic) {
            had_data |= backend.delete_delays(&delays).await?;
        }
        for partition in 0..topic.partitions {
            had_data |= backend.delete_stream(&keys::stream(&topic, partition)).await?;
        }
        let set = keys::partitions(&name);
        self.remove_all(&set).await?;
        self.ring(&name).await;
        Ok(was_listed || had_meta || had_data)
    }

    async fn remove_all(&self, set: &SetName) -> Result<()> {
        let members = self.queue.inner.backend.set_members(set).await?;
        let members: Vec<&str> = members.iter().map(String::as_str).collect();
        if !members.is_empty() {
            self.queue.inner.backend.set_remove(set, &members).await?;
        }
        Ok(())
    }

    /// Consumers look at the topic soon.
    async fn ring(&self, name: &TopicName) {
        group::ring(&*self.queue.inner.backend, &keys::topic_bell(name)).await;
    }

    async fn register(&self, topic: &Topic) -> Result<()> {
        let backend = &self.queue.inner.backend;
        let streams: Vec<String> = (0..topic.partitions)
            .map(|partition| keys::stream(topic, partition).to_string())
            .collect();
        let streams: Vec<&str> = streams.iter().map(String::as_str).collect();
        backend.set_add(&keys::partitions(&topic.name), &streams, None).await?;
        backend.set_add(&keys::registry(), &[topic.name.as_str()], None).await?;
        Ok(())
    }

    async fn begin_growth(&self, topic: &Topic, partitions: u16) -> Result<()> {
        if topic.growths.len() >= GROWTHS_MAX {
            let problem = format!("topic `{}` grew {GROWTHS_MAX} times already", topic.name);
            return Err(QueueError::invalid("a growth", problem));
        }
        let began = self.queue.inner.backend.now().await?;
        let growth = Growth { from: topic.partitions, to: partitions, began, last_ids: None };
        let mut grown = Topic { partitions, ..topic.clone() };
        grown.growths.push(growth);
        self.replace_growths(topic, &grown).await?;
        self.register(&grown).await
    }

    /// Waits until every producer knows of the last growth, then writes down up to where moved keys have to wait.
    pub(crate) async fn settle_growth(&self, name: &TopicName) -> Result<()> {
        loop {
            let topic = self.queue.read_topic(name).await?;
            let Some(growth) = topic.growths.last().filter(|growth| growth.last_ids.is_none())
            else {
                return Ok(());
            };
            let left = self.settling_left(&topic, growth).await?;
            if !left.is_zero() {
                tokio::time::sleep(left).await;
                continue;
            }
            let mut last_ids = Vec::with_capacity(usize::from(growth.from));
            for partition in 0..growth.from {
                let stats =
                    self.queue.inner.backend.stats(&keys::stream(&topic, partition)).await?;
                last_ids.push(stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN));
            }
            let mut settled = Topic::clone(&topic);
            let last = settled.growths.last_mut().expect("it was there a moment ago");
            last.last_ids = Some(last_ids);
            self.replace_growths(&topic, &settled).await?;
        }
    }

    async fn settling_left(&self, topic: &Topic, growth: &Growth) -> Result<Duration> {
        let age = self.queue.inner.backend.now().await?.since(growth.began);
        Ok(Growth::settling(topic.policies.refresh).saturating_sub(age))
    }

    /// Writes the growths and the partition count, if nobody else did meanwhile.
    async fn replace_growths(&self, old: &Topic, new: &Topic) -> Result<()> {
        let meta = new.to_meta();
        let changed: RegistryMap = meta
            .into_iter()
            .filter(|(field, _)| matches!(field.as_str(), topic::GROWTHS | topic::PARTITION_COUNT))
            .collect();
        let old_growths = topic::growths_to_json(&old.growths);
        let backend = &self.queue.inner.backend;
        // A foreign topic has no list of growths yet: then the count is what must not have changed.
        let count = old.partitions.to_string();
        let meta = keys::meta(&old.name);
        let expect = (topic::GROWTHS, old_growths.as_bytes());
        let mut written = backend.map_update(&meta, Some(expect), &changed).await?;
        if !written && old.growths.is_empty() {
            let expect = (topic::PARTITION_COUNT, count.as_bytes());
            written = backend.map_update(&meta, Some(expect), &changed).await?;
        }
        self.queue.forget(&old.name);
        if written {
            self.ring(&old.name).await;
        } else {
            // Somebody else was faster; what they wrote is read next.
            self.queue.read_topic(&old.name).await?;
        }
        Ok(())
    }
}

fn check_partitions(partitions: u16) -> Result<()> {
    if !(1..=PARTITIONS_MAX).contains(&partitions) {
        let problem = format!("{partitions}; 1 to {PARTITIONS_MAX}");
        return Err(QueueError::invalid("partitions", problem));
    }
    Ok(())
}

fn check_same(found: &Topic, wanted: &Topic) -> Result<()> {
    let difference = if found.partitions != wanted.partitions {
        format!("{} partitions, not {}", found.partitions, wanted.partitions)
    } else if found.policies != wanted.policies {
        format!("{:?}, not {:?}", found.policies, wanted.policies)
    } else {
        return Ok(());
    };
    Err(QueueError::TopicExists { topic: found.name.to_string(), difference })
}

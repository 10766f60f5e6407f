//! Topic administration: create, list, describe, alter, grow, delete.
//!
//! Upstream: administrators, and producers that create their topics. Downstream: the registry of the backend.
//! Guarantees: a topic exists if its meta does. The registry is brought in line with the meta, also when processes
//! create, grow and delete concurrently or die in between. Partition counts only grow, and growing keeps the order
//! per key: see [`Topics::grow`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use headwater_stream::{EntryId, Range, RegistryMap, Retention, SetName, StreamName};

use crate::error::{QueueError, Result};
use crate::group;
use crate::interrupted::PartitionProgress;
use crate::keys::{self, Layout};
use crate::limits::{PARTITIONS_MAX, RESIZES_MAX};
use crate::queue::Queue;
use crate::topic::{
    self, EntryFormat, Partition, Policies, PolicyChanges, Resize, Topic, TopicName,
};
use crate::topic_lock::TopicLock;

/// Creates, lists, describes, alters, grows and deletes topics.
#[derive(Clone, Debug)]
pub struct Topics {
    queue: Queue,
}

/// A topic with its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicDescription {
    /// The topic as the registry describes it.
    pub topic: Topic,
    /// Its partitions, by number.
    pub partitions: Vec<PartitionDescription>,
    /// The key of its dead letters.
    pub dead_letters_key: String,
    /// The slot of its dead letters on a Redis Cluster.
    pub dead_letters_slot: Option<u16>,
}

/// A partition with its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionDescription {
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
    /// Administers the topics of this queue.
    pub fn topics(&self) -> Topics {
        Topics { queue: self.clone() }
    }
}

/// Attempts of an operation that concurrent changes make fail.
const ATTEMPTS_MAX: usize = 100;
/// Partitions deleted concurrently, and between two renewals of the topic lock.
const DELETE_BATCH: usize = 64;

impl Topics {
    /// Creates a topic. Returns `false` if it already exists with the same settings, or with full entries instead of compact
    /// ones. Fails with [`TopicExists`](QueueError::TopicExists) if it exists with other settings.
    ///
    /// It hides a plain topic of the same name; the messages of the plain topic are not moved.
    pub async fn create(&self, name: &str, partitions: u16, policies: Policies) -> Result<bool> {
        let name = TopicName::new(name)?;
        check_partitions(partitions)?;
        policies.validate()?;
        let backend = &self.queue.inner.backend;
        let topic = Topic {
            layout: self.queue.layout(),
            partitions,
            created_at: Some(backend.now().await?),
            policies: policies.in_milliseconds(),
            ..Topic::plain(name.clone(), Layout::Plain)
        };
        for _ in 0..ATTEMPTS_MAX {
            let is_new = backend.map_create(&keys::meta(&name), &topic.to_meta()).await?;
            self.queue.invalidate(&name);
            if !is_new {
                let found = self.queue.read_topic(&name).await?;
                if found.layout.is_plain() {
                    // Deleted between the two steps: now it can be created.
                    continue;
                }
                if found.deleting_since.is_some() {
                    self.wait_for_deletion(&name).await?;
                    continue;
                }
                check_same(&found, &topic)?;
            }
            // Also if it existed: the process that created it may have died before registering it.
            self.register(&name).await?;
            if is_new {
                self.notify_watchers(&name).await;
            }
            return Ok(is_new);
        }
        Err(self.too_many_conflicts(&name))
    }

    /// The names of all created and [registered](Self::register_plain) topics, sorted. A registered one may have been
    /// deleted by another program.
    pub async fn list(&self) -> Result<Vec<String>> {
        let backend = &self.queue.inner.backend;
        let created = backend.set_members(&keys::registry()).await?;
        let plain = backend.set_members(&keys::plain_registry()).await?;
        let names: BTreeSet<String> = created.into_iter().chain(plain).collect();
        Ok(names.into_iter().collect())
    }

    /// Adds a plain topic, which its first message creates, to the [list](Self::list). Idempotent.
    pub async fn register_plain(&self, name: &str) -> Result<()> {
        let name = TopicName::new(name)?;
        let set = keys::plain_registry();
        self.queue.inner.backend.set_add(&set, &[name.as_str()], None).await?;
        Ok(())
    }

    /// Describes a topic. A topic that was not created is plain.
    pub async fn describe(&self, name: &str) -> Result<TopicDescription> {
        let topic = self.queue.read_topic(&TopicName::new(name)?).await?;
        let slot = |key: &str| self.queue.inner.backend.cluster_slot(key);
        let partitions = (0..topic.partitions)
            .map(|partition| {
                let stream_key = keys::stream(&topic, partition).to_string();
                PartitionDescription {
                    partition,
                    slot: slot(&stream_key),
                    stream_key,
                    delays_key: keys::delays(&topic, partition).to_string(),
                }
            })
            .collect();
        let dead_letters_key = keys::dead_letters(&topic).to_string();
        Ok(TopicDescription {
            partitions,
            dead_letters_slot: slot(&dead_letters_key),
            dead_letters_key,
            topic: Topic::clone(&topic),
        })
    }

    /// Whether a topic was created. `true` can be as old as the metadata that producers use: as the topic's `refresh`, or older
    /// while the metadata cannot be read in time. `false` is read now.
    pub async fn is_created(&self, name: &str) -> Result<bool> {
        let name = TopicName::new(name)?;
        if !self.queue.topic_or_expired(&name).await?.layout.is_plain() {
            return Ok(true);
        }
        Ok(!self.queue.read_topic(&name).await?.layout.is_plain())
    }

    /// Gives a topic more partitions, and returns when every producer knows of it: after twice its `refresh`.
    ///
    /// With hash partitioning and `MessageOrder::PerKey`, messages of a key that moves to another partition are handled only
    /// after the older ones in its old partition are done. If this process dies meanwhile, the next `grow` or a
    /// consumer completes the resize. If it fails before that, repeat it, with the same or with the present number.
    pub async fn grow(&self, name: &str, partitions: u16) -> Result<()> {
        let name = TopicName::new(name)?;
        check_partitions(partitions)?;
        for _ in 0..ATTEMPTS_MAX {
            self.complete_resize(&name).await?;
            let topic = self.queue.read_topic(&name).await?;
            if topic.layout.is_plain() {
                return Err(QueueError::NoTopic { topic: name.to_string() });
            }
            check_resize(&topic, partitions)?;
            let lock = TopicLock::acquire(&self.queue, &name).await?;
            if partitions == topic.partitions {
                // The process that grew it, or tried to grow it further, may have died before it was done.
                let repaired = self.repair_stream_set(&name).await;
                lock.release().await;
                repaired?;
                return self.register(&name).await;
            }
            // If another process has grown it meanwhile, the next iteration handles that first.
            let begun = self.begin_resize(&name, partitions, &lock).await;
            lock.release().await;
            begun?;
        }
        Err(self.too_many_conflicts(&name))
    }

    /// Changes retention, budget and retries of a topic, and returns its policies. Processes that have the topic cached
    /// follow within its `refresh`. An invalid change has no effect.
    pub async fn alter(&self, name: &str, changes: &PolicyChanges) -> Result<Policies> {
        let name = TopicName::new(name)?;
        let lock = TopicLock::acquire(&self.queue, &name).await?;
        let altered = self.alter_locked(&name, changes).await;
        lock.release().await;
        self.queue.invalidate(&name);
        self.notify_watchers(&name).await;
        altered
    }

    async fn alter_locked(&self, name: &TopicName, changes: &PolicyChanges) -> Result<Policies> {
        let topic = self.queue.read_topic(name).await?;
        if topic.deleting_since.is_some() {
            let difference = "its deletion was interrupted; delete it again first".to_owned();
            return Err(QueueError::TopicExists { topic: name.to_string(), difference });
        }
        let policies = topic.policies.with(changes).in_milliseconds();
        policies.validate()?;
        let meta = Topic::altered(&policies);
        let backend = &self.queue.inner.backend;
        // A plain topic has no map.
        if !backend.map_update(&keys::meta(name), None, &meta).await? {
            return Err(QueueError::NoTopic { topic: name.to_string() });
        }
        Ok(policies)
    }

    /// Deletes a topic with all its messages, groups, delayed messages and dead letters. Returns whether it existed.
    ///
    /// A deletion that fails part-way returns [`Interrupted`](QueueError::Interrupted); if the process dies, the topic
    /// keeps [`Topic::deleting_since`]. In both cases delete it again to finish; until then it stays in the list.
    ///
    /// Stop its producers first: they may send to the deleted topic until their cached metadata expires (`refresh`).
    pub async fn delete(&self, name: &str) -> Result<bool> {
        let name = TopicName::new(name)?;
        let lock = TopicLock::acquire(&self.queue, &name).await?;
        let mut progress = PartitionProgress::new([]);
        let deleted = self.delete_all(&name, &lock, &mut progress).await.map_err(|error| {
            let what = format!("the deletion of topic `{name}`");
            let next = "delete the topic again to finish it".to_owned();
            progress.interrupt(what, next, error)
        });
        lock.release().await;
        self.queue.invalidate(&name);
        self.notify_watchers(&name).await;
        deleted
    }

    /// Deletes the meta last: if this process dies, a repeated deletion still finds all parts, and the topic cannot be
    /// created again before they are deleted.
    async fn delete_all(
        &self,
        name: &TopicName,
        lock: &TopicLock,
        progress: &mut PartitionProgress,
    ) -> Result<bool> {
        let backend = &self.queue.inner.backend;
        let topic = self.queue.read_topic(name).await?;
        *progress = PartitionProgress::new(0..topic.partitions);
        if topic.layout.is_plain() && self.is_listed(name).await? {
            // Left over from a deletion: plain topics are never listed. A stream with the plain name belongs to another
            // program.
            self.register(name).await?;
            return Ok(true);
        }
        let now = backend.now().await?;
        progress.begin();
        if !topic.layout.is_plain() && topic.deleting_since.is_none() {
            // First, so that `describe` shows the deletion in progress.
            backend.map_update(&keys::meta(name), None, &Topic::deleting(now)).await?;
        }
        let mut had_data = backend.delete_stream(&keys::dead_letters(&topic)).await?;
        let delays = keys::all_delays(&topic);
        for some in delays.chunks(DELETE_BATCH) {
            lock.renew().await?;
            let gone = some.iter().map(|delays| backend.delete_delay_set(delays));
            had_data |= try_join_all(gone).await?.contains(&true);
        }
        let streams = streams_of(&topic);
        for some in streams.chunks(DELETE_BATCH) {
            lock.renew().await?;
            progress.next(some.len());
            let gone = some.iter().map(|stream| backend.delete_stream(stream));
            had_data |= try_join_all(gone).await?.contains(&true);
            progress.done();
        }
        for some in keys::own_data_epochs(&topic).chunks(DELETE_BATCH) {
            lock.renew().await?;
            try_join_all(some.iter().map(|witness| backend.map_delete(witness))).await?;
        }
        lock.renew().await?;
        // Without meta the topic did not exist when this started; one created since must not be deleted.
        let had_meta = !topic.layout.is_plain() && backend.map_delete(&keys::meta(name)).await?;
        let was_listed = backend.set_remove(&keys::registry(), &[name.as_str()]).await? > 0;
        backend.set_remove(&keys::plain_registry(), &[name.as_str()]).await?;
        // Another process may have created it again.
        self.register(name).await?;
        Ok(was_listed || had_meta || had_data)
    }

    /// Waits for a deletion in progress. An abandoned deletion is an error: parts of the topic are gone, and finishing
    /// it later would delete messages sent from now on.
    async fn wait_for_deletion(&self, name: &TopicName) -> Result<()> {
        // A deletion in progress holds the lock.
        TopicLock::acquire(&self.queue, name).await?.release().await;
        self.queue.invalidate(name);
        let found = self.queue.read_topic(name).await?;
        if found.deleting_since.is_none() {
            return Ok(());
        }
        let difference = "its deletion was interrupted; delete it again first".to_owned();
        Err(QueueError::TopicExists { topic: name.to_string(), difference })
    }

    async fn is_listed(&self, name: &TopicName) -> Result<bool> {
        let listed =
            self.queue.inner.backend.set_contains(&keys::registry(), &[name.as_str()]).await?;
        Ok(listed.contains(&true))
    }

    async fn remove_all(&self, set: &SetName) -> Result<()> {
        let members = self.queue.inner.backend.set_members(set).await?;
        let members: Vec<&str> = members.iter().map(String::as_str).collect();
        if !members.is_empty() {
            self.queue.inner.backend.set_remove(set, &members).await?;
        }
        Ok(())
    }

    /// Brings the registry in line with the meta. Every change calls this afterwards, and it re-reads the meta at the
    /// end, so the last caller leaves both consistent, whatever runs concurrently or dies in between.
    async fn register(&self, name: &TopicName) -> Result<()> {
        let backend = &self.queue.inner.backend;
        let set = keys::partitions(name);
        for _ in 0..ATTEMPTS_MAX {
            let topic = self.queue.read_topic(name).await?;
            if topic.layout.is_plain() {
                self.remove_all(&set).await?;
                backend.set_remove(&keys::registry(), &[name.as_str()]).await?;
            } else {
                let streams = streams_of(&topic);
                let streams: Vec<&str> = streams.iter().map(StreamName::as_str).collect();
                backend.set_add(&set, &streams, None).await?;
                backend.set_add(&keys::registry(), &[name.as_str()], None).await?;
            }
            let now = self.queue.read_topic(name).await?;
            if (now.layout, now.partitions) == (topic.layout, topic.partitions) {
                return Ok(());
            }
        }
        Err(self.too_many_conflicts(name))
    }

    /// Removes streams that the topic does not have from the set of its streams, and returns the topic. The caller holds the
    /// topic lock: a resize in progress adds its streams before the metadata counts them.
    ///
    /// A resize that failed in between leaves them. Then the set differs from the metadata, and producers take the topic for
    /// resized when they cannot read the metadata.
    async fn repair_stream_set(&self, name: &TopicName) -> Result<Arc<Topic>> {
        let backend = &self.queue.inner.backend;
        let topic = self.queue.read_topic(name).await?;
        if !topic.layout.is_plain() {
            let set = keys::partitions(name);
            let streams = streams_of(&topic);
            let known: BTreeSet<&str> = streams.iter().map(StreamName::as_str).collect();
            let members = backend.set_members(&set).await?;
            let unknown: Vec<&str> =
                members.iter().map(String::as_str).filter(|it| !known.contains(it)).collect();
            if !unknown.is_empty() {
                backend.set_remove(&set, &unknown).await?;
            }
        }
        Ok(topic)
    }

    /// Notifies consumers of the topic that it changed.
    async fn notify_watchers(&self, name: &TopicName) {
        group::notify_watchers(&*self.queue.inner.backend, &keys::topic_notification(name)).await;
    }

    fn too_many_conflicts(&self, name: &TopicName) -> QueueError {
        let by = format!("{ATTEMPTS_MAX} attempts conflicted with concurrent changes of it; retry");
        QueueError::Busy { topic: name.to_string(), by }
    }

    /// Starts a resize, unless the topic was changed since it was read.
    async fn begin_resize(
        &self,
        name: &TopicName,
        partitions: u16,
        lock: &TopicLock,
    ) -> Result<()> {
        let topic = self.repair_stream_set(name).await?;
        let is_settled = topic.resizes.last().is_none_or(|resize| resize.last_ids.is_some());
        if topic.layout.is_plain() || !is_settled || partitions <= topic.partitions {
            return Ok(());
        }
        // First the set of streams: producers compare it while the metadata cannot be read. Without the new streams they would go on
        // with the old count, longer than the resize waits for them.
        let mut grown = Topic { partitions, ..Topic::clone(&topic) };
        let streams = streams_of(&grown);
        let streams: Vec<&str> = streams.iter().map(StreamName::as_str).collect();
        let backend = &self.queue.inner.backend;
        backend.set_add(&keys::partitions(name), &streams, None).await?;
        // Only the holder of the lock may remove these streams again.
        lock.renew().await?;
        // As late as possible: producers have twice the topic's `refresh` from here on to read the new count, which they can only
        // after the next write.
        let began = backend.now().await?;
        let resize = Resize { from: topic.partitions, to: partitions, began, last_ids: None };
        grown.resizes.push(resize);
        let is_grown = self.replace_resizes(&topic, &grown).await?;
        // Also otherwise: if the topic was deleted meanwhile, the set must not stay.
        self.register(name).await?;
        if is_grown {
            self.notify_watchers(name).await;
        }
        Ok(())
    }

    /// Waits until every producer knows of the last resize, then records the last entries that moved keys wait for.
    pub(crate) async fn complete_resize(&self, name: &TopicName) -> Result<()> {
        for _ in 0..ATTEMPTS_MAX {
            let topic = self.queue.read_topic(name).await?;
            let Some(resize) = topic.resizes.last().filter(|resize| resize.last_ids.is_none())
            else {
                return Ok(());
            };
            let left = self.propagation_left(&topic, resize).await?;
            if !left.is_zero() {
                tokio::time::sleep(left).await;
                continue;
            }
            let last_ids = self.last_ids(&topic, resize.from).await?;
            let mut settled = Topic::clone(&topic);
            let last = settled.resizes.last_mut().expect("the last resize is pending");
            last.last_ids = Some(last_ids);
            if self.replace_resizes(&topic, &settled).await? {
                self.notify_watchers(name).await;
            }
        }
        Err(self.too_many_conflicts(name))
    }

    /// The last entry id of each of the first `partitions`.
    async fn last_ids(&self, topic: &Topic, partitions: u16) -> Result<Vec<EntryId>> {
        let mut last_ids = Vec::with_capacity(usize::from(partitions));
        for partition in 0..partitions {
            let last = self
                .queue
                .inner
                .backend
                .range(&keys::stream(topic, partition), Range::last(1))
                .await?;
            last_ids.push(last.first().map_or(EntryId::MIN, |entry| entry.id));
        }
        Ok(last_ids)
    }

    async fn propagation_left(&self, topic: &Topic, resize: &Resize) -> Result<Duration> {
        let age = self.queue.inner.backend.now().await?.since(resize.began);
        Ok(Resize::propagation_time(topic.policies.refresh).saturating_sub(age))
    }

    /// Writes the resizes and the partition count if they are unchanged since `old`. Returns whether it did.
    async fn replace_resizes(&self, old: &Topic, new: &Topic) -> Result<bool> {
        let meta = new.to_meta();
        let changed: RegistryMap = meta
            .into_iter()
            .filter(|(field, _)| matches!(field.as_str(), topic::RESIZES | topic::PARTITION_COUNT))
            .collect();
        let old_resizes = topic::resizes_to_json(&old.resizes);
        let backend = &self.queue.inner.backend;
        // A topic created by another program has no list of resizes: compare the partition count instead.
        let count = old.partitions.to_string();
        let meta = keys::meta(&old.name);
        let expect = (topic::RESIZES, old_resizes.as_bytes());
        let mut written = backend.map_update(&meta, Some(expect), &changed).await?;
        if !written && old.resizes.is_empty() {
            let expect = (topic::PARTITION_COUNT, count.as_bytes());
            written = backend.map_update(&meta, Some(expect), &changed).await?;
        }
        self.queue.invalidate(&old.name);
        Ok(written)
    }
}

fn streams_of(topic: &Topic) -> Vec<StreamName> {
    (0..topic.partitions).map(|partition| keys::stream(topic, partition)).collect()
}

fn check_resize(topic: &Topic, partitions: u16) -> Result<()> {
    let name = &topic.name;
    if partitions < topic.partitions {
        let problem = format!(
            "{partitions}; topic `{name}` has {}, and the number can only grow",
            topic.partitions
        );
        return Err(QueueError::invalid("partitions", problem));
    }
    if partitions > topic.partitions && topic.resizes.len() >= RESIZES_MAX {
        let problem = format!("topic `{name}` has already been grown {RESIZES_MAX} times");
        return Err(QueueError::invalid("a resize", problem));
    }
    Ok(())
}

fn check_partitions(partitions: u16) -> Result<()> {
    if !(1..=PARTITIONS_MAX).contains(&partitions) {
        let problem = format!("{partitions}; 1 to {PARTITIONS_MAX}");
        return Err(QueueError::invalid("partitions", problem));
    }
    Ok(())
}

fn check_same(found: &Topic, wanted: &Topic) -> Result<()> {
    // Full entries have all that compact ones have. So a program keeps working with topics that older versions created.
    let accepts_format = wanted.policies.entry_format == EntryFormat::Compact;
    let entry_format =
        if accepts_format { EntryFormat::Compact } else { found.policies.entry_format };
    let found_policies = Policies { entry_format, ..found.policies.clone() };
    let difference = if found.partitions != wanted.partitions {
        format!("it has {} partitions, not {}", found.partitions, wanted.partitions)
    } else if found_policies != wanted.policies {
        differences(&found_policies, &wanted.policies)
    } else {
        return Ok(());
    };
    Err(QueueError::TopicExists { topic: found.name.to_string(), difference })
}

/// The settings that differ: name, value of the existing topic, requested value.
fn differences(found: &Policies, wanted: &Policies) -> String {
    let values = |policies: &Policies| {
        let count = |value: Option<u64>| value.map_or("none".to_owned(), |it| it.to_string());
        let Retention { max_len, max_age, max_bytes } = policies.retention;
        let max_age = max_age.map_or("none".to_owned(), |age| format!("{age:?}"));
        [
            ("retention_count", count(max_len)),
            ("retention_age", max_age),
            ("retention_bytes", count(max_bytes)),
            ("byte_budget", count(policies.byte_budget)),
            ("payload_bytes_max", policies.payload_bytes_max.to_string()),
            ("max_retries", policies.max_retries.to_string()),
            ("refresh", format!("{:?}", policies.refresh)),
            ("entry_format", policies.entry_format.as_str().to_owned()),
        ]
    };
    let pairs = values(found).into_iter().zip(values(wanted));
    let differing = pairs.filter(|((_, found), (_, wanted))| found != wanted);
    let shown =
        differing.map(|((name, found), (_, wanted))| format!("`{name}` is {found}, not {wanted}"));
    shown.collect::<Vec<_>>().join("; ")
}

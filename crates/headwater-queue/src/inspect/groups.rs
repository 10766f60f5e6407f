//! Group statistics: pending messages, lag, consumers, members and partition owners.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use headwater_stream::{
    EntryId, GroupStats, LeaseInfo, LeaseName, Liveness, SettleAction, StreamError, StreamStats,
};

use super::{CONCURRENT_STATS, Inspector, ReadPartitions};
use crate::config::Mode;
use crate::error::{QueueError, Result};
use crate::group::{GroupSnapshot, MemberStatus};
use crate::keys;
use crate::topic::{GroupName, Partition, Topic, TopicName, group_name};

/// The problem of a partition whose messages could be read, and whose lease could not.
const OWNER_UNKNOWN: &str = "the server of its lease did not answer";

/// Statistics of a group on a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupView {
    /// The topic.
    pub topic: String,
    /// The group.
    pub group: String,
    /// Messages delivered and not settled, of the partitions that can be read.
    pub pending: u64,
    /// Messages not delivered yet; `None` if the server cannot tell for some partition, or a partition cannot be read.
    pub lag: Option<u64>,
    /// Its consumers over all partitions that can be read, sorted by name. Old ones remain listed until they are removed.
    pub consumers: Vec<ConsumerView>,
    /// Registered members for this topic, sorted by name.
    pub members: Vec<MemberView>,
    /// Partition by partition, by number.
    pub partitions: Vec<GroupPartitionView>,
}

/// Statistics of a group on one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPartitionView {
    /// The partition.
    pub partition: Partition,
    /// Messages delivered and not settled; `None` if the partition cannot be read.
    pub pending: Option<u64>,
    /// Messages not delivered yet; `None` where the server cannot tell, or the partition cannot be read.
    pub lag: Option<u64>,
    /// The last delivered message; `None` if the group does not exist on this partition, or the partition cannot be read.
    pub last_delivered: Option<EntryId>,
    /// The newest message of the partition.
    pub last_id: Option<EntryId>,
    /// The owner; `None` if the partition is free or shared, or `problem` is set.
    pub owner: Option<OwnerView>,
    /// Why something of the partition is unknown: its server does not answer. `None` if everything could be read.
    pub problem: Option<String>,
}

impl GroupView {
    /// The partitions that could not be read completely, because their server does not answer. Their messages are not in the totals.
    pub fn unread_partitions(&self) -> Vec<Partition> {
        let unread = self.partitions.iter().filter(|one| one.problem.is_some());
        unread.map(|one| one.partition).collect()
    }

    /// Fails with a transient error if a partition could not be read. For changes that depend on all of them.
    pub(crate) fn require_complete(&self) -> Result<()> {
        self.partitions.iter().try_for_each(GroupPartitionView::require_complete)
    }
}

impl GroupPartitionView {
    /// Fails with a transient error if the partition could not be read.
    pub fn require_complete(&self) -> Result<()> {
        match &self.problem {
            None => Ok(()),
            Some(problem) => {
                let problem = format!("partition {} cannot be read: {problem}", self.partition);
                Err(StreamError::Unavailable { problem, source: None }.into())
            }
        }
    }
}

/// The owner of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerView {
    /// Its consumer name.
    pub holder: String,
    /// Its epoch; 0 for a program that does not use epochs.
    pub epoch: u64,
    /// Time since it renewed its lease, assuming the lease TTL of this process.
    pub heartbeat_age: Duration,
    /// Time until its lease expires without a renewal.
    pub remaining: Duration,
}

/// A consumer of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerView {
    /// Its name.
    pub name: String,
    /// Messages pending for it.
    pub pending: u64,
    /// Time since its last activity on any partition.
    pub idle: Duration,
    /// Number of partitions that list it.
    pub partitions: u16,
}

/// A registered member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// The member id.
    pub member: String,
    /// Its consumer name; `None` for a stopped static member.
    pub consumer: Option<String>,
    /// Its consumption mode.
    pub mode: Mode,
    /// Partitions reserved for a stopped static member.
    pub reserved: Vec<Partition>,
    /// Time since its last heartbeat, or since it stopped; `None` if its lease has expired.
    pub heartbeat_age: Option<Duration>,
}

impl Inspector {
    /// Statistics of one group of a topic. Partitions whose server does not answer have a
    /// [`problem`](GroupPartitionView::problem). Fails with that of one of them if no other has the group.
    pub async fn group(&self, topic: &str, group: &str) -> Result<GroupView> {
        let group = group_name(group)?;
        let topic = self.queue.existing_topic(topic).await?;
        let read = self.queue.readable_partition_stats(&topic).await?;
        if group_names(&read.stats).contains(&group) {
            return self.view(&topic, &group, &read).await;
        }
        Err(read.error.map_or_else(|| no_group(&topic, &group), QueueError::from))
    }

    /// Statistics of all groups of a topic, sorted by name; see [`group`](Self::group). Groups that are only on partitions whose
    /// server does not answer are not found.
    pub async fn groups(&self, topic: &str) -> Result<Vec<GroupView>> {
        let topic = self.queue.existing_topic(topic).await?;
        let read = self.queue.readable_partition_stats(&topic).await?;
        // Together, because each waits for a server that does not answer.
        let views = group_names(&read.stats).into_iter().map(|group| {
            let (topic, read) = (&topic, &read);
            async move { self.view(topic, &group, read).await }
        });
        let views: Vec<GroupView> =
            stream::iter(views).buffered(CONCURRENT_STATS).try_collect().await?;
        match read.error {
            Some(error) if views.is_empty() => Err(error.into()),
            _ => Ok(views),
        }
    }

    /// The names of all groups of a topic, sorted. Cheaper than [`groups`](Self::groups): no lag, members or owners.
    pub async fn group_names(&self, topic: &str) -> Result<Vec<String>> {
        let topic = self.queue.existing_topic(topic).await?;
        let streams = (0..topic.partitions).map(|partition| keys::stream(&topic, partition));
        let backend = &self.queue.inner.backend;
        let stats = streams.map(|stream| {
            let backend = Arc::clone(backend);
            async move { backend.stats_without_lag(&stream).await }
        });
        let stats: Vec<Option<StreamStats>> =
            stream::iter(stats).buffered(CONCURRENT_STATS).try_collect().await?;
        Ok(group_names(&stats).iter().map(GroupName::to_string).collect())
    }

    async fn view(
        &self,
        topic: &Topic,
        group: &GroupName,
        read: &ReadPartitions,
    ) -> Result<GroupView> {
        let stats = &read.stats;
        // A group of another program may have a name that Headwater does not accept: it has no leases and no members.
        let is_valid = group_name(group.as_str()).is_ok();
        let (owners, members) = if is_valid {
            let names = lease_names(topic, group);
            (self.read_owners(&names).await?, self.members(topic, group).await?)
        } else {
            (vec![None; stats.len()], Vec::new())
        };
        let stats_or_problems = stats.iter().zip(&read.problems);
        let partitions: Vec<GroupPartitionView> = (0..)
            .zip(stats_or_problems)
            .zip(owners)
            .map(|((partition, (stats, problem)), owner)| match problem {
                None => partition_view(partition, group, stats, owner),
                Some(problem) => unread_partition(partition, problem),
            })
            .collect();
        Ok(GroupView {
            topic: topic.name.to_string(),
            group: group.to_string(),
            pending: partitions.iter().filter_map(|partition| partition.pending).sum(),
            lag: partitions.iter().map(|partition| partition.lag).sum(),
            consumers: consumers(group, stats),
            members,
            partitions,
        })
    }

    /// The owners of the partitions of several groups, each a topic and a group, in one call of the backend; by number of the
    /// partition, `None` for one that is free or shared. A lease whose server did not answer has the holder
    /// [`LeaseInfo::UNKNOWN`]. A group whose name Headwater does not accept has none: the list is empty.
    pub async fn owners(&self, groups: &[(String, String)]) -> Result<Vec<Vec<Option<OwnerView>>>> {
        let leases = groups.iter().cloned().map(|(topic, group)| async move {
            let Ok(group) = group_name(&group) else { return Ok(Vec::new()) };
            // One topic whose metadata cannot be read does not hide the owners of the others.
            let topic = self.queue.topic_or_expired(&TopicName::new(topic)?).await?;
            Ok::<_, QueueError>(lease_names(&topic, &group))
        });
        let leases: Vec<Vec<LeaseName>> =
            stream::iter(leases).buffered(CONCURRENT_STATS).try_collect().await?;
        let counts: Vec<usize> = leases.iter().map(Vec::len).collect();
        let names = leases.concat();
        let mut owners = self.read_owners(&names).await?.into_iter();
        Ok(counts.into_iter().map(|count| owners.by_ref().take(count).collect()).collect())
    }

    async fn read_owners(&self, names: &[LeaseName]) -> Result<Vec<Option<OwnerView>>> {
        let leases = self.queue.inner.backend.leases(names).await?;
        let owner = |lease: LeaseInfo| OwnerView {
            heartbeat_age: self.age(lease.remaining),
            holder: lease.holder.to_string(),
            epoch: lease.epoch.0,
            remaining: lease.remaining,
        };
        Ok(leases.into_iter().map(|lease| lease.map(owner)).collect())
    }

    /// The registered members of a group for this topic, including dead ones.
    pub(crate) async fn members(
        &self,
        topic: &Topic,
        group: &GroupName,
    ) -> Result<Vec<MemberView>> {
        let backend = &*self.queue.inner.backend;
        let seen = GroupSnapshot::read(backend, group, Vec::new()).await?;
        let mut members: Vec<MemberView> = seen
            .entries_for(&topic.name)
            .iter()
            .cloned()
            .map(|(entry, life)| {
                let (consumer, reserved) = match entry.status {
                    MemberStatus::Active(holder) => (Some(holder.to_string()), Vec::new()),
                    MemberStatus::Reserved(partitions) => (None, partitions),
                };
                MemberView {
                    member: entry.member,
                    consumer,
                    mode: entry.mode,
                    reserved,
                    heartbeat_age: match life {
                        Liveness::Alive(remaining) => Some(self.age(remaining)),
                        Liveness::Dead => None,
                    },
                }
            })
            .collect();
        members.sort_by(|a, b| (&a.member, &a.consumer).cmp(&(&b.member, &b.consumer)));
        Ok(members)
    }

    /// Time since a lease with this remaining time was renewed.
    fn age(&self, remaining: Duration) -> Duration {
        self.queue.inner.config.lease.ttl.saturating_sub(remaining)
    }
}

fn lease_names(topic: &Topic, group: &GroupName) -> Vec<LeaseName> {
    (0..topic.partitions).map(|partition| keys::lease(topic, group, partition)).collect()
}

fn no_group(topic: &Topic, group: &GroupName) -> QueueError {
    QueueError::NoGroup { topic: topic.name.to_string(), group: group.to_string() }
}

pub(crate) fn group_names(stats: &[Option<StreamStats>]) -> BTreeSet<GroupName> {
    let groups = stats.iter().flatten().flat_map(|stats| &stats.groups);
    groups.map(|group| group.name.clone()).collect()
}

fn partition_view(
    partition: Partition,
    group: &GroupName,
    stats: &Option<StreamStats>,
    owner: Option<OwnerView>,
) -> GroupPartitionView {
    let (pending, lag) = group_of_partition(group, stats);
    let is_unknown = |owner: &OwnerView| owner.holder == LeaseInfo::UNKNOWN;
    let problem = owner.as_ref().is_some_and(is_unknown).then(|| OWNER_UNKNOWN.to_owned());
    GroupPartitionView {
        partition,
        pending: Some(pending),
        lag,
        last_delivered: find(group, stats).map(|group| group.last_delivered),
        last_id: stats.as_ref().and_then(|stats| stats.last_id),
        owner: owner.filter(|owner| !is_unknown(owner)),
        problem,
    }
}

/// A partition whose server does not answer.
fn unread_partition(partition: Partition, problem: &str) -> GroupPartitionView {
    GroupPartitionView {
        partition,
        pending: None,
        lag: None,
        last_delivered: None,
        last_id: None,
        owner: None,
        problem: Some(problem.to_owned()),
    }
}

fn find<'a>(group: &GroupName, stats: &'a Option<StreamStats>) -> Option<&'a GroupStats> {
    stats.iter().flat_map(|stats| &stats.groups).find(|candidate| candidate.name == *group)
}

/// Pending messages and lag of a group on a partition.
pub(crate) fn group_of_partition(
    group: &GroupName,
    stats: &Option<StreamStats>,
) -> (u64, Option<u64>) {
    match (find(group, stats), stats) {
        (Some(group), _) => (group.pending, group.lag),
        // Where the group does not exist, no message was delivered.
        (None, Some(stats)) => (0, Some(stats.length)),
        (None, None) => (0, Some(0)),
    }
}

fn consumers(group: &GroupName, stats: &[Option<StreamStats>]) -> Vec<ConsumerView> {
    let mut views: BTreeMap<&str, ConsumerView> = BTreeMap::new();
    let groups = stats.iter().flatten().flat_map(|stats| &stats.groups);
    let consumers = groups.filter(|found| found.name == *group).flat_map(|group| &group.consumers);
    // Released messages are pending for no consumer.
    for consumer in consumers.filter(|one| one.name.as_str() != SettleAction::RELEASED) {
        let name = consumer.name.as_str();
        let view = views.entry(name).or_insert_with(|| ConsumerView {
            name: name.to_owned(),
            pending: 0,
            idle: consumer.idle,
            partitions: 0,
        });
        view.pending += consumer.pending;
        view.idle = view.idle.min(consumer.idle);
        view.partitions += 1;
    }
    views.into_values().collect()
}

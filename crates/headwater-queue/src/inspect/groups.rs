//! Group statistics: pending messages, lag, consumers, members and partition owners.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use headwater_stream::{EntryId, LeaseInfo, LeaseName, Liveness, SettleAction, StreamStats};

use super::Inspector;
use crate::config::Mode;
use crate::error::{QueueError, Result};
use crate::group::{GroupSnapshot, MemberStatus};
use crate::keys;
use crate::topic::{GroupName, Partition, Topic, group_name};

/// Statistics of a group on a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupView {
    /// The topic.
    pub topic: String,
    /// The group.
    pub group: String,
    /// Messages delivered and not settled.
    pub pending: u64,
    /// Messages not delivered yet; `None` if the server cannot tell for some partition.
    pub lag: Option<u64>,
    /// Its consumers over all partitions, sorted by name. Old ones remain listed until they are removed.
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
    /// Messages delivered and not settled.
    pub pending: u64,
    /// Messages not delivered yet; `None` where the server cannot tell.
    pub lag: Option<u64>,
    /// The last delivered message; `None` if the group does not exist on this partition.
    pub last_delivered: Option<EntryId>,
    /// The newest message of the partition.
    pub last_id: Option<EntryId>,
    /// The owner; `None` if the partition is free or shared.
    pub owner: Option<OwnerView>,
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
    /// Statistics of one group of a topic.
    pub async fn group(&self, topic: &str, group: &str) -> Result<GroupView> {
        let group = group_name(group)?;
        let topic = self.queue.existing_topic(topic).await?;
        let stats = self.queue.partition_stats(&topic).await?;
        if !names(&stats).contains(&group) {
            return Err(no_group(&topic, &group));
        }
        self.view(&topic, &group, &stats).await
    }

    /// Statistics of all groups of a topic, sorted by name.
    pub async fn groups(&self, topic: &str) -> Result<Vec<GroupView>> {
        let topic = self.queue.existing_topic(topic).await?;
        let stats = self.queue.partition_stats(&topic).await?;
        let mut views = Vec::new();
        for group in names(&stats) {
            views.push(self.view(&topic, &group, &stats).await?);
        }
        Ok(views)
    }

    async fn view(
        &self,
        topic: &Topic,
        group: &GroupName,
        stats: &[Option<StreamStats>],
    ) -> Result<GroupView> {
        let owners = self.owners(topic, group).await?;
        let partitions: Vec<GroupPartitionView> = (0..)
            .zip(stats)
            .zip(owners)
            .map(|((partition, stats), owner)| partition_view(partition, group, stats, owner))
            .collect();
        Ok(GroupView {
            topic: topic.name.to_string(),
            group: group.to_string(),
            pending: partitions.iter().map(|partition| partition.pending).sum(),
            lag: partitions.iter().map(|partition| partition.lag).sum(),
            consumers: consumers(group, stats),
            members: self.members(topic, group).await?,
            partitions,
        })
    }

    async fn owners(&self, topic: &Topic, group: &GroupName) -> Result<Vec<Option<OwnerView>>> {
        let names: Vec<LeaseName> =
            (0..topic.partitions).map(|partition| keys::lease(topic, group, partition)).collect();
        let leases = self.queue.inner.backend.leases(&names).await?;
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

fn no_group(topic: &Topic, group: &GroupName) -> QueueError {
    QueueError::NoGroup { topic: topic.name.to_string(), group: group.to_string() }
}

fn names(stats: &[Option<StreamStats>]) -> BTreeSet<GroupName> {
    let groups = stats.iter().flatten().flat_map(|stats| &stats.groups);
    groups.map(|group| group.name.clone()).collect()
}

fn partition_view(
    partition: Partition,
    group: &GroupName,
    stats: &Option<StreamStats>,
    owner: Option<OwnerView>,
) -> GroupPartitionView {
    let found =
        stats.iter().flat_map(|stats| &stats.groups).find(|candidate| candidate.name == *group);
    GroupPartitionView {
        partition,
        pending: found.map_or(0, |group| group.pending),
        // Where the group does not exist, no message was delivered.
        lag: match (found, stats) {
            (Some(group), _) => group.lag,
            (None, Some(stats)) => Some(stats.length),
            (None, None) => Some(0),
        },
        last_delivered: found.map(|group| group.last_delivered),
        last_id: stats.as_ref().and_then(|stats| stats.last_id),
        owner,
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

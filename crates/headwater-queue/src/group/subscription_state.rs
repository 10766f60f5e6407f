//! The state of one subscription within a group session: the partitions it holds and those it should hold.
//!
//! Upstream: `membership` updates it. Downstream: `assign` computes the owner of each partition.
//! Guarantees: a plan follows from a group snapshot and from the partitions this process holds. For held partitions the
//! local state is newer than the snapshot and takes precedence.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Fence, HeldLease, HolderName, LeaseInfo, LeaseName};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::assign::{CurrentOwner, assign};
use super::members::{GroupSnapshot, MemberEntry, MemberStatus};
use super::rebalance_listener::JoinRequest;
use crate::config::Mode;
use crate::error::Result;
use crate::keys;
use crate::topic::{Partition, Topic, TopicName};

/// Identifies a subscription in events by topic and serial number. It may be gone, or replaced by another one on the
/// same topic, when the event is handled.
pub(super) type GroupSubscriptionId = (TopicName, u64);

/// Sends the result of a join to the caller.
pub(super) type JoinReply = oneshot::Sender<Result<()>>;

/// A subscription within a group session.
pub(super) struct GroupSubscription {
    /// Distinguishes this subscription from earlier ones to the same topic.
    pub(super) serial: u64,
    pub(super) request: JoinRequest,
    /// The topic as last read.
    pub(super) topic: Arc<Topic>,
    /// The partition leases, by partition number. Empty in shared mode.
    pub(super) leases: Vec<LeaseName>,
    /// Partitions being acquired, owned, or being released.
    pub(super) held: BTreeMap<Partition, HeldPartition>,
    pub(super) state: SubscriptionState,
    /// The caller waiting for the join to complete.
    pub(super) reply: Option<JoinReply>,
    /// Callers waiting for the leave to complete.
    pub(super) leave_waiters: Vec<oneshot::Sender<()>>,
    /// Whether `on_joined` was called.
    pub(super) has_joined: bool,
    /// Whether the next poll must read its leases.
    pub(super) dirty: bool,
    /// Whether the poll in progress reads its leases.
    pub(super) in_poll: bool,
    /// Since when polls have not said who owns some partitions.
    pub(super) partial_since: Option<Instant>,
    /// When to read the topic's meta again, and whether a read is in progress.
    pub(super) refresh_at: Instant,
    pub(super) is_reading_meta: bool,
}

/// Lifecycle state of a subscription within the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubscriptionState {
    /// Not in the member list.
    Unregistered,
    /// Being added to the member list.
    Registering,
    /// Takes part in rebalances.
    Member,
    /// Leaving: its partitions are being revoked.
    Draining,
    /// All partitions are revoked; being removed from the member list.
    Deregistering,
}

/// A partition this process holds, and the topic it was acquired under.
pub(super) struct HeldPartition {
    pub(super) topic: Arc<Topic>,
    pub(super) lease: LeaseName,
    /// The acquired lease, while the partition is assigned to the listener.
    pub(super) held: Option<HeldLease>,
    pub(super) state: PartitionOwnership,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartitionOwnership {
    /// Its lease is being acquired; the listener does not know it yet.
    Acquiring,
    /// Assigned to the listener.
    Owned,
    /// The listener is finishing messages in flight.
    Revoking,
    /// Nothing is in flight; the lease is still held.
    Drained,
    /// Never assigned to the listener; its lease is being released.
    Releasing,
}

/// The names of this process in a group.
#[derive(Clone, Debug)]
pub(super) struct GroupMemberIdentity {
    /// The static member id, or the holder name.
    pub(super) member: String,
    /// The name that holds the leases; unique per session.
    pub(super) holder: HolderName,
}

/// Actions that bring the held partitions of a topic in line with the assignment.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RebalanceActions {
    /// Assigned to this member, and free.
    pub(super) acquire: Vec<Partition>,
    /// Owned, but assigned to another member.
    pub(super) revoke: Vec<Partition>,
    /// Leases this process holds without using them: the reply of an acquire or release was lost.
    pub(super) orphan_leases: Vec<Fence>,
    /// Remaining time of the first lease to expire that another holder has and this member is assigned.
    pub(super) next_expiry: Option<Duration>,
}

impl GroupSubscription {
    pub(super) fn new(serial: u64, request: JoinRequest, reply: JoinReply) -> Self {
        let topic = Arc::clone(&request.topic);
        let refresh = topic.policies.refresh;
        Self {
            serial,
            leases: lease_names(&request, &topic),
            topic,
            request,
            held: BTreeMap::new(),
            state: SubscriptionState::Unregistered,
            reply: Some(reply),
            leave_waiters: Vec::new(),
            has_joined: false,
            dirty: true,
            in_poll: false,
            partial_since: None,
            refresh_at: Instant::now() + refresh,
            is_reading_meta: false,
        }
    }

    /// Replaces the topic. Returns the held partitions that no longer exist or have different keys.
    pub(super) fn change(&mut self, topic: Arc<Topic>) -> Vec<Partition> {
        self.leases = lease_names(&self.request, &topic);
        self.topic = topic;
        self.dirty = true;
        let outdated = |number: &Partition| (!self.is_current(*number)).then_some(*number);
        self.held.keys().filter_map(outdated).collect()
    }

    /// Whether a held partition has the keys of the current topic. Compares stream keys: the lease key of a plain topic
    /// equals that of a first partition.
    pub(super) fn is_current(&self, number: Partition) -> bool {
        let is_current = |part: &HeldPartition| {
            number < self.topic.partitions
                && keys::stream(&part.topic, number) == keys::stream(&self.topic, number)
        };
        self.held.get(&number).is_some_and(is_current)
    }

    pub(super) fn id(&self) -> GroupSubscriptionId {
        (self.topic.name.clone(), self.serial)
    }

    /// The member-list entry of this subscription.
    pub(super) fn entry(&self, me: &GroupMemberIdentity) -> MemberEntry {
        self.entry_as(me, MemberStatus::Active(me.holder.clone()))
    }

    /// The entry that reserves the drained partitions for a static member.
    pub(super) fn reservation_entry(&self, me: &GroupMemberIdentity) -> MemberEntry {
        let idle = |(number, part): (&Partition, &HeldPartition)| {
            (part.state == PartitionOwnership::Drained).then_some(*number)
        };
        self.entry_as(me, MemberStatus::Reserved(self.held.iter().filter_map(idle).collect()))
    }

    fn entry_as(&self, me: &GroupMemberIdentity, status: MemberStatus) -> MemberEntry {
        let (mode, topic) = (self.request.mode, self.topic.name.clone());
        MemberEntry { member: me.member.clone(), status, mode, topic }
    }

    /// Number of partitions assigned to the listener.
    pub(super) fn owned(&self) -> usize {
        let works = |part: &&HeldPartition| {
            matches!(part.state, PartitionOwnership::Owned | PartitionOwnership::Revoking)
        };
        self.held.values().filter(works).count()
    }

    /// Whether nothing says who owns some partitions: their server did not answer, and this process does not hold them.
    pub(super) fn is_partial(&self, snapshot: &GroupSnapshot) -> bool {
        (0..).zip(&self.leases).any(|(number, lease)| {
            let info = snapshot.leases.get(lease).and_then(Option::as_ref);
            info.is_some_and(LeaseInfo::is_unknown) && !self.held.contains_key(&number)
        })
    }

    /// Compares a snapshot with the held partitions. `None` if the snapshot does not cover this subscription: it lacks
    /// some of its leases, or was read before this member registered. Partitions whose server did not answer stay as they are,
    /// held or not, and the others are shared as if these did not exist: a member that counted those it holds would give more of
    /// the others away than a member that cannot see their owner takes.
    pub(super) fn plan(
        &self,
        snapshot: &GroupSnapshot,
        me: &GroupMemberIdentity,
    ) -> Option<RebalanceActions> {
        let leases: Vec<_> =
            self.leases.iter().map(|lease| snapshot.leases.get(lease)).collect::<Option<_>>()?;
        let owned = |entry: &&MemberEntry| entry.mode == Mode::Owned;
        let entries: Vec<&MemberEntry> = snapshot.alive(&self.topic.name).filter(owned).collect();
        let members = number_members(self.topic.name.as_str(), &entries);
        let mine = *members.get(me.member.as_str())?;

        let mut holders: HashMap<&HolderName, usize> = HashMap::new();
        let mut reserved: HashMap<Partition, usize> = HashMap::new();
        for entry in &entries {
            let member = members[entry.member.as_str()];
            match &entry.status {
                MemberStatus::Active(holder) => drop(holders.insert(holder, member)),
                MemberStatus::Reserved(numbers) => {
                    reserved.extend(numbers.iter().map(|number| (*number, member)));
                }
            }
        }
        let leases: Vec<(Partition, &Option<LeaseInfo>)> = (0..)
            .zip(leases)
            .filter(|(_, info)| !info.as_ref().is_some_and(LeaseInfo::is_unknown))
            .collect();
        let current = |(number, info): &(Partition, &Option<LeaseInfo>)| match info {
            // The snapshot is older than the local state.
            _ if self.held.contains_key(number) => CurrentOwner::Held(mine),
            None => reserved
                .get(number)
                .map_or(CurrentOwner::Free, |member| CurrentOwner::Reserved(*member)),
            Some(info) if info.holder == me.holder => CurrentOwner::Free,
            Some(info) => {
                holders.get(&info.holder).map_or(CurrentOwner::Free, |at| CurrentOwner::Held(*at))
            }
        };
        let current_owners: Vec<CurrentOwner> = leases.iter().map(current).collect();
        let owners = assign(members.len(), &current_owners);

        let mut plan = RebalanceActions::default();
        for ((number, info), owner) in leases.into_iter().zip(owners) {
            let part = self.held.get(&number);
            match (owner == mine, part.map(|part| part.state), info) {
                (true, None, None) => plan.acquire.push(number),
                (true, None, Some(info)) if info.holder == me.holder => plan.acquire.push(number),
                (true, None, Some(info)) => {
                    let sooner = plan.next_expiry.is_none_or(|end| info.remaining < end);
                    plan.next_expiry = if sooner { Some(info.remaining) } else { plan.next_expiry };
                }
                (false, Some(PartitionOwnership::Owned), _) => plan.revoke.push(number),
                (false, None, Some(info)) if info.holder == me.holder => {
                    let lease = self.leases[usize::from(number)].clone();
                    plan.orphan_leases.push(Fence { lease, epoch: info.epoch });
                }
                _ => {}
            }
        }
        Some(plan)
    }
}

fn lease_names(request: &JoinRequest, topic: &Topic) -> Vec<LeaseName> {
    match request.mode {
        Mode::Owned => {
            (0..topic.partitions).map(|at| keys::lease(topic, &request.group, at)).collect()
        }
        Mode::Shared => Vec::new(),
    }
}

/// Numbers the members in an order that differs from topic to topic. Otherwise the first by name would get the extra
/// partition of every topic.
fn number_members<'a>(topic: &str, entries: &[&'a MemberEntry]) -> HashMap<&'a str, usize> {
    let members: BTreeSet<&str> = entries.iter().map(|entry| entry.member.as_str()).collect();
    let mut members: Vec<(u64, &str)> =
        members.into_iter().map(|member| (mix(topic, member), member)).collect();
    members.sort_unstable();
    members.into_iter().enumerate().map(|(at, (_, member))| (member, at)).collect()
}

/// FNV-1a with a final mix: stable across processes and versions.
fn mix(topic: &str, member: &str) -> u64 {
    let bytes = topic.bytes().chain([0]).chain(member.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

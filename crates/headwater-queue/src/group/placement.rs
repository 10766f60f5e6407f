//! One subscription in a session: what it has of its topic, and what it should have.
//!
//! Upstream: `stay` changes it as events come. Downstream: `assign` says who should own what.
//! Promises: a plan follows from what was seen and from what this process has in hand, which it knows better.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Fence, HolderName, LeaseInfo, LeaseName};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::assign::{Stake, assign};
use super::members::{Entry, Stand, View};
use super::seam::Joining;
use crate::config::Mode;
use crate::error::Result;
use crate::keys;
use crate::topic::{Partition, Topic, TopicName};

/// A subscription as events name it: it may be gone when they come, and another have its topic.
pub(super) type Who = (TopicName, u64);

/// Tells whoever waits to join how it went.
pub(super) type Answer = oneshot::Sender<Result<()>>;

/// A subscription in a session.
pub(super) struct Placement {
    /// Tells this subscription from an earlier one to the same topic.
    pub(super) serial: u64,
    pub(super) joining: Joining,
    /// The topic as it is now.
    pub(super) topic: Arc<Topic>,
    /// The leases of its partitions, by number. Empty if nobody owns any.
    pub(super) leases: Vec<LeaseName>,
    /// The partitions that are in our hands, or on the way there or from there.
    pub(super) parts: BTreeMap<Partition, Part>,
    pub(super) standing: Standing,
    /// Who waits for it to be a member.
    pub(super) answer: Option<Answer>,
    /// Who waits for it to have left.
    pub(super) farewells: Vec<oneshot::Sender<()>>,
    /// Whether the workplace knows that it takes part.
    pub(super) joined: bool,
    /// Whether its leases are to be looked at.
    pub(super) dirty: bool,
    /// Whether the look under way is about it.
    pub(super) looked_at: bool,
    /// When its meta is to be read again, and whether that is under way.
    pub(super) refresh_at: Instant,
    pub(super) reading: bool,
}

/// How far a subscription is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Others do not know of it.
    Outside,
    /// They are being told.
    Announcing,
    /// It takes part.
    Member,
    /// It hands over what it has.
    Leaving,
    /// It has handed over, and others are being told.
    Parting,
}

/// A partition in our hands, and the keys it was taken under.
pub(super) struct Part {
    pub(super) topic: Arc<Topic>,
    pub(super) lease: LeaseName,
    pub(super) state: PartState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartState {
    /// Its lease is being taken; nobody works on it.
    Taking,
    /// It is ours.
    Owned,
    /// What is in hand is being finished.
    GivingUp,
    /// Nothing is in hand, and the lease is still held.
    Idle,
    /// Nobody has worked on it, and its lease is being released.
    Releasing,
}

/// Who this process is in a session.
#[derive(Clone, Debug)]
pub(super) struct Me {
    pub(super) member: String,
    pub(super) holder: HolderName,
}

/// What is to be done about the partitions of a topic.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Ours, and free.
    pub(super) take: Vec<Partition>,
    /// Not ours, and in our hands.
    pub(super) give_up: Vec<Partition>,
    /// Leases we hold for nothing: the reply of an acquire or release was lost.
    pub(super) stray: Vec<Fence>,
    /// How soon the first lease ends that is held by another and should be ours.
    pub(super) next_end: Option<Duration>,
}

impl Placement {
    pub(super) fn new(serial: u64, joining: Joining, answer: Answer) -> Self {
        let topic = Arc::clone(&joining.topic);
        let refresh = topic.policies.refresh;
        Self {
            serial,
            leases: lease_names(&joining, &topic),
            topic,
            joining,
            parts: BTreeMap::new(),
            standing: Standing::Outside,
            answer: Some(answer),
            farewells: Vec::new(),
            joined: false,
            dirty: true,
            looked_at: false,
            refresh_at: Instant::now() + refresh,
            reading: false,
        }
    }

    /// The topic has changed. Returns the partitions that have other keys now, or none.
    pub(super) fn change(&mut self, topic: Arc<Topic>) -> Vec<Partition> {
        self.leases = lease_names(&self.joining, &topic);
        self.topic = topic;
        self.dirty = true;
        let outdated = |number: &Partition| (!self.is_current(*number)).then_some(*number);
        self.parts.keys().filter_map(outdated).collect()
    }

    /// Whether a partition in our hands has the keys that the topic has now. The stream tells: the lease of a plain
    /// topic is spelled like that of a first partition.
    pub(super) fn is_current(&self, number: Partition) -> bool {
        let is_current = |part: &Part| {
            number < self.topic.partitions
                && keys::stream(&part.topic, number) == keys::stream(&self.topic, number)
        };
        self.parts.get(&number).is_some_and(is_current)
    }

    pub(super) fn who(&self) -> Who {
        (self.topic.name.clone(), self.serial)
    }

    /// What others read of this subscription.
    pub(super) fn entry(&self, me: &Me) -> Entry {
        self.entry_as(me, Stand::Working(me.holder.clone()))
    }

    /// What is left of it for the member to come back to.
    pub(super) fn resting_entry(&self, me: &Me) -> Entry {
        let idle = |(number, part): (&Partition, &Part)| {
            (part.state == PartState::Idle).then_some(*number)
        };
        self.entry_as(me, Stand::Resting(self.parts.iter().filter_map(idle).collect()))
    }

    fn entry_as(&self, me: &Me, stand: Stand) -> Entry {
        let (mode, topic) = (self.joining.mode, self.topic.name.clone());
        Entry { member: me.member.clone(), stand, mode, topic }
    }

    /// How many partitions are worked on.
    pub(super) fn owned(&self) -> usize {
        let works = |part: &&Part| matches!(part.state, PartState::Owned | PartState::GivingUp);
        self.parts.values().filter(works).count()
    }

    /// What to do, after what was seen. `None` if that does not tell: it was about other leases, or before others knew
    /// of us.
    pub(super) fn plan(&self, view: &View, me: &Me) -> Option<Plan> {
        let leases: Vec<_> =
            self.leases.iter().map(|lease| view.leases.get(lease)).collect::<Option<_>>()?;
        let owned = |entry: &&Entry| entry.mode == Mode::Owned;
        let entries: Vec<&Entry> = view.alive(&self.topic.name).filter(owned).collect();
        let members = in_order(self.topic.name.as_str(), &entries);
        let mine = *members.get(me.member.as_str())?;

        let mut holders: HashMap<&HolderName, usize> = HashMap::new();
        let mut reserved: HashMap<Partition, usize> = HashMap::new();
        for entry in &entries {
            let member = members[entry.member.as_str()];
            match &entry.stand {
                Stand::Working(holder) => drop(holders.insert(holder, member)),
                Stand::Resting(numbers) => {
                    reserved.extend(numbers.iter().map(|number| (*number, member)));
                }
            }
        }
        let stake = |(number, info): (Partition, &&Option<LeaseInfo>)| match info {
            // What we have in hand we know better than the view, which is older.
            _ if self.parts.contains_key(&number) => Stake::Held(mine),
            None => reserved.get(&number).map_or(Stake::Free, |member| Stake::Reserved(*member)),
            Some(info) if info.holder == me.holder => Stake::Free,
            Some(info) => holders.get(&info.holder).map_or(Stake::Free, |at| Stake::Held(*at)),
        };
        let stakes: Vec<Stake> = (0..).zip(&leases).map(stake).collect();
        let owners = assign(members.len(), &stakes);

        let mut plan = Plan::default();
        for ((number, info), owner) in (0..).zip(leases).zip(owners) {
            let part = self.parts.get(&number);
            match (owner == mine, part.map(|part| part.state), info) {
                (true, None, None) => plan.take.push(number),
                (true, None, Some(info)) if info.holder == me.holder => plan.take.push(number),
                (true, None, Some(info)) => {
                    let sooner = plan.next_end.is_none_or(|end| info.remaining < end);
                    plan.next_end = if sooner { Some(info.remaining) } else { plan.next_end };
                }
                (false, Some(PartState::Owned), _) => plan.give_up.push(number),
                (false, None, Some(info)) if info.holder == me.holder => {
                    let lease = self.leases[usize::from(number)].clone();
                    plan.stray.push(Fence { lease, epoch: info.epoch });
                }
                _ => {}
            }
        }
        Some(plan)
    }
}

fn lease_names(joining: &Joining, topic: &Topic) -> Vec<LeaseName> {
    match joining.mode {
        Mode::Owned => {
            (0..topic.partitions).map(|at| keys::lease(topic, &joining.group, at)).collect()
        }
        Mode::Shared => Vec::new(),
    }
}

/// Numbers the members, in an order that differs from topic to topic: else the first by name would get every odd
/// partition of every topic.
fn in_order<'a>(topic: &str, entries: &[&'a Entry]) -> HashMap<&'a str, usize> {
    let members: BTreeSet<&str> = entries.iter().map(|entry| entry.member.as_str()).collect();
    let mut members: Vec<(u64, &str)> =
        members.into_iter().map(|member| (mix(topic, member), member)).collect();
    members.sort_unstable();
    members.into_iter().enumerate().map(|(at, (_, member))| (member, at)).collect()
}

/// FNV-1a with a final mix: every process and version gets the same number.
fn mix(topic: &str, member: &str) -> u64 {
    let bytes = topic.bytes().chain([0]).chain(member.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

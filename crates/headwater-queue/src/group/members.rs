//! The member list of a group: its entry format, and snapshots of who is alive.
//!
//! The list is a registry set with one entry per member and topic: `MEMBER HOLDER MODE TOPIC`. MEMBER is the static
//! member id, or the holder name if none is configured; HOLDER holds the liveness lease; MODE is `owned` or `shared`;
//! TOPIC comes last because it may contain spaces. A static member that stopped leaves `MEMBER {0,2,5} MODE TOPIC`:
//! the partitions reserved for it until its reservation lease expires.
//!
//! Upstream: `group_ops` writes entries, `membership` reads snapshots. Downstream: registry and leases of the backend.
//! Guarantees: those of the stream crate's [`MemberList`]: an entry whose lease is not held belongs to a dead member and
//! stays dead.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use headwater_stream::{
    Backend, ConsumerName, GroupName, HolderName, LeaseInfo, LeaseName, Liveness, LivenessLease,
    MemberList, MemberSnapshot,
};
use tokio::time::Instant;

use crate::config::Mode;
use crate::error::Result;
use crate::keys::{self, MembershipKeys};
use crate::topic::{Partition, TopicName};

/// One entry of the member list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberEntry {
    pub(crate) member: String,
    pub(crate) status: MemberStatus,
    pub(crate) mode: Mode,
    pub(crate) topic: TopicName,
}

/// The status of a member for one topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MemberStatus {
    /// Consuming, under this holder name.
    Active(HolderName),
    /// Stopped; these partitions are reserved for its return.
    Reserved(Vec<Partition>),
}

impl MemberEntry {
    /// Parses an entry; `None` if it is not in the format of this program.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(4, ' ');
        let mut next = || parts.next().filter(|part| !part.is_empty());
        let (member, status, mode, topic) = (next()?, next()?, next()?, next()?);
        let status = match status.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            None => MemberStatus::Active(HolderName::new(status).ok()?),
            Some("") => MemberStatus::Reserved(Vec::new()),
            Some(list) => {
                let list: Result<Vec<Partition>, _> = list.split(',').map(str::parse).collect();
                MemberStatus::Reserved(list.ok()?)
            }
        };
        let mode = match mode {
            "owned" => Mode::Owned,
            "shared" => Mode::Shared,
            _ => return None,
        };
        Some(Self { member: member.to_owned(), status, mode, topic: TopicName::new(topic).ok()? })
    }

    /// The lease that keeps this entry alive.
    fn liveness_lease(&self, keys: &MembershipKeys) -> LivenessLease {
        match &self.status {
            MemberStatus::Active(holder) => {
                LivenessLease { copies: keys.member(&self.member), holder: Some(holder.clone()) }
            }
            MemberStatus::Reserved(_) => {
                LivenessLease { copies: keys.reservation(&self.member), holder: None }
            }
        }
    }
}

impl fmt::Display for MemberEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { member, status, mode, topic } = self;
        let mode = match mode {
            Mode::Owned => "owned",
            Mode::Shared => "shared",
        };
        match status {
            MemberStatus::Active(holder) => write!(f, "{member} {holder} {mode} {topic}"),
            MemberStatus::Reserved(partitions) => {
                let list: Vec<String> = partitions.iter().map(Partition::to_string).collect();
                write!(f, "{member} {{{}}} {mode} {topic}", list.join(","))
            }
        }
    }
}

/// The members and leases of a group as read by one poll.
#[derive(Debug)]
pub(crate) struct GroupSnapshot {
    /// All parsed entries by topic.
    topics: HashMap<TopicName, Vec<(MemberEntry, Liveness)>>,
    /// Entries that are missing in a copy of the list.
    incomplete: HashSet<String>,
    /// The requested leases. A name that is absent was not requested.
    pub(super) leases: HashMap<LeaseName, Option<LeaseInfo>>,
    /// When the replies arrived; the remaining times of the leases count from here.
    pub(super) seen_at: Instant,
}

impl GroupSnapshot {
    /// Reads the members of a group and these partition leases, in two round trips.
    pub(crate) async fn read(
        backend: &dyn Backend,
        group: &GroupName,
        leases: Vec<LeaseName>,
    ) -> Result<Self> {
        let keys = MembershipKeys::new(backend, group);
        let parse = |text: &str| {
            let entry = MemberEntry::parse(text)?;
            let kept = entry.liveness_lease(&keys);
            Some((entry, kept))
        };
        let MemberSnapshot { entries, incomplete, leases, read_at: seen_at } =
            MemberList::new(keys.members()).read(backend, parse, leases).await?;
        let mut topics: HashMap<TopicName, Vec<(MemberEntry, Liveness)>> = HashMap::new();
        for (entry, life) in entries {
            topics.entry(entry.topic.clone()).or_default().push((entry, life));
        }
        Ok(Self { topics, incomplete, leases, seen_at })
    }

    /// Whether an entry is missing in a copy of the list that was read.
    pub(super) fn is_incomplete(&self, entry: &MemberEntry) -> bool {
        self.incomplete.contains(&entry.to_string())
    }

    /// All entries of a topic.
    pub(crate) fn entries_for(&self, topic: &TopicName) -> &[(MemberEntry, Liveness)] {
        self.topics.get(topic).map_or(&[], Vec::as_slice)
    }

    fn entries(&self) -> impl Iterator<Item = &(MemberEntry, Liveness)> {
        self.topics.values().flatten()
    }

    /// Entries of live members of a topic.
    pub(super) fn alive(&self, topic: &TopicName) -> impl Iterator<Item = &MemberEntry> {
        self.entries_for(topic)
            .iter()
            .filter(|(_, life)| *life != Liveness::Dead)
            .map(|(entry, _)| entry)
    }

    /// Entries of dead members.
    pub(super) fn dead(&self) -> impl Iterator<Item = &MemberEntry> {
        self.entries().filter(|(_, life)| *life == Liveness::Dead).map(|(entry, _)| entry)
    }

    /// Remaining time of the first lease of another member to expire.
    pub(super) fn next_expiry(&self, me: &str) -> Option<Duration> {
        let ends = self.entries().filter_map(|(entry, life)| match life {
            Liveness::Alive(remaining) if entry.member != me => Some(*remaining),
            _ => None,
        });
        ends.min()
    }

    /// A live member that consumes this topic in another mode.
    pub(super) fn conflicting_mode(&self, topic: &TopicName, mode: Mode) -> Option<&MemberEntry> {
        self.alive(topic).find(|entry| entry.mode != mode)
    }

    /// Consumers of all live members.
    pub(super) fn consumers(&self) -> BTreeSet<ConsumerName> {
        let alive = self.entries().filter(|(_, life)| *life != Liveness::Dead);
        let holders: BTreeSet<&HolderName> = alive
            .filter_map(|(entry, _)| match &entry.status {
                MemberStatus::Active(holder) => Some(holder),
                MemberStatus::Reserved(_) => None,
            })
            .collect();
        holders.into_iter().map(keys::consumer).collect()
    }
}

/// The member list of a group.
pub(super) fn member_list(backend: &dyn Backend, group: &GroupName) -> MemberList {
    MemberList::new(MembershipKeys::new(backend, group).members())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(status: MemberStatus, topic: &str) -> MemberEntry {
        let topic = TopicName::new(topic).unwrap();
        MemberEntry { member: "m:1".into(), status, mode: Mode::Owned, topic }
    }

    #[test]
    fn an_entry_round_trips_through_its_text() {
        let holder = HolderName::new("worker:host:1:ab").unwrap();
        for (entry, text) in [
            (entry(MemberStatus::Active(holder), "a b"), "m:1 worker:host:1:ab owned a b"),
            (entry(MemberStatus::Reserved(vec![0, 2, 5]), "orders"), "m:1 {0,2,5} owned orders"),
            (entry(MemberStatus::Reserved(vec![]), "orders"), "m:1 {} owned orders"),
        ] {
            assert_eq!(entry.to_string(), text);
            assert_eq!(MemberEntry::parse(text), Some(entry));
        }
    }

    #[test]
    fn malformed_entries_are_ignored() {
        for text in
            ["", "a", "a b", "a b owned", "a b owned ", "a b both t", "a {x} owned t", " b owned t"]
        {
            assert_eq!(MemberEntry::parse(text), None, "{text:?}");
        }
    }
}

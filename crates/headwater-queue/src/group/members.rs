//! How members are written down, and what can be seen of them.
//!
//! The members of a group are a registry set, one entry for each member and topic: `MEMBER HOLDER MODE TOPIC`, where
//! MEMBER is the id that stays (or the holder's name, if none was given), HOLDER holds the member's lease, MODE is
//! `owned` or `shared`, and the topic comes last because it may have spaces. A member with an id of its own that stopped
//! leaves `MEMBER {0,2,5} MODE TOPIC`: the partitions that are kept for it while its resting lease runs.
//!
//! Upstream: `session` writes entries and looks. Downstream: the registry and the leases of the backend.
//! Promises: an entry is written after its lease was taken, and a view reads entries before leases. So an entry whose
//! lease is not held is that of a dead member, for good.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::time::Duration;

use headwater_stream::limits::LEASES_MAX;
use headwater_stream::{Backend, ConsumerName, GroupName, HolderName, LeaseInfo, LeaseName};
use tokio::time::Instant;

use crate::config::Mode;
use crate::error::Result;
use crate::keys;
use crate::topic::{Partition, TopicName};

/// One entry of the members' set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) member: String,
    pub(crate) stand: Stand,
    pub(crate) mode: Mode,
    pub(crate) topic: TopicName,
}

/// What a member does about a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stand {
    /// It works, under this name.
    Working(HolderName),
    /// It stopped and will be back; these partitions are kept for it.
    Resting(Vec<Partition>),
}

impl Entry {
    /// Reads an entry; `None` for one that no program of ours wrote.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(4, ' ');
        let mut next = || parts.next().filter(|part| !part.is_empty());
        let (member, stand, mode, topic) = (next()?, next()?, next()?, next()?);
        let stand = match stand.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            None => Stand::Working(HolderName::new(stand).ok()?),
            Some("") => Stand::Resting(Vec::new()),
            Some(list) => {
                let list: Result<Vec<Partition>, _> = list.split(',').map(str::parse).collect();
                Stand::Resting(list.ok()?)
            }
        };
        let mode = match mode {
            "owned" => Mode::Owned,
            "shared" => Mode::Shared,
            _ => return None,
        };
        Some(Self { member: member.to_owned(), stand, mode, topic: TopicName::new(topic).ok()? })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { member, stand, mode, topic } = self;
        let mode = match mode {
            Mode::Owned => "owned",
            Mode::Shared => "shared",
        };
        match stand {
            Stand::Working(holder) => write!(f, "{member} {holder} {mode} {topic}"),
            Stand::Resting(partitions) => {
                let list: Vec<String> = partitions.iter().map(Partition::to_string).collect();
                write!(f, "{member} {{{}}} {mode} {topic}", list.join(","))
            }
        }
    }
}

/// What one look at a group saw.
#[derive(Debug)]
pub(crate) struct View {
    /// Every entry we understand, by topic, with whether its member lives.
    topics: HashMap<TopicName, Vec<(Entry, Life)>>,
    /// The leases that were asked for; absent if they were not.
    pub(super) leases: HashMap<LeaseName, Option<LeaseInfo>>,
    /// When the answers were here: what remained of a lease is counted from then.
    pub(super) seen_at: Instant,
}

/// Whether a member lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// For at least this long, if nothing renews it.
    Alive(Duration),
    /// No longer.
    Dead,
}

impl View {
    /// Looks at the members of a group, and at these leases of partitions: two round trips.
    pub(crate) async fn look(
        backend: &dyn Backend,
        group: &GroupName,
        leases: Vec<LeaseName>,
    ) -> Result<Self> {
        let texts = backend.set_members(&keys::members(group)).await?;
        let entries: Vec<Entry> = texts.iter().filter_map(|text| Entry::parse(text)).collect();
        // A member has an entry for each of its topics, and one lease, or two.
        let mut signs: BTreeMap<(&str, bool), LeaseName> = BTreeMap::new();
        for entry in &entries {
            signs.entry(sign_key(entry)).or_insert_with(|| sign(group, entry));
        }
        let mut names = leases;
        names.extend(signs.values().cloned());
        let mut found = Vec::with_capacity(names.len());
        for part in names.chunks(LEASES_MAX) {
            found.extend(backend.leases(part).await?);
        }
        let leases: HashMap<LeaseName, Option<LeaseInfo>> = names.into_iter().zip(found).collect();
        let seen_at = Instant::now();
        let life = |entry: &Entry| match (&entry.stand, &leases[&signs[&sign_key(entry)]]) {
            (Stand::Working(holder), Some(info)) if info.holder != *holder => Life::Dead,
            (_, Some(info)) => Life::Alive(info.remaining),
            (_, None) => Life::Dead,
        };
        let lives: Vec<Life> = entries.iter().map(life).collect();
        drop(signs);
        let mut topics: HashMap<TopicName, Vec<(Entry, Life)>> = HashMap::new();
        for (entry, life) in entries.into_iter().zip(lives) {
            topics.entry(entry.topic.clone()).or_default().push((entry, life));
        }
        Ok(Self { topics, leases, seen_at })
    }

    /// All entries of a topic.
    pub(crate) fn of(&self, topic: &TopicName) -> &[(Entry, Life)] {
        self.topics.get(topic).map_or(&[], Vec::as_slice)
    }

    fn entries(&self) -> impl Iterator<Item = &(Entry, Life)> {
        self.topics.values().flatten()
    }

    /// The entries of members of a topic that live.
    pub(super) fn alive(&self, topic: &TopicName) -> impl Iterator<Item = &Entry> {
        self.of(topic).iter().filter(|(_, life)| *life != Life::Dead).map(|(entry, _)| entry)
    }

    /// The entries of members that are gone.
    pub(super) fn dead(&self) -> impl Iterator<Item = &Entry> {
        self.entries().filter(|(_, life)| *life == Life::Dead).map(|(entry, _)| entry)
    }

    /// How soon the first lease of another member ends, if nothing renews it.
    pub(super) fn next_end(&self, me: &str) -> Option<Duration> {
        let ends = self.entries().filter_map(|(entry, life)| match life {
            Life::Alive(remaining) if entry.member != me => Some(*remaining),
            _ => None,
        });
        ends.min()
    }

    /// A member that lives and shares this topic in another way than `mode`.
    pub(super) fn disagrees(&self, topic: &TopicName, mode: Mode) -> Option<&Entry> {
        self.alive(topic).find(|entry| entry.mode != mode)
    }

    /// The consumers of all members that live.
    pub(super) fn consumers(&self) -> BTreeSet<ConsumerName> {
        let alive = self.entries().filter(|(_, life)| *life != Life::Dead);
        let holders: BTreeSet<&HolderName> = alive
            .filter_map(|(entry, _)| match &entry.stand {
                Stand::Working(holder) => Some(holder),
                Stand::Resting(_) => None,
            })
            .collect();
        holders.into_iter().map(keys::consumer).collect()
    }
}

/// What tells the leases of members apart.
fn sign_key(entry: &Entry) -> (&str, bool) {
    (&entry.member, matches!(entry.stand, Stand::Resting(_)))
}

/// The lease that shows that what an entry says still holds.
fn sign(group: &GroupName, entry: &Entry) -> LeaseName {
    match entry.stand {
        Stand::Working(_) => keys::member(group, &entry.member),
        Stand::Resting(_) => keys::resting(group, &entry.member),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(stand: Stand, topic: &str) -> Entry {
        let topic = TopicName::new(topic).unwrap();
        Entry { member: "m:1".into(), stand, mode: Mode::Owned, topic }
    }

    #[test]
    fn an_entry_survives_the_registry() {
        let holder = HolderName::new("worker:host:1:ab").unwrap();
        for (entry, text) in [
            (entry(Stand::Working(holder), "a b"), "m:1 worker:host:1:ab owned a b"),
            (entry(Stand::Resting(vec![0, 2, 5]), "orders"), "m:1 {0,2,5} owned orders"),
            (entry(Stand::Resting(vec![]), "orders"), "m:1 {} owned orders"),
        ] {
            assert_eq!(entry.to_string(), text);
            assert_eq!(Entry::parse(text), Some(entry));
        }
    }

    #[test]
    fn what_no_program_of_ours_wrote_is_no_entry() {
        for text in
            ["", "a", "a b", "a b owned", "a b owned ", "a b both t", "a {x} owned t", " b owned t"]
        {
            assert_eq!(Entry::parse(text), None, "{text:?}");
        }
    }
}

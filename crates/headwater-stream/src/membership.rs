//! The members of a named group: who is alive.
//!
//! A member holds a lease that shows that it is alive, and has entries in the member list of its group. It is dead once the
//! lease is released or expires; whoever finds its entries removes them. On a cluster, list and lease have three copies on
//! different servers, and a majority of them counts: see [`MajorityLease`](crate::MajorityLease).
//!
//! Upstream: processes that share work. Downstream: registry and leases of the backend; [`LeaseRenewer`](crate::LeaseRenewer)
//! keeps the lease.
//! Guarantees: a member acquires its lease before it adds entries, and a snapshot reads entries before leases. So an entry whose
//! lease is not held belongs to a dead member and stays dead. Two majorities have a copy in common: an entry that was added is
//! in every snapshot, also while a minority of the servers is unreachable.
//! Not here: what the entries say, and what happens to the work of a dead member.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, timeout_at};

use crate::backend::Backend;
use crate::error::{Result, StreamError};
use crate::leases::LeaseInfo;
use crate::limits::LEASES_MAX;
use crate::name::{HolderName, LeaseName, SetName};

/// How long further copies have once a majority has answered.
pub(crate) const MINORITY_WAIT: Duration = Duration::from_millis(250);

/// The member list of a group, in one or more copies.
#[derive(Clone, Debug)]
pub struct MemberList(Vec<SetName>);

/// What shows that a member is alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivenessLease {
    /// The lease, in as many copies as the list.
    pub copies: Vec<LeaseName>,
    /// The only holder that counts; `None` if every holder does.
    pub holder: Option<HolderName>,
}

/// Whether a member is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Its lease is held for this long unless renewed.
    Alive(Duration),
    /// Its lease has expired or was released.
    Dead,
}

/// The members of a group at one time.
#[derive(Debug)]
pub struct MemberSnapshot<Entry> {
    /// The entries of the list.
    pub entries: Vec<(Entry, Liveness)>,
    /// Entries that are missing in a copy. Their member adds them again.
    pub incomplete: HashSet<String>,
    /// The leases of the members, and those that were asked for in addition.
    pub leases: HashMap<LeaseName, Option<LeaseInfo>>,
    /// When the replies arrived; remaining times count from here.
    pub read_at: Instant,
}

impl MemberList {
    /// The list whose copies have these names: one, or an odd number.
    pub fn new(copies: Vec<SetName>) -> Self {
        assert!(copies.len() % 2 == 1, "a majority exists");
        Self(copies)
    }

    /// Adds entries, whose lease is already held. Idempotent.
    pub async fn add(&self, backend: &dyn Backend, entries: &[String]) -> Result<()> {
        let texts = texts(entries);
        on_majority(self.0.iter().map(|copy| backend.set_add(copy, &texts, None))).await?;
        Ok(())
    }

    /// Removes entries. Idempotent. A copy that could not be reached may keep them: entries in a minority of the copies do
    /// not count.
    pub async fn remove(&self, backend: &dyn Backend, entries: &[String]) -> Result<()> {
        if !entries.is_empty() {
            let texts = texts(entries);
            on_majority(self.0.iter().map(|copy| backend.set_remove(copy, &texts))).await?;
        }
        Ok(())
    }

    /// Reads all entries, then their leases and `others`. `parse` returns an entry and its lease, or `None` for a text in
    /// another format, which is ignored.
    pub async fn read<Entry>(
        &self,
        backend: &dyn Backend,
        parse: impl Fn(&str) -> Option<(Entry, LivenessLease)>,
        others: Vec<LeaseName>,
    ) -> Result<MemberSnapshot<Entry>> {
        let copies = on_majority(self.0.iter().map(|copy| backend.set_members(copy))).await?;
        let unread = copies.iter().filter(|copy| copy.is_none()).count();
        let mut counts: HashMap<String, usize> = HashMap::new();
        for text in copies.into_iter().flatten().flatten() {
            *counts.entry(text).or_default() += 1;
        }
        let total = self.0.len();
        let parsed: Vec<_> = counts
            .iter()
            .filter_map(|(text, count)| {
                let (entry, kept) = parse(text)?;
                Some((entry, kept, count + unread >= majority(total)))
            })
            .collect();
        // A member may have several entries.
        let liveness: HashSet<&LeaseName> =
            parsed.iter().flat_map(|(_, kept, _)| &kept.copies).collect();
        let mut names = others;
        names.extend(liveness.into_iter().cloned());
        let mut found = Vec::with_capacity(names.len());
        for part in names.chunks(LEASES_MAX) {
            found.extend(backend.leases(part).await?);
        }
        let leases: HashMap<LeaseName, Option<LeaseInfo>> = names.into_iter().zip(found).collect();
        let read_at = Instant::now();
        let entries = parsed.into_iter().filter_map(|(entry, kept, counts)| {
            let life = kept.liveness(&leases);
            // One in a minority of the copies is being added, or is left over: then its member may be dead.
            (counts || life == Liveness::Dead).then_some((entry, life))
        });
        let entries = entries.collect();
        let is_incomplete = |(_, count): &(String, usize)| count + unread < total;
        let incomplete = counts.into_iter().filter(is_incomplete).map(|(text, _)| text).collect();
        Ok(MemberSnapshot { entries, incomplete, leases, read_at })
    }
}

impl LivenessLease {
    /// Dead if a majority of the copies is free. A copy whose holder is unknown counts as held.
    fn liveness(&self, leases: &HashMap<LeaseName, Option<LeaseInfo>>) -> Liveness {
        let counts = |info: &&LeaseInfo| {
            info.is_unknown() || self.holder.as_ref().is_none_or(|holder| info.holder == *holder)
        };
        let held = |copy| leases.get(copy).and_then(Option::as_ref).filter(counts);
        let mut remaining: Vec<Option<Duration>> =
            self.copies.iter().map(|copy| held(copy).map(|info| info.remaining)).collect();
        // It is dead once the first of these has expired and a majority is free.
        remaining.sort_unstable_by(|a, b| b.cmp(a));
        let last = remaining.get(self.copies.len() - majority(self.copies.len()));
        last.copied().flatten().map_or(Liveness::Dead, Liveness::Alive)
    }
}

/// How many of so many copies are a majority.
pub(crate) fn majority(copies: usize) -> usize {
    copies / 2 + 1
}

/// Runs one call per copy. Returns the results in order, of at least a majority; `None` for a copy that failed, or did not
/// answer soon after the majority.
async fn on_majority<T>(
    calls: impl Iterator<Item = impl Future<Output = Result<T>>>,
) -> Result<Vec<Option<T>>> {
    let mut calls: FuturesUnordered<_> =
        calls.enumerate().map(|(at, call)| async move { (at, call.await) }).collect();
    let mut results: Vec<Option<T>> = (0..calls.len()).map(|_| None).collect();
    let (mut answered, mut failure, mut limit) = (0, None::<StreamError>, None);
    loop {
        let called = match limit {
            None => calls.next().await,
            Some(limit) => timeout_at(limit, calls.next()).await.unwrap_or(None),
        };
        match called {
            None if answered >= majority(results.len()) => return Ok(results),
            None => return Err(failure.expect("without a majority, a call has failed")),
            Some((at, Ok(result))) => {
                results[at] = Some(result);
                answered += 1;
                if answered == majority(results.len()) {
                    limit = Some(Instant::now() + MINORITY_WAIT);
                }
            }
            Some((_, Err(error))) => failure = Some(error),
        }
    }
}

impl<Entry> MemberSnapshot<Entry> {
    /// The entries of live members.
    pub fn alive(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|(_, life)| *life != Liveness::Dead).map(|(entry, _)| entry)
    }

    /// The entries of dead members.
    pub fn dead(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|(_, life)| *life == Liveness::Dead).map(|(entry, _)| entry)
    }
}

fn texts(entries: &[String]) -> Vec<&str> {
    entries.iter().map(String::as_str).collect()
}

#[cfg(all(test, feature = "embedded"))]
mod tests {
    use super::*;
    use crate::connect::{Options, connect};

    const TTL: Duration = Duration::from_secs(60);

    fn parse(text: &str) -> Option<(String, LivenessLease)> {
        let (member, holder) = text.split_once(' ')?;
        let lease = LeaseName::new(format!("alive:{member}")).ok()?;
        let holder = match holder {
            "any" => None,
            holder => Some(HolderName::new(holder).ok()?),
        };
        Some((member.to_owned(), LivenessLease { copies: vec![lease], holder }))
    }

    #[tokio::test]
    async fn a_member_is_alive_while_its_holder_has_its_lease() {
        let backend = connect("embedded:memory", &Options::default()).await.unwrap();
        let list = MemberList::new(vec![SetName::new("members").unwrap()]);
        let holder = HolderName::new("ann:1").unwrap();
        for lease in ["alive:ann", "alive:bob", "alive:eve", "other"] {
            let lease = LeaseName::new(lease).unwrap();
            backend.acquire(&lease, &holder, TTL).await.unwrap();
        }
        let entries = ["ann ann:1", "bob bob:1", "cid cid:1", "eve any", "malformed"];
        list.add(&*backend, &entries.map(str::to_owned)).await.unwrap();

        let others = vec![LeaseName::new("other").unwrap(), LeaseName::new("free").unwrap()];
        let snapshot = list.read(&*backend, parse, others.clone()).await.unwrap();

        let sorted = |entries: Vec<&String>| {
            let mut entries: Vec<String> = entries.into_iter().cloned().collect();
            entries.sort_unstable();
            entries
        };
        assert_eq!(sorted(snapshot.alive().collect()), ["ann", "eve"]);
        assert_eq!(sorted(snapshot.dead().collect()), ["bob", "cid"], "another holder, none");
        assert!(snapshot.leases[&others[0]].is_some() && snapshot.leases[&others[1]].is_none());

        list.remove(&*backend, &["cid cid:1".to_owned()]).await.unwrap();
        list.remove(&*backend, &[]).await.unwrap();
        let snapshot = list.read(&*backend, parse, Vec::new()).await.unwrap();
        assert_eq!(sorted(snapshot.dead().collect()), ["bob"]);
    }

    #[tokio::test]
    async fn a_majority_of_the_copies_counts() {
        let backend = connect("embedded:memory", &Options::default()).await.unwrap();
        let sets = ["a", "b", "c"].map(|copy| SetName::new(format!("{copy}-members")).unwrap());
        let list = MemberList::new(sets.to_vec());
        let parse = |member: &str| {
            let copy = |copy| LeaseName::new(format!("{copy}-alive-{member}")).unwrap();
            let kept = LivenessLease { copies: ["a", "b", "c"].map(copy).to_vec(), holder: None };
            Some((member.to_owned(), kept))
        };
        let holder = HolderName::new("h").unwrap();
        for (member, held) in [("two", "ab"), ("one", "c"), ("left", "abc")] {
            for copy in held.chars() {
                let lease = LeaseName::new(format!("{copy}-alive-{member}")).unwrap();
                backend.acquire(&lease, &holder, TTL).await.unwrap();
            }
            list.add(&*backend, &[member.to_owned()]).await.unwrap();
        }
        // As if `c` had been unreachable when the first was added and the last removed.
        backend.set_remove(&sets[2], &["two"]).await.unwrap();
        for set in &sets[..2] {
            backend.set_remove(set, &["left"]).await.unwrap();
        }

        let snapshot = list.read(&*backend, parse, Vec::new()).await.unwrap();

        assert_eq!(snapshot.alive().collect::<Vec<_>>(), ["two"]);
        assert_eq!(snapshot.dead().collect::<Vec<_>>(), ["one"]);
        let incomplete = ["two", "left"].map(str::to_owned);
        assert_eq!(snapshot.incomplete, HashSet::from(incomplete));
    }
}

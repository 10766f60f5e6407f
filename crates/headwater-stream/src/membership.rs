//! The members of a named group: who is alive.
//!
//! A member holds a lease that shows that it is alive, and has entries in the member list of its group. It is dead once the
//! lease is released or expires; whoever finds its entries removes them.
//!
//! Upstream: processes that share work. Downstream: registry and leases of the backend; [`LeaseRenewer`](crate::LeaseRenewer)
//! keeps the lease.
//! Guarantees: a member acquires its lease before it adds entries, and a snapshot reads entries before leases. So an entry whose
//! lease is not held belongs to a dead member and stays dead.
//! Not here: what the entries say, and what happens to the work of a dead member.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::Backend;
use crate::error::Result;
use crate::leases::LeaseInfo;
use crate::limits::LEASES_MAX;
use crate::name::{HolderName, LeaseName, SetName};

/// The member list of a group.
#[derive(Clone, Debug)]
pub struct MemberList(SetName);

/// What shows that a member is alive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivenessLease {
    /// The lease.
    pub lease: LeaseName,
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
    /// The leases of the members, and those that were asked for in addition.
    pub leases: HashMap<LeaseName, Option<LeaseInfo>>,
    /// When the replies arrived; remaining times count from here.
    pub read_at: Instant,
}

impl MemberList {
    /// The list with this name.
    pub fn new(name: SetName) -> Self {
        Self(name)
    }

    /// Adds entries, whose lease is already held. Idempotent.
    pub async fn add(&self, backend: &dyn Backend, entries: &[String]) -> Result<()> {
        backend.set_add(&self.0, &texts(entries), None).await?;
        Ok(())
    }

    /// Removes entries. Idempotent.
    pub async fn remove(&self, backend: &dyn Backend, entries: &[String]) -> Result<()> {
        if !entries.is_empty() {
            backend.set_remove(&self.0, &texts(entries)).await?;
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
        let texts = backend.set_members(&self.0).await?;
        let parsed: Vec<_> = texts.iter().filter_map(|text| parse(text)).collect();
        // A member may have several entries.
        let liveness: HashSet<&LeaseName> = parsed.iter().map(|(_, kept)| &kept.lease).collect();
        let mut names = others;
        names.extend(liveness.into_iter().cloned());
        let mut found = Vec::with_capacity(names.len());
        for part in names.chunks(LEASES_MAX) {
            found.extend(backend.leases(part).await?);
        }
        let leases: HashMap<LeaseName, Option<LeaseInfo>> = names.into_iter().zip(found).collect();
        let read_at = Instant::now();
        let entries = parsed.into_iter().map(|(entry, LivenessLease { lease, holder })| {
            let is_same = |info: &&LeaseInfo| holder.as_ref().is_none_or(|one| info.holder == *one);
            let held = leases.get(&lease).and_then(Option::as_ref).filter(is_same);
            (entry, held.map_or(Liveness::Dead, |info| Liveness::Alive(info.remaining)))
        });
        Ok(MemberSnapshot { entries: entries.collect(), leases, read_at })
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
        Some((member.to_owned(), LivenessLease { lease, holder }))
    }

    #[tokio::test]
    async fn a_member_is_alive_while_its_holder_has_its_lease() {
        let backend = connect("embedded:memory", &Options::default()).await.unwrap();
        let list = MemberList::new(SetName::new("members").unwrap());
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
}

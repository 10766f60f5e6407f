//! One lease in several copies on different servers: it is held while a majority of them is.
//!
//! Upstream: members of a group on a cluster, through [`LeaseRenewer`](crate::LeaseRenewer), for which this is one lease
//! among others. Downstream: [`Leases`] of the backend.
//! Guarantees: the lease outlives the loss of a minority of the servers. It is lost once a majority of the copies may have
//! expired. A copy that was lost is acquired again while the majority is held. Two holders never have a majority at once.
//! Not here: fences. The copies have different epochs, so no effect can be fenced with this lease.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::Result;
use crate::leases::{
    AcquireResult, Epoch, Fence, LeaseInfo, LeaseWatch, Leases, OTHER_LEASES_PART, Renewal,
};
use crate::membership::{MINORITY_WAIT, majority};
use crate::name::{HolderName, LeaseName};

/// How long a renewal waits for copies that are acquired again.
const REPAIR_MAX: Duration = Duration::from_secs(1);

/// Leases of a backend, of which one has several copies. It has the name of its first copy.
pub struct MajorityLease {
    leases: Arc<dyn Leases>,
    copies: Vec<LeaseName>,
    state: Mutex<MajorityState>,
}

#[derive(Default)]
struct MajorityState {
    /// The epoch of the whole; any number that stays the same.
    epoch: Option<Epoch>,
    /// The epochs of the copies that are held.
    copies: Vec<Option<Epoch>>,
}

impl MajorityLease {
    /// A lease with these copies. The other leases are passed through.
    pub fn new(leases: Arc<dyn Leases>, copies: Vec<LeaseName>) -> Self {
        let state = MajorityState { epoch: None, copies: vec![None; copies.len()] };
        Self { leases, copies, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, MajorityState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }

    /// The copies that are held.
    fn held(&self) -> Vec<(usize, Fence)> {
        let state = self.lock();
        let held = |(at, epoch): (usize, &Option<Epoch>)| {
            let lease = self.copies[at].clone();
            epoch.map(|epoch| (at, Fence { lease, epoch }))
        };
        state.copies.iter().enumerate().filter_map(held).collect()
    }

    async fn acquire_majority(&self, holder: &HolderName, ttl: Duration) -> Result<AcquireResult> {
        let acquire =
            |(at, copy)| async move { (at, self.leases.acquire(copy, holder, ttl).await) };
        let mut calls: FuturesUnordered<_> = self.copies.iter().enumerate().map(acquire).collect();
        let (mut won, mut limit) = (0, None);
        let mut other: Option<Result<AcquireResult>> = None;
        loop {
            let called = match limit {
                None => calls.next().await,
                Some(limit) => timeout_at(limit, calls.next()).await.unwrap_or(None),
            };
            match called {
                None => break,
                Some((at, Ok(AcquireResult::Won(epoch)))) => {
                    self.lock().copies[at] = Some(epoch);
                    won += 1;
                    if won == majority(self.copies.len()) {
                        limit = Some(Instant::now() + MINORITY_WAIT.min(ttl / 8));
                    }
                }
                Some((_, held @ Ok(_))) => other = Some(held),
                Some((_, failed)) => other = Some(other.unwrap_or(failed)),
            }
        }
        if won >= majority(self.copies.len()) {
            let mut state = self.lock();
            let first = state.copies.iter().flatten().max().copied();
            let epoch = state.epoch.or(first).expect("a copy was acquired");
            state.epoch = Some(epoch);
            return Ok(AcquireResult::Won(epoch));
        }
        // Otherwise two holders could block each other until the copies expire.
        let _ = self.release_copies(holder).await;
        other.expect("without a majority, a copy was not acquired")
    }

    /// Renews the copies that are held and acquires the others, if their servers answer.
    async fn renew_copies(&self, holder: &HolderName, ttl: Duration) -> Result<Renewal> {
        let (places, held): (Vec<usize>, Vec<Fence>) = self.held().into_iter().unzip();
        let missing = (0..self.copies.len()).filter(|at| !places.contains(at));
        let repaired = join_all(missing.map(|at| async move {
            let acquiring = self.leases.acquire(&self.copies[at], holder, ttl);
            (at, timeout(REPAIR_MAX.min(ttl / 4), acquiring).await)
        }));
        let (renewals, repaired) = tokio::join!(self.leases.renew(holder, &held, ttl), repaired);
        let renewals = renewals?;
        let mut state = self.lock();
        for (at, acquired) in repaired {
            if let Ok(Ok(AcquireResult::Won(epoch))) = acquired {
                // It counts from the next renewal on.
                state.copies[at] = Some(epoch);
            }
        }
        let count = |wanted| renewals.iter().filter(|renewal| **renewal == wanted).count();
        for (at, renewal) in places.into_iter().zip(&renewals) {
            if *renewal == Renewal::Lost {
                state.copies[at] = None;
            }
        }
        let (kept, unknown) = (count(Renewal::Kept), count(Renewal::Unknown));
        let needed = majority(self.copies.len());
        Ok(match kept >= needed {
            true => Renewal::Kept,
            false if kept + unknown >= needed => Renewal::Unknown,
            false => Renewal::Lost,
        })
    }

    /// Releases all copies. Returns whether one was held.
    async fn release_copies(&self, holder: &HolderName) -> Result<bool> {
        let (_, held): (Vec<usize>, Vec<Fence>) = self.held().into_iter().unzip();
        let released = self.leases.release(holder, &held).await?;
        *self.lock() = MajorityState { epoch: None, copies: vec![None; self.copies.len()] };
        Ok(released > 0)
    }
}

#[async_trait]
impl Leases for MajorityLease {
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult> {
        match *lease == self.copies[0] {
            true => self.acquire_majority(holder, ttl).await,
            false => self.leases.acquire(lease, holder, ttl).await,
        }
    }

    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>> {
        let Some(at) = leases.iter().position(|fence| fence.lease == self.copies[0]) else {
            return self.leases.renew(holder, leases, ttl).await;
        };
        let mut others = leases.to_vec();
        others.remove(at);
        // Well within the time that a renewal may take: if all others are on a server that does not answer, the lease with
        // copies on further servers must not be lost with them.
        let others = timeout(ttl / OTHER_LEASES_PART, self.leases.renew(holder, &others, ttl));
        let (mine, others) = tokio::join!(self.renew_copies(holder, ttl), others);
        let mut renewals = match (&mine, others) {
            (_, Ok(Ok(others))) => others,
            (Err(_), Ok(Err(error))) => return Err(error),
            (Ok(_), Ok(Err(_))) | (_, Err(_)) => vec![Renewal::Unknown; leases.len() - 1],
        };
        renewals.insert(at, mine.unwrap_or(Renewal::Unknown));
        Ok(renewals)
    }

    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize> {
        let mut others = leases.to_vec();
        others.retain(|fence| fence.lease != self.copies[0]);
        if others.len() == leases.len() {
            return self.leases.release(holder, leases).await;
        }
        let (mine, others) =
            tokio::join!(self.release_copies(holder), self.leases.release(holder, &others));
        Ok(others? + usize::from(mine?))
    }

    async fn leases(&self, leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>> {
        self.leases.leases(leases).await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn LeaseWatch>> {
        self.leases.watch(prefix).await
    }
}

//! Implementation of [`Leases`].

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::sync::broadcast::{self, error::RecvError};

use super::Embedded;
use super::engine::Engine;
use super::redo_record::RedoRecord;
use super::state::EmbeddedState;
use super::state::lease_table::Lease;
use super::transaction::{Durability, Tx};
use crate::clock::Timestamp;
use crate::error::{Result, StreamError};
use crate::leases::{
    AcquireResult, Epoch, Fence, LeaseEvent, LeaseEventKind, LeaseInfo, LeaseWatch, Leases,
    Renewal, WatchMode,
};
use crate::name::{HolderName, LeaseName};
use crate::validate;

#[async_trait]
impl Leases for Embedded {
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult> {
        validate::lease_ttl(ttl)?;
        let acquire = self.shared().transact(Durability::Durable, |tx| {
            tx.expire_leases();
            let held = tx.state().lease(lease.as_str(), tx.now)?;
            let epoch = match held {
                Some(held) if held.holder == *holder => held.epoch,
                Some(held) => {
                    let remaining = held.until.since(tx.now);
                    return Ok(AcquireResult::Held { by: held.holder.clone(), remaining });
                }
                None => next_epoch(tx.state(), lease, tx.now),
            };
            tx.remove_expired(lease.as_str());
            hold(tx, lease, holder, epoch, ttl);
            Ok(AcquireResult::Won(Epoch(epoch)))
        });
        acquire.await
    }

    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>> {
        validate::renew(leases, ttl)?;
        // A power failure that reverts a renewal also ends the process that made it.
        let renew = self.shared().transact(Durability::Written, |tx| {
            tx.expire_leases();
            let held = leases.iter().map(|fence| is_held_by(tx, holder, fence));
            let held: Vec<bool> = held.collect();
            let mut renewals = Vec::with_capacity(leases.len());
            for (fence, is_held) in leases.iter().zip(held) {
                if is_held {
                    hold(tx, &fence.lease, holder, fence.epoch.0, ttl);
                }
                renewals.push(if is_held { Renewal::Kept } else { Renewal::Lost });
            }
            Ok(renewals)
        });
        renew.await
    }

    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize> {
        validate::leases(leases.len())?;
        let release = self.shared().transact(Durability::Durable, |tx| {
            tx.expire_leases();
            let mut released = 0;
            for fence in leases {
                // One by one, so that a lease given twice is released once.
                if is_held_by(tx, holder, fence) {
                    tx.apply(&RedoRecord::Remove { name: fence.lease.as_str() });
                    tx.lease_events().publish(&fence.lease, LeaseEventKind::Released);
                    released += 1;
                }
            }
            Ok(released)
        });
        release.await
    }

    async fn leases(&self, leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>> {
        validate::leases(leases.len())?;
        let read = self.shared().read(|tx| {
            let info = |held: &Lease| LeaseInfo {
                holder: held.holder.clone(),
                epoch: Epoch(held.epoch),
                remaining: held.until.since(tx.now),
            };
            let held = leases.iter().map(|lease| tx.state.lease(lease.as_str(), tx.now));
            let found = held.map(|held| match held {
                Ok(held) => held.map(info),
                Err(_) => Some(LeaseInfo::wrong_type()),
            });
            Ok(found.collect())
        });
        read.await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn LeaseWatch>> {
        let inner = self.shared().lock()?;
        Ok(Box::new(EmbeddedLeaseWatch {
            engine: Arc::clone(&self.engine),
            prefix: prefix.to_owned(),
            events: inner.lease_events.subscribe(),
            earlier_expiry: Arc::clone(&inner.lease_events.earlier_expiry),
        }))
    }
}

/// Fails with `Fenced` unless the fence is `None` or its lease is held in its epoch.
pub(super) fn check_fence(
    state: &EmbeddedState,
    fence: Option<&Fence>,
    now: Timestamp,
) -> Result<()> {
    let Some(Fence { lease, epoch }) = fence else { return Ok(()) };
    let held = state.lease(lease.as_str(), now)?;
    if held.is_some_and(|held| held.epoch == epoch.0) {
        return Ok(());
    }
    Err(StreamError::Fenced { lease: lease.to_string(), epoch: epoch.0 })
}

fn next_epoch(state: &EmbeddedState, lease: &LeaseName, now: Timestamp) -> u64 {
    let last = state.epochs.get(lease.as_str()).unwrap_or(0);
    last.saturating_add(1).max(now.as_millis())
}

fn hold(tx: &mut Tx<'_>, lease: &LeaseName, holder: &HolderName, epoch: u64, ttl: Duration) {
    let (at, until) = (tx.now, tx.now.after(ttl));
    let is_next = tx.state().next_lease_expiry().is_none_or(|next| until < next);
    let (lease, holder) = (lease.as_str(), holder.as_str());
    tx.apply(&RedoRecord::HoldLease { lease, holder, epoch, until, at });
    if is_next {
        tx.lease_events().earlier_expiry.notify_waiters();
    }
}

/// Whether this holder holds the lease in this epoch. A name of another type has no holder.
fn is_held_by(tx: &Tx<'_>, holder: &HolderName, fence: &Fence) -> bool {
    match tx.state().lease(fence.lease.as_str(), tx.now) {
        Ok(Some(held)) => held.holder == *holder && held.epoch == fence.epoch.0,
        Ok(None) | Err(_) => false,
    }
}

struct EmbeddedLeaseWatch {
    engine: Arc<Engine>,
    prefix: String,
    events: broadcast::Receiver<LeaseEvent>,
    earlier_expiry: Arc<Notify>,
}

#[async_trait]
impl LeaseWatch for EmbeddedLeaseWatch {
    fn mode(&self) -> &WatchMode {
        &WatchMode::All
    }

    async fn next(&mut self) -> LeaseEvent {
        let shared = &self.engine.shared;
        loop {
            // Before the next expiry is read, so that no change in between is missed.
            let earlier_expiry = self.earlier_expiry.notified();
            let ends = shared.transact_without_wait(|tx| {
                tx.expire_leases();
                let next = tx.state().next_lease_expiry();
                Ok(next.map(|end| end.since(tx.now)))
            });
            let end = async {
                match ends {
                    Ok(Some(wait)) => shared.clock.sleep(wait).await,
                    // No lease expires, or the backend is closed.
                    Ok(None) | Err(_) => std::future::pending().await,
                }
            };
            tokio::select! {
                event = self.events.recv() => match event {
                    Ok(LeaseEvent { lease: Some(lease), kind })
                        if lease.as_str().starts_with(&self.prefix) =>
                    {
                        return LeaseEvent { lease: Some(lease), kind };
                    }
                    Err(RecvError::Lagged(_)) => {
                        return LeaseEvent { lease: None, kind: LeaseEventKind::Lagged };
                    }
                    // The engine keeps the channel open.
                    Ok(_) | Err(RecvError::Closed) => {}
                },
                () = earlier_expiry => {}
                () = end => {}
            }
        }
    }
}

//! The issues in flight in this process, and the status of their claims.
//!
//! Upstream: `worker` enters an issue before it claims it. Downstream: the store: heartbeats, and more often reads that
//! look for newer events, each one call for all claims. Guarantees: one run of an issue at a time in this process; a request during a run is remembered; a claim
//! that may have expired by the database's clock counts as lost, even if the database is unavailable, and also if it expired
//! while the machine was suspended. This is where a run becomes stale in its own process. Not here: what happens to a run whose claim is lost (see `worker`).

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use headwater_stream::clock::{LeaseClock, SystemClock};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::claim::{ClaimRenewal, ClaimedIssue};
use crate::error::{IssueError, Result};
use crate::issue::{ClaimEpoch, IssueId};
use crate::limits::{BATCH_MAX, CONSECUTIVE_FAILURES_MAX};
use crate::store::Store;

/// Part of the TTL for which a claim counts as held, from the time it was requested. The rest allows for slow replies.
const VALID_PERCENT: u32 = 90;

/// The issues in flight and their claims.
pub(crate) struct ClaimRegistry {
    store: Arc<dyn Store>,
    ttl: Duration,
    clock: LeaseClock,
    entries: Mutex<HashMap<IssueId, RegistryEntry>>,
}

#[derive(Default)]
struct RegistryEntry {
    /// Whether the issue was requested during its run.
    requested_again: bool,
    claim: Option<ActiveClaim>,
}

struct ActiveClaim {
    epoch: ClaimEpoch,
    /// Pending events at the time of the claim.
    pending_events: u64,
    status: watch::Sender<LeaseStatus>,
}

#[derive(Clone, Copy, Debug)]
struct LeaseStatus {
    /// `None` once the claim is lost or ended.
    valid_until: Option<Instant>,
    has_newer_events: bool,
}

impl fmt::Debug for ClaimRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimRegistry").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

impl ClaimRegistry {
    pub(crate) fn new(store: Arc<dyn Store>, ttl: Duration) -> Arc<Self> {
        Self::with_clock(store, ttl, LeaseClock::new(Arc::new(SystemClock)))
    }

    fn with_clock(store: Arc<dyn Store>, ttl: Duration, clock: LeaseClock) -> Arc<Self> {
        Arc::new(Self { store, ttl, clock, entries: Mutex::default() })
    }

    /// The time by which claims are valid.
    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Whether an issue is in flight. Its run is repeated then.
    pub(crate) fn request_again(&self, issue_id: IssueId) -> bool {
        request_again(&mut self.lock(), issue_id)
    }

    /// Enters an issue; `None` if it is in flight already. Its run is repeated then.
    pub(crate) fn try_enter(self: &Arc<Self>, issue_id: IssueId) -> Option<IssueSlot> {
        let mut entries = self.lock();
        if request_again(&mut entries, issue_id) {
            return None;
        }
        entries.insert(issue_id, RegistryEntry::default());
        Some(IssueSlot { registry: Arc::clone(self), issue_id, is_exited: false })
    }

    /// Number of issues in flight.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Renews all claims, and updates which are lost and which have newer events.
    pub(crate) async fn renew_all(&self) -> Result<()> {
        // Continue after an error: the failure of one batch must not let the claims of another expire.
        let mut first_error = Ok(());
        for batch in self.claims().chunks(BATCH_MAX) {
            first_error = first_error.and(self.renew_each(batch).await);
        }
        first_error
    }

    /// Reads all claims, and updates which are lost and which have newer events. Writes nothing.
    pub(crate) async fn check_all(&self) -> Result<()> {
        for batch in self.claims().chunks(BATCH_MAX) {
            let found = self.store.check_claims(batch).await?;
            self.update(batch, &found, None);
        }
        Ok(())
    }

    fn claims(&self) -> Vec<(IssueId, ClaimEpoch)> {
        let entries = self.lock();
        let epoch = |entry: &RegistryEntry| entry.claim.as_ref().map(|claim| claim.epoch);
        entries.iter().filter_map(|(id, entry)| Some((*id, epoch(entry)?))).collect()
    }

    /// Renews claims in one call or, if one of them makes the call fail, one by one.
    async fn renew_each(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<()> {
        let error = match self.renew(claims).await {
            Err(error) if claims.len() > 1 && error.is_item_error() => error,
            result => return result.map(|_| ()),
        };
        let mut consecutive_failures = 0;
        for claim in claims.chunks(1) {
            let is_failed = self.renew(claim).await.is_err();
            consecutive_failures = if is_failed { consecutive_failures + 1 } else { 0 };
            if consecutive_failures == CONSECUTIVE_FAILURES_MAX {
                break;
            }
        }
        Err(error)
    }

    async fn renew(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<Vec<ClaimRenewal>> {
        let sent = self.now();
        let renewals = self.store.heartbeat(claims, self.ttl).await?;
        self.update(claims, &renewals, Some(self.valid_until(sent)));
        Ok(renewals)
    }

    /// Applies what the database reported. `renewed_until` is the new end of the claims, if they were renewed.
    fn update(
        &self,
        claims: &[(IssueId, ClaimEpoch)],
        found: &[ClaimRenewal],
        renewed_until: Option<Instant>,
    ) {
        let entries = self.lock();
        for ((issue_id, epoch), renewal) in claims.iter().zip(found) {
            // Skip a claim that ended or was replaced during the call.
            let entry = entries.get(issue_id).and_then(|entry| entry.claim.as_ref());
            let Some(claim) = entry.filter(|claim| claim.epoch == *epoch) else { continue };
            claim.status.send_modify(|status| match renewal {
                ClaimRenewal::Lost => status.valid_until = None,
                ClaimRenewal::Kept { pending_events, .. } => {
                    status.valid_until = renewed_until.or(status.valid_until);
                    status.has_newer_events |= *pending_events > claim.pending_events;
                }
            });
        }
    }

    fn valid_until(&self, sent: Instant) -> Instant {
        sent + self.ttl * VALID_PERCENT / 100
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IssueId, RegistryEntry>> {
        self.entries.lock().expect("no code panics while it holds this lock")
    }
}

fn request_again(entries: &mut HashMap<IssueId, RegistryEntry>, issue_id: IssueId) -> bool {
    let entry = entries.get_mut(&issue_id);
    entry.map(|entry| entry.requested_again = true).is_some()
}

/// The right to run an issue within this process. Dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct IssueSlot {
    registry: Arc<ClaimRegistry>,
    pub(crate) issue_id: IssueId,
    is_exited: bool,
}

impl IssueSlot {
    /// Frees the slot. Returns it instead if the issue was requested during the run.
    pub(crate) fn exit(mut self) -> Option<Self> {
        let mut entries = self.registry.lock();
        // Atomic under the lock: a concurrent request is either seen here or finds the slot free.
        let requested_again = entries
            .get_mut(&self.issue_id)
            .is_some_and(|entry| std::mem::take(&mut entry.requested_again));
        if !requested_again {
            entries.remove(&self.issue_id);
        }
        drop(entries);
        self.is_exited = !requested_again;
        requested_again.then_some(self)
    }

    /// Registers the claim for renewal. `requested_at` is a [time of the registry](ClaimRegistry::now) before the claim was
    /// requested.
    pub(crate) fn hold(&self, claimed: &ClaimedIssue, requested_at: Instant) -> HeldClaim {
        let valid_until = Some(self.registry.valid_until(requested_at));
        let (status, receiver) =
            watch::channel(LeaseStatus { valid_until, has_newer_events: false });
        let claim = ActiveClaim {
            epoch: claimed.epoch,
            pending_events: claimed.issue.pending_events,
            status,
        };
        self.registry.lock().entry(self.issue_id).or_default().claim = Some(claim);
        HeldClaim(ClaimHandle {
            registry: Arc::clone(&self.registry),
            issue_id: self.issue_id,
            epoch: claimed.epoch,
            status: receiver,
        })
    }
}

impl Drop for IssueSlot {
    fn drop(&mut self) {
        // A slot that was exited may belong to another run by now.
        if !self.is_exited {
            self.registry.lock().remove(&self.issue_id);
        }
    }
}

/// A claim that is renewed until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldClaim(ClaimHandle);

impl HeldClaim {
    pub(crate) fn handle(&self) -> &ClaimHandle {
        &self.0
    }
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        let claim = match self.0.registry.lock().get_mut(&self.0.issue_id) {
            Some(entry) => entry.claim.take(),
            None => None,
        };
        if let Some(claim) = claim {
            claim.status.send_modify(|status| status.valid_until = None);
        }
    }
}

/// Read access to the status of a claim.
#[derive(Clone)]
pub(crate) struct ClaimHandle {
    registry: Arc<ClaimRegistry>,
    issue_id: IssueId,
    epoch: ClaimEpoch,
    status: watch::Receiver<LeaseStatus>,
}

impl fmt::Debug for ClaimHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut claim = f.debug_struct("ClaimHandle");
        claim.field("issue_id", &self.issue_id).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl ClaimHandle {
    pub(crate) fn issue_id(&self) -> IssueId {
        self.issue_id
    }

    pub(crate) fn is_held(&self) -> bool {
        self.status.borrow().valid_until.is_some_and(|until| self.registry.now() < until)
    }

    /// Whether the database reported the claim as lost. A claim that was only not renewed in time may still be held.
    pub(crate) fn is_lost(&self) -> bool {
        self.status.borrow().valid_until.is_none()
    }

    /// Completes when the claim is lost, may be lost, or is released. Cancel-safe.
    pub(crate) async fn ended(&self) {
        let mut status = self.status.clone();
        loop {
            let Some(until) = status.borrow_and_update().valid_until else { return };
            tokio::select! {
                changed = status.changed() => if changed.is_err() { return },
                () = self.registry.clock.sleep_until(until) => return,
            }
        }
    }

    pub(crate) fn has_newer_events(&self) -> bool {
        self.status.borrow().has_newer_events
    }

    /// Completes when newer events have arrived; never, if the claim ends first. Cancel-safe.
    pub(crate) async fn newer_events(&self) {
        let mut status = self.status.clone();
        if status.wait_for(|status| status.has_newer_events).await.is_err() {
            // The claim ended, so there will be no further updates.
            std::future::pending::<()>().await;
        }
    }

    pub(crate) async fn heartbeat(&self) -> Result<()> {
        let (issue_id, epoch) = (self.issue_id, self.epoch);
        if !self.is_held() {
            return Err(IssueError::Fenced { issue_id, epoch });
        }
        self.renew().await
    }

    /// Renews the claim even if it counts as lost locally; it counts as held again if the database still has it.
    pub(crate) async fn renew(&self) -> Result<()> {
        let (issue_id, epoch) = (self.issue_id, self.epoch);
        match self.registry.renew(&[(issue_id, epoch)]).await?.first() {
            Some(ClaimRenewal::Kept { .. }) => Ok(()),
            Some(ClaimRenewal::Lost) | None => Err(IssueError::Fenced { issue_id, epoch }),
        }
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn a_claim_is_not_held_after_the_machine_was_suspended_until_it_is_renewed()
    -> anyhow::Result<()> {
        use anyhow::Context;
        use headwater_stream::clock::TestClock;

        use super::*;
        use crate::{Claim, ClaimOptions, DebounceWindow, NewEvent, StoreOptions, connect};

        let store = connect("sqlite::memory:", &StoreOptions::default()).await?;
        store.ensure_integration("main", "github").await?;
        let event = NewEvent {
            integration: "main".into(),
            external_project_id: "7".into(),
            external_issue_id: "1".into(),
            source: "github".into(),
            event_type: "note".into(),
            dedup_key: None,
            trace: None,
            payload: "{}".into(),
        };
        let recorded = store.record(&[event], &DebounceWindow::default()).await.remove(0)?;
        let (options, issue_id) = (ClaimOptions::new("worker"), recorded.issue_id);
        let Claim::Won(claimed) = store.claim(&[issue_id], &options).await?.remove(0) else {
            anyhow::bail!("the issue was not claimed");
        };
        let clock = TestClock::default();
        let on_clock = LeaseClock::new(Arc::new(clock.clone()));
        let registry = ClaimRegistry::with_clock(Arc::clone(&store), options.ttl, on_clock);
        let slot = registry.try_enter(issue_id).context("the issue is in flight")?;
        let held = slot.hold(&claimed, registry.now());
        let claim = held.handle();
        clock.advance(options.ttl / 2);
        assert!(claim.is_held());

        // Only the clock that goes on while the machine is suspended moves.
        clock.advance(options.ttl);

        assert!(!claim.is_held() && !claim.is_lost());
        tokio::time::timeout(options.ttl / 2, claim.ended()).await.context("it ends at once")?;
        let fenced = claim.heartbeat().await;
        assert!(matches!(fenced, Err(IssueError::Fenced { .. })), "{fenced:?}");
        claim.renew().await?;
        assert!(claim.is_held(), "the database still has the claim");
        Ok(())
    }
}

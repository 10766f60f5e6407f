//! The issues that this process has in hand, and how their claims stand.
//!
//! Upstream: `worker` takes a slot for an issue before it claims it. Downstream: heartbeats of the store, one call for
//! all claims. Promises: one run of an issue at a time in this process; a nudge that comes meanwhile is remembered; a
//! claim that could have run out on the database's clock is not trusted any more, whether or not the database answers.
//! Not here: what happens to a run whose claim is lost (see `worker`).

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::claim::{ClaimedIssue, Renewal};
use crate::error::{IssueError, Result};
use crate::issue::{ClaimEpoch, IssueId};
use crate::limits::{BATCH_MAX, CONSECUTIVE_FAILURES_MAX};
use crate::store::Store;

/// A claim is trusted for this part of its life, counted from before it was asked for: the rest is for slow replies.
const VALID_PERCENT: u32 = 90;

/// The issues in hand.
pub(crate) struct ClaimRegistry {
    store: Arc<dyn Store>,
    ttl: Duration,
    entries: Mutex<HashMap<IssueId, RegistryEntry>>,
}

#[derive(Default)]
struct RegistryEntry {
    /// Somebody asked for the issue meanwhile.
    requested_again: bool,
    claim: Option<ActiveClaim>,
}

struct ActiveClaim {
    epoch: ClaimEpoch,
    /// Pending events that were known at the claim.
    pending_events: u64,
    status: watch::Sender<LeaseStatus>,
}

#[derive(Clone, Copy, Debug)]
struct LeaseStatus {
    /// `None` once the claim is lost or ended.
    valid_until: Option<Instant>,
    newer: bool,
}

impl fmt::Debug for ClaimRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimRegistry").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

impl ClaimRegistry {
    pub(crate) fn new(store: Arc<dyn Store>, ttl: Duration) -> Arc<Self> {
        Arc::new(Self { store, ttl, entries: Mutex::default() })
    }

    /// A slot for this issue; `None` if it is in hand already. Then whoever has it will look at it once more.
    pub(crate) fn try_enter(self: &Arc<Self>, issue_id: IssueId) -> Option<IssueSlot> {
        let mut entries = self.lock();
        if let Some(entry) = entries.get_mut(&issue_id) {
            entry.requested_again = true;
            return None;
        }
        entries.insert(issue_id, RegistryEntry::default());
        Some(IssueSlot { registry: Arc::clone(self), issue_id, is_exited: false })
    }

    /// How many issues are in hand.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Lets all claims live on, and learns which are lost and where newer events have arrived.
    pub(crate) async fn renew_all(&self) -> Result<()> {
        let claims: Vec<(IssueId, ClaimEpoch)> = {
            let entries = self.lock();
            let epoch = |entry: &RegistryEntry| entry.claim.as_ref().map(|claim| claim.epoch);
            entries.iter().filter_map(|(id, entry)| Some((*id, epoch(entry)?))).collect()
        };
        // All of them, whatever became of some: a claim must not run out for the trouble of another.
        let mut first_error = Ok(());
        for batch in claims.chunks(BATCH_MAX) {
            first_error = first_error.and(self.renew_each(batch).await);
        }
        first_error
    }

    /// Lets these claims live on, at once or, if one of them is in the way of the others, one by one.
    async fn renew_each(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<()> {
        let error = match self.renew(claims).await {
            Err(error) if claims.len() > 1 && error.is_item_error() => error,
            answer => return answer.map(|_| ()),
        };
        let mut failures_in_a_row = 0;
        for claim in claims.chunks(1) {
            let is_failed = self.renew(claim).await.is_err();
            failures_in_a_row = if is_failed { failures_in_a_row + 1 } else { 0 };
            if failures_in_a_row == CONSECUTIVE_FAILURES_MAX {
                break;
            }
        }
        Err(error)
    }

    async fn renew(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<Vec<Renewal>> {
        let sent = Instant::now();
        let renewals = self.store.heartbeat(claims, self.ttl).await?;
        let until = self.valid_until(sent);
        let entries = self.lock();
        for ((issue_id, epoch), renewal) in claims.iter().zip(&renewals) {
            // Ended or claimed anew while the heartbeat was under way: this answer is not about it.
            let entry = entries.get(issue_id).and_then(|entry| entry.claim.as_ref());
            let Some(claim) = entry.filter(|claim| claim.epoch == *epoch) else { continue };
            claim.status.send_modify(|status| match renewal {
                Renewal::Lost => status.valid_until = None,
                Renewal::Kept { pending_events, .. } => {
                    status.valid_until = Some(until);
                    status.newer |= *pending_events > claim.pending_events;
                }
            });
        }
        Ok(renewals)
    }

    fn valid_until(&self, sent: Instant) -> Instant {
        sent + self.ttl * VALID_PERCENT / 100
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IssueId, RegistryEntry>> {
        self.entries.lock().expect("no code panics while it holds this lock")
    }
}

/// The right to work on an issue within this process. The slot is free when it is dropped.
#[derive(Debug)]
pub(crate) struct IssueSlot {
    registry: Arc<ClaimRegistry>,
    pub(crate) issue_id: IssueId,
    is_exited: bool,
}

impl IssueSlot {
    /// Leaves the slot, unless somebody has asked for the issue since the last time: then it comes back.
    pub(crate) fn exit(mut self) -> Option<Self> {
        let mut entries = self.registry.lock();
        // One step under the lock: whoever asks is either heard here or finds the slot free.
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

    /// Keeps the claim alive from now on. It was asked for at `asked_at`, or later.
    pub(crate) fn hold(&self, claimed: &ClaimedIssue, asked_at: Instant) -> HeldClaim {
        let valid_until = Some(self.registry.valid_until(asked_at));
        let (status, receiver) = watch::channel(LeaseStatus { valid_until, newer: false });
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
        // A slot that was left may be somebody else's by now.
        if !self.is_exited {
            self.registry.lock().remove(&self.issue_id);
        }
    }
}

/// A claim that is kept alive until this is dropped.
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

/// How a claim stands, for those who work under it.
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
        self.status.borrow().valid_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether the database has said that the claim is lost. One that was only not renewed in time may still be ours.
    pub(crate) fn is_lost(&self) -> bool {
        self.status.borrow().valid_until.is_none()
    }

    /// Returns when the claim is lost, could be lost, or is given up. Cancel-safe.
    pub(crate) async fn ended(&self) {
        let mut status = self.status.clone();
        loop {
            let Some(until) = status.borrow_and_update().valid_until else { return };
            tokio::select! {
                changed = status.changed() => if changed.is_err() { return },
                () = sleep_until(until) => return,
            }
        }
    }

    pub(crate) fn has_newer(&self) -> bool {
        self.status.borrow().newer
    }

    /// Returns when newer events have arrived. Cancel-safe.
    pub(crate) async fn newer(&self) {
        let mut status = self.status.clone();
        if status.wait_for(|status| status.newer).await.is_err() {
            // The claim ended, and nobody will tell.
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

    /// Asks the database, whatever we think of the claim, and trusts it requested_again if it is ours.
    pub(crate) async fn renew(&self) -> Result<()> {
        let (issue_id, epoch) = (self.issue_id, self.epoch);
        match self.registry.renew(&[(issue_id, epoch)]).await?.first() {
            Some(Renewal::Kept { .. }) => Ok(()),
            Some(Renewal::Lost) | None => Err(IssueError::Fenced { issue_id, epoch }),
        }
    }
}

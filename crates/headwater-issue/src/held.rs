//! The issues that this process has in hand, and how their claims stand.
//!
//! Upstream: `worker` takes a seat for an issue before it claims it. Downstream: heartbeats of the store, one call for
//! all claims. Promises: one run of an issue at a time in this process; a nudge that comes meanwhile is remembered; a
//! claim that could have run out on the database's clock is not trusted any more, whether or not the database answers.
//! Not here: what happens to a run whose claim is lost (see `worker`).

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::claim::{Beat, ClaimedIssue};
use crate::error::{IssueError, Result};
use crate::issue::{ClaimEpoch, IssueId};
use crate::limits::{BATCH_MAX, SINGLE_FAILURES_MAX};
use crate::store::Store;

/// A claim is trusted for this part of its life, counted from before it was asked for: the rest is for slow replies.
const TRUST_PERCENT: u32 = 90;

/// The issues in hand.
pub(crate) struct Claims {
    store: Arc<dyn Store>,
    ttl: Duration,
    seats: Mutex<HashMap<IssueId, Place>>,
}

#[derive(Default)]
struct Place {
    /// Somebody asked for the issue meanwhile.
    again: bool,
    claim: Option<Claimed>,
}

struct Claimed {
    epoch: ClaimEpoch,
    /// Pending events that were known at the claim.
    pending_events: u64,
    standing: watch::Sender<Standing>,
}

#[derive(Clone, Copy, Debug)]
struct Standing {
    /// `None` once the claim is lost or ended.
    trusted_until: Option<Instant>,
    newer: bool,
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claims").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

impl Claims {
    pub(crate) fn new(store: Arc<dyn Store>, ttl: Duration) -> Arc<Self> {
        Arc::new(Self { store, ttl, seats: Mutex::default() })
    }

    /// A seat for this issue; `None` if it is in hand already. Then whoever has it will look at it once more.
    pub(crate) fn sit(self: &Arc<Self>, issue_id: IssueId) -> Option<Seat> {
        let mut seats = self.lock();
        if let Some(place) = seats.get_mut(&issue_id) {
            place.again = true;
            return None;
        }
        seats.insert(issue_id, Place::default());
        Some(Seat { claims: Arc::clone(self), issue_id, is_left: false })
    }

    /// How many issues are in hand.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Lets all claims live on, and learns which are lost and where newer events have arrived.
    pub(crate) async fn run_once(&self) -> Result<()> {
        let claims: Vec<(IssueId, ClaimEpoch)> = {
            let seats = self.lock();
            let epoch = |place: &Place| place.claim.as_ref().map(|claim| claim.epoch);
            seats.iter().filter_map(|(id, place)| Some((*id, epoch(place)?))).collect()
        };
        // All of them, whatever became of some: a claim must not run out for the trouble of another.
        let mut first_error = Ok(());
        for batch in claims.chunks(BATCH_MAX) {
            first_error = first_error.and(self.beat_each(batch).await);
        }
        first_error
    }

    /// Lets these claims live on, at once or, if one of them is in the way of the others, one by one.
    async fn beat_each(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<()> {
        let error = match self.beat(claims).await {
            Err(error) if claims.len() > 1 && error.may_concern_one() => error,
            answer => return answer.map(|_| ()),
        };
        let mut failures_in_a_row = 0;
        for claim in claims.chunks(1) {
            let is_failed = self.beat(claim).await.is_err();
            failures_in_a_row = if is_failed { failures_in_a_row + 1 } else { 0 };
            if failures_in_a_row == SINGLE_FAILURES_MAX {
                break;
            }
        }
        Err(error)
    }

    async fn beat(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<Vec<Beat>> {
        let sent = Instant::now();
        let beats = self.store.heartbeat(claims, self.ttl).await?;
        let until = self.trusted_until(sent);
        let seats = self.lock();
        for ((issue_id, epoch), beat) in claims.iter().zip(&beats) {
            // Ended or claimed anew while the heartbeat was under way: this answer is not about it.
            let place = seats.get(issue_id).and_then(|place| place.claim.as_ref());
            let Some(claim) = place.filter(|claim| claim.epoch == *epoch) else { continue };
            claim.standing.send_modify(|standing| match beat {
                Beat::Lost => standing.trusted_until = None,
                Beat::Kept { pending_events, .. } => {
                    standing.trusted_until = Some(until);
                    standing.newer |= *pending_events > claim.pending_events;
                }
            });
        }
        Ok(beats)
    }

    fn trusted_until(&self, sent: Instant) -> Instant {
        sent + self.ttl * TRUST_PERCENT / 100
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IssueId, Place>> {
        self.seats.lock().expect("no code panics while it holds this lock")
    }
}

/// The right to work on an issue within this process. The seat is free when it is dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    claims: Arc<Claims>,
    pub(crate) issue_id: IssueId,
    is_left: bool,
}

impl Seat {
    /// Leaves the seat, unless somebody has asked for the issue since the last time: then it comes back.
    pub(crate) fn leave(mut self) -> Option<Self> {
        let mut seats = self.claims.lock();
        // One step under the lock: whoever asks is either heard here or finds the seat free.
        let again =
            seats.get_mut(&self.issue_id).is_some_and(|place| std::mem::take(&mut place.again));
        if !again {
            seats.remove(&self.issue_id);
        }
        drop(seats);
        self.is_left = !again;
        again.then_some(self)
    }

    /// Keeps the claim alive from now on. It was asked for at `asked_at`, or later.
    pub(crate) fn hold(&self, claimed: &ClaimedIssue, asked_at: Instant) -> HeldClaim {
        let trusted_until = Some(self.claims.trusted_until(asked_at));
        let (standing, receiver) = watch::channel(Standing { trusted_until, newer: false });
        let claim = Claimed {
            epoch: claimed.epoch,
            pending_events: claimed.issue.pending_events,
            standing,
        };
        self.claims.lock().entry(self.issue_id).or_default().claim = Some(claim);
        HeldClaim(ClaimWatch {
            claims: Arc::clone(&self.claims),
            issue_id: self.issue_id,
            epoch: claimed.epoch,
            standing: receiver,
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // A seat that was left may be somebody else's by now.
        if !self.is_left {
            self.claims.lock().remove(&self.issue_id);
        }
    }
}

/// A claim that is kept alive until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldClaim(ClaimWatch);

impl HeldClaim {
    pub(crate) fn watch(&self) -> &ClaimWatch {
        &self.0
    }
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        let claim = match self.0.claims.lock().get_mut(&self.0.issue_id) {
            Some(place) => place.claim.take(),
            None => None,
        };
        if let Some(claim) = claim {
            claim.standing.send_modify(|standing| standing.trusted_until = None);
        }
    }
}

/// How a claim stands, for those who work under it.
#[derive(Clone)]
pub(crate) struct ClaimWatch {
    claims: Arc<Claims>,
    issue_id: IssueId,
    epoch: ClaimEpoch,
    standing: watch::Receiver<Standing>,
}

impl fmt::Debug for ClaimWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut claim = f.debug_struct("ClaimWatch");
        claim.field("issue_id", &self.issue_id).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl ClaimWatch {
    pub(crate) fn issue_id(&self) -> IssueId {
        self.issue_id
    }

    pub(crate) fn is_held(&self) -> bool {
        self.standing.borrow().trusted_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether the database has said that the claim is lost. One that was only not renewed in time may still be ours.
    pub(crate) fn is_lost(&self) -> bool {
        self.standing.borrow().trusted_until.is_none()
    }

    /// Returns when the claim is lost, could be lost, or is given up. Cancel-safe.
    pub(crate) async fn ended(&self) {
        let mut standing = self.standing.clone();
        loop {
            let Some(until) = standing.borrow_and_update().trusted_until else { return };
            tokio::select! {
                changed = standing.changed() => if changed.is_err() { return },
                () = sleep_until(until) => return,
            }
        }
    }

    pub(crate) fn has_newer(&self) -> bool {
        self.standing.borrow().newer
    }

    /// Returns when newer events have arrived. Cancel-safe.
    pub(crate) async fn newer(&self) {
        let mut standing = self.standing.clone();
        if standing.wait_for(|standing| standing.newer).await.is_err() {
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

    /// Asks the database, whatever we think of the claim, and trusts it again if it is ours.
    pub(crate) async fn renew(&self) -> Result<()> {
        let (issue_id, epoch) = (self.issue_id, self.epoch);
        match self.claims.beat(&[(issue_id, epoch)]).await?.first() {
            Some(Beat::Kept { .. }) => Ok(()),
            Some(Beat::Lost) | None => Err(IssueError::Fenced { issue_id, epoch }),
        }
    }
}

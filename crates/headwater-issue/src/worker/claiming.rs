//! The step "claim": wins an issue, or finds that there is nothing to do.
//!
//! Upstream: a nudge or the agenda brought the issue. Downstream: `batcher` shares claims between runs. Promises: what is won
//! is surely ours at that moment, however long the answer took; an issue that was claimed without our knowing is freed.

use tokio::time::{Instant, timeout};
use tracing::{error, warn};

use super::{ASK_AGAIN_AFTER, Inner, no_run};
use crate::claim::{Claim, ClaimedIssue, GiveBack, GiveBackReason};
use crate::error::IssueError;
use crate::held::{HeldClaim, Seat};
use crate::issue::{IssueId, ProcessingStatus};
use crate::steps::Step;

/// What became of an attempt to claim.
pub(super) enum Claiming {
    /// It is in hand.
    Won(Box<ClaimedIssue>, HeldClaim),
    /// Nothing to do for us, now.
    Nothing,
    /// The worker stops, and nobody has looked.
    Stopping,
}

impl Inner {
    /// Waits for a database that is away: the nudge stays in hand, but no longer than a claim lives. Then the issue makes
    /// room for others until the sweep finds it.
    pub(super) async fn claim(&self, seat: &Seat) -> Claiming {
        let issue_id = seat.issue_id;
        let until = Instant::now() + self.config.claim_ttl;
        while !self.is_stopping() {
            let asked_at = Instant::now();
            let reason = match self.batcher.claim(issue_id).await {
                Ok(Claim::Won(claimed)) => {
                    let held = seat.hold(&claimed, asked_at);
                    if !self.is_surely_ours(&held).await {
                        continue;
                    }
                    self.config.steps.taken(Step::Claimed, issue_id);
                    return Claiming::Won(claimed, held);
                }
                Ok(Claim::Taken { owner, .. }) if owner == self.config.name => {
                    // Ours, yet not in hand: the reply to an earlier claim was lost.
                    self.give_back_unheard(issue_id).await;
                    continue;
                }
                Err(error) if error.is_transient() && Instant::now() < until => {
                    warn!(%issue_id, %error, "issue was not claimed, trying again");
                    self.pause().await;
                    continue;
                }
                Err(error) => {
                    error!(%issue_id, %error, "issue cannot be claimed, left to the sweep");
                    "error"
                }
                Ok(Claim::NotYet { wait, .. }) => {
                    self.agenda.add(issue_id, Instant::now() + wait);
                    "waiting"
                }
                Ok(Claim::Taken { .. }) => "taken",
                Ok(Claim::Idle) => "idle",
                Ok(Claim::Quarantined { .. }) => "quarantined",
                Ok(Claim::Missing) => "missing",
            };
            no_run(reason);
            return Claiming::Nothing;
        }
        Claiming::Stopping
    }

    /// An answer that took nearly as long as a claim lives tells of what was: ask once more, by a heartbeat.
    async fn is_surely_ours(&self, held: &HeldClaim) -> bool {
        if held.watch().is_held() {
            return true;
        }
        match held.watch().renew().await {
            Ok(()) => held.watch().is_held(),
            Err(error) => {
                let issue_id = held.watch().issue_id();
                warn!(%issue_id, %error, "claim was won too late, trying again");
                self.pause().await;
                false
            }
        }
    }

    /// Frees an issue that this worker has claimed without knowing.
    async fn give_back_unheard(&self, issue_id: IssueId) {
        let freed = async {
            let Some(issue) = self.store.issue(issue_id).await? else { return Ok(()) };
            let ours = issue.claim_owner.as_deref() == Some(self.config.name.as_str());
            if issue.status == ProcessingStatus::Processing && ours {
                let (epoch, reason) = (issue.claim_epoch, GiveBackReason::Shutdown);
                self.store.give_back(&[GiveBack { issue_id, epoch, reason }]).await?;
            }
            Ok::<(), IssueError>(())
        };
        if let Err(error) = freed.await {
            warn!(%issue_id, %error, "issue claimed without an answer was not freed, trying again");
            self.pause().await;
        }
    }

    /// Waits a little, or until the worker stops.
    async fn pause(&self) {
        let mut stop = self.stop.subscribe();
        let _ = timeout(ASK_AGAIN_AFTER, stop.wait_for(|stop| *stop)).await;
    }
}

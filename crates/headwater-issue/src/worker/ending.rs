//! The step "complete": ends a run in the database, with its result or without, and asks for what is left to do.
//!
//! Upstream: a handler that has ended. Downstream: `store`, which takes an end only from the holder of the claim. Promises: a
//! result is committed whole or not at all; a call that got no answer is repeated as long as the claim is surely ours.

use std::sync::MutexGuard;
use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use super::handling::Ending;
use super::{ASK_AGAIN_AFTER, Inner};
use crate::chance;
use crate::claim::{
    AfterFailure, Completed, Completion, Failed, Failure, GiveBack, GiveBackReason, GivenBack,
};
use crate::error::{IssueError, Result};
use crate::handler::{HandlerError, PUT_OFF_SPREAD_MAX, Resolution, Run, Then, unavailable_pause};
use crate::held::HeldClaim;
use crate::limits::BATCH_MAX;

/// What the end of a run leaves to do.
pub(super) enum Next {
    Nothing,
    /// Somebody should look at the issue now.
    Nudge,
    /// This process looks at the issue after this time.
    Later(Duration),
}

impl Inner {
    /// Ends a run as its handler ended. Returns how, for the metrics, and what is left to do.
    pub(super) async fn complete(
        &self,
        run: &Run,
        held: &HeldClaim,
        ending: Ending,
    ) -> (&'static str, Next) {
        match ending {
            Ending::Resolved(resolution) => self.commit(run, held, resolution).await,
            Ending::Failed(error) => self.fail(run, held, error).await,
            Ending::Superseded => self.give_back(run, held, GiveBackReason::Superseded).await,
            Ending::Stopped => self.give_back(run, held, GiveBackReason::Shutdown).await,
            Ending::Lost => {
                warn!(issue_id = %run.issue().id, epoch = %run.epoch(), "claim lost, run cancelled");
                self.release_later(run, held);
                ("fenced", Next::Nothing)
            }
        }
    }

    /// Commits the result of a run: events processed, fields changed, replies in the outbox, all or nothing.
    async fn commit(
        &self,
        run: &Run,
        held: &HeldClaim,
        resolution: Resolution,
    ) -> (&'static str, Next) {
        let completion = Completion {
            issue_id: run.issue().id,
            epoch: run.epoch(),
            event_log_ids: run.events().iter().map(|event| event.id).collect(),
            fields: resolution.fields,
            discussions: resolution.discussions,
            outbox: resolution.outbox,
        };
        match self.insist(held, || self.batcher.complete(completion.clone())).await {
            Ok(Completed::Committed { requeued: false, .. }) => ("done", Next::Nothing),
            Ok(Completed::Committed { not_before: None, .. }) => ("done", Next::Nudge),
            // A quiet window began during the run; the next claim tells how long it still lasts.
            Ok(Completed::Committed { .. }) => ("done", Next::Later(Duration::ZERO)),
            Ok(Completed::Fenced) => ("fenced", Next::Nothing),
            Err(error @ IssueError::Invalid { .. }) => {
                let error = HandlerError::retry(format!("the handler's result: {error}"));
                self.fail(run, held, error).await
            }
            // The database keeps the claim alive, yet not the result. If it has it after all, this is fenced.
            Err(error) if error.is_transient() && held.watch().is_held() => {
                let reason = format!("the result was not stored: {error}");
                self.fail(run, held, HandlerError::unavailable(reason)).await
            }
            Err(error) => self.given_up(run, held, &error),
        }
    }

    /// Counts a failed run, and puts the issue off or out of the way.
    async fn fail(&self, run: &Run, held: &HeldClaim, error: HandlerError) -> (&'static str, Next) {
        let (issue_id, attempt) = (run.issue().id, run.issue().attempts + 1);
        let then = match error.then {
            Then::Retry => {
                AfterFailure::Retry { after: self.config.retry.delay(attempt, chance::part()) }
            }
            Then::RetryAfter(after) => AfterFailure::Retry { after },
            Then::PutOff(after) => put_off(after),
            Then::Unavailable => {
                let oldest = run.events().first().map(|event| event.created_at);
                let waited = oldest.map(|oldest| SystemClock.now().since(oldest));
                put_off(unavailable_pause(waited.unwrap_or_default()))
            }
            Then::Quarantine => AfterFailure::Quarantine,
        };
        let (delay, result) = match then {
            AfterFailure::PutOff { after } => {
                warn!(%issue_id, ?after, reason = %error.reason, "run put off");
                (after, "put_off")
            }
            AfterFailure::Retry { after } => {
                warn!(%issue_id, attempt, error = %error.reason, "run failed");
                (after, "failed")
            }
            AfterFailure::Quarantine => {
                warn!(%issue_id, attempt, error = %error.reason, "run failed");
                (Duration::ZERO, "failed")
            }
        };
        let failure = Failure { issue_id, epoch: run.epoch(), error: error.reason, then };
        let failures = [failure];
        let call = || self.store.fail(&failures, self.config.retry.attempts_max);
        match first(self.insist(held, call).await) {
            Ok(Some(Failed::Requeued { .. })) => (result, Next::Later(delay)),
            Ok(Some(Failed::Quarantined { attempts })) => {
                error!(%issue_id, attempts, "issue quarantined, release it when it is mended");
                ("quarantined", Next::Nothing)
            }
            Ok(Some(Failed::Fenced) | None) => ("fenced", Next::Nothing),
            Err(error) => self.given_up(run, held, &error),
        }
    }

    /// Ends the claim without a result and without blame.
    async fn give_back(
        &self,
        run: &Run,
        held: &HeldClaim,
        reason: GiveBackReason,
    ) -> (&'static str, Next) {
        let (issue_id, epoch) = (run.issue().id, run.epoch());
        info!(%issue_id, %epoch, ?reason, "run cancelled, issue given back");
        let claims = [GiveBack { issue_id, epoch, reason }];
        match first(self.insist(held, || self.store.give_back(&claims)).await) {
            Ok(Some(GivenBack::Requeued { .. })) if reason == GiveBackReason::Superseded => {
                ("superseded", Next::Later(Duration::ZERO))
            }
            Ok(Some(GivenBack::Requeued { .. })) => ("given_back", Next::Nudge),
            Ok(Some(GivenBack::Fenced) | None) => ("fenced", Next::Nothing),
            Err(error) => self.given_up(run, held, &error),
        }
    }

    /// Repeats a call that the database did not answer, for as long as the claim is surely ours, but no longer than a claim
    /// lives: what fails for so long fails for this issue. All calls that end a run may be repeated: they have happened,
    /// happen now, or are fenced.
    async fn insist<T, Calling: Future<Output = Result<T>>>(
        &self,
        held: &HeldClaim,
        call: impl Fn() -> Calling,
    ) -> Result<T> {
        let until = Instant::now() + self.config.claim_ttl;
        loop {
            match call().await {
                Err(error)
                    if error.is_transient() && held.watch().is_held() && Instant::now() < until =>
                {
                    let issue_id = held.watch().issue_id();
                    warn!(%issue_id, %error, "end of a run was not stored, trying again");
                    sleep(ASK_AGAIN_AFTER).await;
                }
                answer => return answer,
            }
        }
    }

    /// The database stayed away until the claim ran out. If it did not hear of the end, the issue is released later, or
    /// the sweep requeues it.
    fn given_up(&self, run: &Run, held: &HeldClaim, error: &IssueError) -> (&'static str, Next) {
        error!(issue_id = %run.issue().id, epoch = %run.epoch(), %error, "end of a run was not stored");
        self.release_later(run, held);
        ("error", Next::Nothing)
    }

    /// Leaves the claim to `release_lapsed`, unless the database has said that it is lost.
    fn release_later(&self, run: &Run, held: &HeldClaim) {
        if !held.watch().is_lost() {
            let (issue_id, epoch, reason) = (run.issue().id, run.epoch(), GiveBackReason::Shutdown);
            self.lapsed().push(GiveBack { issue_id, epoch, reason });
        }
    }

    /// Releases claims that ended while the database was unavailable: a claim that runs out counts as a crash of its
    /// worker, and this worker is alive. Those of one call that fails stay for the next.
    pub(super) async fn release_lapsed(&self) -> Result<()> {
        loop {
            let claims: Vec<GiveBack> = self.lapsed().iter().take(BATCH_MAX).copied().collect();
            if claims.is_empty() {
                return Ok(());
            }
            let released = self.store.give_back(&claims).await?;
            self.lapsed().drain(..claims.len());
            for (claim, released) in claims.iter().zip(released) {
                if let GivenBack::Requeued { .. } = released {
                    info!(issue_id = %claim.issue_id, epoch = %claim.epoch, "claim of an unavailable database released");
                    self.agenda.add(claim.issue_id, Instant::now());
                }
            }
        }
    }

    fn lapsed(&self) -> MutexGuard<'_, Vec<GiveBack>> {
        self.lapsed.lock().expect("no code panics while it holds this lock")
    }
}

/// A little later than asked for, so that not all who wait come back at once.
fn put_off(after: Duration) -> AfterFailure {
    let spread = (after / 10).min(PUT_OFF_SPREAD_MAX);
    AfterFailure::PutOff { after: after + spread.mul_f64(chance::part()) }
}

fn first<T>(answers: Result<Vec<T>>) -> Result<Option<T>> {
    answers.map(|answers| answers.into_iter().next())
}

//! The worker: nudge -> claim -> handle -> complete -> acknowledge. Each is a function below, in this order.
//!
//! Upstream: nudges from `headwater-queue`, and the agenda of this process. Downstream: `store`; the outbox is written with
//! the end of a run and sent by `outbox`.
//!
//! Promises, whichever line the process dies at:
//! - No database transaction is open while a handler runs.
//! - One run of an issue at a time counts: every effect presents the epoch of its claim.
//! - The nudge is acknowledged last. Before that, SQL knows what is left to do: the issue is idle, queued, or claimed until
//!   a certain time, and the sweep finds the latter two.
//!
//! Not here: when the worker starts and stops (see `life`), and how claims are kept alive (see `held`).

mod config;
mod intake;
mod life;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use headwater_queue::{Handler, Message, Outcome};
use metrics::{counter, histogram};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, error, info, warn};

pub(crate) use self::config::unique_name;
pub use self::config::{OnNewEvent, WorkerConfig};
use crate::agenda::Agenda;
use crate::batcher::Batcher;
use crate::chance;
use crate::claim::{
    AfterFailure, Claim, ClaimedIssue, Completed, Completion, Failed, Failure, GiveBack,
    GiveBackReason, GivenBack, Nudge,
};
use crate::error::{IssueError, Result};
use crate::handler::{HandlerError, IssueHandler, Resolution, Run, Then};
use crate::held::{Claims, HeldClaim, Seat};
use crate::issue::{IssueId, ProcessingStatus};
use crate::metrics::{
    EVENTS_PER_ISSUE_BATCH, ISSUES_PROCESSED, ISSUES_PROCESSING_DURATION, NUDGES_WITHOUT_RUN,
};
use crate::nudge::{self, Nudger};
use crate::steps::Step;
use crate::store::Store;

/// How long to wait before a database that did not answer is asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Works on issues. Clones are the same worker.
#[derive(Clone)]
pub struct Worker {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn Store>,
    nudger: Nudger,
    handler: Arc<dyn IssueHandler>,
    config: WorkerConfig,
    batcher: Batcher,
    claims: Arc<Claims>,
    agenda: Agenda,
    slots: Arc<Semaphore>,
    /// Becomes true when handlers that still run are to be cancelled.
    stop: watch::Sender<bool>,
}

/// How a handler ended.
enum Ending {
    Resolved(Resolution),
    Failed(HandlerError),
    /// Newer events have arrived.
    Superseded,
    /// The worker stops.
    Stopped,
    /// The claim is somebody else's, or could be.
    Lost,
}

/// What the end of a run leaves to do.
enum Next {
    Nothing,
    /// Somebody should look at the issue now.
    Nudge,
    /// This process looks at the issue after this time.
    Later(Duration),
}

/// The queue delivers a nudge; what is returned acknowledges it.
#[async_trait]
impl Handler for Worker {
    async fn handle(&self, message: Message) -> Outcome {
        match nudge::read(&message.fields) {
            Ok(nudge) => {
                self.inner.config.steps.taken(Step::Received, nudge.issue_id);
                self.look_at(nudge.issue_id).await;
                Outcome::Done
            }
            Err(reason) => {
                no_run("malformed");
                warn!(entry_id = %message.id, error = %reason, "nudge makes no sense");
                Outcome::DeadLetter { reason }
            }
        }
    }
}

impl Worker {
    /// Works on one issue until nothing is left to do for it now. A no-op if there is nothing to do, or if somebody else
    /// does it. Never fails: what goes wrong is written to the issue, or found by the sweep.
    pub async fn look_at(&self, issue_id: IssueId) {
        let Ok(_slot) = self.inner.slots.acquire().await else { return };
        // In hand already: whoever has it looks once more, so this wake-up is not lost.
        let mut taken = self.inner.claims.sit(issue_id);
        while let Some(seat) = taken {
            self.inner.run(&seat).await;
            taken = seat.leave();
        }
    }
}

impl Inner {
    /// One run, from the claim to its end.
    async fn run(&self, seat: &Seat) {
        let Some((claimed, held)) = self.claim(seat).await else { return };
        let started = Instant::now();
        let (claimed, claim) = (Arc::new(claimed), held.watch().clone());
        let run = Run { claimed, claim, deadline: started + self.config.deadline };
        histogram!(EVENTS_PER_ISSUE_BATCH).record(run.events().len() as f64);

        let ending = self.handle(&run).await;
        self.config.steps.taken(Step::Handled, seat.issue_id);

        let (result, next) = self.end(&run, &held, ending).await;
        self.config.steps.taken(Step::Completed, seat.issue_id);
        drop(held);
        counter!(ISSUES_PROCESSED, "result" => result).increment(1);
        histogram!(ISSUES_PROCESSING_DURATION, "result" => result).record(started.elapsed());
        let elapsed_ms = started.elapsed().as_millis() as u64;
        debug!(issue_id = %seat.issue_id, epoch = %run.epoch(), result, elapsed_ms, "run ended");

        self.leave(&run, next).await;
    }

    /// Wins the issue, or finds that there is nothing to do. Waits for a database that is away: the nudge stays in hand,
    /// but no longer than a claim lives. Then the issue makes room for others until the sweep finds it.
    async fn claim(&self, seat: &Seat) -> Option<(ClaimedIssue, HeldClaim)> {
        let issue_id = seat.issue_id;
        let until = Instant::now() + self.config.claim_ttl;
        while !self.is_stopping() {
            let asked_at = Instant::now();
            let reason = match self.batcher.claim(issue_id).await {
                Ok(Claim::Won(claimed)) => {
                    let held = seat.hold(&claimed, asked_at);
                    self.config.steps.taken(Step::Claimed, issue_id);
                    return Some((*claimed, held));
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
            return None;
        }
        None
    }

    /// Runs the handler, as long as its result can count. Whatever ends it first, it is dropped when this returns.
    async fn handle(&self, run: &Run) -> Ending {
        let mut stop = self.stop.subscribe();
        tokio::select! {
            biased;
            () = run.cancelled() => Ending::Lost,
            _ = stop.wait_for(|stop| *stop) => Ending::Stopped,
            () = self.superseded(run) => Ending::Superseded,
            () = sleep_until(run.deadline) => {
                let limit = self.config.deadline;
                Ending::Failed(HandlerError::retry(format!("the handler took longer than {limit:?}")))
            }
            // The handler may have left something of its own in disorder by a panic; we share nothing with it.
            result = AssertUnwindSafe(self.handler.handle(run.clone())).catch_unwind() => match result {
                Ok(Ok(resolution)) => Ending::Resolved(resolution),
                Ok(Err(error)) => Ending::Failed(error),
                Err(panic) => Ending::Failed(HandlerError::retry(panic_text(panic.as_ref()))),
            },
        }
    }

    /// Returns when a newer event ends this run; never, if the run goes on regardless.
    async fn superseded(&self, run: &Run) {
        match self.config.on_new_event {
            OnNewEvent::Supersede { times_max } if run.issue().superseded < times_max => {
                run.newer_events().await;
            }
            _ => std::future::pending().await,
        }
    }

    async fn end(&self, run: &Run, held: &HeldClaim, ending: Ending) -> (&'static str, Next) {
        match ending {
            Ending::Resolved(resolution) => self.complete(run, held, resolution).await,
            Ending::Failed(error) => self.fail(run, held, error).await,
            Ending::Superseded => self.give_back(run, held, GiveBackReason::Superseded).await,
            Ending::Stopped => self.give_back(run, held, GiveBackReason::Shutdown).await,
            Ending::Lost => {
                warn!(issue_id = %run.issue().id, epoch = %run.epoch(), "claim lost, run cancelled");
                ("fenced", Next::Nothing)
            }
        }
    }

    /// Commits the result of a run: events processed, fields changed, replies in the outbox, all or nothing.
    async fn complete(
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
                let error = HandlerError::retry(format!("the result was not stored: {error}"));
                self.fail(run, held, error).await
            }
            Err(error) => self.given_up(run, &error),
        }
    }

    /// Counts a failed run, and puts the issue off or out of the way.
    async fn fail(&self, run: &Run, held: &HeldClaim, error: HandlerError) -> (&'static str, Next) {
        let (issue_id, attempt) = (run.issue().id, run.issue().attempts + 1);
        warn!(%issue_id, attempt, error = %error.reason, "run failed");
        let delay = match error.then {
            Then::Retry => Some(self.config.retry.delay(attempt, chance::part())),
            Then::RetryAfter(after) => Some(after),
            Then::Quarantine => None,
        };
        let then = delay.map_or(AfterFailure::Quarantine, |after| AfterFailure::Retry { after });
        let failure = Failure { issue_id, epoch: run.epoch(), error: error.reason, then };
        let failures = [failure];
        let call = || self.store.fail(&failures, self.config.retry.attempts_max);
        match first(self.insist(held, call).await) {
            Ok(Some(Failed::Requeued { .. })) => ("failed", Next::Later(delay.unwrap_or_default())),
            Ok(Some(Failed::Quarantined { attempts })) => {
                error!(%issue_id, attempts, "issue quarantined, release it when it is mended");
                ("quarantined", Next::Nothing)
            }
            Ok(Some(Failed::Fenced) | None) => ("fenced", Next::Nothing),
            Err(error) => self.given_up(run, &error),
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
            Err(error) => self.given_up(run, &error),
        }
    }

    /// Asks for the follow-up of a run, before its nudge is acknowledged.
    async fn leave(&self, run: &Run, next: Next) {
        let issue_id = run.issue().id;
        match next {
            Next::Nothing => {}
            Next::Later(wait) => {
                self.agenda.add(issue_id, Instant::now() + wait);
            }
            Next::Nudge => {
                let event_log_id = run.events().last().map(|event| event.id).unwrap_or_default();
                let sent = self.nudger.send(&[Nudge { issue_id, event_log_id }]).await;
                if sent.is_err() && !self.is_stopping() {
                    self.agenda.add(issue_id, Instant::now());
                }
            }
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

    /// The database stayed away until the claim ran out. If it did not hear of the end, the sweep requeues the issue.
    fn given_up(&self, run: &Run, error: &IssueError) -> (&'static str, Next) {
        error!(issue_id = %run.issue().id, epoch = %run.epoch(), %error, "end of a run was not stored");
        ("error", Next::Nothing)
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
        let _ = tokio::time::timeout(ASK_AGAIN_AFTER, stop.wait_for(|stop| *stop)).await;
    }

    fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }
}

fn no_run(reason: &'static str) {
    counter!(NUDGES_WITHOUT_RUN, "result" => reason).increment(1);
}

fn first<T>(answers: Result<Vec<T>>) -> Result<Option<T>> {
    answers.map(|answers| answers.into_iter().next())
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("the handler panicked: {}", text.unwrap_or("no text"))
}

//! The worker: receive a nudge, claim the issue, execute the handler, finish the run, acknowledge the nudge.
//!
//! Upstream: nudges from `headwater-queue`, and the local queue of this process. Downstream: `store`. Outbox rows are
//! written in the transaction that finishes a run; `outbox` delivers them later. `claim_registry` renews claims.
//!
//! Guarantees, at whichever line the process dies:
//! - No database transaction is open while a handler runs.
//! - At most one run of an issue takes effect at a time: every effect presents the epoch of its claim.
//! - The nudge is acknowledged last, unless the queue has aborted its handler. Until the run has ended, the database has the
//!   remaining work: the issue is queued, or claimed until an expiry time, and the sweep finds both.
//! - Every task started by `run` ends before `run` returns, or when its future is dropped.
//!
//! Where this crate decides that a run or a reply is stale:
//! - `state` and the stores fence a run by its claim epoch: an older epoch changes nothing.
//! - `claim_registry` stops trusting a claim that was not renewed in time, and notices newer events; `execute`
//!   then cancels the handler. [`OnNewEvent`] says whether newer events cancel a run.
//! - `ClaimedIssue::completed_event_log_id` and `AdminStore::newest_event_log_at_commit` tell the handler and the
//!   deliverer which event logs existed when a run or a reply was committed. The caller decides from them whether a
//!   reply is stale.

use std::fmt;
use std::future::pending;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use headwater_queue::{ConsumerConfig, Mode, Outcome, Queue};
use headwater_stream::clock::{Clock, SystemClock};
use metrics::{counter, histogram};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::batcher::Batcher;
use crate::claim::{
    AfterFailure, Claim, ClaimRelease, ClaimReleased, ClaimedIssue, CompletionOutcome,
    FailureOutcome, Nudge, ReleaseReason, RunCompletion, RunFailure,
};
use crate::claim_registry::{ClaimHandle, ClaimRegistry, HeldClaim, IssueSlot};
use crate::config::{OnNewEvent, WorkerConfig};
use crate::error::{IssueError, Result};
use crate::handler::{
    FailureAction, HandlerError, IssueHandler, Resolution, Run, defer_with_jitter, panic_text,
    unavailable_delay,
};
use crate::issue::{EventLogId, IssueId};
use crate::lapsed_claims::LapsedClaims;
use crate::local_queue::DueQueue;
use crate::metrics::{
    EVENTS_PER_ISSUE_BATCH, ISSUES_PROCESSED, ISSUES_PROCESSING_DURATION, count_nudge_without_run,
};
use crate::nudge::{GROUP, Nudger, STREAM};
use crate::nudge_handler::{NudgeHandler, NudgedRun};
use crate::step_observer::ProcessingStep;
use crate::store::Store;
use crate::worker_heartbeat;

/// Delay before a database call that failed is retried.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// How long cancelled runs may take to release their claims.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay before a failed subscription is retried.
const SUBSCRIBE_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Added to the worker's own drain time, for the queue to acknowledge finished entries.
const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Processes issues. Clones share one worker.
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
    claims: Arc<ClaimRegistry>,
    local_queue: DueQueue,
    lapsed: LapsedClaims,
    /// Permits to claim and finish runs; `handlers` are those of them to execute one.
    slots: Semaphore,
    handlers: Semaphore,
    /// Whether `run` was called.
    has_run: AtomicBool,
    /// Cancelled when the handlers still running are to be cancelled.
    stop: CancellationToken,
}

/// How the handler of a run ended.
enum RunOutcome {
    Resolved(Resolution),
    Failed(HandlerError),
    /// Newer events have arrived.
    Superseded,
    /// The worker is stopping.
    Stopped,
    /// The claim is lost, or may be.
    Lost,
}

/// What is left to do after a run.
enum FollowUp {
    Nothing,
    /// Nudge: any worker should process the issue now.
    Nudge,
    /// Put the issue into the local queue, due after this time.
    Later(Duration),
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("name", &self.inner.config.name).finish_non_exhaustive()
    }
}

impl Worker {
    /// Creates a worker. It does nothing until [`run`](Self::run) is called.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(
        store: Arc<dyn Store>,
        nudger: Nudger,
        handler: impl IssueHandler,
        config: WorkerConfig,
    ) -> Result<Self> {
        config.validate()?;
        let inner = Inner {
            batcher: Batcher::new(&store, config.claim_options(), config.calls_max)?,
            claims: ClaimRegistry::new(Arc::clone(&store), config.claim_ttl),
            local_queue: DueQueue::default(),
            lapsed: LapsedClaims::default(),
            slots: Semaphore::new(config.in_flight_max()),
            handlers: Semaphore::new(config.concurrency),
            has_run: AtomicBool::new(false),
            stop: CancellationToken::new(),
            handler: Arc::new(handler),
            store,
            nudger,
            config,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The name of this worker.
    pub fn name(&self) -> &str {
        &self.inner.config.name
    }

    /// Adds issues to the local queue of this worker, without a nudge. Returns how many were accepted.
    pub fn offer(&self, issues: impl IntoIterator<Item = IssueId>) -> usize {
        let now = Instant::now();
        issues.into_iter().filter(|issue_id| self.inner.local_queue.add(*issue_id, now)).count()
    }

    /// Number of issues in flight.
    pub fn in_flight(&self) -> usize {
        self.inner.claims.len()
    }

    /// Number of runs that could be started now.
    pub(crate) fn free_slots(&self) -> usize {
        self.inner.slots.available_permits().min(self.inner.handlers.available_permits())
    }

    pub(crate) fn local_queue(&self) -> &DueQueue {
        &self.inner.local_queue
    }

    /// Processes one issue until nothing is left to do for it now. A no-op if the issue needs no run or another worker
    /// has claimed it. A stopped worker sends a nudge instead, so that another worker processes the issue. Never fails:
    /// errors are stored on the issue, or the sweep finds it.
    pub async fn process_issue(&self, issue_id: IssueId) {
        if self.inner.process_issue(issue_id, pending()).await == Outcome::Release {
            // There is no stream entry to release, so send one; if that fails, the sweep finds the issue.
            let nudge = Nudge { issue_id, event_log_id: EventLogId::default() };
            let _ = self.inner.nudger.send(&[nudge]).await;
        }
    }

    /// Processes issues until `shutdown` completes, then drains.
    ///
    /// # Panics
    ///
    /// If it was called before: a worker runs once, because its name must not be reused. Create a new one.
    pub async fn run(&self, queue: &Queue, shutdown: impl Future<Output = ()>) {
        let (name, stop) = (self.name(), &self.inner.stop);
        let has_run = self.inner.has_run.swap(true, Ordering::SeqCst);
        assert!(!has_run, "worker `{name}` was already run; a worker runs once, create a new one");
        info!(worker_id = name, "worker started");
        // On tasks of their own: a handler that blocks its thread must not delay the renewal of other claims.
        let mut maintenance = JoinSet::new();
        maintenance.spawn(renew_claims(Arc::clone(&self.inner)));
        maintenance.spawn(worker_heartbeat::run(Arc::clone(&self.inner.store), name.to_owned()));

        let drain = CancellationToken::new();
        let working = self.process_issues(queue, &drain);
        let stopping = async {
            shutdown.await;
            info!(worker_id = name, in_flight = self.in_flight(), "worker stopping");
            drain.cancel();
            sleep(self.inner.config.drain).await;
            stop.cancel();
            sleep(RELEASE_TIMEOUT).await;
        };
        tokio::select! {
            () = working => {}
            () = stopping => warn!(worker_id = name, "runs did not end in time, their claims will expire"),
        }
        stop.cancel();
        maintenance.shutdown().await;
        let deregister = self.inner.store.heartbeat_worker(name, Duration::ZERO);
        if !matches!(timeout(RELEASE_TIMEOUT, deregister).await, Ok(Ok(()))) {
            warn!(
                worker_id = name,
                "worker not deregistered, it counts as alive until its heartbeat expires"
            );
        }
        info!(worker_id = name, "worker stopped");
    }

    /// Processes nudged issues and those of the local queue until the drain begins, and returns when their runs have ended.
    /// The runs are tasks of this worker, not of the queue: the database fences them, so they continue when the queue gives
    /// up their nudges because the stream backend is unreachable.
    async fn process_issues(&self, queue: &Queue, drain: &CancellationToken) {
        let in_flight_max = self.inner.config.in_flight_max();
        let (sender, mut nudges) = mpsc::channel(in_flight_max);
        let (mut nudged, mut local) = (JoinSet::new(), JoinSet::new());
        let mut consuming = pin!(self.consume_nudges(queue, drain, sender));
        loop {
            // A backlog of nudges leaves the local queue its share.
            let takes_local = local.len() < in_flight_max && !drain.is_cancelled();
            let worker = self.clone();
            tokio::select! {
                () = &mut consuming => break,
                Some(ended) = nudged.join_next() => report_panic(ended),
                Some(ended) = local.join_next() => report_panic(ended),
                Some((issue_id, mut reply)) = nudges.recv() => {
                    nudged.spawn(async move {
                        let outcome = worker.inner.process_issue(issue_id, reply.closed()).await;
                        // Nobody waits for the outcome if the queue aborted the handler: it delivers the nudge again.
                        let _ = reply.send(outcome);
                    });
                }
                issue_id = drain.run_until_cancelled(self.inner.local_queue.next()), if takes_local => {
                    if let Some(issue_id) = issue_id {
                        local.spawn(async move { worker.process_issue(issue_id).await });
                    }
                }
            }
        }
        for runs in [&mut nudged, &mut local] {
            while let Some(ended) = runs.join_next().await {
                report_panic(ended);
            }
        }
    }

    /// Consumes nudges until the drain begins, and returns when those in flight are acknowledged or released. An attempt
    /// to subscribe is never dropped halfway: a half-joined member must leave the group before another worker of this
    /// process joins.
    async fn consume_nudges(
        &self,
        queue: &Queue,
        drain: &CancellationToken,
        runs: mpsc::Sender<NudgedRun>,
    ) {
        while !drain.is_cancelled() {
            let step_observer = self.inner.config.step_observer.clone();
            let handler = NudgeHandler { runs: runs.clone(), step_observer };
            match queue.subscribe(STREAM, GROUP, handler, self.consumer_config()).await {
                Ok(subscription) => {
                    drain.cancelled().await;
                    return subscription.stop().await;
                }
                Err(error) => {
                    warn!(%error, "subscription to nudges failed, retrying");
                    let _ = timeout(SUBSCRIBE_RETRY_DELAY, drain.cancelled()).await;
                }
            }
        }
    }

    fn consumer_config(&self) -> ConsumerConfig {
        let in_flight_max = self.inner.config.in_flight_max();
        ConsumerConfig {
            mode: Mode::Shared,
            concurrency: in_flight_max,
            // No further prefetch: a nudge that waits here could be handled by another process.
            in_flight_max,
            batch: in_flight_max.min(256),
            // Longer than the worker's own drain, so that cancelled runs can release their claims.
            drain: self.inner.config.drain + ACKNOWLEDGE_TIMEOUT,
            ..ConsumerConfig::default()
        }
    }
}

/// Renews claims, which is a write, checks them in between, which is a read, and releases lapsed ones, until it is aborted.
async fn renew_claims(inner: Arc<Inner>) {
    let (every, mut renew_at) = (inner.config.check_every(), Instant::now());
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Rather early than late: a tick may come a little before its time.
        let is_due = Instant::now() + every / 2 >= renew_at;
        match if is_due { inner.claims.renew_all().await } else { inner.claims.check_all().await } {
            Ok(()) if is_due => renew_at = Instant::now() + inner.config.heartbeat_every,
            Ok(()) => {}
            Err(error) => warn!(%error, "claims were not renewed or checked, retrying"),
        }
        if let Err(error) = inner.lapsed.release(inner.store.as_ref(), &inner.local_queue).await {
            warn!(%error, "lapsed claims were not released, retrying");
        }
    }
}

impl Inner {
    /// Runs an issue, and again if it was requested meanwhile. `Release` if the worker stopped, or the request was cancelled,
    /// before the run began.
    async fn process_issue(
        &self,
        issue_id: IssueId,
        cancelled: impl Future<Output = ()>,
    ) -> Outcome {
        if self.claims.request_again(issue_id) {
            return Outcome::Done;
        }
        let _permit = tokio::select! {
            permit = self.permit() => match permit {
                Some(permit) => permit,
                None => return Outcome::Release,
            },
            () = cancelled => return Outcome::Release,
        };
        // If the issue is in flight, its run repeats after it ends, so this request is not lost.
        let mut entered = self.claims.try_enter(issue_id);
        while let Some(slot) = entered {
            if self.run(&slot).await == Outcome::Release {
                return Outcome::Release;
            }
            entered = slot.exit();
        }
        Outcome::Done
    }

    /// One run: claim, execute, finish, follow up.
    async fn run(&self, slot: &IssueSlot) -> Outcome {
        let (claimed, held) = match self.claim(slot).await {
            Ok(won) => won,
            Err(outcome) => return outcome,
        };
        let started = Instant::now();
        histogram!(EVENTS_PER_ISSUE_BATCH).record(claimed.events.len() as f64);
        let (claim, deadline) = (held.handle().clone(), started + self.config.deadline);
        let run = Run { claimed: Arc::new(*claimed), claim, deadline };

        let outcome = self.execute(&run).await;
        self.config.step_observer.on_step(ProcessingStep::Handled, slot.issue_id);
        let (result, follow_up) = self.finish(&run, outcome).await;
        self.config.step_observer.on_step(ProcessingStep::Completed, slot.issue_id);
        drop(held);
        counter!(ISSUES_PROCESSED, "result" => result).increment(1);
        histogram!(ISSUES_PROCESSING_DURATION, "result" => result).record(started.elapsed());
        let elapsed_ms = started.elapsed().as_millis() as u64;
        debug!(issue_id = %slot.issue_id, epoch = %run.epoch(), result, elapsed_ms, "run ended");
        self.follow_up(&run, follow_up).await;
        Outcome::Done
    }

    /// Schedules the work that a run left, before its nudge is acknowledged.
    async fn follow_up(&self, run: &Run, follow_up: FollowUp) {
        let issue_id = run.issue().id;
        match follow_up {
            FollowUp::Nothing => {}
            FollowUp::Later(wait) => {
                self.local_queue.add(issue_id, Instant::now() + wait);
            }
            FollowUp::Nudge => {
                let event_log_id = run.events().last().map(|event| event.id).unwrap_or_default();
                let nudge = Nudge { issue_id, event_log_id };
                if self.nudger.send(&[nudge]).await.is_err() && !self.stop.is_cancelled() {
                    self.local_queue.add(issue_id, Instant::now());
                }
            }
        }
    }

    /// A permit for one more run; `None` if the worker stops first.
    async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        self.stop.run_until_cancelled(self.slots.acquire()).await?.ok()
    }
}

/// Claim.
impl Inner {
    /// Claims the issue. Retries while the database is unavailable, for at most the TTL of a claim; after that the
    /// sweep finds the issue. The error is `Done` if there is nothing to do now, `Release` if the worker is stopping.
    async fn claim(&self, slot: &IssueSlot) -> Result<(Box<ClaimedIssue>, HeldClaim), Outcome> {
        let issue_id = slot.issue_id;
        let until = Instant::now() + self.config.claim_ttl;
        while !self.stop.is_cancelled() {
            let requested_at = self.claims.now();
            let reason = match self.batcher.claim(issue_id).await {
                Ok(Claim::Won(claimed)) => {
                    let held = slot.hold(&claimed, requested_at);
                    if !self.confirm_claim(held.handle()).await {
                        continue;
                    }
                    self.config.step_observer.on_step(ProcessingStep::Claimed, issue_id);
                    return Ok((claimed, held));
                }
                Ok(Claim::Taken { owner, .. }) if owner == self.config.name => {
                    // This worker owns the claim but has no run for it: the reply to an earlier claim was lost.
                    self.release_orphaned_claim(issue_id).await;
                    continue;
                }
                Err(error) if error.is_transient() && Instant::now() < until => {
                    warn!(%issue_id, %error, "claim failed, retrying");
                    self.pause().await;
                    continue;
                }
                Err(error) => {
                    error!(%issue_id, %error, "claim failed, the sweep will nudge again");
                    "error"
                }
                Ok(Claim::NotYet { wait, .. }) => {
                    self.local_queue.add(issue_id, Instant::now() + wait);
                    "waiting"
                }
                Ok(Claim::Taken { .. }) => "taken",
                Ok(Claim::Idle) => "idle",
                Ok(Claim::Quarantined { .. }) => "quarantined",
                Ok(Claim::Missing) => "missing",
            };
            count_nudge_without_run(reason);
            return Err(Outcome::Done);
        }
        Err(Outcome::Release)
    }

    /// Confirms with a heartbeat a claim whose reply took so long that the claim may have expired meanwhile.
    async fn confirm_claim(&self, claim: &ClaimHandle) -> bool {
        if claim.is_held() {
            return true;
        }
        match claim.renew().await {
            Ok(()) => claim.is_held(),
            Err(error) => {
                warn!(issue_id = %claim.issue_id(), %error, "claim reply arrived too late, retrying");
                self.pause().await;
                false
            }
        }
    }

    /// Releases an issue that this worker has claimed without having received the reply.
    async fn release_orphaned_claim(&self, issue_id: IssueId) {
        let release = async {
            let issue = self.store.issue(issue_id).await?;
            let ours = Some(self.config.name.as_str());
            // Only an issue in processing has an owner.
            if let Some(issue) = issue.filter(|issue| issue.claim_owner.as_deref() == ours) {
                let (epoch, reason) = (issue.claim_epoch, ReleaseReason::Shutdown);
                self.store.release_claims(&[ClaimRelease { issue_id, epoch, reason }]).await?;
            }
            Ok::<(), IssueError>(())
        };
        if let Err(error) = release.await {
            warn!(%issue_id, %error, "orphaned claim was not released, retrying");
            self.pause().await;
        }
    }

    /// Waits for [`RETRY_DELAY`], or until the worker stops.
    async fn pause(&self) {
        let _ = timeout(RETRY_DELAY, self.stop.cancelled()).await;
    }
}

/// Execute.
impl Inner {
    /// Executes the handler while its result can take effect. The handler is dropped when this returns. A panic and an
    /// exceeded deadline are failures.
    async fn execute(&self, run: &Run) -> RunOutcome {
        // Unwind safety: the worker shares no state with the handler that a panic could leave inconsistent.
        let mut handling = pin!(AssertUnwindSafe(self.handle(run)).catch_unwind());
        // A handler that does not wait needs none of the timers below.
        if let Poll::Ready(result) = futures_util::poll!(handling.as_mut()) {
            return handled(result);
        }
        tokio::select! {
            biased;
            () = run.cancelled() => RunOutcome::Lost,
            () = self.stop.cancelled() => RunOutcome::Stopped,
            () = self.superseded(run) => RunOutcome::Superseded,
            () = sleep_until(run.deadline) => {
                let limit = self.config.deadline;
                RunOutcome::Failed(HandlerError::retry(format!("the handler took longer than {limit:?}")))
            }
            result = handling => handled(result),
        }
    }

    /// Calls the handler as soon as fewer than `concurrency` others run.
    async fn handle(&self, run: &Run) -> Result<Resolution, HandlerError> {
        let _permit = self.handlers.acquire().await;
        self.handler.handle(run.clone()).await
    }

    /// Completes when a newer event supersedes this run; never, if the configuration lets the run continue.
    async fn superseded(&self, run: &Run) {
        match self.config.on_new_event {
            OnNewEvent::Supersede { times_max } if run.issue().superseded < times_max => {
                run.newer_events().await;
            }
            _ => pending().await,
        }
    }
}

/// Finish.
impl Inner {
    /// Ends a run in the database, according to how its handler ended. Returns the label for the metrics and the
    /// follow-up. A result is committed whole or not at all.
    async fn finish(&self, run: &Run, outcome: RunOutcome) -> (&'static str, FollowUp) {
        match outcome {
            RunOutcome::Resolved(resolution) => self.commit(run, resolution).await,
            RunOutcome::Failed(error) => self.fail(run, error).await,
            RunOutcome::Superseded => self.release(run, ReleaseReason::Superseded).await,
            RunOutcome::Stopped => self.release(run, ReleaseReason::Shutdown).await,
            RunOutcome::Lost => {
                warn!(issue_id = %run.issue().id, epoch = %run.epoch(), "claim lost, run cancelled");
                self.lapsed.add(run);
                ("fenced", FollowUp::Nothing)
            }
        }
    }

    /// Commits the result of a run: events processed, fields changed and outbox rows written, in one transaction.
    async fn commit(&self, run: &Run, resolution: Resolution) -> (&'static str, FollowUp) {
        let completion = RunCompletion {
            issue_id: run.issue().id,
            epoch: run.epoch(),
            event_log_ids: run.events().iter().map(|event| event.id).collect(),
            fields: resolution.fields,
            discussions: resolution.discussions,
            outbox: resolution.outbox,
        };
        match self.retry_while_held(run, || self.batcher.complete(completion.clone())).await {
            Ok(CompletionOutcome::Committed { requeued: false, .. }) => ("done", FollowUp::Nothing),
            Ok(CompletionOutcome::Committed { not_before: None, .. }) => ("done", FollowUp::Nudge),
            // A debounce window started during the run; the next claim returns how long it still lasts.
            Ok(CompletionOutcome::Committed { .. }) => ("done", FollowUp::Later(Duration::ZERO)),
            Ok(CompletionOutcome::Fenced) => ("fenced", FollowUp::Nothing),
            Err(error @ IssueError::Invalid { .. }) => {
                let reason = format!("the handler's result is invalid: {error}");
                self.fail(run, HandlerError::retry(reason)).await
            }
            // The database renews the claim but does not store the result. If it was stored after all, this is fenced.
            Err(error) if error.is_transient() && !run.is_cancelled() => {
                let reason = format!("the result was not stored: {error}");
                self.fail(run, HandlerError::unavailable(reason)).await
            }
            Err(error) => self.abandon(run, &error),
        }
    }

    /// Stores a failure: the issue is retried later, deferred or quarantined.
    async fn fail(&self, run: &Run, error: HandlerError) -> (&'static str, FollowUp) {
        let (issue_id, attempt) = (run.issue().id, run.issue().attempts + 1);
        let then = match error.then {
            FailureAction::Retry => AfterFailure::Retry { after: self.config.retry.delay(attempt) },
            FailureAction::RetryAfter(after) => AfterFailure::Retry { after },
            FailureAction::Defer(after) => defer_with_jitter(after),
            FailureAction::Unavailable => {
                let oldest = run.events().first().map(|event| event.created_at);
                let waited = oldest.map(|oldest| SystemClock.now().since(oldest));
                defer_with_jitter(unavailable_delay(waited.unwrap_or_default()))
            }
            FailureAction::Quarantine => AfterFailure::Quarantine,
        };
        let (delay, result) = match then {
            AfterFailure::Defer { after } => (after, "put_off"),
            AfterFailure::Retry { after } => (after, "failed"),
            AfterFailure::Quarantine => (Duration::ZERO, "failed"),
        };
        if let AfterFailure::Defer { after } = then {
            warn!(%issue_id, ?after, reason = %error.reason, "run deferred, no attempt counted");
        } else {
            warn!(%issue_id, attempt, error = %error.reason, "run failed");
        }
        let failure = RunFailure { issue_id, epoch: run.epoch(), error: error.reason, then };
        let failures = [failure];
        let call = || self.store.fail(&failures, self.config.retry.attempts_max);
        match first(self.retry_while_held(run, call).await) {
            Ok(Some(FailureOutcome::Requeued { .. })) => (result, FollowUp::Later(delay)),
            Ok(Some(FailureOutcome::Quarantined { attempts })) => {
                error!(
                    %issue_id, attempts,
                    "issue quarantined; fix the cause, then run `headwater issue release ID`"
                );
                ("quarantined", FollowUp::Nothing)
            }
            Ok(Some(FailureOutcome::Fenced) | None) => ("fenced", FollowUp::Nothing),
            Err(error) => self.abandon(run, &error),
        }
    }

    /// Releases the claim without a result and without counting an attempt.
    async fn release(&self, run: &Run, reason: ReleaseReason) -> (&'static str, FollowUp) {
        let (issue_id, epoch) = (run.issue().id, run.epoch());
        info!(%issue_id, %epoch, ?reason, "run cancelled, claim released");
        let claims = [ClaimRelease { issue_id, epoch, reason }];
        match first(self.retry_while_held(run, || self.store.release_claims(&claims)).await) {
            Ok(Some(ClaimReleased::Requeued { .. })) if reason == ReleaseReason::Superseded => {
                ("superseded", FollowUp::Later(Duration::ZERO))
            }
            Ok(Some(ClaimReleased::Requeued { .. })) => ("given_back", FollowUp::Nudge),
            Ok(Some(ClaimReleased::Fenced) | None) => ("fenced", FollowUp::Nothing),
            Err(error) => self.abandon(run, &error),
        }
    }

    /// Retries a call that failed transiently, while the claim is held and for at most the TTL of a claim: a longer
    /// failure is specific to this issue. Idempotent: each call that ends a run has taken effect, takes effect now, or
    /// is fenced.
    async fn retry_while_held<T, Calling: Future<Output = Result<T>>>(
        &self,
        run: &Run,
        call: impl Fn() -> Calling,
    ) -> Result<T> {
        let until = Instant::now() + self.config.claim_ttl;
        loop {
            match call().await {
                Err(error)
                    if error.is_transient() && !run.is_cancelled() && Instant::now() < until =>
                {
                    warn!(issue_id = %run.issue().id, %error, "end of the run was not stored, retrying");
                    sleep(RETRY_DELAY).await;
                }
                result => return result,
            }
        }
    }

    /// The database was unavailable until the claim expired. If the end of the run was not stored, `lapsed_claims`
    /// releases the claim, or the sweep requeues the issue.
    fn abandon(&self, run: &Run, error: &IssueError) -> (&'static str, FollowUp) {
        error!(
            issue_id = %run.issue().id, epoch = %run.epoch(), %error,
            "end of the run was not stored; the issue will be run again"
        );
        self.lapsed.add(run);
        ("error", FollowUp::Nothing)
    }
}

/// The result of a handler; `Err` is a panic.
fn handled(result: std::thread::Result<Result<Resolution, HandlerError>>) -> RunOutcome {
    match result {
        Ok(Ok(resolution)) => RunOutcome::Resolved(resolution),
        Ok(Err(error)) => RunOutcome::Failed(error),
        Err(panic) => {
            let text = panic_text(panic.as_ref());
            RunOutcome::Failed(HandlerError::retry(format!("the handler panicked: {text}")))
        }
    }
}

/// A panic of a handler is a failure of its run; this one is a defect of the worker. The issue is processed again when its claim
/// has expired.
fn report_panic(ended: std::result::Result<(), JoinError>) {
    if let Err(error) = ended {
        error!(%error, "processing an issue failed");
    }
}

fn first<T>(results: Result<Vec<T>>) -> Result<Option<T>> {
    results.map(|results| results.into_iter().next())
}

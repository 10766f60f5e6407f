//! Executes a request, from its delivery to its reply.
//!
//! Upstream: `worker`, with the deliveries of its group. Downstream: `request_context`, then `reply_store`.
//! Guarantees: a request that has a reply is not executed; a reply is stored before the request is acknowledged; each
//! request that is not released ends with exactly one reply. Crashed processes are counted by the group, failed
//! attempts and lost locks here; each count has a limit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{Backoff, Outcome};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{Instrument, debug, error, info, warn};

use super::budget::{Meter, OverBudget};
use super::config::MainLoopConfig;
use super::error::truncate_message;
use super::parsed_request::ParsedRequest;
use super::reply::Reply;
use super::reply_store::{ReplyStore, StoredReply};
use super::request_context::{AttemptResult, DynMainLoop, RequestContext};
use super::request_lock::{LockAttempt, RequestLock, RequestLocks};
use crate::builtin_events::{MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure};
use crate::bus::EventBusExt;
use crate::error::BusError;
use crate::event::ReceivedEvent;
use crate::metrics;
use crate::session::{Session, SessionError, Sessions};

/// Backoff between calls while the backend is unavailable.
const RETRY: Backoff = Backoff::doubling(Duration::from_millis(100), Duration::from_secs(5));

/// Longest time to wait for a lock held elsewhere before the request is released, and shortest time between two
/// attempts.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(1);
const LOCK_WAIT_MIN: Duration = Duration::from_millis(20);

/// Longest time to wait for the backend's time, which a reply only contains as information.
const CLOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Retries of a backend call before a request that was not started is released.
const RETRIES_MAX: u32 = 5;

/// Longest outage during which storing or copying a reply is retried; after it, the reply or its copy is lost.
pub(super) const REPLY_STORE_TIMEOUT: Duration = Duration::from_secs(50 * 60);

/// Executes delivered requests.
pub(super) struct RequestExecutor {
    pub(super) sessions: Sessions,
    pub(super) reply_store: ReplyStore,
    pub(super) locks: Arc<RequestLocks>,
    pub(super) main_loop: Arc<dyn DynMainLoop>,
    pub(super) config: MainLoopConfig,
    /// Set when the worker stops: end of the drain period.
    pub(super) stopping: watch::Receiver<Option<Instant>>,
}

/// Why a request is released to its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestReleaseReason {
    Stopping,
    LockLost,
    Held,
    Unavailable,
}

impl RequestReleaseReason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Stopping => "stopping",
            Self::LockLost => "lock_lost",
            Self::Held => "held",
            Self::Unavailable => "unavailable",
        }
    }
}

/// Result of an execution that was not released.
enum Execution {
    Replied(Reply),
    AlreadyReplied,
    /// There is a reply, but its stream permanently rejects it.
    Unstorable(BusError),
}

/// End of a run, by the clock of the backend and of this process.
#[derive(Clone, Copy)]
struct RunLimits {
    deadline: Timestamp,
    ends_at: Instant,
}

/// Result of a request before it is encoded as a reply.
type RequestOutcome = Result<serde_json::Value, (RequestFailure, String)>;

impl RequestExecutor {
    /// Handles one delivery of a request.
    pub(super) async fn handle(&self, event: ReceivedEvent<MainLoopRequest>) -> Outcome {
        let request = match ParsedRequest::read(&self.reply_store.storage.namespace, &event) {
            Ok(request) => request,
            Err(error) => return self.reject(&event, &error).await,
        };
        let span =
            tracing::info_span!("main_loop", request_id = %request.id, session = %request.session);
        match self.handle_request(&request).instrument(span).await {
            Ok(outcome) => outcome,
            Err(reason) => {
                metrics::request_released(reason.as_str());
                debug!(request_id = %request.id, reason = reason.as_str(), "request released");
                Outcome::Release
            }
        }
    }

    /// Rejects a request without a valid id. It cannot have a reply; subscribers are notified.
    async fn reject(&self, event: &ReceivedEvent<MainLoopRequest>, error: &BusError) -> Outcome {
        warn!(event_id = %event.envelope.event_id, %error, "request without a valid id rejected");
        let failed = MainLoopFailed {
            request_id: event.request_id.clone(),
            error: truncate_message(error.to_string()),
            kind: RequestFailure::Malformed,
            ..MainLoopFailed::default()
        };
        match self.reply_store.bus.publish(failed).await {
            Ok(_) => Outcome::Done,
            Err(error) => Outcome::retry(error),
        }
    }

    async fn handle_request(
        &self,
        request: &ParsedRequest,
    ) -> Result<Outcome, RequestReleaseReason> {
        let began = Instant::now();
        // A request that blocks its thread for longer than the lease makes its worker lose the lock without crashing.
        // It is executed again here, unless another process has it by now.
        let mut lock_losses = 0;
        let execution = loop {
            let lock = self.acquire_lock(request).await?;
            let execution = self.execute_locked(request, &lock, lock_losses).await;
            lock.release().await;
            match execution {
                Err(reason @ RequestReleaseReason::LockLost) => {
                    metrics::request_released(reason.as_str());
                    lock_losses += 1;
                }
                execution => break execution?,
            }
        };
        Ok(match execution {
            Execution::Replied(reply) => {
                metrics::request_ended(reply.result(), began.elapsed());
                Outcome::Done
            }
            Execution::AlreadyReplied => {
                metrics::request_repeated();
                Outcome::Done
            }
            Execution::Unstorable(error) => {
                error!(request_id = %request.id, %error, "reply cannot be stored");
                Outcome::dead_letter(format!("the reply cannot be stored: {error}"))
            }
        })
    }

    /// Acquires the lock of a request. If it is held elsewhere, waits up to `LOCK_WAIT_MAX` and then releases the
    /// request, so that it does not occupy a slot here.
    async fn acquire_lock(
        &self,
        request: &ParsedRequest,
    ) -> Result<RequestLock, RequestReleaseReason> {
        let until = Instant::now() + LOCK_WAIT_MAX;
        let mut attempts = 0;
        loop {
            self.check_stopping()?;
            let wait = match self.locks.acquire(request).await {
                Ok(LockAttempt::Acquired(lock)) => return Ok(lock),
                Ok(LockAttempt::Held(_)) if Instant::now() >= until => {
                    return Err(RequestReleaseReason::Held);
                }
                Ok(LockAttempt::Held(remaining)) => remaining.clamp(LOCK_WAIT_MIN, LOCK_WAIT_MAX),
                Err(error) => {
                    warn!(request_id = %request.id, %error, "request could not be locked");
                    attempts += 1;
                    RETRY.delay(attempts, fastrand::f64())
                }
            };
            if attempts > RETRIES_MAX {
                return Err(RequestReleaseReason::Unavailable);
            }
            self.sleep_unless_stopping(wait).await?;
        }
    }

    /// Executes a request until it has a reply. `lock_losses`: how often this worker lost its lock.
    async fn execute_locked(
        &self,
        request: &ParsedRequest,
        lock: &RequestLock,
        lock_losses: u64,
    ) -> Result<Execution, RequestReleaseReason> {
        if let Some(replied) = self.find_reply(request).await? {
            return Ok(replied);
        }
        let meter = Meter::new(request.budget);
        let (outcome, has_session) = match self.admit(request, lock_losses).await? {
            Err((kind, problem)) => (Err((kind, problem)), kind == RequestFailure::Crashed),
            Ok(limits) => {
                // If this is dropped, the session is created completely or not at all, as after a crash.
                let opened = timeout_at(limits.ends_at, self.open_session(request)).await;
                match opened.unwrap_or_else(|_| Ok(Err(deadline_passed(limits.deadline))))? {
                    Ok(session) => {
                        (self.run_attempts(request, &session, &meter, limits, lock).await?, true)
                    }
                    Err(failure) => (Err(failure), false),
                }
            }
        };
        let reply = self.reply(request, outcome, &meter, has_session).await?;
        self.store_reply(request, reply).await
    }

    /// Looks for a reply. If another requester has one, copies it to this requester.
    async fn find_reply(
        &self,
        request: &ParsedRequest,
    ) -> Result<Option<Execution>, RequestReleaseReason> {
        let ParsedRequest { requester, id: request_id, .. } = request;
        let find = || self.reply_store.find(requester, request_id);
        match self.with_limited_retries(find).await? {
            Ok(Some(StoredReply::Reply(reply))) => {
                // The previous worker may have crashed or stopped between storing the reply and publishing its copy.
                let publish_copy = || self.reply_store.publish_copy(request_id, &reply);
                self.with_limited_retries(publish_copy).await?.unwrap_or_else(|error| {
                    error!(%request_id, %error, "copy of the reply could not be published to the control stream");
                });
                return Ok(Some(Execution::AlreadyReplied));
            }
            Ok(Some(StoredReply::Trimmed)) => return Ok(Some(Execution::AlreadyReplied)),
            Ok(None) => {}
            // The stored entry is not a reply, and nothing can replace it.
            Err(error) => {
                warn!(%request_id, %error, "stored reply cannot be decoded");
                return Ok(Some(Execution::AlreadyReplied));
            }
        }
        let for_other = || self.reply_store.find_for_other_requester(requester, request_id);
        match self.with_limited_retries(for_other).await? {
            Ok(Some(StoredReply::Reply(reply))) => {
                let store = || self.reply_store.store(requester, request_id, &reply);
                let stored = self.with_limited_retries(store).await?;
                Ok(Some(stored.map_or_else(Execution::Unstorable, |_| Execution::AlreadyReplied)))
            }
            Ok(_) => Ok(None),
            Err(error) => {
                warn!(%request_id, %error, "reply of another requester cannot be decoded");
                Ok(None)
            }
        }
    }

    /// The limits of the run, or why the request must not run.
    async fn admit(
        &self,
        request: &ParsedRequest,
        lock_losses: u64,
    ) -> Result<Result<RunLimits, (RequestFailure, String)>, RequestReleaseReason> {
        let crashes_max = u64::from(self.config.max_crashes);
        if request.deliveries + lock_losses > crashes_max {
            let problem =
                format!("{crashes_max} workers crashed or lost its lock while executing it");
            return Ok(Err((RequestFailure::Crashed, problem)));
        }
        if let Some(problem) = &request.problem {
            return Ok(Err((RequestFailure::Malformed, problem.clone())));
        }
        if let Err(problem) = self.main_loop.check(&request.body) {
            let problem = format!("the request cannot be decoded: {problem}");
            return Ok(Err((RequestFailure::Malformed, problem)));
        }
        let now = self.now().await?;
        let longest = now.after(self.config.run_timeout);
        let deadline = request.deadline.map_or(longest, |deadline| deadline.min(longest));
        if deadline <= now {
            return Ok(Err(deadline_passed(deadline)));
        }
        Ok(Ok(RunLimits { deadline, ends_at: Instant::now() + deadline.since(now) }))
    }

    async fn open_session(
        &self,
        request: &ParsedRequest,
    ) -> Result<Result<Session, (RequestFailure, String)>, RequestReleaseReason> {
        let ensure = || self.sessions.ensure(&request.session);
        let may_retry = |attempts| attempts < RETRIES_MAX;
        let opened = self.with_retries(SessionError::is_transient, may_retry, ensure).await?;
        Ok(opened.map_err(|error| (RequestFailure::Failed, error.to_string())))
    }

    /// Runs attempts until one succeeds or no further attempt is allowed.
    async fn run_attempts(
        &self,
        request: &ParsedRequest,
        session: &Session,
        meter: &Meter,
        RunLimits { deadline, ends_at }: RunLimits,
        lock: &RequestLock,
    ) -> Result<RequestOutcome, RequestReleaseReason> {
        let (request_id, resources) = (request.id.clone(), request.resources.clone());
        let mut context = RequestContext {
            request_id,
            attempt: 1,
            meter: meter.clone(),
            deadline,
            ends_at,
            resources,
        };
        // Returns when the run must end.
        let interrupted = || async {
            tokio::select! {
                biased;
                () = lock.cancelled() => {
                    let problem = "its requester cancelled it".to_owned();
                    Ok(Err((RequestFailure::Cancelled, problem)))
                }
                () = lock.lost() => Err(RequestReleaseReason::LockLost),
                over = meter.exceeded() => Ok(Err(over_budget(over))),
                () = sleep_until(ends_at) => Ok(Err(deadline_passed(deadline))),
            }
        };
        loop {
            let result = tokio::select! {
                // In this order: a run that must end is not polled again.
                biased;
                ended = interrupted() => return ended,
                () = self.drain_elapsed() => return Err(RequestReleaseReason::Stopping),
                result = self.main_loop.execute(&request.body, session, &context) => result,
            };
            if let Some(over) = meter.over() {
                return Ok(Err(over_budget(over)));
            }
            let (kind, reason) = match result {
                AttemptResult::Output(output) => return Ok(Ok(output)),
                AttemptResult::Failed(error) if error.is_permanent => {
                    return Ok(Err((RequestFailure::GivenUp, error.reason)));
                }
                AttemptResult::Failed(error) => (RequestFailure::Failed, error.reason),
                AttemptResult::Panicked(reason) => (RequestFailure::Panicked, reason),
            };
            if context.attempt >= self.config.max_attempts {
                return Ok(Err((kind, format!("{reason} (attempt {})", context.attempt))));
            }
            metrics::request_retried();
            warn!(attempt = context.attempt, error = reason, "request failed; it will be retried");
            let wait = self.config.backoff.delay(context.attempt, fastrand::f64());
            tokio::select! {
                biased;
                ended = interrupted() => return ended,
                _ = self.stop_requested() => return Err(RequestReleaseReason::Stopping),
                () = sleep(wait) => context.attempt += 1,
            }
        }
    }

    /// Encodes the outcome as a reply that fits into an event.
    async fn reply(
        &self,
        request: &ParsedRequest,
        outcome: RequestOutcome,
        meter: &Meter,
        has_session: bool,
    ) -> Result<Reply, RequestReleaseReason> {
        let at = match timeout(CLOCK_TIMEOUT, self.now()).await {
            // A result must not be delayed or lost because the backend's time is unavailable.
            Err(_) | Ok(Err(RequestReleaseReason::Unavailable)) => SystemClock.now(),
            Ok(now) => now?,
        };
        let at = at.to_rfc3339();
        let session_id = has_session.then(|| request.session.to_string());
        let (request_id, usage) = (request.id.to_string(), meter.used());
        let failed = |kind, error| {
            Reply::Failed(MainLoopFailed {
                request_id: request_id.clone(),
                error: truncate_message(error),
                kind,
                session_id: session_id.clone(),
                failed_at: Some(at.clone()),
                usage,
            })
        };
        let output = match outcome {
            Ok(output) => output,
            Err((kind, error)) => return Ok(failed(kind, error)),
        };
        let reply = Reply::Completed(MainLoopCompleted {
            request_id: request_id.clone(),
            response: output,
            session_id: session_id.clone(),
            completed_at: Some(at.clone()),
            usage,
        });
        Ok(match reply.to_outgoing(&request.id) {
            Ok(_) => reply,
            Err(error @ BusError::TooLarge { .. }) => {
                failed(RequestFailure::TooLarge, error.to_string())
            }
            Err(error) => failed(RequestFailure::GivenUp, error.to_string()),
        })
    }

    /// Stores the reply, then copies it to the control stream. If another reply was first, that one counts.
    async fn store_reply(
        &self,
        request: &ParsedRequest,
        reply: Reply,
    ) -> Result<Execution, RequestReleaseReason> {
        let ParsedRequest { requester, id: request_id, .. } = request;
        // Retried for a long time, so that a short outage does not cause the request to be executed again.
        let store = || self.reply_store.store(requester, request_id, &reply);
        let stored = match self.with_long_retries(store).await? {
            Ok(StoredReply::Reply(stored)) => stored,
            Ok(StoredReply::Trimmed) => return Ok(Execution::Replied(reply)),
            Err(error) => return Ok(Execution::Unstorable(error)),
        };
        // Also for a reply that was already stored, such as a cancellation: its writer may have crashed before
        // publishing the copy. The event id makes this idempotent.
        let publish_copy = || self.reply_store.publish_copy(request_id, &stored);
        if let Err(error) = self.with_long_retries(publish_copy).await? {
            // The requester has the reply; only subscribers miss it, and a retry would not help.
            error!(%request_id, %error, "copy of the reply could not be published to the control stream");
        }
        info!(%request_id, result = stored.result(), "request completed");
        Ok(Execution::Replied(stored))
    }

    async fn now(&self) -> Result<Timestamp, RequestReleaseReason> {
        let backend = &self.reply_store.storage.backend;
        let now = self.with_limited_retries(|| async { Ok(backend.now().await?) }).await?;
        now.map_err(|_| RequestReleaseReason::Unavailable)
    }

    /// Calls the backend, with a few retries on transient errors.
    async fn with_limited_retries<T, F>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<Result<T, BusError>, RequestReleaseReason>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        self.with_retries(BusError::is_transient, |attempts| attempts < RETRIES_MAX, call).await
    }

    /// Calls the backend, with retries on transient errors for `REPLY_STORE_TIMEOUT`.
    async fn with_long_retries<T, F>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<Result<T, BusError>, RequestReleaseReason>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        let until = Instant::now() + REPLY_STORE_TIMEOUT;
        self.with_retries(BusError::is_transient, |_| Instant::now() < until, call).await
    }

    async fn with_retries<T, E: fmt::Display, F>(
        &self,
        is_transient: impl Fn(&E) -> bool,
        may_retry: impl Fn(u32) -> bool,
        call: impl Fn() -> F,
    ) -> Result<Result<T, E>, RequestReleaseReason>
    where
        F: Future<Output = Result<T, E>>,
    {
        let mut attempts = 0;
        loop {
            match call().await {
                Err(error) if is_transient(&error) => {
                    attempts += 1;
                    if !may_retry(attempts) {
                        return Err(RequestReleaseReason::Unavailable);
                    }
                    warn!(%error, attempts, "backend unavailable for the main loop; retrying");
                }
                answer => return Ok(answer),
            }
            // A finished run still stores its reply during the drain period.
            tokio::select! {
                () = sleep(RETRY.delay(attempts, fastrand::f64())) => {}
                () = self.drain_elapsed() => return Err(RequestReleaseReason::Stopping),
            }
        }
    }

    async fn sleep_unless_stopping(&self, wait: Duration) -> Result<(), RequestReleaseReason> {
        tokio::select! {
            () = sleep(wait) => Ok(()),
            _ = self.stop_requested() => Err(RequestReleaseReason::Stopping),
        }
    }

    fn check_stopping(&self) -> Result<(), RequestReleaseReason> {
        match *self.stopping.borrow() {
            Some(_) => Err(RequestReleaseReason::Stopping),
            None => Ok(()),
        }
    }

    /// Returns when the worker starts to stop. Cancel-safe.
    async fn stop_requested(&self) -> Instant {
        let mut stopping = self.stopping.clone();
        match stopping.wait_for(Option::is_some).await {
            Ok(until) => until.unwrap_or_else(Instant::now),
            // The worker was dropped.
            Err(_) => Instant::now(),
        }
    }

    /// Returns when the drain period is over. Cancel-safe.
    async fn drain_elapsed(&self) {
        let until = self.stop_requested().await;
        sleep_until(until).await;
    }
}

fn over_budget(over: OverBudget) -> (RequestFailure, String) {
    (RequestFailure::OverBudget, over.to_string())
}

fn deadline_passed(deadline: Timestamp) -> (RequestFailure, String) {
    (RequestFailure::DeadlinePassed, format!("deadline passed at {}", deadline.to_rfc3339()))
}

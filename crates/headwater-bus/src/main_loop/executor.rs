//! Carrying out a request: from its delivery to its reply.
//!
//! Upstream: `worker`, with what its group was given. Downstream: `run`, then `replies`.
//! Promises: a request that has a reply is not carried out; a reply is kept before the request is acknowledged; each
//! request that is not given back ends with exactly one reply, whatever becomes of it. Processes that die are counted
//! by the group, tries that fail are counted here, runs that lost their lock are counted in the session: each has its
//! limit.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{Backoff, Outcome};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{Instrument, debug, error, info, warn};

use super::budget::Meter;
use super::config::MainLoopConfig;
use super::error::truncate_message;
use super::parsed_request::ParsedRequest;
use super::reply::Reply;
use super::reply_store::{ReplyStore, StoredReply};
use super::request_context::{AttemptResult, DynMainLoop, RequestContext};
use super::request_lock::{LockAttempt, RequestLock, RequestLocks};
use crate::builtin_events::{MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure};
use crate::bus::EventBusExt;
use crate::delivery::random_unit;
use crate::error::BusError;
use crate::event::ReceivedEvent;
use crate::metrics;
use crate::session::{Session, Sessions};

/// The waits between tries while the backend is away.
const RETRY: Backoff = Backoff::Exponential {
    first: Duration::from_millis(100),
    factor: 2.0,
    max: Duration::from_secs(5),
    jitter: 0.5,
};

/// How long a request that somebody else has is waited for before it is given back; the shortest wait between two
/// looks.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(1);
const LOCK_WAIT_MIN: Duration = Duration::from_millis(20);

/// How long a reply waits for the time of the backend, which it only mentions.
const CLOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Calls to a backend that does not answer, before a request is given back that nobody has begun with.
const RETRIES_MAX: u32 = 5;

/// How long a backend may stay away before a reply that it has not kept is lost, and before nobody is told of one
/// that it has.
pub(super) const REPLY_STORE_TIMEOUT: Duration = Duration::from_secs(50 * 60);

/// Carries out what it is given.
pub(super) struct RequestExecutor {
    pub(super) sessions: Sessions,
    pub(super) reply_store: ReplyStore,
    pub(super) locks: Arc<RequestLocks>,
    pub(super) main_loop: Arc<dyn DynMainLoop>,
    pub(super) config: MainLoopConfig,
    /// Set when the worker stops: until when what runs may go on.
    pub(super) stopping: watch::Receiver<Option<Instant>>,
}

/// Why a request goes back to its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseReason {
    Stopping,
    LockLost,
    Held,
    Unavailable,
}

impl ReleaseReason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Stopping => "stopping",
            Self::LockLost => "lock_lost",
            Self::Held => "held",
            Self::Unavailable => "unavailable",
        }
    }
}

/// What came of a request that was not given back.
enum Execution {
    Replied(Reply),
    AlreadyReplied,
    /// There is a reply, but the place for it will never take it.
    Unstorable(BusError),
}

/// What there is of a reply before anybody begins.
enum ReplyLookup {
    Reply,
    None,
    /// There is one elsewhere, but the place for a copy will never take it.
    Unstorable(BusError),
}

/// Whether a request may run.
enum Admission {
    Admitted(RunLimits),
    Rejected(RequestFailure, String),
}

/// Until when a request may run, by the clock of the backend and by that of this process.
#[derive(Clone, Copy)]
struct RunLimits {
    deadline: Timestamp,
    ends_at: Instant,
}

/// How a request ended, before it is a reply.
enum RequestOutcome {
    Output(serde_json::Value),
    Failed(RequestFailure, String),
}

impl RequestExecutor {
    /// Deals with one delivery of a request.
    pub(super) async fn handle(&self, event: ReceivedEvent<MainLoopRequest>) -> Outcome {
        let request = match ParsedRequest::read(&self.reply_store.storage.namespace, &event) {
            Ok(request) => request,
            Err(error) => return self.refuse(&event, &error).await,
        };
        let span =
            tracing::info_span!("main_loop", request_id = %request.id, session = %request.session);
        match self.handle_task(&request).instrument(span).await {
            Ok(outcome) => outcome,
            Err(reason) => {
                metrics::request_released(reason.as_str());
                debug!(request_id = %request.id, reason = reason.as_str(), "request given back");
                Outcome::Release
            }
        }
    }

    /// A request without an id of its own has no reply. Those who watch hear of it.
    async fn refuse(&self, event: &ReceivedEvent<MainLoopRequest>, error: &BusError) -> Outcome {
        warn!(event_id = %event.envelope.event_id, %error, "request without a valid id refused");
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

    async fn handle_task(&self, request: &ParsedRequest) -> Result<Outcome, ReleaseReason> {
        let began = Instant::now();
        let lock = self.acquire_lock(request).await?;
        let execution = self.execute_locked(request, &lock).await;
        lock.release().await;
        Ok(match execution? {
            Execution::Replied(reply) => {
                metrics::request_ended(reply.result(), began.elapsed());
                Outcome::Done
            }
            Execution::AlreadyReplied => {
                metrics::request_repeated();
                Outcome::Done
            }
            Execution::Unstorable(error) => {
                error!(request_id = %request.id, %error, "the reply to a request cannot be stored");
                Outcome::dead_letter(format!("its reply cannot be stored: {error}"))
            }
        })
    }

    /// Takes the request. One that somebody else has is left to them for a while; then the group has it back, so that
    /// it takes up no room here.
    async fn acquire_lock(&self, request: &ParsedRequest) -> Result<RequestLock, ReleaseReason> {
        let until = Instant::now() + LOCK_WAIT_MAX;
        let mut attempts = 0;
        loop {
            self.check_stopping()?;
            let wait = match self.locks.acquire(request).await {
                Ok(LockAttempt::Acquired(lock)) => return Ok(lock),
                // On a local bus there is nobody to give it back to.
                Ok(LockAttempt::Held(_)) if request.is_stored && Instant::now() >= until => {
                    return Err(ReleaseReason::Held);
                }
                Ok(LockAttempt::Held(remaining)) => remaining.clamp(LOCK_WAIT_MIN, LOCK_WAIT_MAX),
                Err(error) => {
                    warn!(request_id = %request.id, %error, "a request cannot be locked");
                    attempts += 1;
                    RETRY.wait(attempts, random_unit())
                }
            };
            if attempts > RETRIES_MAX {
                return Err(ReleaseReason::Unavailable);
            }
            self.sleep_unless_stopping(wait).await?;
        }
    }

    /// Does what is to be done until there is a reply.
    async fn execute_locked(
        &self,
        request: &ParsedRequest,
        lock: &RequestLock,
    ) -> Result<Execution, ReleaseReason> {
        match self.find_reply(request).await? {
            ReplyLookup::None => {}
            ReplyLookup::Reply => return Ok(Execution::AlreadyReplied),
            ReplyLookup::Unstorable(error) => return Ok(Execution::Unstorable(error)),
        }
        let meter = Meter::new(request.budget);
        let (ending, has_session) = match self.admit(request).await? {
            Admission::Rejected(kind, problem) => {
                (RequestOutcome::Failed(kind, problem), kind == RequestFailure::Crashed)
            }
            Admission::Admitted(limits) => {
                // Dropped half way, a session is made as after a crash: whole, or not at all.
                let opened = timeout_at(limits.ends_at, self.open_session(request)).await;
                match opened.map_err(|_| deadline_message(limits.deadline)) {
                    Err(problem) => {
                        (RequestOutcome::Failed(RequestFailure::DeadlinePassed, problem), false)
                    }
                    Ok(opened) => match opened? {
                        Ok(session) => (
                            self.run_within_crash_limit(request, &session, &meter, limits, lock)
                                .await?,
                            true,
                        ),
                        Err(problem) => {
                            (RequestOutcome::Failed(RequestFailure::Failed, problem), false)
                        }
                    },
                }
            }
        };
        let reply = self.reply(request, ending, &meter, has_session).await?;
        self.store_reply(request, reply).await
    }

    /// Looks for a reply. A copy of it goes to whoever else asked the same.
    async fn find_reply(&self, request: &ParsedRequest) -> Result<ReplyLookup, ReleaseReason> {
        let ParsedRequest { requester, id: request_id, .. } = request;
        let found =
            self.with_limited_retries(|| self.reply_store.find(requester, request_id)).await?;
        match found {
            Ok(Some(StoredReply::Reply(reply))) => {
                // Whoever had it before may have died or stopped between the reply and its copy.
                if request.is_stored {
                    let publish_copy = || self.reply_store.publish_copy(request_id, &reply);
                    if let Err(error) = self.with_limited_retries(publish_copy).await? {
                        error!(%request_id, %error, "the copy of a reply could not be published");
                    }
                }
                return Ok(ReplyLookup::Reply);
            }
            Ok(Some(StoredReply::Trimmed)) => return Ok(ReplyLookup::Reply),
            Ok(None) => {}
            // Something that is no reply: as good as none, and nothing can be written over it.
            Err(error) => {
                warn!(%request_id, %error, "the reply to a request cannot be read");
                return Ok(ReplyLookup::Reply);
            }
        }
        let for_other = || self.reply_store.find_for_other_requester(requester, request_id);
        match self.with_limited_retries(for_other).await? {
            Ok(Some(StoredReply::Reply(reply))) => {
                let store = || self.reply_store.store(requester, request_id, &reply);
                Ok(self
                    .with_limited_retries(store)
                    .await?
                    .map_or_else(ReplyLookup::Unstorable, |_| ReplyLookup::Reply))
            }
            Ok(_) => Ok(ReplyLookup::None),
            Err(error) => {
                warn!(%request_id, %error, "the reply to another requester cannot be read");
                Ok(ReplyLookup::None)
            }
        }
    }

    /// Until when the request may run, or why it may not at all.
    async fn admit(&self, request: &ParsedRequest) -> Result<Admission, ReleaseReason> {
        let crashes_max = u64::from(self.config.max_crashes);
        if request.deliveries > crashes_max {
            let problem = format!("{crashes_max} processes died while they execution it out");
            return Ok(Admission::Rejected(RequestFailure::Crashed, problem));
        }
        if let Some(problem) = &request.problem {
            return Ok(Admission::Rejected(RequestFailure::Malformed, problem.clone()));
        }
        if let Err(problem) = self.main_loop.check(&request.body) {
            let problem = format!("the request cannot be read: {problem}");
            return Ok(Admission::Rejected(RequestFailure::Malformed, problem));
        }
        let now = self.now().await?;
        let longest = now.after(self.config.run_timeout);
        let deadline = request.deadline.map_or(longest, |deadline| deadline.min(longest));
        if deadline <= now {
            return Ok(Admission::Rejected(
                RequestFailure::DeadlinePassed,
                deadline_message(deadline),
            ));
        }
        Ok(Admission::Admitted(RunLimits {
            deadline,
            ends_at: Instant::now() + deadline.since(now),
        }))
    }

    async fn open_session(
        &self,
        request: &ParsedRequest,
    ) -> Result<Result<Session, String>, ReleaseReason> {
        let mut attempts = 0;
        loop {
            match self.sessions.ensure(&request.session).await {
                Ok(session) => return Ok(Ok(session)),
                Err(error) if error.is_transient() && attempts < RETRIES_MAX => {
                    attempts += 1;
                    warn!(%error, "the session of a request cannot be opened, trying again");
                    self.sleep_unless_stopping(RETRY.wait(attempts, random_unit())).await?;
                }
                Err(error) if error.is_transient() => return Err(ReleaseReason::Unavailable),
                Err(error) => return Ok(Err(error.to_string())),
            }
        }
    }

    /// Tries, unless that has cost too many their lock. One that blocks its process for longer than its lock lasts
    /// would be carried out over and over: whoever takes it over loses its lock, too, and nobody dies of it.
    async fn run_within_crash_limit(
        &self,
        request: &ParsedRequest,
        session: &Session,
        meter: &Meter,
        limits: RunLimits,
        lock: &RequestLock,
    ) -> Result<RequestOutcome, ReleaseReason> {
        let lost = session.lock_losses();
        if lost >= u64::from(self.config.max_crashes) {
            let problem = format!("{lost} workers lost their lock while they execution it out");
            return Ok(RequestOutcome::Failed(RequestFailure::Crashed, problem));
        }
        let ended = self.run_attempts(request, session, meter, limits, lock).await;
        if let Err(ReleaseReason::LockLost) = &ended
            && let Err(error) = self.sessions.record_lock_loss(&request.session).await
        {
            warn!(%error, "anonymous will know that a request cost a worker its lock");
        }
        ended
    }

    /// Tries until it works, or may not be tried any more.
    async fn run_attempts(
        &self,
        request: &ParsedRequest,
        session: &Session,
        meter: &Meter,
        RunLimits { deadline, ends_at }: RunLimits,
        lock: &RequestLock,
    ) -> Result<RequestOutcome, ReleaseReason> {
        let (request_id, resources) = (request.id.clone(), request.resources.clone());
        let mut context = RequestContext {
            request_id,
            attempt: 1,
            meter: meter.clone(),
            deadline,
            ends_at,
            resources,
        };
        loop {
            let result = tokio::select! {
                // In this order: whoever is not to go on is not asked whether it is done.
                biased;
                () = lock.cancelled() => return Ok(cancelled_outcome()),
                () = lock.lost() => return Err(ReleaseReason::LockLost),
                () = self.drain_elapsed() => return Err(ReleaseReason::Stopping),
                over = meter.exceeded() => {
                    return Ok(RequestOutcome::Failed(RequestFailure::OverBudget, over.to_string()));
                }
                () = sleep_until(ends_at) => {
                    return Ok(RequestOutcome::Failed(RequestFailure::DeadlinePassed, deadline_message(deadline)));
                }
                result = self.main_loop.execute(&request.body, session, &context) => result,
            };
            if let Some(over) = meter.over() {
                return Ok(RequestOutcome::Failed(RequestFailure::OverBudget, over.to_string()));
            }
            let (kind, reason) = match result {
                AttemptResult::Output(output) => return Ok(RequestOutcome::Output(output)),
                AttemptResult::Failed(error) if error.is_permanent => {
                    return Ok(RequestOutcome::Failed(RequestFailure::GivenUp, error.reason));
                }
                AttemptResult::Failed(error) => (RequestFailure::Failed, error.reason),
                AttemptResult::Panicked(reason) => (RequestFailure::Panicked, reason),
            };
            if context.attempt >= self.config.max_attempts {
                let reason = format!("{reason} (attempt {})", context.attempt);
                return Ok(RequestOutcome::Failed(kind, reason));
            }
            metrics::request_retried();
            warn!(
                attempt = context.attempt,
                error = reason,
                "request failed and will be result again"
            );
            let wait = self.config.backoff.wait(context.attempt, random_unit());
            tokio::select! {
                biased;
                () = lock.cancelled() => return Ok(cancelled_outcome()),
                () = lock.lost() => return Err(ReleaseReason::LockLost),
                _ = self.stop_requested() => return Err(ReleaseReason::Stopping),
                () = sleep_until(ends_at) => {
                    return Ok(RequestOutcome::Failed(RequestFailure::DeadlinePassed, deadline_message(deadline)));
                }
                () = sleep(wait) => context.attempt += 1,
            }
        }
    }

    /// Makes a reply of how it ended, and sees that it can be sent.
    async fn reply(
        &self,
        request: &ParsedRequest,
        ending: RequestOutcome,
        meter: &Meter,
        has_session: bool,
    ) -> Result<Reply, ReleaseReason> {
        let at = match timeout(CLOCK_TIMEOUT, self.now()).await {
            // What has been worked out is neither given up nor held up for want of a time of the backend's.
            Err(_) | Ok(Err(ReleaseReason::Unavailable)) => SystemClock.now(),
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
        let output = match ending {
            RequestOutcome::Output(output) => output,
            RequestOutcome::Failed(kind, error) => return Ok(failed(kind, error)),
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

    /// Keeps the reply, then copies it to the control stream. If another came first, that one counts.
    async fn store_reply(
        &self,
        request: &ParsedRequest,
        reply: Reply,
    ) -> Result<Execution, ReleaseReason> {
        let ParsedRequest { requester, id: request_id, .. } = request;
        // However long it takes: what has been worked out is not worked out again because of a short outage.
        let store = || self.reply_store.store(requester, request_id, &reply);
        let stored = match self.with_long_retries(store).await? {
            Ok(StoredReply::Reply(stored)) => stored,
            Ok(StoredReply::Trimmed) => return Ok(Execution::Replied(reply)),
            Err(error) => return Ok(Execution::Unstorable(error)),
        };
        // Also of one that was there, such as a cancellation: whoever kept it may have died before its copy. One is
        // stored.
        let publish_copy = || self.reply_store.publish_copy(request_id, &stored);
        if let Err(error) = self.with_long_retries(publish_copy).await? {
            // The requester has it. Those who watch do not, and trying again would not help them.
            error!(%request_id, %error, "the copy of a reply could not be published");
        }
        info!(%request_id, result = stored.result(), "request replied to");
        Ok(Execution::Replied(stored))
    }

    async fn now(&self) -> Result<Timestamp, ReleaseReason> {
        let backend = &self.reply_store.storage.backend;
        let now = self.with_limited_retries(|| async { Ok(backend.now().await?) }).await?;
        now.map_err(|_| ReleaseReason::Unavailable)
    }

    /// Calls until there is an answer, or something that will not change; a few times.
    async fn with_limited_retries<T, F>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<Result<T, BusError>, ReleaseReason>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        self.with_retries(|attempts| attempts < RETRIES_MAX, call).await
    }

    /// The same for as long as a reply is worth it.
    async fn with_long_retries<T, F>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<Result<T, BusError>, ReleaseReason>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        let until = Instant::now() + REPLY_STORE_TIMEOUT;
        self.with_retries(|_| Instant::now() < until, call).await
    }

    async fn with_retries<T, F>(
        &self,
        may_retry: impl Fn(u32) -> bool,
        call: impl Fn() -> F,
    ) -> Result<Result<T, BusError>, ReleaseReason>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        let mut attempts = 0;
        loop {
            match call().await {
                Err(error) if error.is_transient() => {
                    attempts += 1;
                    if !may_retry(attempts) {
                        return Err(ReleaseReason::Unavailable);
                    }
                    warn!(%error, attempts, "the backend does not answer a main loop, trying again");
                }
                answer => return Ok(answer),
            }
            // What has ended is kept in the time that stopping leaves, too.
            tokio::select! {
                () = sleep(RETRY.wait(attempts, random_unit())) => {}
                () = self.drain_elapsed() => return Err(ReleaseReason::Stopping),
            }
        }
    }

    async fn sleep_unless_stopping(&self, wait: Duration) -> Result<(), ReleaseReason> {
        tokio::select! {
            () = sleep(wait) => Ok(()),
            _ = self.stop_requested() => Err(ReleaseReason::Stopping),
        }
    }

    fn check_stopping(&self) -> Result<(), ReleaseReason> {
        match *self.stopping.borrow() {
            Some(_) => Err(ReleaseReason::Stopping),
            None => Ok(()),
        }
    }

    /// Returns when the worker begins to stop. Cancel-safe.
    async fn stop_requested(&self) -> Instant {
        let mut stopping = self.stopping.clone();
        match stopping.wait_for(Option::is_some).await {
            Ok(until) => until.unwrap_or_else(Instant::now),
            // The worker is gone.
            Err(_) => Instant::now(),
        }
    }

    /// Returns when the time that stopping leaves is over. Cancel-safe.
    async fn drain_elapsed(&self) {
        let until = self.stop_requested().await;
        sleep_until(until).await;
    }
}

fn cancelled_outcome() -> RequestOutcome {
    RequestOutcome::Failed(RequestFailure::Cancelled, "its requester cancelled it".to_owned())
}

fn deadline_message(deadline: Timestamp) -> String {
    format!("its time was up at {}", deadline.to_rfc3339())
}

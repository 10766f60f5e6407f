//! Carrying out a request: from its delivery to its reply.
//!
//! Upstream: `worker`, with what its group was given. Downstream: `run`, then `replies`.
//! Promises: a request that has a reply is not carried out; a reply is kept before the request is acknowledged; each
//! request that is not given back ends with exactly one reply, whatever becomes of it. Processes that die are counted by
//! the group, tries that fail are counted here, runs that lost their lock are counted in the session: each has its limit.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{Backoff, Outcome};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{Instrument, debug, error, info, warn};

use super::budget::Meter;
use super::config::MainLoopConfig;
use super::error::cut;
use super::replies::{Kept, Replies};
use super::reply::Reply;
use super::run::{Execute, Run, Tried};
use super::running::{Entered, Hold, Running};
use super::task::Task;
use crate::builtin::{MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure};
use crate::bus::EventBusExt;
use crate::durable::chance;
use crate::error::BusError;
use crate::event::Received;
use crate::metrics;
use crate::session::{Session, Sessions};

/// The waits between tries while the backend is away.
const RETRY: Backoff = Backoff::Exponential {
    first: Duration::from_millis(100),
    factor: 2.0,
    max: Duration::from_secs(5),
    jitter: 0.5,
};

/// How long a request that somebody else has is waited for before it is given back; the shortest wait between two looks.
const BUSY_MAX: Duration = Duration::from_secs(1);
const BUSY_MIN: Duration = Duration::from_millis(20);

/// How long a reply waits for the time of the backend, which it only mentions.
const TIME_MAX: Duration = Duration::from_secs(1);

/// Calls to a backend that does not answer, before a request is given back that nobody has begun with.
const TRIES_MAX: u32 = 5;

/// How long a backend may stay away before a reply that it has not kept is lost, and before nobody is told of one that it has.
pub(super) const KEEP_MAX: Duration = Duration::from_secs(50 * 60);

/// Carries out what it is given.
pub(super) struct Carrier {
    pub(super) sessions: Sessions,
    pub(super) replies: Replies,
    pub(super) running: Arc<Running>,
    pub(super) main_loop: Arc<dyn Execute>,
    pub(super) config: MainLoopConfig,
    /// Set when the worker stops: until when what runs may go on.
    pub(super) stopping: watch::Receiver<Option<Instant>>,
}

/// Why a request goes back to its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GivenBack {
    Stopping,
    LockLost,
    Held,
    Unavailable,
}

impl GivenBack {
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
enum Carried {
    Replied(Reply),
    RepliedBefore,
    /// There is a reply, but the place for it will never take it.
    CannotKeep(BusError),
}

/// What there is of a reply before anybody begins.
enum Found {
    Reply,
    None,
    /// There is one elsewhere, but the place for a copy will never take it.
    CannotKeep(BusError),
}

/// Whether a request may run.
enum May {
    Run(Limits),
    Not(RequestFailure, String),
}

/// Until when a request may run, by the clock of the backend and by that of this process.
#[derive(Clone, Copy)]
struct Limits {
    deadline: Timestamp,
    ends_at: Instant,
}

/// How a request ended, before it is a reply.
enum Ending {
    Output(serde_json::Value),
    Failed(RequestFailure, String),
}

impl Carrier {
    /// Deals with one delivery of a request.
    pub(super) async fn handle(&self, event: Received<MainLoopRequest>) -> Outcome {
        let task = match Task::read(&self.replies.journal.namespace, &event) {
            Ok(task) => task,
            Err(error) => return self.refuse(&event, &error).await,
        };
        let span = tracing::info_span!("main_loop", request_id = %task.request_id, session = %task.session);
        match self.handle_task(&task).instrument(span).await {
            Ok(outcome) => outcome,
            Err(given_back) => {
                metrics::request_given_back(given_back.as_str());
                debug!(request_id = %task.request_id, reason = given_back.as_str(), "request given back");
                Outcome::Release
            }
        }
    }

    /// A request without an id of its own has no reply. Those who watch hear of it.
    async fn refuse(&self, event: &Received<MainLoopRequest>, error: &BusError) -> Outcome {
        warn!(event_id = %event.envelope.event_id, %error, "request without a valid id refused");
        let failed = MainLoopFailed {
            request_id: event.request_id.clone(),
            error: cut(error.to_string()),
            kind: RequestFailure::Malformed,
            ..MainLoopFailed::default()
        };
        match self.replies.bus.publish(failed).await {
            Ok(_) => Outcome::Done,
            Err(error) => Outcome::retry(error),
        }
    }

    async fn handle_task(&self, task: &Task) -> Result<Outcome, GivenBack> {
        let began = Instant::now();
        let hold = self.enter(task).await?;
        let carried = self.carry_out(task, &hold).await;
        hold.release().await;
        Ok(match carried? {
            Carried::Replied(reply) => {
                metrics::request_ended(reply.result(), began.elapsed());
                Outcome::Done
            }
            Carried::RepliedBefore => {
                metrics::request_repeated();
                Outcome::Done
            }
            Carried::CannotKeep(error) => {
                error!(request_id = %task.request_id, %error, "the reply to a request cannot be kept");
                Outcome::dead_letter(format!("its reply cannot be kept: {error}"))
            }
        })
    }

    /// Takes the request. One that somebody else has is left to them for a while; then the group has it back, so that it
    /// takes up no room here.
    async fn enter(&self, task: &Task) -> Result<Hold, GivenBack> {
        let until = Instant::now() + BUSY_MAX;
        let mut tries = 0;
        loop {
            self.check_stopping()?;
            let wait = match self.running.enter(task).await {
                Ok(Entered::Won(hold)) => return Ok(hold),
                // On a local bus there is nobody to give it back to.
                Ok(Entered::Busy(_)) if task.is_stored && Instant::now() >= until => {
                    return Err(GivenBack::Held);
                }
                Ok(Entered::Busy(remaining)) => remaining.clamp(BUSY_MIN, BUSY_MAX),
                Err(error) => {
                    warn!(request_id = %task.request_id, %error, "a request cannot be locked");
                    tries += 1;
                    RETRY.wait(tries, chance())
                }
            };
            if tries > TRIES_MAX {
                return Err(GivenBack::Unavailable);
            }
            self.pause(wait).await?;
        }
    }

    /// Does what is to be done until there is a reply.
    async fn carry_out(&self, task: &Task, hold: &Hold) -> Result<Carried, GivenBack> {
        match self.find(task).await? {
            Found::None => {}
            Found::Reply => return Ok(Carried::RepliedBefore),
            Found::CannotKeep(error) => return Ok(Carried::CannotKeep(error)),
        }
        let meter = Meter::new(task.budget);
        let (ending, has_session) = match self.may(task).await? {
            May::Not(kind, problem) => {
                (Ending::Failed(kind, problem), kind == RequestFailure::Crashed)
            }
            May::Run(limits) => {
                // Dropped half way, a session is made as after a crash: whole, or not at all.
                let opened = timeout_at(limits.ends_at, self.session(task)).await;
                match opened.map_err(|_| passed(limits.deadline)) {
                    Err(problem) => {
                        (Ending::Failed(RequestFailure::DeadlinePassed, problem), false)
                    }
                    Ok(opened) => match opened? {
                        Ok(session) => {
                            (self.pursue_here(task, &session, &meter, limits, hold).await?, true)
                        }
                        Err(problem) => (Ending::Failed(RequestFailure::Failed, problem), false),
                    },
                }
            }
        };
        let reply = self.reply(task, ending, &meter, has_session).await?;
        self.keep(task, reply).await
    }

    /// Looks for a reply. A copy of it goes to whoever else asked the same.
    async fn find(&self, task: &Task) -> Result<Found, GivenBack> {
        let Task { requester, request_id, .. } = task;
        let found = self.patiently(|| self.replies.find(requester, request_id)).await?;
        match found {
            Ok(Some(Kept::Reply(reply))) => {
                // Whoever had it before may have died or stopped between the reply and its copy.
                if task.is_stored {
                    let announced = || self.replies.announce(request_id, &reply);
                    if let Err(error) = self.patiently(announced).await? {
                        error!(%request_id, %error, "the copy of a reply could not be published");
                    }
                }
                return Ok(Found::Reply);
            }
            Ok(Some(Kept::Gone)) => return Ok(Found::Reply),
            Ok(None) => {}
            // Something that is no reply: as good as none, and nothing can be written over it.
            Err(error) => {
                warn!(%request_id, %error, "the reply to a request cannot be read");
                return Ok(Found::Reply);
            }
        }
        let elsewhere = || self.replies.find_elsewhere(requester, request_id);
        match self.patiently(elsewhere).await? {
            Ok(Some(Kept::Reply(reply))) => {
                let store = || self.replies.store(requester, request_id, &reply);
                Ok(self.patiently(store).await?.map_or_else(Found::CannotKeep, |_| Found::Reply))
            }
            Ok(_) => Ok(Found::None),
            Err(error) => {
                warn!(%request_id, %error, "the reply to another requester cannot be read");
                Ok(Found::None)
            }
        }
    }

    /// Until when the request may run, or why it may not at all.
    async fn may(&self, task: &Task) -> Result<May, GivenBack> {
        let crashes_max = u64::from(self.config.max_crashes);
        if task.deliveries > crashes_max {
            let problem = format!("{crashes_max} processes died while they carried it out");
            return Ok(May::Not(RequestFailure::Crashed, problem));
        }
        if let Some(problem) = &task.problem {
            return Ok(May::Not(RequestFailure::Malformed, problem.clone()));
        }
        if let Err(problem) = self.main_loop.check(&task.request) {
            let problem = format!("the request cannot be read: {problem}");
            return Ok(May::Not(RequestFailure::Malformed, problem));
        }
        let now = self.now().await?;
        let longest = now.after(self.config.run_max);
        let deadline = task.deadline.map_or(longest, |deadline| deadline.min(longest));
        if deadline <= now {
            return Ok(May::Not(RequestFailure::DeadlinePassed, passed(deadline)));
        }
        Ok(May::Run(Limits { deadline, ends_at: Instant::now() + deadline.since(now) }))
    }

    async fn session(&self, task: &Task) -> Result<Result<Session, String>, GivenBack> {
        let mut tries = 0;
        loop {
            match self.sessions.ensure(&task.session).await {
                Ok(session) => return Ok(Ok(session)),
                Err(error) if error.is_transient() && tries < TRIES_MAX => {
                    tries += 1;
                    warn!(%error, "the session of a request cannot be opened, trying again");
                    self.pause(RETRY.wait(tries, chance())).await?;
                }
                Err(error) if error.is_transient() => return Err(GivenBack::Unavailable),
                Err(error) => return Ok(Err(error.to_string())),
            }
        }
    }

    /// Tries, unless that has cost too many their lock. One that blocks its process for longer than its lock lasts would be
    /// carried out over and over: whoever takes it over loses its lock, too, and nobody dies of it.
    async fn pursue_here(
        &self,
        task: &Task,
        session: &Session,
        meter: &Meter,
        limits: Limits,
        hold: &Hold,
    ) -> Result<Ending, GivenBack> {
        let lost = session.lost_runs();
        if lost >= u64::from(self.config.max_crashes) {
            let problem = format!("{lost} workers lost their lock while they carried it out");
            return Ok(Ending::Failed(RequestFailure::Crashed, problem));
        }
        let pursued = self.pursue(task, session, meter, limits, hold).await;
        if let Err(GivenBack::LockLost) = &pursued
            && let Err(error) = self.sessions.note_lost_run(&task.session).await
        {
            warn!(%error, "nobody will know that a request cost a worker its lock");
        }
        pursued
    }

    /// Tries until it works, or may not be tried any more.
    async fn pursue(
        &self,
        task: &Task,
        session: &Session,
        meter: &Meter,
        Limits { deadline, ends_at }: Limits,
        hold: &Hold,
    ) -> Result<Ending, GivenBack> {
        let (request_id, resources) = (task.request_id.clone(), task.resources.clone());
        let mut run =
            Run { request_id, attempt: 1, meter: meter.clone(), deadline, ends_at, resources };
        loop {
            let tried = tokio::select! {
                // In this order: whoever is not to go on is not asked whether it is done.
                biased;
                () = hold.cancelled() => return Ok(cancelled()),
                () = hold.lost() => return Err(GivenBack::LockLost),
                () = self.stopped() => return Err(GivenBack::Stopping),
                over = meter.exceeded() => {
                    return Ok(Ending::Failed(RequestFailure::OverBudget, over.to_string()));
                }
                () = sleep_until(ends_at) => {
                    return Ok(Ending::Failed(RequestFailure::DeadlinePassed, passed(deadline)));
                }
                tried = self.main_loop.execute(&task.request, session, &run) => tried,
            };
            if let Some(over) = meter.over() {
                return Ok(Ending::Failed(RequestFailure::OverBudget, over.to_string()));
            }
            let (kind, reason) = match tried {
                Tried::Output(output) => return Ok(Ending::Output(output)),
                Tried::Failed(error) if error.gives_up => {
                    return Ok(Ending::Failed(RequestFailure::GivenUp, error.reason));
                }
                Tried::Failed(error) => (RequestFailure::Failed, error.reason),
                Tried::Panicked(reason) => (RequestFailure::Panicked, reason),
            };
            if run.attempt >= self.config.max_attempts {
                let reason = format!("{reason} (attempt {})", run.attempt);
                return Ok(Ending::Failed(kind, reason));
            }
            metrics::request_retried();
            warn!(attempt = run.attempt, error = reason, "request failed and will be tried again");
            let wait = self.config.backoff.wait(run.attempt, chance());
            tokio::select! {
                biased;
                () = hold.cancelled() => return Ok(cancelled()),
                () = hold.lost() => return Err(GivenBack::LockLost),
                _ = self.stop_begun() => return Err(GivenBack::Stopping),
                () = sleep_until(ends_at) => {
                    return Ok(Ending::Failed(RequestFailure::DeadlinePassed, passed(deadline)));
                }
                () = sleep(wait) => run.attempt += 1,
            }
        }
    }

    /// Makes a reply of how it ended, and sees that it can be sent.
    async fn reply(
        &self,
        task: &Task,
        ending: Ending,
        meter: &Meter,
        has_session: bool,
    ) -> Result<Reply, GivenBack> {
        let at = match timeout(TIME_MAX, self.now()).await {
            // What has been worked out is neither given up nor held up for want of a time of the backend's.
            Err(_) | Ok(Err(GivenBack::Unavailable)) => SystemClock.now(),
            Ok(now) => now?,
        };
        let at = at.to_rfc3339();
        let session_id = has_session.then(|| task.session.to_string());
        let (request_id, usage) = (task.request_id.to_string(), meter.used());
        let failed = |kind, error| {
            Reply::Failed(MainLoopFailed {
                request_id: request_id.clone(),
                error: cut(error),
                kind,
                session_id: session_id.clone(),
                failed_at: Some(at.clone()),
                usage,
            })
        };
        let output = match ending {
            Ending::Output(output) => output,
            Ending::Failed(kind, error) => return Ok(failed(kind, error)),
        };
        let reply = Reply::Completed(MainLoopCompleted {
            request_id: request_id.clone(),
            response: output,
            session_id: session_id.clone(),
            completed_at: Some(at.clone()),
            usage,
        });
        Ok(match reply.to_outgoing(&task.request_id) {
            Ok(_) => reply,
            Err(error @ BusError::TooLarge { .. }) => {
                failed(RequestFailure::TooLarge, error.to_string())
            }
            Err(error) => failed(RequestFailure::GivenUp, error.to_string()),
        })
    }

    /// Keeps the reply, then copies it to the control stream. If another came first, that one counts.
    async fn keep(&self, task: &Task, reply: Reply) -> Result<Carried, GivenBack> {
        let Task { requester, request_id, .. } = task;
        // However long it takes: what has been worked out is not worked out again because of a short outage.
        let store = || self.replies.store(requester, request_id, &reply);
        let kept = match self.until_it_works(store).await? {
            Ok(Kept::Reply(kept)) => kept,
            Ok(Kept::Gone) => return Ok(Carried::Replied(reply)),
            Err(error) => return Ok(Carried::CannotKeep(error)),
        };
        // Also of one that was there, such as a cancellation: whoever kept it may have died before its copy. One is stored.
        let announce = || self.replies.announce(request_id, &kept);
        if let Err(error) = self.until_it_works(announce).await? {
            // The requester has it. Those who watch do not, and trying again would not help them.
            error!(%request_id, %error, "the copy of a reply could not be published");
        }
        info!(%request_id, result = kept.result(), "request replied to");
        Ok(Carried::Replied(kept))
    }

    async fn now(&self) -> Result<Timestamp, GivenBack> {
        let backend = &self.replies.journal.backend;
        let now = self.patiently(|| async { Ok(backend.now().await?) }).await?;
        now.map_err(|_| GivenBack::Unavailable)
    }

    /// Calls until there is an answer, or something that will not change; a few times.
    async fn patiently<T, F>(&self, call: impl Fn() -> F) -> Result<Result<T, BusError>, GivenBack>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        self.call_while(|tries| tries < TRIES_MAX, call).await
    }

    /// The same for as long as a reply is worth it.
    async fn until_it_works<T, F>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<Result<T, BusError>, GivenBack>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        let until = Instant::now() + KEEP_MAX;
        self.call_while(|_| Instant::now() < until, call).await
    }

    async fn call_while<T, F>(
        &self,
        goes_on: impl Fn(u32) -> bool,
        call: impl Fn() -> F,
    ) -> Result<Result<T, BusError>, GivenBack>
    where
        F: Future<Output = Result<T, BusError>>,
    {
        let mut tries = 0;
        loop {
            match call().await {
                Err(error) if error.is_transient() => {
                    tries += 1;
                    if !goes_on(tries) {
                        return Err(GivenBack::Unavailable);
                    }
                    warn!(%error, tries, "the backend does not answer a main loop, trying again");
                }
                answer => return Ok(answer),
            }
            // What has ended is kept in the time that stopping leaves, too.
            tokio::select! {
                () = sleep(RETRY.wait(tries, chance())) => {}
                () = self.stopped() => return Err(GivenBack::Stopping),
            }
        }
    }

    async fn pause(&self, wait: Duration) -> Result<(), GivenBack> {
        tokio::select! {
            () = sleep(wait) => Ok(()),
            _ = self.stop_begun() => Err(GivenBack::Stopping),
        }
    }

    fn check_stopping(&self) -> Result<(), GivenBack> {
        match *self.stopping.borrow() {
            Some(_) => Err(GivenBack::Stopping),
            None => Ok(()),
        }
    }

    /// Returns when the worker begins to stop. Cancel-safe.
    async fn stop_begun(&self) -> Instant {
        let mut stopping = self.stopping.clone();
        match stopping.wait_for(Option::is_some).await {
            Ok(until) => until.unwrap_or_else(Instant::now),
            // The worker is gone.
            Err(_) => Instant::now(),
        }
    }

    /// Returns when the time that stopping leaves is over. Cancel-safe.
    async fn stopped(&self) {
        let until = self.stop_begun().await;
        sleep_until(until).await;
    }
}

fn cancelled() -> Ending {
    Ending::Failed(RequestFailure::Cancelled, "its requester cancelled it".to_owned())
}

fn passed(deadline: Timestamp) -> String {
    format!("its time was up at {}", deadline.to_rfc3339())
}

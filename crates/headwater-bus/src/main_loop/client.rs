//! Clients: those who ask.
//!
//! Upstream: applications, and requests that need something of other main loops. Downstream: the control stream, and
//! the requester's own stream of replies.
//! Promises: a request that is submitted twice under one id counts once, and both get the same reply; a reply that
//! comes too late for its caller stays, for every process of the requester; a request that is cancelled has that as
//! its reply, unless another came first. A caller is answered at the deadline of its request, or when its own time is
//! up, at most [`REPLY_GRACE`] later, whatever the backend does.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, StreamError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{Instrument, warn};

use super::config::MainLoopClientConfig;
use super::error::MainLoopError;
use super::parsed_request::session_of;
use super::reply::{CompletedRequest, Reply};
use super::reply_store::{ReplyStore, StoredReply};
use super::reply_waiters::{self, ReplyWaiter, ReplyWaiters};
use super::request_context::RequestContext;
use crate::abort_on_drop::AbortOnDropTask;
use crate::builtin_events::{
    Budget, MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure,
};
use crate::bus::{EventBus, EventBusExt};
use crate::error::BusError;
use crate::event::{Envelope, OutgoingEvent};
use crate::limits::REPLY_TTL_MAX;
use crate::metrics;
use crate::name::{EventId, RequestId, Requester, SessionId};

/// How long a caller whose time is up is still kept waiting: a worker that ends a run at its deadline answers right
/// after it, and what a reader missed can be fetched.
const REPLY_GRACE: Duration = Duration::from_millis(500);

type Result<T, E = MainLoopError> = std::result::Result<T, E>;

/// A request, with its limits.
#[derive(Clone, Debug)]
pub struct Submission<R> {
    request: R,
    request_id: Option<RequestId>,
    budget: Option<Budget>,
    deadline: Deadline,
    resources: Json,
    timeout: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
enum Deadline {
    None,
    At(Timestamp),
    Within(Duration),
}

impl<R: Serialize> Submission<R> {
    /// A request without limits, known by an id that nobody else has.
    pub fn new(request: R) -> Self {
        Self {
            request,
            request_id: None,
            budget: None,
            deadline: Deadline::None,
            resources: Json::Null,
            timeout: None,
        }
    }

    /// Gives it an id of the caller's: submitted again under it, it counts once.
    pub fn id(mut self, request_id: RequestId) -> Self {
        self.request_id = Some(request_id);
        self
    }

    /// What it may cost.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// When it must be done, by the clock of the backend.
    pub fn deadline(mut self, deadline: Timestamp) -> Self {
        self.deadline = Deadline::At(deadline);
        self
    }

    /// How long from now it may take, waiting included. The caller is answered then, also if the backend is away:
    /// [`DeadlinePassed`](MainLoopError::DeadlinePassed).
    pub fn within(mut self, time: Duration) -> Self {
        self.deadline = Deadline::Within(time);
        self
    }

    /// What it may use; the main loop knows what that means.
    pub fn resources(mut self, resources: Json) -> Self {
        self.resources = resources;
        self
    }

    /// How long to wait for the reply. It may come later, and can be fetched then.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// What came of the wish to cancel a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// It is: if it waits it is never begun, if it runs it is stopped.
    Cancelled,
    /// It had a reply already.
    AlreadyReplied,
}

/// A caller that waits for a reply, and how long.
struct PendingReply {
    waiter: ReplyWaiter,
    request_id: RequestId,
    until: Instant,
    limit: WaitLimit,
}

/// What ends a wait.
#[derive(Clone, Copy)]
enum WaitLimit {
    /// The caller waits no longer than this.
    Timeout(Duration),
    /// The deadline of the request.
    Deadline,
}

impl PendingReply {
    /// Ends it at the deadline of the request, if that comes first.
    fn limit_to_deadline(&mut self, deadline: Instant) {
        if deadline <= self.until {
            (self.until, self.limit) = (deadline, WaitLimit::Deadline);
        }
    }

    /// The error of a caller whose request is submitted, and who got no reply.
    fn timeout_error(&self) -> MainLoopError {
        let request_id = self.request_id.clone();
        match self.limit {
            WaitLimit::Timeout(after) => MainLoopError::TimedOut { request_id, after },
            WaitLimit::Deadline => MainLoopError::DeadlinePassed { request_id },
        }
    }

    /// The error of a caller who does not know whether its request is submitted.
    fn unsubmitted_error(&self) -> MainLoopError {
        match self.limit {
            WaitLimit::Deadline => self.timeout_error(),
            WaitLimit::Timeout(after) => {
                let problem = format!("not confirmed within {after:?}");
                let source = StreamError::Unavailable { problem, source: None }.into();
                MainLoopError::NotSubmitted { request_id: self.request_id.clone(), source }
            }
        }
    }
}

/// Asks main loops of the bus's namespace, in the name of a requester.
pub struct MainLoopClient {
    requester: Requester,
    reply_store: ReplyStore,
    waiters: Arc<ReplyWaiters>,
    config: MainLoopClientConfig,
    /// What the clock of the backend last said, and when: it goes on while the backend does not answer.
    clock: Mutex<(Timestamp, Instant)>,
    _reader: AbortOnDropTask<()>,
}

impl MainLoopClient {
    /// A client of the bus. Processes with the same `requester` share their replies; take a name that stays the same
    /// over restarts, if late replies matter.
    pub async fn open(
        bus: Arc<dyn EventBus>,
        requester: Requester,
        config: MainLoopClientConfig,
    ) -> Result<Self> {
        bus.registry().check::<MainLoopRequest>()?;
        bus.registry().check::<MainLoopCompleted>()?;
        bus.registry().check::<MainLoopFailed>()?;
        let reply_store = ReplyStore::new(bus, config.replies).await?;
        reply_store.register_requester(&requester).await?;
        let (backend, stream) =
            (Arc::clone(&reply_store.storage.backend), reply_store.stream(&requester));
        let stats = backend.stats(&stream).await?;
        let end = stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN);
        let clock = Mutex::new((backend.now().await?, Instant::now()));
        let waiters = Arc::<ReplyWaiters>::default();
        let reader = reply_waiters::follow_replies(backend, stream, end, Arc::clone(&waiters));
        let reader = AbortOnDropTask(tokio::spawn(reader));
        Ok(Self { requester, reply_store, waiters, config, clock, _reader: reader })
    }

    /// In whose name it asks.
    pub fn requester(&self) -> &Requester {
        &self.requester
    }

    /// The session in which a request is carried out.
    pub fn session_of(&self, request_id: &RequestId) -> SessionId {
        session_of(&self.reply_store.storage.namespace, request_id)
    }

    /// Asks, and waits for the reply.
    pub async fn submit<R: Serialize, O: DeserializeOwned>(
        &self,
        submit: Submission<R>,
    ) -> Result<CompletedRequest<O>> {
        let request_id = submit.request_id.clone().unwrap_or_else(RequestId::random);
        self.submit_measured(request_id.clone(), submit).await?.into_output(&request_id)
    }

    /// Asks on behalf of a request that is being carried out: within what is left of its budget and its time. What the
    /// reply says was used is charged to it; without a reply, all that was set aside for it.
    ///
    /// The other main loop needs room of its own: one whose requests all wait for requests to itself waits for ever.
    pub async fn submit_within<R: Serialize, O: DeserializeOwned>(
        &self,
        context: &RequestContext,
        mut submit: Submission<R>,
    ) -> Result<CompletedRequest<O>> {
        let lease = context.meter().lease(submit.budget.unwrap_or_default())?;
        submit.budget = Some(lease.budget());
        let deadline = match submit.deadline {
            Deadline::None => context.deadline(),
            Deadline::At(deadline) => deadline.min(context.deadline()),
            Deadline::Within(time) => self.estimated_now().after(time).min(context.deadline()),
        };
        submit.deadline = Deadline::At(deadline);
        let request_id = submit.request_id.clone().unwrap_or_else(RequestId::random);
        let reply = self.submit_measured(request_id.clone(), submit).await?;
        lease.settle(reply.usage())?;
        reply.into_output(&request_id)
    }

    async fn submit_measured<R: Serialize>(
        &self,
        request_id: RequestId,
        submit: Submission<R>,
    ) -> Result<Reply> {
        let began = Instant::now();
        let span = tracing::info_span!("submit", %request_id, requester = %self.requester);
        let reply = self.submit_and_wait(request_id, submit).instrument(span).await;
        let result = match &reply {
            Ok(Reply::Completed(_)) => "completed",
            Ok(Reply::Failed(_)) => "failed",
            Err(MainLoopError::TimedOut { .. }) => "timed_out",
            Err(MainLoopError::DeadlinePassed { .. }) => "deadline_passed",
            Err(_) => "error",
        };
        metrics::submitted(result, began.elapsed());
        reply
    }

    async fn submit_and_wait<R: Serialize>(
        &self,
        request_id: RequestId,
        submit: Submission<R>,
    ) -> Result<Reply> {
        let began = Instant::now();
        let limit = submit.timeout.unwrap_or(self.config.timeout);
        let mut pending = self.start_wait(&request_id, limit)?;
        match submit.deadline {
            Deadline::None => {}
            Deadline::Within(time) => pending.limit_to_deadline(began + time.min(REPLY_TTL_MAX)),
            Deadline::At(deadline) => pending.limit_to_deadline(self.instant_of(deadline)),
        }
        // What is dropped here is published all the same once the bus has it; no worker begins it after its deadline.
        match timeout_at(pending.until, self.send(&request_id, submit, began)).await {
            Ok(sent) => sent?,
            Err(_) => return Err(pending.unsubmitted_error()),
        }
        self.wait_for(pending).await
    }

    async fn send<R: Serialize>(
        &self,
        request_id: &RequestId,
        submit: Submission<R>,
        began: Instant,
    ) -> Result<()> {
        let request = serde_json::to_value(&submit.request)
            .map_err(|error| BusError::invalid("request", format!("no JSON: {error}")))?;
        let now = self.now().await?;
        let deadline = match submit.deadline {
            Deadline::None => None,
            Deadline::At(deadline) => Some(deadline),
            Deadline::Within(time) => Some(now.after(time.saturating_sub(began.elapsed()))),
        };
        let event = MainLoopRequest {
            request_id: request_id.to_string(),
            request,
            budget: submit.budget,
            deadline: deadline.map(Timestamp::to_rfc3339),
            resources: submit.resources,
            reply_to: Some(self.requester.to_string()),
            created_at: Some(now.to_rfc3339()),
        };
        let event_id = EventId::new(format!("request:{}:{request_id}", self.requester))?;
        let outgoing = OutgoingEvent::new(event)?.with_id(event_id);
        // Listed again now and then, for as long as it asks.
        self.reply_store.register_requester(&self.requester).await?;
        match self.reply_store.bus.publish_outgoing(outgoing).await {
            Ok(_) => Ok(()),
            Err(source) if source.is_transient() => {
                Err(MainLoopError::NotSubmitted { request_id: request_id.clone(), source })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the reply to a request that was submitted before, by this process or another one of the requester.
    pub async fn wait<O: DeserializeOwned>(
        &self,
        request_id: &RequestId,
        limit: Duration,
    ) -> Result<CompletedRequest<O>> {
        let pending = self.start_wait(request_id, limit)?;
        self.wait_for(pending).await?.into_output(request_id)
    }

    fn start_wait(&self, request_id: &RequestId, limit: Duration) -> Result<PendingReply> {
        let limit = limit.min(REPLY_TTL_MAX);
        Ok(PendingReply {
            waiter: self.waiters.add(request_id)?,
            request_id: request_id.clone(),
            until: Instant::now() + limit,
            limit: WaitLimit::Timeout(limit),
        })
    }

    async fn wait_for(&self, mut pending: PendingReply) -> Result<Reply> {
        let until = pending.until;
        if let Ok(reply) = timeout_at(until, self.find_or_await_reply(&mut pending)).await {
            return reply;
        }
        let late = async {
            match pending.limit {
                // The worker answers, too, and says what the run took.
                WaitLimit::Deadline => self.find_or_await_reply(&mut pending).await.map(Some),
                // What the reader may have missed.
                WaitLimit::Timeout(_) => self.find_reply_if_available(&pending.request_id).await,
            }
        };
        match timeout(REPLY_GRACE, late).await {
            Ok(Ok(Some(reply))) => Ok(reply),
            Ok(Err(error)) => Err(error),
            Ok(Ok(None)) | Err(_) => Err(pending.timeout_error()),
        }
    }

    /// Looks for a reply that was there before anybody waited, and waits for one that comes. Cancel-safe.
    async fn find_or_await_reply(&self, pending: &mut PendingReply) -> Result<Reply> {
        let request_id = &pending.request_id;
        tokio::select! {
            envelope = pending.waiter.arrived() => return self.read(request_id, &envelope),
            found = self.find_reply_if_available(request_id) => {
                if let Some(reply) = found? {
                    return Ok(reply);
                }
            }
        }
        let envelope = pending.waiter.arrived().await;
        self.read(request_id, &envelope)
    }

    /// Looks for a reply. A backend that does not answer is no reason to stop waiting: the request is on its way.
    async fn find_reply_if_available(&self, request_id: &RequestId) -> Result<Option<Reply>> {
        match self.find_reply(request_id).await {
            Err(error) if error.is_transient() => {
                warn!(%request_id, %error, "a reply cannot be looked for");
                Ok(None)
            }
            found => found,
        }
    }

    fn read(&self, request_id: &RequestId, envelope: &Envelope) -> Result<Reply> {
        Reply::from_envelope(self.reply_store.bus.registry(), envelope).map_err(|error| {
            let problem = error.to_string();
            MainLoopError::Unreadable { request_id: request_id.clone(), problem }
        })
    }

    async fn find_reply(&self, request_id: &RequestId) -> Result<Option<Reply>> {
        match self.reply_store.find(&self.requester, request_id).await? {
            None => Ok(None),
            Some(StoredReply::Reply(reply)) => Ok(Some(reply)),
            Some(StoredReply::Trimmed) => {
                Err(MainLoopError::ReplyGone { request_id: request_id.clone() })
            }
        }
    }

    /// The reply to a request, if it is there: also one that came after its caller had gone.
    pub async fn reply<O: DeserializeOwned>(
        &self,
        request_id: &RequestId,
    ) -> Result<Option<CompletedRequest<O>>> {
        match self.find_reply(request_id).await? {
            Some(reply) => reply.into_output(request_id).map(Some),
            None => Ok(None),
        }
    }

    /// Cancels a request of this requester, wherever it is. May be repeated after any error.
    pub async fn cancel(&self, request_id: &RequestId) -> Result<CancelOutcome> {
        let now = self.now().await?;
        let reply = Reply::Failed(MainLoopFailed {
            request_id: request_id.to_string(),
            error: "its requester cancelled it".to_owned(),
            kind: RequestFailure::Cancelled,
            failed_at: Some(now.to_rfc3339()),
            ..MainLoopFailed::default()
        });
        // The cancellation is the reply. Of it and what a worker may write at the same time, the server takes one.
        match self.reply_store.store(&self.requester, request_id, &reply).await? {
            StoredReply::Reply(Reply::Failed(failed))
                if failed.kind == RequestFailure::Cancelled =>
            {
                self.reply_store.publish_copy(request_id, &Reply::Failed(failed)).await?;
                Ok(CancelOutcome::Cancelled)
            }
            StoredReply::Reply(_) | StoredReply::Trimmed => Ok(CancelOutcome::AlreadyReplied),
        }
    }

    async fn now(&self) -> Result<Timestamp> {
        let now = self.reply_store.storage.backend.now().await?;
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = (now, Instant::now());
        Ok(now)
    }

    /// The time by the clock of the backend, as far as this process knows it without asking.
    fn estimated_now(&self) -> Timestamp {
        let (then, at) = *self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        then.after(at.elapsed())
    }

    fn instant_of(&self, time: Timestamp) -> Instant {
        Instant::now() + time.since(self.estimated_now()).min(REPLY_TTL_MAX)
    }
}

impl fmt::Debug for MainLoopClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MainLoopClient")
            .field("requester", &self.requester)
            .field("session_backend", &self.reply_store.storage)
            .finish_non_exhaustive()
    }
}

//! Client of a main loop: submits requests and receives replies.
//!
//! Upstream: applications, and requests that send sub-requests. Downstream: the control stream, and the requester's
//! reply stream.
//! Guarantees: submitting a request twice under one id executes it once, and both callers get the same reply; a reply
//! that arrives after its caller timed out is kept for every process of the requester; a cancelled request has the
//! cancellation as its reply, unless another reply came first. A caller gets an answer at the deadline of its request
//! or at its timeout, at most [`REPLY_GRACE`] later, even if the backend is unavailable.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, StreamError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument, warn};

use super::config::MainLoopClientConfig;
use super::error::MainLoopError;
use super::parsed_request::session_of;
use super::reply::{CompletedRequest, Reply};
use super::reply_store::{ReplyStore, StoredReply};
use super::reply_waiters::{self, ReplyWaiter, ReplyWaiters};
use super::request_context::RequestContext;
use crate::builtin_events::{
    Budget, MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure,
};
use crate::bus::{EventBus, EventBusExt};
use crate::error::BusError;
use crate::event::{Envelope, OutgoingEvent};
use crate::limits::REPLY_TTL_MAX;
use crate::metrics;
use crate::name::{EventId, RequestId, Requester, SessionId};

/// Extra wait after a deadline or timeout: a worker that ends a run at its deadline replies right after it, and a reply
/// that the reader missed can still be fetched.
const REPLY_GRACE: Duration = Duration::from_millis(500);

type Result<T, E = MainLoopError> = std::result::Result<T, E>;

/// A request to submit, with its limits.
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
    /// Creates a request without limits and with a random id.
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

    /// Sets the request id. Submitting again under the same id is idempotent.
    pub fn id(mut self, request_id: RequestId) -> Self {
        self.request_id = Some(request_id);
        self
    }

    /// Sets the budget.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Sets the deadline, by the clock of the backend.
    pub fn deadline(mut self, deadline: Timestamp) -> Self {
        self.deadline = Deadline::At(deadline);
        self
    }

    /// Sets the deadline relative to now, including waiting time. The caller gets
    /// [`DeadlinePassed`](MainLoopError::DeadlinePassed) then, even if the backend is unavailable.
    pub fn within(mut self, time: Duration) -> Self {
        self.deadline = Deadline::Within(time);
        self
    }

    /// Sets the resources; their meaning is defined by the main loop.
    pub fn resources(mut self, resources: Json) -> Self {
        self.resources = resources;
        self
    }

    /// Sets how long to wait for the reply. A later reply can still be fetched.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// Result of cancelling a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The request is cancelled: it is not started, or its run is stopped.
    Cancelled,
    /// The request already has a reply.
    AlreadyReplied,
}

/// A caller waiting for a reply.
struct PendingReply {
    waiter: ReplyWaiter,
    request_id: RequestId,
    until: Instant,
    limit: WaitLimit,
}

/// What limits the wait.
#[derive(Clone, Copy)]
enum WaitLimit {
    /// The caller's timeout.
    Timeout(Duration),
    /// The deadline of the request.
    Deadline,
}

impl PendingReply {
    /// Ends the wait at the deadline of the request, if that is earlier.
    fn limit_to_deadline(&mut self, deadline: Instant) {
        if deadline <= self.until {
            (self.until, self.limit) = (deadline, WaitLimit::Deadline);
        }
    }

    /// Error of a submitted request without a reply.
    fn timeout_error(&self) -> MainLoopError {
        let request_id = self.request_id.clone();
        match self.limit {
            WaitLimit::Timeout(after) => MainLoopError::TimedOut { request_id, after },
            WaitLimit::Deadline => MainLoopError::DeadlinePassed { request_id },
        }
    }

    /// Error of a request that may not have been submitted.
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

/// Sends requests to the main loop of the bus's namespace.
pub struct MainLoopClient {
    requester: Requester,
    reply_store: ReplyStore,
    waiters: Arc<ReplyWaiters>,
    config: MainLoopClientConfig,
    /// Last known time of the backend, and when it was read; used to estimate the time while the backend is
    /// unavailable.
    clock: Mutex<(Timestamp, Instant)>,
    _reader: AbortOnDropHandle<()>,
}

impl MainLoopClient {
    /// Opens a client. Processes with the same `requester` share their replies; use a name that is stable across
    /// restarts if late replies matter.
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
        let reader = AbortOnDropHandle::new(tokio::spawn(reader));
        Ok(Self { requester, reply_store, waiters, config, clock, _reader: reader })
    }

    /// The requester.
    pub fn requester(&self) -> &Requester {
        &self.requester
    }

    /// The session in which a request is executed.
    pub fn session_of(&self, request_id: &RequestId) -> SessionId {
        session_of(&self.reply_store.storage.namespace, request_id)
    }

    /// Submits a request and waits for the reply.
    pub async fn submit<R: Serialize, O: DeserializeOwned>(
        &self,
        submit: Submission<R>,
    ) -> Result<CompletedRequest<O>> {
        let request_id = submit.request_id.clone().unwrap_or_else(RequestId::random);
        self.submit_measured(request_id.clone(), submit).await?.into_output(&request_id)
    }

    /// Submits a sub-request of a request being executed, within its remaining budget and time. The usage in the
    /// reply is charged to the parent; without a reply, the whole leased amount is charged.
    ///
    /// The other main loop needs its own capacity: a main loop whose running requests all wait for sub-requests to
    /// itself deadlocks.
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
        // If this is dropped, the bus may still publish the request; no worker starts it after its deadline.
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
        let request = serde_json::to_value(&submit.request).map_err(|error| {
            BusError::invalid("request", format!("it cannot be encoded as JSON: {error}"))
        })?;
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
        // Renewed from time to time while requests are sent.
        self.reply_store.register_requester(&self.requester).await?;
        match self.reply_store.bus.publish_outgoing(outgoing).await {
            Ok(_) => Ok(()),
            Err(source) if source.is_transient() => {
                Err(MainLoopError::NotSubmitted { request_id: request_id.clone(), source })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the reply to a request submitted before, by this or another process of the requester.
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
                // The worker replies at the deadline, too, and its reply contains the usage.
                WaitLimit::Deadline => self.find_or_await_reply(&mut pending).await.map(Some),
                // A reply that the reader may have missed.
                WaitLimit::Timeout(_) => self.find_reply_if_available(&pending.request_id).await,
            }
        };
        match timeout(REPLY_GRACE, late).await {
            Ok(Ok(Some(reply))) => Ok(reply),
            Ok(Err(error)) => Err(error),
            Ok(Ok(None)) | Err(_) => Err(pending.timeout_error()),
        }
    }

    /// Looks for an existing reply and waits for a new one. Cancel-safe.
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

    /// Looks for a reply. A transient backend error is not returned: the caller keeps waiting.
    async fn find_reply_if_available(&self, request_id: &RequestId) -> Result<Option<Reply>> {
        match self.find_reply(request_id).await {
            Err(error) if error.is_transient() => {
                warn!(%request_id, %error, "could not look for a stored reply; waiting for it to arrive");
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

    /// The reply to a request, if there is one, also if its caller timed out.
    pub async fn reply<O: DeserializeOwned>(
        &self,
        request_id: &RequestId,
    ) -> Result<Option<CompletedRequest<O>>> {
        match self.find_reply(request_id).await? {
            Some(reply) => reply.into_output(request_id).map(Some),
            None => Ok(None),
        }
    }

    /// Cancels a request of this requester. May be retried after any error.
    pub async fn cancel(&self, request_id: &RequestId) -> Result<CancelOutcome> {
        let now = self.now().await?;
        let reply = Reply::Failed(MainLoopFailed {
            request_id: request_id.to_string(),
            error: "its requester cancelled it".to_owned(),
            kind: RequestFailure::Cancelled,
            failed_at: Some(now.to_rfc3339()),
            ..MainLoopFailed::default()
        });
        // The cancellation is stored as the reply. If a worker replies at the same time, the server keeps the first.
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

    /// Estimates the backend's time without calling the backend.
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

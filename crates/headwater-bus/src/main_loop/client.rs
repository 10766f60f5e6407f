//! Clients: those who ask.
//!
//! Upstream: applications, and requests that need something of other main loops. Downstream: the control stream, and the
//! requester's own stream of replies.
//! Promises: a request that is submitted twice under one id counts once, and both get the same reply; a reply that comes
//! too late for its caller stays, for every process of the requester; a request that is cancelled has that as its reply,
//! unless another came first.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use tokio::time::{Instant, timeout};
use tracing::{Instrument, warn};

use super::config::MainLoopClientConfig;
use super::error::MainLoopError;
use super::replies::{Kept, Replies};
use super::reply::{Completed, Reply};
use super::run::Run;
use super::task::session_of;
use super::waiting::{self, Waiter, Waiters};
use crate::background::AbortOnDrop;
use crate::builtin::{Budget, MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure};
use crate::bus::{EventBus, EventBusExt};
use crate::error::BusError;
use crate::event::{Envelope, Outgoing};
use crate::limits::REPLY_KEEP_MAX;
use crate::metrics;
use crate::name::{EventId, RequestId, Requester, SessionId};

type Result<T, E = MainLoopError> = std::result::Result<T, E>;

/// A request, with its limits.
#[derive(Clone, Debug)]
pub struct Submit<R> {
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

impl<R: Serialize> Submit<R> {
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

    /// How long from now it may take, waiting included.
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
pub enum Cancelled {
    /// It is: if it waits it is never begun, if it runs it is stopped.
    Yes,
    /// It had a reply already.
    TooLate,
}

/// Somebody who waits for a reply, and how long.
struct Waiting {
    waiter: Waiter,
    request_id: RequestId,
    until: Instant,
    limit: Duration,
}

/// Asks main loops of the bus's namespace, in the name of a requester.
pub struct MainLoopClient {
    requester: Requester,
    replies: Replies,
    waiters: Arc<Waiters>,
    config: MainLoopClientConfig,
    _following: AbortOnDrop<()>,
}

impl MainLoopClient {
    /// A client of the bus. Processes with the same `requester` share their replies; take a name that stays the same over
    /// restarts, if late replies matter.
    pub async fn open(
        bus: Arc<dyn EventBus>,
        requester: Requester,
        config: MainLoopClientConfig,
    ) -> Result<Self> {
        bus.registry().check::<MainLoopRequest>()?;
        bus.registry().check::<MainLoopCompleted>()?;
        bus.registry().check::<MainLoopFailed>()?;
        let replies = Replies::new(bus, config.replies).await?;
        replies.list(&requester).await?;
        let (backend, stream) = (Arc::clone(&replies.journal.backend), replies.stream(&requester));
        let stats = backend.stats(&stream).await?;
        let end = stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN);
        let waiters = Arc::<Waiters>::default();
        let following = waiting::follow(backend, stream, end, Arc::clone(&waiters));
        let following = AbortOnDrop(tokio::spawn(following));
        Ok(Self { requester, replies, waiters, config, _following: following })
    }

    /// In whose name it asks.
    pub fn requester(&self) -> &Requester {
        &self.requester
    }

    /// The session in which a request is carried out.
    pub fn session_of(&self, request_id: &RequestId) -> SessionId {
        session_of(&self.replies.journal.namespace, request_id)
    }

    /// Asks, and waits for the reply.
    pub async fn submit<R: Serialize, O: DeserializeOwned>(
        &self,
        submit: Submit<R>,
    ) -> Result<Completed<O>> {
        let request_id = submit.request_id.clone().unwrap_or_else(RequestId::random);
        self.ask(request_id.clone(), submit).await?.into_output(&request_id)
    }

    /// Asks on behalf of a request that is being carried out: within what is left of its budget and its time. What the
    /// reply says was used is charged to it; without a reply, all that was set aside for it.
    ///
    /// The other main loop needs room of its own: one whose requests all wait for requests to itself waits for ever.
    pub async fn submit_within<R: Serialize, O: DeserializeOwned>(
        &self,
        run: &Run,
        mut submit: Submit<R>,
    ) -> Result<Completed<O>> {
        let loan = run.meter().lend(submit.budget.unwrap_or_default())?;
        submit.budget = Some(loan.budget());
        let deadline = match submit.deadline {
            Deadline::None => run.deadline(),
            Deadline::At(deadline) => deadline.min(run.deadline()),
            Deadline::Within(time) => self.now().await?.after(time).min(run.deadline()),
        };
        submit.deadline = Deadline::At(deadline);
        let request_id = submit.request_id.clone().unwrap_or_else(RequestId::random);
        let reply = self.ask(request_id.clone(), submit).await?;
        loan.settle(reply.usage())?;
        reply.into_output(&request_id)
    }

    async fn ask<R: Serialize>(&self, request_id: RequestId, submit: Submit<R>) -> Result<Reply> {
        let began = Instant::now();
        let span = tracing::info_span!("submit", %request_id, requester = %self.requester);
        let reply = self.ask_in_time(request_id, submit).instrument(span).await;
        let result = match &reply {
            Ok(Reply::Completed(_)) => "completed",
            Ok(Reply::Failed(_)) => "failed",
            Err(MainLoopError::TimedOut { .. }) => "timed_out",
            Err(_) => "error",
        };
        metrics::submitted(result, began.elapsed());
        reply
    }

    async fn ask_in_time<R: Serialize>(
        &self,
        request_id: RequestId,
        submit: Submit<R>,
    ) -> Result<Reply> {
        let limit = submit.timeout.unwrap_or(self.config.timeout);
        let waiting = self.begin_to_wait(&request_id, limit)?;
        self.send(&request_id, submit).await?;
        self.wait_for(waiting).await
    }

    async fn send<R: Serialize>(&self, request_id: &RequestId, submit: Submit<R>) -> Result<()> {
        let request = serde_json::to_value(&submit.request)
            .map_err(|error| BusError::invalid("a request", format!("no JSON: {error}")))?;
        let now = self.now().await?;
        let deadline = match submit.deadline {
            Deadline::None => None,
            Deadline::At(deadline) => Some(deadline),
            Deadline::Within(time) => Some(now.after(time)),
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
        let outgoing = Outgoing::new(event)?.with_id(event_id);
        // Listed again now and then, for as long as it asks.
        self.replies.list(&self.requester).await?;
        match self.replies.bus.publish_outgoing(outgoing).await {
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
    ) -> Result<Completed<O>> {
        let waiting = self.begin_to_wait(request_id, limit)?;
        self.wait_for(waiting).await?.into_output(request_id)
    }

    fn begin_to_wait(&self, request_id: &RequestId, limit: Duration) -> Result<Waiting> {
        let limit = limit.min(REPLY_KEEP_MAX);
        Ok(Waiting {
            waiter: self.waiters.add(request_id)?,
            request_id: request_id.clone(),
            until: Instant::now() + limit,
            limit,
        })
    }

    async fn wait_for(&self, mut waiting: Waiting) -> Result<Reply> {
        let request_id = &waiting.request_id;
        // It may have been there before anybody waited.
        if let Some(reply) = self.look_if_possible(request_id).await? {
            return Ok(reply);
        }
        let left = waiting.until.saturating_duration_since(Instant::now());
        if let Ok(envelope) = timeout(left, waiting.waiter.arrived()).await {
            return self.read(request_id, &envelope);
        }
        // What the reader may have missed.
        self.look_if_possible(request_id).await?.ok_or_else(|| MainLoopError::TimedOut {
            request_id: request_id.clone(),
            after: waiting.limit,
        })
    }

    /// Looks for a reply. A backend that does not answer is no reason to stop waiting: the request is on its way.
    async fn look_if_possible(&self, request_id: &RequestId) -> Result<Option<Reply>> {
        match self.look(request_id).await {
            Err(error) if error.is_transient() => {
                warn!(%request_id, %error, "a reply cannot be looked for");
                Ok(None)
            }
            found => found,
        }
    }

    fn read(&self, request_id: &RequestId, envelope: &Envelope) -> Result<Reply> {
        Reply::from_envelope(self.replies.bus.registry(), envelope).map_err(|error| {
            let problem = error.to_string();
            MainLoopError::Unreadable { request_id: request_id.clone(), problem }
        })
    }

    async fn look(&self, request_id: &RequestId) -> Result<Option<Reply>> {
        match self.replies.find(&self.requester, request_id).await? {
            None => Ok(None),
            Some(Kept::Reply(reply)) => Ok(Some(reply)),
            Some(Kept::Gone) => Err(MainLoopError::ReplyGone { request_id: request_id.clone() }),
        }
    }

    /// The reply to a request, if it is there: also one that came after its caller had gone.
    pub async fn reply<O: DeserializeOwned>(
        &self,
        request_id: &RequestId,
    ) -> Result<Option<Completed<O>>> {
        match self.look(request_id).await? {
            Some(reply) => reply.into_output(request_id).map(Some),
            None => Ok(None),
        }
    }

    /// Cancels a request of this requester, wherever it is. May be repeated after any error.
    pub async fn cancel(&self, request_id: &RequestId) -> Result<Cancelled> {
        let now = self.now().await?;
        let reply = Reply::Failed(MainLoopFailed {
            request_id: request_id.to_string(),
            error: "its requester cancelled it".to_owned(),
            kind: RequestFailure::Cancelled,
            failed_at: Some(now.to_rfc3339()),
            ..MainLoopFailed::default()
        });
        // The cancellation is the reply. Of it and what a worker may write at the same time, the server takes one.
        match self.replies.store(&self.requester, request_id, &reply).await? {
            Kept::Reply(Reply::Failed(failed)) if failed.kind == RequestFailure::Cancelled => {
                self.replies.announce(request_id, &Reply::Failed(failed)).await?;
                Ok(Cancelled::Yes)
            }
            Kept::Reply(_) | Kept::Gone => Ok(Cancelled::TooLate),
        }
    }

    async fn now(&self) -> Result<Timestamp> {
        Ok(self.replies.journal.backend.now().await?)
    }
}

impl fmt::Debug for MainLoopClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MainLoopClient")
            .field("requester", &self.requester)
            .field("journal", &self.replies.journal)
            .finish_non_exhaustive()
    }
}

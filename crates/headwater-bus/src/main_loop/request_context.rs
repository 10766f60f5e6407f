//! Runs: one request in the hands of the code that carries it out.
//!
//! Upstream: `worker`. Downstream: the application's [`MainLoop`].

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use headwater_stream::clock::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use tokio::time::Instant;

use super::budget::Meter;
use super::error::ExecuteError;
use crate::handler::panic_text;
use crate::name::RequestId;
use crate::session::Session;

/// Carries out requests. What it does is its own business; that it is done, once in effect, in its own session and
/// within its limits, is not.
///
/// ```
/// use async_trait::async_trait;
/// use headwater_bus::{ExecuteError, MainLoop, RequestContext, Session};
///
/// struct Echo;
///
/// #[async_trait]
/// impl MainLoop for Echo {
///     type Request = String;
///     type Output = String;
///
///     async fn execute(
///         &self,
///         request: String,
///         _session: &Session,
///         context: &RequestContext,
///     ) -> Result<String, ExecuteError> {
///         context.meter().charge_call()?;
///         Ok(request)
///     }
/// }
/// ```
#[async_trait]
pub trait MainLoop: Send + Sync + 'static {
    /// What is asked for.
    type Request: DeserializeOwned + Send + 'static;
    /// What comes of it, at most 1 MiB as JSON.
    type Output: Serialize + Send + 'static;

    /// Carries out one request. The session is the request's own and the same for every try of it, in whatever
    /// process: what an earlier try published is there.
    ///
    /// The call is dropped when the request is cancelled, its deadline passes, its budget is broken, or another process
    /// has taken it over. A panic is a failed try.
    async fn execute(
        &self,
        request: Self::Request,
        session: &Session,
        context: &RequestContext,
    ) -> Result<Self::Output, ExecuteError>;
}

/// What a request brings along: its limits, and what it may use.
pub struct RequestContext {
    pub(super) request_id: RequestId,
    pub(super) attempt: u32,
    pub(super) meter: Meter,
    pub(super) deadline: Timestamp,
    pub(super) ends_at: Instant,
    pub(super) resources: Json,
}

impl RequestContext {
    /// The request.
    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// Which try this is, from 1, in this process.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// What charges are made to. All tries in this process share it.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// When it ends, by the clock of the backend: at the request's deadline, or after the longest time any may take.
    pub fn deadline(&self) -> Timestamp {
        self.deadline
    }

    /// How much time is left.
    pub fn time_left(&self) -> Duration {
        self.ends_at.saturating_duration_since(Instant::now())
    }

    /// What the request may use, as its requester wrote it.
    pub fn resources(&self) -> &Json {
        &self.resources
    }
}

impl fmt::Debug for RequestContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestContext")
            .field("request_id", &self.request_id)
            .field("attempt", &self.attempt)
            .field("meter", &self.meter)
            .finish_non_exhaustive()
    }
}

/// What became of one try.
#[derive(Debug)]
pub(super) enum AttemptResult {
    Output(Json),
    Failed(ExecuteError),
    Panicked(String),
}

/// A main loop that forgot its types.
#[async_trait]
pub(super) trait DynMainLoop: Send + Sync {
    /// Whether the main loop understands the request.
    fn check(&self, request: &Json) -> Result<(), String>;

    async fn execute(
        &self,
        request: &Json,
        session: &Session,
        context: &RequestContext,
    ) -> AttemptResult;
}

pub(super) struct TypedMainLoop<M>(pub(super) M);

impl<M: MainLoop> TypedMainLoop<M> {
    async fn try_once(
        &self,
        request: &Json,
        session: &Session,
        context: &RequestContext,
    ) -> Result<Json, ExecuteError> {
        let request = M::Request::deserialize(request).map_err(|error| {
            ExecuteError::give_up(format!("the request cannot be read: {error}"))
        })?;
        let output = self.0.execute(request, session, context).await?;
        serde_json::to_value(output)
            .map_err(|error| ExecuteError::give_up(format!("the output is no JSON: {error}")))
    }
}

#[async_trait]
impl<M: MainLoop> DynMainLoop for TypedMainLoop<M> {
    fn check(&self, request: &Json) -> Result<(), String> {
        M::Request::deserialize(request).map(drop).map_err(|error| error.to_string())
    }

    async fn execute(
        &self,
        request: &Json,
        session: &Session,
        context: &RequestContext,
    ) -> AttemptResult {
        let trying = AssertUnwindSafe(self.try_once(request, session, context)).catch_unwind();
        let mut trying = CatchDropPanic(Some(Box::pin(trying)));
        let Some(future) = trying.0.as_mut() else { return AttemptResult::Panicked(String::new()) };
        match future.await {
            Ok(Ok(output)) => AttemptResult::Output(output),
            Ok(Err(error)) => AttemptResult::Failed(error),
            Err(panic) => AttemptResult::Panicked(panic_message(&*panic)),
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    format!("it panic_message: {}", panic_text(panic))
}

/// A future whose values may panic when they are dropped, too.
struct CatchDropPanic<F>(Option<F>);

impl<F> Drop for CatchDropPanic<F> {
    fn drop(&mut self) {
        let future = self.0.take();
        let dropped = std::panic::catch_unwind(AssertUnwindSafe(move || drop(future)));
        if let Err(panic) = dropped {
            tracing::warn!(error = panic_text(&*panic), "a run panic_message while it was dropped");
        }
    }
}

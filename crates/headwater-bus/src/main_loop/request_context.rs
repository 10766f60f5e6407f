//! The application's [`MainLoop`] and the context of a request that is passed to it.
//!
//! Upstream: `executor`. Downstream: the application.

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

/// Executes requests. The library ensures that each request is executed with one reply, in its own session and within
/// its limits.
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
    /// The decoded request.
    type Request: DeserializeOwned + Send + 'static;
    /// The output; at most 1 MiB as JSON.
    type Output: Serialize + Send + 'static;

    /// Executes one request. The session belongs to the request and is the same for every attempt in any process: it
    /// contains the events that earlier attempts published.
    ///
    /// The future is dropped when the request is cancelled, its deadline passes, its budget is exceeded, or another
    /// process takes it over. A panic is a failed attempt.
    async fn execute(
        &self,
        request: Self::Request,
        session: &Session,
        context: &RequestContext,
    ) -> Result<Self::Output, ExecuteError>;
}

/// Context of a request: its id, limits and resources.
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

    /// Number of this attempt in this process, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Meter of the request's budget; shared by all attempts in this process.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// End of the run, by the clock of the backend: the request's deadline or `run_timeout`, whichever is earlier.
    pub fn deadline(&self) -> Timestamp {
        self.deadline
    }

    /// Remaining time.
    pub fn time_left(&self) -> Duration {
        self.ends_at.saturating_duration_since(Instant::now())
    }

    /// The resources, as the requester sent them.
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

/// Result of one attempt.
#[derive(Debug)]
pub(super) enum AttemptResult {
    Output(Json),
    Failed(ExecuteError),
    Panicked(String),
}

/// A main loop with its types erased.
#[async_trait]
pub(super) trait DynMainLoop: Send + Sync {
    /// Checks that the request can be decoded.
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
            ExecuteError::give_up(format!("the request cannot be decoded: {error}"))
        })?;
        let output = self.0.execute(request, session, context).await?;
        serde_json::to_value(output).map_err(|error| {
            ExecuteError::give_up(format!("the output cannot be encoded as JSON: {error}"))
        })
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
    format!("it panicked: {}", panic_text(panic))
}

/// Catches a panic while the future is dropped.
struct CatchDropPanic<F>(Option<F>);

impl<F> Drop for CatchDropPanic<F> {
    fn drop(&mut self) {
        let future = self.0.take();
        let dropped = std::panic::catch_unwind(AssertUnwindSafe(move || drop(future)));
        if let Err(panic) = dropped {
            tracing::warn!(
                error = panic_text(&*panic),
                "main loop panicked while its run was dropped"
            );
        }
    }
}

//! Event handlers, and how they are run in isolation.
//!
//! Upstream: applications. Downstream: `live` and durable subscriptions run them.
//! Guarantees: an error, a panic or a timeout of a handler is reported as a failure with a reason and affects nothing
//! else.

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::future::{BoxFuture, FutureExt};
use headwater_queue::Outcome;
use tokio::time::timeout;
use tracing::Instrument;

use crate::error::{BusError, DecodeError, FailureKind, Result};
use crate::event::{Envelope, Event, EventValue, ReceivedEvent, Scope};
use crate::metrics;
use crate::registry::EventRegistry;
use crate::trace;

tokio::task_local! {
    static HANDLING: ();
}

/// Whether the current task is running a handler.
pub(crate) fn is_in_handler() -> bool {
    HANDLING.try_with(|()| ()).is_ok()
}

/// Handles events of one type. Implemented by every `Fn(ReceivedEvent<E>) -> impl Future` whose output is an
/// [`Outcome`], `()`, or a `Result` of one of them.
#[async_trait]
pub trait EventHandler<E: Event>: Send + Sync + 'static {
    /// Handles one event.
    async fn handle(&self, event: ReceivedEvent<E>) -> Outcome;
}

#[async_trait]
impl<E, F, Fut> EventHandler<E> for F
where
    E: Event,
    F: Fn(ReceivedEvent<E>) -> Fut + Send + Sync + 'static,
    Fut: Future + Send,
    Fut::Output: Into<Outcome>,
{
    async fn handle(&self, event: ReceivedEvent<E>) -> Outcome {
        self(event).await.into()
    }
}

/// The handlers of one subscription, in the order in which they run.
#[derive(Clone, Default)]
pub struct Handlers {
    pub(crate) list: Vec<TypedHandler>,
}

impl Handlers {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a handler for events of type `E`.
    pub fn on<E: Event>(mut self, handler: impl EventHandler<E>) -> Self {
        self.list.push(TypedHandler::new(handler));
        self
    }

    /// Checks that there is at least one handler and that all types are registered.
    pub(crate) fn check(&self, registry: &EventRegistry) -> Result<()> {
        if self.list.is_empty() {
            return Err(BusError::invalid("handlers", "the list is empty"));
        }
        self.list.iter().try_for_each(|handler| (handler.check)(registry))
    }

    /// The scope shared by all handlers; an error if they differ.
    pub(crate) fn common_scope(&self) -> Result<Scope> {
        let mut scopes = self.list.iter().map(|handler| handler.scope);
        let first =
            scopes.next().ok_or_else(|| BusError::invalid("handlers", "the list is empty"))?;
        if scopes.any(|scope| scope != first) {
            let problem = "session and namespace scopes are mixed; a group reads one stream";
            return Err(BusError::invalid("handlers of a durable subscription", problem));
        }
        Ok(first)
    }
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.list.iter().map(|handler| handler.event_type)).finish()
    }
}

/// A handler with its event type erased.
#[derive(Clone)]
pub(crate) struct TypedHandler {
    pub(crate) event_type: &'static str,
    pub(crate) scope: Scope,
    check: fn(&EventRegistry) -> Result<()>,
    run: Arc<dyn Fn(DeliveredEvent) -> BoxFuture<'static, Outcome> + Send + Sync>,
}

/// A decoded event to be passed to handlers.
#[derive(Clone)]
pub(crate) struct DeliveredEvent {
    pub(crate) value: EventValue,
    pub(crate) envelope: Arc<Envelope>,
}

impl DeliveredEvent {
    /// Decodes the event in an envelope.
    pub(crate) fn decode(
        registry: &EventRegistry,
        envelope: Envelope,
    ) -> Result<Self, DecodeError> {
        let value = registry.decode_any(&envelope)?;
        Ok(Self { value, envelope: Arc::new(envelope) })
    }
}

/// Result of one run of a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HandlerResult {
    Done,
    /// It failed. `after` and `is_permanent` are set by the handler.
    Failed {
        kind: FailureKind,
        reason: String,
        after: Option<Duration>,
        is_permanent: bool,
    },
    /// The handler releases the event for another process.
    Release,
}

impl TypedHandler {
    fn new<E: Event>(handler: impl EventHandler<E>) -> Self {
        let handler = Arc::new(handler);
        let run = move |delivered: DeliveredEvent| -> BoxFuture<'static, Outcome> {
            let handler = Arc::clone(&handler);
            let event = delivered.value.downcast::<E>();
            let event = event.expect("the registry allows one Rust type for each name");
            let received = ReceivedEvent { event, envelope: delivered.envelope };
            Box::pin(async move { handler.handle(received).await })
        };
        Self {
            event_type: E::TYPE,
            scope: E::SCOPE,
            check: |registry| registry.check::<E>(),
            run: Arc::new(run),
        }
    }

    /// Runs the handler in the trace of the event. Cancel-safe if the handler is.
    pub(crate) async fn run(
        &self,
        delivered: DeliveredEvent,
        kind: &'static str,
        limit: Duration,
    ) -> HandlerResult {
        let began = Instant::now();
        let envelope = Arc::clone(&delivered.envelope);
        let span = tracing::debug_span!(
            "handle",
            event_type = self.event_type,
            kind,
            event_id = %envelope.event_id,
            trace_id = envelope.trace_id.as_deref(),
            parent_span_id = envelope.span_id.as_deref(),
        );
        // Both creating and polling the future is application code that may panic.
        let running = AssertUnwindSafe(async { (self.run)(delivered).await }).catch_unwind();
        let limited = timeout(limit, running).instrument(span);
        let answer = HANDLING.scope((), trace::within(envelope.trace(), limited)).await;
        let handled = match answer {
            Ok(Ok(outcome)) => HandlerResult::from(outcome),
            Ok(Err(panic)) => {
                let reason = format!("the handler panicked: {}", panic_text(&*panic));
                HandlerResult::failed(FailureKind::Panicked, reason)
            }
            Err(_) => {
                let reason = format!("the handler exceeded its timeout of {limit:?}");
                HandlerResult::failed(FailureKind::TimedOut, reason)
            }
        };
        let failed = matches!(handled, HandlerResult::Failed { .. });
        metrics::consumed(self.event_type, kind, began.elapsed(), failed);
        handled
    }
}

impl HandlerResult {
    fn failed(kind: FailureKind, reason: String) -> Self {
        Self::Failed { kind, reason, after: None, is_permanent: false }
    }
}

impl From<Outcome> for HandlerResult {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Release => Self::Release,
            Outcome::Retry { after, reason } => {
                Self::Failed { kind: FailureKind::Failed, reason, after, is_permanent: false }
            }
            Outcome::DeadLetter { reason } => {
                Self::Failed { kind: FailureKind::Failed, reason, after: None, is_permanent: true }
            }
        }
    }
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no panic message")
}

//! The trait of all buses: subscribe, publish, check health, close.
//!
//! Upstream: applications. Downstream: `streamed` implements it.
//! Guarantees: stated one by one in the conformance suite, which every bus passes.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use headwater_queue::RetryPolicy;
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;

use crate::breaker::BreakerState;
use crate::error::{BusError, HandlerFailure, Result};
use crate::event::{Event, OutgoingEvent};
use crate::handler::{EventHandler, Handlers};
use crate::name::{EventId, SessionId, SubscriptionId};
use crate::registry::EventRegistry;
use crate::session_backend::SessionBackend;

/// An event bus. [`EventBusExt`] has the typed calls.
#[async_trait]
pub trait EventBus: Send + Sync {
    /// The event types that the bus accepts.
    fn registry(&self) -> &EventRegistry;

    /// Subscribes handlers. Every event published after this call returns is delivered.
    ///
    /// A bus has one durable subscription per stream and group: pass all handlers in one call, so that no event arrives
    /// before its handler is registered. Events without a registered handler are acknowledged and skipped.
    async fn subscribe_handlers(
        &self,
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<SubscriptionId>;

    /// Ends a subscription. Returns whether it existed. Running live handlers are not interrupted; the call waits for
    /// running durable handlers.
    async fn unsubscribe(&self, subscription: SubscriptionId) -> Result<bool>;

    /// Publishes events in order, with one append per stream. `Err` means that no event was published. Otherwise
    /// there is one result per event: events of different sessions are in different streams, and one append may fail
    /// while another succeeds.
    ///
    /// Each event is stored first. Then the live handlers of this process run once each, in subscription order; a
    /// failed handler does not stop the others. Durable subscriptions read the event from the stream.
    ///
    /// The work continues if the call is dropped.
    async fn publish_all(&self, events: Vec<OutgoingEvent>) -> Result<Vec<Result<PublishResult>>>;

    /// The storage of this bus's sessions.
    async fn session_backend(&self) -> Result<SessionBackend>;

    /// Checks and returns the current health.
    async fn health(&self) -> BusHealth;

    /// Rejects new events, waits for publishes and handlers in flight, and stops. Idempotent. A handler of the same
    /// bus must not await it: it would wait for itself until the drain timeout.
    async fn close(&self) -> Result<()>;
}

/// Typed calls for every [`EventBus`].
pub trait EventBusExt: EventBus {
    /// Subscribes a handler for one event type.
    fn subscribe<E: Event>(
        &self,
        subscribe: SubscribeOptions,
        handler: impl EventHandler<E>,
    ) -> impl Future<Output = Result<SubscriptionId>> + Send {
        let handlers = Handlers::new().on::<E>(handler);
        async move { self.subscribe_handlers(subscribe, handlers).await }
    }

    /// Publishes one event. See [`EventBus::publish_all`].
    fn publish<E: Event>(&self, event: E) -> impl Future<Output = Result<PublishResult>> + Send {
        let outgoing = OutgoingEvent::new(event);
        async move { self.publish_outgoing(outgoing?).await }
    }

    /// Publishes one event with its own id or trace.
    fn publish_outgoing(
        &self,
        event: OutgoingEvent,
    ) -> impl Future<Output = Result<PublishResult>> + Send {
        async move {
            let mut results = self.publish_all(vec![event]).await?;
            results.pop().ok_or(BusError::Closed)?
        }
    }

    /// Publishes events of one type in order. See [`EventBus::publish_all`].
    fn publish_batch<E: Event>(
        &self,
        events: Vec<E>,
    ) -> impl Future<Output = Result<Vec<Result<PublishResult>>>> + Send {
        let outgoing: Result<Vec<OutgoingEvent>> =
            events.into_iter().map(OutgoingEvent::new).collect();
        async move { self.publish_all(outgoing?).await }
    }
}

impl<B: EventBus + ?Sized> EventBusExt for B {}

/// Options of a subscription.
#[derive(Clone, Debug)]
pub struct SubscribeOptions {
    /// Live or durable.
    pub kind: SubscriptionKind,
    /// Session of session-scoped events; `None` (default): the session that the bus was opened for.
    ///
    /// If both are `None`, a live subscription receives the events of all sessions that are published through this bus.
    pub session: Option<SessionId>,
    /// Timeout of a handler. Default: 30 s (live), 5 min (durable).
    pub handler_timeout: Duration,
    /// Durable: retry policy of failed events. Default: 5 attempts, backoff 1 s doubling up to 60 s, with jitter.
    pub retry: RetryPolicy,
    /// Durable: events handled at once by this process. Default: 64. Above 1, events are not ordered.
    pub concurrency: usize,
    /// Durable: events prefetched by this process; other processes cannot get them. `None` (default): same as
    /// `concurrency`.
    pub read_ahead: Option<usize>,
    /// Durable, on streams: idle time after which events pending for a foreign consumer of the group are reclaimed.
    /// Events of crashed processes of this library are reclaimed as soon as the crash is detected. Default: 5 min.
    pub reclaim_idle: Duration,
}

/// Who receives an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubscriptionKind {
    /// Every subscribed process, once. Events published while a process is not subscribed are not delivered to it.
    Live,
    /// One process of this group, at least once, also if it is published while no process is subscribed. An event whose
    /// handler fails stays unacknowledged and is retried; after the last attempt it becomes a dead letter.
    Durable(String),
}

impl SubscribeOptions {
    /// A live subscription: every process receives every event.
    pub fn live() -> Self {
        Self {
            kind: SubscriptionKind::Live,
            session: None,
            handler_timeout: Duration::from_secs(30),
            retry: RetryPolicy { max_attempts: Some(5), ..RetryPolicy::default() },
            concurrency: 64,
            read_ahead: None,
            reclaim_idle: Duration::from_secs(5 * 60),
        }
    }

    /// A durable subscription: one process of the group receives each event. The consumer group is named
    /// `wink:cg:SCOPE:LABEL`, where `SCOPE` is the session or namespace.
    pub fn durable(label: impl Into<String>) -> Self {
        Self {
            kind: SubscriptionKind::Durable(label.into()),
            handler_timeout: Duration::from_secs(5 * 60),
            ..Self::live()
        }
    }

    /// Selects the session.
    pub fn session(mut self, session: SessionId) -> Self {
        self.session = Some(session);
        self
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.handler_timeout.is_zero() {
            return Err(BusError::invalid("handler_timeout", "must be greater than zero"));
        }
        if self.reclaim_idle.is_zero() {
            return Err(BusError::invalid("reclaim_idle", "must be greater than zero"));
        }
        if self.concurrency == 0 || self.concurrency > CONCURRENCY_MAX {
            let problem = format!("{}; 1 to {CONCURRENCY_MAX}", self.concurrency);
            return Err(BusError::invalid("concurrency", problem));
        }
        if let Some(count) = self.read_ahead.filter(|count| *count > CONCURRENCY_MAX) {
            return Err(BusError::invalid(
                "read_ahead",
                format!("{count}; 0 to {CONCURRENCY_MAX}"),
            ));
        }
        Ok(())
    }
}

/// Largest `concurrency` and `read_ahead` of one durable subscription.
const CONCURRENCY_MAX: usize = 10_000;

/// Result of publishing one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishResult {
    /// Id of the event.
    pub event_id: EventId,
    /// Where the event is stored.
    pub stored: StoreOutcome,
    /// Number of live handlers of this process that ran.
    pub handlers_invoked: usize,
    /// Handlers that failed.
    pub failures: Vec<HandlerFailure>,
}

/// Where a published event is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// In its stream, at this entry.
    Entry(EntryId),
    /// Already in its stream, at this entry: an event with the same id was published before. No handler ran.
    Duplicate(EntryId),
    /// In the spool of this process, because the backend is unavailable. It is moved to its stream later.
    Spooled,
    /// Only in this process: the backend is unavailable and the event was not sent
    /// ([`FailurePolicy::LocalOnly`](crate::FailurePolicy::LocalOnly)). No other process receives it.
    LocalOnly,
    /// In this process, and possibly in its stream: it was sent, and the backend did not confirm it
    /// ([`FailurePolicy::LocalOnly`](crate::FailurePolicy::LocalOnly)). Other processes may receive it.
    /// Publishing it again under the same id is idempotent.
    Unconfirmed,
}

impl StoreOutcome {
    /// The entry id, if the event is in its stream.
    pub fn entry_id(self) -> Option<EntryId> {
        match self {
            Self::Entry(id) | Self::Duplicate(id) => Some(id),
            Self::Spooled | Self::LocalOnly | Self::Unconfirmed => None,
        }
    }

    /// Whether the event was not published before.
    pub(crate) fn is_new(self) -> bool {
        !matches!(self, Self::Duplicate(_))
    }

    /// Label in metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Entry(_) => "stored",
            Self::Duplicate(_) => "duplicate",
            Self::Spooled => "spooled",
            Self::LocalOnly => "local",
            Self::Unconfirmed => "unconfirmed",
        }
    }
}

impl PublishResult {
    /// Whether all handlers succeeded.
    pub fn ok(&self) -> bool {
        self.failures.is_empty()
    }

    /// Returns [`BusError::Handlers`] if a handler failed.
    pub fn into_result(self) -> Result<Self> {
        if self.ok() {
            return Ok(self);
        }
        Err(BusError::Handlers { event_id: self.event_id, failures: self.failures })
    }

    /// The entry id, if the event is in its stream.
    pub fn entry_id(&self) -> Option<EntryId> {
        self.stored.entry_id()
    }
}

/// Health of a bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BusHealth {
    /// Whether the backend answers.
    pub connected: bool,
    /// Round-trip time of the check.
    pub latency: Option<Duration>,
    /// The streams of the bus, by name.
    pub streams: BTreeMap<String, StreamHealth>,
    /// State of the circuit breaker.
    pub breaker: BreakerState,
    /// The spool, if the bus has one.
    pub spool: Option<SpoolHealth>,
    /// Number of parked entries (unknown type, unknown version or invalid payload).
    pub parked: u64,
    /// How often, since the bus was opened, live subscriptions fell so far behind that entries may have been trimmed
    /// before they were read. Use larger batches, faster handlers or a longer retention.
    pub missed: u64,
    /// Time of the check, by the clock of the bus.
    pub last_check: Timestamp,
    /// Error of the check, if it failed.
    pub problem: Option<String>,
}

/// Health of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamHealth {
    /// Number of entries.
    pub length: u64,
    /// Consumer groups, by name.
    pub groups: BTreeMap<String, GroupHealth>,
}

/// Health of a consumer group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupHealth {
    /// Entries delivered and not acknowledged.
    pub pending: u64,
    /// Entries not delivered yet, if the server reports it.
    pub lag: Option<u64>,
}

/// Fill level of a spool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpoolHealth {
    /// Events in the spool.
    pub events: usize,
    /// Their size in bytes.
    pub bytes: u64,
    /// Limit of their size in bytes.
    pub max_bytes: u64,
    /// Events permanently rejected by their streams, now or before a restart
    /// ([`StreamedBus::rejected`](crate::StreamedBus::rejected)).
    pub rejected: u64,
}

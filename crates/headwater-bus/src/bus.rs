//! The one trait of all buses: subscribe, publish, look, close.
//!
//! Upstream: applications, which do not care which bus they have. Downstream: `local` and `streamed`.
//! Promises: the suite in `conformance` states them one by one; every bus passes it.

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

/// Where events are published and handled. [`EventBusExt`] has the typed calls.
#[async_trait]
pub trait EventBus: Send + Sync {
    /// The event types it allows.
    fn registry(&self) -> &EventRegistry;

    /// Handles events from now on. When it returns, nothing that is published later is missed.
    ///
    /// A bus has one durable subscription per stream and group: give it all handlers in one call, so that no event
    /// comes before its handler is there. Events of types without a handler are none of the group's business.
    async fn subscribe_handlers(
        &self,
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<SubscriptionId>;

    /// Ends a subscription. Returns whether there was one. A handler that runs is finished by whoever runs it; a durable
    /// one is waited for.
    async fn unsubscribe(&self, subscription: SubscriptionId) -> Result<bool>;

    /// Publishes events in order, and in as few steps as there are streams. An error means that none was published; else
    /// there is a result for each event: events of different sessions lie in different streams, and one may take them
    /// when another does not.
    ///
    /// An event is stored first. Then the live handlers of this process run, in the order of their subscriptions, each
    /// once; one that fails does not keep the others from running. Durable subscriptions get it from the stream.
    ///
    /// The work goes on to its end if the call is dropped.
    async fn publish_all(&self, events: Vec<OutgoingEvent>) -> Result<Vec<Result<PublishResult>>>;

    /// Where the sessions of this bus lie. From the first call on, a bus that stores nothing else stores their events.
    async fn session_backend(&self) -> Result<SessionBackend>;

    /// How the bus is now.
    async fn health(&self) -> BusHealth;

    /// Takes no more events, waits until what was begun has ended, handlers included, and stops. Closing twice is fine.
    /// Must not be awaited by a handler of the same bus: it would wait for itself until its time is up.
    async fn close(&self) -> Result<()>;
}

/// The typed calls of every bus.
pub trait EventBusExt: EventBus {
    /// Handles events of one type.
    fn subscribe<E: Event>(
        &self,
        subscribe: SubscribeOptions,
        handler: impl EventHandler<E>,
    ) -> impl Future<Output = Result<SubscriptionId>> + Send {
        let handlers = Handlers::new().on::<E>(handler);
        async move { self.subscribe_handlers(subscribe, handlers).await }
    }

    /// Publishes an event. See [`EventBus::publish_all`].
    fn publish<E: Event>(&self, event: E) -> impl Future<Output = Result<PublishResult>> + Send {
        let outgoing = OutgoingEvent::new(event);
        async move { self.publish_outgoing(outgoing?).await }
    }

    /// Publishes an event that has an id or a trace of its own.
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

/// How to subscribe.
#[derive(Clone, Debug)]
pub struct SubscribeOptions {
    /// Who gets an event.
    pub kind: SubscriptionKind,
    /// For events of sessions, which session; `None` (default) is the one the bus was opened for.
    ///
    /// A live subscription without either sees the events of all sessions that are published through this very bus.
    pub session: Option<SessionId>,
    /// How long a handler may take; then it has failed. Default: 30 s, durable ones 5 min.
    pub handler_timeout: Duration,
    /// Durable: when and how often a failed event is tried again. Default: 5 tries, 1 s doubling up to 60 s, with jitter.
    pub retry: RetryPolicy,
    /// Durable: events in the hands of this process at once. Default: 64. There is no order between them above 1.
    pub concurrency: usize,
    /// Durable: events read ahead, so that nobody waits for a round trip. They are kept from other processes. `None`
    /// (default): as many as `concurrency`.
    pub read_ahead: Option<usize>,
    /// Durable, on streams: events that another program took for the group and left without a sign for this long are taken
    /// over. Those of our own processes that died are taken over as soon as that is known. Default: 5 min.
    pub reclaim_idle: Duration,
}

/// Who gets an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubscriptionKind {
    /// Every process that is subscribed, once. What is published while a process is not there passes it by.
    Live,
    /// One process of this group, at least once, also if it is published while none is there. An event whose handler
    /// fails is not acknowledged but tried again, and at last becomes a dead letter.
    Durable(String),
}

impl SubscribeOptions {
    /// Every process gets every event.
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

    /// One process of the group gets an event. On the stream, the group `label` of the session or namespace `place` is
    /// called `wink:cg:PLACE:LABEL`.
    pub fn durable(label: impl Into<String>) -> Self {
        Self {
            kind: SubscriptionKind::Durable(label.into()),
            handler_timeout: Duration::from_secs(5 * 60),
            ..Self::live()
        }
    }

    /// Listens to this session.
    pub fn session(mut self, session: SessionId) -> Self {
        self.session = Some(session);
        self
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.handler_timeout.is_zero() {
            return Err(BusError::invalid("handler_timeout", "it is zero"));
        }
        if self.reclaim_idle.is_zero() {
            return Err(BusError::invalid("reclaim_idle", "it is zero"));
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

/// Events of one durable subscription in the hands of one process.
const CONCURRENCY_MAX: usize = 10_000;

/// What came of publishing an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishResult {
    /// What the event is known by.
    pub event_id: EventId,
    /// Where it is now.
    pub stored: StoreOutcome,
    /// How many live handlers of this process ran.
    pub handlers_invoked: usize,
    /// Those of them that failed.
    pub failures: Vec<HandlerFailure>,
}

/// Where a published event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// In its stream, for everybody.
    Entry(EntryId),
    /// In the stream before: an event with its id was published already. No handler ran. On a local bus, which may store
    /// nothing, the entry may be `EntryId::MIN`, which is none.
    Duplicate(EntryId),
    /// In the spool of this process, on its way to the stream. The backend is away.
    Spooled,
    /// Only in this process: the bus is local, or the backend was unavailable and the event was not sent
    /// ([`FailurePolicy::LocalOnly`](crate::FailurePolicy::LocalOnly)). No other process ever sees it.
    LocalOnly,
    /// In this process, and perhaps in its stream: it was sent and the backend did not confirm it
    /// ([`FailurePolicy::LocalOnly`](crate::FailurePolicy::LocalOnly)). Other processes may see it.
    /// Published again under the same id, it counts once.
    Unconfirmed,
}

impl StoreOutcome {
    /// Its entry, if it is in its stream.
    pub fn entry_id(self) -> Option<EntryId> {
        match self {
            Self::Duplicate(EntryId::MIN) => None,
            Self::Entry(id) | Self::Duplicate(id) => Some(id),
            Self::Spooled | Self::LocalOnly | Self::Unconfirmed => None,
        }
    }

    /// Whether it was not published before.
    pub(crate) fn is_new(self) -> bool {
        !matches!(self, Self::Duplicate(_))
    }

    /// How metrics call it.
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
    /// Whether no handler failed.
    pub fn ok(&self) -> bool {
        self.failures.is_empty()
    }

    /// Makes an error of failed handlers.
    pub fn into_result(self) -> Result<Self> {
        if self.ok() {
            return Ok(self);
        }
        Err(BusError::Handlers { event_id: self.event_id, failures: self.failures })
    }

    /// Its entry, if it is in its stream.
    pub fn entry_id(&self) -> Option<EntryId> {
        self.stored.entry_id()
    }
}

/// How a bus is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BusHealth {
    /// Whether the backend answers.
    pub connected: bool,
    /// How long it took to.
    pub latency: Option<Duration>,
    /// The streams the bus works with, by name.
    pub streams: BTreeMap<String, StreamHealth>,
    /// What the breaker does with calls.
    pub breaker: BreakerState,
    /// The spool, if there is one.
    pub spool: Option<SpoolHealth>,
    /// How many entries of unknown or unfit types are parked.
    pub parked: u64,
    /// How often, since the bus was opened, its live subscriptions came so late that entries may have been trimmed before
    /// they read them. Read in larger batches, handle more quickly, or keep more.
    pub missed: u64,
    /// When this was found out, by the clock of the bus.
    pub last_check: Timestamp,
    /// What went wrong, if something did.
    pub problem: Option<String>,
}

/// How a stream is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamHealth {
    /// How many entries it holds.
    pub length: u64,
    /// Its groups, by name.
    pub groups: BTreeMap<String, GroupHealth>,
}

/// How far a group is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupHealth {
    /// Entries delivered and not settled.
    pub pending: u64,
    /// Entries not delivered yet, where the server can tell.
    pub lag: Option<u64>,
}

/// How full a spool is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpoolHealth {
    /// Events that wait in it.
    pub events: usize,
    /// Bytes of its file.
    pub bytes: u64,
    /// Bytes it may have.
    pub max_bytes: u64,
    /// Events that their streams refused for good, now or in an earlier life of the bus; they lie in a file beside it,
    /// until somebody removes that file.
    pub rejected: u64,
}

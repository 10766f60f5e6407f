//! The bus on streams: events are persistent and reach other processes.
//!
//! Upstream: applications. Downstream: a backend of `headwater-stream`, and `headwater-queue` for groups.
//!
//! How an event flows: `publish` validates it; `store` appends it to its stream or, if the backend is unavailable,
//! applies the failure policy; then the live handlers of this process run. Other processes read it by `tail`, groups
//! by `group`. `spool_drain` moves spooled events to their streams.

// In dependency order: each module uses only those above it.
mod config;

mod followed_streams;
mod own_events;

mod store;

mod publish;
mod tail;

mod group;
mod health;
mod spool_drain;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use headwater_queue::{Outcome, Queue};
use headwater_stream::{Backend, EntryId, Fields, Options, StreamName, connect};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use self::config::{FailurePolicy, StreamedBusConfig};
use self::followed_streams::FollowedStreams;
use self::group::DurableGroup;
use self::health::ReportedGauge;
use self::own_events::OwnEvents;
use crate::breaker::Breaker;
use crate::bus::{BusHealth, EventBus, PublishResult, SubscribeOptions, SubscriptionKind};
use crate::delivery::EventDelivery;
use crate::error::{BusError, Result};
use crate::event::{Envelope, OutgoingEvent, Scope};
use crate::handler::{self, DeliveredEvent, Handlers};
use crate::keys::Keys;
use crate::limits::IN_MEMORY_BYTES_MAX;
use crate::live::{EventSource, LiveSubscription, LiveSubscriptions};
use crate::name::{EventId, SessionId, SubscriptionId, random_bits};
use crate::registry::EventRegistry;
use crate::session_backend::SessionBackend;
use crate::spool::{Spool, SpooledEvent};
use crate::unknown_events::{ParkedEntry, UnknownEvents};

/// A bus on the streams of a backend.
pub struct StreamedBus {
    inner: Arc<Inner>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

pub(crate) struct Inner {
    backend: Arc<dyn Backend>,
    registry: EventRegistry,
    config: StreamedBusConfig,
    keys: Keys,
    control: StreamName,
    queue: Queue,
    live: LiveSubscriptions,
    followed: FollowedStreams,
    groups: Mutex<HashMap<SubscriptionId, DurableGroup>>,
    own_events: OwnEvents,
    breaker: Breaker,
    spool: Option<Spool>,
    parked: UnknownEvents,
    next_id: AtomicU64,
    /// Cancelled when the bus closes or is dropped.
    closing: CancellationToken,
    /// One permit for each publish in flight.
    in_flight: Arc<Semaphore>,
    last_health: Mutex<Option<BusHealth>>,
    /// How often live subscriptions may have missed entries.
    missed: AtomicU64,
    /// Pending gauges that were set.
    reported_gauges: Mutex<BTreeSet<ReportedGauge>>,
}

impl StreamedBus {
    /// Opens a bus inside this process, without persistence: on a new backend in memory, limited to
    /// [`IN_MEMORY_BYTES_MAX`]. All events of sessions are kept until their session is deleted or expires.
    pub async fn in_memory(registry: EventRegistry) -> Result<Self> {
        let url = format!("embedded:memory?max_bytes={IN_MEMORY_BYTES_MAX}");
        let backend = connect(&url, &Options::default()).await?;
        Self::open(backend, registry, StreamedBusConfig::default()).await
    }

    /// Opens a bus on a backend. Events in the spool are moved first. Closing the bus does not close the backend.
    pub async fn open(
        backend: Arc<dyn Backend>,
        registry: EventRegistry,
        config: StreamedBusConfig,
    ) -> Result<Self> {
        config.validate(backend.call_deadline())?;
        let keys = Keys::new(&config.prefix)?;
        let spool = match &config.on_failure {
            FailurePolicy::Spool(spool) => {
                let owner = format!("{}:{}", keys.prefix(), config.namespace);
                Some(Spool::open(spool.clone(), &owner, Arc::clone(&config.clock)).await?)
            }
            FailurePolicy::Fail | FailurePolicy::LocalOnly => None,
        };
        let inner = Arc::new(Inner {
            control: keys.control(&config.namespace),
            parked: UnknownEvents { backend: Arc::clone(&backend), stream: keys.unknown() },
            queue: Queue::with_config(Arc::clone(&backend), config.queue.clone())?,
            live: LiveSubscriptions::default(),
            followed: FollowedStreams::default(),
            groups: Mutex::default(),
            own_events: OwnEvents::new(format!(
                "bus:{}:{:032x}",
                std::process::id(),
                random_bits()
            )),
            breaker: Breaker::new(config.breaker)?,
            spool,
            next_id: AtomicU64::new(1),
            closing: CancellationToken::new(),
            in_flight: Arc::new(Semaphore::new(config.in_flight_max)),
            last_health: Mutex::default(),
            missed: AtomicU64::new(0),
            reported_gauges: Mutex::default(),
            backend,
            registry,
            config,
            keys,
        });
        let mut tasks = vec![tokio::spawn(tail::run(Arc::clone(&inner)))];
        if inner.spool.is_some() {
            tasks.push(tokio::spawn(spool_drain::run(Arc::clone(&inner))));
        }
        if let Some(every) = inner.config.health_every {
            tasks.push(tokio::spawn(health::run(Arc::clone(&inner), every)));
        }
        Ok(Self { inner, tasks: Mutex::new(tasks) })
    }

    /// The backend with its streams, for example to list the dead letters of its groups with `headwater-queue`.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.inner.backend
    }

    /// The control stream of its namespace, for appending entries without the bus.
    pub fn control_stream(&self) -> &StreamName {
        &self.inner.control
    }

    /// Value of the field `origin` of its events; different after every restart.
    pub fn origin(&self) -> &str {
        self.inner.own_events.origin()
    }

    /// Result of the last health check.
    pub fn last_health(&self) -> Option<BusHealth> {
        self.inner.last_health().clone()
    }

    /// Spooled events that were permanently rejected by their streams, oldest first, up to `count`. They are kept in the
    /// directory of the spool until [`delete_rejected`](Self::delete_rejected).
    pub async fn rejected(&self, count: usize) -> Result<Vec<RejectedEvent>> {
        let Some(spool) = &self.inner.spool else { return Ok(Vec::new()) };
        let rejected = spool.rejected(count).await?.into_iter();
        let read = |event: SpooledEvent| RejectedEvent {
            id: event.id,
            stream: event.stream,
            event_id: event.event_id,
            fields: event.fields,
        };
        Ok(rejected.map(read).collect())
    }

    /// Deletes a rejected event. Returns whether it existed.
    pub async fn delete_rejected(&self, id: EntryId) -> Result<bool> {
        match &self.inner.spool {
            Some(spool) => Ok(spool.delete_rejected(id).await?),
            None => Ok(false),
        }
    }

    /// Parked entries after this one (`EntryId::MIN` for the first page), oldest first.
    pub async fn parked(&self, after: EntryId, count: usize) -> Result<Vec<ParkedEntry>> {
        self.inner.parked.list(after, count).await
    }

    /// Deletes a parked entry. Returns whether it existed. The original entry stays in its stream.
    pub async fn delete_parked(&self, id: EntryId) -> Result<bool> {
        self.inner.parked.remove(id).await
    }

    /// Delivers a parked entry to the matching subscriptions of this bus, and removes it if all handlers succeed.
    /// Nothing is appended to its stream.
    pub async fn retry_parked(&self, id: EntryId) -> Result<RetryParkedOutcome> {
        let inner = Arc::clone(&self.inner);
        // As with publishing, handlers finish even if the caller is dropped.
        let retrying = tokio::spawn(async move { inner.retry_parked(id).await });
        retrying.await.unwrap_or(Err(BusError::Closed))
    }
}

/// A spooled event that was permanently rejected by its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedEvent {
    /// Its id in the spool.
    pub id: EntryId,
    /// The stream.
    pub stream: StreamName,
    /// Id of the event.
    pub event_id: EventId,
    /// The fields of its entry.
    pub fields: Fields,
}

/// Result of retrying a parked entry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetryParkedOutcome {
    /// This many handlers succeeded; it is no longer parked.
    Handled(usize),
    /// It still cannot be decoded, for this reason.
    Unreadable(String),
    /// No subscription of this bus accepts it. Retry it on a bus that has one.
    NoHandler,
    /// A handler failed, for this reason.
    Failed(String),
    /// It is not parked.
    NotParked,
}

impl fmt::Debug for StreamedBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamedBus")
            .field("origin", &self.origin())
            .field("backend", &self.inner.backend.describe())
            .finish_non_exhaustive()
    }
}

impl Drop for StreamedBus {
    fn drop(&mut self) {
        // Work in flight is abandoned: unacknowledged events are reclaimed by other processes.
        self.inner.closing.cancel();
        self.inner.live.clear();
        self.inner.groups().clear();
        self.tasks().drain(..).for_each(|task| task.abort());
    }
}

impl StreamedBus {
    fn tasks(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.tasks.lock().expect("no code panics while it holds this lock")
    }
}

#[async_trait]
impl EventBus for StreamedBus {
    fn registry(&self) -> &EventRegistry {
        &self.inner.registry
    }

    async fn subscribe_handlers(
        &self,
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<SubscriptionId> {
        let inner = &self.inner;
        if inner.closing.is_cancelled() {
            return Err(BusError::Closed);
        }
        subscribe.validate()?;
        handlers.check(&inner.registry)?;
        let id = SubscriptionId(inner.next_id.fetch_add(1, Ordering::Relaxed));
        match subscribe.kind.clone() {
            SubscriptionKind::Live => inner.subscribe_live(id, subscribe, handlers).await?,
            SubscriptionKind::Durable(label) => {
                inner.subscribe_durable(id, &label, subscribe, handlers).await?;
            }
        }
        Ok(id)
    }

    async fn unsubscribe(&self, subscription: SubscriptionId) -> Result<bool> {
        let inner = &self.inner;
        if let Some(live) = inner.live.remove(subscription) {
            live.follows.iter().for_each(|(stream, _)| inner.followed.remove(stream));
            return Ok(true);
        }
        let group = inner.groups().remove(&subscription);
        let Some(group) = group else { return Ok(false) };
        if let Some(subscription) = group.subscription {
            subscription.stop().await;
        }
        Ok(true)
    }

    async fn publish_all(
        &self,
        mut events: Vec<OutgoingEvent>,
    ) -> Result<Vec<Result<PublishResult>>> {
        // The task below does not inherit the caller's trace.
        events.iter_mut().for_each(OutgoingEvent::join_trace);
        let inner = Arc::clone(&self.inner);
        // A publish by a handler is part of the publish in flight: it needs no permit, and closing waits for it.
        // Other callers wait for a permit here; a caller that is dropped while waiting has no effect.
        let permit = match handler::is_in_handler() {
            true => None,
            false => {
                let permit = Arc::clone(&inner.in_flight).acquire_owned().await;
                Some(permit.map_err(|_| BusError::Closed)?)
            }
        };
        if permit.is_some() && inner.closing.is_cancelled() {
            return Err(BusError::Closed);
        }
        // Runs in its own task, so that a stored event is handled even if the caller is dropped.
        let publishing = tokio::spawn(async move {
            let _permit = permit;
            inner.publish_all(events).await
        });
        publishing.await.unwrap_or(Err(BusError::Closed))
    }

    async fn session_backend(&self) -> Result<SessionBackend> {
        let Inner { backend, keys, config, .. } = &*self.inner;
        let namespace = config.namespace.clone();
        Ok(SessionBackend { backend: Arc::clone(backend), keys: keys.clone(), namespace })
    }

    async fn health(&self) -> BusHealth {
        self.inner.check_health().await
    }

    async fn close(&self) -> Result<()> {
        let inner = &self.inner;
        inner.closing.cancel();
        let groups: Vec<DurableGroup> = inner.groups().drain().map(|(_, group)| group).collect();
        let tasks: Vec<JoinHandle<()>> = self.tasks().drain(..).collect();
        let drain = inner.config.drain;
        // Concurrently, so that the total is at most one drain timeout.
        tokio::join!(
            inner.end_publishes(),
            end_groups(&groups, drain),
            join_all(tasks.into_iter().map(|task| end(task, drain))),
        );
        inner.live.clear();
        inner.clear_gauges();
        if let Some(spool) = &inner.spool {
            spool.close().await;
        }
        Ok(())
    }
}

/// Stops the groups: waits for their handlers and releases the rest.
async fn end_groups(groups: &[DurableGroup], drain: Duration) {
    let subscriptions = groups.iter().filter_map(|group| group.subscription.as_ref());
    let stopping = join_all(subscriptions.map(|subscription| subscription.stop()));
    if timeout(drain + GIVE_BACK, stopping).await.is_err() {
        // Other members of the group reclaim these entries.
        warn!("backend did not release the entries of stopped groups in time");
    }
}

/// Waits for a task that is ending, and aborts it after the drain timeout.
async fn end(mut task: JoinHandle<()>, drain: Duration) {
    if timeout(drain, &mut task).await.is_err() {
        warn!("a live handler was still running at the drain timeout and was aborted");
        task.abort();
        let _ = task.await;
    }
}

/// Time for groups to release entries, after the drain timeout.
const GIVE_BACK: Duration = Duration::from_secs(2);

impl Inner {
    /// Waits for publishes in flight and rejects new ones.
    async fn end_publishes(&self) {
        let all = self.config.in_flight_max as u32;
        if timeout(self.config.drain, self.in_flight.acquire_many(all)).await.is_err() {
            warn!("publishes were still in flight at the drain timeout");
        }
        self.in_flight.close();
    }
}

impl Inner {
    async fn subscribe_live(
        &self,
        id: SubscriptionId,
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<()> {
        let session = subscribe.session.as_ref().or(self.config.session.as_ref());
        let mut follows: Vec<(StreamName, EntryId)> = Vec::new();
        for handler in &handlers.list {
            let stream = match (handler.scope, session) {
                (Scope::Namespace, _) => self.control.clone(),
                (Scope::Session, Some(session)) => self.keys.session(session),
                // Only events published through this bus.
                (Scope::Session, None) => continue,
            };
            if follows.iter().all(|(followed, _)| *followed != stream) {
                let stats = self.backend.stats(&stream).await?;
                let end = stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN);
                follows.push((stream, end));
            }
        }
        let SubscribeOptions { session, handler_timeout, .. } = subscribe;
        let live =
            LiveSubscription::new(id, handlers.list, session, handler_timeout, follows.clone());
        self.live.add(live)?;
        for (index, (stream, end)) in follows.iter().enumerate() {
            if let Err(error) = self.followed.add(stream, *end) {
                self.live.remove(id);
                follows[..index].iter().for_each(|(stream, _)| self.followed.remove(stream));
                return Err(error);
            }
        }
        Ok(())
    }

    async fn retry_parked(&self, id: EntryId) -> Result<RetryParkedOutcome> {
        let Some(parked) = self.parked.get(id).await? else {
            return Ok(RetryParkedOutcome::NotParked);
        };
        let read = Envelope::from_entry(&parked.stream, parked.entry_id, &parked.fields);
        let delivered =
            match read.and_then(|envelope| DeliveredEvent::decode(&self.registry, envelope)) {
                Ok(delivered) => delivered,
                Err(error) => return Ok(RetryParkedOutcome::Unreadable(error.to_string())),
            };
        let session = self.session_of(&parked.stream);
        let source = EventSource::Here(session.as_ref());
        let dispatched = self.live.dispatch(&delivered, source, self.config.session.as_ref()).await;
        if let Some(failure) = dispatched.failures.first() {
            return Ok(RetryParkedOutcome::Failed(failure.reason.clone()));
        }
        let mut handled = dispatched.invoked;
        for delivery in self.deliveries(&parked.stream, &delivered.envelope.event_type) {
            match delivery.run(&delivered).await {
                Outcome::Done => handled += 1,
                Outcome::Release => {
                    return Ok(RetryParkedOutcome::Failed("released by its handler".to_owned()));
                }
                Outcome::DeadLetter { reason } | Outcome::Retry { reason, .. } => {
                    return Ok(RetryParkedOutcome::Failed(reason));
                }
            }
        }
        if handled == 0 {
            return Ok(RetryParkedOutcome::NoHandler);
        }
        self.parked.remove(id).await?;
        Ok(RetryParkedOutcome::Handled(handled))
    }

    fn deliveries(&self, stream: &StreamName, event_type: &str) -> Vec<EventDelivery> {
        let groups = self.groups();
        let wanted = groups
            .values()
            .filter(|group| group.stream == *stream && group.delivery.handles(event_type));
        wanted.map(|group| group.delivery.clone()).collect()
    }

    /// The session of a stream; `None` for the control stream.
    fn session_of(&self, stream: &StreamName) -> Option<SessionId> {
        let session = stream.as_str().strip_prefix(&format!("{}:events:", self.keys.prefix()))?;
        SessionId::new(session).ok()
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<SubscriptionId, DurableGroup>> {
        self.groups.lock().expect("no code panics while it holds this lock")
    }

    fn last_health(&self) -> MutexGuard<'_, Option<BusHealth>> {
        self.last_health.lock().expect("no code panics while it holds this lock")
    }
}

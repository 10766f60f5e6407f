//! The bus on streams: events outlive the process and reach others.
//!
//! Upstream: applications. Downstream: a backend of `headwater-stream`, and `headwater-queue` for groups.
//!
//! The way of an event: `publish` checks it, `store` puts it into its stream or, if the backend is away, where the
//! failure policy says, and live handlers of this process run. Other processes get it by `tail`, groups by `group`.
//! `replay` moves what had to wait.

// In dependency order: each module uses only those above it.
mod config;

mod followed;
mod origin;

mod store;

mod publish;
mod tail;

mod group;
mod health;
mod replay;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use headwater_queue::Queue;
use headwater_stream::{Backend, EntryId, Fields, StreamName};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::warn;

pub use self::config::{FailurePolicy, StreamedBusConfig};
use self::followed::Followed;
use self::group::Group;
use self::health::Reported;
use self::origin::Origin;
use crate::breaker::Breaker;
use crate::bus::{EventBus, Health, PublishResult, Subscribe, SubscriptionKind};
use crate::durable::{Closing, Ended};
use crate::error::{BusError, Result};
use crate::event::{Envelope, Outgoing, Scope};
use crate::handler::{self, Delivered, Handlers};
use crate::journal::Journal;
use crate::keys::Keys;
use crate::live::{Live, LiveList, Source};
use crate::name::{EventId, SessionId, SubscriptionId, random_bits};
use crate::parked::{Parked, ParkedEntry};
use crate::registry::Registry;
use crate::spool::{Spool, Spooled};

/// A bus on the streams of a backend.
pub struct StreamedBus {
    inner: Arc<Inner>,
    stop: watch::Sender<bool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

pub(crate) struct Inner {
    backend: Arc<dyn Backend>,
    registry: Registry,
    config: StreamedBusConfig,
    keys: Keys,
    control: StreamName,
    queue: Queue,
    live: LiveList,
    followed: Followed,
    groups: Mutex<HashMap<SubscriptionId, Group>>,
    origin: Origin,
    breaker: Breaker,
    spool: Option<Spool>,
    parked: Parked,
    next_id: AtomicU64,
    closing: Closing,
    /// One permit for each publish under way.
    in_flight: Arc<Semaphore>,
    last_health: Mutex<Option<Health>>,
    /// How often live subscriptions may have missed something.
    missed: AtomicU64,
    /// What the metric of pending entries tells of.
    reported: Mutex<BTreeSet<Reported>>,
}

impl StreamedBus {
    /// A bus for these event types on a backend. With a spool, what waits in it is replayed first. The backend stays open
    /// when the bus is closed.
    pub async fn open(
        backend: Arc<dyn Backend>,
        registry: Registry,
        config: StreamedBusConfig,
    ) -> Result<Self> {
        config.validate(backend.call_deadline())?;
        let keys = Keys::new(&config.prefix)?;
        let spool = match &config.on_failure {
            FailurePolicy::Spool(spool) => {
                let owner = format!("{}:{}", keys.prefix(), config.namespace);
                Some(Spool::open(spool.clone(), &owner).await?)
            }
            FailurePolicy::Fail | FailurePolicy::LocalOnly => None,
        };
        let (stop, closing) = Closing::new();
        let inner = Arc::new(Inner {
            control: keys.control(&config.namespace),
            parked: Parked { backend: Arc::clone(&backend), stream: keys.unknown() },
            queue: Queue::with_config(Arc::clone(&backend), config.queue.clone())?,
            live: LiveList::default(),
            followed: Followed::default(),
            groups: Mutex::default(),
            origin: Origin::new(format!("bus:{}:{:032x}", std::process::id(), random_bits())),
            breaker: Breaker::new(config.breaker)?,
            spool,
            next_id: AtomicU64::new(1),
            closing,
            in_flight: Arc::new(Semaphore::new(config.in_flight_max)),
            last_health: Mutex::default(),
            missed: AtomicU64::new(0),
            reported: Mutex::default(),
            backend,
            registry,
            config,
            keys,
        });
        let mut tasks = vec![tokio::spawn(tail::run(Arc::clone(&inner)))];
        if inner.spool.is_some() {
            tasks.push(tokio::spawn(replay::run(Arc::clone(&inner))));
        }
        if let Some(every) = inner.config.health_every {
            tasks.push(tokio::spawn(health::run(Arc::clone(&inner), every)));
        }
        Ok(Self { inner, stop, tasks: Mutex::new(tasks) })
    }

    /// The control stream of its namespace, for those who put entries of their own into it.
    pub fn control_stream(&self) -> &StreamName {
        &self.inner.control
    }

    /// What this start of the bus writes into the field `origin` of its events.
    pub fn origin(&self) -> &str {
        self.inner.origin.name()
    }

    /// What the last look at its health found, if there was one.
    pub fn last_health(&self) -> Option<Health> {
        self.inner.last_health().clone()
    }

    /// Spooled events that their streams refused for good, oldest first, up to so many. They lie in a file beside the
    /// spool; remove it when they are dealt with.
    pub async fn rejected(&self, count: usize) -> Result<Vec<RejectedEvent>> {
        let Some(spool) = &self.inner.spool else { return Ok(Vec::new()) };
        let rejected = spool.rejected(count).await?.into_iter();
        let read = |event: Spooled| RejectedEvent {
            stream: event.stream,
            event_id: event.event_id,
            fields: event.fields,
        };
        Ok(rejected.map(read).collect())
    }

    /// Entries of unknown or unfit types, oldest first, after this one (`EntryId::MIN` for the first page).
    pub async fn parked(&self, after: EntryId, count: usize) -> Result<Vec<ParkedEntry>> {
        self.inner.parked.list(after, count).await
    }

    /// Removes a parked entry. Returns whether it was there. The entry it tells of stays in its stream.
    pub async fn forget_parked(&self, id: EntryId) -> Result<bool> {
        self.inner.parked.remove(id).await
    }

    /// Gives a parked entry to the subscriptions of this bus that would have got it, and removes it if all of their
    /// handlers are done with it. Nothing is appended to its stream.
    pub async fn retry_parked(&self, id: EntryId) -> Result<Retried> {
        let inner = Arc::clone(&self.inner);
        // As with publishing, handlers run to their end.
        let retrying = tokio::spawn(async move { inner.retry_parked(id).await });
        retrying.await.unwrap_or(Err(BusError::Closed))
    }
}

/// An event that waited in a spool until its stream refused it for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedEvent {
    /// The stream.
    pub stream: StreamName,
    /// What the event is known by.
    pub event_id: EventId,
    /// What its entry would have been.
    pub fields: Fields,
}

/// What came of another try with a parked entry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retried {
    /// So many handlers are done with it; it is parked no more.
    Handled(usize),
    /// It still cannot be read, for this reason.
    Unreadable(String),
    /// No subscription of this bus is for it. Retry it where there is one.
    NoHandler,
    /// A handler failed, for this reason.
    Failed(String),
    /// It is not parked.
    Missing,
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
        // What was begun is abandoned: unacknowledged events are taken over by others.
        let _ = self.stop.send(true);
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
    fn registry(&self) -> &Registry {
        &self.inner.registry
    }

    async fn subscribe_handlers(
        &self,
        subscribe: Subscribe,
        handlers: Handlers,
    ) -> Result<SubscriptionId> {
        let inner = &self.inner;
        if inner.closing.is_set() {
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

    async fn publish_all(&self, mut events: Vec<Outgoing>) -> Result<Vec<Result<PublishResult>>> {
        // The trace is that of the caller, and the task below does not know it.
        events.iter_mut().for_each(Outgoing::join_trace);
        let inner = Arc::clone(&self.inner);
        // What a handler publishes is part of what is under way: it waits for no room, and closing waits for it. Others
        // wait for room here: of those who go away meanwhile nothing is left.
        let under_way = match handler::is_handling() {
            true => None,
            false => {
                let room = Arc::clone(&inner.in_flight).acquire_owned().await;
                Some(room.map_err(|_| BusError::Closed)?)
            }
        };
        if under_way.is_some() && inner.closing.is_set() {
            return Err(BusError::Closed);
        }
        // A task of its own: an event that is stored is handled, also if the caller goes away in between.
        let publishing = tokio::spawn(async move {
            let _under_way = under_way;
            inner.publish_all(events).await
        });
        publishing.await.unwrap_or(Err(BusError::Closed))
    }

    async fn journal(&self) -> Result<Journal> {
        let Inner { backend, keys, config, .. } = &*self.inner;
        let namespace = config.namespace.clone();
        Ok(Journal { backend: Arc::clone(backend), keys: keys.clone(), namespace })
    }

    async fn health(&self) -> Health {
        self.inner.look().await
    }

    async fn close(&self) -> Result<()> {
        let inner = &self.inner;
        let _ = self.stop.send(true);
        let groups: Vec<Group> = inner.groups().drain().map(|(_, group)| group).collect();
        let tasks: Vec<JoinHandle<()>> = self.tasks().drain(..).collect();
        let drain = inner.config.drain;
        // All at once: together they take no longer than the one that takes longest.
        tokio::join!(
            inner.end_publishes(),
            end_groups(&groups, drain),
            join_all(tasks.into_iter().map(|task| end(task, drain))),
        );
        inner.live.clear();
        inner.report_nothing();
        if let Some(spool) = &inner.spool {
            spool.close().await;
        }
        Ok(())
    }
}

/// Stops reading for groups, waits for their handlers and gives back what they did not get to.
async fn end_groups(groups: &[Group], drain: Duration) {
    let subscriptions = groups.iter().filter_map(|group| group.subscription.as_ref());
    let stopping = join_all(subscriptions.map(|subscription| subscription.stop()));
    if timeout(drain + GIVE_BACK, stopping).await.is_err() {
        // Whoever is left in the group takes it over.
        warn!("the backend did not take back in time what groups had in hand");
    }
}

/// Waits for a task that knows that it is to end, and ends it if it does not.
async fn end(mut task: JoinHandle<()>, drain: Duration) {
    if timeout(drain, &mut task).await.is_err() {
        warn!("a handler was still running when the bus was closed");
        task.abort();
        let _ = task.await;
    }
}

/// How long groups may take to give back what they did not get to, after the time for handlers is up.
const GIVE_BACK: Duration = Duration::from_secs(2);

impl Inner {
    /// Waits for publishes under way, and lets no more begin.
    async fn end_publishes(&self) {
        let all = self.config.in_flight_max as u32;
        if timeout(self.config.drain, self.in_flight.acquire_many(all)).await.is_err() {
            warn!("publishes were still under way when the bus was closed");
        }
        self.in_flight.close();
    }
}

impl Inner {
    async fn subscribe_live(
        &self,
        id: SubscriptionId,
        subscribe: Subscribe,
        handlers: Handlers,
    ) -> Result<()> {
        let session = subscribe.session.as_ref().or(self.config.session.as_ref());
        let mut follows: Vec<(StreamName, EntryId)> = Vec::new();
        for handler in &handlers.list {
            let stream = match (handler.scope, session) {
                (Scope::Namespace, _) => self.control.clone(),
                (Scope::Session, Some(session)) => self.keys.session(session),
                // Only what is published through this bus.
                (Scope::Session, None) => continue,
            };
            if follows.iter().all(|(followed, _)| *followed != stream) {
                let stats = self.backend.stats(&stream).await?;
                let end = stats.and_then(|stats| stats.last_id).unwrap_or(EntryId::MIN);
                follows.push((stream, end));
            }
        }
        let Subscribe { session, handler_timeout, .. } = subscribe;
        let live = Live::new(id, handlers.list, session, handler_timeout, follows.clone());
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

    async fn retry_parked(&self, id: EntryId) -> Result<Retried> {
        let Some(parked) = self.parked.get(id).await? else { return Ok(Retried::Missing) };
        let read = Envelope::from_entry(&parked.stream, parked.entry_id, &parked.fields);
        let envelope = match read {
            Ok(envelope) => envelope,
            Err(misfit) => return Ok(Retried::Unreadable(misfit.to_string())),
        };
        let value = match self.registry.decode_any(&envelope) {
            Ok(value) => value,
            Err(misfit) => return Ok(Retried::Unreadable(misfit.to_string())),
        };
        let delivered = Delivered { value, envelope: Arc::new(envelope) };
        let session = self.session_of(&parked.stream);
        let source = Source::Here(session.as_ref());
        let dispatched = self.live.dispatch(&delivered, source, self.config.session.as_ref()).await;
        if let Some(failure) = dispatched.failures.first() {
            return Ok(Retried::Failed(failure.reason.clone()));
        }
        let mut handled = dispatched.invoked;
        for pursuit in self.pursuits(&parked.stream, &delivered.envelope.event_type) {
            match pursuit.run(&delivered).await {
                Ended::Done => handled += 1,
                Ended::Released => return Ok(Retried::Failed("it was given back".to_owned())),
                Ended::GivenUp { reason } => return Ok(Retried::Failed(reason)),
            }
        }
        if handled == 0 {
            return Ok(Retried::NoHandler);
        }
        self.parked.remove(id).await?;
        Ok(Retried::Handled(handled))
    }

    fn pursuits(&self, stream: &StreamName, event_type: &str) -> Vec<crate::durable::Pursuit> {
        let groups = self.groups();
        let wanted = groups
            .values()
            .filter(|group| group.stream == *stream && group.pursuit.handles(event_type));
        wanted.map(|group| group.pursuit.clone()).collect()
    }

    /// The session whose stream this is; `None` for the control stream.
    fn session_of(&self, stream: &StreamName) -> Option<SessionId> {
        let session = stream.as_str().strip_prefix(&format!("{}:events:", self.keys.prefix()))?;
        SessionId::new(session).ok()
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<SubscriptionId, Group>> {
        self.groups.lock().expect("no code panics while it holds this lock")
    }

    fn last_health(&self) -> MutexGuard<'_, Option<Health>> {
        self.last_health.lock().expect("no code panics while it holds this lock")
    }
}

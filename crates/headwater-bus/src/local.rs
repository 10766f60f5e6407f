//! The bus inside one process: everything ends with it.
//!
//! Upstream: applications and their tests. Downstream: `live` and `durable`; the events of sessions go to a journal in
//! memory, if somebody works with sessions.
//! Promises: the same as every bus, as far as a process reaches. A durable subscription has a queue in memory; an event
//! that ran out of tries is kept as a dead letter, the newest thousand of them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{Fields, Options, Retention, connect};
use tokio::sync::{OnceCell, Semaphore, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tracing::warn;

use crate::breaker::BreakerState;
use crate::bus::{
    EventBus, Health, PublishResult, Stored, StreamHealth, Subscribe, SubscriptionKind,
};
use crate::durable::{Closing, Ended, Pursuit};
use crate::error::{BusError, Result};
use crate::event::{Envelope, Outgoing, Scope};
use crate::handler::{self, Delivered, Handlers};
use crate::journal::Journal;
use crate::keys::PREFIX;
use crate::limits::{BATCH_MAX, LOCAL_DEAD_LETTERS_MAX, LOCAL_QUEUE_MAX};
use crate::live::{Live, LiveList, Source};
use crate::metrics;
use crate::name::{EventId, SessionId, SubscriptionId};
use crate::registry::Registry;
use crate::trace;

/// How long closing waits for handlers.
const DRAIN: Duration = Duration::from_secs(25);

/// Publishes at once; what is more waits.
const IN_FLIGHT: u32 = 1000;

/// A bus inside this process.
pub struct LocalBus {
    inner: Arc<Inner>,
    stop: watch::Sender<bool>,
}

struct Inner {
    registry: Registry,
    session: Option<SessionId>,
    live: LiveList,
    durable: Mutex<HashMap<SubscriptionId, Durable>>,
    dead_letters: Arc<Mutex<VecDeque<LocalDeadLetter>>>,
    next_id: AtomicU64,
    closing: Closing,
    in_flight: Arc<Semaphore>,
    /// Where events of sessions are kept, from the time on when somebody asks for it.
    journal: OnceCell<Journal>,
    clock: SystemClock,
}

struct Durable {
    /// The session, for events of one, and the group: there is one subscription for each.
    place: (Scope, Option<SessionId>, String),
    handlers: Vec<&'static str>,
    sender: mpsc::Sender<Delivered>,
    task: JoinHandle<()>,
}

/// An event that a durable subscription of a local bus gave up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalDeadLetter {
    /// The group.
    pub group: String,
    /// The event.
    pub envelope: Arc<Envelope>,
    /// Why it was given up.
    pub reason: String,
}

impl LocalBus {
    /// A bus for these event types.
    pub fn new(registry: Registry) -> Self {
        let (stop, closing) = Closing::new();
        let inner = Inner {
            registry,
            session: None,
            live: LiveList::default(),
            durable: Mutex::default(),
            dead_letters: Arc::default(),
            next_id: AtomicU64::new(1),
            closing,
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT as usize)),
            journal: OnceCell::new(),
            clock: SystemClock,
        };
        Self { inner: Arc::new(inner), stop }
    }

    /// A bus for one session: its events need not name it.
    pub fn for_session(registry: Registry, session: SessionId) -> Self {
        let mut bus = Self::new(registry);
        let inner = Arc::get_mut(&mut bus.inner).expect("nobody else has it yet");
        inner.session = Some(session);
        bus
    }

    /// Events that durable subscriptions gave up, oldest first.
    pub fn dead_letters(&self) -> Vec<LocalDeadLetter> {
        lock(&self.inner.dead_letters).iter().cloned().collect()
    }
}

impl fmt::Debug for LocalBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalBus").field("registry", &self.inner.registry).finish_non_exhaustive()
    }
}

impl Drop for LocalBus {
    fn drop(&mut self) {
        self.inner.live.clear();
        lock(&self.inner.durable).drain().for_each(|(_, durable)| durable.task.abort());
    }
}

#[async_trait]
impl EventBus for LocalBus {
    fn registry(&self) -> &Registry {
        &self.inner.registry
    }

    async fn subscribe_handlers(
        &self,
        subscribe: Subscribe,
        handlers: Handlers,
    ) -> Result<SubscriptionId> {
        let inner = &self.inner;
        inner.check_open()?;
        subscribe.validate()?;
        handlers.check(&inner.registry)?;
        let id = SubscriptionId(inner.next_id.fetch_add(1, Ordering::Relaxed));
        match &subscribe.kind {
            SubscriptionKind::Live => {
                let Subscribe { session, handler_timeout, .. } = subscribe;
                let live = Live::new(id, handlers.list, session, handler_timeout, Vec::new());
                inner.live.add(live)?;
            }
            SubscriptionKind::Durable(group) => {
                let group = group.clone();
                inner.subscribe_durable(id, group, subscribe, handlers)?;
            }
        }
        Ok(id)
    }

    async fn unsubscribe(&self, subscription: SubscriptionId) -> Result<bool> {
        if self.inner.live.remove(subscription).is_some() {
            return Ok(true);
        }
        let durable = lock(&self.inner.durable).remove(&subscription);
        let Some(Durable { sender, task, .. }) = durable else { return Ok(false) };
        // The task ends when its queue is closed and empty.
        drop(sender);
        let mut task = AbortOnDrop(task);
        if timeout(DRAIN, &mut task.0).await.is_err() {
            warn!(subscription = %subscription, "handlers did not end in time and were stopped");
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
                let room = room.map_err(|_| BusError::Closed)?;
                inner.check_open()?;
                Some(room)
            }
        };
        // A task of its own: handlers run to their end also if the caller goes away.
        let publishing = tokio::spawn(async move {
            let _under_way = under_way;
            inner.publish_all(events).await
        });
        publishing.await.unwrap_or(Err(BusError::Closed))
    }

    async fn journal(&self) -> Result<Journal> {
        self.inner.check_open()?;
        let open = || async {
            Journal::new(connect("embedded:memory", &Options::default()).await?, PREFIX)
        };
        self.inner.journal.get_or_try_init(open).await.cloned()
    }

    async fn health(&self) -> Health {
        let groups = |durable: &Durable| {
            let waiting = durable.sender.max_capacity() - durable.sender.capacity();
            (durable.place.2.clone(), waiting as u64)
        };
        let mut streams: BTreeMap<String, StreamHealth> = BTreeMap::new();
        for durable in lock(&self.inner.durable).values() {
            let (group, waiting) = groups(durable);
            let place = durable.place.1.as_ref().map_or("namespace", SessionId::as_str);
            let stream = streams.entry(place.to_owned()).or_default();
            stream.length = stream.length.max(waiting);
            stream.groups.entry(group).or_default().lag = Some(waiting);
        }
        Health {
            connected: !self.inner.closing.is_set(),
            latency: Some(Duration::ZERO),
            streams,
            breaker: BreakerState::Closed,
            spool: None,
            parked: 0,
            last_check: self.inner.clock.now(),
            problem: None,
        }
    }

    async fn close(&self) -> Result<()> {
        let _ = self.stop.send(true);
        let ended = timeout(DRAIN, self.inner.in_flight.acquire_many(IN_FLIGHT)).await;
        if matches!(ended, Ok(Ok(_))) {
            self.inner.in_flight.close();
        }
        let ids: Vec<SubscriptionId> = lock(&self.inner.durable).keys().copied().collect();
        for id in ids {
            self.unsubscribe(id).await?;
        }
        self.inner.live.clear();
        Ok(())
    }
}

impl Inner {
    fn check_open(&self) -> Result<()> {
        if self.closing.is_set() { Err(BusError::Closed) } else { Ok(()) }
    }

    fn subscribe_durable(
        &self,
        id: SubscriptionId,
        group: String,
        subscribe: Subscribe,
        handlers: Handlers,
    ) -> Result<()> {
        let scope = handlers.one_scope()?;
        let session = match scope {
            Scope::Namespace => None,
            Scope::Session => {
                Some(subscribe.session.or_else(|| self.session.clone()).ok_or_else(|| {
                    BusError::invalid("a durable subscription", "it names no session")
                })?)
            }
        };
        let place = (scope, session, group.clone());
        let event_types = handlers.list.iter().map(|handler| handler.event_type).collect();
        let pursuit = Pursuit {
            handlers: handlers.list,
            handler_timeout: subscribe.handler_timeout,
            retry: subscribe.retry,
            closing: self.closing.clone(),
        };
        let (sender, receiver) = mpsc::channel(LOCAL_QUEUE_MAX);
        let mut durable = lock(&self.durable);
        if durable.values().any(|other| other.place == place) {
            let problem = format!("`{group}` is subscribed here; give all handlers in one call");
            return Err(BusError::invalid("a group", problem));
        }
        let dead_letters = Arc::clone(&self.dead_letters);
        let work = work(pursuit, group, receiver, subscribe.concurrency, dead_letters);
        let task = tokio::spawn(work);
        durable.insert(id, Durable { place, handlers: event_types, sender, task });
        Ok(())
    }

    async fn publish_all(&self, events: Vec<Outgoing>) -> Result<Vec<Result<PublishResult>>> {
        if events.len() > BATCH_MAX {
            let problem = format!("{} events; the limit is {BATCH_MAX}", events.len());
            return Err(BusError::invalid("a batch", problem));
        }
        let mut prepared = Vec::with_capacity(events.len());
        for event in &events {
            self.registry.check_outgoing(event)?;
            let session = event.session.clone().or_else(|| match event.scope {
                Scope::Session => self.session.clone(),
                Scope::Namespace => None,
            });
            if event.scope == Scope::Session && session.is_none() {
                let problem = "it names no session, and the bus has none";
                return Err(BusError::invalid(format!("an event `{}`", event.event_type), problem));
            }
            prepared.push((session, self.deliverable(event)));
        }
        // First room for all of them with those who want them, then storing, then handing over: an error means that
        // nothing happened.
        let wanting = self.wanting(&prepared);
        let reserved = reserve(&wanting)?;
        let stored = self.record(&mut prepared).await?;
        for (room, durable) in reserved.into_iter().zip(&wanting) {
            let wanted = durable.wanted.iter().map(|index| &prepared[*index].1);
            room.zip(wanted).for_each(|(place, delivered)| place.send(delivered.clone()));
        }
        let mut results = Vec::with_capacity(prepared.len());
        for ((session, delivered), stored) in prepared.into_iter().zip(stored) {
            let source = Source::Here(session.as_ref());
            let dispatched = self.live.dispatch(&delivered, source, self.session.as_ref()).await;
            metrics::published(&delivered.envelope.event_type, "local", Duration::ZERO);
            results.push(Ok(PublishResult {
                event_id: delivered.envelope.event_id.clone(),
                stored,
                handlers_invoked: dispatched.invoked,
                failures: dispatched.failures,
            }));
        }
        Ok(results)
    }

    fn deliverable(&self, event: &Outgoing) -> Delivered {
        let event_id = event.event_id.clone().unwrap_or_else(EventId::random);
        let trace = event.trace.unwrap_or_else(trace::next_span);
        let envelope = Envelope::outgoing(event, event_id, "local", trace, self.clock.now());
        Delivered { value: Arc::clone(&event.value), envelope: Arc::new(envelope) }
    }

    /// The durable subscriptions that want any of these events.
    fn wanting(&self, events: &[(Option<SessionId>, Delivered)]) -> Vec<Wanting> {
        let durable = lock(&self.durable);
        let wanting = durable.values().map(|durable| {
            let wants = |index: &usize| {
                let (session, delivered) = &events[*index];
                durable.wants(session.as_ref(), delivered)
            };
            Wanting {
                group: durable.place.2.clone(),
                sender: durable.sender.clone(),
                wanted: (0..events.len()).filter(wants).collect(),
            }
        });
        wanting.filter(|wanting| !wanting.wanted.is_empty()).collect()
    }

    /// Keeps the events of sessions, if there is a journal. Says where each event is.
    async fn record(&self, events: &mut [(Option<SessionId>, Delivered)]) -> Result<Vec<Stored>> {
        let mut stored = vec![Stored::LocalOnly; events.len()];
        let Some(journal) = self.journal.get() else { return Ok(stored) };
        let mut sessions: BTreeMap<SessionId, Vec<usize>> = BTreeMap::new();
        for (index, (session, _)) in events.iter().enumerate() {
            if let Some(session) = session {
                sessions.entry(session.clone()).or_default().push(index);
            }
        }
        for (session, indexes) in sessions {
            let stream = journal.keys.session(&session);
            let fields: Vec<Fields> =
                indexes.iter().map(|index| events[*index].1.envelope.to_fields()).collect();
            let ids = journal.backend.append(&stream, &fields, &Retention::KEEP_ALL).await?;
            for (index, id) in indexes.into_iter().zip(ids) {
                let envelope = Arc::make_mut(&mut events[index].1.envelope);
                (envelope.stream, envelope.entry_id) = (Some(stream.clone()), Some(id));
                stored[index] = Stored::Entry(id);
            }
        }
        Ok(stored)
    }
}

/// A durable subscription that wants some of the events of a batch.
struct Wanting {
    group: String,
    sender: mpsc::Sender<Delivered>,
    wanted: Vec<usize>,
}

/// Room in the queues of all subscriptions, or none if one of them is full.
fn reserve(wanting: &[Wanting]) -> Result<Vec<mpsc::PermitIterator<'_, Delivered>>> {
    let mut reserved = Vec::with_capacity(wanting.len());
    for Wanting { group, sender, wanted } in wanting {
        let room = sender.try_reserve_many(wanted.len());
        let full = |_| BusError::Backlogged { group: group.clone(), limit: LOCAL_QUEUE_MAX };
        reserved.push(room.map_err(full)?);
    }
    Ok(reserved)
}

impl Durable {
    fn wants(&self, session: Option<&SessionId>, delivered: &Delivered) -> bool {
        self.place.1.as_ref() == session
            && self.handlers.contains(&delivered.envelope.event_type.as_str())
    }
}

/// Pursues what comes in, up to `concurrency` events at once, until the queue is closed.
async fn work(
    pursuit: Pursuit,
    group: String,
    mut queue: mpsc::Receiver<Delivered>,
    concurrency: usize,
    dead_letters: Arc<Mutex<VecDeque<LocalDeadLetter>>>,
) {
    let mut running = JoinSet::new();
    while let Some(delivered) = queue.recv().await {
        while running.len() >= concurrency {
            running.join_next().await;
        }
        let (pursuit, group, dead_letters) =
            (pursuit.clone(), group.clone(), Arc::clone(&dead_letters));
        running.spawn(async move {
            match pursuit.run(&delivered).await {
                Ended::Done => {}
                // Nobody is left to give it to.
                Ended::Released => bury(&dead_letters, group, delivered, "it was given back"),
                Ended::GivenUp { reason } => bury(&dead_letters, group, delivered, &reason),
            }
        });
    }
    while running.join_next().await.is_some() {}
}

fn bury(
    dead_letters: &Mutex<VecDeque<LocalDeadLetter>>,
    group: String,
    delivered: Delivered,
    reason: &str,
) {
    let envelope = delivered.envelope;
    warn!(group, event_id = %envelope.event_id, error = reason, "event became a dead letter");
    let mut letters = lock(dead_letters);
    if letters.len() >= LOCAL_DEAD_LETTERS_MAX {
        letters.pop_front();
    }
    letters.push_back(LocalDeadLetter { group, envelope, reason: reason.to_owned() });
}

/// A task that ends with its owner.
pub(crate) struct AbortOnDrop<T>(pub(crate) JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

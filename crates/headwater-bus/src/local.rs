//! A bus inside one process, without persistence.
//!
//! Upstream: applications and their tests. Downstream: `live` and `delivery`; session events go to a storage in
//! memory once sessions are used.
//! Guarantees: those of every bus, within one process. A durable subscription has a queue in memory; an event that ran
//! out of attempts is kept as a dead letter (the newest thousand). Event ids set by the caller are deduplicated for
//! ten minutes. Everything has a limit; exceeding it is an error.

mod dedup;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{EntryId, Fields, Options, Retention, connect};
use tokio::sync::{OnceCell, Semaphore, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument, warn};

use self::dedup::{DedupBatch, DedupKey, DedupWindow};
use crate::abort_on_drop::AbortOnDropTask;
use crate::breaker::BreakerState;
use crate::bus::{
    BusHealth, EventBus, GroupHealth, PublishResult, StoreOutcome, StreamHealth, SubscribeOptions,
    SubscriptionKind,
};
use crate::delivery::{CloseSignal, DeliveryOutcome, EventDelivery};
use crate::error::{BusError, Result};
use crate::event::{Envelope, OutgoingEvent, Scope, publish_span};
use crate::handler::{self, DeliveredEvent, Handlers};
use crate::keys::PREFIX;
use crate::limits::{
    BATCH_BYTES_MAX, BATCH_MAX, LOCAL_DEAD_LETTERS_MAX, LOCAL_QUEUE_MAX, LOCAL_SESSION_BYTES_MAX,
};
use crate::live::{EventSource, LiveSubscription, LiveSubscriptions};
use crate::metrics;
use crate::name::{EventId, SessionId, SubscriptionId};
use crate::registry::EventRegistry;
use crate::session_backend::SessionBackend;
use crate::trace;

/// How long closing waits for handlers.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// Publishes in flight; further ones wait.
const PUBLISHES_MAX: u32 = 1000;

/// A bus inside this process.
pub struct LocalBus {
    inner: Arc<Inner>,
    stop: watch::Sender<bool>,
}

struct Inner {
    registry: EventRegistry,
    live: LiveSubscriptions,
    groups: Mutex<HashMap<SubscriptionId, LocalGroup>>,
    dead_letters: Arc<Mutex<VecDeque<LocalDeadLetter>>>,
    next_id: AtomicU64,
    closing: CloseSignal,
    in_flight: Arc<Semaphore>,
    /// Storage of session events; opened on first use.
    storage: OnceCell<SessionBackend>,
    session_bytes_max: u64,
    dedup: DedupWindow,
    clock: SystemClock,
}

struct LocalGroup {
    /// Scope, session and group; one subscription for each.
    key: (Scope, Option<SessionId>, String),
    handlers: Vec<&'static str>,
    sender: mpsc::Sender<DeliveredEvent>,
    /// Events being handled.
    in_flight_count: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

/// An event that a durable subscription of a local bus could not handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalDeadLetter {
    /// The group.
    pub group: String,
    /// The event.
    pub envelope: Arc<Envelope>,
    /// Why it failed.
    pub reason: String,
}

impl LocalBus {
    /// Creates a bus for these event types.
    pub fn new(registry: EventRegistry) -> Self {
        let (stop, closing) = CloseSignal::new();
        let inner = Inner {
            registry,
            live: LiveSubscriptions::default(),
            groups: Mutex::default(),
            dead_letters: Arc::default(),
            next_id: AtomicU64::new(1),
            closing,
            in_flight: Arc::new(Semaphore::new(PUBLISHES_MAX as usize)),
            storage: OnceCell::new(),
            session_bytes_max: LOCAL_SESSION_BYTES_MAX,
            dedup: DedupWindow::default(),
            clock: SystemClock,
        };
        Self { inner: Arc::new(inner), stop }
    }

    /// Dead letters of durable subscriptions, oldest first.
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
        lock(&self.inner.groups).drain().for_each(|(_, group)| group.task.abort());
    }
}

#[async_trait]
impl EventBus for LocalBus {
    fn registry(&self) -> &EventRegistry {
        &self.inner.registry
    }

    async fn subscribe_handlers(
        &self,
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<SubscriptionId> {
        let inner = &self.inner;
        inner.check_open()?;
        subscribe.validate()?;
        handlers.check(&inner.registry)?;
        let id = SubscriptionId(inner.next_id.fetch_add(1, Ordering::Relaxed));
        match &subscribe.kind {
            SubscriptionKind::Live => {
                let SubscribeOptions { session, handler_timeout, .. } = subscribe;
                let live =
                    LiveSubscription::new(id, handlers.list, session, handler_timeout, Vec::new());
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
        let group = lock(&self.inner.groups).remove(&subscription);
        let Some(group) = group else { return Ok(false) };
        group.stop(subscription, Instant::now() + DRAIN_TIMEOUT).await;
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
                let permit = permit.map_err(|_| BusError::Closed)?;
                inner.check_open()?;
                Some(permit)
            }
        };
        // Runs in its own task, so that handlers finish even if the caller is dropped.
        let publishing = tokio::spawn(async move {
            let _permit = permit;
            inner.publish_all(events).await
        });
        publishing.await.unwrap_or(Err(BusError::Closed))
    }

    async fn session_backend(&self) -> Result<SessionBackend> {
        self.inner.check_open()?;
        let open = || async {
            let url = format!("embedded:memory?max_bytes={}", self.inner.session_bytes_max);
            SessionBackend::new(connect(&url, &Options::default()).await?, PREFIX)
        };
        self.inner.storage.get_or_try_init(open).await.cloned()
    }

    async fn health(&self) -> BusHealth {
        let mut streams: BTreeMap<String, StreamHealth> = BTreeMap::new();
        for group in lock(&self.inner.groups).values() {
            let waiting = (group.sender.max_capacity() - group.sender.capacity()) as u64;
            let pending = group.in_flight_count.load(Ordering::SeqCst);
            let key = group.key.1.as_ref().map_or("namespace", SessionId::as_str);
            let stream = streams.entry(key.to_owned()).or_default();
            stream.length = stream.length.max(waiting + pending);
            let health = GroupHealth { pending, lag: Some(waiting) };
            stream.groups.insert(group.key.2.clone(), health);
        }
        BusHealth {
            connected: !self.inner.closing.is_set(),
            latency: Some(Duration::ZERO),
            streams,
            breaker: BreakerState::Closed,
            spool: None,
            parked: 0,
            missed: 0,
            last_check: self.inner.clock.now(),
            problem: None,
        }
    }

    async fn close(&self) -> Result<()> {
        let _ = self.stop.send(true);
        let until = Instant::now() + DRAIN_TIMEOUT;
        let ended = timeout_at(until, self.inner.in_flight.acquire_many(PUBLISHES_MAX)).await;
        if matches!(ended, Ok(Ok(_))) {
            self.inner.in_flight.close();
        }
        let all: Vec<_> = lock(&self.inner.groups).drain().collect();
        join_all(all.into_iter().map(|(id, group)| group.stop(id, until))).await;
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
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<()> {
        let scope = handlers.common_scope()?;
        let session =
            match scope {
                Scope::Namespace => None,
                Scope::Session => Some(subscribe.session.ok_or_else(|| {
                    BusError::invalid("durable subscription", "no session is set")
                })?),
            };
        let key = (scope, session, group.clone());
        let event_types = handlers.list.iter().map(|handler| handler.event_type).collect();
        let delivery = EventDelivery {
            handlers: handlers.list,
            handler_timeout: subscribe.handler_timeout,
            retry: subscribe.retry,
            closing: self.closing.clone(),
        };
        let (sender, receiver) = mpsc::channel(LOCAL_QUEUE_MAX);
        let mut groups = lock(&self.groups);
        if groups.values().any(|other| other.key == key) {
            let problem = format!(
                "`{group}` is already subscribed on this bus; pass all handlers in one call"
            );
            return Err(BusError::invalid("group", problem));
        }
        let in_flight_count = Arc::<AtomicU64>::default();
        let dead_letters = Arc::clone(&self.dead_letters);
        let worker = GroupWorker {
            delivery,
            group,
            in_flight_count: Arc::clone(&in_flight_count),
            dead_letters,
        };
        let task = tokio::spawn(worker.run(receiver, subscribe.concurrency));
        groups.insert(id, LocalGroup { key, handlers: event_types, sender, in_flight_count, task });
        Ok(())
    }

    async fn publish_all(&self, events: Vec<OutgoingEvent>) -> Result<Vec<Result<PublishResult>>> {
        let mut prepared = self.prepare(&events)?;
        let mut batch = self.dedup.begin_batch();
        let duplicates = self.find_duplicates(&prepared, &mut batch).await;
        // Reserve queue capacity first, then store, then enqueue: an error means that nothing happened.
        let matching_groups = self.matching_groups(&prepared, &duplicates);
        let reserved = reserve_queues(&matching_groups)?;
        let first = prepared.first().map(|event| &*event.delivered.envelope);
        let span = publish_span(first, prepared.len());
        let stored = self.append_to_sessions(&mut prepared, duplicates).instrument(span).await;
        for (event, stored) in prepared.iter().zip(&stored) {
            if let Ok(stored) = stored {
                batch.published(&event.dedup_key(), stored.entry_id());
            }
        }
        // Frees the ids of failed events, so that they can be published again, perhaps by a handler below.
        drop(batch);
        for (permits, group) in reserved.into_iter().zip(&matching_groups) {
            let is_new = |index: &&usize| matches!(&stored[**index], Ok(stored) if stored.is_new());
            let events = group.indexes.iter().filter(is_new).map(|index| &prepared[*index]);
            permits.zip(events).for_each(|(permit, event)| permit.send(event.delivered.clone()));
        }
        let mut results = Vec::with_capacity(prepared.len());
        for (event, stored) in prepared.into_iter().zip(stored) {
            results.push(match stored {
                Ok(stored) => Ok(self.dispatch(event, stored).await),
                Err(error) => {
                    metrics::publish_failed(&event.delivered.envelope.event_type);
                    Err(error)
                }
            });
        }
        Ok(results)
    }

    /// Validates and prepares all events; an error has no effect.
    fn prepare(&self, events: &[OutgoingEvent]) -> Result<Vec<PendingEvent>> {
        let bytes: usize = events.iter().map(|event| event.payload.len()).sum();
        if events.len() > BATCH_MAX || bytes > BATCH_BYTES_MAX {
            let problem = format!(
                "{} events, {bytes} bytes; the limits are {BATCH_MAX} and {BATCH_BYTES_MAX}",
                events.len()
            );
            return Err(BusError::invalid("batch", problem));
        }
        let mut prepared = Vec::with_capacity(events.len());
        for event in events {
            self.registry.check_outgoing(event)?;
            let session = event.session.clone();
            if event.scope == Scope::Session && session.is_none() {
                let problem = "no session is set, and a local bus has no default session";
                return Err(BusError::invalid(format!("event `{}`", event.event_type), problem));
            }
            let has_caller_id = event.event_id.is_some();
            prepared.push(PendingEvent {
                session,
                delivered: self.to_delivered(event),
                has_caller_id,
            });
        }
        Ok(prepared)
    }

    fn to_delivered(&self, event: &OutgoingEvent) -> DeliveredEvent {
        let event_id = event.event_id.clone().unwrap_or_else(EventId::random);
        let trace = event.trace.unwrap_or_else(trace::next_span);
        let envelope = Envelope::outgoing(event, event_id, "local", trace, self.clock.now());
        DeliveredEvent { value: Arc::clone(&event.value), envelope: Arc::new(envelope) }
    }

    /// For each event, the earlier event with the same id, if there is one.
    async fn find_duplicates(
        &self,
        events: &[PendingEvent],
        batch: &mut DedupBatch<'_>,
    ) -> Vec<Option<StoreOutcome>> {
        let mut duplicates = vec![None; events.len()];
        let mut given: Vec<usize> =
            (0..events.len()).filter(|index| events[*index].has_caller_id).collect();
        // In a fixed order: otherwise two batches with the same ids could wait for each other.
        given.sort_by_key(|index| events[*index].dedup_key());
        for index in given {
            let begun = self.dedup.reserve(batch, events[index].dedup_key()).await;
            let before = begun.err().map(|entry_id| entry_id.unwrap_or(EntryId::MIN));
            duplicates[index] = before.map(StoreOutcome::Duplicate);
        }
        duplicates
    }

    /// The durable subscriptions that accept any of these events.
    fn matching_groups(
        &self,
        events: &[PendingEvent],
        duplicates: &[Option<StoreOutcome>],
    ) -> Vec<GroupBatch> {
        let groups = lock(&self.groups);
        let matching_groups = groups.values().map(|group| {
            let accepts =
                |index: &usize| duplicates[*index].is_none() && group.accepts(&events[*index]);
            GroupBatch {
                group: group.key.2.clone(),
                sender: group.sender.clone(),
                indexes: (0..events.len()).filter(accepts).collect(),
            }
        });
        matching_groups.filter(|matching_groups| !matching_groups.indexes.is_empty()).collect()
    }

    /// Appends new session events, if session storage is open. Returns where each event is stored.
    async fn append_to_sessions(
        &self,
        events: &mut [PendingEvent],
        duplicates: Vec<Option<StoreOutcome>>,
    ) -> Vec<Result<StoreOutcome>> {
        let stored =
            duplicates.iter().map(|duplicates| Ok(duplicates.unwrap_or(StoreOutcome::LocalOnly)));
        let mut stored: Vec<Result<StoreOutcome>> = stored.collect();
        let Some(storage) = self.storage.get() else { return stored };
        let mut sessions: BTreeMap<SessionId, Vec<usize>> = BTreeMap::new();
        for (index, event) in events.iter().enumerate() {
            if let (Some(session), None) = (&event.session, duplicates[index]) {
                sessions.entry(session.clone()).or_default().push(index);
            }
        }
        for (session, indexes) in sessions {
            let stream = storage.keys.session(&session);
            let fields: Vec<Fields> =
                indexes.iter().map(|index| events[*index].delivered.envelope.to_fields()).collect();
            match storage.backend.append(&stream, &fields, &Retention::KEEP_ALL).await {
                Ok(ids) => {
                    for (index, id) in indexes.into_iter().zip(ids) {
                        let envelope = Arc::make_mut(&mut events[index].delivered.envelope);
                        (envelope.stream, envelope.entry_id) = (Some(stream.clone()), Some(id));
                        stored[index] = Ok(StoreOutcome::Entry(id));
                    }
                }
                Err(error) => {
                    let error = BusError::from(error);
                    indexes.iter().for_each(|index| stored[*index] = Err(error.clone()));
                }
            }
        }
        stored
    }

    async fn dispatch(&self, event: PendingEvent, stored: StoreOutcome) -> PublishResult {
        let PendingEvent { session, delivered, .. } = event;
        let event_id = delivered.envelope.event_id.clone();
        metrics::published(&delivered.envelope.event_type, stored.label(), Duration::ZERO);
        let mut result =
            PublishResult { event_id, stored, handlers_invoked: 0, failures: Vec::new() };
        if stored.is_new() {
            let source = EventSource::Here(session.as_ref());
            let dispatched = self.live.dispatch(&delivered, source, None).await;
            (result.handlers_invoked, result.failures) = (dispatched.invoked, dispatched.failures);
        }
        result
    }
}

/// An event to be published.
struct PendingEvent {
    session: Option<SessionId>,
    delivered: DeliveredEvent,
    has_caller_id: bool,
}

impl PendingEvent {
    fn dedup_key(&self) -> DedupKey {
        (self.session.clone(), self.delivered.envelope.event_id.clone())
    }
}

/// The events of a batch that one durable subscription accepts.
struct GroupBatch {
    group: String,
    sender: mpsc::Sender<DeliveredEvent>,
    indexes: Vec<usize>,
}

/// Reserves capacity in the queues of all subscriptions, or fails if one of them is full.
fn reserve_queues(
    matching_groups: &[GroupBatch],
) -> Result<Vec<mpsc::PermitIterator<'_, DeliveredEvent>>> {
    let mut reserved = Vec::with_capacity(matching_groups.len());
    for GroupBatch { group, sender, indexes } in matching_groups {
        let permits = sender.try_reserve_many(indexes.len());
        let full = |_| BusError::QueueFull { group: group.clone(), limit: LOCAL_QUEUE_MAX };
        reserved.push(permits.map_err(full)?);
    }
    Ok(reserved)
}

impl LocalGroup {
    fn accepts(&self, event: &PendingEvent) -> bool {
        self.key.1 == event.session
            && self.handlers.contains(&event.delivered.envelope.event_type.as_str())
    }

    /// Closes the queue and waits for the handlers to drain it.
    async fn stop(self, id: SubscriptionId, until: Instant) {
        // The task ends when its queue is closed and empty.
        drop(self.sender);
        let mut task = AbortOnDropTask(self.task);
        if timeout_at(until, &mut task.0).await.is_err() {
            warn!(subscription = %id, "handlers did not finish within the drain timeout and were aborted");
        }
    }
}

/// Handles the queue of one durable subscription.
#[derive(Clone)]
struct GroupWorker {
    delivery: EventDelivery,
    group: String,
    in_flight_count: Arc<AtomicU64>,
    dead_letters: Arc<Mutex<VecDeque<LocalDeadLetter>>>,
}

impl GroupWorker {
    /// Delivers queued events, up to `concurrency` at once, until the queue is closed.
    async fn run(self, mut queue: mpsc::Receiver<DeliveredEvent>, concurrency: usize) {
        let mut running = JoinSet::new();
        loop {
            // Wait for a free slot before taking an event: a taken event counts as in flight.
            while running.len() >= concurrency {
                running.join_next().await;
            }
            let Some(delivered) = queue.recv().await else { break };
            self.in_flight_count.fetch_add(1, Ordering::SeqCst);
            running.spawn(self.clone().deliver(delivered));
        }
        while running.join_next().await.is_some() {}
    }

    async fn deliver(self, delivered: DeliveredEvent) {
        match self.delivery.run(&delivered).await {
            DeliveryOutcome::Done => {}
            // There is no other process to release it to.
            DeliveryOutcome::Released => {
                add_dead_letter(
                    &self.dead_letters,
                    self.group,
                    delivered,
                    "released by its handler",
                );
            }
            DeliveryOutcome::Failed { reason } => {
                add_dead_letter(&self.dead_letters, self.group, delivered, &reason);
            }
        }
        self.in_flight_count.fetch_sub(1, Ordering::SeqCst);
    }
}

fn add_dead_letter(
    dead_letters: &Mutex<VecDeque<LocalDeadLetter>>,
    group: String,
    delivered: DeliveredEvent,
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

#[cfg(test)]
mod tests {
    use headwater_queue::Outcome;

    use super::*;
    use crate::builtin_events::PromptExecuted;
    use crate::bus::EventBusExt;

    fn answer(session: &str, text: &str) -> OutgoingEvent {
        let session_id = Some(session.to_owned());
        let event = PromptExecuted { session_id, result: text.into(), ..Default::default() };
        OutgoingEvent::new(event).unwrap()
    }

    async fn bus_with_room_for(bytes: u64) -> LocalBus {
        let mut bus = LocalBus::new(EventRegistry::builtin());
        Arc::get_mut(&mut bus.inner).unwrap().session_bytes_max = bytes;
        bus.session_backend().await.unwrap();
        bus
    }

    #[tokio::test]
    async fn full_session_storage_is_an_error_and_no_handler_runs() {
        let bus = bus_with_room_for(10_000).await;
        let handled = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&handled);
        let count = move |_: crate::ReceivedEvent<PromptExecuted>| {
            counted.fetch_add(1, Ordering::SeqCst);
            async {}
        };
        bus.subscribe::<PromptExecuted>(SubscribeOptions::live(), count).await.unwrap();
        let mut published = 0;
        let error = loop {
            match bus.publish_outgoing(answer("a", &"x".repeat(1000))).await {
                Ok(result) => assert!(matches!(result.stored, StoreOutcome::Entry(_))),
                Err(error) => break error,
            }
            published += 1;
            assert!(published < 10, "the storage has no limit");
        };
        assert!(matches!(&error, BusError::Backend(_)) && error.is_transient(), "{error}");
        assert_eq!(handled.load(Ordering::SeqCst), published);
    }

    #[tokio::test]
    async fn each_event_of_a_batch_for_several_sessions_has_its_own_result() {
        let bus = bus_with_room_for(10_000).await;
        let group = SubscribeOptions::durable("all").session(SessionId::new("large").unwrap());
        let refuse =
            |_: crate::ReceivedEvent<PromptExecuted>| async { Outcome::dead_letter("why?") };
        bus.subscribe::<PromptExecuted>(group, refuse).await.unwrap();
        let id = EventId::new("large").unwrap();
        let large = || answer("large", &"x".repeat(20_000)).with_id(id.clone());
        let batch = vec![answer("small", "a"), large(), answer("small", "b")];
        let results = bus.publish_all(batch).await.unwrap();
        let is_stored = |result: &Result<PublishResult>| {
            result.as_ref().is_ok_and(|result| matches!(result.stored, StoreOutcome::Entry(_)))
        };
        assert_eq!(results.iter().map(is_stored).collect::<Vec<_>>(), [true, false, true]);
        // An event that was not published is not a duplicate on the next attempt.
        assert!(bus.publish_outgoing(large()).await.is_err());
        bus.close().await.unwrap();
        assert_eq!(bus.dead_letters(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn closing_waits_one_drain_timeout_for_any_number_of_hanging_handlers() {
        let bus = Arc::new(LocalBus::new(EventRegistry::builtin()));
        let hang = |_: crate::ReceivedEvent<PromptExecuted>| std::future::pending::<()>();
        for label in ["one", "two", "three"] {
            let session = SessionId::new("a").unwrap();
            let long = SubscribeOptions {
                handler_timeout: DRAIN_TIMEOUT * 10,
                ..SubscribeOptions::durable(label)
            };
            bus.subscribe::<PromptExecuted>(long.session(session), hang).await.unwrap();
        }
        bus.publish_outgoing(answer("a", "x")).await.unwrap();
        let began = Instant::now();
        bus.close().await.unwrap();
        assert!(began.elapsed() < DRAIN_TIMEOUT * 2, "{:?}", began.elapsed());
    }
}

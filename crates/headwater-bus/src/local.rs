//! The bus inside one process: everything ends with it.
//!
//! Upstream: applications and their tests. Downstream: `live` and `durable`; the events of sessions go to a journal in
//! memory, if somebody works with sessions.
//! Promises: the same as every bus, as far as a process reaches. A durable subscription has a queue in memory; an event
//! that ran out of tries is kept as a dead letter, the newest thousand of them. Ids that were given are known for ten
//! minutes. Everything has a limit, and full is an error.

mod remembered;

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

use self::remembered::{Place, Remembered, UnderWay};
use crate::background::AbortOnDrop;
use crate::breaker::BreakerState;
use crate::bus::{
    EventBus, GroupHealth, Health, PublishResult, Stored, StreamHealth, Subscribe, SubscriptionKind,
};
use crate::durable::{Closing, Ended, Pursuit};
use crate::error::{BusError, Result};
use crate::event::{Envelope, Outgoing, Scope, publish_span};
use crate::handler::{self, Delivered, Handlers};
use crate::journal::Journal;
use crate::keys::PREFIX;
use crate::limits::{
    BATCH_BYTES_MAX, BATCH_MAX, LOCAL_DEAD_LETTERS_MAX, LOCAL_JOURNAL_BYTES_MAX, LOCAL_QUEUE_MAX,
};
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
    live: LiveList,
    durable: Mutex<HashMap<SubscriptionId, Durable>>,
    dead_letters: Arc<Mutex<VecDeque<LocalDeadLetter>>>,
    next_id: AtomicU64,
    closing: Closing,
    in_flight: Arc<Semaphore>,
    /// Where events of sessions are kept, from the time on when somebody asks for it.
    journal: OnceCell<Journal>,
    journal_bytes: u64,
    remembered: Remembered,
    clock: SystemClock,
}

struct Durable {
    /// The session, for events of one, and the group: there is one subscription for each.
    place: (Scope, Option<SessionId>, String),
    handlers: Vec<&'static str>,
    sender: mpsc::Sender<Delivered>,
    /// Events that are being handled.
    in_hand: Arc<AtomicU64>,
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
            live: LiveList::default(),
            durable: Mutex::default(),
            dead_letters: Arc::default(),
            next_id: AtomicU64::new(1),
            closing,
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT as usize)),
            journal: OnceCell::new(),
            journal_bytes: LOCAL_JOURNAL_BYTES_MAX,
            remembered: Remembered::default(),
            clock: SystemClock,
        };
        Self { inner: Arc::new(inner), stop }
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
        let Some(durable) = durable else { return Ok(false) };
        durable.end(subscription, Instant::now() + DRAIN).await;
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
            let url = format!("embedded:memory?max_bytes={}", self.inner.journal_bytes);
            Journal::new(connect(&url, &Options::default()).await?, PREFIX)
        };
        self.inner.journal.get_or_try_init(open).await.cloned()
    }

    async fn health(&self) -> Health {
        let mut streams: BTreeMap<String, StreamHealth> = BTreeMap::new();
        for durable in lock(&self.inner.durable).values() {
            let waiting = (durable.sender.max_capacity() - durable.sender.capacity()) as u64;
            let pending = durable.in_hand.load(Ordering::SeqCst);
            let place = durable.place.1.as_ref().map_or("namespace", SessionId::as_str);
            let stream = streams.entry(place.to_owned()).or_default();
            stream.length = stream.length.max(waiting + pending);
            let health = GroupHealth { pending, lag: Some(waiting) };
            stream.groups.insert(durable.place.2.clone(), health);
        }
        Health {
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
        let until = Instant::now() + DRAIN;
        let ended = timeout_at(until, self.inner.in_flight.acquire_many(IN_FLIGHT)).await;
        if matches!(ended, Ok(Ok(_))) {
            self.inner.in_flight.close();
        }
        let all: Vec<_> = lock(&self.inner.durable).drain().collect();
        join_all(all.into_iter().map(|(id, durable)| durable.end(id, until))).await;
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
            Scope::Session => Some(subscribe.session.ok_or_else(|| {
                BusError::invalid("a durable subscription", "it names no session")
            })?),
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
        let in_hand = Arc::<AtomicU64>::default();
        let dead_letters = Arc::clone(&self.dead_letters);
        let work = Work { pursuit, group, in_hand: Arc::clone(&in_hand), dead_letters };
        let task = tokio::spawn(work.run(receiver, subscribe.concurrency));
        durable.insert(id, Durable { place, handlers: event_types, sender, in_hand, task });
        Ok(())
    }

    async fn publish_all(&self, events: Vec<Outgoing>) -> Result<Vec<Result<PublishResult>>> {
        let mut prepared = self.prepare(&events)?;
        let mut under_way = self.remembered.under_way();
        let known = self.recognise(&prepared, &mut under_way).await;
        // First room for all of them with those who want them, then storing, then handing over: an error means that
        // nothing happened.
        let wanting = self.wanting(&prepared, &known);
        let reserved = reserve(&wanting)?;
        let first = prepared.first().map(|event| &*event.delivered.envelope);
        let span = publish_span(first, prepared.len());
        let stored = self.record(&mut prepared, known).instrument(span).await;
        for (event, stored) in prepared.iter().zip(&stored) {
            if let Ok(stored) = stored {
                under_way.published(&event.remembered_as(), stored.entry_id());
            }
        }
        // Of those that failed nothing is known any more, for whoever publishes them next: perhaps a handler of others.
        drop(under_way);
        for (room, durable) in reserved.into_iter().zip(&wanting) {
            let is_new = |index: &&usize| matches!(&stored[**index], Ok(stored) if stored.is_new());
            let wanted = durable.wanted.iter().filter(is_new).map(|index| &prepared[*index]);
            room.zip(wanted).for_each(|(place, event)| place.send(event.delivered.clone()));
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

    /// Checks all events and makes them ready; an error leaves everything as it was.
    fn prepare(&self, events: &[Outgoing]) -> Result<Vec<Prepared>> {
        let bytes: usize = events.iter().map(|event| event.payload.len()).sum();
        if events.len() > BATCH_MAX || bytes > BATCH_BYTES_MAX {
            let problem = format!(
                "{} events, {bytes} bytes; the limits are {BATCH_MAX} and {BATCH_BYTES_MAX}",
                events.len()
            );
            return Err(BusError::invalid("a batch", problem));
        }
        let mut prepared = Vec::with_capacity(events.len());
        for event in events {
            self.registry.check_outgoing(event)?;
            let session = event.session.clone();
            if event.scope == Scope::Session && session.is_none() {
                let problem = "it names no session, and a local bus has none";
                return Err(BusError::invalid(format!("an event `{}`", event.event_type), problem));
            }
            let has_given_id = event.event_id.is_some();
            prepared.push(Prepared { session, delivered: self.deliverable(event), has_given_id });
        }
        Ok(prepared)
    }

    fn deliverable(&self, event: &Outgoing) -> Delivered {
        let event_id = event.event_id.clone().unwrap_or_else(EventId::random);
        let trace = event.trace.unwrap_or_else(trace::next_span);
        let envelope = Envelope::outgoing(event, event_id, "local", trace, self.clock.now());
        Delivered { value: Arc::clone(&event.value), envelope: Arc::new(envelope) }
    }

    /// Which events were published before, and where they are then.
    async fn recognise(
        &self,
        events: &[Prepared],
        under_way: &mut UnderWay<'_>,
    ) -> Vec<Option<Stored>> {
        let mut known = vec![None; events.len()];
        let mut given: Vec<usize> =
            (0..events.len()).filter(|index| events[*index].has_given_id).collect();
        // In one order, whoever asks: two batches with the same ids would else wait for each other.
        given.sort_by_key(|index| events[*index].remembered_as());
        for index in given {
            let begun = self.remembered.begin(under_way, events[index].remembered_as()).await;
            let before = begun.err().map(|entry_id| entry_id.unwrap_or(EntryId::MIN));
            known[index] = before.map(Stored::Duplicate);
        }
        known
    }

    /// The durable subscriptions that want any of these events.
    fn wanting(&self, events: &[Prepared], known: &[Option<Stored>]) -> Vec<Wanting> {
        let durable = lock(&self.durable);
        let wanting = durable.values().map(|durable| {
            let wants = |index: &usize| known[*index].is_none() && durable.wants(&events[*index]);
            Wanting {
                group: durable.place.2.clone(),
                sender: durable.sender.clone(),
                wanted: (0..events.len()).filter(wants).collect(),
            }
        });
        wanting.filter(|wanting| !wanting.wanted.is_empty()).collect()
    }

    /// Keeps the new events of sessions, if there is a journal. Says of each event where it is.
    async fn record(
        &self,
        events: &mut [Prepared],
        known: Vec<Option<Stored>>,
    ) -> Vec<Result<Stored>> {
        let stored = known.iter().map(|known| Ok(known.unwrap_or(Stored::LocalOnly)));
        let mut stored: Vec<Result<Stored>> = stored.collect();
        let Some(journal) = self.journal.get() else { return stored };
        let mut sessions: BTreeMap<SessionId, Vec<usize>> = BTreeMap::new();
        for (index, event) in events.iter().enumerate() {
            if let (Some(session), None) = (&event.session, known[index]) {
                sessions.entry(session.clone()).or_default().push(index);
            }
        }
        for (session, indexes) in sessions {
            let stream = journal.keys.session(&session);
            let fields: Vec<Fields> =
                indexes.iter().map(|index| events[*index].delivered.envelope.to_fields()).collect();
            match journal.backend.append(&stream, &fields, &Retention::KEEP_ALL).await {
                Ok(ids) => {
                    for (index, id) in indexes.into_iter().zip(ids) {
                        let envelope = Arc::make_mut(&mut events[index].delivered.envelope);
                        (envelope.stream, envelope.entry_id) = (Some(stream.clone()), Some(id));
                        stored[index] = Ok(Stored::Entry(id));
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

    async fn dispatch(&self, event: Prepared, stored: Stored) -> PublishResult {
        let Prepared { session, delivered, .. } = event;
        let event_id = delivered.envelope.event_id.clone();
        metrics::published(&delivered.envelope.event_type, stored.label(), Duration::ZERO);
        let mut result =
            PublishResult { event_id, stored, handlers_invoked: 0, failures: Vec::new() };
        if stored.is_new() {
            let source = Source::Here(session.as_ref());
            let dispatched = self.live.dispatch(&delivered, source, None).await;
            (result.handlers_invoked, result.failures) = (dispatched.invoked, dispatched.failures);
        }
        result
    }
}

/// An event with its place.
struct Prepared {
    session: Option<SessionId>,
    delivered: Delivered,
    has_given_id: bool,
}

impl Prepared {
    fn remembered_as(&self) -> Place {
        (self.session.clone(), self.delivered.envelope.event_id.clone())
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
    fn wants(&self, event: &Prepared) -> bool {
        self.place.1 == event.session
            && self.handlers.contains(&event.delivered.envelope.event_type.as_str())
    }

    /// Lets its handlers end what they have.
    async fn end(self, id: SubscriptionId, until: Instant) {
        // The task ends when its queue is closed and empty.
        drop(self.sender);
        let mut task = AbortOnDrop(self.task);
        if timeout_at(until, &mut task.0).await.is_err() {
            warn!(subscription = %id, "handlers did not end in time and were stopped");
        }
    }
}

/// What a durable subscription does with its events.
#[derive(Clone)]
struct Work {
    pursuit: Pursuit,
    group: String,
    in_hand: Arc<AtomicU64>,
    dead_letters: Arc<Mutex<VecDeque<LocalDeadLetter>>>,
}

impl Work {
    /// Pursues what comes in, up to `concurrency` events at once, until the queue is closed.
    async fn run(self, mut queue: mpsc::Receiver<Delivered>, concurrency: usize) {
        let mut running = JoinSet::new();
        loop {
            // Room first: what is taken is in hand.
            while running.len() >= concurrency {
                running.join_next().await;
            }
            let Some(delivered) = queue.recv().await else { break };
            self.in_hand.fetch_add(1, Ordering::SeqCst);
            running.spawn(self.clone().pursue(delivered));
        }
        while running.join_next().await.is_some() {}
    }

    async fn pursue(self, delivered: Delivered) {
        match self.pursuit.run(&delivered).await {
            Ended::Done => {}
            // Nobody is left to give it to.
            Ended::Released => {
                bury(&self.dead_letters, self.group, delivered, "it was given back");
            }
            Ended::GivenUp { reason } => bury(&self.dead_letters, self.group, delivered, &reason),
        }
        self.in_hand.fetch_sub(1, Ordering::SeqCst);
    }
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

#[cfg(test)]
mod tests {
    use headwater_queue::Outcome;

    use super::*;
    use crate::builtin::PromptExecuted;
    use crate::bus::EventBusExt;

    fn answer(session: &str, text: &str) -> Outgoing {
        let session_id = Some(session.to_owned());
        let event = PromptExecuted { session_id, result: text.into(), ..Default::default() };
        Outgoing::new(event).unwrap()
    }

    async fn bus_with_room_for(bytes: u64) -> LocalBus {
        let mut bus = LocalBus::new(Registry::builtin());
        Arc::get_mut(&mut bus.inner).unwrap().journal_bytes = bytes;
        bus.journal().await.unwrap();
        bus
    }

    #[tokio::test]
    async fn a_journal_that_is_full_is_an_error_and_no_handler_runs() {
        let bus = bus_with_room_for(10_000).await;
        let handled = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&handled);
        let count = move |_: crate::Received<PromptExecuted>| {
            counted.fetch_add(1, Ordering::SeqCst);
            async {}
        };
        bus.subscribe::<PromptExecuted>(Subscribe::live(), count).await.unwrap();
        let mut published = 0;
        let error = loop {
            match bus.publish_outgoing(answer("a", &"x".repeat(1000))).await {
                Ok(result) => assert!(matches!(result.stored, Stored::Entry(_))),
                Err(error) => break error,
            }
            published += 1;
            assert!(published < 10, "it has no limit");
        };
        assert!(matches!(&error, BusError::Backend(_)) && error.is_transient(), "{error}");
        assert_eq!(handled.load(Ordering::SeqCst), published);
    }

    #[tokio::test]
    async fn of_a_batch_for_several_sessions_each_event_says_what_became_of_it() {
        let bus = bus_with_room_for(10_000).await;
        let group = Subscribe::durable("all").session(SessionId::new("large").unwrap());
        let refuse = |_: crate::Received<PromptExecuted>| async { Outcome::dead_letter("why?") };
        bus.subscribe::<PromptExecuted>(group, refuse).await.unwrap();
        let id = EventId::new("large").unwrap();
        let large = || answer("large", &"x".repeat(20_000)).with_id(id.clone());
        let batch = vec![answer("small", "a"), large(), answer("small", "b")];
        let results = bus.publish_all(batch).await.unwrap();
        let is_stored = |result: &Result<PublishResult>| {
            result.as_ref().is_ok_and(|result| matches!(result.stored, Stored::Entry(_)))
        };
        assert_eq!(results.iter().map(is_stored).collect::<Vec<_>>(), [true, false, true]);
        // What was not published is no duplicate the next time.
        assert!(bus.publish_outgoing(large()).await.is_err());
        bus.close().await.unwrap();
        assert_eq!(bus.dead_letters(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn closing_takes_one_drain_however_many_handlers_hang() {
        let bus = Arc::new(LocalBus::new(Registry::builtin()));
        let hang = |_: crate::Received<PromptExecuted>| std::future::pending::<()>();
        for label in ["one", "two", "three"] {
            let session = SessionId::new("a").unwrap();
            let long = Subscribe { handler_timeout: DRAIN * 10, ..Subscribe::durable(label) };
            bus.subscribe::<PromptExecuted>(long.session(session), hang).await.unwrap();
        }
        bus.publish_outgoing(answer("a", "x")).await.unwrap();
        let began = Instant::now();
        bus.close().await.unwrap();
        assert!(began.elapsed() < DRAIN * 2, "{:?}", began.elapsed());
    }
}

//! The fixture of the scenarios, with its buses.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{
    BreakerConfig, Envelope, EventBusExt, EventRegistry, Namespace, ReceivedEvent, SessionId,
    StreamedBus, StreamedBusConfig, SubscribeOptions,
};
use headwater_conformance::bus::{HandlerLog, Noted, registry};
use headwater_stream::{Backend, Entry, EntryId, Fields, Options, Retention, StreamName, connect};

pub(crate) use crate::backends::entries;
use crate::backends::{Target, new_prefix};
use crate::outage_fixture::LIMIT;

/// A backend, with a unique key prefix.
pub(crate) struct Fixture {
    target: Target,
    /// Call deadline of the buses.
    call_deadline: Duration,
    pub(crate) prefix: String,
    pub(crate) session: SessionId,
}

impl Fixture {
    pub(crate) async fn embedded() -> Self {
        Self::new(Target::embedded().await)
    }

    pub(crate) fn redis() -> Self {
        Self::new(Target::redis())
    }

    pub(crate) fn cluster() -> Self {
        Self::new(Target::cluster())
    }

    /// On a server that will be unavailable: buses detect it soon.
    pub(crate) fn at(url: String) -> Self {
        Self::on(Target::Url(url))
    }

    /// On a backend that will be unavailable: buses detect it soon.
    pub(crate) fn on(target: Target) -> Self {
        Self { call_deadline: OUTAGE_CALL_DEADLINE, ..Self::new(target) }
    }

    fn new(target: Target) -> Self {
        let (prefix, session) = (new_prefix(), SessionId::random());
        Self { target, call_deadline: LIMIT, prefix, session }
    }

    pub(crate) fn url(&self) -> &str {
        match &self.target {
            Target::Url(url) => url,
            _ => panic!("it has no address"),
        }
    }

    /// A backend with a long call deadline, for assertions.
    pub(crate) async fn connect(&self) -> Arc<dyn Backend> {
        self.target.connect(&with_call_deadline(LIMIT)).await
    }

    pub(crate) fn config(&self) -> StreamedBusConfig {
        StreamedBusConfig {
            prefix: self.prefix.clone(),
            namespace: Namespace::new("tests").unwrap(),
            session: Some(self.session.clone()),
            breaker: quick_breaker(),
            ..Default::default()
        }
    }

    pub(crate) async fn bus(&self) -> StreamedBus {
        self.bus_with(registry(), self.config()).await
    }

    pub(crate) async fn bus_with(
        &self,
        registry: EventRegistry,
        config: StreamedBusConfig,
    ) -> StreamedBus {
        let backend = self.target.connect(&with_call_deadline(self.call_deadline)).await;
        StreamedBus::open(backend, registry, config).await.unwrap()
    }

    /// The stream of the fixture's session.
    pub(crate) fn stream(&self) -> StreamName {
        self.stream_of(self.session.as_str())
    }

    pub(crate) fn stream_of(&self, session: &str) -> StreamName {
        StreamName::new(format!("{}:events:{session}", self.prefix)).unwrap()
    }

    pub(crate) async fn append(&self, fields: &[(&str, &str)]) -> EntryId {
        let fields = Fields::new(fields.iter().map(|(n, v)| (n.to_string(), v.to_string())));
        let backend = self.connect().await;
        backend.append(&self.stream(), &[fields], &Retention::KEEP_ALL).await.unwrap()[0]
    }

    pub(crate) fn noted(&self, number: u64) -> Noted {
        noted(&self.session, number)
    }
}

/// A session event.
pub(crate) fn noted(session: &SessionId, number: u64) -> Noted {
    Noted { session_id: Some(session.to_string()), number, text: String::new() }
}

/// Call deadline of a bus whose server will be unavailable: long enough for a slow server.
pub(crate) const OUTAGE_CALL_DEADLINE: Duration = Duration::from_secs(4);

fn with_call_deadline(call_deadline: Duration) -> Options {
    Options { call_deadline, ..Default::default() }
}

/// A backend with a long call deadline, for assertions.
pub(crate) async fn open(url: &str) -> Arc<dyn Backend> {
    connect(url, &with_call_deadline(LIMIT)).await.unwrap()
}

/// A backend for a bus whose server will be unavailable.
pub(crate) async fn open_with_short_leases(url: &str) -> Arc<dyn Backend> {
    connect(url, &with_call_deadline(OUTAGE_CALL_DEADLINE)).await.unwrap()
}

pub(crate) fn quick_breaker() -> BreakerConfig {
    BreakerConfig { failure_threshold: 3, recovery: Duration::from_millis(300) }
}

/// Logs the numbers of events.
pub(crate) fn writes(
    log: &HandlerLog,
) -> impl Fn(ReceivedEvent<Noted>) -> std::future::Ready<()> + use<> {
    let log = log.clone();
    move |event| {
        log.add(event.number);
        std::future::ready(())
    }
}

/// A log of the events that a live subscription of the bus receives.
pub(crate) async fn watch(bus: &StreamedBus) -> HandlerLog {
    let log = HandlerLog::default();
    bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log)).await.unwrap();
    log
}

pub(crate) fn numbers(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

/// The numbers of the events in a stream, in order.
pub(crate) async fn stored(backend: &dyn Backend, stream: &StreamName) -> Vec<u64> {
    let read = |entry: Entry| {
        let envelope = Envelope::from_entry(stream, entry.id, &entry.fields).unwrap();
        registry().decode::<Noted>(&envelope).unwrap().number
    };
    entries(backend, stream).await.into_iter().map(read).collect()
}

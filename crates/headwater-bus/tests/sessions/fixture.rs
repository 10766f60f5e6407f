//! The fixture of the scenarios, with its sessions.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{
    EventRegistry, Export, Fold, Folds, Session, SessionEvent, SessionId, Sessions, SessionsConfig,
    StreamedBus, StreamedBusConfig,
};
use headwater_conformance::bus::{Noted, registry};
use headwater_stream::{Backend, Entry, EntryId, Fields, Options, Retention, StreamName, connect};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::backends::{Target, entries, new_prefix};

/// Runs each scenario on all three backends.
macro_rules! on_every_bus {
    ($($scenario:ident),* $(,)?) => {
        on_streams!($($scenario),*);
    };
}

/// A backend, with a unique key prefix.
pub(crate) struct Fixture {
    target: Target,
    pub(crate) prefix: String,
    pub(crate) session: SessionId,
    _directory: Option<TempDir>,
}

/// Sums up numbers, sensitive to their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sum {
    pub(crate) total: u64,
    pub(crate) count: u64,
    /// A checksum that depends on the order of all numbers.
    pub(crate) order: u64,
}

impl Fold for Sum {
    const NAME: &'static str = "tests.Sum";

    fn apply(&mut self, event: &SessionEvent) {
        if let Some(noted) = event.get::<Noted>() {
            self.add(noted.number);
        }
    }
}

impl Sum {
    pub(crate) fn add(&mut self, number: u64) {
        self.total += number;
        self.count += 1;
        self.order = self.order.wrapping_mul(31).wrapping_add(number);
    }

    pub(crate) fn of(numbers: impl IntoIterator<Item = u64>) -> Self {
        let mut sum = Self::default();
        numbers.into_iter().for_each(|number| sum.add(number));
        sum
    }
}

pub(crate) fn folds() -> Folds {
    Folds::none().latest::<Noted>().all::<Noted>(10).with::<Sum>()
}

/// Without automatic snapshots.
pub(crate) fn by_hand() -> SessionsConfig {
    SessionsConfig { snapshot_every: None, ..Default::default() }
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

    pub(crate) fn at(url: String) -> Self {
        Self::on(Target::Url(url))
    }

    pub(crate) fn on(target: Target) -> Self {
        Self::new(target)
    }

    fn new(target: Target) -> Self {
        Self { target, prefix: new_prefix(), session: SessionId::random(), _directory: None }
    }

    /// With an embedded backend on disk: every change takes a while.
    pub(crate) async fn on_disk(self) -> Self {
        if !matches!(self.target, Target::Shared(_)) {
            return self;
        }
        let directory = tempfile::tempdir().unwrap();
        let url = format!("embedded:{}", directory.path().join("streams").display());
        let backend = connect(&url, &Options::default()).await.unwrap();
        Self { target: Target::Shared(backend), _directory: Some(directory), ..self }
    }

    /// The same backend with another key prefix.
    pub(crate) fn another(&self) -> Self {
        Self::new(self.target.clone())
    }

    pub(crate) async fn backend(&self) -> Arc<dyn Backend> {
        self.target.connect(&long_deadline()).await
    }

    pub(crate) async fn bus(&self) -> Arc<StreamedBus> {
        self.bus_for(registry()).await
    }

    pub(crate) async fn bus_for(&self, registry: EventRegistry) -> Arc<StreamedBus> {
        let config = StreamedBusConfig { prefix: self.prefix.clone(), ..Default::default() };
        Arc::new(StreamedBus::open(self.backend().await, registry, config).await.unwrap())
    }

    /// Sessions, as another process would open them.
    pub(crate) async fn sessions(&self) -> Sessions {
        self.sessions_with(folds(), by_hand()).await
    }

    pub(crate) async fn sessions_with(&self, folds: Folds, config: SessionsConfig) -> Sessions {
        Sessions::new(self.bus().await, folds, config).await.unwrap()
    }

    pub(crate) fn stream(&self) -> StreamName {
        self.stream_of(&self.session)
    }

    pub(crate) fn stream_of(&self, session: &SessionId) -> StreamName {
        StreamName::new(format!("{}:events:{session}", self.prefix)).unwrap()
    }

    pub(crate) async fn append(&self, fields: &[(&str, &str)]) -> EntryId {
        let fields = Fields::new(fields.iter().map(|(n, v)| (n.to_string(), v.to_string())));
        let backend = self.backend().await;
        backend.append(&self.stream(), &[fields], &Retention::KEEP_ALL).await.unwrap()[0]
    }

    pub(crate) async fn entries(&self, session: &SessionId) -> Vec<Entry> {
        entries(&*self.backend().await, &self.stream_of(session)).await
    }
}

/// Sessions of a bus in memory.
pub(crate) async fn in_memory() -> Sessions {
    let bus = Arc::new(StreamedBus::in_memory(registry()).await.unwrap());
    Sessions::new(bus, folds(), by_hand()).await.unwrap()
}

pub(crate) fn noted(number: u64) -> Noted {
    Noted { session_id: None, number, text: format!("note {number}") }
}

/// Publishes numbers in batches.
pub(crate) async fn publish(session: &Session, numbers: std::ops::Range<u64>) {
    let all: Vec<u64> = numbers.collect();
    for batch in all.chunks(1000) {
        let events = batch.iter().map(|number| headwater_bus::OutgoingEvent::new(noted(*number)));
        let events = events.collect::<Result<Vec<_>, _>>().unwrap();
        for result in session.publish_all(events).await.unwrap() {
            result.unwrap();
        }
    }
}

/// The lines of an export.
pub(crate) async fn lines_of(mut export: Export) -> Vec<String> {
    let mut lines = Vec::new();
    while let Some(line) = export.next_line().await.unwrap() {
        assert!(!line.contains('\n'));
        lines.push(line);
    }
    lines
}

pub(crate) fn sum(session: &Session) -> Sum {
    session.get::<Sum>().unwrap()
}

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A server that is only slow must not count as unavailable.
fn long_deadline() -> Options {
    Options { call_deadline: LIMIT, ..Default::default() }
}

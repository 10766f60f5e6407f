//! A metrics recorder and a span subscriber for tests.
//!
//! A recorder is thread-local: a test that uses one runs on a single thread, so that it records only its own tasks.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use tokio::time::{Instant, sleep};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};

/// Timeout for a metric to reach its value.
const LIMIT: Duration = Duration::from_secs(90);

/// All recorded spans with their fields.
#[derive(Clone, Default)]
pub(crate) struct Spans(Arc<Mutex<Vec<Span>>>);

/// Name and fields.
pub(crate) type Span = (String, BTreeMap<String, String>);

impl Spans {
    /// One for the whole process: with subscribers per test, some spans would be missed.
    pub(crate) fn of_all() -> Self {
        static SPANS: OnceLock<Spans> = OnceLock::new();
        let spans = SPANS.get_or_init(|| {
            let spans = Spans::default();
            tracing::subscriber::set_global_default(spans.clone()).unwrap();
            spans
        });
        spans.clone()
    }

    pub(crate) fn all(&self) -> Vec<Span> {
        self.0.lock().unwrap().clone()
    }
}

struct Fields<'a>(&'a mut BTreeMap<String, String>);

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

impl Subscriber for Spans {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("headwater_bus")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = BTreeMap::new();
        span.record(&mut Fields(&mut fields));
        let mut spans = self.0.lock().unwrap();
        spans.push((span.metadata().name().to_owned(), fields));
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Values of counters, gauges and histograms, by name and labels.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts(Arc<Mutex<BTreeMap<String, i64>>>);

impl Counts {
    /// The value of a metric, given without the prefix of this crate.
    pub(crate) fn of(&self, name: &str) -> Option<i64> {
        self.0.lock().unwrap().get(&format!("headwater_bus_{name}")).copied()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.0.lock().unwrap().keys().cloned().collect()
    }

    /// Waits, because a metric is updated a moment after the handler ran.
    pub(crate) async fn come_to(&self, expected: &[(&str, i64)]) {
        let all = || expected.iter().all(|(name, count)| self.of(name) == Some(*count));
        let deadline = Instant::now() + LIMIT;
        while !all() && Instant::now() < deadline {
            sleep(Duration::from_millis(5)).await;
        }
        for (name, count) in expected {
            assert_eq!(self.of(name), Some(*count), "{name} in {self:?}");
        }
    }

    fn count(&self, key: &Key) -> Arc<Count> {
        let labels = key.labels().map(|label| format!("{{{}={}}}", label.key(), label.value()));
        let name = format!("{}{}", key.name(), labels.collect::<String>());
        Arc::new(Count(self.clone(), name))
    }
}

struct Count(Counts, String);

impl Count {
    fn change(&self, change: impl FnOnce(&mut i64)) {
        change(self.0.0.lock().unwrap().entry(self.1.clone()).or_default());
    }
}

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        self.change(|count| *count += value as i64);
    }

    fn absolute(&self, _: u64) {}
}

impl GaugeFn for Count {
    fn increment(&self, value: f64) {
        self.change(|count| *count += value as i64);
    }

    fn decrement(&self, value: f64) {
        self.change(|count| *count -= value as i64);
    }

    fn set(&self, value: f64) {
        self.change(|count| *count = value as i64);
    }
}

impl HistogramFn for Count {
    fn record(&self, _: f64) {
        self.change(|count| *count += 1);
    }
}

impl Recorder for Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.count(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.count(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.count(key))
    }
}

//! Captures metrics and warnings of a test. Only of the test's own thread, so the test needs a single-threaded runtime.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber, span};

/// Values of all metrics: one per counter and gauge, all recorded ones per histogram.
#[derive(Clone, Default)]
pub(crate) struct CapturedMetrics(Arc<Mutex<BTreeMap<String, Vec<f64>>>>);

impl CapturedMetrics {
    /// Captures until the guard is dropped.
    pub(crate) fn start() -> (&'static Self, metrics::LocalRecorderGuard<'static>) {
        let metrics_seen: &'static Self = Box::leak(Box::default());
        (metrics_seen, metrics::set_default_local_recorder(metrics_seen))
    }

    /// Value of a counter or gauge, by its name followed by `{label=value}`. 0 if it was never set.
    pub(crate) fn value(&self, name: &str) -> f64 {
        self.values(name).first().copied().unwrap_or_default()
    }

    /// Recorded values of a histogram.
    pub(crate) fn values(&self, name: &str) -> Vec<f64> {
        self.lock().get(name).cloned().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Vec<f64>>> {
        self.0.lock().expect("not poisoned")
    }

    fn meter(&self, key: &Key) -> Arc<CapturedMetric> {
        let mut name = key.name().to_owned();
        for (number, label) in key.labels().enumerate() {
            let begin = if number == 0 { '{' } else { ',' };
            let _ = write!(name, "{begin}{}={}", label.key(), label.value());
        }
        if name.contains('{') {
            name.push('}');
        }
        Arc::new(CapturedMetric { metrics_seen: self.clone(), name })
    }
}

struct CapturedMetric {
    metrics_seen: CapturedMetrics,
    name: String,
}

impl CapturedMetric {
    fn change(&self, change: impl Fn(f64) -> f64) {
        let mut values = self.metrics_seen.lock();
        let value = values.entry(self.name.clone()).or_insert_with(|| vec![0.0]);
        value[0] = change(value[0]);
    }
}

impl CounterFn for CapturedMetric {
    fn increment(&self, value: u64) {
        self.change(|current| current + value as f64);
    }

    fn absolute(&self, value: u64) {
        self.change(|_| value as f64);
    }
}

impl GaugeFn for CapturedMetric {
    fn increment(&self, value: f64) {
        self.change(|current| current + value);
    }

    fn decrement(&self, value: f64) {
        self.change(|current| current - value);
    }

    fn set(&self, value: f64) {
        self.change(|_| value);
    }
}

impl HistogramFn for CapturedMetric {
    fn record(&self, value: f64) {
        self.metrics_seen.lock().entry(self.name.clone()).or_default().push(value);
    }
}

impl Recorder for CapturedMetrics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.meter(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.meter(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.meter(key))
    }
}

/// Warnings and errors of the log, one line each: message and fields.
#[derive(Clone, Debug, Default)]
pub(crate) struct CapturedWarnings(Arc<Mutex<Vec<String>>>);

impl CapturedWarnings {
    /// Captures until the guard is dropped.
    pub(crate) fn start() -> (Self, tracing::subscriber::DefaultGuard) {
        let warnings = Self::default();
        let guard = tracing::subscriber::set_default(warnings.clone());
        (warnings, guard)
    }

    /// The lines that contain this text.
    pub(crate) fn containing(&self, text: &str) -> Vec<String> {
        let lines = self.0.lock().expect("not poisoned");
        lines.iter().filter(|line| line.contains(text)).cloned().collect()
    }
}

impl Subscriber for CapturedWarnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        self.0.lock().expect("not poisoned").push(line.0);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}

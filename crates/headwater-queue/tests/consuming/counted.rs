//! A recorder of metrics, so that tests can ask how often something was counted, what it was last and how long it took.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use metrics::{
    Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

#[derive(Clone, Default)]
struct Counters {
    counts: Arc<Mutex<HashMap<Key, Arc<Count>>>>,
    gauges: Arc<Mutex<HashMap<Key, Arc<AtomicU64>>>>,
    times: Arc<Mutex<HashMap<Key, Arc<Times>>>>,
}

#[derive(Default)]
struct Times(Mutex<Vec<f64>>);

impl HistogramFn for Times {
    fn record(&self, value: f64) {
        self.0.lock().expect("nobody panicked").push(value);
    }
}

#[derive(Default)]
struct Count(AtomicU64);

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        self.0.fetch_add(value, Ordering::Relaxed);
    }

    fn absolute(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut counters = self.counts.lock().expect("nobody panicked");
        Counter::from_arc(Arc::clone(counters.entry(key.clone()).or_default()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let mut gauges = self.gauges.lock().expect("nobody panicked");
        Gauge::from_arc(Arc::clone(gauges.entry(key.clone()).or_default()))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let mut times = self.times.lock().expect("nobody panicked");
        Histogram::from_arc(Arc::clone(times.entry(key.clone()).or_default()))
    }
}

fn counters() -> &'static Counters {
    static COUNTERS: OnceLock<Counters> = OnceLock::new();
    COUNTERS.get_or_init(|| {
        let counters = Counters::default();
        metrics::set_global_recorder(counters.clone()).expect("nobody else installs one");
        counters
    })
}

/// Counts from now on. To be called before anything is subscribed.
pub(crate) fn start_counting() {
    counters();
}

/// How often something was counted for a topic, whatever the other labels.
pub(crate) fn counted(name: &str, topic: &str, result: &str) -> u64 {
    let counts = counters().counts.lock().expect("nobody panicked");
    let meant = counts.iter().filter(|(key, _)| is_meant(key, name, topic, result));
    meant.map(|(_, count)| count.0.load(Ordering::Relaxed)).sum()
}

/// What a gauge of a topic shows, if there is one.
pub(crate) fn gauged(name: &str, topic: &str) -> Option<f64> {
    let gauges = counters().gauges.lock().expect("nobody panicked");
    let gauge = gauges.iter().find(|(key, _)| is_meant(key, name, topic, ""));
    gauge.map(|(_, value)| f64::from_bits(value.load(Ordering::Relaxed)))
}

/// The seconds that were recorded for a topic.
pub(crate) fn timed(name: &str, topic: &str, result: &str) -> Vec<f64> {
    let times = counters().times.lock().expect("nobody panicked");
    let meant = times.iter().filter(|(key, _)| is_meant(key, name, topic, result));
    meant.flat_map(|(_, times)| times.0.lock().expect("nobody panicked").clone()).collect()
}

fn is_meant(key: &Key, name: &str, topic: &str, result: &str) -> bool {
    let has = |label: &str, value: &str| {
        key.labels().any(|known| known.key() == label && known.value() == value)
    };
    key.name() == name && has("topic", topic) && (result.is_empty() || has("result", result))
}

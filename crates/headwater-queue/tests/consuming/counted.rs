//! A recorder of metrics, so that tests can ask how often something was counted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use metrics::{
    Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

#[derive(Clone, Default)]
struct Counters(Arc<Mutex<HashMap<Key, Arc<Count>>>>);

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
        let mut counters = self.0.lock().expect("nobody panicked");
        Counter::from_arc(Arc::clone(counters.entry(key.clone()).or_default()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
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
    let is_meant = |key: &Key| {
        let has = |label: &str, value: &str| {
            key.labels().any(|known| known.key() == label && known.value() == value)
        };
        key.name() == name && has("topic", topic) && (result.is_empty() || has("result", result))
    };
    let counters = counters().0.lock().expect("nobody panicked");
    let meant = counters.iter().filter(|(key, _)| is_meant(key));
    meant.map(|(_, count)| count.0.load(Ordering::Relaxed)).sum()
}

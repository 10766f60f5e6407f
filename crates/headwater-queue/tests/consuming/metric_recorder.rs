//! A metrics recorder, so that tests can read counters, gauges and histograms.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use metrics::{
    Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

#[derive(Clone, Default)]
struct MetricValues {
    counters: Arc<Mutex<HashMap<Key, Arc<CounterValue>>>>,
    gauges: Arc<Mutex<HashMap<Key, Arc<AtomicU64>>>>,
    histograms: Arc<Mutex<HashMap<Key, Arc<HistogramValues>>>>,
}

#[derive(Default)]
struct HistogramValues(Mutex<Vec<f64>>);

impl HistogramFn for HistogramValues {
    fn record(&self, value: f64) {
        self.0.lock().expect("no test panicked while holding it").push(value);
    }
}

#[derive(Default)]
struct CounterValue(AtomicU64);

impl CounterFn for CounterValue {
    fn increment(&self, value: u64) {
        self.0.fetch_add(value, Ordering::Relaxed);
    }

    fn absolute(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl Recorder for MetricValues {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut counters = self.counters.lock().expect("no test panicked while holding it");
        Counter::from_arc(Arc::clone(counters.entry(key.clone()).or_default()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let mut gauges = self.gauges.lock().expect("no test panicked while holding it");
        Gauge::from_arc(Arc::clone(gauges.entry(key.clone()).or_default()))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let mut histograms = self.histograms.lock().expect("no test panicked while holding it");
        Histogram::from_arc(Arc::clone(histograms.entry(key.clone()).or_default()))
    }
}

fn values() -> &'static MetricValues {
    static VALUES: OnceLock<MetricValues> = OnceLock::new();
    VALUES.get_or_init(|| {
        let values = MetricValues::default();
        metrics::set_global_recorder(values.clone()).expect("no other recorder is installed");
        values
    })
}

/// Installs the recorder. To be called before subscribing.
pub(crate) fn install_metric_recorder() {
    values();
}

/// The sum of a counter for a topic and result, over all other labels. An empty result matches all.
pub(crate) fn counter_value(name: &str, topic: &str, result: &str) -> u64 {
    let counters = values().counters.lock().expect("no test panicked while holding it");
    let matching = counters.iter().filter(|(key, _)| matches(key, name, topic, result));
    matching.map(|(_, count)| count.0.load(Ordering::Relaxed)).sum()
}

/// The values of a label, of all counters and gauges of a topic.
pub(crate) fn label_values(label: &str, topic: &str) -> BTreeSet<String> {
    let counters = values().counters.lock().expect("no test panicked while holding it");
    let gauges = values().gauges.lock().expect("no test panicked while holding it");
    let of_topic = |key: &&Key| matches(key, key.name(), topic, "");
    let keys = counters.keys().chain(gauges.keys()).filter(of_topic);
    let labels = keys.flat_map(|key| key.labels().filter(|known| known.key() == label));
    labels.map(|label| label.value().to_owned()).collect()
}

/// The value of a gauge of a topic.
pub(crate) fn gauge_value(name: &str, topic: &str) -> Option<f64> {
    let gauges = values().gauges.lock().expect("no test panicked while holding it");
    let gauge = gauges.iter().find(|(key, _)| matches(key, name, topic, ""));
    gauge.map(|(_, value)| f64::from_bits(value.load(Ordering::Relaxed)))
}

/// The values of a histogram for a topic and result.
pub(crate) fn histogram_values(name: &str, topic: &str, result: &str) -> Vec<f64> {
    let histograms = values().histograms.lock().expect("no test panicked while holding it");
    let matching = histograms.iter().filter(|(key, _)| matches(key, name, topic, result));
    matching
        .flat_map(|(_, histograms)| {
            histograms.0.lock().expect("no test panicked while holding it").clone()
        })
        .collect()
}

fn matches(key: &Key, name: &str, topic: &str, result: &str) -> bool {
    let has = |label: &str, value: &str| {
        key.labels().any(|known| known.key() == label && known.value() == value)
    };
    key.name() == name && has("topic", topic) && (result.is_empty() || has("result", result))
}

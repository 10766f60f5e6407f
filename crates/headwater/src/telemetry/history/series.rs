//! What the history records: which metrics, how they are read from the text of `/metrics`, and how values are combined.
//!
//! Upstream: `mod.rs` takes samples. Downstream: `rows.rs` stores them, `api/history.rs` shows them. Guarantees: the number of
//! series is fixed, so a sample has a fixed size; values of two processes, or of two times, can be combined in any order.

use serde_json::{Map, Value, json};

use crate::telemetry::SECONDS;

/// Buckets of a latency: one for each bound of [`SECONDS`], and one above.
const BUCKETS: usize = SECONDS.len() + 1;

/// A counter: its increase in a step.
struct CounterSeries {
    name: &'static str,
    metric: &'static str,
    /// Only metrics with one of these labels; empty for all.
    labels: &'static [&'static str],
    meaning: &'static str,
}

/// A gauge of the whole installation: its largest value in a step.
struct GaugeSeries {
    name: &'static str,
    metric: &'static str,
    /// Only the metric with this label; empty if it has none.
    label: &'static str,
    /// What the value is multiplied with.
    factor: f64,
    meaning: &'static str,
}

/// A histogram, of which quantiles are shown.
struct LatencySeries {
    /// In stored rows.
    name: &'static str,
    metric: &'static str,
    /// Name, quantile and meaning of each shown series.
    quantiles: [(&'static str, f64, &'static str); 3],
    /// Name and meaning of the series of all buckets.
    buckets: (&'static str, &'static str),
}

#[rustfmt::skip]
const COUNTERS: [CounterSeries; 16] = [
    counter("events", "headwater_events_recorded_total", &["result=\"recorded\""], "events recorded"),
    counter("runs", "headwater_issues_processed_total", &["result=\"done\""], "runs that ended well"),
    counter("runs_failed", "headwater_issues_processed_total", &["result=\"failed\"", "result=\"quarantined\""], "runs that failed"),
    counter("deliveries", "headwater_outbox_deliveries_total", &["result=\"delivered\""], "replies and events delivered"),
    counter("deliveries_failed", "headwater_outbox_deliveries_total", &["result=\"retry\"", "result=\"away\"", "result=\"dead\""], "deliveries that failed"),
    counter("deliveries_refused", "headwater_outbox_deliveries_total", &["result=\"retry\"", "result=\"dead\""], "deliveries that the receiver refused"),
    counter("deliveries_away", "headwater_outbox_deliveries_total", &["result=\"away\""], "deliveries whose receiver was unavailable"),
    counter("model_failures", "headwater_model_failures_total", &[], "calls of the model that failed"),
    counter("messages", "headwater_produced_total", &["result=\"ok\""], "messages sent to topics"),
    counter("messages_done", "headwater_acks_total", &[], "messages settled"),
    counter("dead_letters", "headwater_dead_letters_total", &[], "messages that became dead letters"),
    counter("dead_letters_handler", "headwater_dead_letters_total", &["result=\"attempts\"", "result=\"handler\""], "dead letters whose handler failed or rejected them"),
    counter("dead_letters_crashes", "headwater_dead_letters_total", &["result=\"crashes\""], "dead letters whose consumers crashed"),
    counter("dead_letters_malformed", "headwater_dead_letters_total", &["result=\"malformed\"", "result=\"missing\""], "dead letters that could not be read"),
    counter("http_requests", "headwater_http_requests_total", &[], "HTTP requests"),
    counter("http_errors", "headwater_http_requests_total", &["status=\"500\"", "status=\"502\"", "status=\"503\"", "status=\"504\""], "HTTP requests that failed in the server"),
];

#[rustfmt::skip]
const GAUGES: [GaugeSeries; 7] = [
    gauge("queued", "headwater_issues", "status=\"queued\"", 1.0, "issues that wait for a worker"),
    gauge("oldest_wait_ms", "headwater_issues_oldest_wait_seconds", "", 1000.0, "longest time that a queued issue has waited"),
    gauge("processing", "headwater_issues", "status=\"processing\"", 1.0, "issues in processing"),
    gauge("quarantined", "headwater_issues", "status=\"quarantined\"", 1.0, "quarantined issues"),
    gauge("outbox_pending", "headwater_outbox_rows", "status=\"pending\"", 1.0, "replies and events to deliver"),
    gauge("outbox_dead", "headwater_outbox_rows", "status=\"dead\"", 1.0, "replies and events that were given up"),
    gauge("outbox_lag_ms", "headwater_outbox_lag_seconds", "", 1000.0, "age of the oldest reply or event to deliver"),
];

const LATENCIES: [LatencySeries; 2] = [
    LatencySeries {
        name: "run",
        metric: "headwater_issues_processing_duration_seconds_bucket",
        quantiles: [
            ("run_p50_ms", 0.5, "half of the runs took at most this long"),
            ("run_p95_ms", 0.95, "95 % of the runs took at most this long"),
            ("run_p99_ms", 0.99, "99 % of the runs took at most this long"),
        ],
        buckets: ("run_times", "how many runs took up to each bound, and how many longer"),
    },
    LatencySeries {
        name: "http",
        metric: "headwater_http_duration_seconds_bucket",
        quantiles: [
            ("http_p50_ms", 0.5, "half of the HTTP responses began within this time"),
            ("http_p95_ms", 0.95, "95 % of the HTTP responses began within this time"),
            ("http_p99_ms", 0.99, "99 % of the HTTP responses began within this time"),
        ],
        buckets: (
            "http_times",
            "how many HTTP responses began up to each bound, and how many later",
        ),
    },
];

const fn counter(
    name: &'static str,
    metric: &'static str,
    labels: &'static [&'static str],
    meaning: &'static str,
) -> CounterSeries {
    CounterSeries { name, metric, labels, meaning }
}

const fn gauge(
    name: &'static str,
    metric: &'static str,
    label: &'static str,
    factor: f64,
    meaning: &'static str,
) -> GaugeSeries {
    GaugeSeries { name, metric, label, factor, meaning }
}

/// Name and meaning of every series, in the order in which they are shown.
pub(crate) fn all_series() -> impl Iterator<Item = (&'static str, &'static str)> {
    let counters = COUNTERS.iter().map(|one| (one.name, one.meaning));
    let gauges = GAUGES.iter().map(|one| (one.name, one.meaning));
    let quantiles = LATENCIES.iter().flat_map(|one| &one.quantiles);
    let quantiles = quantiles.map(|(name, _, meaning)| (*name, *meaning));
    let buckets = LATENCIES.iter().map(|one| one.buckets);
    counters.chain(gauges).chain(quantiles).chain(buckets)
}

/// The upper bounds of the buckets of a series, in milliseconds; `None` if its values are numbers.
pub(crate) fn bounds_ms(series: &str) -> Option<Vec<f64>> {
    let has_buckets = LATENCIES.iter().any(|one| one.buckets.0 == series);
    has_buckets.then(|| SECONDS.iter().map(|seconds| tenths_of_ms(*seconds)).collect())
}

/// Values of the process's metrics at one time, since it started.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct MetricTotals {
    counters: [u64; COUNTERS.len()],
    gauges: [Option<u64>; GAUGES.len()],
    buckets: [[u64; BUCKETS]; LATENCIES.len()],
}

impl MetricTotals {
    /// Reads the text format of Prometheus. Lines of other metrics are skipped; a value that cannot be read counts as 0.
    pub(super) fn parse(text: &str) -> Self {
        let mut totals = Self::default();
        for line in text.lines() {
            let Some((metric, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#'))
            else {
                continue;
            };
            let (name, labels) = metric.split_once('{').unwrap_or((metric, ""));
            let value = value.parse::<f64>().ok().filter(|value| value.is_finite());
            totals.add(name, labels, value.unwrap_or(0.0).max(0.0));
        }
        totals
    }

    fn add(&mut self, name: &str, labels: &str, value: f64) {
        for (one, total) in COUNTERS.iter().zip(&mut self.counters) {
            let is_wanted =
                one.labels.is_empty() || one.labels.iter().any(|label| has_label(labels, label));
            if one.metric == name && is_wanted {
                *total += value as u64;
            }
        }
        for (one, total) in GAUGES.iter().zip(&mut self.gauges) {
            if one.metric == name && (one.label.is_empty() || has_label(labels, one.label)) {
                *total = Some((value * one.factor) as u64);
            }
        }
        for (one, buckets) in LATENCIES.iter().zip(&mut self.buckets) {
            if one.metric == name
                && let Some(bucket) = bucket_of(labels)
            {
                buckets[bucket] += value as u64;
            }
        }
    }

    /// The increase since `earlier`, and the gauges of now.
    pub(super) fn since(&self, earlier: &Self) -> HistorySample {
        let mut sample = HistorySample { samples: 1, gauges: self.gauges, ..Default::default() };
        for (index, increase) in sample.counters.iter_mut().enumerate() {
            *increase = self.counters[index].saturating_sub(earlier.counters[index]);
        }
        for (index, buckets) in sample.buckets.iter_mut().enumerate() {
            // In the text, a bucket includes the smaller ones.
            let mut smaller = 0;
            for (bucket, count) in buckets.iter_mut().enumerate() {
                let up_to =
                    self.buckets[index][bucket].saturating_sub(earlier.buckets[index][bucket]);
                *count = up_to.saturating_sub(smaller);
                smaller = smaller.max(up_to);
            }
        }
        sample
    }
}

/// Whether a list of labels has this one. Quotes in values are escaped, so a value cannot imitate a label.
fn has_label(labels: &str, label: &str) -> bool {
    labels.match_indices(label).any(|(at, _)| at == 0 || labels[..at].ends_with(','))
}

/// The bucket of a line of a histogram.
fn bucket_of(labels: &str) -> Option<usize> {
    let (_, rest) = labels.rsplit_once("le=\"")?;
    let bound = rest.split('"').next()?;
    if bound == "+Inf" {
        return Some(SECONDS.len());
    }
    let bound: f64 = bound.parse().ok()?;
    SECONDS.iter().position(|known| (known - bound).abs() < known * 1e-9)
}

/// What happened in a step, in one or several processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HistorySample {
    /// Number of samples of ten seconds.
    pub(crate) samples: u64,
    counters: [u64; COUNTERS.len()],
    gauges: [Option<u64>; GAUGES.len()],
    buckets: [[u64; BUCKETS]; LATENCIES.len()],
}

impl HistorySample {
    /// Leaves the gauges out, because they are not up to date.
    pub(super) fn forget_gauges(&mut self) {
        self.gauges = Default::default();
    }

    /// Adds another step, or the same of another process.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.samples += other.samples;
        for (sum, count) in self.counters.iter_mut().zip(other.counters) {
            *sum = sum.saturating_add(count);
        }
        for (largest, value) in self.gauges.iter_mut().zip(other.gauges) {
            *largest = (*largest).max(value);
        }
        for (sums, counts) in self.buckets.iter_mut().zip(&other.buckets) {
            for (sum, count) in sums.iter_mut().zip(counts) {
                *sum = sum.saturating_add(*count);
            }
        }
    }

    /// The value of a series; `null` if it is unknown.
    pub(crate) fn value(&self, series: &str) -> Value {
        if let Some(index) = COUNTERS.iter().position(|one| one.name == series) {
            return json!(self.counters[index]);
        }
        if let Some(index) = GAUGES.iter().position(|one| one.name == series) {
            return json!(self.gauges[index]);
        }
        if let Some(index) = LATENCIES.iter().position(|one| one.buckets.0 == series) {
            return json!(self.buckets[index]);
        }
        let quantiles = LATENCIES.iter().zip(&self.buckets).flat_map(|(one, buckets)| {
            one.quantiles.iter().map(move |(name, quantile, _)| (name, quantile, buckets))
        });
        let mut found = quantiles.filter(|(name, _, _)| **name == series);
        found.next().map_or(Value::Null, |(_, at, buckets)| json!(quantile_ms(buckets, *at)))
    }

    /// As an object without zeros: a row of a quiet minute is short.
    pub(super) fn to_json(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        fields.insert("n".to_owned(), json!(self.samples));
        let counters = COUNTERS.iter().zip(self.counters);
        fields.extend(
            counters
                .filter(|(_, count)| *count > 0)
                .map(|(one, count)| (one.name.to_owned(), json!(count))),
        );
        let gauges = GAUGES.iter().zip(self.gauges);
        fields.extend(gauges.filter_map(|(one, value)| Some((one.name.to_owned(), json!(value?)))));
        for (one, buckets) in LATENCIES.iter().zip(&self.buckets) {
            if let Some(last) = buckets.iter().rposition(|count| *count > 0) {
                fields.insert(one.name.to_owned(), json!(buckets[..=last]));
            }
        }
        fields
    }

    /// Reads what [`to_json`](Self::to_json) wrote, also in another version: names that are unknown are skipped.
    pub(super) fn from_json(fields: &Map<String, Value>) -> Self {
        let number = |name: &str| fields.get(name).and_then(Value::as_u64);
        let mut sample = Self { samples: number("n").unwrap_or(0), ..Default::default() };
        for (one, count) in COUNTERS.iter().zip(&mut sample.counters) {
            *count = number(one.name).unwrap_or(0);
        }
        for (one, value) in GAUGES.iter().zip(&mut sample.gauges) {
            *value = number(one.name);
        }
        for (one, buckets) in LATENCIES.iter().zip(&mut sample.buckets) {
            let counts = fields.get(one.name).and_then(Value::as_array);
            for (count, stored) in buckets.iter_mut().zip(counts.into_iter().flatten()) {
                *count = stored.as_u64().unwrap_or(0);
            }
        }
        sample
    }
}

/// A quantile in milliseconds, interpolated within its bucket. `None` without values. Above the largest bound it is that
/// bound.
fn quantile_ms(buckets: &[u64; BUCKETS], quantile: f64) -> Option<f64> {
    let total: u64 = buckets.iter().sum();
    if total == 0 {
        return None;
    }
    let rank = quantile * total as f64;
    let (mut below, mut lower) = (0, 0.0);
    for (count, upper) in buckets.iter().zip(SECONDS) {
        let up_to = below + count;
        if *count > 0 && up_to as f64 >= rank {
            let part = ((rank - below as f64) / *count as f64).clamp(0.0, 1.0);
            return Some(tenths_of_ms(lower + (upper - lower) * part));
        }
        (below, lower) = (up_to, upper);
    }
    Some(tenths_of_ms(lower))
}

fn tenths_of_ms(seconds: f64) -> f64 {
    (seconds * 10_000.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "# HELP headwater_events_recorded_total events
headwater_events_recorded_total{result=\"recorded\"} 10
headwater_events_recorded_total{result=\"duplicate\"} 99
headwater_issues_processed_total{result=\"failed\"} 1
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"0.05\"} 4
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"0.1\"} 4
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"0.25\"} 4
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"+Inf\"} 4
";
    const AFTER: &str = "headwater_events_recorded_total{result=\"recorded\"} 13
headwater_events_recorded_total{result=\"duplicate\"} 120
headwater_issues_processed_total{result=\"failed\"} 2
headwater_issues_processed_total{result=\"quarantined\"} 1
headwater_issues{status=\"queued\"} 7
headwater_outbox_lag_seconds 1.5
headwater_issues_oldest_wait_seconds 2.5
headwater_dead_letters_total{topic=\"a\",result=\"attempts\"} 1
headwater_dead_letters_total{topic=\"b\",result=\"handler\"} 2
headwater_dead_letters_total{topic=\"b\",result=\"missing\"} 4
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"0.05\"} 4
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"0.1\"} 14
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"0.25\"} 14
headwater_issues_processing_duration_seconds_bucket{result=\"done\",le=\"+Inf\"} 14
headwater_issues_processing_duration_seconds_bucket{result=\"failed\",le=\"0.25\"} 2
headwater_issues_processing_duration_seconds_bucket{result=\"failed\",le=\"+Inf\"} 2
headwater_other_total{result=\"recorded\"} 1000
headwater_broken_total nonsense
";

    fn sample() -> HistorySample {
        MetricTotals::parse(AFTER).since(&MetricTotals::parse(BEFORE))
    }

    #[test]
    fn a_sample_is_the_increase_of_the_chosen_metrics() {
        let sample = sample();
        assert_eq!(sample.value("events"), 3);
        assert_eq!(sample.value("runs_failed"), 2);
        assert_eq!(sample.value("runs"), 0);
        assert_eq!(
            (sample.value("queued"), sample.value("outbox_lag_ms")),
            (json!(7), json!(1500))
        );
        assert_eq!(sample.value("oldest_wait_ms"), 2500);
        let letters = ["dead_letters", "dead_letters_handler", "dead_letters_malformed"];
        assert_eq!(letters.map(|name| sample.value(name)), [7, 3, 4].map(Value::from));
        assert_eq!(sample.value("quarantined"), Value::Null, "an unknown gauge is not 0");
        // Ten runs between 50 and 100 ms, two between 100 and 250 ms.
        assert_eq!(sample.value("run_p50_ms"), 80.0);
        assert_eq!(sample.value("run_p95_ms"), 205.0);
        assert_eq!(sample.value("http_p95_ms"), Value::Null);
        let times = json!([0, 0, 0, 0, 0, 0, 10, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(sample.value("run_times"), times);
        let bounds = bounds_ms("run_times").unwrap();
        assert_eq!((bounds.len(), bounds[1], bounds[6], bounds[7]), (14, 2.5, 100.0, 250.0));
        assert_eq!(bounds_ms("run_p50_ms"), None);
    }

    #[test]
    fn a_label_must_match_as_a_whole_and_cannot_be_imitated() {
        assert!(has_label("kind=\"reply\",result=\"done\"}", "result=\"done\""));
        assert!(!has_label("my_result=\"done\"}", "result=\"done\""));
        assert!(!has_label("topic=\"x,result=\\\"done\\\"\"}", "result=\"done\""));
    }

    #[test]
    fn samples_are_added_and_gauges_keep_the_largest_value() {
        let mut sum = sample();
        let mut other = sample();
        other.gauges[0] = Some(3);
        sum.merge(&other);
        assert_eq!(
            (sum.samples, sum.value("events"), sum.value("queued")),
            (2, json!(6), json!(7))
        );
        assert_eq!(sum.value("run_p50_ms"), 80.0);
        other.forget_gauges();
        assert_eq!(other.value("queued"), Value::Null);
    }

    #[test]
    fn a_stored_sample_is_short_and_equal_when_it_is_read() {
        let stored = sample().to_json();
        assert_eq!(HistorySample::from_json(&stored), sample());
        let text = Value::Object(stored).to_string();
        assert!(text.len() < 200, "{text}");
        let quiet = Value::Object(HistorySample { samples: 6, ..Default::default() }.to_json());
        assert_eq!(quiet.to_string(), "{\"n\":6}");
        let foreign = json!({"n": 1, "unknown": 5, "run": "no list", "events": -3});
        let read = HistorySample::from_json(foreign.as_object().unwrap());
        assert_eq!(read, HistorySample { samples: 1, ..Default::default() });
    }

    #[test]
    fn every_series_has_a_name_of_its_own_and_a_value() {
        let names: Vec<_> = all_series().map(|(name, _)| name).collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
        assert_eq!(names.len(), COUNTERS.len() + GAUGES.len() + 4 * LATENCIES.len());
    }

    #[test]
    fn a_quantile_above_the_largest_bound_is_that_bound() {
        let mut buckets = [0; BUCKETS];
        buckets[SECONDS.len()] = 1;
        assert_eq!(quantile_ms(&buckets, 0.5), Some(600_000.0));
    }
}

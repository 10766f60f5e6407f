//! Metrics, with a recorder installed by the program.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_assignment::AssignmentConfig;
use headwater_stream::{Fields, Retention};
use metrics::{
    Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

use crate::fixture::{ServiceFixture, quick};

/// On one thread, so that the recorder of this test only sees its own assignments.
#[tokio::test]
async fn the_lifecycle_of_streams_is_counted() {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let config = AssignmentConfig { owners_max: 1, notifications_max: 2, ..quick() };
    let fixture = ServiceFixture::embedded().await;

    // Given a stream that is done, two whose owner dies, and a malformed entry.
    let mut first = fixture.consumer("first", quick()).await;
    fixture.add(&["done", "dies", "dies too"]).await;
    let owned = first.added_many(3).await;
    drop(owned[0].work());
    first.assignment.done(&owned[0]).await.unwrap();
    let malformed = Fields::new([("lbs-input", "{")]);
    fixture
        .connect()
        .await
        .append(&fixture.input(), &[malformed], &Retention::KEEP_ALL)
        .await
        .unwrap();
    tokio::time::sleep(quick().heartbeat_every * 3 / 2).await;
    first.die();
    tokio::time::sleep(quick().lease_ttl() + Duration::from_millis(200)).await;

    // When the next one starts, it finds both and quarantines them.
    let mut second = fixture.consumer("second", config).await;
    second.next().await;
    second.next().await;
    second.assignment.shutdown(Duration::ZERO).await.unwrap();

    for (name, expected) in [
        ("startup_recovered_total", 2),
        ("claims_total{result=quarantined}", 2),
        ("locks_acquired_total", 5),
        ("locks_released_total", 3),
        ("processing_started_total", 1),
        ("processing_ended_total", 1),
        ("notifications_total{kind=added}", 3),
        ("notifications_total{kind=quarantined}", 2),
        ("notifications_total{kind=terminated}", 2),
        ("quarantined_total", 2),
        ("malformed_total", 1),
    ] {
        assert_eq!(counts.of(name), expected, "{name} in {counts:?}");
    }
    assert!(counts.of("locks_extended_total") >= 2, "{counts:?}");
    assert!(counts.of("hints_total{kind=released}") >= 1, "{counts:?}");
}

/// What was counted, by name and labels other than the service.
#[derive(Clone, Debug, Default)]
struct Counts(Arc<Mutex<BTreeMap<String, u64>>>);

impl Counts {
    fn of(&self, name: &str) -> u64 {
        let name = format!("headwater_assignment_{name}");
        self.0.lock().unwrap().get(&name).copied().unwrap_or(0)
    }
}

struct Count(Counts, String);

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        *self.0.0.lock().unwrap().entry(self.1.clone()).or_default() += value;
    }

    fn absolute(&self, _: u64) {}
}

impl Recorder for Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let labels: Vec<String> = key
            .labels()
            .filter(|label| label.key() != "service")
            .map(|label| format!("{{{}={}}}", label.key(), label.value()))
            .collect();
        let name = format!("{}{}", key.name(), labels.concat());
        Counter::from_arc(Arc::new(Count(self.clone(), name)))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

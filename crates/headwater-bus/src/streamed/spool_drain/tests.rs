//! Tests of rejected events and of the dedup window.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Backend, Fields, Options, Range, connect};
use headwater_testkit::{Cluster, Redis, unique};

use super::*;
use crate::bus::EventBus;
use crate::name::EventId;
use crate::spool::SpoolConfig;
use crate::streamed::{FailurePolicy, StreamedBus, StreamedBusConfig};

fn spooled(stream: &StreamName, id: &str, fields: usize) -> SpooledEvent {
    let fields = (0..fields).map(|field| (format!("{id}/{field}"), "x"));
    SpooledEvent {
        stream: stream.clone(),
        event_id: EventId::new(id).unwrap(),
        fields: Fields::new(fields),
        attempted: false,
        spooled_at: Timestamp::from_millis(1_767_225_600_000),
    }
}

/// A spool written with larger entry limits, or corrupted in a way that the checksum does not detect.
async fn a_rejected_event_does_not_affect_its_neighbours(url: &str) {
    let directory = tempfile::tempdir().unwrap();
    let spool = SpoolConfig::new(directory.path().join("spool"));
    let prefix: String = unique("w").chars().take(32).collect();
    let config = StreamedBusConfig {
        prefix: prefix.clone(),
        on_failure: FailurePolicy::Spool(spool.clone()),
        ..StreamedBusConfig::default()
    };
    let [one, two] =
        ["one", "two"].map(|name| StreamName::new(format!("{prefix}:events:{name}")).unwrap());
    let before = Spool::open(spool, &format!("{prefix}:{}", config.namespace)).await.unwrap();
    let too_many = headwater_stream::limits::FIELDS_MAX + 1;
    let events = vec![
        spooled(&one, "a", 3),
        spooled(&one, "b", too_many),
        spooled(&two, "c", 3),
        spooled(&one, "d", 3),
        spooled(&one, "e", too_many),
        spooled(&one, "f", 3),
    ];
    before.add(events).await.unwrap();
    before.close().await;
    drop(before);

    let options = Options { call_deadline: Duration::from_secs(60), ..Options::default() };
    let backend = connect(url, &options).await.unwrap();
    let registry = crate::registry::EventRegistry::builtin();
    let bus = StreamedBus::open(Arc::clone(&backend), registry, config).await.unwrap();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(90);
    while bus.health().await.spool.unwrap().events > 0 {
        assert!(tokio::time::Instant::now() < deadline, "the spool is not drained");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(first_fields(&*backend, &one).await, ["a/0", "d/0", "f/0"]);
    assert_eq!(first_fields(&*backend, &two).await, ["c/0"]);
    let rejected = bus.rejected(10).await.unwrap();
    let rejected: Vec<_> = rejected.iter().map(|event| event.event_id.as_str()).collect();
    assert_eq!(rejected, ["b", "e"]);
    bus.close().await.unwrap();
}

/// The name of the first field of each entry.
async fn first_fields(backend: &dyn Backend, stream: &StreamName) -> Vec<String> {
    let entries = backend.range(stream, Range::first(100)).await.unwrap();
    let first = |fields: &Fields| {
        let (name, _) = fields.iter().next().unwrap();
        String::from_utf8(name.to_vec()).unwrap()
    };
    entries.iter().map(|entry| first(&entry.fields)).collect()
}

#[tokio::test]
async fn a_rejected_event_does_not_affect_its_neighbours_embedded() {
    a_rejected_event_does_not_affect_its_neighbours("embedded:memory").await;
}

#[tokio::test]
async fn a_rejected_event_does_not_affect_its_neighbours_redis() {
    let redis = Redis::shared().unwrap();
    a_rejected_event_does_not_affect_its_neighbours(&redis.url()).await;
}

#[tokio::test]
async fn a_rejected_event_does_not_affect_its_neighbours_cluster() {
    let cluster = Cluster::shared().unwrap();
    a_rejected_event_does_not_affect_its_neighbours(&cluster.url()).await;
}

#[test]
fn an_event_past_its_dedup_window_is_detected_also_after_the_clock_was_set_back() {
    let at = |seconds: u64| Timestamp::from_millis(1_767_225_600_000 + seconds * 1000);
    let dedup_window = Duration::from_secs(600);
    assert!(!is_past_dedup_window(at(0), at(0), dedup_window));
    assert!(!is_past_dedup_window(at(0), at(300), dedup_window));
    assert!(is_past_dedup_window(at(0), at(301), dedup_window));
    assert!(is_past_dedup_window(at(3600), at(1200), dedup_window));
}

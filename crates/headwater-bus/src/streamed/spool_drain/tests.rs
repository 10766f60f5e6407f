//! Tests of rejected events and of the dedup window.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Backend, Fields, Options, Range, connect};
use headwater_testkit::{Cluster, Redis, unique};

use super::*;
use crate::name::EventId;
use crate::streamed::{StreamedBus, StreamedBusConfig};

fn spooled(stream: &StreamName, id: &str, fields: usize) -> (SpooledEvent, bool) {
    let fields = (0..fields).map(|field| (format!("{id}/{field}"), "x"));
    let event = SpooledEvent {
        id: EntryId::new(1_767_225_600_000, u64::from(id.as_bytes()[0])),
        stream: stream.clone(),
        event_id: EventId::new(id).unwrap(),
        fields: Fields::new(fields),
        attempted: false,
    };
    (event, false)
}

/// A spool written by a build with larger entry limits.
async fn a_rejected_event_does_not_affect_its_neighbours(url: &str) {
    let prefix: String = unique("w").chars().take(32).collect();
    let stream = StreamName::new(format!("{prefix}:events:one")).unwrap();
    let options = Options { call_deadline: Duration::from_secs(60), ..Options::default() };
    let backend = connect(url, &options).await.unwrap();
    let registry = crate::registry::EventRegistry::builtin();
    let config = StreamedBusConfig { prefix, ..StreamedBusConfig::default() };
    let bus = StreamedBus::open(Arc::clone(&backend), registry, config).await.unwrap();
    let too_many = headwater_stream::limits::FIELDS_MAX + 1;
    let events = [("a", 3), ("b", too_many), ("d", 3), ("e", too_many), ("f", 3)];
    let events = events.map(|(id, fields)| spooled(&stream, id, fields));
    let rejected = bus.inner.store_in_stream(&stream, &events).await.unwrap();
    assert_eq!(rejected, [events[1].0.id, events[3].0.id]);
    assert_eq!(first_fields(&*backend, &stream).await, ["a/0", "d/0", "f/0"]);
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

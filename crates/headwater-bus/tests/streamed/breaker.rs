//! The circuit breaker of a bus.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{BreakerState, BusError, EventBus, EventBusExt, StoreOutcome, StreamedBus};
use headwater_conformance::bus::registry;
use headwater_stream::{Options, connect};
use tokio::task::JoinSet;

use crate::fixture::{quick_breaker, stored, watch};
use crate::outage_fixture::{OutageFixture, open_breaker, until};

with_outage!(the_breaker_opens_after_failures_and_closes_when_the_backend_is_available);

// An embedded backend answers at once, so no call can overlap with its probe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_admits_exactly_one_probe_redis() {
    half_open_admits_exactly_one_probe(OutageFixture::redis()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_admits_exactly_one_probe_cluster() {
    half_open_admits_exactly_one_probe(OutageFixture::cluster()).await;
}

async fn the_breaker_opens_after_failures_and_closes_when_the_backend_is_available(
    outage: OutageFixture,
) {
    let fixture = &outage.fixture;
    let bus = fixture.bus().await;
    bus.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();
    assert_eq!(bus.health().await.breaker, BreakerState::Closed);
    outage.begin().await;
    for failures in 0..quick_breaker().failure_threshold {
        assert_eq!(bus.health().await.breaker, BreakerState::Closed, "after {failures}");
        let error = bus.publish(fixture.noted(1)).await.unwrap_err();
        assert!(matches!(error, BusError::Unconfirmed { .. }), "{error}");
    }
    assert_ne!(bus.health().await.breaker, BreakerState::Closed);
    open_breaker(&bus, fixture).await;
    // It stays open during the outage, however often it is probed.
    tokio::time::sleep(quick_breaker().recovery).await;
    assert_eq!(bus.health().await.breaker, BreakerState::HalfOpen);
    let error = bus.publish(fixture.noted(2)).await.unwrap_err();
    assert!(matches!(error, BusError::Unconfirmed { .. }), "{error}");
    assert_ne!(bus.health().await.breaker, BreakerState::Closed);

    outage.end().await;
    until(|| async { bus.publish(fixture.noted(3)).await.is_ok() }).await;
    assert_eq!(bus.health().await.breaker, BreakerState::Closed);
    bus.close().await.unwrap();
}

async fn half_open_admits_exactly_one_probe(outage: OutageFixture) {
    const MANY: u64 = 32;
    let (fixture, node) = (&outage.fixture, outage.node());
    // A call may take as long as this test.
    let options = Options { call_deadline: Duration::from_secs(100), ..Default::default() };
    let backend = connect(fixture.url(), &options).await.unwrap();
    let bus = StreamedBus::open(backend, registry(), fixture.config()).await.unwrap();
    let bus = Arc::new(bus);
    let log = watch(&bus).await;
    bus.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();

    // The server rejects connections at once.
    node.command(&["CONFIG", "SET", "maxmemory", "1"]).unwrap().ok().unwrap();
    open_breaker(&bus, fixture).await;
    // Then it stops responding, and the recovery time passes.
    node.command(&["CONFIG", "SET", "maxmemory", "0"]).unwrap().ok().unwrap();
    node.pause().unwrap();
    tokio::time::sleep(quick_breaker().recovery).await;
    let mut asking = JoinSet::new();
    for number in 1..=MANY {
        let (bus, event) = (Arc::clone(&bus), fixture.noted(number));
        asking.spawn(async move { (number, bus.publish(event).await) });
    }
    for _ in 1..MANY {
        let (_, answer) = asking.join_next().await.unwrap().unwrap();
        assert!(matches!(answer, Err(BusError::BreakerOpen { .. })), "{answer:?}");
    }
    // All others have returned, and the probe is still in flight.
    node.resume().unwrap();
    let (number, answer) = asking.join_next().await.unwrap().unwrap();
    assert!(matches!(answer.unwrap().stored, StoreOutcome::Entry(_)));
    assert_eq!(bus.health().await.breaker, BreakerState::Closed);
    bus.publish(fixture.noted(100)).await.unwrap().into_result().unwrap();
    assert_eq!(stored(&*fixture.connect().await, &fixture.stream()).await, [0, number, 100]);
    assert_eq!(log.lines(), ["0".to_owned(), number.to_string(), "100".to_owned()]);
    bus.close().await.unwrap();
}

//! Exact values of the health check.

use std::sync::Arc;

use headwater_bus::{
    EventBus, EventBusExt, GroupHealth, ReceivedEvent, StreamHealth, StreamedBusConfig,
    SubscribeOptions,
};
use headwater_conformance::bus::{Announced, HandlerLog, Noted, registry};
use headwater_stream::clock::{TestClock, Timestamp};
use tokio::sync::Semaphore;

use crate::fixture::{Fixture, watch};
use crate::outage_fixture::until;

on_streams!(health_reports_exact_lengths_pending_lag_and_time);

async fn health_reports_exact_lengths_pending_lag_and_time(fixture: Fixture) {
    let now = Timestamp::from_millis(1_767_225_600_123);
    let config = StreamedBusConfig {
        clock: Arc::new(TestClock::at(now)),
        health_every: None,
        ..fixture.config()
    };
    let bus = fixture.bus_with(registry(), config).await;
    let group = |label: &str| format!("{}:cg:{}:{label}", fixture.prefix, fixture.session);
    let control_group = format!("{}:cg:tests:news", fixture.prefix);
    let control = format!("{}:control:tests", fixture.prefix);

    // A stream that was never written or read is not reported.
    assert_eq!(bus.last_health(), None);
    let health = bus.health().await;
    assert!(health.connected && health.latency.is_some() && health.streams.is_empty());
    assert_eq!((health.parked, health.spool, health.last_check), (0, None, now));

    // Given a group with one pending event and no read-ahead, one that is done, and one of the namespace.
    let (gate, begun) = (Arc::new(Semaphore::new(0)), HandlerLog::default());
    let (opened, seen) = (gate.clone(), begun.clone());
    let hold = move |event: ReceivedEvent<Noted>| {
        let (opened, seen) = (opened.clone(), seen.clone());
        async move {
            seen.add(event.number);
            opened.acquire().await.unwrap().forget();
        }
    };
    let one = SubscribeOptions {
        concurrency: 1,
        read_ahead: Some(0),
        ..SubscribeOptions::durable("slow")
    };
    bus.subscribe::<Noted>(one, hold).await.unwrap();
    let done = |_: ReceivedEvent<Noted>| async {};
    bus.subscribe::<Noted>(SubscribeOptions::durable("quick"), done).await.unwrap();
    let read = |_: ReceivedEvent<Announced>| async {};
    bus.subscribe::<Announced>(SubscribeOptions::durable("news"), read).await.unwrap();
    for number in 0..5 {
        bus.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    for number in 0..2 {
        bus.publish(Announced { number }).await.unwrap().into_result().unwrap();
    }
    begun.wait_for(1).await;

    // Then the health has exactly these values, as soon as the fast groups are done.
    let at = |pending, lag| GroupHealth { pending, lag: Some(lag) };
    let expected = |pending, lag| {
        let groups = [(group("quick"), at(0, 0)), (group("slow"), at(pending, lag))];
        let session = StreamHealth { length: 5, groups: groups.into() };
        let control_groups = [(control_group.clone(), at(0, 0))].into();
        let namespace = StreamHealth { length: 2, groups: control_groups };
        [(fixture.stream().to_string(), session), (control.clone(), namespace)].into()
    };
    until(|| async { bus.health().await.streams == expected(1, 4) }).await;
    gate.add_permits(2);
    begun.wait_for(3).await;
    until(|| async { bus.health().await.streams == expected(1, 2) }).await;
    gate.add_permits(3);
    until(|| async { bus.health().await.streams == expected(0, 0) }).await;
    let health = bus.health().await;
    assert_eq!(bus.last_health(), Some(health));

    // Parked entries are counted, and streams that are only followed are reported.
    let other = headwater_bus::SessionId::random();
    let follow = SubscribeOptions::live().session(other.clone());
    bus.subscribe::<Noted>(follow, |_: ReceivedEvent<Noted>| async {}).await.unwrap();
    bus.publish(crate::fixture::noted(&other, 7)).await.unwrap().into_result().unwrap();
    let _log = watch(&bus).await;
    fixture.append(&[("type", "tests.Unheard"), ("payload", "{}")]).await;
    until(|| async { bus.health().await.parked == 1 }).await;
    let health = bus.health().await;
    let followed = StreamHealth { length: 1, ..Default::default() };
    assert_eq!(health.streams[fixture.stream_of(other.as_str()).as_str()], followed);
    assert_eq!(health.streams[fixture.stream().as_str()].length, 6);
    bus.close().await.unwrap();
}

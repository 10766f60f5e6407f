//! Failure policies while the backend is unavailable.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{
    BreakerConfig, BreakerState, BusError, EventBus, EventBusExt, FailurePolicy, PublishResult,
    ReceivedEvent, SessionId, StoreOutcome, StreamedBus, StreamedBusConfig, SubscribeOptions,
};
use headwater_conformance::bus::{Noted, registry};
use headwater_stream::{Options, connect};
use tokio::sync::Notify;

use crate::fixture::{Fixture, noted, numbers, stored, watch};
use crate::outage_fixture::{LIMIT, OutageFixture, publish_until_stored};
use crate::spool::{spooling, wait_until_empty};

with_outage!(
    with_fail_an_outage_is_an_error_and_no_handler_runs,
    with_a_spool_events_reach_other_processes_after_the_outage,
    with_local_only_handlers_run_and_the_result_tells_whether_other_processes_may_see_the_event,
);

async fn with_fail_an_outage_is_an_error_and_no_handler_runs(outage: OutageFixture) {
    let fixture = &outage.fixture;
    // Longer than this test may be delayed between two of its steps.
    let breaker = BreakerConfig { failure_threshold: 3, recovery: Duration::from_secs(8) };
    let config = StreamedBusConfig { breaker, ..fixture.config() };
    let bus = fixture.bus_with(registry(), config).await;
    let log = watch(&bus).await;
    bus.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();

    outage.begin().await;
    for number in 1..4 {
        let error = bus.publish(fixture.noted(number)).await.unwrap_err();
        assert!(matches!(error, BusError::Unconfirmed { .. }), "{error}");
        assert!(error.is_transient());
    }
    let error = bus.publish(fixture.noted(4)).await.unwrap_err();
    assert!(matches!(error, BusError::BreakerOpen { .. }), "{error}");
    assert_ne!(bus.health().await.breaker, BreakerState::Closed);
    assert_eq!(log.lines(), ["0"]);

    outage.end().await;
    publish_until_stored(&bus, &fixture.session, 5).await;
    assert_eq!(log.settles_at(2).await, ["0", "5"]);
    assert_eq!(stored(&*fixture.connect().await, &fixture.stream()).await, [0, 5]);
    assert_eq!(bus.health().await.breaker, BreakerState::Closed);
    bus.close().await.unwrap();
}

async fn with_a_spool_events_reach_other_processes_after_the_outage(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    let other = fixture.bus().await;
    let (here, there) = (watch(&bus).await, watch(&other).await);
    bus.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();

    outage.begin().await;
    for number in 1..20 {
        let result = bus.publish(fixture.noted(number)).await.unwrap();
        assert_eq!((result.stored, result.handlers_invoked), (StoreOutcome::Spooled, 1));
    }
    let spool = bus.health().await.spool.unwrap();
    assert_eq!((spool.events, spool.rejected), (19, 0));
    assert_eq!(here.lines(), numbers(0..20));

    outage.end().await;
    wait_until_empty(&bus, LIMIT).await;
    publish_until_stored(&bus, &fixture.session, 20).await;
    assert_eq!(there.settles_at(21).await, numbers(0..21));
    assert_eq!(here.settles_at(21).await, numbers(0..21));
    let numbers = stored(&*fixture.connect().await, &fixture.stream()).await;
    assert_eq!(numbers, (0..21).collect::<Vec<u64>>());
    bus.close().await.unwrap();
    other.close().await.unwrap();
}

async fn with_local_only_handlers_run_and_the_result_tells_whether_other_processes_may_see_the_event(
    outage: OutageFixture,
) {
    let fixture = &outage.fixture;
    let config = StreamedBusConfig { on_failure: FailurePolicy::LocalOnly, ..fixture.config() };
    let bus = fixture.bus_with(registry(), config).await;
    let log = watch(&bus).await;
    outage.begin().await;
    let mut outcomes = Vec::new();
    for number in 0..10 {
        let result = bus.publish(fixture.noted(number)).await.unwrap();
        assert_eq!(result.handlers_invoked, 1);
        outcomes.push(result.stored);
    }
    // Those that were sent are not confirmed; while the breaker is open, none is sent.
    let sent = fixture.config().breaker.failure_threshold as usize;
    assert!(
        outcomes[..sent].iter().all(|stored| *stored == StoreOutcome::Unconfirmed),
        "{outcomes:?}"
    );
    assert_eq!(outcomes[sent], StoreOutcome::LocalOnly, "{outcomes:?}");
    let is_either = |stored: &StoreOutcome| {
        matches!(stored, StoreOutcome::LocalOnly | StoreOutcome::Unconfirmed)
    };
    assert!(outcomes.iter().all(is_either), "{outcomes:?}");
    assert_eq!(log.lines(), numbers(0..10));

    outage.end().await;
    let mut number = 10;
    while bus.publish(fixture.noted(number)).await.unwrap().entry_id().is_none() {
        assert!(number < 1000, "the bus stays local");
        tokio::time::sleep(Duration::from_millis(50)).await;
        number += 1;
    }
    let stored = stored(&*fixture.connect().await, &fixture.stream()).await;
    assert_eq!(stored.last(), Some(&number));
    assert!(stored.iter().all(|number| *number >= 10), "{stored:?}");
    assert_eq!(log.settles_at(number as usize + 1).await, numbers(0..number + 1));
    bus.close().await.unwrap();
}

/// One node of three is unavailable. Sessions on the others continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_cluster_nodes_continue_during_the_outage_of_one() {
    let outage = OutageFixture::cluster();
    let fixture = &outage.fixture;
    let stays = outage.elsewhere().next().unwrap();
    let (bus, backend) = (fixture.bus().await, fixture.connect().await);
    let log = watch(&bus).await;
    outage.begin().await;
    for number in 0..4 {
        let error = bus.publish(fixture.noted(number)).await.unwrap_err();
        assert!(matches!(error, BusError::Unconfirmed { .. }), "{error}");
        let result = bus.publish(noted(&stays, 100 + number)).await.unwrap();
        assert!(matches!(result.stored, StoreOutcome::Entry(_)), "{result:?}");
    }
    // Failures with successes between them do not open the breaker.
    let health = bus.health().await;
    assert_eq!(health.breaker, BreakerState::Closed);
    assert!(health.problem.is_some(), "{health:?}");
    let numbers = stored(&*backend, &fixture.stream_of(stays.as_str())).await;
    assert_eq!(numbers, (100..104).collect::<Vec<u64>>());

    outage.end().await;
    publish_until_stored(&bus, &fixture.session, 200).await;
    assert_eq!(stored(&*backend, &fixture.stream()).await, [200]);
    assert!(!log.lines().iter().any(|line| line.len() == 1), "{:?}", log.lines());
    bus.close().await.unwrap();
}

mod room {
    use super::publishes_dropped_before_their_permit_have_no_effect;

    on_streams!(publishes_dropped_before_their_permit_have_no_effect);
}

async fn publishes_dropped_before_their_permit_have_no_effect(fixture: Fixture) {
    let config = StreamedBusConfig { in_flight_max: 1, ..fixture.config() };
    let bus = fixture.bus_with(registry(), config).await;
    let began = Arc::new(Notify::new());
    let goes_on = Arc::new(Notify::new());
    let handler = {
        let (began, goes_on) = (Arc::clone(&began), Arc::clone(&goes_on));
        move |event: ReceivedEvent<Noted>| {
            let (began, goes_on) = (Arc::clone(&began), Arc::clone(&goes_on));
            async move {
                if event.number == 1 {
                    began.notify_one();
                    goes_on.notified().await;
                }
            }
        }
    };
    bus.subscribe::<Noted>(SubscribeOptions::live(), handler).await.unwrap();
    // One publish takes all permits; the others wait only briefly.
    let first = bus.publish(fixture.noted(1));
    let others = async {
        began.notified().await;
        for _ in 0..5 {
            let second = bus.publish(fixture.noted(2));
            assert!(tokio::time::timeout(Duration::from_millis(20), second).await.is_err());
        }
        goes_on.notify_one();
    };
    let (first, ()) = tokio::join!(first, others);
    first.unwrap().into_result().unwrap();
    bus.publish(fixture.noted(3)).await.unwrap().into_result().unwrap();
    bus.close().await.unwrap();
    assert_eq!(stored(&*fixture.connect().await, &fixture.stream()).await, [1, 3]);
}

#[tokio::test]
async fn each_event_of_a_batch_for_several_sessions_has_its_own_result() {
    let backend = connect("embedded:memory?max_bytes=10000", &Options::default()).await.unwrap();
    let config = StreamedBusConfig { health_every: None, ..StreamedBusConfig::default() };
    let bus = StreamedBus::open(backend, registry(), config).await.unwrap();
    let [small, large] = [(); 2].map(|()| SessionId::random());
    let too_large = Noted { text: "x".repeat(20_000), ..noted(&large, 1) };
    let batch = vec![noted(&small, 0), too_large.clone(), noted(&small, 2)];
    let results = bus.publish_batch(batch).await.unwrap();
    let is_stored = |result: &Result<PublishResult, BusError>| matches!(result, Ok(result) if matches!(result.stored, StoreOutcome::Entry(_)));
    assert_eq!(results.iter().map(is_stored).collect::<Vec<_>>(), [true, false, true]);
    // An event that was not stored is not a duplicate on the next attempt.
    assert!(bus.publish(too_large).await.unwrap_err().is_transient());
    bus.close().await.unwrap();
}

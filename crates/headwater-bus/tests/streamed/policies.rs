//! What becomes of events while the backend is away, or its answers are lost.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::conformance::{Log, Noted};
use headwater_bus::{
    BreakerState, BusError, EventBus, EventBusExt, EventId, FailurePolicy, Outgoing, Received,
    SpoolConfig, Stored, StreamedBusConfig, Subscribe,
};
use headwater_testkit::{Persistence, Proxy, Redis};
use tokio::sync::Notify;

use crate::place::{Place, stored, watch};

fn durable_redis() -> Redis {
    Redis::builder().persistence(Persistence::Always).start().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_fail_an_outage_is_an_error_and_no_handler_runs() {
    let redis = durable_redis();
    let place = Place::at(redis.url());
    let bus = place.bus().await;
    let log = watch(&bus).await;
    redis.kill9().unwrap();
    for _ in 0..3 {
        let error = bus.publish(place.noted(0)).await.unwrap_err();
        assert!(matches!(error, BusError::Unconfirmed { .. }), "{error}");
        assert!(error.is_transient());
    }
    let error = bus.publish(place.noted(0)).await.unwrap_err();
    assert!(matches!(error, BusError::BreakerOpen { .. }), "{error}");
    let health = bus.health().await;
    assert!(!health.connected && health.problem.is_some(), "{health:?}");
    assert_ne!(health.breaker, BreakerState::Closed);
    assert!(log.lines().is_empty());

    redis.restart().unwrap();
    let mut result = bus.publish(place.noted(1)).await;
    for _ in 0..200 {
        if result.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        result = bus.publish(place.noted(1)).await;
    }
    assert_eq!(result.unwrap().handlers_invoked, 1);
    assert_eq!(log.settles_at(1).await, ["1"]);
    assert_eq!(bus.health().await.breaker, BreakerState::Closed);
    bus.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_local_only_handlers_run_and_the_result_says_that_nothing_is_stored() {
    let redis = durable_redis();
    let place = Place::at(redis.url());
    let config = StreamedBusConfig { on_failure: FailurePolicy::LocalOnly, ..place.config() };
    let bus = place.bus_with(headwater_bus::conformance::registry(), config).await;
    let log = watch(&bus).await;
    redis.kill9().unwrap();
    for number in 0..10 {
        let result = bus.publish(place.noted(number)).await.unwrap();
        assert_eq!((result.stored, result.handlers_invoked), (Stored::LocalOnly, 1));
    }
    redis.restart().unwrap();
    tokio::time::sleep(Duration::from_millis(400)).await;
    while bus.publish(place.noted(99)).await.unwrap().stored == Stored::LocalOnly {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(stored(&*place.connect().await, &place.stream()).await, [99]);
    assert!(log.lines().len() >= 11);
    bus.close().await.unwrap();
}

/// A bus behind a proxy, with a connection that works.
async fn behind_proxy(
    redis: &Redis,
    policy: FailurePolicy,
) -> (Proxy, Place, headwater_bus::StreamedBus, Log) {
    let proxy = Proxy::start(redis.addr()).unwrap();
    let place = Place::at(redis.url_at(proxy.addr()));
    let config = StreamedBusConfig { on_failure: policy, ..place.config() };
    let bus = place.bus_with(headwater_bus::conformance::registry(), config).await;
    let log = watch(&bus).await;
    bus.publish(place.noted(0)).await.unwrap().raise().unwrap();
    (proxy, place, bus, log)
}

/// Publishes with lost answers, and checks that every event is stored once and handled here once.
async fn lose_answers(policy: FailurePolicy) {
    let redis = durable_redis();
    // Only who fails needs ids of the caller's, to be able to repeat.
    let gives_ids = policy == FailurePolicy::Fail;
    let (proxy, place, bus, log) = behind_proxy(&redis, policy).await;
    for number in 1..20 {
        // The live reader waits on a connection of its own, and it may be its answer that is lost.
        proxy.drop_reply().unwrap();
        let id = EventId::random();
        for _ in 0..100 {
            let mut event = Outgoing::new(place.noted(number)).unwrap();
            if gives_ids {
                event = event.with_id(id.clone());
            }
            match bus.publish_outgoing(event).await {
                Ok(_) => break,
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    proxy.heal().unwrap();
    let mut lines = log.settles_at(20).await;
    lines.sort_by_key(|line| line.parse::<u64>().unwrap());
    assert_eq!(lines, crate::place::numbers(0..20));
    // What waited in a spool is there by now, or soon.
    let backend = crate::place::open(&redis.url()).await;
    let mut numbers = stored(&*backend, &place.stream()).await;
    for _ in 0..200 {
        if numbers.len() >= 20 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        numbers = stored(&*backend, &place.stream()).await;
    }
    assert_eq!(numbers, (0..20).collect::<Vec<u64>>());
    bus.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_fail_an_event_whose_answer_was_lost_is_stored_once_and_handled_once() {
    lose_answers(FailurePolicy::Fail).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_spool_an_event_whose_answer_was_lost_is_stored_once_and_handled_once() {
    let directory = tempfile::tempdir().unwrap();
    lose_answers(FailurePolicy::Spool(SpoolConfig::new(directory.path().join("spool")))).await;
}

/// Without an id of the caller's nobody can repeat an event, so its fate must be found out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unconfirmed_event_that_is_stored_after_all_is_handled_here_too() {
    let redis = durable_redis();
    let (proxy, place, bus, log) = behind_proxy(&redis, FailurePolicy::Fail).await;
    // The answer stays away until the call has given up; the event arrives, late.
    let backend = crate::place::open(&redis.url()).await;
    let mut unconfirmed = 0;
    for number in 1..4 {
        redis.pause().unwrap();
        let result = bus.publish(place.noted(number)).await;
        unconfirmed += usize::from(matches!(result, Err(BusError::Unconfirmed { .. })));
        redis.resume().unwrap();
        // Until the breaker lets the next one through.
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    assert!(unconfirmed > 0);
    proxy.heal().unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let stored: Vec<String> =
        stored(&*backend, &place.stream()).await.iter().map(u64::to_string).collect();
    let mut handled = log.lines();
    handled.sort();
    assert_eq!(handled, stored, "what is stored is handled here, and nothing else is");
    bus.close().await.unwrap();
}

everywhere!(an_event_with_an_id_counts_once_whoever_publishes_it_again);

async fn an_event_with_an_id_counts_once_whoever_publishes_it_again(place: Place) {
    let (ada, bob) = (place.bus().await, place.bus().await);
    let (seen_by_ada, seen_by_bob) = (watch(&ada).await, watch(&bob).await);
    let event = || Outgoing::new(place.noted(1)).unwrap().with_id(EventId::new("one").unwrap());
    let first = ada.publish_outgoing(event()).await.unwrap();
    let Stored::Entry(entry_id) = first.stored else { panic!("{first:?}") };
    for bus in [&ada, &bob, &ada] {
        let again = bus.publish_outgoing(event()).await.unwrap();
        assert_eq!((again.stored, again.handlers_invoked), (Stored::Duplicate(entry_id), 0));
    }
    assert_eq!(seen_by_ada.settles_at(1).await, ["1"]);
    assert_eq!(seen_by_bob.settles_at(1).await, ["1"]);
    assert_eq!(stored(&*place.connect().await, &place.stream()).await, [1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_publishes_that_are_given_up_before_there_is_room_nothing_is_left() {
    let place = Place::embedded().await;
    let config = StreamedBusConfig { in_flight_max: 1, ..place.config() };
    let bus = place.bus_with(headwater_bus::conformance::registry(), config).await;
    let began = Arc::new(Notify::new());
    let goes_on = Arc::new(Notify::new());
    let handler = {
        let (began, goes_on) = (Arc::clone(&began), Arc::clone(&goes_on));
        move |event: Received<Noted>| {
            let (began, goes_on) = (Arc::clone(&began), Arc::clone(&goes_on));
            async move {
                if event.number == 1 {
                    began.notify_one();
                    goes_on.notified().await;
                }
            }
        }
    };
    bus.subscribe::<Noted>(Subscribe::live(), handler).await.unwrap();
    // One takes all the room there is, and others do not wait for long.
    let first = bus.publish(place.noted(1));
    let others = async {
        began.notified().await;
        for _ in 0..5 {
            let second = bus.publish(place.noted(2));
            assert!(tokio::time::timeout(Duration::from_millis(20), second).await.is_err());
        }
        goes_on.notify_one();
    };
    let (first, ()) = tokio::join!(first, others);
    first.unwrap().raise().unwrap();
    bus.publish(place.noted(3)).await.unwrap().raise().unwrap();
    bus.close().await.unwrap();
    assert_eq!(stored(&*place.connect().await, &place.stream()).await, [1, 3]);
}

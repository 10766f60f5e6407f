//! Events whose replies from the backend are lost.

use std::time::Duration;

use headwater_bus::{
    BusError, EventBus, EventBusExt, EventId, FailurePolicy, OutgoingEvent, SpoolConfig,
    StoreOutcome, StreamedBus, StreamedBusConfig,
};
use headwater_conformance::bus::{HandlerLog, Noted, registry};
use headwater_testkit::{Persistence, Proxy, Redis};

use crate::fixture::{Fixture, numbers, stored, watch};
use crate::outage_fixture::until;
use crate::proxied_fixture::ProxiedFixture;

tests_in!(
    redis,
    crate::proxied_fixture::ProxiedFixture::redis(),
    (flavor = "multi_thread", worker_threads = 2),
    with_fail_an_event_whose_reply_was_lost_is_stored_and_handled_once,
    with_a_spool_an_event_whose_reply_was_lost_is_stored_and_handled_once,
    with_local_only_no_other_process_receives_a_local_event,
);

tests_in!(
    cluster,
    crate::proxied_fixture::ProxiedFixture::cluster().await,
    (flavor = "multi_thread", worker_threads = 2),
    with_fail_an_event_whose_reply_was_lost_is_stored_and_handled_once,
    with_a_spool_an_event_whose_reply_was_lost_is_stored_and_handled_once,
    with_local_only_no_other_process_receives_a_local_event,
);

/// A bus with a working connection, and a log of its handled events.
async fn open(fixture: &Fixture, on_failure: FailurePolicy) -> (StreamedBus, HandlerLog) {
    let config = StreamedBusConfig { on_failure, ..fixture.config() };
    let bus = fixture.bus_with(registry(), config).await;
    let log = watch(&bus).await;
    bus.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();
    (bus, log)
}

/// Publishes with lost replies, and asserts that every event is stored and handled once.
async fn lose_replies(proxied: &ProxiedFixture, policy: FailurePolicy) {
    // Only the policy `Fail` needs ids of the caller, to be able to retry.
    let gives_ids = policy == FailurePolicy::Fail;
    let ProxiedFixture { proxies, fixture, .. } = proxied;
    let (bus, log) = open(fixture, policy).await;
    for number in 1..20 {
        // The live reader has its own connection, whose reply may be lost instead.
        proxies.iter().for_each(|proxy| proxy.drop_reply().unwrap());
        let id = EventId::random();
        for _ in 0..100 {
            let mut event = OutgoingEvent::new(fixture.noted(number)).unwrap();
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
    let faults: u64 = proxies.iter().map(Proxy::faults).sum();
    assert!(faults >= 10, "{faults}");
    proxies.iter().for_each(|proxy| proxy.heal().unwrap());
    let mut lines = log.settles_at(20).await;
    lines.sort_by_key(|line| line.parse::<u64>().unwrap());
    assert_eq!(lines, numbers(0..20));
    // Spooled events are stored by now, or soon.
    let backend = fixture.connect().await;
    until(|| async { stored(&*backend, &fixture.stream()).await.len() >= 20 }).await;
    assert_eq!(stored(&*backend, &fixture.stream()).await, (0..20).collect::<Vec<u64>>());
    bus.close().await.unwrap();
}

async fn with_fail_an_event_whose_reply_was_lost_is_stored_and_handled_once(
    proxied: ProxiedFixture,
) {
    lose_replies(&proxied, FailurePolicy::Fail).await;
}

async fn with_a_spool_an_event_whose_reply_was_lost_is_stored_and_handled_once(
    proxied: ProxiedFixture,
) {
    let directory = tempfile::tempdir().unwrap();
    let spool = SpoolConfig::new(directory.path().join("spool"));
    lose_replies(&proxied, FailurePolicy::Spool(spool)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_fail_an_unconfirmed_event_that_is_stored_is_handled_here() {
    wait_for_unconfirmed_events(FailurePolicy::Fail).await;
}

/// An event too large for the spool, or a failing disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_full_spool_an_unconfirmed_event_that_is_stored_is_handled_here() {
    let directory = tempfile::tempdir().unwrap();
    let small = SpoolConfig { max_bytes: 4096, ..SpoolConfig::new(directory.path().join("spool")) };
    wait_for_unconfirmed_events(FailurePolicy::Spool(small)).await;
}

/// Without an id of the caller the event cannot be retried, so its fate must be found out.
async fn wait_for_unconfirmed_events(policy: FailurePolicy) {
    let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
    let fixture = Fixture::at(redis.url());
    let (bus, log) = open(&fixture, policy).await;
    // The reply is held back until the call has timed out; the event arrives late.
    let backend = fixture.connect().await;
    let mut unconfirmed = Vec::new();
    for number in 1..4 {
        redis.pause().unwrap();
        let event = Noted { text: "x".repeat(5000), ..fixture.noted(number) };
        if let Err(BusError::Unconfirmed { .. }) = bus.publish(event).await {
            unconfirmed.push(number);
        }
        redis.resume().unwrap();
        // Until the breaker admits the next call.
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    let all = || async { stored(&*backend, &fixture.stream()).await };
    until(|| async { all().await.iter().any(|number| unconfirmed.contains(number)) }).await;
    let is_handled = || async {
        let lines = all().await.iter().map(u64::to_string).collect::<Vec<_>>();
        let mut handled = log.lines();
        handled.sort();
        handled == lines
    };
    until(is_handled).await;
    // Stored events are handled here once, and no others.
    log.settles_at(all().await.len()).await;
    assert!(is_handled().await, "{:?} of {:?}", log.lines(), all().await);
    bus.close().await.unwrap();
}

/// The result distinguishes events that stay in this process from those that other processes may see.
async fn with_local_only_no_other_process_receives_a_local_event(proxied: ProxiedFixture) {
    let ProxiedFixture { proxies, fixture, .. } = &proxied;
    let (bus, log) = open(fixture, FailurePolicy::LocalOnly).await;
    let (mut local, mut unconfirmed) = (Vec::new(), Vec::new());
    for number in 1..40 {
        proxies.iter().for_each(|proxy| proxy.drop_reply().unwrap());
        let result = bus.publish(fixture.noted(number)).await.unwrap();
        assert_eq!(result.handlers_invoked, 1);
        match result.stored {
            StoreOutcome::LocalOnly => local.push(number),
            StoreOutcome::Unconfirmed => unconfirmed.push(number),
            _ => {}
        }
        if result.entry_id().is_none() {
            // Until the breaker admits the next call.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    proxies.iter().for_each(|proxy| proxy.heal().unwrap());
    let faults: u64 = proxies.iter().map(Proxy::faults).sum();
    println!("{faults} replies lost; local {local:?}; unconfirmed {unconfirmed:?}");

    // What a process receives that starts to read now.
    let seen = stored(&*fixture.connect().await, &fixture.stream()).await;
    let is_seen = |number: &&u64| seen.contains(number);
    let shown: Vec<&u64> = local.iter().filter(is_seen).collect();
    assert!(shown.is_empty(), "other processes see {shown:?}");
    assert!(unconfirmed.iter().any(|number| is_seen(&number)), "no reply of an append was lost");
    // Here each was handled once, including those that turned out to be stored.
    let mut lines = log.settles_at(40).await;
    lines.sort_by_key(|line| line.parse::<u64>().unwrap());
    assert_eq!(lines, numbers(0..40));
    bus.close().await.unwrap();
}

//! Invalid data of other programs: keys of another type, servers that lost their data.
//!
//! An embedded backend separates the names of different types and loses nothing while its process runs, so these
//! tests need a server. Input that every bus rejects is tested in the conformance suite, undecodable entries in
//! `parked`, corrupt spools in `corrupt_spool`.

use std::time::Duration;

use headwater_bus::{
    BusError, EventBus, EventBusExt, FailurePolicy, SessionId, SpoolConfig, StoreOutcome,
    StreamedBus, StreamedBusConfig, SubscribeOptions,
};
use headwater_conformance::bus::{HandlerLog, Noted, registry};

use crate::backends::{quick_lease, quick_queue};
use crate::fixture::{
    OUTAGE_CALL_DEADLINE, noted, numbers, open_with_short_leases, stored, writes,
};
use crate::outage_fixture::{OutageFixture, publish_until_stored, until};
use crate::spool::spooling;

with_server_outage!(
    a_key_of_another_type_is_an_error_under_every_policy_and_the_bus_keeps_working,
    a_key_of_another_type_does_not_block_live_subscriptions_to_other_streams,
    subscriptions_continue_after_the_server_lost_all_data,
    a_dedup_window_shorter_than_the_call_deadline_is_rejected_without_effect,
);

async fn a_dedup_window_shorter_than_the_call_deadline_is_rejected_without_effect(
    outage: OutageFixture,
) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let open = async |dedup_window: Duration| {
        let config =
            StreamedBusConfig { dedup_window: Some(dedup_window), ..spooling(fixture, &directory) };
        let backend = open_with_short_leases(fixture.url()).await;
        StreamedBus::open(backend, registry(), config).await
    };
    let error = open(OUTAGE_CALL_DEADLINE - Duration::from_millis(1)).await.unwrap_err();
    assert!(matches!(&error, BusError::Invalid { what, .. } if what == "dedup_window"), "{error}");
    assert!(error.to_string().contains("4s"), "{error}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    open(OUTAGE_CALL_DEADLINE).await.unwrap().close().await.unwrap();
}

async fn a_key_of_another_type_is_an_error_under_every_policy_and_the_bus_keeps_working(
    outage: OutageFixture,
) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let spool = FailurePolicy::Spool(SpoolConfig::new(directory.path().join("spool")));
    let bad = SessionId::random();
    let stream = fixture.stream_of(bad.as_str());
    outage.command_at(&bad, &["SET", stream.as_str(), "no stream"]);
    for (number, policy) in
        [FailurePolicy::Fail, spool, FailurePolicy::LocalOnly].into_iter().enumerate()
    {
        let number = number as u64;
        let config = StreamedBusConfig { on_failure: policy, ..fixture.config() };
        let bus = fixture.bus_with(registry(), config).await;
        let log = HandlerLog::default();
        bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log)).await.unwrap();
        for _ in 0..5 {
            let error = bus.publish(noted(&bad, 100)).await.unwrap_err();
            assert!(matches!(error, BusError::Backend(_)) && !error.is_transient(), "{error}");
            assert!(error.to_string().contains(stream.as_str()), "{error}");
        }
        for subscribe in [SubscribeOptions::live(), SubscribeOptions::durable("all")] {
            let to_bad = subscribe.session(bad.clone());
            let refused = bus.subscribe::<Noted>(to_bad, writes(&log)).await;
            assert!(refused.is_err(), "{refused:?}");
        }
        // No handler ran, and no breaker opened: the backend answers.
        let result = bus.publish(fixture.noted(number)).await.unwrap();
        assert!(matches!(result.stored, StoreOutcome::Entry(_)), "{result:?}");
        assert_eq!(log.lines(), [number.to_string()]);
        bus.close().await.unwrap();
    }
    assert_eq!(stored(&*fixture.connect().await, &fixture.stream()).await, [0, 1, 2]);
}

async fn a_key_of_another_type_does_not_block_live_subscriptions_to_other_streams(
    outage: OutageFixture,
) {
    let fixture = &outage.fixture;
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (bad, good) = (SessionId::random(), SessionId::random());
    let log = HandlerLog::default();
    for session in [&bad, &good] {
        let subscribe = SubscribeOptions::live().session(session.clone());
        bob.subscribe::<Noted>(subscribe, writes(&log)).await.unwrap();
    }
    let stream = fixture.stream_of(bad.as_str());
    outage.command_at(&bad, &["SET", stream.as_str(), "no stream"]);
    for number in 0..5 {
        ada.publish(noted(&good, number)).await.unwrap().into_result().unwrap();
    }
    assert_eq!(log.settles_at(5).await, numbers(0..5));
    // The key is removed, and after a while new events are received.
    outage.command_at(&bad, &["DEL", stream.as_str()]);
    ada.publish(noted(&bad, 5)).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(6).await, numbers(0..6));
    ada.close().await.unwrap();
    bob.close().await.unwrap();
}

async fn subscriptions_continue_after_the_server_lost_all_data(outage: OutageFixture) {
    let fixture = &outage.fixture;
    let queue = quick_queue(quick_lease());
    let config = || StreamedBusConfig { queue: queue.clone(), ..fixture.config() };
    let (ada, bob) = (
        fixture.bus_with(registry(), config()).await,
        fixture.bus_with(registry(), config()).await,
    );
    let (live, durable) = (HandlerLog::default(), HandlerLog::default());
    bob.subscribe::<Noted>(SubscribeOptions::live(), writes(&live)).await.unwrap();
    bob.subscribe::<Noted>(SubscribeOptions::durable("all"), writes(&durable)).await.unwrap();
    ada.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();
    live.wait_for(1).await;
    durable.wait_for(1).await;
    // Nothing remains of the stream, its groups and their members.
    until(|| async {
        let group = &bob.health().await.streams[fixture.stream().as_str()].groups;
        group.values().all(|group| group.pending == 0)
    })
    .await;
    outage.flush();
    tokio::time::sleep(Duration::from_millis(10)).await;
    for number in 1..4 {
        publish_until_stored(&ada, &fixture.session, number).await;
    }
    assert_eq!(live.settles_at(4).await, numbers(0..4));
    let mut handled = durable.wait_for(4).await;
    handled.sort();
    handled.dedup();
    assert_eq!(handled, numbers(0..4));
    ada.close().await.unwrap();
    bob.close().await.unwrap();
}

//! Draining a spool while one node of a cluster is unavailable.

use headwater_bus::{EventBus, EventBusExt, StoreOutcome};
use headwater_conformance::bus::registry;

use crate::fixture::{noted, numbers, stored, watch};
use crate::outage_fixture::{LIMIT, OutageFixture, until};
use crate::spool::{spooling, wait_until_empty};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_spooled_events_for_available_nodes_do_not_wait_for_an_unavailable_one() {
    let outage = OutageFixture::cluster();
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    let backend = fixture.connect().await;
    let log = watch(&bus).await;
    let stays = outage.elsewhere().next().unwrap();
    let sessions = [&fixture.session, &stays];
    let publish = async |number: u64| {
        let mut ways = Vec::new();
        for session in sessions {
            ways.push(bus.publish(noted(session, number)).await.unwrap().stored);
        }
        ways
    };
    publish(0).await;

    outage.begin().await;
    for number in 1..20 {
        // Events behind a spooled one are spooled, too.
        assert_eq!(publish(number).await, [StoreOutcome::Spooled; 2]);
    }
    // It is stored where its node is available.
    let all: Vec<u64> = (0..20).collect();
    until(|| async { stored(&*backend, &fixture.stream_of(stays.as_str())).await == all }).await;
    assert_eq!(bus.health().await.spool.unwrap().events, 38);

    outage.end().await;
    wait_until_empty(&bus, LIMIT).await;
    for session in sessions {
        assert_eq!(stored(&*backend, &fixture.stream_of(session.as_str())).await, all);
    }
    // Both sessions were handled here once, at once.
    assert_eq!(log.settles_at(40).await.len(), numbers(0..20).len() * 2);
    bus.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_rejected_events_are_set_aside_once_during_a_node_outage() {
    let outage = OutageFixture::cluster();
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    let backend = fixture.connect().await;
    let refused = outage.elsewhere().next().unwrap();
    let good = outage.elsewhere().next().unwrap();

    // Given events for a stream that will reject them, behind them events for the unavailable node, and others.
    let room = |bytes: &str| outage.command_at(&refused, &["CONFIG", "SET", "maxmemory", bytes]);
    room("1");
    for (number, session) in [(0, &refused), (1, &refused), (2, &refused), (0, &fixture.session)] {
        let result = bus.publish(noted(session, number)).await.unwrap();
        assert_eq!(result.stored, StoreOutcome::Spooled);
    }
    outage.begin().await;
    for (number, session) in [(1, &fixture.session), (0, &good), (1, &good), (2, &good)] {
        let result = bus.publish(noted(session, number)).await.unwrap();
        assert_eq!(result.stored, StoreOutcome::Spooled);
    }
    room("0");
    // Some of them may be in their stream already, because the drain retries.
    let stream = fixture.stream_of(refused.as_str());
    outage.command_at(&refused, &["SET", stream.as_str(), "no stream"]);
    bus.publish(noted(&refused, 3)).await.unwrap();
    // Several retries later ...
    for number in 3..6 {
        bus.publish(noted(&good, number)).await.unwrap();
        let all: Vec<u64> = (0..=number).collect();
        until(|| async { stored(&*backend, &fixture.stream_of(good.as_str())).await == all }).await;
    }
    // ... nothing is rejected while the rest of its batch cannot be stored.
    assert_eq!(bus.health().await.spool.unwrap().rejected, 0);

    outage.end().await;
    wait_until_empty(&bus, LIMIT).await;
    assert_eq!(bus.health().await.spool.unwrap().rejected, 4);
    let listed = bus.rejected(100).await.unwrap();
    assert_eq!(listed.len(), 4);
    assert!(listed.iter().all(|event| event.stream == stream));
    assert_eq!(stored(&*backend, &fixture.stream()).await, [0, 1]);
    assert_eq!(stored(&*backend, &fixture.stream_of(good.as_str())).await, [0, 1, 2, 3, 4, 5]);
    bus.close().await.unwrap();
}

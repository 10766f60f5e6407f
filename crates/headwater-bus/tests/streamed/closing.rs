//! Duration of closing. Without a server, on a paused clock.

use std::time::Duration;

use headwater_bus::{EventBus, EventBusExt, ReceivedEvent, StreamedBusConfig, SubscribeOptions};
use headwater_conformance::bus::{HandlerLog, Noted, registry};
use tokio::time::Instant;

use crate::fixture::Fixture;

tests_in!(
    embedded,
    crate::fixture::Fixture::embedded().await,
    (start_paused = true),
    closing_takes_at_most_one_drain_timeout
);
tests_in!(redis, crate::fixture::Fixture::redis(), (), closing_takes_at_most_one_drain_timeout);
tests_in!(cluster, crate::fixture::Fixture::cluster(), (), closing_takes_at_most_one_drain_timeout);

async fn closing_takes_at_most_one_drain_timeout(fixture: Fixture) {
    // Long enough that a busy machine does not turn one timeout into two.
    const DRAIN: Duration = Duration::from_secs(8);
    let config = StreamedBusConfig { drain: DRAIN, ..fixture.config() };
    let bus = std::sync::Arc::new(fixture.bus_with(registry(), config).await);
    let other = fixture.bus().await;
    let log = HandlerLog::default();
    let hanging = |name: &'static str| {
        let log = log.clone();
        move |_: ReceivedEvent<Noted>| {
            log.add(name);
            std::future::pending::<()>()
        }
    };
    let for_ever = Duration::from_secs(1_000_000);
    let live = SubscribeOptions { handler_timeout: for_ever, ..SubscribeOptions::live() };
    let durable =
        SubscribeOptions { handler_timeout: for_ever, ..SubscribeOptions::durable("all") };
    bus.subscribe::<Noted>(live, hanging("live")).await.unwrap();
    bus.subscribe::<Noted>(durable, hanging("durable")).await.unwrap();
    // Hanging handlers: one of an event of another bus, one of an event published here, and one of a group for each.
    other.publish(fixture.noted(1)).await.unwrap().into_result().unwrap();
    let (here, event) = (bus.clone(), fixture.noted(2));
    let publishing = tokio::spawn(async move { here.publish(event).await });
    let mut lines = log.wait_for(4).await;
    lines.sort();
    assert_eq!(lines, ["durable", "durable", "live", "live"]);

    let began = Instant::now();
    bus.close().await.unwrap();
    let took = began.elapsed();
    assert!(took >= DRAIN && took < DRAIN * 2, "{took:?}");
    publishing.abort();
    // Unfinished events of the group are available to others.
    let stats = fixture.connect().await.stats(&fixture.stream()).await.unwrap().unwrap();
    assert_eq!((stats.length, stats.groups.len()), (2, 1));
}

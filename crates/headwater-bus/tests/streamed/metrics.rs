//! Metrics of a bus on streams.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{
    EventBus, EventBusExt, EventId, FailurePolicy, Folds, OutgoingEvent, ReceivedEvent,
    ReplayUntil, SessionId, Sessions, SessionsConfig, StreamedBusConfig, SubscribeOptions,
};
use headwater_conformance::bus::{Announced, HandlerLog, Noted, registry};

use crate::backends::telemetry::Counts;
use crate::fixture::{Fixture, noted, watch};
use crate::outage_fixture::{LIMIT, OutageFixture, until};
use crate::spool::{spooling, wait_until_empty};

// On one thread, so that the recorder of a test sees only its own bus.
on_streams!((): event_metrics_are_counted,
    possibly_missed_entries_of_live_subscriptions_are_counted,
    the_pending_gauge_sums_all_sessions_and_is_reset_with_its_group,
    session_metrics_are_counted,
);

mod outage {
    use super::failure_metrics_are_counted;

    with_outage!((): failure_metrics_are_counted);
}

async fn event_metrics_are_counted(fixture: Fixture) {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let bus = fixture.bus().await;
    let log = watch(&bus).await;
    let refuse = |_: ReceivedEvent<Noted>| async { Err::<(), _>("no") };
    bus.subscribe::<Noted>(SubscribeOptions::live(), refuse).await.unwrap();
    let done = |_: ReceivedEvent<Noted>| async {};
    bus.subscribe::<Noted>(SubscribeOptions::durable("telemetry"), done).await.unwrap();
    for number in 0..3 {
        assert!(!bus.publish(fixture.noted(number)).await.unwrap().ok());
    }
    bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    fixture.append(&[("type", "tests.Unheard"), ("payload", "{}")]).await;
    while bus.health().await.parked == 0 {
        tokio::task::yield_now().await;
    }
    log.settles_at(3).await;

    let counted = [
        ("publish_total{type=conformance.Noted}{result=stored}", 3),
        ("publish_total{type=conformance.Announced}{result=stored}", 1),
        ("publish_latency_seconds{type=conformance.Noted}", 3),
        ("consume_total{type=conformance.Noted}{kind=live}", 6),
        ("consume_total{type=conformance.Noted}{kind=durable}", 3),
        ("consume_latency_seconds{type=conformance.Noted}{kind=durable}", 3),
        ("consume_errors_total{type=conformance.Noted}{kind=live}", 3),
        ("parked_total", 1),
    ];
    counts.come_to(&counted).await;
    // Events are acknowledged a moment later, and the gauge is set by a health check.
    until(|| async {
        bus.health().await;
        counts.of("pending{stream=session}{group=telemetry}") == Some(0)
    })
    .await;
    assert!(bus.last_health().unwrap().connected);
    bus.close().await.unwrap();
}

/// The metric names of the wire format, and ours.
#[test]
fn every_metric_of_the_wire_format_exists_with_our_prefix() {
    let ours = headwater_bus::metrics::PUBLISHED;
    assert_eq!(ours, "headwater_bus_publish_total", "publish.count");
    let ours = headwater_bus::metrics::PUBLISH_LATENCY;
    assert_eq!(ours, "headwater_bus_publish_latency_seconds", "publish.latency");
    let ours = headwater_bus::metrics::PUBLISH_ERRORS;
    assert_eq!(ours, "headwater_bus_publish_errors_total", "publish.error");
    let ours = headwater_bus::metrics::CONSUMED;
    assert_eq!(ours, "headwater_bus_consume_total", "consume.count");
    let ours = headwater_bus::metrics::CONSUME_LATENCY;
    assert_eq!(ours, "headwater_bus_consume_latency_seconds", "consume.latency");
    assert_eq!(headwater_bus::metrics::PENDING, "headwater_bus_pending", "pending.count");
}

async fn failure_metrics_are_counted(outage: OutageFixture) {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let fails = fixture.bus().await;
    let spools = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    let config = StreamedBusConfig { on_failure: FailurePolicy::LocalOnly, ..fixture.config() };
    let stays = fixture.bus_with(registry(), config).await;
    let event =
        || OutgoingEvent::new(fixture.noted(0)).unwrap().with_id(EventId::new("0").unwrap());
    for _ in 0..2 {
        fails.publish_outgoing(event()).await.unwrap().into_result().unwrap();
    }
    outage.begin().await;
    for number in 1..4 {
        assert!(fails.publish(fixture.noted(number)).await.is_err());
        spools.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
        stays.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    let type_ = "{type=conformance.Noted}";
    for (name, expected) in [
        (format!("publish_errors_total{type_}"), 3),
        (format!("publish_total{type_}{{result=stored}}"), 1),
        (format!("publish_total{type_}{{result=duplicate}}"), 1),
        (format!("publish_total{type_}{{result=spooled}}"), 3),
        (format!("publish_total{type_}{{result=unconfirmed}}"), 3),
        (format!("publish_latency_seconds{type_}"), 8),
        ("spooled".to_owned(), 3),
    ] {
        assert_eq!(counts.of(&name), Some(expected), "{name} in {counts:?}");
    }
    // Three failures open a breaker, on all three buses, and once more for the spool.
    assert!(counts.of("breaker_opened_total").is_some_and(|count| count >= 2), "{counts:?}");
    outage.end().await;
    wait_until_empty(&spools, LIMIT).await;
    // The spool is empty a moment before that is counted.
    until(|| async { (counts.of("spooled"), counts.of("replayed_total")) == (Some(0), Some(3)) })
        .await;
    for bus in [fails, spools, stays] {
        bus.close().await.unwrap();
    }
}

async fn possibly_missed_entries_of_live_subscriptions_are_counted(fixture: Fixture) {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    crate::live::a_reader_too_late_for_an_entry_reports_it(fixture).await;
    assert_eq!(counts.of("live_missed_total"), Some(1));
}

/// One series for all sessions, reset when the bus is closed.
async fn the_pending_gauge_sums_all_sessions_and_is_reset_with_its_group(fixture: Fixture) {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let drain = Duration::from_millis(100);
    let config = StreamedBusConfig { drain, ..fixture.config() };
    let bus = fixture.bus_with(registry(), config).await;
    let log = HandlerLog::default();
    let mut subscriptions = Vec::new();
    for number in 0..3 {
        let session = SessionId::random();
        let seen = log.clone();
        let hold = move |_: ReceivedEvent<Noted>| {
            seen.add(number);
            std::future::pending::<()>()
        };
        let held = SubscribeOptions { handler_timeout: DAY, ..SubscribeOptions::durable("held") };
        subscriptions.push(bus.subscribe::<Noted>(held.session(session.clone()), hold).await);
        bus.publish(noted(&session, number)).await.unwrap().into_result().unwrap();
    }
    let seen = log.clone();
    let hold = move |_: ReceivedEvent<Announced>| {
        seen.add("news");
        std::future::pending::<()>()
    };
    let news = SubscribeOptions { handler_timeout: DAY, ..SubscribeOptions::durable("news") };
    bus.subscribe::<Announced>(news, hold).await.unwrap();
    bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    log.wait_for(4).await;
    bus.health().await;
    let (held, news) =
        ("pending{stream=session}{group=held}", "pending{stream=control}{group=news}");
    assert_eq!((counts.of(held), counts.of(news)), (Some(3), Some(1)));
    let series = counts.names().into_iter().filter(|name| name.contains("_pending")).count();
    assert_eq!(series, 2);

    for subscription in subscriptions {
        assert!(bus.unsubscribe(subscription.unwrap()).await.unwrap());
    }
    bus.health().await;
    assert_eq!((counts.of(held), counts.of(news)), (Some(0), Some(1)));
    bus.close().await.unwrap();
    assert_eq!((counts.of(held), counts.of(news)), (Some(0), Some(0)));
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The same for sessions.
async fn session_metrics_are_counted(fixture: Fixture) {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let bus = Arc::new(fixture.bus().await);
    let folds = Folds::none().latest::<Noted>();
    let ttl = Some(Duration::from_millis(1));
    let config = SessionsConfig { ttl, ..Default::default() };
    let sessions = Sessions::new(bus.clone(), folds, config).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    for number in 0..5 {
        session.publish(fixture.noted(number)).await.unwrap();
    }
    sessions.recover(&fixture.session).await.unwrap();
    session.compact().await.unwrap();
    assert!(!session.snapshot().await.unwrap());
    sessions.recover(&fixture.session).await.unwrap();
    sessions.fork(&fixture.session, ReplayUntil::End, &SessionId::random()).await.unwrap();
    // The guard of a session is not reported as a group.
    assert!(bus.health().await.streams.values().all(|stream| stream.groups.is_empty()));
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(sessions.sweep().await.unwrap().expired, 2);

    let counted = [
        ("sessions_recovered_total{from=events}", 1),
        ("sessions_recovered_total{from=snapshot}", 2),
        ("session_recovery_seconds{from=snapshot}", 2),
        ("session_snapshots_total{result=kept}", 1),
        ("session_snapshots_total{result=superseded}", 1),
        ("session_entries_compacted_total", 4),
        ("sessions_filled_total{of=fork}", 1),
        ("sessions_expired_total", 2),
    ];
    counts.come_to(&counted).await;
    bus.close().await.unwrap();
}

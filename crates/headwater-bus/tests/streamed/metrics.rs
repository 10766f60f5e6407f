//! What is counted, by a recorder of the program's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_bus::conformance::{Announced, Log, Noted, registry};
use headwater_bus::{
    EventBus, EventBusExt, EventId, FailurePolicy, Folds, Outgoing, Received, SessionId, Sessions,
    SessionsConfig, StreamedBusConfig, Subscribe, Until,
};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

use crate::away::{Away, LIMIT, until};
use crate::place::{Place, noted, watch};
use crate::spool::{spooling, wait_until_empty};

/// On one thread, so that the recorder of this test hears its bus and no others.
#[tokio::test]
async fn the_life_of_events_is_counted() {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let place = Place::embedded().await;
    let bus = place.bus().await;
    let log = watch(&bus).await;
    let refuse = |_: Received<Noted>| async { Err::<(), _>("no") };
    bus.subscribe::<Noted>(Subscribe::live(), refuse).await.unwrap();
    let done = |_: Received<Noted>| async {};
    bus.subscribe::<Noted>(Subscribe::durable("telemetry"), done).await.unwrap();
    for number in 0..3 {
        assert!(!bus.publish(place.noted(number)).await.unwrap().ok());
    }
    bus.publish(Announced { number: 1 }).await.unwrap().raise().unwrap();
    place.append(&[("type", "tests.Unheard"), ("payload", "{}")]).await;
    while bus.health().await.parked == 0 {
        tokio::task::yield_now().await;
    }
    log.settles_at(3).await;
    bus.health().await;

    for (name, expected) in [
        ("publish_total{type=conformance.Noted}{result=stored}", 3),
        ("publish_total{type=conformance.Announced}{result=stored}", 1),
        ("publish_latency_seconds{type=conformance.Noted}", 3),
        ("consume_total{type=conformance.Noted}{kind=live}", 6),
        ("consume_total{type=conformance.Noted}{kind=durable}", 3),
        ("consume_latency_seconds{type=conformance.Noted}{kind=durable}", 3),
        ("consume_errors_total{type=conformance.Noted}{kind=live}", 3),
        ("parked_total", 1),
    ] {
        assert_eq!(counts.of(name), Some(expected), "{name} in {counts:?}");
    }
    assert_eq!(counts.of("pending{stream=session}{group=telemetry}"), Some(0));
    assert!(bus.last_health().unwrap().connected);
    bus.close().await.unwrap();
}

/// The names of the metrics that the first design of the bus lists, and ours for them.
#[test]
fn every_metric_of_the_first_design_has_its_name_behind_our_prefix() {
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

#[tokio::test]
async fn what_goes_wrong_is_counted() {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let (away, directory) = (Away::embedded().await, tempfile::tempdir().unwrap());
    let place = &away.place;
    let fails = place.bus().await;
    let spools = place.bus_with(registry(), spooling(place, &directory)).await;
    let config = StreamedBusConfig { on_failure: FailurePolicy::LocalOnly, ..place.config() };
    let stays = place.bus_with(registry(), config).await;
    let event = || Outgoing::new(place.noted(0)).unwrap().with_id(EventId::new("0").unwrap());
    for _ in 0..2 {
        fails.publish_outgoing(event()).await.unwrap().raise().unwrap();
    }
    away.begin().await;
    for number in 1..4 {
        assert!(fails.publish(place.noted(number)).await.is_err());
        spools.publish(place.noted(number)).await.unwrap().raise().unwrap();
        stays.publish(place.noted(number)).await.unwrap().raise().unwrap();
    }
    let type_ = "{type=conformance.Noted}";
    for (name, expected) in [
        (format!("publish_errors_total{type_}"), 3),
        (format!("publish_total{type_}{{result=stored}}"), 1),
        (format!("publish_total{type_}{{result=duplicate}}"), 1),
        (format!("publish_total{type_}{{result=spooled}}"), 3),
        (format!("publish_total{type_}{{result=local}}"), 3),
        (format!("publish_latency_seconds{type_}"), 8),
        ("spooled".to_owned(), 3),
    ] {
        assert_eq!(counts.of(&name), Some(expected), "{name} in {counts:?}");
    }
    // Three failures open a breaker, and all three buses had them, one of them for its spool, too.
    assert!(counts.of("breaker_opened_total").is_some_and(|count| count >= 2), "{counts:?}");
    away.end().await;
    wait_until_empty(&spools, LIMIT).await;
    // It is empty a moment before that is counted.
    until(|| async { (counts.of("spooled"), counts.of("replayed_total")) == (Some(0), Some(3)) })
        .await;
    for bus in [fails, spools, stays] {
        bus.close().await.unwrap();
    }
}

#[tokio::test]
async fn what_live_subscriptions_may_have_missed_is_counted() {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let place = Place::embedded().await;
    crate::live::who_comes_too_late_for_an_entry_is_told(place).await;
    assert_eq!(counts.of("live_missed_total"), Some(1));
}

/// One series for all sessions, however many there are, and none that stands still when nobody looks any more.
#[tokio::test]
async fn what_is_pending_is_counted_over_all_sessions_and_ends_with_its_group() {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let place = Place::embedded().await;
    let drain = Duration::from_millis(100);
    let config = StreamedBusConfig { drain, ..place.config() };
    let bus = place.bus_with(registry(), config).await;
    let log = Log::default();
    let mut subscriptions = Vec::new();
    for number in 0..3 {
        let session = SessionId::random();
        let seen = log.clone();
        let hold = move |_: Received<Noted>| {
            seen.add(number);
            std::future::pending::<()>()
        };
        let held = Subscribe { handler_timeout: DAY, ..Subscribe::durable("held") };
        subscriptions.push(bus.subscribe::<Noted>(held.session(session.clone()), hold).await);
        bus.publish(noted(&session, number)).await.unwrap().raise().unwrap();
    }
    let seen = log.clone();
    let hold = move |_: Received<Announced>| {
        seen.add("news");
        std::future::pending::<()>()
    };
    let news = Subscribe { handler_timeout: DAY, ..Subscribe::durable("news") };
    bus.subscribe::<Announced>(news, hold).await.unwrap();
    bus.publish(Announced { number: 1 }).await.unwrap().raise().unwrap();
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
#[tokio::test]
async fn the_life_of_sessions_is_counted() {
    let counts = Counts::default();
    let _guard = metrics::set_default_local_recorder(&counts);
    let place = Place::embedded().await;
    let bus = Arc::new(place.bus().await);
    let folds = Folds::none().latest::<Noted>();
    let ttl = Some(Duration::from_millis(1));
    let config = SessionsConfig { ttl, ..Default::default() };
    let sessions = Sessions::new(bus.clone(), folds, config).await.unwrap();
    let session = sessions.create(&place.session).await.unwrap();
    for number in 0..5 {
        session.publish(place.noted(number)).await.unwrap();
    }
    sessions.recover(&place.session).await.unwrap();
    session.compact().await.unwrap();
    assert!(!session.snapshot().await.unwrap());
    sessions.recover(&place.session).await.unwrap();
    sessions.fork(&place.session, Until::End, &SessionId::random()).await.unwrap();
    // The guard of a session is no group that anybody waits for.
    assert!(bus.health().await.streams.values().all(|stream| stream.groups.is_empty()));
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(sessions.sweep().await.unwrap().expired, 2);

    for (name, expected) in [
        ("sessions_recovered_total{from=events}", 1),
        ("sessions_recovered_total{from=snapshot}", 2),
        ("session_recovery_seconds{from=snapshot}", 2),
        ("session_snapshots_total{result=kept}", 1),
        ("session_snapshots_total{result=superseded}", 1),
        ("session_entries_compacted_total", 4),
        ("sessions_filled_total{of=fork}", 1),
        ("sessions_expired_total", 2),
    ] {
        assert_eq!(counts.of(name), Some(expected), "{name} in {counts:?}");
    }
    bus.close().await.unwrap();
}

/// What was counted, set or recorded, by name and labels.
#[derive(Clone, Debug, Default)]
struct Counts(Arc<Mutex<BTreeMap<String, u64>>>);

impl Counts {
    fn of(&self, name: &str) -> Option<u64> {
        self.0.lock().unwrap().get(&format!("headwater_bus_{name}")).copied()
    }

    fn names(&self) -> Vec<String> {
        self.0.lock().unwrap().keys().cloned().collect()
    }

    fn count(&self, key: &Key) -> Arc<Count> {
        let labels = key.labels().map(|label| format!("{{{}={}}}", label.key(), label.value()));
        let name = format!("{}{}", key.name(), labels.collect::<String>());
        Arc::new(Count(self.clone(), name))
    }
}

struct Count(Counts, String);

impl Count {
    fn change(&self, change: impl FnOnce(&mut u64)) {
        change(self.0.0.lock().unwrap().entry(self.1.clone()).or_default());
    }
}

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        self.change(|count| *count += value);
    }

    fn absolute(&self, _: u64) {}
}

impl GaugeFn for Count {
    fn increment(&self, _: f64) {}

    fn decrement(&self, _: f64) {}

    fn set(&self, value: f64) {
        self.change(|count| *count = value as u64);
    }
}

impl HistogramFn for Count {
    fn record(&self, _: f64) {
        self.change(|count| *count += 1);
    }
}

impl Recorder for Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.count(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.count(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.count(key))
    }
}

//! Processes killed while they spool, drain or handle events.

use std::env;
use std::path::Path;
use std::time::Duration;

use headwater_bus::{
    EventBus, EventBusExt, FailurePolicy, Namespace, ReceivedEvent, SessionId, SpoolConfig,
    StoreOutcome, StreamedBus, StreamedBusConfig, SubscribeOptions,
};
use headwater_conformance::bus::{HandlerLog, Noted, registry};
use headwater_testkit::Child;

use crate::backends::{quick_lease, quick_queue};
use crate::fixture::{Fixture, open_with_short_leases, quick_breaker, stored, writes};
use crate::outage_fixture::{LIMIT, OutageFixture};
use crate::spool::{spooling, wait_until_empty};

// Two processes cannot share an embedded backend, so this does not apply to it.
with_server_outage!(
    spooled_events_of_a_killed_process_are_stored_by_the_next_in_order_and_once,
    a_process_killed_while_draining_the_spool_neither_duplicates_nor_loses_events,
);

mod reclaimed {
    use super::a_pending_event_of_a_killed_process_is_reclaimed;

    tests_in!(
        redis,
        crate::fixture::Fixture::redis(),
        (),
        a_pending_event_of_a_killed_process_is_reclaimed
    );
    tests_in!(
        cluster,
        crate::fixture::Fixture::cluster(),
        (),
        a_pending_event_of_a_killed_process_is_reclaimed
    );
}

/// The settings of a child, from its environment; the same as those of its [`Fixture`].
fn config_of_child() -> StreamedBusConfig {
    let on_failure = match env::var("SPOOL") {
        Ok(file) => FailurePolicy::Spool(SpoolConfig::new(Path::new(&file))),
        Err(_) => FailurePolicy::Fail,
    };
    StreamedBusConfig {
        prefix: env::var("PREFIX").unwrap(),
        namespace: Namespace::new("tests").unwrap(),
        session: Some(SessionId::new(env::var("SESSION").unwrap()).unwrap()),
        breaker: quick_breaker(),
        on_failure,
        queue: quick_queue(quick_lease()),
        ..Default::default()
    }
}

fn spawn(test: &str, fixture: &Fixture, spool: Option<&Path>) -> Child {
    let mut environment = vec![
        ("URL", fixture.url()),
        ("PREFIX", fixture.prefix.as_str()),
        ("SESSION", fixture.session.as_str()),
    ];
    if let Some(spool) = spool {
        environment.push(("SPOOL", spool.to_str().unwrap()));
    }
    Child::spawn_self(test, &environment).unwrap()
}

async fn spooled_events_of_a_killed_process_are_stored_by_the_next_in_order_and_once(
    outage: OutageFixture,
) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let spool = directory.path().join("spool");
    let child = spawn("crashes::publisher", fixture, Some(&spool));
    child.line_after("PUBLISHED 50 ", LIMIT).unwrap();
    outage.begin().await;
    // It continues without its server for a while and is then killed.
    let last = loop {
        let line = child.line_after("PUBLISHED ", LIMIT).unwrap();
        let (number, way) = line.split_once(' ').unwrap();
        let number: u64 = number.parse().unwrap();
        if way == "spooled" && number > 150 {
            break number;
        }
    };
    child.kill9().unwrap();
    outage.end().await;

    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    wait_until_empty(&bus, LIMIT).await;
    let numbers = stored(&*fixture.connect().await, &fixture.stream()).await;
    assert!(numbers.len() as u64 > last, "{} of at least {last}", numbers.len());
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<u64>>());
    bus.close().await.unwrap();
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn publisher() {
    in_child(async {
        let backend = open_with_short_leases(&env::var("URL").unwrap()).await;
        let bus = StreamedBus::open(backend, registry(), config_of_child()).await.unwrap();
        for number in 0.. {
            let result = bus.publish(Noted { number, ..Default::default() }).await.unwrap();
            let way = if result.stored == StoreOutcome::Spooled { "spooled" } else { "stored" };
            println!("PUBLISHED {number} {way}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
}

async fn a_process_killed_while_draining_the_spool_neither_duplicates_nor_loses_events(
    outage: OutageFixture,
) {
    const EVENTS: u64 = 20_000;
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    outage.begin().await;
    for batch in 0..EVENTS / 500 {
        let events = (batch * 500..batch * 500 + 500).map(|number| fixture.noted(number));
        let results = bus.publish_batch(events.collect()).await.unwrap();
        assert!(results.into_iter().all(|result| result.unwrap().stored == StoreOutcome::Spooled));
    }
    bus.close().await.unwrap();
    drop(bus);
    outage.end().await;

    let spool = directory.path().join("spool");
    let backend = fixture.connect().await;
    let length = || async {
        let stats = backend.stats(&fixture.stream()).await.unwrap();
        stats.map_or(0, |stats| stats.length)
    };
    let mut killed_in_between = 0;
    for _ in 0..8 {
        let before = length().await;
        let child = spawn("crashes::replayer", fixture, Some(&spool));
        child.line_after("OPEN", LIMIT).unwrap();
        for _ in 0..2000 {
            if length().await > before {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        child.kill9().unwrap();
        let after = length().await;
        killed_in_between += usize::from(after > before && after < EVENTS);
    }
    println!("killed {killed_in_between} times in the middle");
    assert!(killed_in_between > 0);
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    wait_until_empty(&bus, LIMIT).await;
    let numbers = stored(&*backend, &fixture.stream()).await;
    assert_eq!(numbers.len() as u64, EVENTS);
    assert_eq!(numbers, (0..EVENTS).collect::<Vec<u64>>());
    bus.close().await.unwrap();
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn replayer() {
    in_child(async {
        let backend = open_with_short_leases(&env::var("URL").unwrap()).await;
        let bus = StreamedBus::open(backend, registry(), config_of_child()).await.unwrap();
        println!("OPEN");
        std::future::pending::<()>().await;
        drop(bus);
    });
}

async fn a_pending_event_of_a_killed_process_is_reclaimed(fixture: Fixture) {
    let child = spawn("crashes::holder", &fixture, None);
    child.line_after("READY", LIMIT).unwrap();
    let config = StreamedBusConfig { queue: quick_queue(quick_lease()), ..fixture.config() };
    let bus = fixture.bus_with(registry(), config).await;
    bus.publish(fixture.noted(7)).await.unwrap().into_result().unwrap();
    child.line_after("HOLDING 7", LIMIT).unwrap();
    let log = HandlerLog::default();
    bus.subscribe::<Noted>(SubscribeOptions::durable("workers"), writes(&log)).await.unwrap();
    child.kill9().unwrap();
    assert_eq!(log.settles_at(1).await, ["7"]);
    bus.close().await.unwrap();
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn holder() {
    in_child(async {
        let backend = open_with_short_leases(&env::var("URL").unwrap()).await;
        let bus = StreamedBus::open(backend, registry(), config_of_child()).await.unwrap();
        let hold = |event: ReceivedEvent<Noted>| async move {
            println!("HOLDING {}", event.number);
            std::future::pending::<()>().await;
        };
        bus.subscribe::<Noted>(SubscribeOptions::durable("workers"), hold).await.unwrap();
        println!("READY");
        std::future::pending::<()>().await;
    });
}

/// Runs the child's part; without its environment variables this is not a child.
fn in_child(part: impl Future<Output = ()>) {
    if env::var("URL").is_err() {
        return;
    }
    tokio::runtime::Runtime::new().unwrap().block_on(part);
}

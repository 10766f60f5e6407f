//! Processes that are killed: while they spool, while they replay, while they handle.

use std::env;
use std::path::Path;
use std::time::Duration;

use headwater_bus::conformance::{HandlerLog, Noted, registry};
use headwater_bus::{
    EventBus, EventBusExt, FailurePolicy, Namespace, ReceivedEvent, SessionId, SpoolConfig,
    StoreOutcome, StreamedBus, StreamedBusConfig, SubscribeOptions,
};
use headwater_testkit::Child;

use crate::away::{Away, LIMIT};
use crate::backends::{quick_lease, quick_queue};
use crate::place::{Place, open_impatient, quick_breaker, stored, writes};
use crate::spool::{spooling, wait_until_empty};

// Two processes cannot share an embedded backend, so none of this can happen to one.
servers!(
    what_a_killed_process_had_spooled_is_stored_by_the_next_one_in_order_and_once,
    a_process_that_is_killed_while_it_replays_doubles_and_loses_nothing,
);

mod taken_over {
    use super::an_event_in_the_hands_of_a_killed_process_is_taken_over;

    tests_in!(
        redis,
        crate::place::Place::redis(),
        (),
        an_event_in_the_hands_of_a_killed_process_is_taken_over
    );
    tests_in!(
        cluster,
        crate::place::Place::cluster(),
        (),
        an_event_in_the_hands_of_a_killed_process_is_taken_over
    );
}

/// The settings of a child, from its environment; the same as those of its [`Place`].
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

fn spawn(test: &str, place: &Place, spool: Option<&Path>) -> Child {
    let mut environment = vec![
        ("URL", place.url()),
        ("PREFIX", place.prefix.as_str()),
        ("SESSION", place.session.as_str()),
    ];
    if let Some(spool) = spool {
        environment.push(("SPOOL", spool.to_str().unwrap()));
    }
    Child::spawn_self(test, &environment).unwrap()
}

async fn what_a_killed_process_had_spooled_is_stored_by_the_next_one_in_order_and_once(away: Away) {
    let (place, directory) = (&away.place, tempfile::tempdir().unwrap());
    let spool = directory.path().join("spool");
    let child = spawn("crashes::publisher", place, Some(&spool));
    child.line_after("PUBLISHED 50 ", LIMIT).unwrap();
    away.begin().await;
    // It goes on for a while without its server, then dies in the middle of something.
    let last = loop {
        let line = child.line_after("PUBLISHED ", LIMIT).unwrap();
        let (number, way) = line.split_once(' ').unwrap();
        let number: u64 = number.parse().unwrap();
        if way == "spooled" && number > 150 {
            break number;
        }
    };
    child.kill9().unwrap();
    away.end().await;

    let bus = place.bus_with(registry(), spooling(place, &directory)).await;
    wait_until_empty(&bus, LIMIT).await;
    let numbers = stored(&*place.connect().await, &place.stream()).await;
    assert!(numbers.len() as u64 > last, "{} of at least {last}", numbers.len());
    assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<u64>>());
    bus.close().await.unwrap();
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn publisher() {
    in_child(async {
        let backend = open_impatient(&env::var("URL").unwrap()).await;
        let bus = StreamedBus::open(backend, registry(), config_of_child()).await.unwrap();
        for number in 0.. {
            let result = bus.publish(Noted { number, ..Default::default() }).await.unwrap();
            let way = if result.stored == StoreOutcome::Spooled { "spooled" } else { "stored" };
            println!("PUBLISHED {number} {way}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
}

async fn a_process_that_is_killed_while_it_replays_doubles_and_loses_nothing(away: Away) {
    const EVENTS: u64 = 20_000;
    let (place, directory) = (&away.place, tempfile::tempdir().unwrap());
    let bus = place.bus_with(registry(), spooling(place, &directory)).await;
    away.begin().await;
    for batch in 0..EVENTS / 500 {
        let events = (batch * 500..batch * 500 + 500).map(|number| place.noted(number));
        let results = bus.publish_batch(events.collect()).await.unwrap();
        assert!(results.into_iter().all(|result| result.unwrap().stored == StoreOutcome::Spooled));
    }
    bus.close().await.unwrap();
    drop(bus);
    away.end().await;

    let spool = directory.path().join("spool");
    let backend = place.connect().await;
    let length = || async {
        let stats = backend.stats(&place.stream()).await.unwrap();
        stats.map_or(0, |stats| stats.length)
    };
    let mut killed_in_between = 0;
    for _ in 0..8 {
        let before = length().await;
        let child = spawn("crashes::replayer", place, Some(&spool));
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
    let bus = place.bus_with(registry(), spooling(place, &directory)).await;
    wait_until_empty(&bus, LIMIT).await;
    let numbers = stored(&*backend, &place.stream()).await;
    assert_eq!(numbers.len() as u64, EVENTS);
    assert_eq!(numbers, (0..EVENTS).collect::<Vec<u64>>());
    bus.close().await.unwrap();
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn replayer() {
    in_child(async {
        let backend = open_impatient(&env::var("URL").unwrap()).await;
        let bus = StreamedBus::open(backend, registry(), config_of_child()).await.unwrap();
        println!("OPEN");
        std::future::pending::<()>().await;
        drop(bus);
    });
}

async fn an_event_in_the_hands_of_a_killed_process_is_taken_over(place: Place) {
    let child = spawn("crashes::holder", &place, None);
    child.line_after("READY", LIMIT).unwrap();
    let config = StreamedBusConfig { queue: quick_queue(quick_lease()), ..place.config() };
    let bus = place.bus_with(registry(), config).await;
    bus.publish(place.noted(7)).await.unwrap().into_result().unwrap();
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
        let backend = open_impatient(&env::var("URL").unwrap()).await;
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

/// Runs a child's part; without its environment it was not started as one.
fn in_child(part: impl Future<Output = ()>) {
    if env::var("URL").is_err() {
        return;
    }
    tokio::runtime::Runtime::new().unwrap().block_on(part);
}

//! Processes that are killed: while they spool, while they replay, while they handle.

use std::env;
use std::path::Path;
use std::time::Duration;

use headwater_bus::conformance::{Log, Noted, registry};
use headwater_bus::{
    EventBus, EventBusExt, FailurePolicy, Namespace, Received, SessionId, SpoolConfig, Stored,
    StreamedBus, StreamedBusConfig, Subscribe,
};
use headwater_testkit::{Child, Persistence, Redis};

use crate::backends::{quick_lease, quick_queue};
use crate::place::{Place, open, open_impatient, quick_breaker, stored, writes};
use crate::spool::{spooling, wait_until_empty};

const LIMIT: Duration = Duration::from_secs(90);

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

fn spawn(test: &str, place: &Place, url: &str, spool: Option<&Path>) -> Child {
    let mut environment =
        vec![("URL", url), ("PREFIX", place.prefix.as_str()), ("SESSION", place.session.as_str())];
    if let Some(spool) = spool {
        environment.push(("SPOOL", spool.to_str().unwrap()));
    }
    Child::spawn_self(test, &environment).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_process_had_spooled_is_stored_by_the_next_one_in_order_and_once() {
    let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let place = Place::at(redis.url());
    let spool = directory.path().join("spool");
    let child = spawn("crashes::publisher", &place, &redis.url(), Some(&spool));
    child.line_after("PUBLISHED 50 ", LIMIT).unwrap();
    redis.kill9().unwrap();
    // It goes on for a while without Redis, then dies in the middle of something.
    let last = loop {
        let line = child.line_after("PUBLISHED ", LIMIT).unwrap();
        let (number, way) = line.split_once(' ').unwrap();
        let number: u64 = number.parse().unwrap();
        if way == "spooled" && number > 150 {
            break number;
        }
    };
    child.kill9().unwrap();
    redis.restart().unwrap();

    let bus = place.bus_with(registry(), spooling(&place, &directory)).await;
    wait_until_empty(&bus, LIMIT).await;
    let numbers = stored(&*open(&redis.url()).await, &place.stream()).await;
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
            let way = if result.stored == Stored::Spooled { "spooled" } else { "stored" };
            println!("PUBLISHED {number} {way}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_is_killed_while_it_replays_doubles_and_loses_nothing() {
    const EVENTS: u64 = 20_000;
    let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let place = Place::at(redis.url());
    let bus = place.bus_with(registry(), spooling(&place, &directory)).await;
    redis.kill9().unwrap();
    for batch in 0..EVENTS / 500 {
        let events = (batch * 500..batch * 500 + 500).map(|number| place.noted(number));
        let results = bus.publish_batch(events.collect()).await.unwrap();
        assert!(results.into_iter().all(|result| result.unwrap().stored == Stored::Spooled));
    }
    bus.close().await.unwrap();
    drop(bus);
    redis.restart().unwrap();

    let spool = directory.path().join("spool");
    let backend = open(&redis.url()).await;
    let length = || async {
        let stats = backend.stats(&place.stream()).await.unwrap();
        stats.map_or(0, |stats| stats.length)
    };
    let mut killed_in_between = 0;
    for _ in 0..8 {
        let before = length().await;
        let child = spawn("crashes::replayer", &place, &redis.url(), Some(&spool));
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
    let bus = place.bus_with(registry(), spooling(&place, &directory)).await;
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

/// One scenario, on Redis and on a cluster.
async fn an_event_in_the_hands_of_a_killed_process_is_taken_over(url: String) {
    let place = Place::at(url.clone());
    let child = spawn("crashes::holder", &place, &url, None);
    child.line_after("READY", LIMIT).unwrap();
    let config = StreamedBusConfig { queue: quick_queue(quick_lease()), ..place.config() };
    let bus = place.bus_with(registry(), config).await;
    bus.publish(place.noted(7)).await.unwrap().raise().unwrap();
    child.line_after("HOLDING 7", LIMIT).unwrap();
    let log = Log::default();
    bus.subscribe::<Noted>(Subscribe::durable("workers"), writes(&log)).await.unwrap();
    child.kill9().unwrap();
    assert_eq!(log.settles_at(1).await, ["7"]);
    bus.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_in_the_hands_of_a_killed_process_is_taken_over_on_redis() {
    let redis = Redis::shared().unwrap();
    an_event_in_the_hands_of_a_killed_process_is_taken_over(redis.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_in_the_hands_of_a_killed_process_is_taken_over_on_a_cluster() {
    let cluster = headwater_testkit::Cluster::shared().unwrap();
    an_event_in_the_hands_of_a_killed_process_is_taken_over(cluster.url()).await;
}

#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn holder() {
    in_child(async {
        let backend = open_impatient(&env::var("URL").unwrap()).await;
        let bus = StreamedBus::open(backend, registry(), config_of_child()).await.unwrap();
        let hold = |event: Received<Noted>| async move {
            println!("HOLDING {}", event.number);
            std::future::pending::<()>().await;
        };
        bus.subscribe::<Noted>(Subscribe::durable("workers"), hold).await.unwrap();
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

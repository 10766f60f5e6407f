//! Sessions while the backend is away.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::conformance::registry;
use headwater_bus::{
    BreakerConfig, FailurePolicy, Sessions, SpoolConfig, Stored, StreamedBus, StreamedBusConfig,
};
use headwater_stream::{Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::place::{LIMIT, Place, Sum, by_hand, folds, noted, publish, sum};

async fn sessions(place: &Place, url: &str, on_failure: FailurePolicy) -> Sessions {
    let options = Options { call_deadline: Duration::from_secs(5), ..Default::default() };
    let backend = connect(url, &options).await.unwrap();
    let recovery = Duration::from_millis(300);
    let config = StreamedBusConfig {
        prefix: place.prefix.clone(),
        breaker: BreakerConfig { failure_threshold: 3, recovery },
        on_failure,
        ..Default::default()
    };
    let bus = StreamedBus::open(backend, registry(), config).await.unwrap();
    Sessions::new(Arc::new(bus), folds(), by_hand()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_is_an_error_and_the_session_goes_on_afterwards() {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let url = redis.url_at(proxy.addr());
    let place = Place::at(url.clone());
    let sessions = sessions(&place, &url, FailurePolicy::Fail).await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..5).await;
    proxy.cut().unwrap();
    for error in [
        session.publish(noted(5)).await.unwrap_err(),
        session.refresh().await.unwrap_err(),
        session.snapshot().await.unwrap_err(),
        sessions.recover(&place.session).await.unwrap_err(),
        sessions.list(headwater_stream::EntryId::MIN, 5).await.unwrap_err(),
    ] {
        assert!(error.is_transient(), "{error}");
    }
    // What it knew, it knows.
    assert_eq!(sum(&session), Sum::of(0..5));
    proxy.heal().unwrap();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while session.publish(noted(6)).await.is_err() {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    session.refresh().await.unwrap();
    let expected = [Sum::of([0, 1, 2, 3, 4, 6]), Sum::of(0..7)];
    assert!(expected.contains(&sum(&session)), "{:?}", sum(&session));
    assert_eq!(sum(&sessions.recover(&place.session).await.unwrap()), sum(&session));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spooled_events_are_part_of_the_state_once_they_are_in_the_stream() {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let url = redis.url_at(proxy.addr());
    let place = Place::at(url.clone());
    let directory = tempfile::tempdir().unwrap();
    let spool = FailurePolicy::Spool(SpoolConfig::new(directory.path().join("spool")));
    let sessions = sessions(&place, &url, spool).await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..5).await;
    proxy.cut().unwrap();
    for number in 5..20 {
        assert_eq!(session.publish(noted(number)).await.unwrap().stored, Stored::Spooled);
    }
    assert_eq!(sum(&session), Sum::of(0..5));
    proxy.heal().unwrap();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while session.refresh().await.is_err() || sum(&session).count < 20 {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(sum(&session), Sum::of(0..20));
    assert_eq!(sum(&sessions.recover(&place.session).await.unwrap()), Sum::of(0..20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_read_ends_where_the_stream_did_and_not_when_others_pause() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    let sessions = place.sessions().await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..10).await;
    let reads = || {
        let text = redis.command(&["INFO", "commandstats"]).unwrap().text();
        let calls = text.split("cmdstat_xrange:calls=").nth(1).unwrap_or("0");
        calls.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u64>().unwrap()
    };
    // A page that is not full is the last one: whoever asked again would never come to an end while others publish.
    let before = reads();
    session.publish(noted(10)).await.unwrap();
    assert_eq!(reads() - before, 1);
    let before = reads();
    assert_eq!(sum(&sessions.recover(&place.session).await.unwrap()), Sum::of(0..11));
    assert_eq!(reads() - before, 1);
    let before = reads();
    let mut export = sessions.export(&place.session).await.unwrap();
    while export.next_line().await.unwrap().is_some() {}
    assert_eq!(reads() - before, 1);
}

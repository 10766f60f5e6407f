//! What happens when the server is away, forgets everything, or loses a reply.

use std::time::Duration;

use headwater_stream::assignment::{
    AssignmentConfig, Disowned, EndError, Notification, Terminated,
};
use headwater_testkit::{Persistence, Proxy, Redis, Sentinel};
use tokio::time::{Instant, sleep, timeout};

use crate::place::{LIMIT, Place, QUIET, quick};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_server_keeps_streams_and_owners() {
    let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
    let place = Place::at(redis.url());
    let config = AssignmentConfig { heartbeat_every: Duration::from_secs(4), ..quick() };
    let mut dies = place.consumer("dies", config.clone()).await;
    let lost = place.add(&["lost"]).await.remove(0);
    dies.added().await;
    let mut lives = place.consumer("lives", config).await;
    drop(dies.notifications);
    place.add(&["kept"]).await;
    let kept = lives.added().await;

    // When one owner dies together with the server, and nobody can hear of it ...
    drop(dies.assignment);
    redis.kill9().unwrap();
    redis.restart().unwrap();

    // ... then the other owner goes on, and finds the stream.
    assert_eq!(lives.expired().await, lost);
    let claimed = lives.assignment.claim(&lost).await.unwrap();
    assert!(kept.guard().is_trusted());
    lives.assignment.done(&kept).await.unwrap();
    lives.assignment.done(&claimed).await.unwrap();
    assert_eq!(place.pending().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_flush_owners_are_disowned_and_new_streams_are_taken() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    let mut consumer = place.consumer("c", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    redis.command(&["FLUSHALL"]).unwrap();

    assert_eq!(consumer.disowned().await, (stream.clone(), Disowned::LeaseLost));
    assert!(owned.work().is_none());
    let done = consumer.assignment.done(&owned).await;
    assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
    // The group is made anew, from the beginning; the same stream may come again, with a larger epoch.
    place.add(&["s"]).await;
    let again = consumer.added().await;
    assert_eq!(again.stream(), &stream);
    assert!(again.epoch() > owned.epoch());
    consumer.assignment.done(&again).await.unwrap();
    consumer.hears_nothing_for(QUIET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_outage_costs_no_ownership() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    let config = AssignmentConfig { heartbeat_every: Duration::from_secs(6), ..quick() };
    let mut consumer = place.consumer("c", config.clone()).await;
    place.add(&["s"]).await;
    let owned = consumer.added().await;

    for _ in 0..3 {
        redis.pause().unwrap();
        sleep(Duration::from_secs(1)).await;
        redis.resume().unwrap();
        sleep(config.heartbeat_every / 2).await;
    }

    assert!(owned.guard().is_trusted());
    consumer.assignment.done(&owned).await.unwrap();
    consumer.hears_nothing_for(QUIET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_outage_disowns_before_the_lease_can_expire() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    let mut consumer = place.consumer("c", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    redis.pause().unwrap();
    let paused = Instant::now();
    let mut trusted = Duration::ZERO;
    loop {
        let asked = paused.elapsed();
        if !owned.guard().is_trusted() {
            break;
        }
        trusted = asked;
        sleep(Duration::from_millis(10)).await;
    }
    assert!(trusted < quick().lease_ttl(), "after {trusted:?}");
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
    assert_eq!(consumer.disowned().await, (stream.clone(), Disowned::LeaseUnconfirmed));
    redis.resume().unwrap();

    // The stream is free again when the server is back, and one disowning is all that is heard.
    assert_eq!(consumer.expired().await, stream);
    let again = consumer.assignment.claim(&stream).await.unwrap();
    assert!(again.epoch() > owned.epoch());
    assert!(matches!(consumer.assignment.done(&owned).await, Err(EndError::NotOwner { .. })));
    consumer.assignment.done(&again).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_whose_reply_is_lost_can_be_repeated() {
    // Given nothing else that talks to the server, so that the lost reply is the one of the end.
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let place = Place::at(redis.url_at(proxy.addr()));
    let config = AssignmentConfig {
        heartbeat_every: Duration::from_secs(60),
        sweep_every: Duration::from_secs(60),
        ..Default::default()
    };
    let mut consumer = place.consumer("c", config).await;
    place.add(&["done", "released"]).await;
    let owned = consumer.added_many(2).await;
    sleep(QUIET).await;

    proxy.drop_reply().unwrap();
    let mut done = consumer.assignment.done(&owned[0]).await;
    for _ in 0..50 {
        match &done {
            Ok(()) => break,
            Err(EndError::Backend(error)) => assert!(error.is_transient(), "{error}"),
            Err(other) => panic!("{other}"),
        }
        sleep(Duration::from_millis(100)).await;
        done = consumer.assignment.done(&owned[0]).await;
    }
    done.unwrap();

    assert_eq!(place.pending().await.len(), 1);
    assert_eq!(place.entries(&place.input()).await.len(), 1);
    assert_eq!(consumer.assignment.owned().len(), 1);
    consumer.assignment.release(&owned[1]).await.unwrap();
    consumer.hears_nothing_for(QUIET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_retry_mends_ends_the_assignment_and_says_why() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    let mut consumer = place.consumer("c", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    // When somebody puts something else in the place of the input ...
    redis.command(&["DEL", place.input().as_str()]).unwrap();
    redis.command(&["SET", place.input().as_str(), "foreign"]).unwrap();

    // ... then the program is told, and nothing goes on as if all were well.
    let mut heard = Vec::new();
    while let Some(notification) = timeout(LIMIT, consumer.notifications.recv()).await.unwrap() {
        heard.push(notification);
    }
    let disowned = heard.iter().filter(|notification| {
        matches!(notification, Notification::Disowned { stream: s, .. } if *s == stream)
    });
    assert_eq!(disowned.count(), 1, "{heard:?}");
    match heard.last() {
        Some(Notification::Terminated(Terminated::Failed { problem })) => {
            assert!(problem.contains(place.input().as_str()), "{problem}");
        }
        other => panic!("{other:?}"),
    }
    assert!(owned.work().is_none());
    assert!(consumer.assignment.shutdown(LIMIT).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_fail_over_goes_on_with_the_new_primary() {
    let sentinel = Sentinel::start().unwrap();
    let place = Place::at(sentinel.url());
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["before"]).await;
    let before = consumer.added().await;
    consumer.assignment.done(&before).await.unwrap();

    sentinel.primary().kill9().unwrap();

    // A new primary takes a while; then new streams are taken as before, and expiry is heard from it.
    let stream = place.stream("after");
    let limit = Instant::now() + 3 * LIMIT;
    while consumer.assignment.add(&stream, None).await.is_err() {
        assert!(Instant::now() < limit, "no new primary");
        sleep(Duration::from_millis(200)).await;
    }
    let owned = loop {
        match timeout(2 * LIMIT, consumer.notifications.recv()).await.unwrap() {
            Some(Notification::Added(owned)) => break owned,
            Some(_) => {}
            None => panic!("the assignment has ended"),
        }
    };
    assert_eq!(owned.stream(), &stream);
    consumer.die();
    let mut survivor = place.consumer("survivor", quick()).await;
    assert_eq!(survivor.expired().await, stream);
    let owned = survivor.assignment.claim(&stream).await.unwrap();
    survivor.assignment.done(&owned).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_even_if_the_server_is_gone() {
    let redis = Redis::start().unwrap();
    let place = Place::at(redis.url());
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["s"]).await;
    let owned = consumer.added().await;
    redis.kill9().unwrap();

    let ended =
        timeout(Duration::from_secs(40), consumer.assignment.shutdown(Duration::ZERO)).await;

    assert!(ended.is_ok(), "it hangs");
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
    while let Some(notification) = consumer.notifications.recv().await {
        drop(notification);
    }
}

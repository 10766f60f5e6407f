//! What happens when the server is away, forgets everything, or loses a reply.

use std::time::Duration;

use headwater_assignment::{
    AssignmentConfig, Disowned, EndError, Notification, OnExpired, Terminated,
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

/// The hole ends at the very moment at which the owner has lost its trust, so that a renewal that waits in it is answered a
/// moment later, while the lease still lives at the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_network_hole_that_outlasts_the_trust_a_lease_ends_and_another_consumer_takes_the_stream()
 {
    let redis = Redis::start().unwrap();
    let config = AssignmentConfig { heartbeat_every: Duration::from_secs(6), ..quick() };
    let rounds = (0..4).map(|round| {
        let (redis, config) = (&redis, config.clone());
        async move {
            let proxy = Proxy::start(redis.addr()).unwrap();
            let place = Place::at(redis.url_at(proxy.addr()));
            let mut owner = place.consumer("owner", config.clone()).await;
            let stream = place.add(&["s"]).await.remove(0);
            let owned = owner.added().await;
            let direct = place.by(redis.url());
            let taking = AssignmentConfig { on_expired: OnExpired::Claim, ..config.clone() };
            let mut other = direct.consumer("other", taking).await;

            // Each round the hole begins at another time of the interval, so heartbeats wait in it in other ways.
            sleep(config.heartbeat_every * round / 4).await;
            proxy.stall().unwrap();
            timeout(LIMIT, owned.guard().lost()).await.unwrap();
            proxy.heal().unwrap();

            // Who was told that it has lost the stream hears of it, does not get it back, and makes way for another.
            assert_eq!(owner.disowned().await, (stream.clone(), Disowned::LeaseUnconfirmed));
            assert!(!owned.guard().is_trusted() && owned.work().is_none());
            let taken = other.added().await;
            assert_eq!(taken.stream(), &stream);
            assert!(taken.epoch() > owned.epoch());
            sleep(config.heartbeat_every).await;
            assert!(!owned.guard().is_trusted(), "no renewal revives it");
            assert!(taken.guard().is_trusted());
            other.assignment.done(&taken).await.unwrap();
        }
    });
    futures_util::future::join_all(rounds).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_done_whose_reply_is_lost_can_be_repeated_after_the_lease_has_ended() {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let place = Place::at(redis.url_at(proxy.addr()));
    let config = AssignmentConfig { sweep_every: Duration::from_secs(60), ..quick() };
    let mut consumer = place.consumer("c", config).await;
    // The first `done` makes the server know the script, so that the next one is a single request.
    place.add(&["first", "s"]).await;
    let [first, owned] = <[_; 2]>::try_from(consumer.added_many(2).await).unwrap();
    consumer.assignment.done(&first).await.unwrap();
    let direct = place.by(redis.url());

    // The server carries it out, and nothing comes back until the lease has ended.
    redis.pause().unwrap();
    let done = async {
        let done = consumer.assignment.done(&owned).await;
        assert!(matches!(&done, Err(EndError::Backend(error)) if error.is_transient()), "{done:?}");
    };
    let hole = async {
        // The request is in the server's hands before the hole begins.
        sleep(QUIET).await;
        proxy.stall().unwrap();
        redis.resume().unwrap();
    };
    tokio::join!(done, hole);
    assert_eq!(direct.entries(&place.input()).await.len(), 0, "it was carried out");
    assert_eq!(consumer.disowned().await.1, Disowned::LeaseUnconfirmed);
    let limit = Instant::now() + LIMIT;
    while direct.connect().await.leases(&[place.lease(owned.stream())]).await.unwrap()[0].is_some()
    {
        assert!(Instant::now() < limit, "the lease does not end");
        sleep(QUIET).await;
    }
    proxy.heal().unwrap();

    let mut done = consumer.assignment.done(&owned).await;
    while let Err(EndError::Backend(error)) = &done {
        assert!(error.is_transient() && Instant::now() < limit, "{error}");
        sleep(QUIET).await;
        done = consumer.assignment.done(&owned).await;
    }
    done.unwrap();
    consumer.assignment.done(&owned).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_done_that_did_not_arrive_is_refused_when_another_owner_had_the_stream() {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let place = Place::at(redis.url_at(proxy.addr()));
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["s"]).await;
    let owned = consumer.added().await;
    let direct = place.by(redis.url());
    let taking = AssignmentConfig { on_expired: OnExpired::Claim, ..quick() };
    let mut other = direct.consumer("other", taking).await;

    proxy.cut().unwrap();
    let done = consumer.assignment.done(&owned).await;
    assert!(matches!(done, Err(EndError::Backend(_))), "{done:?}");
    let taken = other.added().await;
    other.assignment.done(&taken).await.unwrap();
    assert_eq!(direct.entries(&place.input()).await.len(), 0);
    proxy.heal().unwrap();

    // The entry is gone as it would be after the first call, but it was the other owner that ended it.
    let limit = Instant::now() + LIMIT;
    let mut done = consumer.assignment.done(&owned).await;
    while let Err(EndError::Backend(error)) = &done {
        assert!(error.is_transient() && Instant::now() < limit, "{error}");
        sleep(QUIET).await;
        done = consumer.assignment.done(&owned).await;
    }
    assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
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

//! Outages: the server is unavailable, loses its data, or a reply is lost.

use std::time::Duration;

use headwater_assignment::{
    AssignmentConfig, Disowned, EndError, Notification, OnExpired, Terminated,
};
use headwater_testkit::{Persistence, Proxy, Redis, Sentinel};
use tokio::time::{Instant, sleep, timeout};

use crate::fixture::{LIMIT, QUIET, ServiceFixture, quick};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_server_keeps_streams_and_owners() {
    let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let config = AssignmentConfig { heartbeat_every: Duration::from_secs(4), ..quick() };
    let mut dies = fixture.consumer("dies", config.clone()).await;
    let lost = fixture.add(&["lost"]).await.remove(0);
    dies.added().await;
    let mut lives = fixture.consumer("lives", config).await;
    drop(dies.notifications);
    fixture.add(&["kept"]).await;
    let kept = lives.added().await;

    // When one owner dies together with the server, and no notification is sent ...
    drop(dies.assignment);
    redis.kill9().unwrap();
    redis.restart().unwrap();

    // ... then the other owner continues, and finds the stream.
    assert_eq!(lives.expired().await, lost);
    let claimed = lives.assignment.claim(&lost).await.unwrap();
    assert!(kept.guard().is_valid());
    lives.assignment.done(&kept).await.unwrap();
    lives.assignment.done(&claimed).await.unwrap();
    assert_eq!(fixture.pending().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_flush_owners_are_disowned_and_new_streams_are_acquired() {
    let redis = Redis::start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let mut consumer = fixture.consumer("c", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    redis.command(&["FLUSHALL"]).unwrap();

    assert_eq!(consumer.disowned().await, (stream.clone(), Disowned::LeaseLost));
    assert!(owned.work().is_none());
    let done = consumer.assignment.done(&owned).await;
    assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
    // The group is recreated from the beginning; the same stream may be added again, with a larger epoch.
    fixture.add(&["s"]).await;
    let again = consumer.added().await;
    assert_eq!(again.stream(), &stream);
    assert!(again.epoch() > owned.epoch());
    consumer.assignment.done(&again).await.unwrap();
    consumer.expect_no_notification_for(QUIET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_outage_costs_no_ownership() {
    let redis = Redis::start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let config = AssignmentConfig { heartbeat_every: Duration::from_secs(6), ..quick() };
    let mut consumer = fixture.consumer("c", config.clone()).await;
    fixture.add(&["s"]).await;
    let owned = consumer.added().await;

    for _ in 0..3 {
        redis.pause().unwrap();
        sleep(Duration::from_secs(1)).await;
        redis.resume().unwrap();
        sleep(config.heartbeat_every / 2).await;
    }

    assert!(owned.guard().is_valid());
    consumer.assignment.done(&owned).await.unwrap();
    consumer.expect_no_notification_for(QUIET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_outage_disowns_before_the_lease_can_expire() {
    let redis = Redis::start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let mut consumer = fixture.consumer("c", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    redis.pause().unwrap();
    let paused = Instant::now();
    let mut trusted = Duration::ZERO;
    loop {
        let asked = paused.elapsed();
        if !owned.guard().is_valid() {
            break;
        }
        trusted = asked;
        sleep(Duration::from_millis(10)).await;
    }
    assert!(trusted < quick().lease_ttl(), "after {trusted:?}");
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
    assert_eq!(consumer.disowned().await, (stream.clone(), Disowned::LeaseUnconfirmed));
    redis.resume().unwrap();

    // The stream is free again when the server is back, and there is only one `Disowned`.
    assert_eq!(consumer.expired().await, stream);
    let again = consumer.assignment.claim(&stream).await.unwrap();
    assert!(again.epoch() > owned.epoch());
    assert!(matches!(consumer.assignment.done(&owned).await, Err(EndError::NotOwner { .. })));
    consumer.assignment.done(&again).await.unwrap();
}

/// The outage ends exactly when the owner's lease is no longer valid locally, so that a blocked renewal is
/// answered a moment later, while the lease still exists on the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_outage_longer_than_the_lease_validity_another_consumer_acquires_the_stream() {
    let redis = Redis::start().unwrap();
    let config = AssignmentConfig { heartbeat_every: Duration::from_secs(6), ..quick() };
    let rounds = (0..4).map(|round| {
        let (redis, config) = (&redis, config.clone());
        async move {
            let proxy = Proxy::start(redis.addr()).unwrap();
            let fixture = ServiceFixture::at(redis.url_at(proxy.addr()));
            let mut owner = fixture.consumer("owner", config.clone()).await;
            let stream = fixture.add(&["s"]).await.remove(0);
            let owned = owner.added().await;
            let direct = fixture.by(redis.url());
            let taking = AssignmentConfig { on_expired: OnExpired::Claim, ..config.clone() };
            let mut other = direct.consumer("other", taking).await;

            // Each round starts the outage at another phase of the interval, so that heartbeats block differently.
            sleep(config.heartbeat_every * round / 4).await;
            proxy.stall().unwrap();
            timeout(LIMIT, owned.guard().lost()).await.unwrap();
            proxy.heal().unwrap();

            // The owner is notified of the loss, does not get the stream back, and another consumer acquires it.
            assert_eq!(owner.disowned().await, (stream.clone(), Disowned::LeaseUnconfirmed));
            assert!(!owned.guard().is_valid() && owned.work().is_none());
            let acquired = other.added().await;
            assert_eq!(acquired.stream(), &stream);
            assert!(acquired.epoch() > owned.epoch());
            sleep(config.heartbeat_every).await;
            assert!(!owned.guard().is_valid(), "a late renewal does not revive it");
            assert!(acquired.guard().is_valid());
            other.assignment.done(&acquired).await.unwrap();
        }
    });
    futures_util::future::join_all(rounds).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_done_whose_reply_is_lost_can_be_retried_after_the_lease_has_expired() {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let fixture = ServiceFixture::at(redis.url_at(proxy.addr()));
    let config = AssignmentConfig { sweep_every: Duration::from_secs(60), ..quick() };
    let mut consumer = fixture.consumer("c", config).await;
    // The first `done` loads the script, so that the next one is a single request.
    fixture.add(&["first", "s"]).await;
    let [first, owned] = <[_; 2]>::try_from(consumer.added_many(2).await).unwrap();
    consumer.assignment.done(&first).await.unwrap();
    let direct = fixture.by(redis.url());

    // The server executes it, and no reply arrives until the lease has expired.
    redis.pause().unwrap();
    let done = async {
        let done = consumer.assignment.done(&owned).await;
        assert!(matches!(&done, Err(EndError::Backend(error)) if error.is_transient()), "{done:?}");
    };
    let hole = async {
        // The server has received the request before the outage starts.
        sleep(QUIET).await;
        proxy.stall().unwrap();
        redis.resume().unwrap();
    };
    tokio::join!(done, hole);
    assert_eq!(direct.entries(&fixture.input()).await.len(), 0, "it was applied");
    assert_eq!(consumer.disowned().await.1, Disowned::LeaseUnconfirmed);
    let limit = Instant::now() + LIMIT;
    while direct.connect().await.leases(&[fixture.lease(owned.stream())]).await.unwrap()[0]
        .is_some()
    {
        assert!(Instant::now() < limit, "the lease does not expire");
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
async fn a_done_that_did_not_arrive_is_rejected_after_another_owner_had_the_stream() {
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let fixture = ServiceFixture::at(redis.url_at(proxy.addr()));
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["s"]).await;
    let owned = consumer.added().await;
    let direct = fixture.by(redis.url());
    let taking = AssignmentConfig { on_expired: OnExpired::Claim, ..quick() };
    let mut other = direct.consumer("other", taking).await;

    proxy.cut().unwrap();
    let done = consumer.assignment.done(&owned).await;
    assert!(matches!(done, Err(EndError::Backend(_))), "{done:?}");
    let acquired = other.added().await;
    other.assignment.done(&acquired).await.unwrap();
    assert_eq!(direct.entries(&fixture.input()).await.len(), 0);
    proxy.heal().unwrap();

    // The entry is gone as after the first call, but the other owner ended it.
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
async fn an_end_whose_reply_is_lost_can_be_retried() {
    // Given no other traffic, so that the lost reply is that of the end.
    let redis = Redis::start().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let fixture = ServiceFixture::at(redis.url_at(proxy.addr()));
    let config = AssignmentConfig {
        heartbeat_every: Duration::from_secs(60),
        sweep_every: Duration::from_secs(60),
        ..Default::default()
    };
    let mut consumer = fixture.consumer("c", config).await;
    fixture.add(&["done", "released"]).await;
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

    assert_eq!(fixture.pending().await.len(), 1);
    assert_eq!(fixture.entries(&fixture.input()).await.len(), 1);
    assert_eq!(consumer.assignment.owned().len(), 1);
    consumer.assignment.release(&owned[1]).await.unwrap();
    consumer.expect_no_notification_for(QUIET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permanent_error_terminates_the_assignment_with_its_reason() {
    let redis = Redis::start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let mut consumer = fixture.consumer("c", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    // When the input stream is replaced by a value of another type ...
    redis.command(&["DEL", fixture.input().as_str()]).unwrap();
    redis.command(&["SET", fixture.input().as_str(), "foreign"]).unwrap();

    // ... then the program is notified and the assignment terminates.
    let mut received = Vec::new();
    while let Some(notification) = timeout(LIMIT, consumer.notifications.recv()).await.unwrap() {
        received.push(notification);
    }
    let disowned = received.iter().filter(|notification| {
        matches!(notification, Notification::Disowned { stream: s, .. } if *s == stream)
    });
    assert_eq!(disowned.count(), 1, "{received:?}");
    match received.last() {
        Some(Notification::Terminated(Terminated::Failed { problem })) => {
            assert!(problem.contains(fixture.input().as_str()), "{problem}");
        }
        other => panic!("{other:?}"),
    }
    assert!(owned.work().is_none());
    assert!(consumer.assignment.shutdown(LIMIT).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_fail_over_continues_with_the_new_primary() {
    let sentinel = Sentinel::start().unwrap();
    let fixture = ServiceFixture::at(sentinel.url());
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["before"]).await;
    let before = consumer.added().await;
    consumer.assignment.done(&before).await.unwrap();

    sentinel.primary().kill9().unwrap();

    // A new primary takes a while; then new streams are acquired as before, and it reports expirations.
    let stream = fixture.stream("after");
    let limit = Instant::now() + 3 * LIMIT;
    while consumer.assignment.add(&stream, None).await.is_err() {
        assert!(Instant::now() < limit, "no new primary");
        sleep(Duration::from_millis(200)).await;
    }
    let owned = loop {
        match timeout(2 * LIMIT, consumer.notifications.recv()).await.unwrap() {
            Some(Notification::Added(owned)) => break owned,
            Some(_) => {}
            None => panic!("the assignment has terminated"),
        }
    };
    assert_eq!(owned.stream(), &stream);
    consumer.die();
    let mut survivor = fixture.consumer("survivor", quick()).await;
    assert_eq!(survivor.expired().await, stream);
    let owned = survivor.assignment.claim(&stream).await.unwrap();
    survivor.assignment.done(&owned).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_completes_even_if_the_server_is_gone() {
    let redis = Redis::start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["s"]).await;
    let owned = consumer.added().await;
    redis.kill9().unwrap();

    let ended =
        timeout(Duration::from_secs(40), consumer.assignment.shutdown(Duration::ZERO)).await;

    assert!(ended.is_ok(), "shutdown hangs");
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
    while let Some(notification) = consumer.notifications.recv().await {
        drop(notification);
    }
}

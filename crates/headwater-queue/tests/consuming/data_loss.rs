//! Redis restarts empty under a running consumer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Handler, Message, Outcome, Queue, QueueConfig, metrics};
use headwater_stream::{LeaseRenewerConfig, MapName};
use headwater_testkit::{ChaosCounts, Cluster, Persistence, Redis, Sentinel, unique, wait_until};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;

use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually, text};
use crate::lossy_backend::LossyBackend;
use crate::metric_recorder::{counter_value, install_metric_recorder};
use crate::recording_handler::{payload, recording_handler};
use crate::shared::shared;

/// Time for a replica to take over. Longer than 30 s, the time that a sentinel stays passive after it was starved.
const FAIL_OVER_LIMIT: Duration = Duration::from_secs(90);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_in_flight_message_survives_data_loss_of_the_server() -> Result<()> {
    install_metric_recorder();
    let redis = Redis::start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.send(0, None, "in flight").await?;
    let (started, mut starts) = unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |message: Message| {
        let (started, mut may_go) = (started.clone(), may_go.clone());
        async move {
            let _ = started.send((payload(&message), message.attempt));
            let _ = may_go.wait_for(|go| *go).await;
            match message.attempt {
                1 if message.payload.as_ref() == b"in flight" => {
                    Outcome::retry_after(Duration::ZERO, "the other service was unavailable")
                }
                _ => Outcome::Done,
            }
        }
    };
    let queue = Queue::with_config(Arc::clone(&fixture.backend), long_leases())?;
    let subscription = queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    assert_eq!(starts.recv().await, Some(("in flight".to_owned(), 1)));

    redis.command(&["FLUSHALL"])?;
    go.send_replace(true);
    // If its lease was found missing before the outcome was known, the handler starts once more.
    while next(&mut starts).await? != ("in flight".to_owned(), 2) {}
    // Counted after the entry was appended again, which other consumers may see earlier.
    let lost = || counter_value(metrics::ANOMALIES, &fixture.topic, "lost_by_the_server");
    eventually("the loss is counted", async || Ok(lost() >= 1)).await?;

    redis.kill9()?;
    redis.restart()?;
    fixture.send(0, None, "after").await?;
    while next(&mut starts).await? != ("after".to_owned(), 1) {}
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

/// A handler that reports each start and returns `outcome` after `go`.
fn blocking_handler(
    outcome: impl Fn(&Message) -> Outcome + Send + Sync + 'static,
) -> (impl Handler, UnboundedReceiver<(String, u32)>, watch::Sender<bool>) {
    let (started, starts) = unbounded_channel();
    let (go, may_go) = watch::channel(false);
    let outcome = Arc::new(outcome);
    let handler = move |message: Message| {
        let (started, mut may_go, outcome) =
            (started.clone(), may_go.clone(), Arc::clone(&outcome));
        async move {
            let _ = started.send((payload(&message), message.attempt));
            if message.payload.starts_with(b"in flight") {
                let _ = may_go.wait_for(|go| *go).await;
            }
            outcome(&message)
        }
    };
    (handler, starts, go)
}

async fn next(started: &mut UnboundedReceiver<(String, u32)>) -> Result<(String, u32)> {
    let next = tokio::time::timeout(TIMEOUT, started.recv()).await.context("it was lost")?;
    next.context("the handler is gone")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn in_flight_messages_of_owners_survive_data_loss_of_the_server() -> Result<()> {
    install_metric_recorder();
    let redis = Redis::start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.create(3).await?;
    let (handler, mut started, go) =
        blocking_handler(|message| match (message.payload.as_ref(), message.attempt) {
            (b"in flight: retry", 1) => Outcome::retry_after(Duration::ZERO, "no"),
            (b"in flight: dead", _) => Outcome::dead_letter("no"),
            _ => Outcome::Done,
        });
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    fixture.send(0, None, "in flight: retry").await?;
    fixture.send(1, None, "in flight: dead").await?;
    fixture.send(2, None, "in flight: slow").await?;
    let mut first = Vec::new();
    for _ in 0..3 {
        first.push(next(&mut started).await?.0);
    }
    // Prefetched, behind the message that is being handled.
    fixture.send(2, None, "prefetched").await?;
    eventually("it is in flight", async || Ok(fixture.pending(2).await?.len() == 2)).await?;

    redis.command(&["FLUSHALL"])?;
    fixture.create(3).await?;
    go.send_replace(true);
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "in flight: dead");
    let mut again = Vec::new();
    while !(again.contains(&("in flight: retry".to_owned(), 2))
        && again.contains(&("prefetched".to_owned(), 1)))
    {
        again.push(next(&mut started).await?);
    }
    for partition in 0..3 {
        fixture.wait_until_settled(partition).await?;
    }
    assert_eq!(fixture.dead_letters().await?.len(), 1);
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_aborted_by_data_loss_of_the_server_is_called_again() -> Result<()> {
    install_metric_recorder();
    let redis = Redis::start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    for config in [ConsumerConfig::default(), shared()] {
        let config = ConsumerConfig { concurrency: 2, ..config };
        let group = format!("{:?}", config.mode);
        let (handler, mut started, go) = blocking_handler(|_| Outcome::Done);
        let subscription = fixture.queue.subscribe(&fixture.topic, &group, handler, config).await?;
        fixture.send(0, None, "in flight").await?;
        assert_eq!(next(&mut started).await?, ("in flight".to_owned(), 1));
        redis.command(&["FLUSHALL"])?;
        // Its lease cannot be renewed, so it joins again.
        assert_eq!(next(&mut started).await?, ("in flight".to_owned(), 1));
        go.send_replace(true);
        subscription.stop().await;
        fixture.backend.delete_stream(&fixture.stream(0).await?).await?;
    }
    Ok(())
}

/// Leases that outlive the test.
fn long_leases() -> QueueConfig {
    let lease = LeaseRenewerConfig {
        ttl: Duration::from_secs(300),
        renew_every: Duration::from_secs(20),
        ..Default::default()
    };
    QueueConfig { lease, ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn owners_recover_automatically_from_data_loss_of_the_server() -> Result<()> {
    install_metric_recorder();
    let redis = Redis::start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.create(2).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    fixture.send(1, None, "before").await?;
    assert_eq!(seen.payloads(1).await?, ["before"]);

    redis.kill9()?;
    redis.restart()?;
    // The topic was lost, too; it is created again.
    fixture.create(2).await?;
    for n in 0..3 {
        fixture.send(1, None, &format!("after {n}")).await?;
    }
    // At least once: messages handled before this process noticed the loss of its leases are redelivered.
    let mut got = Vec::new();
    while got.last().map(String::as_str) != Some("after 2") {
        got.extend(seen.payloads(1).await?);
    }
    got.sort_unstable();
    got.dedup();
    assert_eq!(got, ["after 0", "after 1", "after 2"]);
    fixture.wait_until_settled(1).await?;
    subscription.stop().await;
    Ok(())
}

/// The server loses two messages in hand. `keep` makes it keep what it has until then; `lose` makes it forget what came later.
async fn follow_ups_survive_a_lost_tail(
    fixture: &Fixture,
    config: ConsumerConfig,
    keep: impl FnOnce() -> Result<()>,
    lose: impl FnOnce() -> Result<()>,
) -> Result<()> {
    install_metric_recorder();
    let (handler, mut started, go) =
        blocking_handler(|message| match (message.payload.as_ref(), message.attempt) {
            (b"in flight: retry", 1) => Outcome::retry_after(Duration::ZERO, "no"),
            (b"in flight: dead", _) => Outcome::dead_letter("no"),
            _ => Outcome::Done,
        });
    let queue = Queue::with_config(Arc::clone(&fixture.backend), long_leases())?;
    let config = ConsumerConfig { concurrency: 3, ..config };
    let subscription = queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    fixture.send(0, None, "first").await?;
    assert_eq!(next(&mut started).await?.0, "first");
    fixture.wait_until_settled(0).await?;
    keep()?;
    for payload in ["in flight: retry", "in flight: dead"] {
        fixture.send(0, None, payload).await?;
        assert_eq!(next(&mut started).await?.0, payload);
    }

    lose()?;
    // The group passes the ids of the lost messages.
    for n in 0..3 {
        fixture.send(0, None, &format!("after {n}")).await?;
        assert_eq!(next(&mut started).await?.0, format!("after {n}"));
    }
    fixture.wait_until_settled(0).await?;
    go.send_replace(true);
    assert_eq!(next(&mut started).await?, ("in flight: retry".to_owned(), 2));
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "in flight: dead");
    let lost = || counter_value(metrics::ANOMALIES, &fixture.topic, "lost_by_the_server");
    eventually("the losses are counted", async || Ok(lost() == 2)).await?;
    subscription.stop().await;
    // Each is handled once: a second start would have been seen above.
    ChaosCounts { sent: 6, handled: 6, ..Default::default() }.report("lost tail")
}

/// The server restarts with the data of an earlier moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn follow_ups_of_messages_in_hand_survive_a_lost_tail() -> Result<()> {
    for config in [ConsumerConfig::default(), shared()] {
        let redis = Redis::start()?;
        let fixture = Fixture::open(&redis.url(), ()).await?;
        let keep = || redis.command(&["SAVE"])?.ok().map(drop);
        let lose = || {
            redis.kill9()?;
            redis.restart()
        };
        follow_ups_survive_a_lost_tail(&fixture, config, keep, lose).await?;
    }
    Ok(())
}

/// Waits until the replica has everything that was written. What is written from then on does not reach it.
fn replicate_then_disconnect(primary: &Redis, replica: &Redis, mark: &str) -> Result<()> {
    let mut connection = primary.connect()?;
    connection.command(&["SET", mark, "1"])?.ok()?;
    wait_until("the replica to have everything", FAIL_OVER_LIMIT, || {
        connection.command(&["WAIT", "1", "1000"]).is_ok_and(|reply| reply.int() == Some(1))
    })?;
    replica.pause()?;
    // Not even a buffer that it reads when it continues.
    connection.command(&["CLIENT", "KILL", "TYPE", "replica"])?.ok().map(drop)
}

/// A replica takes over that had not received the newest writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn follow_ups_of_messages_in_hand_survive_a_sentinel_fail_over_that_lost_the_tail()
-> Result<()> {
    for config in [ConsumerConfig::default(), shared()] {
        let sentinel = Sentinel::start()?;
        let fixture = Fixture::open(&sentinel.url(), ()).await?;
        let (primary, replica) = (sentinel.primary(), sentinel.replica());
        let keep = || replicate_then_disconnect(primary, replica, "mark");
        let lose = || {
            primary.kill9()?;
            replica.resume()?;
            let port = replica.port().to_string();
            let knows = |sentinel: &Redis| {
                let reply = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]);
                reply.is_ok_and(|reply| reply.items().get(1).is_some_and(|it| it.text() == port))
            };
            wait_until("every sentinel to know the new primary", FAIL_OVER_LIMIT, || {
                sentinel.sentinels().iter().all(knows)
            })
        };
        follow_ups_survive_a_lost_tail(&fixture, config, keep, lose).await?;
    }
    Ok(())
}

/// The replica of the partition's server takes over without the newest writes. The dead letters are on another server, which lost
/// nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn follow_ups_of_messages_in_hand_survive_a_cluster_fail_over_that_lost_the_tail()
-> Result<()> {
    for config in [ConsumerConfig::default(), shared()] {
        let cluster = Cluster::start()?;
        let mut fixture = Fixture::open(&cluster.url(), ()).await?;
        let slot = loop {
            let topic = &fixture.topic;
            let slot = cluster.slot_of(&format!("stream:topic:{{{topic}:0}}"))?;
            let letters = cluster.slot_of(&format!("stream:topic:{topic}:dlq"))?;
            let is_same =
                cluster.primary_of_slot(slot)?.port() == cluster.primary_of_slot(letters)?.port();
            if !is_same {
                break slot;
            }
            fixture.topic = unique("orders");
        };
        fixture.create(1).await?;
        let (primary, replica) = (cluster.primary_of_slot(slot)?, cluster.replica_of_slot(slot)?);
        let mark = format!("{{{}:0}}mark", fixture.topic);
        let keep = || replicate_then_disconnect(primary, replica, &mark);
        let lose = || {
            primary.kill9()?;
            replica.resume()?;
            wait_until("the replica to take over", FAIL_OVER_LIMIT, || {
                cluster.primary_of_slot(slot).is_ok_and(|found| found.port() == replica.port())
            })?;
            cluster.wait_until_ok(FAIL_OVER_LIMIT)
        };
        follow_ups_survive_a_lost_tail(&fixture, config, keep, lose).await?;
    }
    Ok(())
}

/// After a restart, only what was in hand then is in doubt. A message that was received later, settled and trimmed is not
/// taken for lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn messages_received_after_a_restart_are_not_taken_for_lost() -> Result<()> {
    install_metric_recorder();
    let redis = Redis::builder().persistence(Persistence::Always).start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    let (handler, mut started, go) =
        blocking_handler(|message| match (message.payload.as_ref(), message.attempt) {
            (b"in flight: later", 1) => Outcome::retry_after(Duration::ZERO, "no"),
            _ => Outcome::Done,
        });
    let queue = Queue::with_config(Arc::clone(&fixture.backend), long_leases())?;
    let subscription = queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    fixture.send(0, None, "before").await?;
    assert_eq!(next(&mut started).await?.0, "before");
    redis.kill9()?;
    redis.restart()?;
    fixture.send(0, None, "after").await?;
    assert_eq!(next(&mut started).await?.0, "after");

    // As if it had been settled by a call whose reply was lost, and trimmed.
    let id = fixture.send(0, None, "in flight: later").await?;
    assert_eq!(next(&mut started).await?.0, "in flight: later");
    let stream = fixture.stream(0).await?;
    redis.command(&["XACK", stream.as_str(), GROUP, &id.to_string()])?.ok()?;
    redis.command(&["XDEL", stream.as_str(), &id.to_string()])?.ok()?;
    go.send_replace(true);
    eventually("its outcome is known", async || Ok(subscription.stats().retried == 1)).await?;
    fixture.send(0, None, "last").await?;
    assert_eq!(next(&mut started).await?.0, "last", "it is not delivered again");
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "lost_by_the_server"), 0);
    assert!(started.try_recv().is_err());
    Ok(())
}

/// The dead letter is written and the reply is lost, in the middle of a restart. Then the entry is trimmed, so that it looks like one
/// that the server lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_dead_letter_whose_reply_was_lost_is_written_once_although_its_entry_was_trimmed()
-> Result<()> {
    let redis = Redis::builder().persistence(Persistence::Always).start()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    for config in [ConsumerConfig::default(), shared()] {
        let config = ConsumerConfig { concurrency: 2, ..config };
        let group = format!("{:?}", config.mode);
        let (handler, mut started, go) =
            blocking_handler(|message| match message.payload.starts_with(b"in flight") {
                true => Outcome::dead_letter("no"),
                false => Outcome::Done,
            });
        let lossy = LossyBackend::new(Arc::clone(&fixture.backend));
        let queue = Queue::with_config(Arc::clone(&lossy) as _, long_leases())?;
        let subscription = queue.subscribe(&fixture.topic, &group, handler, config).await?;
        let first = format!("in flight: first of {group}");
        let id = fixture.send(0, None, &first).await?;
        while next(&mut started).await?.0 != first {}
        redis.kill9()?;
        redis.restart()?;
        // The connections work again, so that the next call reaches the server.
        fixture.send(0, None, "after").await?;
        let stream = fixture.stream(0).await?;
        eventually("the next one is settled", async || {
            let pending = redis.command(&["XPENDING", stream.as_str(), &group])?;
            let pending = pending.items().first().and_then(|count| count.int());
            Ok(subscription.stats().done > 0 && pending == Some(1))
        })
        .await?;
        // It stays pending.
        redis.command(&["XDEL", stream.as_str(), &id.to_string()])?.ok()?;
        lossy.settles.store(1, Ordering::SeqCst);
        go.send_replace(true);
        eventually("the reply to be lost", async || Ok(lossy.settles.load(Ordering::SeqCst) == 0))
            .await?;
        let letters_of = async |payload: &str| {
            let letters = fixture.dead_letters().await?;
            anyhow::Ok(letters.iter().filter(|it| text(it, "payload") == payload).count())
        };
        // The first is tried again with the second, before the third.
        for number in ["second", "third"] {
            let payload = format!("in flight: {number} of {group}");
            fixture.send(0, None, &payload).await?;
            eventually(&payload, async || Ok(letters_of(&payload).await? > 0)).await?;
        }
        assert_eq!(letters_of(&first).await?, 1);
        subscription.stop().await;
        fixture.backend.delete_stream(&stream).await?;
    }
    Ok(())
}

/// Deletes the data of the topic and the data epoch. Leases stay, so that no member appears dead.
async fn lose_all(fixture: &Fixture) -> Result<()> {
    fixture.backend.delete_stream(&fixture.stream(0).await?).await?;
    let data_epoch = match fixture.url.starts_with("redis-cluster") {
        true => format!("streaming:mq:witness:{{{}}}", fixture.topic),
        false => "streaming:mq:witness".to_owned(),
    };
    anyhow::ensure!(fixture.backend.map_delete(&MapName::new(data_epoch)?).await?, "no data epoch");
    Ok(())
}

async fn in_flight_messages_of_a_busy_topic_survive_data_loss(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    let (handler, mut started, go) = blocking_handler(|message| match message.payload.as_ref() {
        b"in flight: retry" if message.attempt == 1 => Outcome::retry_after(Duration::ZERO, "no"),
        b"in flight: dead" => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let config = ConsumerConfig { concurrency: 3, ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    fixture.send(0, None, "in flight: retry").await?;
    fixture.send(0, None, "in flight: dead").await?;
    let mut first = [next(&mut started).await?.0, next(&mut started).await?.0];
    first.sort();
    assert_eq!(first, ["in flight: dead", "in flight: retry"]);

    // An empty backend may assign the ids of this millisecond again.
    tokio::time::sleep(Duration::from_millis(5)).await;
    lose_all(&fixture).await?;
    // New messages are sent and handled, so that the group has passed the in-flight ids again.
    for n in 0..3 {
        fixture.send(0, None, &format!("after {n}")).await?;
        assert_eq!(next(&mut started).await?.0, format!("after {n}"));
    }
    fixture.wait_until_settled(0).await?;

    go.send_replace(true);
    assert_eq!(next(&mut started).await?, ("in flight: retry".to_owned(), 2));
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "in flight: dead");
    // Counted after the entry was appended again, which other consumers may see earlier.
    let lost = || counter_value(metrics::ANOMALIES, &fixture.topic, "lost_by_the_server");
    eventually("both losses are counted", async || Ok(lost() >= 2)).await?;
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    assert_eq!(lost(), 2);
    Ok(())
}

async fn prefetched_messages_survive_data_loss_of_the_server(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    let (handler, mut started, go) = blocking_handler(|_| Outcome::Done);
    // Keep-alive runs twice a second.
    let config = ConsumerConfig { reclaim_idle: Duration::from_secs(1), ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    fixture.send(0, None, "in flight").await?;
    fixture.send(0, None, "prefetched").await?;
    assert_eq!(next(&mut started).await?.0, "in flight");
    eventually("both are in flight", async || Ok(fixture.pending(0).await?.len() == 2)).await?;
    lose_all(&fixture).await?;
    eventually("the loss is detected", async || {
        Ok(counter_value(metrics::ANOMALIES, &fixture.topic, "server_lost_all") > 0)
    })
    .await?;
    go.send_replace(true);
    assert_eq!(next(&mut started).await?.0, "prefetched");
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "taken_away"), 0);
    subscription.stop().await;
    Ok(())
}

// Not on the shared Redis: all topics there share one data epoch.
mod own_redis {
    use anyhow::Result;
    use headwater_testkit::Redis;

    use crate::fixture::Fixture;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn in_flight_messages_of_a_busy_topic_survive_data_loss() -> Result<()> {
        let redis = Redis::start()?;
        let fixture = Fixture::open(&redis.url(), redis).await?;
        super::in_flight_messages_of_a_busy_topic_survive_data_loss(fixture).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn prefetched_messages_survive_data_loss() -> Result<()> {
        let redis = Redis::start()?;
        let fixture = Fixture::open(&redis.url(), redis).await?;
        super::prefetched_messages_survive_data_loss_of_the_server(fixture).await
    }
}

on_backends!(embedded, cluster:
    in_flight_messages_of_a_busy_topic_survive_data_loss,
    prefetched_messages_survive_data_loss_of_the_server,
);

//! Flow control: in-flight limit, pause, drain, keep-alive, reclaim of idle entries.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Message, Outcome};
use headwater_stream::{ConsumerName, GroupName, ReclaimFrom, ReclaimRequest};
use headwater_testkit::Redis;
use tokio::sync::{Semaphore, mpsc::unbounded_channel};

use crate::bad_input::read_and_die;
use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually};
use crate::recording_handler::{payload, recording_handler};
use crate::shared::shared;

/// A handler that waits for a permit per message, and the payloads it has started with.
fn with_permits() -> (
    impl Fn(Message) -> futures_util::future::BoxFuture<'static, ()> + Send + Sync + 'static,
    tokio::sync::mpsc::UnboundedReceiver<String>,
    Arc<Semaphore>,
) {
    let (started, starts) = unbounded_channel();
    let permits = Arc::new(Semaphore::new(0));
    let for_handler = Arc::clone(&permits);
    let handler = move |message: Message| {
        let (started, permits) = (started.clone(), Arc::clone(&for_handler));
        let handling: futures_util::future::BoxFuture<'static, ()> = Box::pin(async move {
            let _ = started.send(payload(&message));
            if let Ok(permit) = permits.acquire().await {
                permit.forget();
            }
        });
        handling
    };
    (handler, starts, permits)
}

async fn in_flight_messages_never_exceed_the_maximum(fixture: Fixture) -> Result<()> {
    fixture.create(4).await?;
    for n in 0..40_u16 {
        fixture.send(n % 4, None, &n.to_string()).await?;
    }
    for in_flight_max in [3, 8] {
        let (handler, mut started, permits) = with_permits();
        let group = format!("workers{in_flight_max}");
        let config = ConsumerConfig { in_flight_max, concurrency: 100, ..shared() };
        let subscription = fixture.queue.subscribe(&fixture.topic, &group, handler, config).await?;
        for handled in 0..40 {
            started.recv().await;
            assert!(subscription.stats().in_flight <= in_flight_max, "after {handled}");
            if handled + 1 >= in_flight_max {
                permits.add_permits(1);
            }
        }
        permits.add_permits(100);
        eventually("all messages are done", async || Ok(subscription.stats().done == 40)).await?;
        subscription.stop().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reads_and_reclaims_of_large_messages_are_limited_in_bytes() -> Result<()> {
    const MESSAGE: usize = 1000 * 1024;
    const LIMIT: usize = 64 * 1024 * 1024;
    let redis = Redis::start()?;
    let fixture = Fixture::open(&redis.url(), redis).await?;
    let large = "x".repeat(MESSAGE);
    for number in 0..200 {
        fixture.send(0, None, &large).await?;
        if number == 99 {
            // The first half is reclaimed, the second half is read.
            read_and_die(&fixture, &fixture.stream(0).await?).await?;
        }
    }
    let (handler, mut started, permits) = with_permits();
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let mut most = 0;
    for _ in 0..200 {
        tokio::time::timeout(TIMEOUT, started.recv()).await?;
        most = most.max(subscription.stats().in_flight * MESSAGE);
        assert!(most <= LIMIT, "{most} bytes are in flight");
        permits.add_permits(1);
    }
    assert!(most > LIMIT / 2, "{most} bytes: not the limit in bytes");
    eventually("all messages are done", async || Ok(subscription.stats().done == 200)).await?;
    subscription.stop().await;
    Ok(())
}

async fn a_paused_subscription_handles_nothing_until_it_is_resumed(fixture: Fixture) -> Result<()> {
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    fixture.send(0, None, "before").await?;
    assert_eq!(seen.payloads(1).await?, ["before"]);
    subscription.pause();
    for n in 0..5 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    // Nothing may happen, so there is no event to wait for.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(seen.now().is_none());
    subscription.resume();
    assert_eq!(seen.payloads(5).await?, ["0", "1", "2", "3", "4"]);
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn drain_handles_all_in_flight_messages_and_stops_reading(fixture: Fixture) -> Result<()> {
    for n in 0..10 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    let (handler, mut started, permits) = with_permits();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    started.recv().await;
    eventually("all messages are prefetched", async || Ok(subscription.stats().in_flight == 10))
        .await?;
    let draining = async {
        subscription.drain().await;
    };
    let rest = async {
        fixture.send(0, None, "too late").await?;
        permits.add_permits(100);
        anyhow::Ok(())
    };
    let ((), rest) = tokio::join!(draining, rest);
    rest?;
    assert!((10..=11).contains(&subscription.stats().done));
    assert!(fixture.pending(0).await?.is_empty());
    Ok(())
}

async fn drain_handles_in_flight_messages_of_a_paused_subscription(fixture: Fixture) -> Result<()> {
    for n in 0..5 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    let (handler, mut started, permits) = with_permits();
    let config = ConsumerConfig { drain: TIMEOUT * 2, ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    started.recv().await;
    eventually("all messages are prefetched", async || Ok(subscription.stats().in_flight == 5))
        .await?;
    subscription.pause();
    permits.add_permits(100);
    eventually("the first message is done", async || Ok(subscription.stats().done == 1)).await?;
    tokio::time::timeout(TIMEOUT, subscription.drain()).await?;
    assert_eq!(subscription.stats().done, 5);
    assert!(fixture.pending(0).await?.is_empty());
    Ok(())
}

async fn in_flight_entries_are_kept_alive(fixture: Fixture) -> Result<()> {
    fixture.send(0, None, "long work").await?;
    fixture.send(0, None, "prefetched").await?;
    let (handler, mut started, permits) = with_permits();
    let idle = Duration::from_secs(5);
    let config = ConsumerConfig { reclaim_idle: idle, ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    started.recv().await;
    // Another program reclaims idle entries for longer than the idle time, and finds none.
    let (stream, group) = (fixture.stream(0).await?, GroupName::new(GROUP)?);
    let vulture = ConsumerName::new("vulture")?;
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let reclaim = ReclaimRequest {
            stream: &stream,
            group: &group,
            consumer: &vulture,
            fence: None,
            from: ReclaimFrom::Others,
            min_idle: idle,
            after: None,
            count: 10,
        };
        assert!(fixture.backend.reclaim(reclaim).await?.entries.is_empty());
    }
    permits.add_permits(10);
    fixture.wait_until_settled(0).await?;
    assert_eq!(subscription.stats().done, 2);
    subscription.stop().await;
    Ok(())
}

async fn idle_entries_of_a_consumer_without_heartbeat_are_reclaimed(
    fixture: Fixture,
) -> Result<()> {
    fixture.send(0, None, "abandoned").await?;
    read_and_die(&fixture, &fixture.stream(0).await?).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig { reclaim_idle: Duration::from_millis(300), ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let message = seen.next().await?;
    assert_eq!((payload(&message).as_str(), message.deliveries), ("abandoned", 2));
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn topics_of_one_group_share_one_read(fixture: Fixture) -> Result<()> {
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let mut subscriptions = Vec::new();
    for n in 0..40 {
        let topic = format!("{}-{n}", fixture.topic);
        subscriptions
            .push(fixture.queue.subscribe(&topic, GROUP, handler.clone(), shared()).await?);
    }
    for round in 0..3 {
        for n in 0..40 {
            let stream = headwater_stream::StreamName::new(format!("{}-{n}", fixture.topic))?;
            let fields = headwater_stream::Fields::new([("payload", format!("{round}/{n}"))]);
            let keep = headwater_stream::Retention::KEEP_ALL;
            fixture.backend.append(&stream, &[fields], &keep).await?;
        }
        let mut got = seen.payloads(40).await?;
        got.sort_unstable();
        let mut expected: Vec<String> = (0..40).map(|n| format!("{round}/{n}")).collect();
        expected.sort_unstable();
        assert_eq!(got, expected);
    }
    for subscription in &subscriptions {
        subscription.stop().await;
    }
    Ok(())
}

on_every_backend!(
    in_flight_messages_never_exceed_the_maximum,
    a_paused_subscription_handles_nothing_until_it_is_resumed,
    drain_handles_all_in_flight_messages_and_stops_reading,
    drain_handles_in_flight_messages_of_a_paused_subscription,
    in_flight_entries_are_kept_alive,
    idle_entries_of_a_consumer_without_heartbeat_are_reclaimed,
    topics_of_one_group_share_one_read,
);

//! How much is in hand: bounds, pauses, draining, keeping alive.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Message, Outcome};
use headwater_stream::{ConsumerName, GroupName, Reclaim, ReclaimFrom};
use tokio::sync::{Semaphore, mpsc::unbounded_channel};

use crate::bad_input::read_and_die;
use crate::env::{Env, GROUP, PATIENCE, eventually};
use crate::record::{payload, recorder};
use crate::shared::shared;

/// A handler that waits for a permit per message, and the messages it has begun with.
fn gated() -> (
    impl Fn(Message) -> futures_util::future::BoxFuture<'static, ()> + Send + Sync + 'static,
    tokio::sync::mpsc::UnboundedReceiver<String>,
    Arc<Semaphore>,
) {
    let (begun, has_begun) = unbounded_channel();
    let gate = Arc::new(Semaphore::new(0));
    let permits = Arc::clone(&gate);
    let handler = move |message: Message| {
        let (begun, permits) = (begun.clone(), Arc::clone(&permits));
        let handling: futures_util::future::BoxFuture<'static, ()> = Box::pin(async move {
            let _ = begun.send(payload(&message));
            if let Ok(permit) = permits.acquire().await {
                permit.forget();
            }
        });
        handling
    };
    (handler, has_begun, gate)
}

async fn no_more_than_the_maximum_is_in_hand(env: Env) -> Result<()> {
    env.create(4).await?;
    for n in 0..40_u16 {
        env.send(n % 4, None, &n.to_string()).await?;
    }
    for in_flight_max in [3, 8] {
        let (handler, mut begun, gate) = gated();
        let group = format!("workers{in_flight_max}");
        let config = ConsumerConfig { in_flight_max, concurrency: 100, ..shared() };
        let subscription = env.queue.subscribe(&env.topic, &group, handler, config).await?;
        for handled in 0..40 {
            begun.recv().await;
            assert!(subscription.stats().in_flight <= in_flight_max, "after {handled}");
            if handled + 1 >= in_flight_max {
                gate.add_permits(1);
            }
        }
        gate.add_permits(100);
        eventually("all are done", async || Ok(subscription.stats().done == 40)).await?;
        subscription.stop().await;
    }
    Ok(())
}

async fn a_paused_subscription_handles_nothing_until_it_is_resumed(env: Env) -> Result<()> {
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    env.send(0, None, "before").await?;
    assert_eq!(seen.payloads(1).await?, ["before"]);
    subscription.pause();
    for n in 0..5 {
        env.send(0, None, &n.to_string()).await?;
    }
    // Nothing to wait for: nothing may happen. A moment is given for what must not.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(seen.now().is_none());
    subscription.resume();
    assert_eq!(seen.payloads(5).await?, ["0", "1", "2", "3", "4"]);
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn draining_handles_everything_in_hand_and_reads_no_more(env: Env) -> Result<()> {
    for n in 0..10 {
        env.send(0, None, &n.to_string()).await?;
    }
    let (handler, mut begun, gate) = gated();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    begun.recv().await;
    eventually("all are read ahead", async || Ok(subscription.stats().in_flight == 10)).await?;
    let draining = async {
        subscription.drain().await;
    };
    let rest = async {
        env.send(0, None, "too late").await?;
        gate.add_permits(100);
        anyhow::Ok(())
    };
    let ((), rest) = tokio::join!(draining, rest);
    rest?;
    assert!((10..=11).contains(&subscription.stats().done));
    assert!(env.pending(0).await?.is_empty());
    Ok(())
}

async fn a_paused_subscription_that_drains_handles_what_is_in_hand(env: Env) -> Result<()> {
    for n in 0..5 {
        env.send(0, None, &n.to_string()).await?;
    }
    let (handler, mut begun, gate) = gated();
    let config = ConsumerConfig { drain: PATIENCE * 2, ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    begun.recv().await;
    eventually("all are read ahead", async || Ok(subscription.stats().in_flight == 5)).await?;
    subscription.pause();
    gate.add_permits(100);
    eventually("the first is done", async || Ok(subscription.stats().done == 1)).await?;
    tokio::time::timeout(PATIENCE, subscription.drain()).await?;
    assert_eq!(subscription.stats().done, 5);
    assert!(env.pending(0).await?.is_empty());
    Ok(())
}

async fn what_is_in_hand_is_kept_alive(env: Env) -> Result<()> {
    env.send(0, None, "long work").await?;
    env.send(0, None, "read ahead").await?;
    let (handler, mut begun, gate) = gated();
    let idle = Duration::from_secs(5);
    let config = ConsumerConfig { reclaim_idle: idle, ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    begun.recv().await;
    // Another program takes what nobody touched for long, and finds nothing for longer than that.
    let (stream, group) = (env.stream(0).await?, GroupName::new(GROUP)?);
    let vulture = ConsumerName::new("vulture")?;
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let reclaim = Reclaim {
            stream: &stream,
            group: &group,
            consumer: &vulture,
            fence: None,
            from: ReclaimFrom::Others,
            min_idle: idle,
            after: None,
            count: 10,
        };
        assert!(env.backend.reclaim(reclaim).await?.entries.is_empty());
    }
    gate.add_permits(10);
    env.until_settled(0).await?;
    assert_eq!(subscription.stats().done, 2);
    subscription.stop().await;
    Ok(())
}

async fn entries_of_a_program_that_sends_no_heartbeat_are_taken_over_after_a_while(
    env: Env,
) -> Result<()> {
    env.send(0, None, "abandoned").await?;
    read_and_die(&env, &env.stream(0).await?).await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let config = ConsumerConfig { reclaim_idle: Duration::from_millis(300), ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    let message = seen.next().await?;
    assert_eq!((payload(&message).as_str(), message.deliveries), ("abandoned", 2));
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn many_topics_of_one_group_are_read_together(env: Env) -> Result<()> {
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let mut subscriptions = Vec::new();
    for n in 0..40 {
        let topic = format!("{}-{n}", env.topic);
        subscriptions.push(env.queue.subscribe(&topic, GROUP, handler.clone(), shared()).await?);
    }
    for round in 0..3 {
        for n in 0..40 {
            let stream = headwater_stream::StreamName::new(format!("{}-{n}", env.topic))?;
            let fields = headwater_stream::Fields::new([("payload", format!("{round}/{n}"))]);
            let keep = headwater_stream::Retention::KEEP_ALL;
            env.backend.append(&stream, &[fields], &keep).await?;
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
    no_more_than_the_maximum_is_in_hand,
    a_paused_subscription_handles_nothing_until_it_is_resumed,
    draining_handles_everything_in_hand_and_reads_no_more,
    a_paused_subscription_that_drains_handles_what_is_in_hand,
    what_is_in_hand_is_kept_alive,
    entries_of_a_program_that_sends_no_heartbeat_are_taken_over_after_a_while,
    many_topics_of_one_group_are_read_together,
);

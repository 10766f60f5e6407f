//! Consumers that compete for the messages of a topic.

use std::collections::BTreeSet;

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Mode, Outcome};
use tokio::time::timeout;

use crate::env::{Env, GROUP, PATIENCE, eventually};
use crate::record::recorder;

pub(crate) fn shared() -> ConsumerConfig {
    ConsumerConfig { mode: Mode::Shared, ..Default::default() }
}

async fn every_message_is_handled_and_acknowledged(env: Env) -> Result<()> {
    for n in 0..20 {
        env.send(0, None, &format!("m{n}")).await?;
    }
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    let expected: Vec<String> = (0..20).map(|n| format!("m{n}")).collect();
    assert_eq!(seen.payloads(20).await?, expected);
    env.send(0, None, "late").await?;
    assert_eq!(seen.payloads(1).await?, ["late"]);
    env.until_settled(0).await?;
    subscription.stop().await;
    let stats = subscription.stats();
    assert_eq!((stats.done, stats.in_flight, stats.dead_letters), (21, 0, 0));
    Ok(())
}

async fn all_partitions_are_read(env: Env) -> Result<()> {
    env.create(4).await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    for n in 0..40_u16 {
        env.send(n % 4, None, &format!("m{n}")).await?;
    }
    let got: BTreeSet<String> = seen.payloads(40).await?.into_iter().collect();
    assert_eq!(got.len(), 40);
    for partition in 0..4 {
        env.until_settled(partition).await?;
    }
    subscription.stop().await;
    Ok(())
}

async fn competing_consumers_share_the_messages_and_handle_each_once(env: Env) -> Result<()> {
    let other = env.second_queue().await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let first = env.queue.subscribe(&env.topic, GROUP, handler.clone(), shared()).await?;
    let second = other.subscribe(&env.topic, GROUP, handler, shared()).await?;
    for n in 0..100 {
        env.send(0, None, &format!("m{n}")).await?;
    }
    let got: BTreeSet<String> = seen.payloads(100).await?.into_iter().collect();
    assert_eq!(got.len(), 100, "each came once");
    env.until_settled(0).await?;
    assert_eq!(first.stats().done + second.stats().done, 100);
    first.stop().await;
    second.stop().await;
    assert!(seen.now().is_none());
    Ok(())
}

async fn a_released_message_comes_again_and_counts_no_attempt(env: Env) -> Result<()> {
    env.send(0, None, "not now").await?;
    let released = std::sync::atomic::AtomicBool::new(false);
    let (handler, mut seen) =
        recorder(move |_| match released.swap(true, std::sync::atomic::Ordering::Relaxed) {
            false => Outcome::Release,
            true => Outcome::Done,
        });
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    let (first, again) = (seen.next().await?, seen.next().await?);
    assert_eq!(
        (first.id, first.attempt, first.deliveries),
        (again.id, again.attempt, again.deliveries)
    );
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn what_one_handles_slowly_is_left_to_others_if_nothing_is_read_ahead(
    env: Env,
) -> Result<()> {
    for n in 0..12 {
        env.send(0, None, &format!("m{n}")).await?;
    }
    let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |_| {
        let (begun, mut may_go) = (begun.clone(), may_go.clone());
        async move {
            let _ = begun.send(());
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let mut subscriptions = Vec::new();
    for queue in [env.queue.clone(), env.second_queue().await?] {
        let config = ConsumerConfig { read_ahead: Some(0), ..shared() };
        subscriptions.push(queue.subscribe(&env.topic, GROUP, handler.clone(), config).await?);
        timeout(PATIENCE, has_begun.recv()).await?;
    }
    assert!(subscriptions.iter().all(|subscription| subscription.stats().in_flight == 1));
    go.send_replace(true);
    env.until_settled(0).await?;
    eventually("all are handled", async || {
        let done = subscriptions.iter().map(|subscription| subscription.stats().done);
        Ok(done.sum::<u64>() == 12)
    })
    .await?;
    for subscription in subscriptions {
        subscription.stop().await;
    }
    Ok(())
}

async fn stopping_gives_back_what_nobody_has_handled_yet(env: Env) -> Result<()> {
    for n in 0..10 {
        env.send(0, None, &format!("m{n}")).await?;
    }
    let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |_| {
        let (begun, mut may_go) = (begun.clone(), may_go.clone());
        async move {
            let _ = begun.send(());
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    has_begun.recv().await;
    eventually("all are read ahead", async || Ok(subscription.stats().in_flight == 10)).await?;
    let ((), released) = tokio::join!(subscription.stop(), async {
        let released = eventually("those in hand were released", async || {
            let pending = env.pending(0).await?;
            Ok(pending.iter().filter(|entry| entry.consumer.as_str() == "~released").count() == 9)
        })
        .await;
        go.send_replace(true);
        released
    });

    released?;
    assert_eq!(subscription.stats().done, 1, "the one that was being handled");
    assert!(env.pending(0).await?.iter().all(|entry| entry.deliveries == 0), "no attempt counted");

    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let next = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    let got: Vec<String> = seen.payloads(9).await?;
    assert_eq!(got, (1..10).map(|n| format!("m{n}")).collect::<Vec<_>>());
    next.stop().await;
    Ok(())
}

on_every_backend!(
    every_message_is_handled_and_acknowledged,
    all_partitions_are_read,
    competing_consumers_share_the_messages_and_handle_each_once,
    a_released_message_comes_again_and_counts_no_attempt,
    what_one_handles_slowly_is_left_to_others_if_nothing_is_read_ahead,
    stopping_gives_back_what_nobody_has_handled_yet,
);

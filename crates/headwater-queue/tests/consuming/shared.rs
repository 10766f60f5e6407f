//! `Mode::Shared`: consumers compete for the messages of a topic.

use std::collections::BTreeSet;

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Mode, Outcome};
use tokio::time::timeout;

use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually};
use crate::recording_handler::recording_handler;

pub(crate) fn shared() -> ConsumerConfig {
    ConsumerConfig { mode: Mode::Shared, ..Default::default() }
}

async fn every_message_is_handled_and_acknowledged(fixture: Fixture) -> Result<()> {
    for n in 0..20 {
        fixture.send(0, None, &format!("m{n}")).await?;
    }
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let expected: Vec<String> = (0..20).map(|n| format!("m{n}")).collect();
    assert_eq!(seen.payloads(20).await?, expected);
    fixture.send(0, None, "late").await?;
    assert_eq!(seen.payloads(1).await?, ["late"]);
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    let stats = subscription.stats();
    assert_eq!((stats.done, stats.in_flight, stats.dead_letters), (21, 0, 0));
    Ok(())
}

async fn all_partitions_are_read(fixture: Fixture) -> Result<()> {
    fixture.create(4).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    for n in 0..40_u16 {
        fixture.send(n % 4, None, &format!("m{n}")).await?;
    }
    let got: BTreeSet<String> = seen.payloads(40).await?.into_iter().collect();
    assert_eq!(got.len(), 40);
    for partition in 0..4 {
        fixture.wait_until_settled(partition).await?;
    }
    subscription.stop().await;
    Ok(())
}

async fn competing_consumers_share_the_messages_and_handle_each_once(
    fixture: Fixture,
) -> Result<()> {
    let other = fixture.second_queue().await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let first = fixture.queue.subscribe(&fixture.topic, GROUP, handler.clone(), shared()).await?;
    let second = other.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    for n in 0..100 {
        fixture.send(0, None, &format!("m{n}")).await?;
    }
    let got: BTreeSet<String> = seen.payloads(100).await?.into_iter().collect();
    assert_eq!(got.len(), 100, "each was handled once");
    fixture.wait_until_settled(0).await?;
    assert_eq!(first.stats().done + second.stats().done, 100);
    first.stop().await;
    second.stop().await;
    assert!(seen.now().is_none());
    Ok(())
}

async fn a_released_message_is_redelivered_and_counts_no_attempt(fixture: Fixture) -> Result<()> {
    fixture.send(0, None, "not now").await?;
    let released = std::sync::atomic::AtomicBool::new(false);
    let (handler, mut seen) = recording_handler(move |_| {
        match released.swap(true, std::sync::atomic::Ordering::Relaxed) {
            false => Outcome::Release,
            true => Outcome::Done,
        }
    });
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let (first, again) = (seen.next().await?, seen.next().await?);
    assert_eq!(
        (first.id, first.attempt, first.deliveries),
        (again.id, again.attempt, again.deliveries)
    );
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn without_prefetch_a_slow_consumer_leaves_messages_to_others(
    fixture: Fixture,
) -> Result<()> {
    for n in 0..12 {
        fixture.send(0, None, &format!("m{n}")).await?;
    }
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |_| {
        let (started, mut may_go) = (started.clone(), may_go.clone());
        async move {
            let _ = started.send(());
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let mut subscriptions = Vec::new();
    for queue in [fixture.queue.clone(), fixture.second_queue().await?] {
        let config = ConsumerConfig { read_ahead: Some(0), ..shared() };
        subscriptions.push(queue.subscribe(&fixture.topic, GROUP, handler.clone(), config).await?);
        timeout(TIMEOUT, starts.recv()).await?;
    }
    assert!(subscriptions.iter().all(|subscription| subscription.stats().in_flight == 1));
    go.send_replace(true);
    fixture.wait_until_settled(0).await?;
    eventually("all messages are handled", async || {
        let done = subscriptions.iter().map(|subscription| subscription.stats().done);
        Ok(done.sum::<u64>() == 12)
    })
    .await?;
    for subscription in subscriptions {
        subscription.stop().await;
    }
    Ok(())
}

async fn stop_releases_unhandled_messages(fixture: Fixture) -> Result<()> {
    for n in 0..10 {
        fixture.send(0, None, &format!("m{n}")).await?;
    }
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |_| {
        let (started, mut may_go) = (started.clone(), may_go.clone());
        async move {
            let _ = started.send(());
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    starts.recv().await;
    eventually("all messages are prefetched", async || Ok(subscription.stats().in_flight == 10))
        .await?;
    let ((), released) = tokio::join!(subscription.stop(), async {
        let released = eventually("the prefetched messages are released", async || {
            let pending = fixture.pending(0).await?;
            Ok(pending.iter().filter(|entry| entry.consumer.as_str() == "~released").count() == 9)
        })
        .await;
        go.send_replace(true);
        released
    });

    released?;
    assert_eq!(subscription.stats().done, 1, "the message that was being handled");
    assert!(
        fixture.pending(0).await?.iter().all(|entry| entry.deliveries == 0),
        "no attempt counted"
    );

    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let next = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let got: Vec<String> = seen.payloads(9).await?;
    assert_eq!(got, (1..10).map(|n| format!("m{n}")).collect::<Vec<_>>());
    next.stop().await;
    Ok(())
}

on_every_backend!(
    every_message_is_handled_and_acknowledged,
    all_partitions_are_read,
    competing_consumers_share_the_messages_and_handle_each_once,
    a_released_message_is_redelivered_and_counts_no_attempt,
    without_prefetch_a_slow_consumer_leaves_messages_to_others,
    stop_releases_unhandled_messages,
);

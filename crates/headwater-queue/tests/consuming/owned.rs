//! `Mode::Owned`: each partition has one owner.

use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, Outcome, metrics};
use headwater_stream::{AcquireResult, HolderName, LeaseName};
use tokio::sync::mpsc::unbounded_channel;

use crate::fixture::{Fixture, GROUP, eventually};
use crate::metric_recorder::{counter_value, install_metric_recorder};
use crate::recording_handler::{payload, recording_handler};

async fn an_owner_handles_messages_with_the_epoch_of_its_lease(fixture: Fixture) -> Result<()> {
    fixture.create(3).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    for n in 0..30_u16 {
        fixture.send(n % 3, None, &n.to_string()).await?;
    }
    let mut last = [None; 3];
    for _ in 0..30 {
        let message = seen.next().await?;
        assert!(message.epoch.is_some());
        let partition = usize::from(message.partition);
        assert!(last[partition] < Some(message.id), "in order within a partition");
        last[partition] = Some(message.id);
    }
    for partition in 0..3 {
        fixture.wait_until_settled(partition).await?;
    }
    assert_eq!(subscription.stats().partitions, 3);
    subscription.stop().await;
    Ok(())
}

async fn entries_of_a_previous_owner_are_handled_first_and_in_order(
    fixture: Fixture,
) -> Result<()> {
    for n in 0..50 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    crate::bad_input::read_and_die(&fixture, &fixture.stream(0).await?).await?;
    for n in 50..60 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig { in_flight_max: 16, ..Default::default() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let expected: Vec<String> = (0..60).map(|n| n.to_string()).collect();
    assert_eq!(seen.payloads(60).await?, expected);
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn a_dropped_subscription_loses_no_message(fixture: Fixture) -> Result<()> {
    for n in 0..10 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    let (started, mut starts) = unbounded_channel();
    let handler = move |message: Message| {
        let started = started.clone();
        async move {
            let _ = started.send(payload(&message));
            std::future::pending::<()>().await;
        }
    };
    let config = ConsumerConfig::default();
    let first = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config.clone()).await?;
    assert_eq!(starts.recv().await.as_deref(), Some("0"));
    drop(first);
    assert_eq!(starts.recv().await, None, "the handler was aborted and no other one was started");

    let other = fixture.second_queue().await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let second = other.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let expected: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    assert_eq!(seen.payloads(10).await?, expected);
    fixture.wait_until_settled(0).await?;
    second.stop().await;
    Ok(())
}

async fn an_owner_that_lost_its_lease_cannot_settle(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    fixture.create(1).await?;
    fixture.send(0, None, "mine").await?;
    let (started, mut starts) = unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |message: Message| {
        let (started, mut may_go) = (started.clone(), may_go.clone());
        async move {
            let _ = started.send(message.epoch);
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let epoch = starts.recv().await.flatten().context("no epoch")?;

    // Another owner has the lease now.
    let partition_tag = match fixture.backend.cluster_slot("").is_some() {
        true => format!("streaming:mq:lease:{{{}:0}}:{GROUP}", fixture.topic),
        false => format!("streaming:mq:lease:{}:{GROUP}:0", fixture.topic),
    };
    let lease = LeaseName::new(partition_tag)?;
    let held = fixture.backend.leases(std::slice::from_ref(&lease)).await?;
    let info = held[0].clone().context("the partition has no owner")?;
    let fence = headwater_stream::Fence { lease: lease.clone(), epoch };
    fixture.backend.release(&info.holder, &[fence]).await?;
    let thief = HolderName::new("thief")?;
    let ttl = Duration::from_secs(60);
    let AcquireResult::Won(stolen) = fixture.backend.acquire(&lease, &thief, ttl).await? else {
        anyhow::bail!("the lease was acquired by another member");
    };
    go.send_replace(true);
    eventually("the settle call is fenced", async || {
        Ok(counter_value(metrics::ANOMALIES, &fixture.topic, "fenced") > 0
            || subscription.stats().partitions == 0)
    })
    .await?;
    assert_eq!(fixture.pending(0).await?.len(), 1, "nothing was settled");

    // When the lease is free again, the message is redelivered with a later epoch.
    let fence = headwater_stream::Fence { lease, epoch: stolen };
    fixture.backend.release(&thief, &[fence]).await?;
    let later = starts.recv().await.flatten().context("no epoch")?;
    assert!(later > stolen && stolen > epoch);
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn orphaned_entries_are_delivered_once_even_after_waiting_for_capacity(
    fixture: Fixture,
) -> Result<()> {
    fixture.create(1).await?;
    let (started, mut starts) = unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |message: Message| {
        let (started, mut may_go) = (started.clone(), may_go.clone());
        async move {
            let _ = started.send(payload(&message));
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let config = ConsumerConfig { in_flight_max: 1, ..Default::default() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    fixture.send(0, None, "busy").await?;
    assert_eq!(starts.recv().await.as_deref(), Some("busy"));
    for n in 0..5 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    crate::bad_input::read_and_die(&fixture, &fixture.stream(0).await?).await?;
    // Long enough for several reclaim passes without free capacity.
    tokio::time::sleep(Duration::from_secs(12)).await;
    go.send_replace(true);
    fixture.wait_until_settled(0).await?;
    eventually("all messages are done", async || Ok(subscription.stats().in_flight == 0)).await?;
    subscription.stop().await;
    let mut got = Vec::new();
    while let Ok(payload) = starts.try_recv() {
        got.push(payload);
    }
    assert_eq!(got, ["0", "1", "2", "3", "4"]);
    assert_eq!(subscription.stats().done, 6);
    Ok(())
}

on_every_backend!(
    an_owner_handles_messages_with_the_epoch_of_its_lease,
    entries_of_a_previous_owner_are_handled_first_and_in_order,
    a_dropped_subscription_loses_no_message,
    an_owner_that_lost_its_lease_cannot_settle,
    orphaned_entries_are_delivered_once_even_after_waiting_for_capacity,
);

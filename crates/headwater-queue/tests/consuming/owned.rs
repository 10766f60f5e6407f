//! Partitions with one owner each.

use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, Outcome, metrics};
use headwater_stream::{Acquire, HolderName, LeaseName};
use tokio::sync::mpsc::unbounded_channel;

use crate::counted::{counted, start_counting};
use crate::env::{Env, GROUP, eventually};
use crate::record::{payload, recorder};

async fn an_owner_handles_its_partitions_under_their_leases(env: Env) -> Result<()> {
    env.create(3).await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let config = ConsumerConfig::default();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    for n in 0..30_u16 {
        env.send(n % 3, None, &n.to_string()).await?;
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
        env.until_settled(partition).await?;
    }
    assert_eq!(subscription.stats().partitions, 3);
    subscription.stop().await;
    Ok(())
}

async fn what_another_left_pending_comes_first_and_in_order(env: Env) -> Result<()> {
    for n in 0..50 {
        env.send(0, None, &n.to_string()).await?;
    }
    crate::bad_input::read_and_die(&env, &env.stream(0).await?).await?;
    for n in 50..60 {
        env.send(0, None, &n.to_string()).await?;
    }
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let config = ConsumerConfig { in_flight_max: 16, ..Default::default() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    let expected: Vec<String> = (0..60).map(|n| n.to_string()).collect();
    assert_eq!(seen.payloads(60).await?, expected);
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn a_subscription_that_is_dropped_loses_nothing(env: Env) -> Result<()> {
    for n in 0..10 {
        env.send(0, None, &n.to_string()).await?;
    }
    let (begun, mut has_begun) = unbounded_channel();
    let handler = move |message: Message| {
        let begun = begun.clone();
        async move {
            let _ = begun.send(payload(&message));
            std::future::pending::<()>().await;
        }
    };
    let config = ConsumerConfig::default();
    let first = env.queue.subscribe(&env.topic, GROUP, handler, config.clone()).await?;
    assert_eq!(has_begun.recv().await.as_deref(), Some("0"));
    drop(first);
    assert_eq!(has_begun.recv().await, None, "the handler was cancelled, nothing else was begun");

    let other = env.second_queue().await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let second = other.subscribe(&env.topic, GROUP, handler, config).await?;
    let expected: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    assert_eq!(seen.payloads(10).await?, expected);
    env.until_settled(0).await?;
    second.stop().await;
    Ok(())
}

async fn an_owner_without_its_lease_can_settle_nothing(env: Env) -> Result<()> {
    start_counting();
    env.create(1).await?;
    env.send(0, None, "mine").await?;
    let (begun, mut has_begun) = unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |message: Message| {
        let (begun, mut may_go) = (begun.clone(), may_go.clone());
        async move {
            let _ = begun.send(message.epoch);
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let config = ConsumerConfig::default();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    let epoch = has_begun.recv().await.flatten().context("no epoch")?;

    // Somebody else has the lease now.
    let partition_tag = match env.backend.cluster_slot("").is_some() {
        true => format!("streaming:mq:lease:{{{}:0}}:{GROUP}", env.topic),
        false => format!("streaming:mq:lease:{}:{GROUP}:0", env.topic),
    };
    let lease = LeaseName::new(partition_tag)?;
    let held = env.backend.leases(std::slice::from_ref(&lease)).await?;
    let info = held[0].clone().context("the partition has no owner")?;
    let fence = headwater_stream::Fence { lease: lease.clone(), epoch };
    env.backend.release(&info.holder, &[fence]).await?;
    let thief = HolderName::new("thief")?;
    let ttl = Duration::from_secs(60);
    let Acquire::Won(stolen) = env.backend.acquire(&lease, &thief, ttl).await? else {
        anyhow::bail!("somebody was faster than the thief");
    };
    go.send_replace(true);
    eventually("it was refused", async || {
        Ok(counted(metrics::ANOMALIES, &env.topic, "fenced") > 0
            || subscription.stats().partitions == 0)
    })
    .await?;
    assert_eq!(env.pending(0).await?.len(), 1, "nothing was settled");

    // When the partition is free again, the message is delivered again, in a later epoch.
    let fence = headwater_stream::Fence { lease, epoch: stolen };
    env.backend.release(&thief, &[fence]).await?;
    let later = has_begun.recv().await.flatten().context("no epoch")?;
    assert!(later > stolen && stolen > epoch);
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

async fn what_others_left_behind_comes_once_however_long_there_is_no_room_for_it(
    env: Env,
) -> Result<()> {
    env.create(1).await?;
    let (begun, mut has_begun) = unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |message: Message| {
        let (begun, mut may_go) = (begun.clone(), may_go.clone());
        async move {
            let _ = begun.send(payload(&message));
            let _ = may_go.wait_for(|go| *go).await;
        }
    };
    let config = ConsumerConfig { in_flight_max: 1, ..Default::default() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    env.send(0, None, "busy").await?;
    assert_eq!(has_begun.recv().await.as_deref(), Some("busy"));
    for n in 0..5 {
        env.send(0, None, &n.to_string()).await?;
    }
    crate::bad_input::read_and_die(&env, &env.stream(0).await?).await?;
    // Long enough for several searches, none of which finds room for anything.
    tokio::time::sleep(Duration::from_secs(12)).await;
    go.send_replace(true);
    env.until_settled(0).await?;
    eventually("all are done", async || Ok(subscription.stats().in_flight == 0)).await?;
    subscription.stop().await;
    let mut got = Vec::new();
    while let Ok(payload) = has_begun.try_recv() {
        got.push(payload);
    }
    assert_eq!(got, ["0", "1", "2", "3", "4"]);
    assert_eq!(subscription.stats().done, 6);
    Ok(())
}

on_every_backend!(
    an_owner_handles_its_partitions_under_their_leases,
    what_another_left_pending_comes_first_and_in_order,
    a_subscription_that_is_dropped_loses_nothing,
    an_owner_without_its_lease_can_settle_nothing,
    what_others_left_behind_comes_once_however_long_there_is_no_room_for_it,
);

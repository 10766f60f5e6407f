//! Subscriptions that are dropped instead of stopped: what they had in hand is others' at once.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Message, Outcome};
use headwater_stream::SetName;

use crate::env::{Env, GROUP, eventually};
use crate::record::recorder;
use crate::shared::shared;

async fn what_a_dropped_subscription_had_in_hand_is_given_back(env: Env) -> Result<()> {
    let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
    let hanging = move |_: Message| {
        let _ = begun.send(());
        std::future::pending::<()>()
    };
    // The process stays a member of the group, so nobody takes it for dead.
    let (idle, _unseen) = recorder(|_| Outcome::Done);
    let stays = format!("{}-stays", env.topic);
    let staying = env.queue.subscribe(&stays, GROUP, idle, shared()).await?;
    let dropped = env.queue.subscribe(&env.topic, GROUP, hanging, shared()).await?;
    for n in 0..3 {
        env.send(0, None, &n.to_string()).await?;
    }
    has_begun.recv().await;
    eventually("all are in hand", async || Ok(env.pending(0).await?.len() == 3)).await?;

    let other = env.second_queue().await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = other.subscribe(&env.topic, GROUP, handler, shared()).await?;
    drop(dropped);
    let mut got = Vec::new();
    for _ in 0..3 {
        let message = seen.next().await?;
        assert_eq!((message.attempt, message.deliveries), (1, 1), "it was not handled");
        got.push(message.payload);
    }
    got.sort();
    assert_eq!(got, ["0", "1", "2"]);
    // Also what a read under way may still fetch for the one that is gone.
    for n in 3..13 {
        env.send(0, None, &n.to_string()).await?;
    }
    seen.payloads(10).await?;
    env.until_settled(0).await?;
    subscription.stop().await;
    staying.stop().await;
    Ok(())
}

async fn a_subscribe_that_is_given_up_leaves_nothing_behind(env: Env) -> Result<()> {
    let members = SetName::new(format!("streaming:mq:members:{GROUP}-{}", env.topic))?;
    let group = members.as_str().trim_start_matches("streaming:mq:members:").to_owned();
    // The process stays a member, so that it may go on reading.
    let (idle, _unseen) = recorder(|_| Outcome::Done);
    let stays = format!("{}-stays", env.topic);
    let staying = env.queue.subscribe(&stays, &group, idle, shared()).await?;
    let (ghost, mut haunted) = recorder(|_| Outcome::Done);
    for step in 0..30 {
        let subscribing = env.queue.subscribe(&env.topic, &group, ghost.clone(), shared());
        // Some are given up before they are members, some after, some are too fast.
        let _ = tokio::time::timeout(Duration::from_micros(step * step * 10), subscribing).await;
    }
    for polls in 1..12 {
        let subscribing = env.queue.subscribe(&env.topic, &group, ghost.clone(), shared());
        let mut subscribing = Box::pin(subscribing);
        for _ in 0..polls {
            // The rest of the world goes on, and answers to somebody who does not listen.
            if futures_util::poll!(&mut subscribing).is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    eventually("nobody takes part in the topic", async || {
        Ok(env.backend.set_members(&members).await?.len() == 1)
    })
    .await?;
    env.send(0, None, "alone").await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = env.queue.subscribe(&env.topic, &group, handler, shared()).await?;
    assert_eq!(seen.payloads(1).await?, ["alone"]);
    for n in 0..20 {
        env.send(0, None, &n.to_string()).await?;
    }
    seen.payloads(20).await?;
    assert!(haunted.now().is_none());
    subscription.stop().await;
    staying.stop().await;
    Ok(())
}

on_every_backend!(
    what_a_dropped_subscription_had_in_hand_is_given_back,
    a_subscribe_that_is_given_up_leaves_nothing_behind,
);

//! Subscriptions that are dropped instead of stopped: their in-flight messages are redelivered at once.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Message, Outcome};
use headwater_stream::SetName;

use crate::fixture::{Fixture, GROUP, eventually};
use crate::recording_handler::recording_handler;
use crate::shared::shared;

async fn in_flight_messages_of_a_dropped_subscription_are_released(fixture: Fixture) -> Result<()> {
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let hanging = move |_: Message| {
        let _ = started.send(());
        std::future::pending::<()>()
    };
    // The process stays a member of the group, so it is not considered dead.
    let (idle, _unseen) = recording_handler(|_| Outcome::Done);
    let stays = format!("{}-stays", fixture.topic);
    let staying = fixture.queue.subscribe(&stays, GROUP, idle, shared()).await?;
    let dropped = fixture.queue.subscribe(&fixture.topic, GROUP, hanging, shared()).await?;
    for n in 0..3 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    starts.recv().await;
    eventually("all messages are in flight", async || Ok(fixture.pending(0).await?.len() == 3))
        .await?;

    let other = fixture.second_queue().await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = other.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    drop(dropped);
    let mut got = Vec::new();
    for _ in 0..3 {
        let message = seen.next().await?;
        assert_eq!((message.attempt, message.deliveries), (1, 1), "it was not handled");
        got.push(message.payload);
    }
    got.sort();
    assert_eq!(got, ["0", "1", "2"]);
    // Also entries that a read in flight fetches for the dropped subscription.
    for n in 3..13 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    seen.payloads(10).await?;
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    staying.stop().await;
    Ok(())
}

async fn a_cancelled_subscribe_leaves_no_member_behind(fixture: Fixture) -> Result<()> {
    let group = format!("{GROUP}-{}", fixture.topic);
    // On a cluster, the list has three copies; an entry in one of them may be left over.
    let tag = if fixture.backend.cluster_slot("").is_some() { "{p2}:" } else { "" };
    let members = SetName::new(format!("streaming:mq:members:{tag}{group}"))?;
    // The process stays a member, so that it could keep reading.
    let (idle, _unseen) = recording_handler(|_| Outcome::Done);
    let stays = format!("{}-stays", fixture.topic);
    let staying = fixture.queue.subscribe(&stays, &group, idle, shared()).await?;
    let (ghost, mut haunted) = recording_handler(|_| Outcome::Done);
    for step in 0..30 {
        let subscribing = fixture.queue.subscribe(&fixture.topic, &group, ghost.clone(), shared());
        // Some are cancelled before they joined, some after, some complete.
        let _ = tokio::time::timeout(Duration::from_micros(step * step * 10), subscribing).await;
    }
    for polls in 1..12 {
        let subscribing = fixture.queue.subscribe(&fixture.topic, &group, ghost.clone(), shared());
        let mut subscribing = Box::pin(subscribing);
        for _ in 0..polls {
            // Other tasks continue, and the reply arrives after the cancellation.
            if futures_util::poll!(&mut subscribing).is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    eventually("the topic has no members", async || {
        Ok(fixture.backend.set_members(&members).await?.len() == 1)
    })
    .await?;
    fixture.send(0, None, "alone").await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, &group, handler, shared()).await?;
    assert_eq!(seen.payloads(1).await?, ["alone"]);
    for n in 0..20 {
        fixture.send(0, None, &n.to_string()).await?;
    }
    seen.payloads(20).await?;
    assert!(haunted.now().is_none());
    subscription.stop().await;
    staying.stop().await;
    Ok(())
}

on_every_backend!(
    in_flight_messages_of_a_dropped_subscription_are_released,
    a_cancelled_subscribe_leaves_no_member_behind,
);

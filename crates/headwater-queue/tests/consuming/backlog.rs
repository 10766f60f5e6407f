//! Many partitions with a backlog: they are read deep, a few at a time, and nobody pays for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Message};
use headwater_stream::{Fields, Retention};
use tokio::sync::Semaphore;

use crate::env::{Env, GROUP, eventually};
use crate::record::payload;
use crate::shared::shared;

const PARTITIONS: u16 = 24;
const MESSAGES: usize = 60;
/// Each partition's share is 5, and a deep read gets 32.
const IN_FLIGHT_MAX: usize = 128;

/// What each partition has seen, in order.
type Seen = Arc<Mutex<HashMap<u16, Vec<String>>>>;

async fn fill(env: &Env) -> Result<()> {
    env.create(PARTITIONS).await?;
    for partition in 0..PARTITIONS {
        let entry = |n: usize| Fields::new([("payload", n.to_string())]);
        let entries: Vec<Fields> = (0..MESSAGES).map(entry).collect();
        let stream = env.stream(partition).await?;
        env.backend.append(&stream, &entries, &Retention::KEEP_ALL).await?;
    }
    Ok(())
}

fn config() -> ConsumerConfig {
    ConsumerConfig { in_flight_max: IN_FLIGHT_MAX, ..shared() }
}

fn lock(seen: &Seen) -> MutexGuard<'_, HashMap<u16, Vec<String>>> {
    seen.lock().expect("no code panics while it holds it")
}

fn note(seen: &Seen, message: &Message) -> usize {
    let mut seen = lock(seen);
    let partition = seen.entry(message.partition).or_default();
    partition.push(payload(message));
    partition.len()
}

async fn all_are_handled_once_and_in_order_and_never_too_many_are_in_hand(env: Env) -> Result<()> {
    fill(&env).await?;
    let seen = Seen::default();
    let handler = {
        let seen = Arc::clone(&seen);
        move |message: Message| {
            note(&seen, &message);
            std::future::ready(())
        }
    };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config()).await?;
    let all = u64::from(PARTITIONS) * MESSAGES as u64;
    while subscription.stats().done < all {
        assert!(subscription.stats().in_flight <= IN_FLIGHT_MAX);
        tokio::task::yield_now().await;
    }
    let expected: Vec<String> = (0..MESSAGES).map(|n| n.to_string()).collect();
    for partition in 0..PARTITIONS {
        env.until_settled(partition).await?;
        assert_eq!(lock(&seen)[&partition], expected, "partition {partition}");
    }
    subscription.stop().await;
    Ok(())
}

/// Some are quick until they were read deep, and then stand still with all they have.
async fn partitions_that_stand_still_keep_nobody_else_waiting(env: Env) -> Result<()> {
    const STUCK: u16 = 8;
    fill(&env).await?;
    let (seen, gate) = (Seen::default(), Arc::new(Semaphore::new(0)));
    let handler = {
        let (seen, gate) = (Arc::clone(&seen), Arc::clone(&gate));
        move |message: Message| {
            let count = note(&seen, &message);
            let gate = (message.partition < STUCK && count > 10).then(|| Arc::clone(&gate));
            async move {
                if let Some(gate) = gate {
                    // It is closed at the end.
                    let _ = gate.acquire().await;
                }
            }
        }
    };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config()).await?;
    eventually("the others are done", async || {
        assert!(subscription.stats().in_flight <= IN_FLIGHT_MAX);
        let seen = lock(&seen);
        Ok((STUCK..PARTITIONS).all(|n| seen.get(&n).is_some_and(|all| all.len() == MESSAGES)))
    })
    .await?;
    // One that comes now is not kept waiting either.
    env.send(PARTITIONS - 1, None, "late").await?;
    eventually("a late one is done", async || {
        Ok(lock(&seen)[&(PARTITIONS - 1)].len() == MESSAGES + 1)
    })
    .await?;
    gate.close();
    let all = u64::from(PARTITIONS) * MESSAGES as u64 + 1;
    eventually("all are done", async || Ok(subscription.stats().done == all)).await?;
    subscription.stop().await;
    Ok(())
}

on_every_backend! {
    all_are_handled_once_and_in_order_and_never_too_many_are_in_hand,
    partitions_that_stand_still_keep_nobody_else_waiting,
}

//! Many partitions with a backlog: they are read in bulk, a few at a time, without starving others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Message};
use headwater_stream::{Fields, Retention};
use tokio::sync::Semaphore;

use crate::fixture::{Fixture, GROUP, eventually};
use crate::recording_handler::payload;
use crate::shared::shared;

const PARTITIONS: u16 = 24;
const MESSAGES: usize = 60;
/// The limit of each partition is 5, and a bulk read gets 32.
const IN_FLIGHT_MAX: usize = 128;

/// Handled payloads per partition, in order.
type Seen = Arc<Mutex<HashMap<u16, Vec<String>>>>;

async fn fill(fixture: &Fixture) -> Result<()> {
    fixture.create(PARTITIONS).await?;
    for partition in 0..PARTITIONS {
        let entry = |n: usize| Fields::new([("payload", n.to_string())]);
        let entries: Vec<Fields> = (0..MESSAGES).map(entry).collect();
        let stream = fixture.stream(partition).await?;
        fixture.backend.append(&stream, &entries, &Retention::KEEP_ALL).await?;
    }
    Ok(())
}

fn config() -> ConsumerConfig {
    ConsumerConfig { in_flight_max: IN_FLIGHT_MAX, ..shared() }
}

fn lock(seen: &Seen) -> MutexGuard<'_, HashMap<u16, Vec<String>>> {
    seen.lock().expect("no code panics while it holds the map")
}

fn record(seen: &Seen, message: &Message) -> usize {
    let mut seen = lock(seen);
    let partition = seen.entry(message.partition).or_default();
    partition.push(payload(message));
    partition.len()
}

async fn all_messages_are_handled_once_in_order_and_within_the_in_flight_limit(
    fixture: Fixture,
) -> Result<()> {
    fill(&fixture).await?;
    let seen = Seen::default();
    let handler = {
        let seen = Arc::clone(&seen);
        move |message: Message| {
            record(&seen, &message);
            std::future::ready(())
        }
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config()).await?;
    let all = u64::from(PARTITIONS) * MESSAGES as u64;
    while subscription.stats().done < all {
        assert!(subscription.stats().in_flight <= IN_FLIGHT_MAX);
        tokio::task::yield_now().await;
    }
    let expected: Vec<String> = (0..MESSAGES).map(|n| n.to_string()).collect();
    for partition in 0..PARTITIONS {
        fixture.wait_until_settled(partition).await?;
        assert_eq!(lock(&seen)[&partition], expected, "partition {partition}");
    }
    subscription.stop().await;
    Ok(())
}

/// Some partitions are fast until they are read in bulk, and then stall with all their messages in flight.
async fn stalled_partitions_do_not_delay_others(fixture: Fixture) -> Result<()> {
    const STUCK: u16 = 8;
    fill(&fixture).await?;
    let (seen, permits) = (Seen::default(), Arc::new(Semaphore::new(0)));
    let handler = {
        let (seen, permits) = (Arc::clone(&seen), Arc::clone(&permits));
        move |message: Message| {
            let count = record(&seen, &message);
            let permits = (message.partition < STUCK && count > 10).then(|| Arc::clone(&permits));
            async move {
                if let Some(permits) = permits {
                    // The semaphore is closed at the end.
                    let _ = permits.acquire().await;
                }
            }
        }
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config()).await?;
    eventually("the other partitions are done", async || {
        assert!(subscription.stats().in_flight <= IN_FLIGHT_MAX);
        let seen = lock(&seen);
        Ok((STUCK..PARTITIONS).all(|n| seen.get(&n).is_some_and(|all| all.len() == MESSAGES)))
    })
    .await?;
    // A new message is not delayed either.
    fixture.send(PARTITIONS - 1, None, "late").await?;
    eventually("a late message is done", async || {
        Ok(lock(&seen)[&(PARTITIONS - 1)].len() == MESSAGES + 1)
    })
    .await?;
    permits.close();
    let all = u64::from(PARTITIONS) * MESSAGES as u64 + 1;
    eventually("all messages are done", async || Ok(subscription.stats().done == all)).await?;
    subscription.stop().await;
    Ok(())
}

on_every_backend! {
    all_messages_are_handled_once_in_order_and_within_the_in_flight_limit,
    stalled_partitions_do_not_delay_others,
}

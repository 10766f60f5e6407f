//! Duration of rebalances and precision of due times. The measurements are printed; the limits are generous, for busy
//! machines.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    Backoff, ConsumerConfig, Message, NewMessage, Outcome, ProducerConfig, RetryPolicy,
};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{Instant, timeout};

use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually};

/// Generous limit.
const BOUND: Duration = Duration::from_secs(30);

async fn a_partition_is_reassigned_at_once(fixture: Fixture) -> Result<()> {
    fixture.create(2).await?;
    let (handled, mut is_handled) = unbounded_channel();
    let handler = move |message: Message| {
        let _ = handled.send((message.payload, Instant::now()));
        async {}
    };
    let config = ConsumerConfig::default;
    let stays = fixture.queue.subscribe(&fixture.topic, GROUP, handler.clone(), config()).await?;
    let second = fixture.second_queue().await?;
    let mut longest = Duration::ZERO;
    for round in 0..5 {
        let joining = Instant::now();
        let guest = second.subscribe(&fixture.topic, GROUP, handler.clone(), config()).await?;
        eventually("each member has one partition", async || {
            Ok((stays.stats().partitions, guest.stats().partitions) == (1, 1))
        })
        .await?;
        let joined = joining.elapsed();
        // Messages sent while the second member leaves are handled by the first, in both partitions.
        let stopping = Instant::now();
        guest.stop().await;
        let payloads = [format!("{round}/0"), format!("{round}/1")];
        fixture.send(0, None, &payloads[0]).await?;
        fixture.send(1, None, &payloads[1]).await?;
        let mut last = stopping;
        for _ in 0..2 {
            let (_, at) = timeout(TIMEOUT, is_handled.recv()).await?.expect("the handler lives");
            last = last.max(at);
        }
        let left = last.duration_since(stopping);
        println!("handed over to one that joined in {joined:?}, from one that stopped in {left:?}");
        longest = longest.max(joined).max(left);
    }
    println!("longest hand-over: {longest:?}");
    assert!(longest < BOUND, "{longest:?}");
    stays.stop().await;
    Ok(())
}

async fn messages_are_delivered_at_their_due_time(fixture: Fixture) -> Result<()> {
    fixture.create(2).await?;
    let (handled, mut is_handled) = unbounded_channel();
    let backoff = Duration::from_millis(300);
    let handler = move |message: Message| {
        let _ = handled.send((message.payload, message.attempt, Instant::now()));
        async move {
            match message.attempt {
                1 => Outcome::retry("once"),
                _ => Outcome::Done,
            }
        }
    };
    let retry = RetryPolicy { backoff: Backoff::Fixed(backoff), ..Default::default() };
    let config = ConsumerConfig { retry, concurrency: 64, ..Default::default() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let mut due = Vec::new();
    for n in 0..20_u16 {
        let after = Duration::from_millis(100 + 37 * u64::from(n));
        let message = NewMessage::new(n.to_string()).to_partition(n % 2);
        producer.send_after(&fixture.topic, message, after).await?;
        // Measured from the reply: it may have been scheduled earlier.
        due.push(Instant::now() + after);
    }
    let mut late = [Duration::ZERO; 2];
    for _ in 0..40 {
        let (payload, attempt, at) =
            timeout(TIMEOUT, is_handled.recv()).await?.expect("the handler lives");
        let n: usize = std::str::from_utf8(&payload)?.parse()?;
        let kind = usize::from(attempt > 1);
        late[kind] = late[kind].max(at.saturating_duration_since(due[n]));
        // The backoff of the next attempt starts now.
        due[n] = at + backoff;
    }
    println!("latest: delayed messages by {:?}, retries by {:?}", late[0], late[1]);
    assert!(late.iter().all(|late| *late < BOUND), "{late:?}");
    subscription.stop().await;
    Ok(())
}

on_every_backend!(a_partition_is_reassigned_at_once, messages_are_delivered_at_their_due_time);

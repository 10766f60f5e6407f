//! The seed's sequence "Consume & Retry with Backoff", step by step.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Backoff, ConsumerConfig, Outcome, RetryPolicy};
use headwater_stream::DelayName;

use crate::fixture::{Fixture, GROUP, eventually, text};
use crate::recording_handler::recording_handler;

async fn consume_and_retry_with_backoff(fixture: Fixture) -> Result<()> {
    // participant Rp as stream:topic:{t}:p:i, DLQ as stream:topic:{t}:dlq, D as DelayBucket(ZSET)
    fixture.create(1).await?;
    let described = fixture.queue.topics().describe(&fixture.topic).await?;
    let bucket = DelayName::new(&described.partitions[0].delays_key)?;
    let success = fixture.send(0, None, "SUCCESS").await?;
    let retry = fixture.send(0, None, "RETRY").await?;
    let dead = fixture.send(0, None, "DEAD").await?;

    // participant C as Consumer Worker(p)
    let backoff = Backoff::Fixed(Duration::from_secs(5));
    let config = ConsumerConfig {
        retry: RetryPolicy { backoff, ..Default::default() },
        ..Default::default()
    };
    let (handle, mut handled) =
        recording_handler(|message| match (message.payload.as_ref(), message.attempt) {
            (b"SUCCESS", _) | (b"RETRY", 2) => Outcome::Done,
            (b"RETRY", _) => Outcome::retry("try later"),
            _ => Outcome::dead_letter("cannot succeed"),
        });
    let worker = fixture.queue.subscribe(&fixture.topic, GROUP, handle, config).await?;

    // C->>Rp: XREADGROUP
    // C->>C: handle(message)
    assert_eq!(handled.next().await?.id, success);
    assert_eq!(handled.next().await?.id, retry);
    assert_eq!(handled.next().await?.id, dead);

    // alt SUCCESS: C->>Rp: XACK
    // else RETRY: C->>Rp: XACK, C->>D: ZADD(now+backoff, retryMessage)
    // else FAIL/DEAD: C->>DLQ: XADD dead-letter, C->>Rp: XACK
    fixture.wait_until_settled(0).await?;
    let waiting = fixture.backend.delayed(&bucket, 0, 10).await?;
    assert_eq!(waiting.len(), 1);
    assert_eq!(waiting[0].to, fixture.stream(0).await?);
    assert_eq!(waiting[0].fields.get("payload").map(AsRef::as_ref), Some(&b"RETRY"[..]));
    assert_eq!(waiting[0].fields.get("retryCount").map(AsRef::as_ref), Some(&b"1"[..]));
    let letters = fixture.dead_letters().await?;
    assert_eq!(letters.len(), 1);
    assert_eq!(text(&letters[0], "payload"), "DEAD");
    assert_eq!(text(&letters[0], "originalMessageId"), dead.to_string());
    assert_eq!(text(&letters[0], "reason"), "cannot succeed");

    // After the backoff, the delay scheduler appends it to its partition.
    let again = handled.next().await?;
    assert_eq!((again.attempt, again.first_id(), again.partition), (2, retry, 0));
    assert_eq!(again.payload.as_ref(), b"RETRY");
    eventually("the delay set is empty", async || {
        Ok(fixture.backend.delay_stats(&bucket).await?.waiting == 0)
    })
    .await?;
    fixture.wait_until_settled(0).await?;
    worker.stop().await;
    Ok(())
}

on_every_backend!(consume_and_retry_with_backoff);

//! A process that stalls until its lease expires starts no handler when it continues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, Outcome};

use crate::fixture::{Fixture, GROUP, TIMEOUT, short_leases};
use crate::recording_handler::payload;
use crate::shared::shared;

/// The runtime has one thread: a handler that blocks it stalls everything, as SIGSTOP does.
#[tokio::test]
async fn prefetched_messages_are_not_started_after_the_lease_expired() -> Result<()> {
    let fixture = Fixture::embedded().await?;
    fixture.create(1).await?;
    fixture.send(0, None, "first").await?;
    fixture.send(0, None, "second").await?;
    let (seen, mut epochs) = tokio::sync::mpsc::unbounded_channel();
    let has_frozen = Arc::new(AtomicBool::new(false));
    let handler = move |message: Message| {
        let _ = seen.send((message.payload.clone(), message.epoch));
        if !has_frozen.swap(true, Ordering::SeqCst) {
            std::thread::sleep(short_leases().lease.ttl + Duration::from_millis(200));
        }
        async { Outcome::Done }
    };
    let subscription =
        fixture.queue.subscribe(&fixture.topic, GROUP, handler, ConsumerConfig::default()).await?;
    let mut next = async |payload: &str| {
        let (found, epoch) = epochs.recv().await.context("the handler is gone")?;
        anyhow::ensure!(found == payload, "{found:?} instead of {payload}");
        epoch.context("an owner has an epoch")
    };
    let first = next("first").await?;
    // Settling the first message was fenced, so it is redelivered.
    let again = next("first").await?;
    let second = next("second").await?;
    assert!(first < again && again == second, "{first} {again} {second}");
    subscription.stop().await;
    Ok(())
}

/// Its prefetched entries are pending for a consumer name that is not used again.
#[tokio::test]
async fn prefetched_messages_of_a_competing_consumer_are_redelivered_after_its_lease_expired()
-> Result<()> {
    let fixture = Fixture::embedded().await?;
    fixture.send(0, None, "first").await?;
    fixture.send(0, None, "second").await?;
    let (seen, mut handled) = tokio::sync::mpsc::unbounded_channel();
    let has_frozen = Arc::new(AtomicBool::new(false));
    let handler = move |message: Message| {
        let _ = seen.send(payload(&message));
        if !has_frozen.swap(true, Ordering::SeqCst) {
            std::thread::sleep(short_leases().lease.ttl + Duration::from_millis(200));
        }
        async { Outcome::Done }
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let mut next = async || {
        let next = tokio::time::timeout(TIMEOUT, handled.recv()).await;
        next.context("it is stranded")?.context("the handler is gone")
    };
    assert_eq!(next().await?, "first");
    while next().await? != "second" {}
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

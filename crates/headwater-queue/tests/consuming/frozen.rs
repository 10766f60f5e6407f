//! A process that stands still until others took over begins nothing when it goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, Outcome};

use crate::env::{Env, GROUP, PATIENCE, quick};
use crate::record::payload;
use crate::shared::shared;

/// The runtime has one thread: a handler that blocks it stops everything in it, as SIGSTOP does.
#[tokio::test]
async fn what_was_read_ahead_is_not_begun_once_the_lease_has_run_out() -> Result<()> {
    let env = Env::embedded().await?;
    env.create(1).await?;
    env.send(0, None, "first").await?;
    env.send(0, None, "second").await?;
    let (seen, mut epochs) = tokio::sync::mpsc::unbounded_channel();
    let has_frozen = Arc::new(AtomicBool::new(false));
    let handler = move |message: Message| {
        let _ = seen.send((message.payload.clone(), message.epoch));
        if !has_frozen.swap(true, Ordering::SeqCst) {
            std::thread::sleep(quick().lease.ttl + Duration::from_millis(200));
        }
        async { Outcome::Done }
    };
    let subscription =
        env.queue.subscribe(&env.topic, GROUP, handler, ConsumerConfig::default()).await?;
    let mut next = async |payload: &str| {
        let (found, epoch) = epochs.recv().await.context("the handler is gone")?;
        anyhow::ensure!(found == payload, "{found:?} instead of {payload}");
        epoch.context("an owner has an epoch")
    };
    let first = next("first").await?;
    // The settle of the first was refused, so it comes again.
    let again = next("first").await?;
    let second = next("second").await?;
    assert!(first < again && again == second, "{first} {again} {second}");
    subscription.stop().await;
    Ok(())
}

/// What it had read ahead is pending for a name that is not used again.
#[tokio::test]
async fn what_a_competing_consumer_had_read_ahead_comes_again_once_its_lease_has_run_out()
-> Result<()> {
    let env = Env::embedded().await?;
    env.send(0, None, "first").await?;
    env.send(0, None, "second").await?;
    let (seen, mut handled) = tokio::sync::mpsc::unbounded_channel();
    let has_frozen = Arc::new(AtomicBool::new(false));
    let handler = move |message: Message| {
        let _ = seen.send(payload(&message));
        if !has_frozen.swap(true, Ordering::SeqCst) {
            std::thread::sleep(quick().lease.ttl + Duration::from_millis(200));
        }
        async { Outcome::Done }
    };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    let mut next = async || {
        let next = tokio::time::timeout(PATIENCE, handled.recv()).await;
        next.context("it is stranded")?.context("the handler is gone")
    };
    assert_eq!(next().await?, "first");
    while next().await? != "second" {}
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

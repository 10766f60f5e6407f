//! Redis is restarted with nothing in it, under a running consumer.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, Outcome, Queue, QueueConfig, metrics};
use headwater_stream::KeeperConfig;
use headwater_testkit::Redis;
use tokio::sync::mpsc::unbounded_channel;

use crate::counted::{counted, start_counting};
use crate::env::{Env, GROUP, PATIENCE};
use crate::record::{payload, recorder};
use crate::shared::shared;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_in_hand_when_the_server_loses_everything_is_tried_again() -> Result<()> {
    start_counting();
    let redis = Redis::start()?;
    let env = Env::open(&redis.url(), ()).await?;
    env.send(0, None, "in hand").await?;
    let (begun, mut has_begun) = unbounded_channel();
    let (go, may_go) = tokio::sync::watch::channel(false);
    let handler = move |message: Message| {
        let (begun, mut may_go) = (begun.clone(), may_go.clone());
        async move {
            let _ = begun.send((payload(&message), message.attempt));
            let _ = may_go.wait_for(|go| *go).await;
            match message.attempt {
                1 if message.payload.as_ref() == b"in hand" => {
                    Outcome::retry_after(Duration::ZERO, "the other service was away")
                }
                _ => Outcome::Done,
            }
        }
    };
    // Nobody takes this process for dead before the outcome is known.
    let lease = KeeperConfig {
        ttl: Duration::from_secs(60),
        renew_every: Duration::from_secs(20),
        ..Default::default()
    };
    let config = QueueConfig { lease, ..Default::default() };
    let queue = Queue::with_config(Arc::clone(&env.backend), config)?;
    let subscription = queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    assert_eq!(has_begun.recv().await, Some(("in hand".to_owned(), 1)));

    redis.command(&["FLUSHALL"])?;
    go.send_replace(true);
    let again = tokio::time::timeout(PATIENCE, has_begun.recv()).await.context("it was lost")?;
    assert_eq!(again, Some(("in hand".to_owned(), 2)));
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "lost_by_the_server"), 1);

    redis.kill9()?;
    redis.restart()?;
    env.send(0, None, "after").await?;
    let after = tokio::time::timeout(PATIENCE, has_begun.recv()).await.context("it hangs")?;
    assert_eq!(after, Some(("after".to_owned(), 1)));
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn owners_come_back_by_themselves_when_the_server_lost_everything() -> Result<()> {
    start_counting();
    let redis = Redis::start()?;
    let env = Env::open(&redis.url(), ()).await?;
    env.create(2).await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let config = ConsumerConfig::default();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    env.send(1, None, "before").await?;
    assert_eq!(seen.payloads(1).await?, ["before"]);

    redis.kill9()?;
    redis.restart()?;
    // The topic is gone with the server; whoever created it does so again.
    env.create(2).await?;
    for n in 0..3 {
        env.send(1, None, &format!("after {n}")).await?;
    }
    // At least once: what was handled before this process noticed that its leases are gone comes again.
    let mut got = Vec::new();
    while got.last().map(String::as_str) != Some("after 2") {
        got.extend(seen.payloads(1).await?);
    }
    got.sort_unstable();
    got.dedup();
    assert_eq!(got, ["after 0", "after 1", "after 2"]);
    env.until_settled(1).await?;
    subscription.stop().await;
    Ok(())
}

//! The server did what it was asked, and its reply never arrives.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, ensure};
use headwater_queue::{ConsumerConfig, Outcome, Queue, QueueConfig, Subscription, metrics};
use headwater_stream::{KeeperConfig, Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::bad_input::read_and_die;
use crate::counted::{counted, start_counting};
use crate::env::{Env, GROUP, PATIENCE, eventually, quick};
use crate::forgetful::Forgetful;
use crate::record::{Recorder, recorder};
use crate::shared::shared;

/// How long every reply is on its way: long enough to see at the server what it will say, and to lose it.
const LATE: Duration = Duration::from_secs(1);

/// A queue behind a bad network, and a way past it.
struct Bad {
    direct: Env,
    proxy: Proxy,
    queue: Queue,
}

impl Bad {
    async fn network() -> Result<Self> {
        start_counting();
        let redis = Redis::start()?;
        let proxy = Proxy::start(redis.addr())?;
        let behind = redis.url_at(proxy.addr());
        let direct = Env::open(&redis.url(), redis).await?;
        // However late its replies are, nobody takes it for dead.
        let lease = KeeperConfig {
            ttl: Duration::from_secs(60),
            renew_every: Duration::from_secs(15),
            ..Default::default()
        };
        let config = QueueConfig { lease, ..Default::default() };
        let queue = Queue::with_config(connect(&behind, &Options::default()).await?, config)?;
        Ok(Self { direct, proxy, queue })
    }

    async fn subscribe(&self, handler: Recorder, config: ConsumerConfig) -> Result<Subscription> {
        Ok(self.queue.subscribe(&self.direct.topic, GROUP, handler, config).await?)
    }

    /// Waits for something to be so at the server, then loses all replies that are on their way.
    async fn lose_reply(&self, what: &str, is_so: impl AsyncFn() -> Result<bool>) -> Result<()> {
        eventually(what, is_so).await?;
        self.proxy.cut_once()?;
        self.proxy.heal()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_retry_whose_settle_was_not_answered_comes_once() -> Result<()> {
    settle_without_an_answer(shared()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_owners_retry_whose_settle_was_not_answered_comes_once() -> Result<()> {
    settle_without_an_answer(ConsumerConfig::default()).await
}

async fn settle_without_an_answer(config: ConsumerConfig) -> Result<()> {
    let bad = Bad::network().await?;
    let env = &bad.direct;
    let has_failed = Arc::new(tokio::sync::Notify::new());
    let failed = Arc::clone(&has_failed);
    let (handler, mut seen) = recorder(move |message| match message.payload.as_ref() {
        b"retry" if message.attempt == 1 => {
            failed.notify_one();
            Outcome::retry_after(Duration::ZERO, "once more")
        }
        b"dead" => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let subscription = bad.subscribe(handler, config).await?;
    // All connections are there.
    env.send(0, None, "first").await?;
    assert_eq!(seen.payloads(1).await?, ["first"]);
    env.until_settled(0).await?;
    bad.proxy.delay(LATE)?;
    env.send(0, None, "retry").await?;
    env.send(0, None, "dead").await?;
    tokio::time::timeout(PATIENCE, has_failed.notified()).await?;
    bad.lose_reply("all is settled", async || {
        Ok(env.dead_letters().await?.len() == 1 && env.pending(0).await?.is_empty())
    })
    .await?;
    assert_eq!(seen.payloads(3).await?, ["retry", "dead", "retry"]);
    env.send(0, None, "last").await?;
    assert_eq!(seen.payloads(1).await?, ["last"]);
    env.until_settled(0).await?;
    assert_eq!(env.dead_letters().await?.len(), 1);
    ensure!(counted(metrics::ANOMALIES, &env.topic, "settle_failed") > 0, "no reply was lost");
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "lost_by_the_server"), 0);
    subscription.stop().await;
    Ok(())
}

async fn entries_whose_take_over_was_not_answered_are_found_again(env: Env) -> Result<()> {
    start_counting();
    env.send(0, None, "orphan").await?;
    env.send(0, None, "orphan, too").await?;
    read_and_die(&env, &env.stream(0).await?).await?;
    let forgetful = Forgetful::new(Arc::clone(&env.backend));
    let queue = Queue::with_config(Arc::clone(&forgetful) as _, quick())?;
    forgetful.reclaims.store(1, Ordering::SeqCst);
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let config = ConsumerConfig { reclaim_idle: Duration::from_secs(1), ..shared() };
    let subscription = queue.subscribe(&env.topic, GROUP, handler, config).await?;
    assert_eq!(seen.payloads(2).await?, ["orphan", "orphan, too"]);
    env.until_settled(0).await?;
    assert_eq!(forgetful.reclaims.load(Ordering::SeqCst), 0);
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "unseen"), 2);
    subscription.stop().await;
    Ok(())
}

async fn what_was_settled_without_an_answer_is_settled_once(env: Env) -> Result<()> {
    start_counting();
    let forgetful = Forgetful::new(Arc::clone(&env.backend));
    let queue = Queue::with_config(Arc::clone(&forgetful) as _, quick())?;
    let (handler, mut seen) = recorder(|message| match message.payload.as_ref() {
        b"retry" if message.attempt == 1 => Outcome::retry_after(Duration::ZERO, "once more"),
        b"dead" => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let subscription =
        queue.subscribe(&env.topic, GROUP, handler, ConsumerConfig::default()).await?;
    for (payload, deliveries) in [("retry", 2), ("dead", 1)] {
        forgetful.settles.store(3, Ordering::SeqCst);
        env.send(0, None, payload).await?;
        assert_eq!(seen.payloads(deliveries).await?, vec![payload; deliveries]);
        eventually("it is settled", async || Ok(forgetful.settles.load(Ordering::SeqCst) == 0))
            .await?;
        env.until_settled(0).await?;
    }
    env.send(0, None, "last").await?;
    assert_eq!(seen.payloads(1).await?, ["last"]);
    env.until_settled(0).await?;
    assert_eq!(env.dead_letters().await?.len(), 1);
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "settle_failed"), 6);
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    entries_whose_take_over_was_not_answered_are_found_again,
    what_was_settled_without_an_answer_is_settled_once,
);

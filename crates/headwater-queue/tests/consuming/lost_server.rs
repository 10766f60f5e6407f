//! Redis is restarted with nothing in it, under a running consumer.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Handler, Message, Outcome, Queue, QueueConfig, metrics};
use headwater_stream::{KeeperConfig, MapName};
use headwater_testkit::Redis;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;

use crate::counted::{counted, start_counting};
use crate::env::{Env, GROUP, PATIENCE, eventually, text};
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
    let queue = Queue::with_config(Arc::clone(&env.backend), patient())?;
    let subscription = queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    assert_eq!(has_begun.recv().await, Some(("in hand".to_owned(), 1)));

    redis.command(&["FLUSHALL"])?;
    go.send_replace(true);
    // If its lease was missed before the outcome was known, it begins once more.
    while next(&mut has_begun).await? != ("in hand".to_owned(), 2) {}
    // Counted when it is written again, so a moment after others may see it.
    let lost = || counted(metrics::ANOMALIES, &env.topic, "lost_by_the_server");
    eventually("it is counted", async || Ok(lost() >= 1)).await?;

    redis.kill9()?;
    redis.restart()?;
    env.send(0, None, "after").await?;
    while next(&mut has_begun).await? != ("after".to_owned(), 1) {}
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

/// A handler that shows what it begins and ends when it is told to, with what `outcome` says.
fn at_gate(
    outcome: impl Fn(&Message) -> Outcome + Send + Sync + 'static,
) -> (impl Handler, UnboundedReceiver<(String, u32)>, watch::Sender<bool>) {
    let (begun, has_begun) = unbounded_channel();
    let (go, may_go) = watch::channel(false);
    let outcome = Arc::new(outcome);
    let handler = move |message: Message| {
        let (begun, mut may_go, outcome) = (begun.clone(), may_go.clone(), Arc::clone(&outcome));
        async move {
            let _ = begun.send((payload(&message), message.attempt));
            if message.payload.starts_with(b"in hand") {
                let _ = may_go.wait_for(|go| *go).await;
            }
            outcome(&message)
        }
    };
    (handler, has_begun, go)
}

async fn next(begun: &mut UnboundedReceiver<(String, u32)>) -> Result<(String, u32)> {
    let next = tokio::time::timeout(PATIENCE, begun.recv()).await.context("it was lost")?;
    next.context("the handler is gone")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn owners_keep_what_they_have_in_hand_when_the_server_lost_everything() -> Result<()> {
    start_counting();
    let redis = Redis::start()?;
    let env = Env::open(&redis.url(), ()).await?;
    env.create(3).await?;
    let (handler, mut begun, go) =
        at_gate(|message| match (message.payload.as_ref(), message.attempt) {
            (b"in hand: retry", 1) => Outcome::retry_after(Duration::ZERO, "no"),
            (b"in hand: dead", _) => Outcome::dead_letter("no"),
            _ => Outcome::Done,
        });
    let config = ConsumerConfig::default();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    env.send(0, None, "in hand: retry").await?;
    env.send(1, None, "in hand: dead").await?;
    env.send(2, None, "in hand: slow").await?;
    let mut first = Vec::new();
    for _ in 0..3 {
        first.push(next(&mut begun).await?.0);
    }
    // Read ahead, behind the one that is handled.
    env.send(2, None, "read ahead").await?;
    eventually("it is in hand", async || Ok(env.pending(2).await?.len() == 2)).await?;

    redis.command(&["FLUSHALL"])?;
    env.create(3).await?;
    go.send_replace(true);
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "in hand: dead");
    let mut again = Vec::new();
    while !(again.contains(&("in hand: retry".to_owned(), 2))
        && again.contains(&("read ahead".to_owned(), 1)))
    {
        again.push(next(&mut begun).await?);
    }
    for partition in 0..3 {
        env.until_settled(partition).await?;
    }
    assert_eq!(env.dead_letters().await?.len(), 1);
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_is_cancelled_because_the_server_lost_its_lease_is_called_again()
-> Result<()> {
    start_counting();
    let redis = Redis::start()?;
    let env = Env::open(&redis.url(), ()).await?;
    for config in [ConsumerConfig::default(), shared()] {
        let group = format!("{:?}", config.mode);
        let (handler, mut begun, go) = at_gate(|_| Outcome::Done);
        let subscription = env.queue.subscribe(&env.topic, &group, handler, config).await?;
        env.send(0, None, "in hand").await?;
        assert_eq!(next(&mut begun).await?, ("in hand".to_owned(), 1));
        redis.command(&["FLUSHALL"])?;
        // Its lease is not there to be renewed, so it joins anew.
        assert_eq!(next(&mut begun).await?, ("in hand".to_owned(), 1));
        go.send_replace(true);
        subscription.stop().await;
        env.backend.delete_stream(&env.stream(0).await?).await?;
    }
    Ok(())
}

/// Nobody takes this process for dead before the outcome is known.
fn patient() -> QueueConfig {
    let lease = KeeperConfig {
        ttl: Duration::from_secs(60),
        renew_every: Duration::from_secs(20),
        ..Default::default()
    };
    QueueConfig { lease, ..Default::default() }
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

/// The server loses everything, as far as the topic knows; leases stay, so that nobody is taken for dead.
async fn lose_all(env: &Env) -> Result<()> {
    env.backend.delete_stream(&env.stream(0).await?).await?;
    let witness = match env.url.starts_with("redis-cluster") {
        true => format!("streaming:mq:witness:{{{}}}", env.topic),
        false => "streaming:mq:witness".to_owned(),
    };
    anyhow::ensure!(env.backend.map_delete(&MapName::new(witness)?).await?, "no witness");
    Ok(())
}

async fn on_a_busy_topic_too_what_is_in_hand_is_tried_again(env: Env) -> Result<()> {
    start_counting();
    let (handler, mut begun, go) = at_gate(|message| match message.payload.as_ref() {
        b"in hand: retry" if message.attempt == 1 => Outcome::retry_after(Duration::ZERO, "no"),
        b"in hand: dead" => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let config = ConsumerConfig { concurrency: 3, ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    env.send(0, None, "in hand: retry").await?;
    env.send(0, None, "in hand: dead").await?;
    let mut first = [next(&mut begun).await?.0, next(&mut begun).await?.0];
    first.sort();
    assert_eq!(first, ["in hand: dead", "in hand: retry"]);

    // A backend that begins anew may give the ids of this millisecond once more.
    tokio::time::sleep(Duration::from_millis(5)).await;
    lose_all(&env).await?;
    // Others send on, and a third handler handles it: the group is beyond what is in hand again.
    for n in 0..3 {
        env.send(0, None, &format!("after {n}")).await?;
        assert_eq!(next(&mut begun).await?.0, format!("after {n}"));
    }
    env.until_settled(0).await?;

    go.send_replace(true);
    assert_eq!(next(&mut begun).await?, ("in hand: retry".to_owned(), 2));
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(text(&letters[0], "payload"), "in hand: dead");
    // Counted when it is written again, so a moment after others may see it.
    let lost = || counted(metrics::ANOMALIES, &env.topic, "lost_by_the_server");
    eventually("both are counted", async || Ok(lost() >= 2)).await?;
    env.until_settled(0).await?;
    subscription.stop().await;
    assert_eq!(lost(), 2);
    Ok(())
}

async fn what_was_read_ahead_is_kept_when_the_server_lost_it(env: Env) -> Result<()> {
    start_counting();
    let (handler, mut begun, go) = at_gate(|_| Outcome::Done);
    // Kept alive twice a second.
    let config = ConsumerConfig { reclaim_idle: Duration::from_secs(1), ..shared() };
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    env.send(0, None, "in hand").await?;
    env.send(0, None, "read ahead").await?;
    assert_eq!(next(&mut begun).await?.0, "in hand");
    eventually("both are in hand", async || Ok(env.pending(0).await?.len() == 2)).await?;
    lose_all(&env).await?;
    eventually("it was noticed", async || {
        Ok(counted(metrics::ANOMALIES, &env.topic, "server_lost_all") > 0)
    })
    .await?;
    go.send_replace(true);
    assert_eq!(next(&mut begun).await?.0, "read ahead");
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "taken_away"), 0);
    subscription.stop().await;
    Ok(())
}

// Not on the shared Redis: the witness is that of all topics there.
mod own_redis {
    use anyhow::Result;
    use headwater_testkit::Redis;

    use crate::env::Env;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn on_a_busy_topic_too_what_is_in_hand_is_tried_again() -> Result<()> {
        let redis = Redis::start()?;
        let env = Env::open(&redis.url(), redis).await?;
        super::on_a_busy_topic_too_what_is_in_hand_is_tried_again(env).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn what_was_read_ahead_is_kept() -> Result<()> {
        let redis = Redis::start()?;
        let env = Env::open(&redis.url(), redis).await?;
        super::what_was_read_ahead_is_kept_when_the_server_lost_it(env).await
    }
}

on_backends!(embedded, cluster:
    on_a_busy_topic_too_what_is_in_hand_is_tried_again,
    what_was_read_ahead_is_kept_when_the_server_lost_it,
);

//! Processes that die while they handle messages.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Mode, Outcome, Queue, QueueConfig};
use headwater_stream::{KeeperConfig, Options, connect};
use headwater_testkit::{Child, Redis};

use crate::env::{Env, GROUP, PATIENCE, text};
use crate::record::recorder;

fn short_lived() -> QueueConfig {
    let lease = KeeperConfig {
        ttl: Duration::from_secs(3),
        renew_every: Duration::from_millis(500),
        margin: Duration::from_millis(500),
    };
    QueueConfig { lease, rebalance_every: Duration::from_millis(200), ..Default::default() }
}

/// A consumer that dies of some messages. Its end is that of its process.
#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn victim() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let url = std::env::var("URL")?;
        let topic = std::env::var("TOPIC")?;
        let mode = if std::env::var("MODE")? == "Shared" { Mode::Shared } else { Mode::Owned };
        let backend = connect(&url, &Options::default()).await?;
        let queue = Queue::with_config(backend, short_lived())?;
        let handler = async |message: headwater_queue::Message| match message.payload.as_ref() {
            b"poison" => {
                println!("DYING at delivery {}", message.deliveries);
                std::process::abort();
            }
            b"hang" => {
                println!("HANGING");
                std::future::pending::<()>().await;
            }
            _ => {}
        };
        let config = ConsumerConfig { mode, ..Default::default() };
        let _subscription = queue.subscribe(&topic, GROUP, wrap(handler), config).await?;
        std::future::pending::<()>().await;
        Ok(())
    })
}

fn wrap<F, Fut>(handle: F) -> impl Fn(headwater_queue::Message) -> Fut + Send + Sync + 'static
where
    F: Fn(headwater_queue::Message) -> Fut + Send + Sync + 'static,
    Fut: Future + Send,
{
    handle
}

fn spawn(env: &Env, mode: &str) -> Result<Child> {
    Child::spawn_self("crash::victim", &[("URL", &env.url), ("TOPIC", &env.topic), ("MODE", mode)])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_message_that_kills_its_handlers_becomes_a_dead_letter_and_its_neighbours_do_not()
-> Result<()> {
    let redis = Redis::shared()?;
    let env = Env::open(&redis.url(), ()).await?;
    for n in 0..5 {
        env.send(0, None, &format!("before {n}")).await?;
    }
    env.send(0, None, "poison").await?;
    for n in 0..5 {
        env.send(0, None, &format!("after {n}")).await?;
    }
    for death in 1..=5 {
        let child = spawn(&env, "Owned")?;
        let line = child.line_after("DYING at delivery ", PATIENCE)?;
        println!("death {death} at delivery {line}");
    }
    let queue = Queue::with_config(connect(&env.url, &Options::default()).await?, short_lived())?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription =
        queue.subscribe(&env.topic, GROUP, handler, ConsumerConfig::default()).await?;
    let expected: Vec<String> = (0..5).map(|n| format!("after {n}")).collect();
    assert_eq!(seen.payloads(5).await?, expected);
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(letters.len(), 1);
    assert_eq!(text(&letters[0], "payload"), "poison");
    assert!(text(&letters[0], "reason").contains("5 times without an outcome"));
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_dead_members_messages_are_taken_over_when_its_heartbeat_lapses() -> Result<()> {
    let redis = Redis::shared()?;
    let env = Env::open(&redis.url(), ()).await?;
    env.send(0, None, "hang").await?;
    let child = spawn(&env, "Shared")?;
    child.line_after("HANGING", PATIENCE)?;
    let queue = Queue::with_config(connect(&env.url, &Options::default()).await?, short_lived())?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let config = ConsumerConfig { mode: Mode::Shared, ..Default::default() };
    let subscription = queue.subscribe(&env.topic, GROUP, handler, config).await?;
    // While the other lives, its message is left alone however long it takes.
    tokio::time::sleep(2 * short_lived().lease.ttl).await;
    assert!(seen.now().is_none());
    child.kill9()?;
    let message = seen.next().await?;
    assert_eq!((message.deliveries, message.attempt), (2, 1));
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

/// A directory that one process at a time works on.
struct Directory {
    url: String,
    topic: String,
    _kept: tempfile::TempDir,
}

impl Directory {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let url = format!("embedded:{}", directory.path().display());
        Ok(Self { url, topic: headwater_testkit::unique("orders"), _kept: directory })
    }

    async fn open(&self) -> Result<Env> {
        let mut env = Env::open(&self.url, ()).await?;
        env.topic = self.topic.clone();
        Ok(env)
    }

    async fn send(&self, payloads: &[&str]) -> Result<()> {
        let env = self.open().await?;
        for payload in payloads {
            env.send(0, None, payload).await?;
        }
        Ok(env.backend.close().await?)
    }

    fn spawn(&self, mode: &str) -> Result<Child> {
        let environment = [("URL", self.url.as_str()), ("TOPIC", &self.topic), ("MODE", mode)];
        Child::spawn_self("crash::victim", &environment)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn embedded_a_message_that_kills_its_handlers_becomes_a_dead_letter() -> Result<()> {
    let directory = Directory::new()?;
    directory.send(&["before", "poison", "after"]).await?;
    for death in 1..=5 {
        let child = directory.spawn("Owned")?;
        let line = child.line_after("DYING at delivery ", PATIENCE)?;
        println!("death {death} at delivery {line}");
        // Whoever comes next finds the directory free.
        child.wait(PATIENCE)?;
    }
    let env = directory.open().await?;
    let queue = Queue::with_config(std::sync::Arc::clone(&env.backend), short_lived())?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription =
        queue.subscribe(&env.topic, GROUP, handler, ConsumerConfig::default()).await?;
    assert_eq!(seen.payloads(1).await?, ["after"]);
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(letters.len(), 1);
    assert_eq!(text(&letters[0], "payload"), "poison");
    env.until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn embedded_what_a_killed_process_had_in_hand_is_there_for_the_next() -> Result<()> {
    for mode in ["Shared", "Owned"] {
        let directory = Directory::new()?;
        directory.send(&["hang"]).await?;
        let child = directory.spawn(mode)?;
        child.line_after("HANGING", PATIENCE)?;
        child.kill9()?;
        let env = directory.open().await?;
        let queue = Queue::with_config(std::sync::Arc::clone(&env.backend), short_lived())?;
        let (handler, mut seen) = recorder(|_| Outcome::Done);
        let mode = if mode == "Shared" { Mode::Shared } else { Mode::Owned };
        let config = ConsumerConfig { mode, ..Default::default() };
        let subscription = queue.subscribe(&env.topic, GROUP, handler, config).await?;
        let message = seen.next().await?;
        assert_eq!((message.deliveries, message.attempt), (2, 1));
        env.until_settled(0).await?;
        subscription.stop().await;
    }
    Ok(())
}

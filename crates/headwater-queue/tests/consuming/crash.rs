//! Processes that crash while they handle messages.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{ConsumerConfig, Mode, Outcome, Queue, QueueConfig};
use headwater_stream::{
    Backend, EntryId, GroupName, LeaseRenewerConfig, Options, PendingDeliveryQuery, StreamName,
    connect,
};
use headwater_testkit::{Child, Redis};

use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually, text};
use crate::recording_handler::recording_handler;

fn short_leases() -> QueueConfig {
    let lease = LeaseRenewerConfig {
        ttl: Duration::from_secs(3),
        renew_every: Duration::from_millis(500),
        safety_margin: Duration::from_millis(500),
    };
    QueueConfig { lease, rebalance_every: Duration::from_millis(200), ..Default::default() }
}

/// A consumer whose process exits on some messages.
#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn victim() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let url = std::env::var("URL")?;
        let topic = std::env::var("TOPIC")?;
        let mode = if std::env::var("MODE")? == "Shared" { Mode::Shared } else { Mode::Owned };
        let backend = connect(&url, &Options::default()).await?;
        let queue = Queue::with_config(Arc::clone(&backend), short_leases())?;
        let described = queue.topics().describe(&topic).await?;
        let stream = StreamName::new(&described.partitions[0].stream_key)?;
        let handler = move |message: headwater_queue::Message| {
            let (backend, stream) = (Arc::clone(&backend), stream.clone());
            async move {
                match message.payload.as_ref() {
                    b"poison" => {
                        // What finished before is not in flight when the process dies.
                        wait_until_first(backend, stream, message.id).await?;
                        println!("DYING at delivery {}", message.deliveries);
                        std::process::abort();
                    }
                    payload if payload.ends_with(b"hang") => {
                        println!("HANGING");
                        std::future::pending::<()>().await;
                    }
                    _ => {}
                }
                anyhow::Ok(Outcome::Done)
            }
        };
        let config = ConsumerConfig { mode, ..Default::default() };
        let _subscription = queue.subscribe(&topic, GROUP, handler, config).await?;
        std::future::pending::<()>().await;
        Ok(())
    })
}

/// Waits until no message before this one is pending.
async fn wait_until_first(
    backend: Arc<dyn Backend>,
    stream: StreamName,
    id: EntryId,
) -> Result<()> {
    let group = GroupName::new(GROUP)?;
    loop {
        let query = PendingDeliveryQuery {
            stream: &stream,
            group: &group,
            consumer: None,
            min_idle: Duration::ZERO,
            after: None,
            count: 1,
        };
        let pending = backend.pending(query).await?;
        if pending.first().is_none_or(|oldest| oldest.id >= id) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Starts a consumer in a process of its own.
pub(crate) fn spawn(fixture: &Fixture, mode: &str) -> Result<Child> {
    Child::spawn_self(
        "crash::victim",
        &[("URL", &fixture.url), ("TOPIC", &fixture.topic), ("MODE", mode)],
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_message_that_crashes_its_consumers_becomes_a_dead_letter_and_others_do_not() -> Result<()>
{
    let redis = Redis::shared()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    for n in 0..5 {
        fixture.send(0, None, &format!("before {n}")).await?;
    }
    fixture.send(0, None, "poison").await?;
    for n in 0..5 {
        fixture.send(0, None, &format!("after {n}")).await?;
    }
    for death in 1..=5 {
        let child = spawn(&fixture, "Owned")?;
        let line = child.line_after("DYING at delivery ", TIMEOUT)?;
        println!("death {death} at delivery {line}");
    }
    let queue =
        Queue::with_config(connect(&fixture.url, &Options::default()).await?, short_leases())?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription =
        queue.subscribe(&fixture.topic, GROUP, handler, ConsumerConfig::default()).await?;
    let expected: Vec<String> = (0..5).map(|n| format!("after {n}")).collect();
    assert_eq!(seen.payloads(5).await?, expected);
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(letters.len(), 1);
    assert_eq!(text(&letters[0], "payload"), "poison");
    assert!(text(&letters[0], "reason").contains("5 times without an outcome"));
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn messages_of_a_dead_member_are_reclaimed_when_its_lease_expires() -> Result<()> {
    let redis = Redis::shared()?;
    let fixture = Fixture::open(&redis.url(), ()).await?;
    fixture.send(0, None, "hang").await?;
    let child = spawn(&fixture, "Shared")?;
    child.line_after("HANGING", TIMEOUT)?;
    let queue =
        Queue::with_config(connect(&fixture.url, &Options::default()).await?, short_leases())?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig { mode: Mode::Shared, ..Default::default() };
    let subscription = queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    // While the other member is alive, its message is not reclaimed.
    tokio::time::sleep(2 * short_leases().lease.ttl).await;
    assert!(seen.now().is_none());
    child.kill9()?;
    let message = seen.next().await?;
    assert_eq!((message.deliveries, message.attempt), (2, 1));
    fixture.wait_until_settled(0).await?;
    // Its name is removed from the group; so is that of a consumer that leaves.
    let consumers = async || {
        let stats = fixture.backend.stats(&fixture.stream(0).await?).await?;
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        anyhow::Ok(groups.iter().map(|group| group.consumers.len()).sum::<usize>())
    };
    eventually("the dead name is removed", async || Ok(consumers().await? == 1)).await?;
    subscription.stop().await;
    assert_eq!(consumers().await?, 0);
    Ok(())
}

/// A data directory of the embedded backend, used by one process at a time.
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

    async fn open(&self) -> Result<Fixture> {
        let mut fixture = Fixture::open(&self.url, ()).await?;
        fixture.topic = self.topic.clone();
        Ok(fixture)
    }

    async fn send(&self, payloads: &[&str]) -> Result<()> {
        let fixture = self.open().await?;
        for payload in payloads {
            fixture.send(0, None, payload).await?;
        }
        Ok(fixture.backend.close().await?)
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
        let line = child.line_after("DYING at delivery ", TIMEOUT)?;
        println!("death {death} at delivery {line}");
        // The lock on the directory is released before the next process starts.
        child.wait(TIMEOUT)?;
    }
    let fixture = directory.open().await?;
    let queue = Queue::with_config(std::sync::Arc::clone(&fixture.backend), short_leases())?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription =
        queue.subscribe(&fixture.topic, GROUP, handler, ConsumerConfig::default()).await?;
    assert_eq!(seen.payloads(1).await?, ["after"]);
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(letters.len(), 1);
    assert_eq!(text(&letters[0], "payload"), "poison");
    fixture.wait_until_settled(0).await?;
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn embedded_what_a_killed_process_had_in_hand_is_there_for_the_next() -> Result<()> {
    for mode in ["Shared", "Owned"] {
        let directory = Directory::new()?;
        directory.send(&["hang"]).await?;
        let child = directory.spawn(mode)?;
        child.line_after("HANGING", TIMEOUT)?;
        child.kill9()?;
        let fixture = directory.open().await?;
        let queue = Queue::with_config(std::sync::Arc::clone(&fixture.backend), short_leases())?;
        let (handler, mut seen) = recording_handler(|_| Outcome::Done);
        let mode = if mode == "Shared" { Mode::Shared } else { Mode::Owned };
        let config = ConsumerConfig { mode, ..Default::default() };
        let subscription = queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
        let message = seen.next().await?;
        assert_eq!((message.deliveries, message.attempt), (2, 1));
        fixture.wait_until_settled(0).await?;
        subscription.stop().await;
    }
    Ok(())
}

//! Failover time after a kill and after a stop, and delay of delayed messages after they are due.
//!
//! The killed owner is this program in a child process. There is no raw counterpart; the results are compared with a
//! target.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_queue::{
    ConsumerConfig, Message, NewMessage, ProducerConfig, Queue, QueueConfig, Subscription,
};
use headwater_stream::{LeaseRenewerConfig, Options, connect};
use headwater_testkit::Child;
use headwater_testkit::bench::BenchReport;
use tokio::sync::mpsc;

use crate::{BenchServer, Effort, GROUP};

/// Set for the child process that is killed.
const URL: &str = "HEADWATER_BENCH_OWNER_URL";
const TOPIC: &str = "HEADWATER_BENCH_OWNER_TOPIC";

const PARTITIONS: u16 = 8;
const LEASE: Duration = Duration::from_secs(3);
/// Target: time beyond the lease, after a stop, and after a due time.
const TARGET: Duration = Duration::from_millis(250);
/// Each partition gets a message this often during a failover.
const SEND_EVERY: Duration = Duration::from_millis(5);
/// Fails if nothing happens within this time.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Consumes until it is killed, if this process was started as the child.
pub(crate) async fn run_owner_if_requested() -> Result<()> {
    let (Ok(url), Ok(topic)) = (std::env::var(URL), std::env::var(TOPIC)) else { return Ok(()) };
    let owner = Member::join(&url, &topic).await?;
    let mut before = 0;
    loop {
        let partitions = owner.subscription.stats().partitions;
        if partitions != before {
            println!("OWNS {partitions}.");
            before = partitions;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn measure(
    report: &mut BenchReport,
    server: &BenchServer,
    effort: &Effort,
) -> Result<()> {
    let (mut killed, mut stopped) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        killed.push(after_kill(server, round).await?);
        stopped.push(after_stop(server, round).await?);
    }
    let lease = LEASE.as_secs();
    report.delays(&format!("killed owner replaced, lease {lease} s"), LEASE + TARGET, &killed);
    report.delays("stopped owner replaced", TARGET, &stopped);
    report.delays("delayed message, after it is due", TARGET, &after_due(server, effort).await?);
    Ok(())
}

/// Time from the kill until the survivor has handled a message of each partition.
async fn after_kill(server: &BenchServer, round: usize) -> Result<Duration> {
    let topic = server.topic(&format!("kill-{round}"), PARTITIONS).await?;
    let url = server.redis.url();
    let owner = Child::spawn_self("owner", &[(URL, &url), (TOPIC, &topic.name)])?;
    owner.line_after(&format!("OWNS {PARTITIONS}."), TIMEOUT)?;
    let mut survivor = Member::join(&url, &topic.name).await?;
    survivor.wait_until_owner_of(PARTITIONS / 2).await?;
    owner.line_after(&format!("OWNS {}.", PARTITIONS / 2), TIMEOUT)?;

    let start = Instant::now();
    owner.kill9()?;
    let took = survivor.handle_all_partitions(server, start).await?;
    survivor.subscription.stop().await;
    server.delete(&topic).await?;
    Ok(took)
}

/// Time from the stop of an owner until the other one has handled a message of each partition.
async fn after_stop(server: &BenchServer, round: usize) -> Result<Duration> {
    let topic = server.topic(&format!("stop-{round}"), PARTITIONS).await?;
    let url = server.redis.url();
    let leaving = Member::join(&url, &topic.name).await?;
    let mut staying = Member::join(&url, &topic.name).await?;
    staying.wait_until_owner_of(PARTITIONS / 2).await?;
    leaving.wait_until_owner_of(PARTITIONS / 2).await?;

    let start = Instant::now();
    let stopping = tokio::spawn(async move { leaving.subscription.stop().await });
    let took = staying.handle_all_partitions(server, start).await?;
    stopping.await?;
    staying.subscription.stop().await;
    server.delete(&topic).await?;
    Ok(took)
}

/// How long after their due time delayed messages are handled.
async fn after_due(server: &BenchServer, effort: &Effort) -> Result<Vec<Duration>> {
    let topic = server.topic("due", PARTITIONS).await?;
    let due: Arc<Mutex<HashMap<String, Instant>>> = Arc::default();
    let (late_by, mut late) = mpsc::unbounded_channel();
    let handler = {
        let due = Arc::clone(&due);
        move |message: Message| {
            let number = String::from_utf8_lossy(&message.payload);
            let due =
                due.lock().expect("no code panics while it holds it").get(number.as_ref()).copied();
            // The receiver may be dropped.
            let _ = late_by.send(due.map(|due| Instant::now().saturating_duration_since(due)));
            std::future::ready(())
        }
    };
    let config = ConsumerConfig::default();
    let subscription = server.queue.subscribe(&topic.name, GROUP, handler, config).await?;
    let count = effort.wake_ups / 4;
    for number in 0..count {
        // Spread over two seconds, in no order.
        let after = Duration::from_millis(100 + (number as u64 * 7919) % 2_000);
        let message = NewMessage::new(number.to_string());
        let former = due
            .lock()
            .expect("no code panics while it holds it")
            .insert(number.to_string(), Instant::now() + after);
        anyhow::ensure!(former.is_none(), "each is sent once");
        server.producer.send_after(&topic.name, message, after).await?;
    }
    let mut times = Vec::with_capacity(count);
    while times.len() < count {
        let next = tokio::time::timeout(TIMEOUT, late.recv()).await?;
        times.push(next.flatten().context("a message that was not sent")?);
    }
    subscription.stop().await;
    server.delete(&topic).await?;
    Ok(times)
}

/// A member of the group with its own connection and leases.
struct Member {
    topic: String,
    /// Renews its leases.
    _queue: Queue,
    subscription: Subscription,
    /// The partition of each message that it handled, and when.
    handled: mpsc::UnboundedReceiver<(u16, Instant)>,
}

impl Member {
    async fn join(url: &str, topic: &str) -> Result<Self> {
        let backend = connect(url, &Options::default()).await?;
        let lease = LeaseRenewerConfig { ttl: LEASE, renew_every: LEASE / 3, ..Default::default() };
        let queue = Queue::with_config(backend, QueueConfig { lease, ..Default::default() })?;
        let (handling, handled) = mpsc::unbounded_channel();
        let handler = move |message: Message| {
            // The receiver may be dropped.
            let _ = handling.send((message.partition, Instant::now()));
            std::future::ready(())
        };
        let config = ConsumerConfig::default();
        let subscription = queue.subscribe(topic, GROUP, handler, config).await?;
        Ok(Self { topic: topic.to_owned(), _queue: queue, subscription, handled })
    }

    async fn wait_until_owner_of(&self, partitions: u16) -> Result<()> {
        let start = Instant::now();
        while self.subscription.stats().partitions != usize::from(partitions) {
            if start.elapsed() > TIMEOUT {
                bail!("{:?} instead of {partitions} partitions", self.subscription.stats());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Sends to all partitions until it has handled a message of each. Returns the time until the last one's first
    /// message.
    async fn handle_all_partitions(
        &mut self,
        server: &BenchServer,
        start: Instant,
    ) -> Result<Duration> {
        let producer = server.queue.producer(ProducerConfig::default())?;
        let mut first: HashMap<u16, Duration> = HashMap::new();
        while first.len() < usize::from(PARTITIONS) {
            if start.elapsed() > TIMEOUT {
                bail!("only {} of {PARTITIONS} partitions are consumed", first.len());
            }
            let one = |partition| NewMessage::new("x").to_partition(partition);
            let missing = (0..PARTITIONS).filter(|partition| !first.contains_key(partition));
            for sent in producer.send_batch(&self.topic, missing.map(one).collect()).await? {
                sent?;
            }
            tokio::time::sleep(SEND_EVERY).await;
            while let Ok((partition, at)) = self.handled.try_recv() {
                first.entry(partition).or_insert(at.duration_since(start));
            }
        }
        first.into_values().max().context("there are partitions")
    }
}

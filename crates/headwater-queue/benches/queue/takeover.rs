//! How long work stands still: after a kill, at a hand-over, and after a message is due.
//!
//! The owner that is killed is this program once more, in a process of its own. Nothing here has a raw side: DESIGN says
//! how long it may take.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_queue::{
    ConsumerConfig, Message, NewMessage, ProducerConfig, Queue, QueueConfig, Subscription,
};
use headwater_stream::{KeeperConfig, Options, connect};
use headwater_testkit::Child;
use headwater_testkit::bench::Report;
use tokio::sync::mpsc;

use crate::{Effort, GROUP, Place};

/// Set for the process that is to be killed.
const URL: &str = "HEADWATER_BENCH_OWNER_URL";
const TOPIC: &str = "HEADWATER_BENCH_OWNER_TOPIC";

const PARTITIONS: u16 = 8;
const LEASE: Duration = Duration::from_secs(3);
/// What may come on top of a lease, at a hand-over, and after a due time.
const AIM: Duration = Duration::from_millis(250);
/// Each partition gets a message this often while work stands still.
const SEND_EVERY: Duration = Duration::from_millis(5);
/// When nothing happens at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Works until it is killed, if this process was started for that.
pub(crate) async fn own_if_asked() -> Result<()> {
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

pub(crate) async fn measure(report: &mut Report, place: &Place, effort: &Effort) -> Result<()> {
    let (mut killed, mut handed_over) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        killed.push(after_a_kill(place, round).await?);
        handed_over.push(at_a_hand_over(place, round).await?);
    }
    let lease = LEASE.as_secs();
    report.delays(&format!("killed owner replaced, lease {lease} s"), LEASE + AIM, &killed);
    report.delays("stopped owner replaced", AIM, &handed_over);
    report.delays("delayed message, after it is due", AIM, &after_due(place, effort).await?);
    Ok(())
}

/// From the kill until somebody else has handled a message of each of the dead one's partitions.
async fn after_a_kill(place: &Place, round: usize) -> Result<Duration> {
    let topic = place.topic(&format!("kill-{round}"), PARTITIONS).await?;
    let url = place.redis.url();
    let owner = Child::spawn_self("owner", &[(URL, &url), (TOPIC, &topic.name)])?;
    owner.line_after(&format!("OWNS {PARTITIONS}."), PATIENCE)?;
    let mut survivor = Member::join(&url, &topic.name).await?;
    survivor.owns(PARTITIONS / 2).await?;
    owner.line_after(&format!("OWNS {}.", PARTITIONS / 2), PATIENCE)?;

    let start = Instant::now();
    owner.kill9()?;
    let took = survivor.works_on_all(place, start).await?;
    survivor.subscription.stop().await;
    place.delete(&topic).await?;
    Ok(took)
}

/// The same from when an owner is asked to stop.
async fn at_a_hand_over(place: &Place, round: usize) -> Result<Duration> {
    let topic = place.topic(&format!("stop-{round}"), PARTITIONS).await?;
    let url = place.redis.url();
    let leaver = Member::join(&url, &topic.name).await?;
    let mut stayer = Member::join(&url, &topic.name).await?;
    stayer.owns(PARTITIONS / 2).await?;
    leaver.owns(PARTITIONS / 2).await?;

    let start = Instant::now();
    let stopping = tokio::spawn(async move { leaver.subscription.stop().await });
    let took = stayer.works_on_all(place, start).await?;
    stopping.await?;
    stayer.subscription.stop().await;
    place.delete(&topic).await?;
    Ok(took)
}

/// How long after they are due messages are handled.
async fn after_due(place: &Place, effort: &Effort) -> Result<Vec<Duration>> {
    let topic = place.topic("due", PARTITIONS).await?;
    let due: Arc<Mutex<HashMap<String, Instant>>> = Arc::default();
    let (late_by, mut late) = mpsc::unbounded_channel();
    let handler = {
        let due = Arc::clone(&due);
        move |message: Message| {
            let number = String::from_utf8_lossy(&message.payload);
            let due = due.lock().expect("nobody panicked").get(number.as_ref()).copied();
            // A receiver that is gone has what it wanted.
            let _ = late_by.send(due.map(|due| Instant::now().saturating_duration_since(due)));
            std::future::ready(())
        }
    };
    let config = ConsumerConfig::default();
    let subscription = place.queue.subscribe(&topic.name, GROUP, handler, config).await?;
    let count = effort.wake_ups / 4;
    for number in 0..count {
        // Scattered over two seconds, in no order.
        let after = Duration::from_millis(100 + (number as u64 * 7919) % 2_000);
        let message = NewMessage::new(number.to_string());
        let noted =
            due.lock().expect("nobody panicked").insert(number.to_string(), Instant::now() + after);
        anyhow::ensure!(noted.is_none(), "each is sent once");
        place.producer.send_after(&topic.name, message, after).await?;
    }
    let mut times = Vec::with_capacity(count);
    while times.len() < count {
        let next = tokio::time::timeout(PATIENCE, late.recv()).await?;
        times.push(next.flatten().context("a message that nobody sent")?);
    }
    subscription.stop().await;
    place.delete(&topic).await?;
    Ok(times)
}

/// A member of the group with a connection and leases of its own.
struct Member {
    topic: String,
    /// Keeps its leases.
    _queue: Queue,
    subscription: Subscription,
    /// The partition of each message that it handled, and when.
    handled: mpsc::UnboundedReceiver<(u16, Instant)>,
}

impl Member {
    async fn join(url: &str, topic: &str) -> Result<Self> {
        let backend = connect(url, &Options::default()).await?;
        let lease = KeeperConfig { ttl: LEASE, renew_every: LEASE / 3, ..Default::default() };
        let queue = Queue::with_config(backend, QueueConfig { lease, ..Default::default() })?;
        let (handling, handled) = mpsc::unbounded_channel();
        let handler = move |message: Message| {
            // A receiver that is gone has what it wanted.
            let _ = handling.send((message.partition, Instant::now()));
            std::future::ready(())
        };
        let config = ConsumerConfig::default();
        let subscription = queue.subscribe(topic, GROUP, handler, config).await?;
        Ok(Self { topic: topic.to_owned(), _queue: queue, subscription, handled })
    }

    async fn owns(&self, partitions: u16) -> Result<()> {
        let start = Instant::now();
        while self.subscription.stats().partitions != usize::from(partitions) {
            if start.elapsed() > PATIENCE {
                bail!("{:?} instead of {partitions} partitions", self.subscription.stats());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Sends to all partitions until it has handled a message of each. Returns when it handled the first of the last.
    async fn works_on_all(&mut self, place: &Place, start: Instant) -> Result<Duration> {
        let producer = place.queue.producer(ProducerConfig::default())?;
        let mut first: HashMap<u16, Duration> = HashMap::new();
        while first.len() < usize::from(PARTITIONS) {
            if start.elapsed() > PATIENCE {
                bail!("work goes on in {} of {PARTITIONS} partitions", first.len());
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

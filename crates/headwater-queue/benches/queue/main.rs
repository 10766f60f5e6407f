//! Compares the queue with a raw RESP loop on the same server, with the same fields, in one run.
//!
//! Machines are noisy, so only ratios are meaningful: raw and queue alternate round by round, and the median of the
//! rounds is reported. Run `cargo xtask bench`, or `cargo xtask bench -- --quick` for a short run. Select parts with
//! `produce` (or `batches`, `callers`), `consume`, `latency`, `growth`, `takeover` and `idle`; change the numbers with
//! `--rounds=9`, `--entries=500000` and `--partitions=8`.

mod consume;
mod idle;
mod latency;
mod produce;
mod raw;
mod takeover;

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Policies, Producer, ProducerConfig, Queue};
use headwater_stream::{Options, connect};
use headwater_testkit::Redis;
use headwater_testkit::bench::{BenchReport, Request};

/// Bytes of the payload of every message.
pub(crate) const PAYLOAD_BYTES: usize = 256;
/// Entries in one read of one partition.
pub(crate) const READ_BATCH: usize = 256;
/// The consumer group.
pub(crate) const GROUP: &str = "workers";

/// The size of a run.
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    pub(crate) entries: usize,
    pub(crate) partitions: &'static [u16],
    /// Messages of the long topic; the short one has a hundredth of them.
    pub(crate) many: usize,
    pub(crate) pending: usize,
    pub(crate) wake_ups: usize,
    pub(crate) idle_topics: usize,
    /// How long idle topics are measured.
    pub(crate) idle: Duration,
}

const FULL: Effort = Effort {
    rounds: 7,
    entries: 51_200,
    partitions: &[1, 8, 256],
    many: 1_000_000,
    pending: 100_000,
    wake_ups: 2_000,
    idle_topics: 1_000,
    idle: Duration::from_secs(60),
};
const QUICK: Effort = Effort {
    rounds: 3,
    entries: 12_800,
    partitions: &[1, 8, 256],
    many: 100_000,
    pending: 10_000,
    wake_ups: 300,
    idle_topics: 1_000,
    idle: Duration::from_secs(10),
};

/// A Redis server and a queue on it.
pub(crate) struct BenchServer {
    pub(crate) redis: Redis,
    pub(crate) queue: Queue,
    pub(crate) producer: Producer,
}

/// A topic and the keys of its partitions.
pub(crate) struct BenchTopic {
    pub(crate) name: String,
    pub(crate) keys: Vec<String>,
}

impl BenchServer {
    async fn start() -> Result<Self> {
        let redis = Redis::start()?;
        let queue = Queue::new(connect(&redis.url(), &Options::default()).await?);
        let producer = queue.producer(ProducerConfig::default())?;
        Ok(Self { redis, queue, producer })
    }

    pub(crate) async fn topic(&self, name: &str, partitions: u16) -> Result<BenchTopic> {
        self.queue.topics().create(name, partitions, Policies::default()).await?;
        let described = self.queue.topics().describe(name).await?;
        let keys = described.partitions.into_iter().map(|partition| partition.stream_key).collect();
        Ok(BenchTopic { name: name.to_owned(), keys })
    }

    pub(crate) async fn delete(&self, topic: &BenchTopic) -> Result<()> {
        self.queue.topics().delete(&topic.name).await?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    takeover::run_owner_if_requested().await?;
    let request = Request::from_arguments();
    let mut effort = if request.quick { QUICK } else { FULL };
    effort.rounds = request.number("--rounds").unwrap_or(effort.rounds);
    effort.entries = request.number("--entries").unwrap_or(effort.entries);
    if let Some(partitions) = request.number("--partitions") {
        effort.partitions = vec![u16::try_from(partitions)?].leak();
    }
    let mut report = BenchReport;
    let server = BenchServer::start().await?;

    if ["produce", "batches", "callers"].iter().any(|part| request.wants(part)) {
        report.heading("produce: ours beside the raw loop (1.00 = raw)");
        produce::compare(&mut report, &server, &effort, &request).await?;
    }
    if request.wants("consume") {
        report.heading("consume: ours beside the raw loop (1.00 = raw)");
        consume::compare(&mut report, &server, &effort).await?;
    }
    if request.wants("latency") {
        report.heading("latency: ours beside the raw loop (1.00 = raw)");
        latency::compare(&mut report, &server, &effort).await?;
    }
    if request.wants("growth") {
        report.heading("cost per message as work grows (1.00 = the small case)");
        consume::scaling(&mut report, &server, &effort).await?;
    }
    if request.wants("takeover") {
        report.heading("failover time");
        takeover::measure(&mut report, &server, &effort).await?;
    }
    if request.wants("idle") {
        report.heading("idle");
        idle::measure(&server, &effort).await?;
    }
    Ok(())
}

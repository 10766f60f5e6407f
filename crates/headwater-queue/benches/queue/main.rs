//! Measures the queue beside a raw RESP loop on the same server, with the same fields, in one run.
//!
//! Machines are noisy, so the figures that count are ratios: raw and ours take turns, round by round, and the median
//! of what the rounds give is shown. Run it with `cargo xtask bench`, and `cargo xtask bench -- --quick` for a first look;
//! `produce` (or only its `batches` or `callers`), `consume`, `latency`, `growth`, `takeover` and `idle` choose parts of it, `--rounds=9`,
//! `--entries=500000` and `--partitions=8` other numbers than the usual ones.

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
use headwater_testkit::bench::{Report, Request};

/// Bytes of the payload of every message.
pub(crate) const PAYLOAD_BYTES: usize = 256;
/// Entries in one read of one partition.
pub(crate) const READ_BATCH: usize = 256;
/// The group of raw and our consumers.
pub(crate) const GROUP: &str = "workers";

/// How much to do.
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    pub(crate) entries: usize,
    pub(crate) partitions: &'static [u16],
    /// Messages of a long topic; a short one has a hundredth of them.
    pub(crate) many: usize,
    pub(crate) pending: usize,
    pub(crate) wake_ups: usize,
    pub(crate) idle_topics: usize,
    /// How long the idle topics are watched.
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

/// A server with a queue on it.
pub(crate) struct Place {
    pub(crate) redis: Redis,
    pub(crate) queue: Queue,
    pub(crate) producer: Producer,
}

/// A topic and the keys of its partitions.
pub(crate) struct BenchTopic {
    pub(crate) name: String,
    pub(crate) keys: Vec<String>,
}

impl Place {
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
    takeover::own_if_asked().await?;
    let request = Request::from_arguments();
    let mut effort = if request.quick { QUICK } else { FULL };
    effort.rounds = request.number("--rounds").unwrap_or(effort.rounds);
    effort.entries = request.number("--entries").unwrap_or(effort.entries);
    if let Some(partitions) = request.number("--partitions") {
        effort.partitions = vec![u16::try_from(partitions)?].leak();
    }
    let mut report = Report;
    let place = Place::start().await?;

    if ["produce", "batches", "callers"].iter().any(|part| request.wants(part)) {
        report.heading("produce: ours beside the raw loop (1.00 = raw)");
        produce::compare(&mut report, &place, &effort, &request).await?;
    }
    if request.wants("consume") {
        report.heading("consume: ours beside the raw loop (1.00 = raw)");
        consume::compare(&mut report, &place, &effort).await?;
    }
    if request.wants("latency") {
        report.heading("latency: ours beside the raw loop (1.00 = raw)");
        latency::compare(&mut report, &place, &effort).await?;
    }
    if request.wants("growth") {
        report.heading("cost per message as work grows (1.00 = the small case)");
        consume::growth(&mut report, &place, &effort).await?;
    }
    if request.wants("takeover") {
        report.heading("how long work stands still");
        takeover::measure(&mut report, &place, &effort).await?;
    }
    if request.wants("idle") {
        report.heading("idle");
        idle::measure(&place, &effort).await?;
    }
    Ok(())
}

//! Consuming and acknowledging with a handler that does nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use headwater_queue::{ConsumerConfig, Message, Mode, Subscription};
use headwater_stream::{ConsumerName, GroupName, GroupStart, StreamName};
use headwater_testkit::bench::{BenchReport, Raw, median, processor_seconds, timed};
use tokio::sync::Notify;

use crate::produce::{self, BATCH};
use crate::raw::pipelines;
use crate::{BenchServer, BenchTopic, Effort, GROUP, READ_BATCH};

/// Fails if messages do not arrive within this time.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) async fn compare(
    report: &mut BenchReport,
    server: &BenchServer,
    effort: &Effort,
) -> Result<()> {
    for partitions in effort.partitions {
        let (mut theirs, mut mine) = (Vec::new(), Vec::new());
        let mut cost = Cost::default();
        let entries = effort.entries / BATCH * BATCH;
        for round in 0..effort.rounds {
            let mut raw = Raw::connect(server.redis.addr())?;
            for is_raw in [true, false] {
                let name = format!("consume-{partitions}-{round}-{is_raw}");
                let topic = server.topic(&name, *partitions).await?;
                if is_raw {
                    raw.append(&pipelines(&topic, BATCH), entries)?;
                    raw.create_groups(&topic.keys, GROUP)?;
                    theirs.push(timed(|| raw.consume(&topic.keys, GROUP, READ_BATCH, entries))?);
                } else {
                    mine.push(consume(server, &topic, entries, Mode::Owned, &mut cost).await?);
                }
                server.delete(&topic).await?;
            }
        }
        let name = format!("consume + settle, {partitions} partitions");
        report.throughput(&name, entries, &theirs, &mine);
        cost.print(entries * effort.rounds);
    }
    Ok(())
}

/// The same work on short and long topics, and with many entries pending for an inactive consumer.
pub(crate) async fn scaling(
    report: &mut BenchReport,
    server: &BenchServer,
    effort: &Effort,
) -> Result<()> {
    let few = effort.many / 100;
    let mut topics = Vec::new();
    for (name, entries, pending) in
        [("short", few, 0), ("long", effort.many, 0), ("pending", few, effort.pending)]
    {
        let topic = server.topic(name, 1).await?;
        let mut raw = Raw::connect(server.redis.addr())?;
        raw.append(&pipelines(&topic, BATCH), pending)?;
        leave_pending(server, &topic, pending).await?;
        // Competing consumers do not reclaim in-flight entries of other consumers.
        consume(server, &topic, entries, Mode::Shared, &mut Cost::default()).await?;
        topics.push((topic, Vec::new(), Vec::new()));
    }
    let entries = effort.entries / BATCH * BATCH;
    for _ in 0..effort.rounds {
        for (topic, produced, consumed) in &mut topics {
            let cost = &mut Cost::default();
            consumed.push(consume(server, topic, entries, Mode::Shared, cost).await?);
            produced.push(produce::batches(&server.producer, &topic.name, entries).await?);
            consume_rest(server, topic, entries, Mode::Shared).await?;
        }
    }
    let (small_produce, small_consume) = (median(&topics[0].1), median(&topics[0].2));
    for (topic, produced, consumed) in &topics[1..] {
        let size = if topic.name == "long" {
            format!("{few} -> {} messages", effort.many)
        } else {
            format!("0 -> {} pending", effort.pending)
        };
        report.cost(&format!("produce, {size}"), small_produce, median(produced));
        report.cost(&format!("consume + settle, {size}"), small_consume, median(consumed));
    }
    for (topic, ..) in topics {
        server.delete(&topic).await?;
    }
    Ok(())
}

/// Subscribes, fills the topic while the subscription is paused, and measures the time after the resume.
async fn consume(
    server: &BenchServer,
    topic: &BenchTopic,
    entries: usize,
    mode: Mode,
    cost: &mut Cost,
) -> Result<Duration> {
    let (subscription, seen) = subscribe(server, topic, entries, mode).await?;
    // Partitions are assigned before the measurement starts.
    while subscription.stats().partitions < topic.keys.len() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    subscription.pause();
    let mut raw = Raw::connect(server.redis.addr())?;
    let pending = raw.pending(&topic.keys, GROUP)?;
    raw.append(&pipelines(topic, BATCH), entries)?;
    let (start, before) = (Instant::now(), Cost::measure(server)?);
    subscription.resume();
    seen.wait(entries).await?;
    // The last messages are settled a moment later, which is part of the measurement.
    while raw.pending(&topic.keys, GROUP)? > pending {
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    let took = start.elapsed();
    cost.add(&before, &Cost::measure(server)?);
    ensure!(seen.count.load(Ordering::Relaxed) == entries, "messages were delivered twice");
    subscription.stop().await;
    Ok(took)
}

/// Handles the messages that are already stored.
async fn consume_rest(
    server: &BenchServer,
    topic: &BenchTopic,
    entries: usize,
    mode: Mode,
) -> Result<()> {
    let (subscription, seen) = subscribe(server, topic, entries, mode).await?;
    seen.wait(entries).await?;
    subscription.stop().await;
    Ok(())
}

async fn subscribe(
    server: &BenchServer,
    topic: &BenchTopic,
    entries: usize,
    mode: Mode,
) -> Result<(Subscription, Arc<HandledCount>)> {
    let seen = Arc::new(HandledCount::default());
    let handler = {
        let seen = Arc::clone(&seen);
        move |_: Message| {
            seen.record(entries);
            std::future::ready(())
        }
    };
    let config = ConsumerConfig { mode, ..Default::default() };
    Ok((server.queue.subscribe(&topic.name, GROUP, handler, config).await?, seen))
}

/// Processor seconds of this process and of the server.
#[derive(Default)]
struct Cost {
    ours: f64,
    server: f64,
}

impl Cost {
    fn measure(server: &BenchServer) -> Result<Self> {
        let server = processor_seconds(Some(server.redis.pid()?))?;
        Ok(Self { ours: processor_seconds(None)?, server })
    }

    fn add(&mut self, before: &Self, after: &Self) {
        self.ours += after.ours - before.ours;
        self.server += after.server - before.server;
    }

    fn print(&self, entries: usize) {
        let micros = |seconds: f64| seconds * 1e6 / entries as f64;
        let (ours, server) = (micros(self.ours), micros(self.server));
        println!("    processor time per message: ours {ours:.2} µs, the server's {server:.2} µs");
    }
}

#[derive(Default)]
struct HandledCount {
    count: AtomicUsize,
    complete: Notify,
}

impl HandledCount {
    fn record(&self, entries: usize) {
        let before = self.count.fetch_add(1, Ordering::Relaxed);
        if before + 1 == entries {
            self.complete.notify_one();
        }
    }

    async fn wait(&self, entries: usize) -> Result<()> {
        tokio::time::timeout(TIMEOUT, self.complete.notified()).await?;
        ensure!(self.count.load(Ordering::Relaxed) == entries, "messages were delivered twice");
        Ok(())
    }
}

/// Delivers entries to a consumer that never acknowledges them.
async fn leave_pending(server: &BenchServer, topic: &BenchTopic, pending: usize) -> Result<()> {
    let stream = [StreamName::new(&topic.keys[0])?];
    let (group, inactive) = (GroupName::new(GROUP)?, ConsumerName::new("inactive")?);
    let backend = server.queue.backend();
    backend.ensure_group(&stream[0], &group, GroupStart::Beginning).await?;
    let mut reader = backend.reader(&group, &inactive).await?;
    let mut seen = 0;
    while seen < pending {
        let batches = reader.read(&stream, (pending - seen).min(1_000), Duration::ZERO).await?;
        ensure!(!batches.is_empty(), "entries are missing: {seen} of {pending}");
        seen += batches.iter().map(|batch| batch.entries.len()).sum::<usize>();
    }
    Ok(())
}

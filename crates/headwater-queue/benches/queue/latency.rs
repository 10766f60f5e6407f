//! Latency from an append to the start of the handler.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message};
use headwater_testkit::bench::{BenchReport, Raw, read_command};

use crate::raw::append_commands;
use crate::{BenchServer, BenchTopic, Effort, GROUP};

/// Long enough for a reader to block again after a delivery.
const PAUSE: Duration = Duration::from_micros(500);
const BLOCK_MS: u64 = 10_000;
/// How often raw and queue alternate.
const TURNS: usize = 5;

/// Raw readers and the queue are woken by the same raw producer.
pub(crate) async fn compare(
    report: &mut BenchReport,
    server: &BenchServer,
    effort: &Effort,
) -> Result<()> {
    for partitions in effort.partitions {
        let (mut theirs, mut mine) = (Vec::new(), Vec::new());
        for turn in 0..TURNS {
            let count = effort.wake_ups / TURNS;
            let topic = server.topic(&format!("raw-wake-{partitions}-{turn}"), *partitions).await?;
            theirs.extend(raw_wake_ups(server, &topic, count)?);
            server.delete(&topic).await?;
            let topic = server.topic(&format!("our-wake-{partitions}-{turn}"), *partitions).await?;
            mine.extend(our_wake_ups(server, &topic, count).await?);
            server.delete(&topic).await?;
        }
        let name = format!("enqueue to handler, {partitions} partitions");
        report.latency(&name, Some(&theirs), &mine);
    }
    Ok(())
}

fn raw_wake_ups(server: &BenchServer, topic: &BenchTopic, count: usize) -> Result<Vec<Duration>> {
    let mut reader = Raw::connect(server.redis.addr())?;
    reader.create_groups(&topic.keys, GROUP)?;
    let read = read_command(&topic.keys, GROUP, 10, Some(BLOCK_MS));
    let (woken, wakes) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        for _ in 0..count {
            reader.read_group(&read)?;
            woken.send(Instant::now())?;
        }
        anyhow::Ok(())
    });
    let times = wake(server, topic, count, &wakes)?;
    thread.join().ok().context("the reader panicked")??;
    Ok(times)
}

async fn our_wake_ups(
    server: &BenchServer,
    topic: &BenchTopic,
    count: usize,
) -> Result<Vec<Duration>> {
    let (woken, wakes) = mpsc::channel();
    let handler = move |_: Message| {
        // The receiver may be dropped.
        let _ = woken.send(Instant::now());
        std::future::ready(())
    };
    let config = ConsumerConfig::default();
    let subscription = server.queue.subscribe(&topic.name, GROUP, handler, config).await?;
    while subscription.stats().partitions < topic.keys.len() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let times = tokio::task::block_in_place(|| wake(server, topic, count, &wakes))?;
    subscription.stop().await;
    Ok(times)
}

/// Appends one entry, waits until the reader has it, lets the reader block again.
fn wake(
    server: &BenchServer,
    topic: &BenchTopic,
    count: usize,
    wakes: &mpsc::Receiver<Instant>,
) -> Result<Vec<Duration>> {
    let mut producer = Raw::connect(server.redis.addr())?;
    let commands = append_commands(topic);
    let mut times = Vec::with_capacity(count);
    for command in commands.iter().cycle().take(count) {
        std::thread::sleep(PAUSE);
        let start = Instant::now();
        producer.send(command)?;
        times.push(wakes.recv_timeout(Duration::from_millis(BLOCK_MS))?.duration_since(start));
    }
    Ok(times)
}

//! Latency from an append until a blocked reader has the entry.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_stream::{Fields, GroupStart, Retention, StreamName};
use headwater_testkit::Redis;
use headwater_testkit::bench::{BenchReport, Raw, read_command};

use crate::GROUP;
use crate::backend_ops::BackendOps;

/// Long enough for a reader to block again after it got an entry.
const PAUSE: Duration = Duration::from_micros(500);
const BLOCK_MS: u64 = 10_000;

/// The raw loop and the backend alternate in blocks, woken by the same raw producer.
pub(crate) async fn compare(
    report: &mut BenchReport,
    ops: &BackendOps,
    redis: &Redis,
    wake_ups: usize,
) -> Result<()> {
    let (mut raw_times, mut times) = (Vec::new(), Vec::new());
    for block in 0..10 {
        raw_times.extend(raw_wake_ups(redis, &format!("raw-wake-{block}"), wake_ups / 10)?);
        let key = format!("backend-wake-{block}");
        times.extend(backend_wake_ups(ops, redis, &key, wake_ups / 10).await?);
    }
    report.latency("wake-up of a blocked reader", Some(&raw_times), &times);
    Ok(())
}

fn raw_wake_ups(redis: &Redis, key: &str, wake_ups: usize) -> Result<Vec<Duration>> {
    let mut producer = Raw::connect(redis.addr())?;
    let mut reader = Raw::connect(redis.addr())?;
    producer.create_groups(&[key], GROUP)?;
    let read = read_command(&[key], GROUP, 10, Some(BLOCK_MS));
    let (woken, wakes) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        for _ in 0..wake_ups {
            reader.read_group(&read)?;
            woken.send(Instant::now())?;
        }
        anyhow::Ok(())
    });
    let times = produce(&mut producer, key, wake_ups, &wakes)?;
    thread.join().ok().context("the reader panicked")??;
    Ok(times)
}

async fn backend_wake_ups(
    ops: &BackendOps,
    redis: &Redis,
    name: &str,
    wake_ups: usize,
) -> Result<Vec<Duration>> {
    let stream = StreamName::new(name)?;
    ops.backend.ensure_group(&stream, &ops.group, GroupStart::Beginning).await?;
    let mut reader = ops.backend.reader(&ops.group, ops.consumer()).await?;
    let mut producer = Raw::connect(redis.addr())?;
    let (woken, wakes) = mpsc::channel();
    let key = name.to_owned();
    let thread = std::thread::spawn(move || produce(&mut producer, &key, wake_ups, &wakes));
    let streams = [stream];
    let mut seen = 0;
    while seen < wake_ups {
        if !reader.read(&streams, 10, Duration::from_millis(BLOCK_MS)).await?.is_empty() {
            woken.send(Instant::now())?;
            seen += 1;
        }
    }
    thread.join().ok().context("the producer panicked")?
}

/// Appends one entry, waits until the reader has it, lets the reader block again.
fn produce(
    producer: &mut Raw,
    key: &str,
    wake_ups: usize,
    wakes: &mpsc::Receiver<Instant>,
) -> Result<Vec<Duration>> {
    (0..wake_ups)
        .map(|_| {
            std::thread::sleep(PAUSE);
            let start = Instant::now();
            producer.call(&["XADD", key, "*", "payload", "x"])?;
            Ok(wakes.recv()?.duration_since(start))
        })
        .collect()
}

/// The embedded backend has no raw counterpart to compare with.
pub(crate) async fn embedded(
    report: &mut BenchReport,
    ops: &BackendOps,
    wake_ups: usize,
) -> Result<()> {
    let stream = StreamName::new("wake")?;
    ops.backend.ensure_group(&stream, &ops.group, GroupStart::Beginning).await?;
    let mut reader = ops.backend.reader(&ops.group, ops.consumer()).await?;
    let (woken, mut wakes) = tokio::sync::mpsc::channel(1);
    let (backend, to) = (ops.backend.clone(), stream.clone());
    let producer = tokio::spawn(async move {
        let one = [Fields::new([("payload", "x")])];
        let mut times = Vec::new();
        for _ in 0..wake_ups {
            tokio::time::sleep(PAUSE).await;
            let start = Instant::now();
            backend.append(&to, &one, &Retention::KEEP_ALL).await?;
            let at: Instant = wakes.recv().await.context("the reader is gone")?;
            times.push(at.duration_since(start));
        }
        anyhow::Ok(times)
    });
    let streams = [stream];
    let mut seen = 0;
    while seen < wake_ups {
        if !reader.read(&streams, 10, Duration::from_millis(BLOCK_MS)).await?.is_empty() {
            woken.send(Instant::now()).await?;
            seen += 1;
        }
    }
    report.latency("wake-up of a blocked reader", None, &producer.await??);
    Ok(())
}

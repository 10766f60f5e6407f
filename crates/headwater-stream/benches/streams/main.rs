//! Compares every backend with a raw pipelined RESP loop on the same server, in one run.
//!
//! Machines are noisy, so the relevant figures are ratios: the raw loop and the backend alternate round by round, and the
//! median of the rounds is reported. Run it with `cargo xtask bench`, or `cargo xtask bench -- --quick` for a first result.

mod backend_ops;
mod latency;

use anyhow::Result;
use headwater_stream::{Options, connect};
use headwater_testkit::bench::{BenchReport, Pipelines, Raw, Request, command, median, timed};
use headwater_testkit::{Persistence, Redis};

use crate::backend_ops::BackendOps;

/// Bytes of the payload of every entry.
pub(crate) const PAYLOAD_BYTES: usize = 256;
/// Entries in one batched append, and in one pipeline of the raw loop.
const APPEND_BATCH: usize = 100;
/// Concurrent callers that append one entry each, and the pipeline size they are compared with.
const CALLERS: usize = 64;
/// Entries in one read and one settle.
pub(crate) const READ_BATCH: usize = 256;
/// The consumer group.
pub(crate) const GROUP: &str = "workers";
/// A multiple of all batch sizes above.
const BATCHES: usize = 6_400;

/// Amount of work. Entries are multiples of every batch size.
#[derive(Clone, Copy)]
struct Effort {
    rounds: usize,
    entries: usize,
    durable_entries: usize,
    wake_ups: usize,
    many: usize,
    pending: usize,
}

const FULL: Effort = Effort {
    rounds: 7,
    entries: 51_200,
    durable_entries: 6_400,
    wake_ups: 2_000,
    many: 1_000_000,
    pending: 100_000,
};
const QUICK: Effort = Effort {
    rounds: 3,
    entries: 12_800,
    durable_entries: 6_400,
    wake_ups: 300,
    many: 100_000,
    pending: 10_000,
};

const _: () =
    assert!(FULL.entries.is_multiple_of(BATCHES) && QUICK.entries.is_multiple_of(BATCHES));
const _: () = assert!(FULL.durable_entries.is_multiple_of(BATCHES));
const _: () = assert!(QUICK.durable_entries.is_multiple_of(BATCHES));

#[tokio::main]
async fn main() -> Result<()> {
    let request = Request::from_arguments();
    let mut effort = if request.quick { QUICK } else { FULL };
    effort.rounds = request.number("--rounds").unwrap_or(effort.rounds);
    let mut report = BenchReport;

    let redis = Redis::start()?;
    let directory = tempfile::tempdir()?;
    let memory = BackendOps::new(connect("embedded:memory", &Options::default()).await?);
    let on_redis = BackendOps::new(connect(&redis.url(), &Options::default()).await?);

    report
        .heading("Redis without persistence: the backend compared with the raw loop (1.00 = raw)");
    compare_with_raw(&mut report, &on_redis, &redis, effort, effort.entries).await?;
    latency::compare(&mut report, &on_redis, &redis, effort.wake_ups).await?;

    report.heading("embedded:memory compared with the Redis backend without persistence");
    compare_with_redis(&mut report, &memory, &on_redis, effort, effort.entries).await?;
    latency::embedded(&mut report, &memory, effort.wake_ups).await?;

    for (sync, persistence) in
        [("interval", Persistence::EverySecond), ("always", Persistence::Always)]
    {
        let redis = Redis::builder().persistence(persistence).start()?;
        let on_redis = BackendOps::new(connect(&redis.url(), &Options::default()).await?);
        let url = format!("embedded:{}?sync={sync}", directory.path().join(sync).display());
        let embedded = BackendOps::new(connect(&url, &Options::default()).await?);
        report.heading(&format!(
            "embedded sync={sync} compared with the Redis backend at the same durability"
        ));
        let entries = if sync == "always" { effort.durable_entries } else { effort.entries };
        compare_with_redis(&mut report, &embedded, &on_redis, effort, entries).await?;
    }

    report.heading("cost per message as work grows (1.00 = the small case)");
    growth(&mut report, "redis", &on_redis, effort).await?;
    growth(&mut report, "embedded:memory", &memory, effort).await?;
    Ok(())
}

async fn compare_with_raw(
    report: &mut BenchReport,
    ops: &BackendOps,
    redis: &Redis,
    effort: Effort,
    entries: usize,
) -> Result<()> {
    let mut raw = Raw::connect(redis.addr())?;
    let (mut raw_times, mut times) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        let key = format!("raw-batch-{round}");
        let pipelines = pipelines(&key, APPEND_BATCH);
        raw_times.push(timed(|| raw.append(&pipelines, entries))?);
        let stream = format!("our-batch-{round}");
        times.push(ops.append_batches(&stream, entries, APPEND_BATCH).await?);
        raw.delete(&[&key, &stream])?;
    }
    report.throughput("append, batches of 100", entries, &raw_times, &times);

    let (mut raw_times, mut times, mut coalesced) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        let key = format!("raw-callers-{round}");
        let pipelines = pipelines(&key, CALLERS);
        raw_times.push(timed(|| raw.append(&pipelines, entries))?);
        let stream = format!("our-callers-{round}");
        times.push(ops.append_callers(&stream, entries, CALLERS).await?);
        let shared = format!("our-coalesced-{round}");
        coalesced.push(ops.append_coalesced(&shared, entries, CALLERS).await?);
        raw.delete(&[&key, &stream, &shared])?;
    }
    report.throughput("append, 64 callers in flight", entries, &raw_times, &times);
    report.throughput("append, 64 callers through a coalescer", entries, &raw_times, &coalesced);

    let (mut raw_times, mut times) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        let key = format!("raw-consume-{round}");
        raw.append(&pipelines(&key, APPEND_BATCH), entries)?;
        raw.create_groups(&[&key], GROUP)?;
        raw_times.push(timed(|| raw.consume(&[&key], GROUP, READ_BATCH, entries))?);
        let stream = format!("our-consume-{round}");
        raw.append(&pipelines(&stream, APPEND_BATCH), entries)?;
        times.push(ops.consume(&stream, entries).await?);
        raw.delete(&[&key, &stream])?;
    }
    report.throughput("read + settle, batches of 256", entries, &raw_times, &times);
    Ok(())
}

async fn compare_with_redis(
    report: &mut BenchReport,
    embedded: &BackendOps,
    redis: &BackendOps,
    effort: Effort,
    entries: usize,
) -> Result<()> {
    let mut rows = [(); 3].map(|()| (Vec::new(), Vec::new()));
    for round in 0..effort.rounds {
        for (batch, callers, consume) in
            [(true, false, false), (false, true, false), (true, false, true)]
        {
            let stream = format!("equal-{round}-{batch}-{callers}-{consume}");
            for (ops, is_redis) in [(redis, true), (embedded, false)] {
                let mut took = if callers {
                    ops.append_callers(&stream, entries, CALLERS).await?
                } else {
                    ops.append_batches(&stream, entries, APPEND_BATCH).await?
                };
                if consume {
                    took = ops.consume(&stream, entries).await?;
                }
                ops.delete(&stream).await?;
                let row = &mut rows[usize::from(callers) + 2 * usize::from(consume)];
                if is_redis { row.0.push(took) } else { row.1.push(took) }
            }
        }
    }
    for (name, (raw_times, times)) in
        ["append, batches of 100", "append, 64 callers in flight", "read + settle, batches of 256"]
            .iter()
            .zip(&rows)
    {
        report.throughput(name, entries, raw_times, times);
    }
    Ok(())
}

/// The same work on a short and a long stream, without and with many pending entries.
async fn growth(
    report: &mut BenchReport,
    backend: &str,
    ops: &BackendOps,
    effort: Effort,
) -> Result<()> {
    let few = effort.many / 100;
    let mut took = Vec::new();
    for (stream, entries, pending) in [
        ("short", few, 0),
        ("long", effort.many, 0),
        ("pending", few + effort.pending, effort.pending),
    ] {
        ops.append_batches(stream, entries, 1_000).await?;
        ops.leave_pending(stream, pending).await?;
        ops.skip_to_end(stream).await?;
        took.push((stream, Vec::new(), Vec::new()));
    }
    let entries = effort.entries / 4;
    for _ in 0..effort.rounds {
        for (stream, appends, consumes) in &mut took {
            appends.push(ops.append_batches(stream, entries, APPEND_BATCH).await?);
            consumes.push(ops.consume(stream, entries).await?);
        }
    }
    let (_, append, consume) = &took[0];
    let (append, consume) = (median(append), median(consume));
    for (stream, appends, consumes) in &took[1..] {
        let size = if *stream == "long" {
            format!("{few} -> {} entries", effort.many)
        } else {
            format!("0 -> {} pending", effort.pending)
        };
        report.cost(&format!("{backend}: append, {size}"), append, median(appends));
        report.cost(&format!("{backend}: read + settle, {size}"), consume, median(consumes));
    }
    for (stream, ..) in took {
        ops.delete(stream).await?;
    }
    Ok(())
}

/// Pipelines of appends to one stream, with the same entries.
fn pipelines(key: &str, pipeline: usize) -> Pipelines {
    let payload = "x".repeat(PAYLOAD_BYTES);
    Pipelines::new(&[command(&["XADD", key, "*", "payload", &payload])], pipeline)
}

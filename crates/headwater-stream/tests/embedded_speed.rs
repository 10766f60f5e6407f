//! How fast the embedded backend is, and that its cost does not grow with what it holds.
//!
//! Run with `cargo test --release --test embedded_speed -- --ignored --nocapture --test-threads 1`.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_stream::*;

const ENTRY_BYTES: usize = 256;

fn stream(name: &str) -> StreamName {
    StreamName::new(name).unwrap()
}

fn entry() -> Fields {
    Fields::new([("data", vec![7u8; ENTRY_BYTES])])
}

async fn open(url: &str) -> Arc<dyn Backend> {
    connect(url, &Options::default()).await.unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap()
}

async fn append(backend: &dyn Backend, to: &StreamName, entries: usize) {
    for _ in 0..entries / 100 {
        let batch: Vec<Fields> = (0..100).map(|_| entry()).collect();
        backend.append(to, &batch, &Retention::KEEP_ALL).await.unwrap();
    }
}

/// Reads and settles in batches of 256; returns how many.
async fn consume(backend: &dyn Backend, from: &StreamName, entries: usize) -> usize {
    let group = GroupName::new("g").unwrap();
    let consumer = ConsumerName::new("c").unwrap();
    let mut reader = backend.reader(&group, &consumer).await.unwrap();
    let mut count = 0;
    while count < entries {
        let batches = reader.read(std::slice::from_ref(from), 256, Duration::ZERO).await.unwrap();
        let Some(batch) = batches.first() else { break };
        let settlements: Vec<Settlement> =
            batch.entries.iter().map(|entry| Settlement::done(entry.id)).collect();
        let settle = Settle {
            stream: from,
            group: &group,
            consumer: &consumer,
            fence: None,
            entries: &settlements,
        };
        count += backend.settle(settle).await.unwrap().applied;
    }
    count
}

fn per_second(count: usize, took: Duration) -> f64 {
    count as f64 / took.as_secs_f64()
}

#[test]
#[ignore = "measures"]
fn batched_appends_and_reads() {
    runtime().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let place =
            |mode: &str| format!("embedded:{}/{mode}?sync={mode}", directory.path().display());
        let urls = ["embedded:memory".to_owned(), place("interval"), place("always")];
        for url in &urls {
            let entries = if url.contains("always") { 100_000 } else { 1_000_000 };
            let backend = open(url).await;
            let begun = Instant::now();
            append(&*backend, &stream("s"), entries).await;
            let appended = per_second(entries, begun.elapsed());
            let begun = Instant::now();
            let count = consume(&*backend, &stream("s"), entries).await;
            let consumed = per_second(count, begun.elapsed());
            println!("{url}: append {appended:.0}/s, read and settle {consumed:.0}/s");
            let begun = Instant::now();
            backend.close().await.unwrap();
            let closed = begun.elapsed();
            if url.contains("sync") {
                let begun = Instant::now();
                let backend = open(url).await;
                println!("    closed in {closed:?}, opened in {:?}", begun.elapsed());
                backend.close().await.unwrap();
            }
        }
    });
}

#[test]
#[ignore = "measures"]
fn single_appends_by_many_callers() {
    runtime().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        for mode in ["always", "interval"] {
            for callers in [1, 8, 64] {
                let url =
                    format!("embedded:{}/{mode}-{callers}?sync={mode}", directory.path().display());
                let backend = open(&url).await;
                let begun = Instant::now();
                let tasks: Vec<_> = (0..callers)
                    .map(|_| {
                        let backend = Arc::clone(&backend);
                        tokio::spawn(async move {
                            let mut count = 0;
                            while begun.elapsed() < Duration::from_secs(3) {
                                let batch = [entry()];
                                backend
                                    .append(&stream("s"), &batch, &Retention::KEEP_ALL)
                                    .await
                                    .unwrap();
                                count += 1;
                            }
                            count
                        })
                    })
                    .collect();
                let mut count = 0;
                for task in tasks {
                    count += task.await.unwrap();
                }
                let rate = per_second(count, begun.elapsed());
                let facts = backend.describe().facts;
                let fact = |name| facts.iter().find(|(fact, _)| *fact == name).unwrap().1.clone();
                println!(
                    "{mode}, {callers} callers: {rate:.0}/s, {} syncs, {} writes",
                    fact("syncs"),
                    fact("writes")
                );
                backend.close().await.unwrap();
            }
        }
    });
}

/// The cost of a message when the stream holds `entries` and the group has `pending` in hand.
async fn cost(entries: usize, pending: usize) -> (Duration, Duration) {
    let backend = open("embedded:memory?max_bytes=4000000000").await;
    let s = stream("s");
    // One payload for all, and as many entries at the end as at the beginning: what is measured is the backend, not
    // the allocator.
    let batch = vec![entry(); 100];
    for _ in 0..entries / 100 {
        backend.append(&s, &batch, &Retention::KEEP_ALL).await.unwrap();
    }
    let group = GroupName::new("g").unwrap();
    let other = ConsumerName::new("other").unwrap();
    let start = match pending {
        0 => GroupStart::End,
        _ => GroupStart::Beginning,
    };
    backend.ensure_group(&s, &group, start).await.unwrap();
    let mut reader = backend.reader(&group, &other).await.unwrap();
    let mut taken = 0;
    while taken < pending {
        let count = (pending - taken).min(10_000);
        taken += reader.read(std::slice::from_ref(&s), count, Duration::ZERO).await.unwrap()[0]
            .entries
            .len();
    }
    if pending > 0 {
        // The rest is read and settled, so that only the asked for number is pending.
        consume(&*backend, &s, entries).await;
    }
    let (mut best_append, mut best_consume) = (Duration::MAX, Duration::MAX);
    let retention = Retention::max_len(entries as u64);
    for _ in 0..20 {
        let begun = Instant::now();
        for _ in 0..200 {
            backend.append(&s, &batch, &retention).await.unwrap();
        }
        best_append = best_append.min(begun.elapsed());
        let begun = Instant::now();
        assert_eq!(consume(&*backend, &s, 20_000).await, 20_000);
        best_consume = best_consume.min(begun.elapsed());
    }
    (best_append / 20_000, best_consume / 20_000)
}

#[test]
#[ignore = "measures"]
fn the_cost_of_a_message_does_not_grow_with_what_the_stream_holds() {
    runtime().block_on(async {
        let small = cost(10_000, 0).await;
        let large = cost(1_000_000, 0).await;
        let busy = cost(110_000, 100_000).await;
        println!("10 k entries {small:?}, 1 M entries {large:?}, 100 k pending {busy:?}");
        for (append, consume) in [large, busy] {
            assert!(append.as_secs_f64() <= small.0.as_secs_f64() * 1.25, "append");
            assert!(consume.as_secs_f64() <= small.1.as_secs_f64() * 1.25, "read and settle");
        }
    });
}

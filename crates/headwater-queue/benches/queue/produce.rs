//! Sending in batches and by concurrent callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use headwater_queue::{NewMessage, Producer};
use headwater_testkit::bench::{BenchReport, Raw, Request, timed};

use crate::raw::pipelines;
use crate::{BenchServer, Effort, PAYLOAD_BYTES};

/// Messages in one batch, and in one pipeline of the raw loop.
pub(crate) const BATCH: usize = 100;
/// Concurrent callers that send one message each, and the raw pipeline they are compared with.
const CALLERS: usize = 64;

/// The compared variants: part name, label, pipeline length of the raw loop.
const VARIANTS: [(&str, &str, usize); 2] =
    [("batches", "batches of 100", BATCH), ("callers", "64 callers", CALLERS)];

pub(crate) async fn compare(
    report: &mut BenchReport,
    server: &BenchServer,
    effort: &Effort,
    request: &Request,
) -> Result<()> {
    for partitions in effort.partitions {
        for (part, name, pipeline) in VARIANTS {
            if !request.wants("produce") && !request.wants(part) {
                continue;
            }
            let (mut theirs, mut mine) = (Vec::new(), Vec::new());
            let entries = effort.entries / pipeline * pipeline;
            for round in 0..effort.rounds {
                let raw_topic = server
                    .topic(&format!("raw-{partitions}-{pipeline}-{round}"), *partitions)
                    .await?;
                let pipelines = pipelines(&raw_topic, pipeline);
                let mut raw = Raw::connect(server.redis.addr())?;
                theirs.push(timed(|| raw.append(&pipelines, entries))?);
                let topic = server
                    .topic(&format!("our-{partitions}-{pipeline}-{round}"), *partitions)
                    .await?;
                mine.push(match pipeline {
                    BATCH => batches(&server.producer, &topic.name, entries).await?,
                    _ => callers(&server.producer, &topic.name, entries).await?,
                });
                server.delete(&raw_topic).await?;
                server.delete(&topic).await?;
            }
            let name = format!("produce, {partitions} partitions, {name}");
            report.throughput(&name, entries, &theirs, &mine);
        }
    }
    Ok(())
}

/// Sends batches, one after the other, from a spawned task, as an application does.
pub(crate) async fn batches(producer: &Producer, topic: &str, entries: usize) -> Result<Duration> {
    let (producer, topic, message) = (producer.clone(), topic.to_owned(), message());
    let sending = tokio::spawn(async move {
        let start = Instant::now();
        for _ in 0..entries / BATCH {
            for sent in producer.send_batch(&topic, vec![message.clone(); BATCH]).await? {
                sent?;
            }
        }
        anyhow::Ok(start.elapsed())
    });
    sending.await?
}

/// Concurrent callers, each of which sends one message after the other.
async fn callers(producer: &Producer, topic: &str, entries: usize) -> Result<Duration> {
    let left = Arc::new(AtomicUsize::new(entries));
    let start = Instant::now();
    let tasks: Vec<_> = (0..CALLERS)
        .map(|_| {
            let (producer, topic, left) = (producer.clone(), topic.to_owned(), left.clone());
            let message = message();
            tokio::spawn(async move {
                let take = |n: usize| n.checked_sub(1);
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                    producer.send(&topic, message.clone()).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok(start.elapsed())
}

fn message() -> NewMessage {
    NewMessage::new("x".repeat(PAYLOAD_BYTES))
}

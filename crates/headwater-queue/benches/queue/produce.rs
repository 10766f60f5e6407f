//! Sending, in batches and by many callers at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use headwater_queue::{NewMessage, Producer};
use headwater_testkit::bench::{Raw, Report, Request, timed};

use crate::raw::pipelines;
use crate::{Effort, PAYLOAD_BYTES, Place};

/// Messages in one batch, and in one pipeline of the raw loop.
pub(crate) const BATCH: usize = 100;
/// Callers that send one message each at the same time, and the pipeline they are compared with.
const CALLERS: usize = 64;

/// The ways to send that are compared: a part of the run, its name, and the pipeline of the raw loop.
const WAYS: [(&str, &str, usize); 2] =
    [("batches", "batches of 100", BATCH), ("callers", "64 callers", CALLERS)];

pub(crate) async fn compare(
    report: &mut Report,
    place: &Place,
    effort: &Effort,
    request: &Request,
) -> Result<()> {
    for partitions in effort.partitions {
        for (part, name, pipeline) in WAYS {
            if !request.wants("produce") && !request.wants(part) {
                continue;
            }
            let (mut theirs, mut mine) = (Vec::new(), Vec::new());
            let entries = effort.entries / pipeline * pipeline;
            for round in 0..effort.rounds {
                let raw_topic = place
                    .topic(&format!("raw-{partitions}-{pipeline}-{round}"), *partitions)
                    .await?;
                let pipelines = pipelines(&raw_topic, pipeline);
                let mut raw = Raw::connect(place.redis.addr())?;
                theirs.push(timed(|| raw.append(&pipelines, entries))?);
                let topic = place
                    .topic(&format!("our-{partitions}-{pipeline}-{round}"), *partitions)
                    .await?;
                mine.push(match pipeline {
                    BATCH => batches(&place.producer, &topic.name, entries).await?,
                    _ => callers(&place.producer, &topic.name, entries).await?,
                });
                place.delete(&raw_topic).await?;
                place.delete(&topic).await?;
            }
            let name = format!("produce, {partitions} partitions, {name}");
            report.throughput(&name, entries, &theirs, &mine);
        }
    }
    Ok(())
}

/// Sends batches, one after the other, from a task like those of an application.
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

/// Many callers, each sends one message after the other.
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

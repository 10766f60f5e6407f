//! Back-pressure: a topic that holds more bytes than it may takes no more until its consumers catch up.
//!
//! Upstream: every send to a topic with a byte budget. Downstream: the sizes of its streams.
//! Promises: sizes are asked for by one caller at a time and not more often than every [`SAMPLE_EVERY`]; meanwhile what
//! this producer sent is added. Only messages that every group is done with are removed to make room, and never from a
//! partition that has no group: it may be about to get one. A send that is refused has no effect.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use headwater_stream::{Retention, StreamName, StreamStats, TrimGuard, Trimmed};
use tokio::time::Instant;
use tracing::warn;

use crate::error::{QueueError, Result};
use crate::keys;
use crate::queue::Queue;
use crate::topic::{Partition, Topic};

/// How old a size may be before it is asked for again.
const SAMPLE_EVERY: Duration = Duration::from_millis(200);
/// Asking for sizes takes at most one part in this many of the time.
const SAMPLE_SHARE: u32 = 20;
/// How old a size may be before a send waits for a new one.
const SAMPLE_AGE_MAX: Duration = Duration::from_secs(2);
/// Partitions asked at once.
const CONCURRENT_MAX: usize = 64;
/// How full the topic is after room was made, in parts of its budget: not so full that it has to be made at once again.
const FILL_AFTER_TRIM: f64 = 0.75;

/// What a topic may hold and how much of it is used.
pub(super) struct Budget {
    limit: u64,
    sample: Mutex<Option<Sample>>,
    /// Bytes sent from here since the sample was taken.
    sent_since: AtomicU64,
    sampling: tokio::sync::Mutex<()>,
}

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    bytes: u64,
    /// When the next one is due.
    next_at: Instant,
}

impl Budget {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit,
            sample: Mutex::default(),
            sent_since: AtomicU64::new(0),
            sampling: tokio::sync::Mutex::default(),
        }
    }

    /// Lets these bytes in, or says when to try again.
    pub(super) async fn admit(&self, queue: &Queue, topic: &Topic, bytes: usize) -> Result<()> {
        let sample = self.recent_sample(queue, topic).await?;
        let used = sample.bytes.saturating_add(self.sent_since.load(Ordering::Relaxed));
        if used >= self.limit {
            let now = Instant::now();
            return Err(QueueError::Backlogged {
                topic: topic.name.to_string(),
                bytes: used,
                budget: self.limit,
                retry_after: sample.next_at.saturating_duration_since(now).max(SAMPLE_EVERY / 10),
            });
        }
        self.sent_since.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    async fn recent_sample(&self, queue: &Queue, topic: &Topic) -> Result<Sample> {
        let known = *self.lock();
        let now = Instant::now();
        if let Some(sample) = known.filter(|sample| now < sample.next_at) {
            return Ok(sample);
        }
        let _sampling = match (self.sampling.try_lock(), known) {
            (Ok(sampling), _) => sampling,
            // Somebody asks already, and what is known will do until they are back.
            (Err(_), Some(sample)) if now < sample.at + SAMPLE_AGE_MAX => return Ok(sample),
            (Err(_), _) => self.sampling.lock().await,
        };
        let newer = *self.lock();
        if let Some(sample) = newer.filter(|sample| Instant::now() < sample.next_at) {
            return Ok(sample);
        }
        let at = Instant::now();
        let sent_before = self.sent_since.load(Ordering::Relaxed);
        let bytes = self.measure(queue, topic).await?;
        let wait = SAMPLE_EVERY.max(at.elapsed() * SAMPLE_SHARE);
        let sample = Sample { at, bytes, next_at: Instant::now() + wait };
        *self.lock() = Some(sample);
        // What was sent while the question was under way may be counted twice, until the next sample.
        self.sent_since.fetch_sub(sent_before, Ordering::Relaxed);
        Ok(sample)
    }

    /// The bytes that the topic holds, after room was made if there was need.
    async fn measure(&self, queue: &Queue, topic: &Topic) -> Result<u64> {
        let sizes = sizes(queue, topic).await?;
        let total = total(&sizes);
        if total < self.limit {
            return Ok(total);
        }
        let part = self.limit as f64 * FILL_AFTER_TRIM / total as f64;
        let to_trim: Vec<(StreamName, u64)> = sizes
            .iter()
            .filter(|size| size.has_group)
            .map(|size| (keys::stream(topic, size.partition), (size.bytes as f64 * part) as u64))
            .collect();
        let trims = to_trim.into_iter().map(|(stream, bytes)| async move {
            let retention = Retention { max_bytes: Some(bytes.max(1)), ..Retention::KEEP_ALL };
            queue.backend().trim(&stream, &retention, TrimGuard::Safe).await
        });
        let trimmed: Vec<Trimmed> =
            stream::iter(trims).buffer_unordered(CONCURRENT_MAX).try_collect().await?;
        if trimmed.iter().all(|trimmed| trimmed.removed == 0) {
            return Ok(total);
        }
        Ok(self::total(&self::sizes(queue, topic).await?))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Sample>> {
        self.sample.lock().expect("no code panics while it holds the sample")
    }
}

/// How much a partition holds.
struct Size {
    partition: Partition,
    bytes: u64,
    has_group: bool,
}

fn total(sizes: &[Size]) -> u64 {
    sizes.iter().map(|size| size.bytes).sum()
}

async fn sizes(queue: &Queue, topic: &Topic) -> Result<Vec<Size>> {
    let sizes = (0..topic.partitions).map(|partition| {
        let stream = keys::stream(topic, partition);
        async move {
            let stats = queue.backend().stats(&stream).await?;
            Ok(stats.map_or(Size { partition, bytes: 0, has_group: false }, |stats| {
                size(topic, partition, &stats)
            }))
        }
    });
    stream::iter(sizes).buffer_unordered(CONCURRENT_MAX).try_collect().await
}

fn size(topic: &Topic, partition: Partition, stats: &StreamStats) -> Size {
    if stats.bytes.is_none() {
        let topic = &topic.name;
        warn!(%topic, partition, "the backend does not tell sizes, the byte budget is not kept");
    }
    let bytes = stats.bytes.unwrap_or(0);
    Size { partition, bytes, has_group: !stats.groups.is_empty() }
}

//! Backpressure: a topic over its byte budget accepts no messages until its consumers catch up.
//!
//! Upstream: every send to a topic with a byte budget. Downstream: the sizes of its streams.
//! Guarantees: sizes are measured by one caller at a time, at most every [`SAMPLE_EVERY`]; in between, the bytes that
//! this producer sent are added. To make room, only messages that every group has finished are trimmed, and never from
//! a partition without a group, which may be about to get one. A rejected send has no effect.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use headwater_stream::{Retention, StreamName, StreamStats, TrimGuard, TrimResult};
use tokio::time::Instant;
use tracing::warn;

use crate::error::{QueueError, Result};
use crate::keys;
use crate::queue::Queue;
use crate::topic::{Partition, Topic};

/// Minimum time between two measurements.
const SAMPLE_EVERY: Duration = Duration::from_millis(200);
/// Measuring takes at most one part in this many of the time.
const SAMPLE_SHARE: u32 = 20;
/// Above this age of the last measurement, a send waits for a new one.
const SAMPLE_AGE_MAX: Duration = Duration::from_secs(2);
/// Partitions measured concurrently.
const CONCURRENT_MAX: usize = 64;
/// The share of the budget that is used after trimming: low enough not to trim again at once.
const FILL_AFTER_TRIM: f64 = 0.75;

/// The byte budget of a topic and how much of it is used.
pub(super) struct ByteBudget {
    limit: u64,
    sample: Mutex<Option<BudgetSample>>,
    /// Bytes sent by this producer since the sample was taken.
    sent_since: AtomicU64,
    sampling: tokio::sync::Mutex<()>,
}

#[derive(Clone, Copy)]
struct BudgetSample {
    at: Instant,
    bytes: u64,
    /// When the next sample is due.
    next_at: Instant,
}

impl ByteBudget {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit,
            sample: Mutex::default(),
            sent_since: AtomicU64::new(0),
            sampling: tokio::sync::Mutex::default(),
        }
    }

    /// Adds these bytes to the usage, or fails with [`QueueError::BudgetExceeded`].
    pub(super) async fn reserve(&self, queue: &Queue, topic: &Topic, bytes: usize) -> Result<()> {
        let sample = self.recent_sample(queue, topic).await?;
        let used = sample.bytes.saturating_add(self.sent_since.load(Ordering::Relaxed));
        if used >= self.limit {
            let now = Instant::now();
            return Err(QueueError::BudgetExceeded {
                topic: topic.name.to_string(),
                bytes: used,
                budget: self.limit,
                retry_after: sample.next_at.saturating_duration_since(now).max(SAMPLE_EVERY / 10),
            });
        }
        self.sent_since.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    async fn recent_sample(&self, queue: &Queue, topic: &Topic) -> Result<BudgetSample> {
        let known = *self.lock();
        let now = Instant::now();
        if let Some(sample) = known.filter(|sample| now < sample.next_at) {
            return Ok(sample);
        }
        let _sampling = match (self.sampling.try_lock(), known) {
            (Ok(sampling), _) => sampling,
            // Another caller is measuring, and the last sample is recent enough.
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
        let sample = BudgetSample { at, bytes, next_at: Instant::now() + wait };
        *self.lock() = Some(sample);
        // Bytes sent during the measurement may be counted twice until the next sample.
        self.sent_since.fetch_sub(sent_before, Ordering::Relaxed);
        Ok(sample)
    }

    /// The bytes that the topic holds, after trimming if the budget is exceeded.
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
        let trimmed: Vec<TrimResult> =
            stream::iter(trims).buffer_unordered(CONCURRENT_MAX).try_collect().await?;
        if trimmed.iter().all(|trimmed| trimmed.removed == 0) {
            return Ok(total);
        }
        Ok(self::total(&self::sizes(queue, topic).await?))
    }

    fn lock(&self) -> MutexGuard<'_, Option<BudgetSample>> {
        self.sample.lock().expect("no code panics while it holds the sample")
    }
}

struct PartitionSize {
    partition: Partition,
    bytes: u64,
    has_group: bool,
}

fn total(sizes: &[PartitionSize]) -> u64 {
    sizes.iter().map(|size| size.bytes).sum()
}

async fn sizes(queue: &Queue, topic: &Topic) -> Result<Vec<PartitionSize>> {
    let sizes = (0..topic.partitions).map(|partition| {
        let stream = keys::stream(topic, partition);
        async move {
            let stats = queue.backend().stats_without_lag(&stream).await?;
            Ok(stats.map_or(PartitionSize { partition, bytes: 0, has_group: false }, |stats| {
                size(topic, partition, &stats)
            }))
        }
    });
    stream::iter(sizes).buffer_unordered(CONCURRENT_MAX).try_collect().await
}

fn size(topic: &Topic, partition: Partition, stats: &StreamStats) -> PartitionSize {
    if stats.bytes.is_none() {
        let topic = &topic.name;
        warn!(%topic, partition, "the backend does not report sizes; the byte budget is not enforced");
    }
    let bytes = stats.bytes.unwrap_or(0);
    PartitionSize { partition, bytes, has_group: !stats.groups.is_empty() }
}

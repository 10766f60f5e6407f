//! The benchmarked operations, through a backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use headwater_stream::{
    Backend, Coalescer, CoalescerConfig, ConsumerName, Fields, GroupName, GroupStart, Range,
    Retention, SettleBatch, Settlement, StreamName,
};

use crate::{GROUP, PAYLOAD_BYTES, READ_BATCH};

pub(crate) struct BackendOps {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) group: GroupName,
    consumer: ConsumerName,
}

impl BackendOps {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        let group = GroupName::new(GROUP).expect("a valid name");
        let consumer = ConsumerName::new("ours").expect("a valid name");
        Self { backend, group, consumer }
    }

    pub(crate) async fn append_batches(
        &self,
        stream: &str,
        entries: usize,
        batch: usize,
    ) -> Result<Duration> {
        let stream = StreamName::new(stream)?;
        let fields = vec![payload(); batch];
        let start = Instant::now();
        for _ in 0..entries / batch {
            self.backend.append(&stream, &fields, &Retention::KEEP_ALL).await?;
        }
        Ok(start.elapsed())
    }

    /// Concurrent callers, each appending one entry at a time.
    pub(crate) async fn append_callers(
        &self,
        stream: &str,
        entries: usize,
        callers: usize,
    ) -> Result<Duration> {
        let stream = StreamName::new(stream)?;
        let left = Arc::new(AtomicUsize::new(entries));
        let start = Instant::now();
        let tasks: Vec<_> = (0..callers)
            .map(|_| {
                let (backend, stream, left) = (self.backend.clone(), stream.clone(), left.clone());
                let one = [payload()];
                tokio::spawn(async move {
                    let take = |n: usize| n.checked_sub(1);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                        backend.append(&stream, &one, &Retention::KEEP_ALL).await?;
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

    /// The same through a coalescer, as the queue does it.
    pub(crate) async fn append_coalesced(
        &self,
        stream: &str,
        entries: usize,
        callers: usize,
    ) -> Result<Duration> {
        let (stream, backend) = (StreamName::new(stream)?, self.backend.clone());
        let config = CoalescerConfig { in_flight_max: 2, ..CoalescerConfig::default() };
        let coalescer = Coalescer::new(config, move |batch: Vec<Fields>| {
            let (stream, backend) = (stream.clone(), backend.clone());
            async move {
                let ids = backend.append(&stream, &batch, &Retention::KEEP_ALL).await;
                ids.unwrap_or_default()
            }
        })?;
        let coalescer = Arc::new(coalescer);
        let left = Arc::new(AtomicUsize::new(entries));
        let start = Instant::now();
        let tasks: Vec<_> = (0..callers)
            .map(|_| {
                let (coalescer, left, one) = (coalescer.clone(), left.clone(), payload());
                tokio::spawn(async move {
                    let take = |n: usize| n.checked_sub(1);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                        coalescer.call_with_size(one.clone(), PAYLOAD_BYTES).await?;
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

    /// Reads and settles `entries` in batches of [`READ_BATCH`].
    pub(crate) async fn consume(&self, stream: &str, entries: usize) -> Result<Duration> {
        let stream = [StreamName::new(stream)?];
        self.backend.ensure_group(&stream[0], &self.group, GroupStart::Beginning).await?;
        let mut reader = self.backend.reader(&self.group, &self.consumer).await?;
        let start = Instant::now();
        let mut seen = 0;
        while seen < entries {
            let batches = reader.read(&stream, READ_BATCH, Duration::ZERO).await?;
            ensure!(!batches.is_empty(), "entries are missing: {seen} of {entries}");
            for batch in batches {
                let done: Vec<_> =
                    batch.entries.iter().map(|entry| Settlement::ack(entry.id)).collect();
                let settled = self.backend.settle(self.settle(&stream[0], &done)).await?;
                ensure!(settled.stale == 0, "entries were stale");
                seen += done.len();
            }
        }
        Ok(start.elapsed())
    }

    /// Delivers entries to a consumer that never settles them.
    pub(crate) async fn leave_pending(&self, stream: &str, pending: usize) -> Result<()> {
        let stream = [StreamName::new(stream)?];
        self.backend.ensure_group(&stream[0], &self.group, GroupStart::Beginning).await?;
        let sleeper = ConsumerName::new("sleeper")?;
        let mut reader = self.backend.reader(&self.group, &sleeper).await?;
        let mut seen = 0;
        while seen < pending {
            let count = (pending - seen).min(1_000);
            let batches = reader.read(&stream, count, Duration::ZERO).await?;
            ensure!(!batches.is_empty(), "entries are missing: {seen} of {pending}");
            seen += batches.iter().map(|batch| batch.entries.len()).sum::<usize>();
        }
        Ok(())
    }

    /// Reads and settles all entries that the group has not read yet.
    pub(crate) async fn skip_to_end(&self, stream: &str) -> Result<()> {
        let name = StreamName::new(stream)?;
        let stats = self.backend.stats(&name).await?;
        let lag = stats.and_then(|stats| stats.groups.first().and_then(|group| group.lag));
        let newest = self.backend.range(&name, Range::last(1)).await?;
        ensure!(newest.len() == 1, "the stream is empty");
        if let Some(lag @ 1..) = lag {
            self.consume(stream, usize::try_from(lag)?).await?;
        }
        Ok(())
    }

    pub(crate) fn settle<'a>(
        &'a self,
        stream: &'a StreamName,
        entries: &'a [Settlement],
    ) -> SettleBatch<'a> {
        SettleBatch { stream, group: &self.group, consumer: &self.consumer, fence: None, entries }
    }

    pub(crate) async fn delete(&self, stream: &str) -> Result<()> {
        self.backend.delete_stream(&StreamName::new(stream)?).await?;
        Ok(())
    }

    pub(crate) fn consumer(&self) -> &ConsumerName {
        &self.consumer
    }
}

fn payload() -> Fields {
    Fields::new([("payload", "x".repeat(PAYLOAD_BYTES))])
}

//! Readers that continue after a failed read and recover entries delivered to it.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::limits::COUNT_MAX;
use headwater_stream::*;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{GIVE_UP_AFTER, PAUSE, Retrying};

/// By then the server has executed a request whose reply was lost.
const REPLY_LOST_WINDOW: Duration = Duration::from_secs(1);

/// A group reader that returns every delivered entry once, including those of failed reads.
pub(super) struct RetryingReader {
    inner: Box<dyn GroupReader>,
    seen: SeenEntries,
    /// The search for undelivered entries; it survives a dropped read.
    search: Option<JoinHandle<Result<Vec<StreamBatch<DeliveredEntry>>>>>,
    last_failure: Option<Instant>,
}

/// The entries a consumer has seen, to find the ones delivered but not returned.
#[derive(Clone)]
struct SeenEntries {
    backend: Retrying,
    group: GroupName,
    consumer: ConsumerName,
    streams: Vec<StreamName>,
    ids: HashSet<(StreamName, EntryId)>,
    has_failed: bool,
}

impl RetryingReader {
    pub(super) fn new(
        backend: Retrying,
        inner: Box<dyn GroupReader>,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Self {
        let seen = SeenEntries {
            backend,
            group: group.clone(),
            consumer: consumer.clone(),
            streams: Vec::new(),
            ids: HashSet::new(),
            has_failed: false,
        };
        Self { inner, seen, search: None, last_failure: None }
    }

    fn failed(&mut self) {
        self.last_failure = Some(Instant::now());
        self.seen.has_failed = true;
    }

    /// Whether a request whose reply was lost may still be in flight.
    fn may_have_lost_reply(&self) -> bool {
        self.last_failure.is_some_and(|at| at.elapsed() < REPLY_LOST_WINDOW)
    }

    /// Entries pending for this consumer that were never returned. Cancel-safe.
    async fn find_missed(&mut self, count: usize) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        let search = self.search.get_or_insert_with(|| {
            let seen = self.seen.clone();
            tokio::spawn(async move { seen.missed(count).await })
        });
        let found = search.await;
        self.search = None;
        Ok(self.seen.show(found.expect("a search does not panic")?))
    }
}

impl SeenEntries {
    async fn missed(&self, count: usize) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        let mut batches = Vec::new();
        for stream in &self.streams {
            let query = PendingDeliveryQuery {
                stream,
                group: &self.group,
                consumer: Some(&self.consumer),
                min_idle: Duration::ZERO,
                after: None,
                count: COUNT_MAX,
            };
            let pending = match self.backend.pending(query).await {
                Err(StreamError::NoGroup { .. }) => continue,
                answer => answer?,
            };
            let mut entries = Vec::new();
            for PendingDelivery { id, deliveries, .. } in pending {
                if entries.len() < count && !self.ids.contains(&(stream.clone(), id)) {
                    let range = Range { from: id, to: id, ..Range::first(1) };
                    let found = self.backend.range(stream, range).await?.into_iter();
                    entries.extend(found.map(|e| DeliveredEntry {
                        id,
                        fields: e.fields,
                        deliveries,
                    }));
                }
            }
            if !entries.is_empty() {
                batches.push(StreamBatch { stream: stream.clone(), entries });
            }
        }
        Ok(batches)
    }

    /// Filters entries returned before: a dropped read may return what the list of pending entries already did.
    fn show(
        &mut self,
        batches: Vec<StreamBatch<DeliveredEntry>>,
    ) -> Vec<StreamBatch<DeliveredEntry>> {
        let mut fresh = Vec::new();
        for StreamBatch { stream, mut entries } in batches {
            // Without a failure, a repeated entry was redelivered.
            entries.retain(|entry| self.ids.insert((stream.clone(), entry.id)) || !self.has_failed);
            if !entries.is_empty() {
                fresh.push(StreamBatch { stream, entries });
            }
        }
        fresh
    }
}

#[async_trait]
impl GroupReader for RetryingReader {
    fn require_groups(&mut self) {
        self.inner.require_groups();
    }

    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        let started = Instant::now();
        self.seen.streams = streams.to_vec();
        (self.seen.backend.before)();
        loop {
            // Before new entries, to preserve order.
            if self.may_have_lost_reply() || self.search.is_some() {
                let found = self.find_missed(count).await?;
                if !found.is_empty() {
                    return Ok(found);
                }
            }
            match self.inner.read(streams, count, wait).await {
                Ok(batches) if batches.is_empty() => {
                    if !self.may_have_lost_reply() || started.elapsed() > wait + REPLY_LOST_WINDOW {
                        return Ok(batches);
                    }
                }
                Ok(batches) => {
                    let fresh = self.seen.show(batches);
                    if !fresh.is_empty() {
                        return Ok(fresh);
                    }
                }
                Err(StreamError::Unavailable { .. }) if started.elapsed() < GIVE_UP_AFTER => {
                    self.failed();
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        let mut left = match self.search.take() {
            Some(search) => search.await.expect("a search does not panic")?,
            None => Vec::new(),
        };
        match self.inner.close().await {
            Ok(fetched) => left.extend(fetched),
            Err(StreamError::Unavailable { .. }) => {
                self.seen.has_failed = true;
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error),
        }
        let mut left = self.seen.show(left);
        if self.seen.has_failed {
            let missed = self.seen.missed(COUNT_MAX).await?;
            left.extend(self.seen.show(missed));
        }
        Ok(left)
    }
}

/// A tail reader that retries.
pub(super) struct RetryingTail {
    backend: Retrying,
    inner: Box<dyn TailReader>,
}

impl RetryingTail {
    pub(super) fn new(backend: Retrying, inner: Box<dyn TailReader>) -> Self {
        Self { backend, inner }
    }
}

#[async_trait]
impl TailReader for RetryingTail {
    async fn read(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<Entry>>> {
        let started = Instant::now();
        (self.backend.before)();
        loop {
            match self.inner.read(positions, count, wait).await {
                Err(StreamError::Unavailable { .. }) if started.elapsed() < GIVE_UP_AFTER => {
                    tokio::time::sleep(PAUSE).await;
                }
                answer => return answer,
            }
        }
    }
}

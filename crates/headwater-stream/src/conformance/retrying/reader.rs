//! Readers that go on after a failed read, and find what that read was given and never showed.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::{GIVE_UP_AFTER, PAUSE, Retrying};
use crate::limits::COUNT_MAX;
use crate::*;

/// A request whose reply was lost has happened on the server by then.
const SUSPICION: Duration = Duration::from_secs(1);

/// A group reader that shows every entry it was given once, also those of failed reads.
pub(super) struct RetryingReader {
    inner: Box<dyn GroupReader>,
    streams: Vec<StreamName>,
    shown: Shown,
}

/// What a consumer has seen, to tell it from what it was given.
struct Shown {
    backend: Retrying,
    group: GroupName,
    consumer: ConsumerName,
    ids: HashSet<(StreamName, EntryId)>,
    failed_at: Option<Instant>,
}

impl RetryingReader {
    pub(super) fn new(
        backend: Retrying,
        inner: Box<dyn GroupReader>,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Self {
        let (group, consumer) = (group.clone(), consumer.clone());
        let shown = Shown { backend, group, consumer, ids: HashSet::new(), failed_at: None };
        Self { inner, streams: Vec::new(), shown }
    }
}

impl Shown {
    /// What is pending for this consumer and was never shown.
    async fn others(&self, streams: &[StreamName], count: usize) -> Result<Vec<Batch<Delivery>>> {
        let mut batches = Vec::new();
        for stream in streams {
            let query = PendingQuery {
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
            for Pending { id, deliveries, .. } in pending {
                if entries.len() < count && !self.ids.contains(&(stream.clone(), id)) {
                    let range = Range { from: id, to: id, ..Range::first(1) };
                    let found = self.backend.range(stream, range).await?.into_iter();
                    entries.extend(found.map(|e| Delivery { id, fields: e.fields, deliveries }));
                }
            }
            if !entries.is_empty() {
                batches.push(Batch { stream: stream.clone(), entries });
            }
        }
        Ok(batches)
    }

    /// Leaves out what was shown before: a dropped read may bring what the list of pending entries brought already.
    fn show(&mut self, batches: Vec<Batch<Delivery>>) -> Vec<Batch<Delivery>> {
        let mut fresh = Vec::new();
        for Batch { stream, mut entries } in batches {
            // Without a failure, an entry that comes again was delivered again.
            entries.retain(|entry| {
                self.ids.insert((stream.clone(), entry.id)) || self.failed_at.is_none()
            });
            if !entries.is_empty() {
                fresh.push(Batch { stream, entries });
            }
        }
        fresh
    }
}

#[async_trait]
impl GroupReader for RetryingReader {
    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<Batch<Delivery>>> {
        let started = Instant::now();
        self.streams = streams.to_vec();
        (self.shown.backend.before)();
        loop {
            // Before new entries, so that order is kept.
            if self.shown.failed_at.is_some() {
                let found = self.shown.others(streams, count).await?;
                if !found.is_empty() {
                    return Ok(self.shown.show(found));
                }
            }
            match self.inner.read(streams, count, wait).await {
                Ok(batches) if batches.is_empty() => {
                    let failed_at = self.shown.failed_at;
                    let suspicious = failed_at.is_some_and(|at| at.elapsed() < SUSPICION);
                    if !suspicious || started.elapsed() > wait + SUSPICION {
                        return Ok(batches);
                    }
                }
                Ok(batches) => {
                    let fresh = self.shown.show(batches);
                    if !fresh.is_empty() {
                        return Ok(fresh);
                    }
                }
                Err(StreamError::Unavailable { .. }) if started.elapsed() < GIVE_UP_AFTER => {
                    self.shown.failed_at = Some(Instant::now());
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn close(self: Box<Self>) -> Result<Vec<Batch<Delivery>>> {
        let Self { inner, streams, mut shown } = *self;
        let mut left = match inner.close().await {
            Err(StreamError::Unavailable { .. }) => {
                shown.failed_at = Some(Instant::now());
                tokio::time::sleep(PAUSE).await;
                Vec::new()
            }
            answer => answer?,
        };
        if shown.failed_at.is_some() {
            left.extend(shown.others(&streams, COUNT_MAX).await?);
        }
        Ok(shown.show(left))
    }
}

/// A tail reader that asks again.
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
    ) -> Result<Vec<Batch<Entry>>> {
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

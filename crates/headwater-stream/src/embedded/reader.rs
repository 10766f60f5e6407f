//! Group reads, and tail reads without a consumer group.
//!
//! Guarantees: the next append wakes a blocked read, without polling. A reader buffers delivered entries
//! until a read returns them, so dropping a read loses nothing.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::engine::{Engine, EngineShared};
use super::redo_record::RedoRecord;
use super::transaction::Tx;
use super::waiters::BlockedRead;
use crate::entry::{DeliveredEntry, Entry, EntryId};
use crate::error::{Result, StreamError};
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{GroupReader, StreamBatch, TailReader};
use crate::validate;

/// Reads new entries for one consumer of a group.
pub(super) struct EmbeddedGroupReader {
    engine: Arc<Engine>,
    group: GroupName,
    consumer: ConsumerName,
    /// Whether a missing group fails a read instead of being created.
    is_required: bool,
    woken: Arc<Notify>,
    /// Delivered entries that no read has returned yet.
    buffered: BufferedDeliveries,
}

/// Deliveries that no read has returned yet.
#[derive(Default)]
struct BufferedDeliveries {
    batches: Vec<StreamBatch<DeliveredEntry>>,
    /// Commit of the deliveries; must be written before they are returned.
    written: u64,
    /// Commit of the newest entry; must be durable before it is returned.
    durable: u64,
}

impl EmbeddedGroupReader {
    pub(super) fn new(engine: Arc<Engine>, group: &GroupName, consumer: &ConsumerName) -> Self {
        let (group, consumer) = (group.clone(), consumer.clone());
        Self {
            engine,
            group,
            consumer,
            is_required: false,
            woken: Arc::default(),
            buffered: BufferedDeliveries::default(),
        }
    }

    /// Returns the buffered deliveries once they cannot be lost.
    async fn return_buffered(&mut self) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        self.engine.shared.wait(self.buffered.written, self.buffered.durable).await?;
        Ok(std::mem::take(&mut self.buffered).batches)
    }
}

#[async_trait]
impl GroupReader for EmbeddedGroupReader {
    fn require_groups(&mut self) {
        self.is_required = true;
    }

    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        validate::read(streams, count, wait)?;
        if !self.buffered.batches.is_empty() {
            return self.return_buffered().await;
        }
        let shared = &self.engine.shared;
        let (group, consumer, woken) = (&self.group, &self.consumer, &self.woken);
        let is_required = self.is_required;
        let buffered = &mut self.buffered;
        let mut blocked: Option<Arc<BlockedRead>> = None;
        let deliver = |tx: &mut Tx<'_>| {
            if blocked.as_ref().is_some_and(|blocked| blocked.is_cancelled()) {
                return Err(read_cancelled());
            }
            deliver_new(tx, streams, group, consumer, is_required, count, buffered)?;
            if !buffered.batches.is_empty() {
                return Ok(ControlFlow::Break(()));
            }
            blocked.get_or_insert_with(|| tx.blocked_reads().add(group, consumer, woken));
            Ok(ControlFlow::Continue(None))
        };
        match wait_for_change(shared, streams, woken, wait, deliver).await? {
            Some(()) => self.return_buffered().await,
            None => Ok(Vec::new()),
        }
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<StreamBatch<DeliveredEntry>>> {
        self.return_buffered().await
    }
}

fn read_cancelled() -> StreamError {
    let problem = "the reads of this consumer were disconnected by another process".to_owned();
    StreamError::Unavailable { problem, source: None }
}

/// Delivers up to `count` new entries of each stream into `buffered`.
fn deliver_new(
    tx: &mut Tx<'_>,
    streams: &[StreamName],
    group: &GroupName,
    consumer: &ConsumerName,
    is_required: bool,
    count: usize,
    buffered: &mut BufferedDeliveries,
) -> Result<()> {
    // Check all names first, so that a wrong type or a missing group fails the read before anything is delivered.
    for name in streams {
        let found = tx.state().stream(name.as_str(), tx.now)?;
        let is_missing = found.is_none_or(|found| !found.groups.contains_key(group.as_str()));
        if is_missing && is_required {
            let (stream, group) = (name.to_string(), group.to_string());
            return Err(StreamError::NoGroup { stream, group });
        }
    }
    let at = tx.now;
    for name in streams {
        let (stream, group, consumer) = (name.as_str(), group.as_str(), consumer.as_str());
        let found = tx.state().stream(stream, tx.now)?;
        if found.is_none_or(|found| !found.groups.contains_key(group)) {
            tx.remove_expired(stream);
            tx.apply(&RedoRecord::CreateGroup { stream, group, after: EntryId::MIN });
        }
        let Some(found) = tx.state().stream(stream, tx.now)? else { continue };
        let Some(known) = found.groups.get(group) else { continue };
        let entries: Vec<DeliveredEntry> = found
            .entries
            .after(known.last_delivered)
            .take(count)
            .map(|(id, fields)| DeliveredEntry { id: *id, fields: fields.clone(), deliveries: 1 })
            .collect();
        match entries.last().map(|entry| entry.id) {
            Some(through) => {
                buffered.durable = buffered.durable.max(found.commit_of(through));
                tx.apply(&RedoRecord::Deliver { stream, group, consumer, through, at });
                buffered.batches.push(StreamBatch { stream: name.clone(), entries });
            }
            // As on Redis 7.0, a consumer is created with its first entry.
            None => tx.touch(stream, group, consumer),
        }
    }
    buffered.written = tx.commit_number();
    Ok(())
}

/// Reads entries after given positions.
pub(super) struct EmbeddedTailReader {
    engine: Arc<Engine>,
    woken: Arc<Notify>,
}

impl EmbeddedTailReader {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, woken: Arc::default() }
    }
}

#[async_trait]
impl TailReader for EmbeddedTailReader {
    async fn read(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<StreamBatch<Entry>>> {
        let streams: Vec<StreamName> = positions.iter().map(|(name, _)| name.clone()).collect();
        validate::read(&streams, count, wait)?;
        let shared = &self.engine.shared;
        let find = |tx: &mut Tx<'_>| {
            let (batches, durable) = entries_after(tx, positions, count)?;
            Ok(match batches.is_empty() {
                true => ControlFlow::Continue(None),
                false => ControlFlow::Break((batches, durable)),
            })
        };
        let found = wait_for_change(shared, &streams, &self.woken, wait, find).await?;
        let (batches, durable) = found.unwrap_or_default();
        shared.wait(0, durable).await?;
        Ok(batches)
    }
}

/// The entries after each position, and the commit that must be durable before they are returned.
fn entries_after(
    tx: &Tx<'_>,
    positions: &[(StreamName, EntryId)],
    count: usize,
) -> Result<(Vec<StreamBatch<Entry>>, u64)> {
    let (mut batches, mut durable) = (Vec::new(), 0);
    for (name, position) in positions {
        let Some(found) = tx.state().stream(name.as_str(), tx.now)? else { continue };
        let after = found.entries.after(*position).take(count);
        let entries: Vec<Entry> =
            after.map(|(id, fields)| Entry { id: *id, fields: fields.clone() }).collect();
        if let Some(newest) = entries.last() {
            durable = durable.max(found.commit_of(newest.id));
            batches.push(StreamBatch { stream: name.clone(), entries });
        }
    }
    Ok((batches, durable))
}

/// Attempts a call at once and after each change under one of these names, until it breaks with a value or `wait` is
/// over. If it continues with a duration, it is attempted again after that time, too.
pub(super) async fn wait_for_change<T>(
    shared: &EngineShared,
    names: &[impl AsRef<str>],
    woken: &Arc<Notify>,
    wait: Duration,
    mut attempt: impl FnMut(&mut Tx<'_>) -> Result<ControlFlow<T, Option<Duration>>>,
) -> Result<Option<T>> {
    let mut time_out = std::pin::pin!(shared.clock.sleep(wait));
    let mut registration = None;
    let mut is_over = wait.is_zero();
    loop {
        let step = shared.transact_without_wait(|tx| {
            let step = attempt(tx)?;
            // Under the lock, so that no later change is missed.
            if step.is_continue() && registration.is_none() {
                names.iter().for_each(|name| tx.name_waiters().add(name.as_ref(), woken));
                registration = Some(WaitRegistration { shared, names, woken });
            }
            Ok(step)
        })?;
        let again_after = match step {
            ControlFlow::Break(value) => return Ok(Some(value)),
            ControlFlow::Continue(_) if is_over => return Ok(None),
            ControlFlow::Continue(again_after) => again_after,
        };
        let again = async {
            match again_after {
                Some(duration) => shared.clock.sleep(duration).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = woken.notified() => {}
            () = again => {}
            // Attempt once more, to return what arrived at the last moment.
            () = &mut time_out => is_over = true,
        }
    }
}

/// Registration of a task that waits on names; removed on drop.
struct WaitRegistration<'a, N: AsRef<str>> {
    shared: &'a EngineShared,
    names: &'a [N],
    woken: &'a Arc<Notify>,
}

impl<N: AsRef<str>> Drop for WaitRegistration<'_, N> {
    fn drop(&mut self) {
        let mut inner = self.shared.lock_ignoring_poison();
        for name in self.names {
            inner.name_waiters.remove(name.as_ref(), self.woken);
        }
    }
}

//! Reading: new entries for a group, and entries after a position for nobody in particular.
//!
//! Promises: a reader that found nothing is woken by the next append, without polling. Whatever a reader has taken
//! stays with it until it is handed out, so a read that is dropped loses nothing.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::change::Change;
use super::effect::Effect;
use super::engine::{Engine, Shared};
use super::hints::WaitingRead;
use crate::check;
use crate::entry::{Delivery, Entry, EntryId};
use crate::error::{Result, StreamError};
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{Batch, GroupReader, TailReader};

/// Reads new entries for one consumer of a group.
pub(super) struct Reader {
    engine: Arc<Engine>,
    group: GroupName,
    consumer: ConsumerName,
    woken: Arc<Notify>,
    /// What was delivered and not yet handed out.
    taken: Taken,
}

/// Deliveries that nobody has seen yet.
#[derive(Default)]
struct Taken {
    batches: Vec<Batch<Delivery>>,
    /// The commit of the deliveries, which must be written before they are handed out.
    written: u64,
    /// The commit of the newest entry, which must be durable before it is handed out.
    durable: u64,
}

impl Reader {
    pub(super) fn new(engine: Arc<Engine>, group: &GroupName, consumer: &ConsumerName) -> Self {
        let (group, consumer) = (group.clone(), consumer.clone());
        Self { engine, group, consumer, woken: Arc::default(), taken: Taken::default() }
    }

    /// Hands out what was taken, once nothing of it can be lost.
    async fn hand_out(&mut self) -> Result<Vec<Batch<Delivery>>> {
        self.engine.shared.wait(self.taken.written, self.taken.durable).await?;
        Ok(std::mem::take(&mut self.taken).batches)
    }
}

#[async_trait]
impl GroupReader for Reader {
    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<Batch<Delivery>>> {
        check::read(streams, count, wait)?;
        if !self.taken.batches.is_empty() {
            return self.hand_out().await;
        }
        let shared = Arc::clone(&self.engine.shared);
        let mut time_out = std::pin::pin!(shared.clock.sleep(wait));
        let mut watch = None;
        let mut waiting: Option<Waiting> = None;
        let mut is_over = wait.is_zero();
        loop {
            let (group, consumer, taken) = (&self.group, &self.consumer, &mut self.taken);
            let woken = &self.woken;
            shared.deliver(|change| {
                if waiting.as_ref().is_some_and(|waiting| waiting.read.is_silenced()) {
                    return Err(silenced());
                }
                take(change, streams, group, consumer, count, taken)?;
                if taken.batches.is_empty() && watch.is_none() {
                    watch = Some(Watch::begin(&shared, change, streams.iter(), woken));
                    let read = change.waiting_reads().add(group, consumer, woken);
                    waiting = Some(Waiting { shared: Arc::clone(&shared), read });
                }
                Ok(())
            })?;
            if !self.taken.batches.is_empty() {
                return self.hand_out().await;
            }
            if is_over {
                return Ok(Vec::new());
            }
            tokio::select! {
                () = self.woken.notified() => {}
                // Looks once more: what came in the last moment is not left for the next read.
                () = &mut time_out => is_over = true,
            }
        }
    }

    async fn close(mut self: Box<Self>) -> Result<Vec<Batch<Delivery>>> {
        self.hand_out().await
    }
}

/// A read for a group that waits, until dropped.
struct Waiting {
    shared: Arc<Shared>,
    read: Arc<WaitingRead>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.shared.lock_anyway().waiting_reads.remove(&self.read);
    }
}

fn silenced() -> StreamError {
    let problem = "the reads of this consumer were ended from outside".to_owned();
    StreamError::Unavailable { problem, source: None }
}

/// Delivers up to `count` new entries of each stream into `taken`.
fn take(
    change: &mut Change<'_>,
    streams: &[StreamName],
    group: &GroupName,
    consumer: &ConsumerName,
    count: usize,
    taken: &mut Taken,
) -> Result<()> {
    // All names are looked at first: a wrong one fails the read before it has delivered anything.
    for name in streams {
        change.state().stream(name.as_str(), change.now)?;
    }
    let at = change.now;
    for name in streams {
        let (stream, group, consumer) = (name.as_str(), group.as_str(), consumer.as_str());
        let found = change.state().stream(stream, change.now)?;
        if found.is_none_or(|found| !found.groups.contains_key(group)) {
            change.vacate(stream);
            change.apply(&Effect::CreateGroup { stream, group, after: EntryId::MIN });
        }
        let Some(found) = change.state().stream(stream, change.now)? else { continue };
        let Some(known) = found.groups.get(group) else { continue };
        let entries: Vec<Delivery> = found
            .entries
            .after(known.last_delivered)
            .take(count)
            .map(|(id, fields)| Delivery { id: *id, fields: fields.clone(), deliveries: 1 })
            .collect();
        match entries.last().map(|entry| entry.id) {
            Some(through) => {
                taken.durable = taken.durable.max(found.commit_of(through));
                change.apply(&Effect::Deliver { stream, group, consumer, through, at });
                taken.batches.push(Batch { stream: name.clone(), entries });
            }
            // As on Redis 7.0, a consumer comes into being with the first entry it gets.
            None => change.saw(stream, group, consumer),
        }
    }
    taken.written = change.commit();
    Ok(())
}

/// Reads entries after given positions.
pub(super) struct Tail {
    engine: Arc<Engine>,
    woken: Arc<Notify>,
}

impl Tail {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, woken: Arc::default() }
    }
}

#[async_trait]
impl TailReader for Tail {
    async fn read(
        &mut self,
        positions: &[(StreamName, EntryId)],
        count: usize,
        wait: Duration,
    ) -> Result<Vec<Batch<Entry>>> {
        let streams: Vec<StreamName> = positions.iter().map(|(name, _)| name.clone()).collect();
        check::read(&streams, count, wait)?;
        let shared = Arc::clone(&self.engine.shared);
        let mut time_out = std::pin::pin!(shared.clock.sleep(wait));
        let mut watch = None;
        let mut is_over = wait.is_zero();
        loop {
            let woken = &self.woken;
            let (batches, durable) = shared.deliver(|change| {
                let found = entries_after(change, positions, count)?;
                if found.0.is_empty() && watch.is_none() {
                    watch = Some(Watch::begin(&shared, change, streams.iter(), woken));
                }
                Ok(found)
            })?;
            if !batches.is_empty() {
                shared.wait(0, durable).await?;
                return Ok(batches);
            }
            if is_over {
                return Ok(batches);
            }
            tokio::select! {
                () = self.woken.notified() => {}
                () = &mut time_out => is_over = true,
            }
        }
    }
}

/// The entries after each position, and the commit that must be durable before they may be seen.
fn entries_after(
    change: &Change<'_>,
    positions: &[(StreamName, EntryId)],
    count: usize,
) -> Result<(Vec<Batch<Entry>>, u64)> {
    let (mut batches, mut durable) = (Vec::new(), 0);
    for (name, position) in positions {
        let Some(found) = change.state().stream(name.as_str(), change.now)? else { continue };
        let after = found.entries.after(*position).take(count);
        let entries: Vec<Entry> =
            after.map(|(id, fields)| Entry { id: *id, fields: fields.clone() }).collect();
        if let Some(newest) = entries.last() {
            durable = durable.max(found.commit_of(newest.id));
            batches.push(Batch { stream: name.clone(), entries });
        }
    }
    Ok((batches, durable))
}

/// Someone who waits for something to happen to some names, until dropped.
pub(super) struct Watch {
    shared: Arc<Shared>,
    names: Vec<String>,
    woken: Arc<Notify>,
}

impl Watch {
    /// Registers under the lock, so that nothing that happens from now on goes unseen.
    pub(super) fn begin(
        shared: &Arc<Shared>,
        change: &mut Change<'_>,
        names: impl Iterator<Item = impl AsRef<str>>,
        woken: &Arc<Notify>,
    ) -> Self {
        let names: Vec<String> = names.map(|name| name.as_ref().to_owned()).collect();
        for name in &names {
            change.watchers().add(name, woken);
        }
        Self { shared: Arc::clone(shared), names, woken: Arc::clone(woken) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut inner = self.shared.lock_anyway();
        for name in &self.names {
            inner.watchers.remove(name, &self.woken);
        }
    }
}

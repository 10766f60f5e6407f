//! The gatekeeper finds out which gates may open, while anybody waits at one.
//!
//! Upstream: `gate`. Downstream: the backend knows how far the group has come in the old partitions.
//! Promises: a growth whose starter died is finished; a gate opens when the group has been given everything in the old
//! partition up to the growth and nothing of it is pending any more but messages that the growth moved there; one that
//! opened stays open. It also reads messages again that waited without their bytes, because there were too many.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::{Backend, EntryId, PendingQuery, Range};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::gate::{Gate, Gates, is_moved_by};
use super::worker::Worker;
use super::workplace::Bench;
use crate::error::Result;
use crate::keys;
use crate::message::KEY;
use crate::queue::{self, Queue};
use crate::topic::{Growth, Partition, Topic};

/// How often those that wait are looked after.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Pending entries that are looked at in one go.
const ROWS: usize = 64;

/// Looks after the gates of a subscription until it is gone.
pub(super) async fn run(bench: Weak<Bench>, queue: Weak<queue::Inner>) {
    let Some(gates) = bench.upgrade().map(|bench| Arc::clone(&bench.job.gates)) else { return };
    loop {
        gates.waiting.notified().await;
        loop {
            let (Some(bench), Some(inner)) = (bench.upgrade(), queue.upgrade()) else { return };
            let workers = bench.workers();
            let awaited: HashSet<Gate> =
                workers.iter().flat_map(|worker| worker.awaited()).collect();
            let mut has_read = false;
            for worker in &workers {
                has_read |= worker.read_again().await;
            }
            if awaited.is_empty() {
                if has_read {
                    continue;
                }
                break;
            }
            if let Err(error) = look(&Queue { inner }, &bench, &gates, &awaited).await {
                warn!(topic = %bench.job.topic, %error, "gates could not be looked at, trying again");
            }
            workers.iter().for_each(|worker| worker.let_through());
            drop((bench, workers));
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Worker {
    /// Reads messages again of which only the id was kept while they waited. Returns whether there were any.
    async fn read_again(self: &Arc<Self>) -> bool {
        let ids = self.lock().lanes.absent(ROWS);
        let found = join_all(ids.iter().map(|id| {
            let range = Range { from: *id, to: *id, ..Range::first(1) };
            self.job.backend.range(&self.rules.stream, range)
        }))
        .await;
        for (id, found) in ids.iter().zip(found) {
            match found {
                Ok(entries) => self.read_one_again(*id, entries.into_iter().next()),
                Err(error) => {
                    warn!(stream = %self.rules.stream, %error, "messages cannot be read again, trying again");
                    tokio::time::sleep(LOOK_EVERY).await;
                    break;
                }
            }
        }
        !ids.is_empty()
    }
}

async fn look(queue: &Queue, bench: &Bench, gates: &Gates, awaited: &HashSet<Gate>) -> Result<()> {
    let asked_at = Instant::now();
    let mut topic = queue.read_topic(&bench.job.topic).await?;
    gates.learn(Arc::clone(&topic), asked_at);
    if topic.growths.last().is_some_and(|growth| growth.last_ids.is_none()) {
        // Those that waited for nothing but this news need not wait for the growth.
        bench.workers().iter().for_each(|worker| worker.let_through());
        // Waits until every producer knows of the growth; whoever began it may be gone.
        queue.topics().settle_growth(&bench.job.topic).await?;
        let asked_at = Instant::now();
        topic = queue.read_topic(&bench.job.topic).await?;
        gates.learn(Arc::clone(&topic), asked_at);
    }
    for gate in awaited {
        let Gate::Growth { began_ms, old } = *gate else { continue };
        let growth = topic.growths.iter().find(|growth| growth.began.as_millis() == began_ms);
        // A growth that the topic knows nothing of was that of a topic deleted since.
        let is_done = match growth {
            Some(growth) => is_done(bench, &topic, growth, old).await?,
            None => true,
        };
        if is_done {
            info!(topic = %topic.name, partition = old, "older messages are done, moved keys go on");
            gates.open(*gate);
        }
    }
    forget_growths(bench, gates, &topic, awaited).await
}

/// Opens the gates at which nobody waits of growths whose last awaited gate was just opened: then they can be forgotten.
async fn forget_growths(
    bench: &Bench,
    gates: &Gates,
    topic: &Topic,
    awaited: &HashSet<Gate>,
) -> Result<()> {
    for growth in topic.growths.iter().filter(|growth| growth.last_ids.is_some()) {
        let was_awaited = |gate: &Gate| matches!(gate, Gate::Growth { began_ms, .. } if *began_ms == growth.began.as_millis());
        let shut = gates.shut(growth);
        if !awaited.iter().any(was_awaited) || shut.iter().any(|gate| awaited.contains(gate)) {
            continue;
        }
        for gate in shut {
            let Gate::Growth { old, .. } = gate else { continue };
            if !is_done(bench, topic, growth, old).await? {
                break;
            }
            gates.open(gate);
        }
    }
    Ok(())
}

/// Whether the group is done with what was in an old partition before the growth.
async fn is_done(bench: &Bench, topic: &Topic, growth: &Growth, old: Partition) -> Result<bool> {
    let last_ids = growth.last_ids.as_deref().unwrap_or_default();
    let Some(last) = last_ids.get(usize::from(old)).copied() else { return Ok(false) };
    if last == EntryId::MIN {
        return Ok(true);
    }
    let (backend, group) = (&bench.job.backend, &bench.job.group);
    let stream = keys::stream(topic, old);
    let Some(stats) = backend.stats(&stream).await? else { return Ok(true) };
    let delivered = stats.groups.iter().find(|known| known.name == *group);
    let Some(delivered) = delivered.map(|known| known.last_delivered) else { return Ok(false) };
    if delivered < last {
        // Or are they gone, trimmed by somebody's explicit act?
        let range = Range { from: delivered.next(), to: last, ..Range::first(1) };
        if !backend.range(&stream, range).await?.is_empty() {
            return Ok(false);
        }
    }
    let mut after = None;
    loop {
        let query = PendingQuery {
            stream: &stream,
            group,
            consumer: None,
            min_idle: Duration::ZERO,
            after,
            count: ROWS,
        };
        let rows = backend.pending(query).await?;
        for row in rows.iter().filter(|row| row.id <= last) {
            if is_waited_for(backend.as_ref(), &stream, row.id, growth, old).await? {
                debug!(%stream, entry_id = %row.id, "moved keys wait for an older message");
                return Ok(false);
            }
        }
        match rows.last() {
            Some(row) if rows.len() == ROWS && row.id < last => after = Some(row.id),
            _ => return Ok(true),
        }
    }
}

/// Whether a pending entry keeps moved keys waiting: all do, but those that the growth moved there.
async fn is_waited_for(
    backend: &dyn Backend,
    stream: &headwater_stream::StreamName,
    id: EntryId,
    growth: &Growth,
    old: Partition,
) -> Result<bool> {
    let range = Range { from: id, to: id, ..Range::first(1) };
    let entries = backend.range(stream, range).await?;
    // One that was trimmed is in somebody's hands until it is settled.
    let Some(entry) = entries.first() else { return Ok(true) };
    Ok(!is_moved_by(growth, entry.fields.get(KEY).map(AsRef::as_ref), old))
}

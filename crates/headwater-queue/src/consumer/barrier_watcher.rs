//! The barrier watcher opens repartition barriers while messages are blocked.
//!
//! Upstream: `repartition_barrier`. Downstream: the backend knows how far the group is in the old partitions.
//! Guarantees: a resize whose initiator died is completed; a barrier opens when the group was delivered everything in the
//! old partition up to the resize and nothing of it is pending except messages that the resize moved there; an open
//! barrier stays open.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::{Backend, EntryId, PendingDeliveryQuery, Range};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::partition_driver::DriverHandle;
use super::partition_set::PartitionSet;
use super::partition_state::PartitionEvent;
use super::repartition_barrier::{Barrier, Barriers, is_moved_by};
use crate::error::Result;
use crate::keys;
use crate::message::KEY;
use crate::queue::{self, Queue};
use crate::topic::{Partition, Resize, Topic};

/// How often closed barriers are checked.
const CHECK_EVERY: Duration = Duration::from_millis(50);
/// Pending entries per page.
const PENDING_PAGE: usize = 64;

/// Watches the barriers of a subscription until it is dropped.
pub(super) async fn run(partition_set: Weak<PartitionSet>, queue: Weak<queue::Inner>) {
    let Some(barriers) = partition_set.upgrade().map(|set| Arc::clone(&set.context.barriers))
    else {
        return;
    };
    loop {
        barriers.has_blocked.notified().await;
        loop {
            let (Some(set), Some(inner)) = (partition_set.upgrade(), queue.upgrade()) else {
                return;
            };
            let partitions = set.partitions();
            let asked = partitions.iter().map(|partition| partition.awaited_barriers());
            let awaited: HashSet<Barrier> = join_all(asked).await.into_iter().flatten().collect();
            if awaited.is_empty() {
                break;
            }
            if let Err(error) = check(&Queue { inner }, &set, &barriers, &awaited).await {
                warn!(topic = %set.context.topic, %error, "checking repartition barriers failed, retrying");
            }
            unblock(&partitions);
            drop((set, partitions));
            tokio::time::sleep(CHECK_EVERY).await;
        }
    }
}

/// Lets the messages of open barriers continue.
fn unblock(partitions: &[Arc<DriverHandle>]) {
    partitions.iter().for_each(|partition| partition.send(PartitionEvent::BarrierOpened));
}

async fn check(
    queue: &Queue,
    partition_set: &PartitionSet,
    barriers: &Barriers,
    awaited: &HashSet<Barrier>,
) -> Result<()> {
    let read_at = Instant::now();
    let mut topic = queue.read_topic(&partition_set.context.topic).await?;
    barriers.update_topic(Arc::clone(&topic), read_at);
    if topic.resizes.last().is_some_and(|resize| resize.last_ids.is_none()) {
        // Messages that waited only for the topic refresh need not wait for the resize.
        unblock(&partition_set.partitions());
        // Waits until every producer knows the new partition count. The process that began the resize may be dead.
        queue.topics().complete_resize(&partition_set.context.topic).await?;
        let read_at = Instant::now();
        topic = queue.read_topic(&partition_set.context.topic).await?;
        barriers.update_topic(Arc::clone(&topic), read_at);
    }
    for barrier in awaited {
        let Barrier::Resize { began_ms, old } = *barrier else { continue };
        let resize = topic.resizes.iter().find(|resize| resize.began.as_millis() == began_ms);
        // A resize that the topic does not have belonged to a topic that was deleted since.
        let is_finished = match resize {
            Some(resize) => is_old_partition_finished(partition_set, &topic, resize, old).await?,
            None => true,
        };
        if is_finished {
            info!(topic = %topic.name, partition = old, "older messages are finished, moved keys continue");
            barriers.open(*barrier);
        }
    }
    complete_resizes(partition_set, barriers, &topic, awaited).await
}

/// Opens the remaining barriers of resizes whose last awaited barrier was just opened, so that they can be dropped.
async fn complete_resizes(
    partition_set: &PartitionSet,
    barriers: &Barriers,
    topic: &Topic,
    awaited: &HashSet<Barrier>,
) -> Result<()> {
    for resize in topic.resizes.iter().filter(|resize| resize.last_ids.is_some()) {
        let was_awaited = |barrier: &Barrier| {
            let start = resize.began.as_millis();
            matches!(barrier, Barrier::Resize { began_ms, .. } if *began_ms == start)
        };
        let closed = barriers.closed(resize);
        if !awaited.iter().any(was_awaited)
            || closed.iter().any(|barrier| awaited.contains(barrier))
        {
            continue;
        }
        for barrier in closed {
            let Barrier::Resize { old, .. } = barrier else { continue };
            if !is_old_partition_finished(partition_set, topic, resize, old).await? {
                break;
            }
            barriers.open(barrier);
        }
    }
    Ok(())
}

/// Whether the group has finished what was in an old partition before the resize.
async fn is_old_partition_finished(
    partition_set: &PartitionSet,
    topic: &Topic,
    resize: &Resize,
    old: Partition,
) -> Result<bool> {
    let last_ids = resize.last_ids.as_deref().unwrap_or_default();
    let Some(last) = last_ids.get(usize::from(old)).copied() else { return Ok(false) };
    if last == EntryId::MIN {
        return Ok(true);
    }
    let (backend, group) = (&partition_set.context.backend, &partition_set.context.group);
    let stream = keys::stream(topic, old);
    let Some(stats) = backend.stats_without_lag(&stream).await? else { return Ok(true) };
    let delivered = stats.groups.iter().find(|known| known.name == *group);
    let Some(delivered) = delivered.map(|known| known.last_delivered) else { return Ok(false) };
    if delivered < last {
        // Undelivered entries may have been trimmed.
        let range = Range { from: delivered.next(), to: last, ..Range::first(1) };
        if !backend.range(&stream, range).await?.is_empty() {
            return Ok(false);
        }
    }
    let mut after = None;
    loop {
        let query = PendingDeliveryQuery {
            stream: &stream,
            group,
            consumer: None,
            min_idle: Duration::ZERO,
            after,
            count: PENDING_PAGE,
        };
        let rows = backend.pending(query).await?;
        for row in rows.iter().filter(|row| row.id <= last) {
            if blocks_moved_keys(backend.as_ref(), &stream, row.id, resize, old).await? {
                debug!(%stream, entry_id = %row.id, "moved keys wait for an older message");
                return Ok(false);
            }
        }
        match rows.last() {
            Some(row) if rows.len() == PENDING_PAGE && row.id < last => after = Some(row.id),
            _ => return Ok(true),
        }
    }
}

/// Whether a pending entry blocks moved keys: every entry does, except those that the resize moved there.
async fn blocks_moved_keys(
    backend: &dyn Backend,
    stream: &headwater_stream::StreamName,
    id: EntryId,
    resize: &Resize,
    old: Partition,
) -> Result<bool> {
    let range = Range { from: id, to: id, ..Range::first(1) };
    let entries = backend.range(stream, range).await?;
    // A trimmed entry is in flight until it is settled.
    let Some(entry) = entries.first() else { return Ok(true) };
    Ok(!is_moved_by(resize, entry.fields.get(KEY).map(AsRef::as_ref), old))
}

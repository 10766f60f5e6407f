//! Pending entries: keep alive, reclaim, list; and removal of idle consumers.

use std::borrow::Cow;
use std::ops::Bound;
use std::time::Duration;

use super::leases::check_fence;
use super::redo_record::RedoRecord;
use super::state::EmbeddedState;
use super::state::group::{GroupState, PendingEntry};
use super::state::stream::StreamState;
use super::transaction::{ReadTx, Tx};
use crate::clock::Timestamp;
use crate::entry::{DeliveredEntry, EntryId};
use crate::error::{Result, StreamError};
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{
    PendingDelivery, PendingDeliveryQuery, ReclaimFrom, ReclaimRequest, ReclaimResult,
};

pub(super) fn keep_alive(
    tx: &mut Tx<'_>,
    stream: &StreamName,
    group: &GroupName,
    consumer: &ConsumerName,
    ids: &[EntryId],
) -> Result<Vec<EntryId>> {
    let Some((found, known)) = tx.state().group(stream, group, tx.now)? else {
        return Ok(ids.to_vec());
    };
    let (mut kept, mut gone, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    for id in ids {
        match known.pending.get(*id) {
            Some(delivered) if delivered.consumer == *consumer => {
                // The entry was deleted; as on Redis, it stops being pending.
                let exists = found.entries.contains(*id);
                if exists { &mut kept } else { &mut gone }.push(*id);
                lost.extend((!exists).then_some(*id));
            }
            _ => lost.push(*id),
        }
    }
    let (stream, group, at) = (stream.as_str(), group.as_str(), tx.now);
    tx.touch(stream, group, consumer.as_str());
    if !kept.is_empty() {
        tx.apply(&RedoRecord::KeepAlive { stream, group, ids: Cow::Owned(kept), at });
    }
    if !gone.is_empty() {
        tx.apply(&RedoRecord::Acknowledge { stream, group, ids: Cow::Owned(gone) });
    }
    Ok(lost)
}

pub(super) fn reclaim(tx: &mut Tx<'_>, reclaim: &ReclaimRequest<'_>) -> Result<ReclaimResult> {
    tx.state().stream(reclaim.stream.as_str(), tx.now)?;
    check_fence(tx.state(), reclaim.fence, tx.now)?;
    let (stream, group) = group_of(tx.state(), reclaim.stream, reclaim.group, tx.now)?;
    let (scanned, next) = candidates(group, reclaim);
    let is_own = matches!(reclaim.from, ReclaimFrom::Own(_));
    let mut reclaimed = ReclaimResult { next, ..ReclaimResult::default() };
    for id in scanned {
        let Some(delivered) = group.pending.get(id) else { continue };
        if !is_idle(delivered, reclaim.min_idle, tx.now) || !is_from(delivered, reclaim) {
            continue;
        }
        match stream.entries.get(id) {
            Some(fields) => reclaimed.entries.push(DeliveredEntry {
                id,
                fields: fields.clone(),
                deliveries: delivered.deliveries.saturating_add(u64::from(!is_own)),
            }),
            None => reclaimed.deleted.push(id),
        }
    }
    let newest = reclaimed.entries.last().map(|entry| entry.id);
    tx.visible_commit = newest.map_or(0, |newest| stream.commit_of(newest));
    let (stream, group) = (reclaim.stream.as_str(), reclaim.group.as_str());
    let (consumer, at) = (reclaim.consumer.as_str(), tx.now);
    tx.touch(stream, group, consumer);
    if !reclaimed.deleted.is_empty() {
        let ids = Cow::Borrowed(reclaimed.deleted.as_slice());
        tx.apply(&RedoRecord::Acknowledge { stream, group, ids });
    }
    if !reclaimed.entries.is_empty() {
        let ids = Cow::Owned(reclaimed.entries.iter().map(|entry| entry.id).collect());
        tx.apply(&match is_own {
            true => RedoRecord::KeepAlive { stream, group, ids, at },
            false => RedoRecord::Claim { stream, group, consumer, ids, at },
        });
    }
    Ok(reclaimed)
}

/// The pending entries to scan, in id order, and the next scan position.
fn candidates(group: &GroupState, reclaim: &ReclaimRequest<'_>) -> (Vec<EntryId>, Option<EntryId>) {
    let after = after(reclaim.after);
    // After a full page there may be more; as on Redis, only the next page tells.
    let take = |ids: &mut dyn Iterator<Item = &EntryId>| {
        let scanned: Vec<EntryId> = ids.take(reclaim.count).copied().collect();
        let next = scanned.last().copied().filter(|_| scanned.len() == reclaim.count);
        (scanned, next)
    };
    match reclaim.from {
        ReclaimFrom::Anyone | ReclaimFrom::Others => take(&mut pending_after(group, reclaim.after)),
        ReclaimFrom::Consumer(consumer) => match group.consumers.get(consumer.as_str()) {
            Some(consumer) => take(&mut consumer.pending.range(after)),
            None => (Vec::new(), None),
        },
        ReclaimFrom::Ids(ids) | ReclaimFrom::Own(ids) => {
            let mut ids = ids[..ids.len().min(reclaim.count)].to_vec();
            ids.sort_unstable();
            ids.dedup();
            (ids, None)
        }
    }
}

fn is_from(delivered: &PendingEntry, reclaim: &ReclaimRequest<'_>) -> bool {
    match reclaim.from {
        ReclaimFrom::Others => delivered.consumer != *reclaim.consumer,
        ReclaimFrom::Own(_) => delivered.consumer == *reclaim.consumer,
        ReclaimFrom::Anyone | ReclaimFrom::Consumer(_) | ReclaimFrom::Ids(_) => true,
    }
}

pub(super) fn list(
    tx: &ReadTx<'_>,
    query: &PendingDeliveryQuery<'_>,
) -> Result<Vec<PendingDelivery>> {
    let (_, group) = group_of(tx.state, query.stream, query.group, tx.now)?;
    let pending = |id: &EntryId| {
        let delivered = group.pending.get(*id)?;
        is_idle(delivered, query.min_idle, tx.now).then(|| PendingDelivery {
            id: *id,
            consumer: delivered.consumer.clone(),
            idle: tx.now.since(delivered.at),
            deliveries: delivered.deliveries,
        })
    };
    let after = after(query.after);
    let listed = match query.consumer {
        None => {
            let all = pending_after(group, query.after);
            all.filter_map(pending).take(query.count).collect()
        }
        Some(consumer) => match group.consumers.get(consumer.as_str()) {
            Some(consumer) => {
                consumer.pending.range(after).filter_map(pending).take(query.count).collect()
            }
            None => Vec::new(),
        },
    };
    Ok(listed)
}

/// Removes consumers without pending entries; with a name only that one.
pub(super) fn remove_consumers(
    tx: &mut Tx<'_>,
    stream: &StreamName,
    group: &GroupName,
    idle: Duration,
    only: Option<&ConsumerName>,
) -> Result<Vec<ConsumerName>> {
    let (_, known) = group_of(tx.state(), stream, group, tx.now)?;
    let is_idle = |seen_at: Timestamp| tx.now.since(seen_at) >= idle;
    let all = known.consumers.values();
    let removed: Vec<ConsumerName> = all
        .filter(|consumer| consumer.pending.is_empty() && is_idle(consumer.seen_at))
        .filter(|consumer| only.is_none_or(|only| consumer.name == *only))
        .map(|consumer| consumer.name.clone())
        .collect();
    for consumer in &removed {
        let (stream, group, consumer) = (stream.as_str(), group.as_str(), consumer.as_str());
        tx.apply(&RedoRecord::RemoveConsumer { stream, group, consumer });
    }
    Ok(removed)
}

fn is_idle(delivered: &PendingEntry, min_idle: Duration, now: Timestamp) -> bool {
    delivered.is_released() || now.since(delivered.at) >= min_idle
}

fn pending_after(group: &GroupState, after: Option<EntryId>) -> impl Iterator<Item = &EntryId> {
    let (none, some) = match after {
        None => (Some(group.pending.from(EntryId::MIN)), None),
        Some(id) => (None, Some(group.pending.after(id))),
    };
    none.into_iter().flatten().chain(some.into_iter().flatten()).map(|(id, _)| id)
}

fn after(id: Option<EntryId>) -> (Bound<EntryId>, Bound<EntryId>) {
    (id.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)
}

fn group_of<'a>(
    state: &'a EmbeddedState,
    stream: &StreamName,
    group: &GroupName,
    now: Timestamp,
) -> Result<(&'a StreamState, &'a GroupState)> {
    state.group(stream, group, now)?.ok_or_else(|| StreamError::NoGroup {
        stream: stream.to_string(),
        group: group.to_string(),
    })
}

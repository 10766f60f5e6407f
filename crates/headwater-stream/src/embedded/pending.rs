//! Pending entries: kept alive, taken over, listed; and the consumers that have none.

use std::borrow::Cow;
use std::ops::Bound;
use std::time::Duration;

use super::change::{Change, Look};
use super::effect::Effect;
use super::leases::check_fence;
use super::state::State;
use super::state::group::{Delivered, Group};
use super::state::stream::Stream;
use crate::clock::Timestamp;
use crate::entry::{Delivery, EntryId};
use crate::error::{Result, StreamError};
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{Pending, PendingQuery, Reclaim, ReclaimFrom, Reclaimed};

pub(super) fn keep_alive(
    change: &mut Change<'_>,
    stream: &StreamName,
    group: &GroupName,
    consumer: &ConsumerName,
    ids: &[EntryId],
) -> Result<Vec<EntryId>> {
    let found = change.state().stream(stream.as_str(), change.now)?;
    let pending = found.and_then(|stream| Some((stream, stream.groups.get(group.as_str())?)));
    let Some((found, known)) = pending else { return Ok(ids.to_vec()) };
    let (mut kept, mut gone, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    for id in ids {
        match known.pending.get(*id) {
            Some(delivered) if delivered.consumer == *consumer => {
                // There is nothing left to work on; as on Redis, such an entry stops being pending.
                let exists = found.entries.contains(*id);
                if exists { &mut kept } else { &mut gone }.push(*id);
                lost.extend((!exists).then_some(*id));
            }
            _ => lost.push(*id),
        }
    }
    let (stream, group, at) = (stream.as_str(), group.as_str(), change.now);
    change.saw(stream, group, consumer.as_str());
    if !kept.is_empty() {
        change.apply(&Effect::KeepAlive { stream, group, ids: Cow::Owned(kept), at });
    }
    if !gone.is_empty() {
        change.apply(&Effect::Acknowledge { stream, group, ids: Cow::Owned(gone) });
    }
    Ok(lost)
}

pub(super) fn reclaim(change: &mut Change<'_>, reclaim: &Reclaim<'_>) -> Result<Reclaimed> {
    change.state().stream(reclaim.stream.as_str(), change.now)?;
    check_fence(change.state(), reclaim.fence, change.now)?;
    let (stream, group) = group_of(change.state(), reclaim.stream, reclaim.group, change.now)?;
    let (looked_at, next) = candidates(group, reclaim);
    let mut reclaimed = Reclaimed { next, ..Reclaimed::default() };
    for id in looked_at {
        let Some(delivered) = group.pending.get(id) else { continue };
        if !is_idle(delivered, reclaim.min_idle, change.now) || !is_from(delivered, reclaim) {
            continue;
        }
        match stream.entries.get(id) {
            Some(fields) => reclaimed.entries.push(Delivery {
                id,
                fields: fields.clone(),
                deliveries: delivered.deliveries.saturating_add(1),
            }),
            None => reclaimed.deleted.push(id),
        }
    }
    let newest = reclaimed.entries.last().map(|entry| entry.id);
    change.shows = newest.map_or(0, |newest| stream.commit_of(newest));
    let (stream, group) = (reclaim.stream.as_str(), reclaim.group.as_str());
    let (consumer, at) = (reclaim.consumer.as_str(), change.now);
    change.saw(stream, group, consumer);
    if !reclaimed.deleted.is_empty() {
        let ids = Cow::Borrowed(reclaimed.deleted.as_slice());
        change.apply(&Effect::Acknowledge { stream, group, ids });
    }
    if !reclaimed.entries.is_empty() {
        let ids = reclaimed.entries.iter().map(|entry| entry.id).collect();
        change.apply(&Effect::Claim { stream, group, consumer, ids: Cow::Owned(ids), at });
    }
    Ok(reclaimed)
}

/// The pending entries to look at, in id order, and where to go on after them.
fn candidates(group: &Group, reclaim: &Reclaim<'_>) -> (Vec<EntryId>, Option<EntryId>) {
    let after = after(reclaim.after);
    // A full page is not yet the end: as on Redis, only a look behind it tells.
    let take = |ids: &mut dyn Iterator<Item = &EntryId>| {
        let looked_at: Vec<EntryId> = ids.take(reclaim.count).copied().collect();
        let next = looked_at.last().copied().filter(|_| looked_at.len() == reclaim.count);
        (looked_at, next)
    };
    match reclaim.from {
        ReclaimFrom::Anyone | ReclaimFrom::Others => take(&mut pending_after(group, reclaim.after)),
        ReclaimFrom::Consumer(consumer) => match group.consumers.get(consumer.as_str()) {
            Some(consumer) => take(&mut consumer.pending.range(after)),
            None => (Vec::new(), None),
        },
        ReclaimFrom::Ids(ids) => {
            let mut ids = ids[..ids.len().min(reclaim.count)].to_vec();
            ids.sort_unstable();
            ids.dedup();
            (ids, None)
        }
    }
}

fn is_from(delivered: &Delivered, reclaim: &Reclaim<'_>) -> bool {
    match reclaim.from {
        ReclaimFrom::Others => delivered.consumer != *reclaim.consumer,
        ReclaimFrom::Anyone | ReclaimFrom::Consumer(_) | ReclaimFrom::Ids(_) => true,
    }
}

pub(super) fn list(look: &Look<'_>, query: &PendingQuery<'_>) -> Result<Vec<Pending>> {
    let (_, group) = group_of(look.state, query.stream, query.group, look.now)?;
    let pending = |id: &EntryId| {
        let delivered = group.pending.get(*id)?;
        is_idle(delivered, query.min_idle, look.now).then(|| Pending {
            id: *id,
            consumer: delivered.consumer.clone(),
            idle: look.now.since(delivered.at),
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

pub(super) fn remove_idle_consumers(
    change: &mut Change<'_>,
    stream: &StreamName,
    group: &GroupName,
    idle: Duration,
) -> Result<Vec<ConsumerName>> {
    let (_, known) = group_of(change.state(), stream, group, change.now)?;
    let is_idle = |seen_at: Timestamp| change.now.since(seen_at) >= idle;
    let all = known.consumers.values();
    let removed: Vec<ConsumerName> = all
        .filter(|consumer| consumer.pending.is_empty() && is_idle(consumer.seen_at))
        .map(|consumer| consumer.name.clone())
        .collect();
    for consumer in &removed {
        let (stream, group, consumer) = (stream.as_str(), group.as_str(), consumer.as_str());
        change.apply(&Effect::RemoveConsumer { stream, group, consumer });
    }
    Ok(removed)
}

fn is_idle(delivered: &Delivered, min_idle: Duration, now: Timestamp) -> bool {
    delivered.is_released() || now.since(delivered.at) >= min_idle
}

fn pending_after(group: &Group, after: Option<EntryId>) -> impl Iterator<Item = &EntryId> {
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
    state: &'a State,
    stream: &StreamName,
    group: &GroupName,
    now: Timestamp,
) -> Result<(&'a Stream, &'a Group)> {
    let found = state.stream(stream.as_str(), now)?;
    let pair = found.and_then(|stream| Some((stream, stream.groups.get(group.as_str())?)));
    pair.ok_or_else(|| StreamError::NoGroup {
        stream: stream.to_string(),
        group: group.to_string(),
    })
}

//! Backend operations of a group session. Each may be repeated after an error.
//!
//! Upstream: `session` and `membership`, which run them concurrently. Downstream: leases and registry of the backend.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use headwater_stream::{
    AcquireResult, Backend, ConsumerName, ConsumerStats, DisconnectOutcome, Fence, GroupName,
    HeldLease, HolderName, LeaseName, LeaseRenewer, PendingDeliveryQuery, SettleAction,
    SettleBatch, Settlement, StreamError, StreamName, process_name, unique_holder,
};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::members::{GroupSnapshot, MemberEntry, MemberStatus, member_list};
use crate::config::Mode;
use crate::error::Result;
use crate::keys;

/// Topics notified one by one; beyond it, one notification for the whole group.
const TOPIC_NOTIFICATIONS_MAX: usize = 8;
/// How long a notification lease remains if its holder dies before releasing it.
const NOTIFICATION_TTL: Duration = Duration::from_secs(1);
/// A consumer idle for this long has no blocking read: it was disconnected by the new owner, or its connection is
/// closed.
const STALE_AFTER: Duration = Duration::from_secs(60 * 60);
/// Pending entries released per call.
const RELEASED_AT_ONCE: usize = 1000;
/// Backoff between two attempts to leave.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// Adds entries to the member list. Returns, per entry, a live member that uses another mode; that entry is rejected.
///
/// Checked before the write, so that existing members are not disturbed, and after it, because of concurrent joins: the
/// second to write sees the first, and both may see each other. A member that sees a conflict withdraws.
pub(super) async fn register(
    backend: &dyn Backend,
    group: &GroupName,
    entries: &[MemberEntry],
) -> Result<Vec<Option<MemberEntry>>> {
    let before = GroupSnapshot::read(backend, group, Vec::new()).await?;
    let conflict = |snapshot: &GroupSnapshot, entry: &MemberEntry| {
        snapshot.conflicting_mode(&entry.topic, entry.mode).cloned()
    };
    let mut refused: Vec<Option<MemberEntry>> =
        entries.iter().map(|entry| conflict(&before, entry)).collect();
    let accepted = |refused: &[Option<MemberEntry>]| -> Vec<String> {
        let accepted = entries.iter().zip(refused).filter(|(_, conflict)| conflict.is_none());
        accepted.map(|(entry, _)| entry.to_string()).collect()
    };
    let written = accepted(&refused);
    if written.is_empty() {
        return Ok(refused);
    }
    member_list(group).add(backend, &written).await?;
    let after = GroupSnapshot::read(backend, group, Vec::new()).await?;
    for (entry, refused) in entries.iter().zip(&mut refused) {
        *refused = refused.take().or_else(|| conflict(&after, entry));
    }
    let accepted_now = accepted(&refused);
    let withdrawn: Vec<String> =
        written.into_iter().filter(|text| !accepted_now.contains(text)).collect();
    member_list(group).remove(backend, &withdrawn).await?;
    notify_members(backend, group, entries).await;
    Ok(refused)
}

/// Makes other members poll the topics of these entries, or all topics if there are many.
pub(super) async fn notify_members(
    backend: &dyn Backend,
    group: &GroupName,
    entries: &[MemberEntry],
) {
    if entries.len() > TOPIC_NOTIFICATIONS_MAX {
        return notify_watchers(backend, &keys::group_notification(group)).await;
    }
    let notifications: Vec<LeaseName> =
        entries.iter().map(|entry| keys::join_notification(group, &entry.topic)).collect();
    join_all(notifications.iter().map(|name| notify_watchers(backend, name))).await;
}

/// Notifies the watchers of a lease by acquiring and releasing it. Best effort: watchers also poll.
pub(crate) async fn notify_watchers(backend: &dyn Backend, notification: &LeaseName) {
    let notified = async {
        let holder = unique_holder(process_name())?;
        // If another process holds it now, its release comes after this and notifies the watchers.
        if let AcquireResult::Won(epoch) =
            backend.acquire(notification, &holder, NOTIFICATION_TTL).await?
        {
            backend.release(&holder, &[Fence { lease: notification.clone(), epoch }]).await?;
        }
        Ok::<_, StreamError>(())
    };
    if let Err(error) = notified.await {
        warn!(%notification, %error, "sending the change notification failed; watchers notice at their next poll");
    }
}

/// Consumers of the group, to tell readers of dead members from those of live ones.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownConsumers {
    /// Consumers of live members. They read only what they own.
    pub(super) alive: Arc<[ConsumerName]>,
    /// Consumers of members that were alive and are gone.
    pub(super) gone: Arc<[ConsumerName]>,
}

/// Acquires the lease of a partition; `None` if another member holds it.
///
/// Disconnects readers of this stream that belong to no live member before the new owner starts: a frozen process may
/// have a blocking read at the server, which would receive entries out of order.
pub(super) async fn acquire_partition(
    backend: &dyn Backend,
    renewer: &LeaseRenewer,
    lease: &LeaseName,
    (stream, group): (&StreamName, &GroupName),
    known_consumers: &KnownConsumers,
) -> Result<Option<HeldLease>> {
    let Some(held) = renewer.acquire(lease).await?.won() else { return Ok(None) };
    if let Err(error) = fence_dead_readers(backend, stream, group, known_consumers).await {
        // Without the fence the partition must not be used: release the lease.
        release(renewer, std::slice::from_ref(lease)).await;
        return Err(error);
    }
    Ok(Some(held))
}

/// Disconnects blocking reads of this stream by consumers of the group that belong to no live member.
async fn fence_dead_readers(
    backend: &dyn Backend,
    stream: &StreamName,
    group: &GroupName,
    KnownConsumers { alive, gone }: &KnownConsumers,
) -> Result<()> {
    let groups = backend.stats(stream).await?.map(|stats| stats.groups).unwrap_or_default();
    let group_stats = groups.into_iter().filter(|stats| stats.name == *group);
    let (past, recent): (Vec<ConsumerStats>, Vec<ConsumerStats>) = group_stats
        .flat_map(|stats| stats.consumers)
        // The placeholder consumer of released entries never reads.
        .filter(|consumer| consumer.name.as_str() != SettleAction::RELEASED)
        .partition(|consumer| consumer.idle >= STALE_AFTER);
    if past.iter().any(|consumer| consumer.pending == 0) {
        // Every process start has its own consumer name, so unused ones must be removed.
        backend.remove_idle_consumers(stream, group, STALE_AFTER).await?;
    }
    let mut dead: BTreeSet<ConsumerName> =
        recent.into_iter().map(|consumer| consumer.name).collect();
    // A server may not list a consumer that has not yet received an entry.
    dead.extend(gone.iter().cloned());
    dead.retain(|consumer| !alive.contains(consumer));
    let ended = dead.iter().map(|consumer| backend.disconnect_reader(stream, group, consumer));
    for (silenced, consumer) in try_join_all(ended).await?.into_iter().zip(&dead) {
        match silenced {
            DisconnectOutcome::Disconnected { readers: ended } => {
                debug!(%stream, %group, %consumer, ended, "disconnected a stale reader");
            }
            DisconnectOutcome::Denied { reason } => warn!(%stream, %group, %consumer, reason,
                "cannot disconnect the reader of a dead consumer; if the process is frozen, messages may be delivered out of order"),
        }
    }
    Ok(())
}

/// Releases leases. If that fails they expire, or a later poll releases them.
pub(super) async fn release(renewer: &LeaseRenewer, leases: &[LeaseName]) {
    if let Err(error) = renewer.release(leases).await {
        warn!(count = leases.len(), %error, "releasing leases failed, they expire instead");
    }
}

/// How to remove a drained subscription from the group.
pub(super) struct LeaveRequest {
    /// The member-list entry to remove.
    pub(super) entry: MemberEntry,
    /// For a static member: the reservation entry, and the partition leases to release once it is written.
    pub(super) reservation: Option<(MemberEntry, Vec<LeaseName>)>,
    /// How long the reservation is valid.
    pub(super) reserve_for: Duration,
    /// Shared mode: the streams and the consumer whose pending entries to release, because shared partitions have no
    /// next owner that would reclaim them.
    pub(super) shared: Option<(Vec<StreamName>, ConsumerName)>,
}

/// Removes a subscription from the group. Retries until it succeeds or is dropped: a stale entry would keep partitions
/// assigned to this member.
pub(super) async fn finish_leave(
    backend: &dyn Backend,
    group: &GroupName,
    renewer: &LeaseRenewer,
    leave: &LeaveRequest,
) {
    while let Err(error) = try_finish_leave(backend, group, renewer, leave).await {
        warn!(topic = %leave.entry.topic, %group, %error, "leaving the group failed, retrying");
        sleep(RETRY_AFTER).await;
    }
}

async fn try_finish_leave(
    backend: &dyn Backend,
    group: &GroupName,
    renewer: &LeaseRenewer,
    leave: &LeaveRequest,
) -> Result<()> {
    if let Some((entry, leases)) = &leave.reservation {
        // Lease before entry: an entry without its lease is removed as that of a dead member. Both before the partition
        // leases are released, so that the partitions never appear free.
        let lease = keys::reservation(group, &entry.member);
        let holder = HolderName::new(format!("resting:{}", entry.member))?;
        backend.acquire(&lease, &holder, leave.reserve_for).await?;
        member_list(group).add(backend, &[entry.to_string()]).await?;
        release(renewer, leases).await;
    }
    if let Some((streams, consumer)) = &leave.shared {
        for stream in streams {
            match release_pending(backend, stream, group, consumer).await {
                Err(error) if error.is_transient() => return Err(error.into()),
                Err(error) => {
                    // Other members reclaim the rest when our liveness lease expires.
                    warn!(%stream, %group, %consumer, %error, "releasing pending entries failed, other members reclaim them");
                    return Ok(());
                }
                Ok(()) => {}
            }
        }
    }
    Ok(member_list(group).remove(backend, &[leave.entry.to_string()]).await?)
}

/// Releases the pending entries of a consumer that no longer works on a stream: left by a dropped subscription, or not
/// settled because of an error.
async fn release_pending(
    backend: &dyn Backend,
    stream: &StreamName,
    group: &GroupName,
    consumer: &ConsumerName,
) -> headwater_stream::Result<()> {
    let query = PendingDeliveryQuery {
        stream,
        group,
        consumer: Some(consumer),
        min_idle: Duration::ZERO,
        after: None,
        count: RELEASED_AT_ONCE,
    };
    loop {
        let pending = match backend.pending(query).await {
            Err(StreamError::NoGroup { .. }) => return Ok(()),
            answer => answer?,
        };
        if pending.is_empty() {
            return Ok(());
        }
        info!(%stream, %group, %consumer, entries = pending.len(), "releasing pending entries");
        let entries: Vec<Settlement> = pending
            .iter()
            .map(|row| Settlement { id: row.id, action: SettleAction::Release })
            .collect();
        let settle = SettleBatch { stream, group, consumer, fence: None, entries: &entries };
        backend.settle(settle).await?;
    }
}

/// Whether the entry of a dead member can be removed at once because nothing has to be reclaimed first.
pub(super) fn is_removable(entry: &MemberEntry) -> bool {
    matches!(entry.status, MemberStatus::Reserved(_)) || entry.mode == Mode::Owned
}

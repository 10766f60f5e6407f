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
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use super::members::{GroupSnapshot, MemberEntry, MemberStatus, member_list};
use crate::config::Mode;
use crate::error::Result;
use crate::keys::{self, MembershipKeys};

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
    member_list(backend, group).add(backend, &written).await?;
    let after = GroupSnapshot::read(backend, group, Vec::new()).await?;
    for (entry, refused) in entries.iter().zip(&mut refused) {
        *refused = refused.take().or_else(|| conflict(&after, entry));
    }
    let accepted_now = accepted(&refused);
    let withdrawn: Vec<String> =
        written.into_iter().filter(|text| !accepted_now.contains(text)).collect();
    member_list(backend, group).remove(backend, &withdrawn).await?;
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

/// Notifies the watchers of a lease by acquiring and releasing it. Best effort: watchers also poll. Waits for the server up to
/// [`NOTIFICATION_TTL`].
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
    let failed = match timeout(NOTIFICATION_TTL, notified).await {
        Ok(notified) => notified.err().map(|error| error.to_string()),
        Err(_) => Some(format!("the server did not answer within {NOTIFICATION_TTL:?}")),
    };
    if let Some(error) = failed {
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
    let me = keys::consumer(renewer.holder());
    if let Err(error) = fence_dead_readers(backend, stream, group, known_consumers, &me).await {
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
    me: &ConsumerName,
) -> Result<()> {
    let groups =
        backend.stats_without_lag(stream).await?.map(|stats| stats.groups).unwrap_or_default();
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
    match backend.cluster_slot("") {
        None => dead.retain(|consumer| !alive.contains(consumer)),
        // A member that lost its lease because this server was unreachable is alive, and its read may still be here. The
        // readers of other partitions have other connections and are not affected.
        Some(_) => {
            dead.extend(alive.iter().cloned());
            dead.remove(me);
        }
    }
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
    /// How long the reservation is valid: the lifetime of a lease.
    pub(super) reserve_for: Duration,
    /// Shared mode: the streams and the consumer whose pending entries to release, because shared partitions have no
    /// next owner that would reclaim them.
    pub(super) shared: Option<(Vec<StreamName>, ConsumerName)>,
}

/// Removes a subscription from the group. Retries until it succeeds or is dropped: a stale entry would keep partitions
/// assigned to this member. In shared mode it gives up on partitions that cannot be reached for the lifetime of a lease.
pub(super) async fn finish_leave(
    backend: &dyn Backend,
    group: &GroupName,
    renewer: &LeaseRenewer,
    leave: &LeaveRequest,
) {
    let until = Instant::now() + leave.reserve_for;
    let may_retry = || Instant::now() < until;
    while let Err(error) = try_finish_leave(backend, group, renewer, leave, may_retry()).await {
        warn!(topic = %leave.entry.topic, %group, %error, "leaving the group failed, retrying");
        sleep(RETRY_AFTER).await;
    }
}

async fn try_finish_leave(
    backend: &dyn Backend,
    group: &GroupName,
    renewer: &LeaseRenewer,
    leave: &LeaveRequest,
    may_retry: bool,
) -> Result<()> {
    if let Some((entry, leases)) = &leave.reservation {
        // Lease before entry: an entry without its lease is removed as that of a dead member. Both before the partition
        // leases are released, so that the partitions never appear free.
        let holder = HolderName::new(format!("resting:{}", entry.member))?;
        reserve(backend, group, &entry.member, &holder, leave.reserve_for).await?;
        member_list(backend, group).add(backend, &[entry.to_string()]).await?;
        release(renewer, leases).await;
    }
    if let Some((streams, consumer)) = &leave.shared {
        let release = |stream| release_consumer(backend, stream, group, consumer);
        let mut failed = None;
        for (stream, released) in streams.iter().zip(join_all(streams.iter().map(release)).await) {
            let Err(error) = released else { continue };
            // Other members reclaim the rest when our liveness lease expires.
            warn!(%stream, %group, %consumer, %error, "releasing pending entries failed, other members reclaim them");
            failed = Some(error);
        }
        match failed {
            Some(error) if error.is_transient() && may_retry => return Err(error.into()),
            Some(_) => return Ok(()),
            None => {}
        }
    }
    Ok(member_list(backend, group).remove(backend, &[leave.entry.to_string()]).await?)
}

/// Acquires the reservation of a static member, in a majority of its copies.
async fn reserve(
    backend: &dyn Backend,
    group: &GroupName,
    member: &str,
    holder: &HolderName,
    ttl: Duration,
) -> Result<()> {
    let copies = MembershipKeys::new(backend, group).reservation(member);
    let acquired =
        join_all(copies.iter().map(|copy| timeout(ttl / 4, backend.acquire(copy, holder, ttl))));
    let (mut reserved, mut failure) = (0, None);
    for copy in acquired.await {
        match copy {
            Ok(Ok(_)) => reserved += 1,
            Ok(Err(error)) => failure = Some(error),
            Err(late) => {
                failure = Some(StreamError::Unavailable {
                    problem: "a copy of the reservation was not acquired in time".to_owned(),
                    source: Some(Box::new(late)),
                });
            }
        }
    }
    match failure {
        Some(error) if reserved <= copies.len() / 2 => Err(error.into()),
        _ => Ok(()),
    }
}

/// Removes a consumer that no longer works on a stream. Its pending entries are released first: left by a dropped
/// subscription, or not settled because of an error.
async fn release_consumer(
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
            // Every process start has its own name. If a late read delivers to it, other members reclaim the entry.
            backend.remove_consumer(stream, group, consumer).await?;
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

//! What a session does with the backend, one step each. Every step may be repeated after an error.
//!
//! Upstream: `session` and `stay`, which run them beside each other. Downstream: leases and registry of the backend.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use headwater_stream::{
    Acquire, Backend, ConsumerName, ConsumerStats, Fence, GroupName, HeldLease, HolderName,
    KeeperConfig, LeaseKeeper, LeaseName, PendingQuery, Settle, Settlement, Silenced, StreamError,
    StreamName, Then,
};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::identity;
use super::members::{Entry, Stand, View};
use super::placement::Me;
use crate::config::Mode;
use crate::error::Result;
use crate::keys;

/// Bells that are rung at once; beyond it, one for all.
const BELLS_MAX: usize = 8;
/// How long a bell can be held by one who died while ringing it.
const BELL_TTL: Duration = Duration::from_secs(1);
/// A consumer that did nothing for this long has no read under way: it was silenced by whoever took over from it, or
/// its connection is gone.
const SILENT_AFTER: Duration = Duration::from_secs(60 * 60);
/// Entries that are given back in one call.
const GIVEN_BACK_AT_ONCE: usize = 1000;
/// How long to wait between two tries of what must not be left undone.
const AGAIN_AFTER: Duration = Duration::from_millis(250);

/// What became of the wish to be a member.
pub(super) enum Entering {
    /// We are.
    Entered(Box<LeaseKeeper>, HeldLease),
    /// Somebody bears our id, for this long at least.
    Taken { by: HolderName, remaining: Duration },
}

/// Takes the lease that shows that this member lives.
pub(super) async fn enter(
    backend: Arc<dyn Backend>,
    group: &GroupName,
    me: &Me,
    config: KeeperConfig,
) -> Result<Entering> {
    let lease = keys::member(group, &me.member);
    let leases = Arc::clone(&backend);
    let keeper = LeaseKeeper::new(leases, me.holder.clone(), config)?;
    loop {
        if let Some(held) = keeper.acquire(&lease).await?.won() {
            return Ok(Entering::Entered(Box::new(keeper), held));
        }
        if let Some(Some(info)) = backend.leases(std::slice::from_ref(&lease)).await?.pop() {
            return Ok(Entering::Taken { by: info.holder, remaining: info.remaining });
        }
        // It became free in between.
    }
}

/// Tells the group of new entries. Returns, for those that cannot be, a member that shares the topic in another way.
///
/// Looked at before, so that members who are there are not disturbed, and after: of two who come at the same time, the
/// second to write sees the first, and perhaps both see each other. Whoever sees another gives way.
pub(super) async fn announce(
    backend: &dyn Backend,
    group: &GroupName,
    entries: &[Entry],
) -> Result<Vec<Option<Entry>>> {
    let before = View::look(backend, group, Vec::new()).await?;
    let rival = |view: &View, entry: &Entry| view.disagrees(&entry.topic, entry.mode).cloned();
    let mut refused: Vec<Option<Entry>> =
        entries.iter().map(|entry| rival(&before, entry)).collect();
    let accepted = |refused: &[Option<Entry>]| -> Vec<String> {
        let accepted = entries.iter().zip(refused).filter(|(_, rival)| rival.is_none());
        accepted.map(|(entry, _)| entry.to_string()).collect()
    };
    let announced = accepted(&refused);
    if announced.is_empty() {
        return Ok(refused);
    }
    write(backend, group, &announced).await?;
    let after = View::look(backend, group, Vec::new()).await?;
    for (entry, refused) in entries.iter().zip(&mut refused) {
        *refused = refused.take().or_else(|| rival(&after, entry));
    }
    let staying = accepted(&refused);
    let withdrawn: Vec<String> =
        announced.into_iter().filter(|text| !staying.contains(text)).collect();
    remove(backend, group, &withdrawn).await?;
    ring_for(backend, group, entries).await;
    Ok(refused)
}

/// Has others look at the topics of these entries; or at all, if they are many.
pub(super) async fn ring_for(backend: &dyn Backend, group: &GroupName, entries: &[Entry]) {
    if entries.len() > BELLS_MAX {
        return ring(backend, &keys::bell(group)).await;
    }
    let bells: Vec<LeaseName> =
        entries.iter().map(|entry| keys::join_bell(group, &entry.topic)).collect();
    join_all(bells.iter().map(|bell| ring(backend, bell))).await;
}

/// Writes entries into the members' set.
pub(super) async fn write(
    backend: &dyn Backend,
    group: &GroupName,
    entries: &[String],
) -> Result<()> {
    let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
    backend.set_add(&keys::members(group), &entries, None).await?;
    Ok(())
}

/// Removes entries from the members' set.
pub(super) async fn remove(
    backend: &dyn Backend,
    group: &GroupName,
    entries: &[String],
) -> Result<()> {
    if !entries.is_empty() {
        let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
        backend.set_remove(&keys::members(group), &entries).await?;
    }
    Ok(())
}

/// Rings a bell: whoever watches looks soon. If it fails, they look a little later by themselves.
pub(crate) async fn ring(backend: &dyn Backend, bell: &LeaseName) {
    let holder = identity::passing_holder();
    let rung = async {
        // If somebody else rings at this moment, they stop after us, and that is heard.
        if let Acquire::Won(epoch) = backend.acquire(bell, &holder, BELL_TTL).await? {
            backend.release(&holder, &[Fence { lease: bell.clone(), epoch }]).await?;
        }
        Ok::<_, StreamError>(())
    };
    if let Err(error) = rung.await {
        warn!(%bell, %error, "the bell was not rung, others will notice later");
    }
}

/// Consumers of the group who may have a read under way although nobody takes them for alive.
#[derive(Clone, Debug, Default)]
pub(super) struct Watchfulness {
    /// Those of members that live. They read only what they own.
    pub(super) alive: Arc<[ConsumerName]>,
    /// Those of members that were seen alive and are gone.
    pub(super) gone: Arc<[ConsumerName]>,
}

/// Takes the lease of a partition; `None` if somebody else has it.
///
/// Consumers that read this stream and belong to no living member are silenced before anybody works under the new lease:
/// a process that stands still may have a read waiting at the server, which would take entries out of their order.
pub(super) async fn take(
    backend: &dyn Backend,
    keeper: &LeaseKeeper,
    lease: &LeaseName,
    (stream, group): (&StreamName, &GroupName),
    watchfulness: &Watchfulness,
) -> Result<Option<HeldLease>> {
    let Some(held) = keeper.acquire(lease).await?.won() else { return Ok(None) };
    if let Err(error) = silence(backend, stream, group, watchfulness).await {
        // Not ours without it. Released, so that it is not renewed for nothing.
        release(keeper, std::slice::from_ref(lease)).await;
        return Err(error);
    }
    Ok(Some(held))
}

/// Ends the reads of consumers of the group at this stream that belong to no living member.
async fn silence(
    backend: &dyn Backend,
    stream: &StreamName,
    group: &GroupName,
    Watchfulness { alive, gone }: &Watchfulness,
) -> Result<()> {
    let groups = backend.stats(stream).await?.map(|stats| stats.groups).unwrap_or_default();
    let group_stats = groups.into_iter().filter(|stats| stats.name == *group);
    let (past, recent): (Vec<ConsumerStats>, Vec<ConsumerStats>) = group_stats
        .flat_map(|stats| stats.consumers)
        // The released entries' own consumer never reads.
        .filter(|consumer| consumer.name.as_str() != Then::RELEASED)
        .partition(|consumer| consumer.idle >= SILENT_AFTER);
    if past.iter().any(|consumer| consumer.pending == 0) {
        // Every start has a name of its own; nobody else forgets them.
        backend.remove_idle_consumers(stream, group, SILENT_AFTER).await?;
    }
    let mut dead: BTreeSet<ConsumerName> =
        recent.into_iter().map(|consumer| consumer.name).collect();
    // A server may not list one that has only waited so far.
    dead.extend(gone.iter().cloned());
    dead.retain(|consumer| !alive.contains(consumer));
    let ended = dead.iter().map(|consumer| backend.silence(stream, group, consumer));
    for (silenced, consumer) in try_join_all(ended).await?.into_iter().zip(&dead) {
        match silenced {
            Silenced::Yes { ended } => debug!(%stream, %group, %consumer, ended, "silenced"),
            Silenced::No { reason } => warn!(%stream, %group, %consumer, reason,
                "a dead consumer cannot be silenced: if it stands still, it may take messages out of their order"),
        }
    }
    Ok(())
}

/// Releases leases. If that fails they run out, or are found held for nothing.
pub(super) async fn release(keeper: &LeaseKeeper, leases: &[LeaseName]) {
    if let Err(error) = keeper.release(leases).await {
        warn!(count = leases.len(), %error, "leases were not released, they run out");
    }
}

/// What is left to do when nothing of a topic is in hand any more.
pub(super) struct Parting {
    /// What others read of us.
    pub(super) entry: Entry,
    /// What is kept for us, if we have an id that stays, and the leases behind it.
    pub(super) resting: Option<(Entry, Vec<LeaseName>)>,
    /// How long it is kept.
    pub(super) rest: Duration,
    /// Where entries may be pending for us that nobody takes over before our heartbeat lapses, and for whom: shared
    /// partitions have no next owner.
    pub(super) shared: Option<(Vec<StreamName>, ConsumerName)>,
}

/// Takes a topic out of the group. Tries until it is done, or dropped: others would keep partitions for us.
pub(super) async fn part(
    backend: &dyn Backend,
    group: &GroupName,
    keeper: &LeaseKeeper,
    parting: &Parting,
) {
    while let Err(error) = try_part(backend, group, keeper, parting).await {
        warn!(topic = %parting.entry.topic, %group, %error, "leaving did not succeed, trying again");
        sleep(AGAIN_AFTER).await;
    }
}

async fn try_part(
    backend: &dyn Backend,
    group: &GroupName,
    keeper: &LeaseKeeper,
    parting: &Parting,
) -> Result<()> {
    if let Some((entry, leases)) = &parting.resting {
        // The lease before the entry: one without the other is that of a dead member, and removed. Both before the
        // partitions are free: at no moment may they seem to be nobody's.
        let lease = keys::resting(group, &entry.member);
        let holder = HolderName::new(format!("resting:{}", entry.member))?;
        backend.acquire(&lease, &holder, parting.rest).await?;
        write(backend, group, &[entry.to_string()]).await?;
        release(keeper, leases).await;
    }
    if let Some((streams, consumer)) = &parting.shared {
        for stream in streams {
            match give_back(backend, stream, group, consumer).await {
                Err(error) if error.is_transient() => return Err(error.into()),
                Err(error) => {
                    // Then others take us for dead when our heartbeat lapses, and take over what is left.
                    warn!(%stream, %group, %consumer, %error, "entries may stay pending, others are told");
                    return Ok(());
                }
                Ok(()) => {}
            }
        }
    }
    remove(backend, group, &[parting.entry.to_string()]).await
}

/// Gives back what is pending for a consumer that works on a stream no more: a dropped subscription had it in hand, or
/// could not settle it.
async fn give_back(
    backend: &dyn Backend,
    stream: &StreamName,
    group: &GroupName,
    consumer: &ConsumerName,
) -> headwater_stream::Result<()> {
    let query = PendingQuery {
        stream,
        group,
        consumer: Some(consumer),
        min_idle: Duration::ZERO,
        after: None,
        count: GIVEN_BACK_AT_ONCE,
    };
    loop {
        let pending = match backend.pending(query).await {
            Err(StreamError::NoGroup { .. }) => return Ok(()),
            answer => answer?,
        };
        if pending.is_empty() {
            return Ok(());
        }
        info!(%stream, %group, %consumer, entries = pending.len(), "giving back what is left in hand");
        let entries: Vec<Settlement> =
            pending.iter().map(|row| Settlement { id: row.id, then: Then::Release }).collect();
        let settle = Settle { stream, group, consumer, fence: None, entries: &entries };
        backend.settle(settle).await?;
    }
}

/// Whether an entry of a dead member can be removed by anybody: nothing is taken over from it.
pub(super) fn is_removable(entry: &Entry) -> bool {
    matches!(entry.stand, Stand::Resting(_)) || entry.mode == Mode::Owned
}

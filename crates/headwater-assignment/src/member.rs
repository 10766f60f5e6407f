//! This process as a member of a service: the state that all tasks share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::limits::BATCH_MAX;
use headwater_stream::{
    Backend, EntryId, Epoch, Fence, Fields, GroupStart, HeldLease, HolderName, LeaseAcquisition,
    LeaseName, LeaseRenewer, LostLeases, MemberList, Result, SettleAction, SettleBatch,
    SettleResult, Settlement, StreamError, StreamName,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use crate::config::AssignmentConfig;
use crate::entry_index::EntryIndex;
use crate::error::ClaimError;
use crate::input;
use crate::metrics::{AssignmentMetrics, LOCKS_ACQUIRED, LOCKS_RELEASED, OWNED};
use crate::names::{MemberIdentity, Names};
use crate::notification::NotificationQueue;
use crate::owned_set::OwnedSet;

pub(crate) struct AssignmentMember {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) names: Names,
    pub(crate) identity: MemberIdentity,
    pub(crate) config: AssignmentConfig,
    pub(crate) renewer: LeaseRenewer,
    members: MemberList,
    /// The lease that shows that this process is alive.
    pub(crate) member_lease: LeaseName,
    pub(crate) owned_set: Arc<OwnedSet>,
    pub(crate) notification_queue: Arc<NotificationQueue>,
    pub(crate) metrics: AssignmentMetrics,
    entry_index: Mutex<EntryIndex>,
    /// Streams this process released and when, so that it does not acquire them again at once.
    recently_released: Mutex<HashMap<StreamName, Instant>>,
}

impl AssignmentMember {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        names: Names,
        identity: MemberIdentity,
        config: AssignmentConfig,
    ) -> Result<(Self, LostLeases)> {
        let metrics = AssignmentMetrics::new(&names.service);
        let leases = Arc::clone(&backend);
        let (renewer, losses) =
            LeaseRenewer::new(leases, identity.holder.clone(), config.renewer())?;
        let member = Self {
            renewer,
            members: MemberList::new(vec![names.members.clone()]),
            member_lease: names.member_lease(identity.holder.as_str())?,
            owned_set: OwnedSet::new(config.streams_max),
            notification_queue: NotificationQueue::new(
                config.notifications_max,
                config.streams_max,
                metrics.clone(),
            ),
            metrics,
            entry_index: Mutex::default(),
            recently_released: Mutex::default(),
            backend,
            names,
            identity,
            config,
        };
        Ok((member, losses))
    }

    /// Creates the input stream and its group, and checks that leases can fence it.
    pub(crate) async fn prepare(&self) -> Result<()> {
        self.ensure_group().await?;
        // A settle that is always rejected: as fenced if lease and input are compatible, otherwise with the error
        // that the first `done` would get.
        let lease = self.names.lease(&self.names.input)?;
        let fence = Fence { lease, epoch: Epoch(0) };
        match self.settle(Some(&fence), &[Settlement::ack(EntryId::MIN)]).await {
            Ok(_) | Err(StreamError::Fenced { .. }) => Ok(()),
            Err(error) if error.is_transient() => Err(error),
            Err(error) => Err(StreamError::invalid(
                format!("the service name `{}`", self.names.service),
                format!(
                    "leases cannot guard its input stream; on a Redis Cluster give it a hash tag, such as \
                     `{{{}}}` ({error})",
                    self.names.service
                ),
            )),
        }
    }

    /// Creates the group again after it was deleted. A stream that was deleted with it does not come back before an entry is
    /// added: that entry is the first one of the new group.
    pub(crate) async fn restore_group(&self) -> Result<()> {
        match self.backend.stats(&self.names.input).await? {
            Some(_) => self.ensure_group().await,
            None => Ok(()),
        }
    }

    /// Creates the input stream and its group, from the beginning.
    pub(crate) async fn ensure_group(&self) -> Result<()> {
        let (input, group) = (&self.names.input, &self.names.group);
        if self.backend.ensure_group(input, group, GroupStart::Beginning).await? {
            self.entry_index().clear();
        }
        Ok(())
    }

    /// Registers this process as alive. The lease comes first: a member without one counts as dead.
    pub(crate) async fn join(&self) -> Result<()> {
        if let LeaseAcquisition::Held { by, .. } = self.renewer.acquire(&self.member_lease).await? {
            warn!(lease = %self.member_lease, %by, "another process holds the member lease of this consumer");
        }
        self.members.add(&*self.backend, &[self.identity.holder.to_string()]).await
    }

    /// Deregisters this process.
    pub(crate) async fn leave(&self) -> Result<()> {
        // The lease first, because it decides. Other members clean up the set.
        self.renewer.release(std::slice::from_ref(&self.member_lease)).await?;
        self.members.remove(&*self.backend, &[self.identity.holder.to_string()]).await
    }

    /// The members that are alive. Dead ones are removed from the list.
    pub(crate) async fn live_members(&self) -> Result<Vec<HolderName>> {
        let parse = |text: &str| self.names.member(text);
        let snapshot = self.members.read(&*self.backend, parse, Vec::new()).await?;
        let dead: Vec<String> = snapshot.dead().map(HolderName::to_string).collect();
        self.members.remove(&*self.backend, &dead).await?;
        Ok(snapshot.alive().cloned().collect())
    }

    /// Settles input entries.
    pub(crate) async fn settle(
        &self,
        fence: Option<&Fence>,
        entries: &[Settlement],
    ) -> Result<SettleResult> {
        let settle = SettleBatch {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: &self.identity.consumer,
            fence,
            entries,
        };
        self.backend.settle(settle).await
    }

    /// Releases entries unhandled. Needs no fence: entries pending for other consumers are unaffected.
    pub(crate) async fn release_entries(&self, ids: &[EntryId]) -> Result<()> {
        for chunk in ids.chunks(BATCH_MAX) {
            let entries: Vec<Settlement> = chunk
                .iter()
                .map(|id| Settlement { id: *id, action: SettleAction::Release })
                .collect();
            self.settle(None, &entries).await?;
        }
        Ok(())
    }

    /// Moves a pending input entry to the dead letters, exactly once.
    pub(crate) async fn dead_letter(
        &self,
        id: EntryId,
        fields: &Fields,
        reason: &str,
        fence: Option<&Fence>,
    ) -> Result<()> {
        let (letter, removable) = input::dead_letter(id, fields, reason);
        let then = SettleAction::Append { to: self.names.dead_letters.clone(), fields: letter };
        let settled = self.settle(fence, &[Settlement { id, action: then }]).await?;
        // The letter is complete. A crash here leaves an acknowledged entry in the stream.
        if settled.applied > 0 && removable {
            self.backend.delete_entries(&self.names.input, &[id]).await?;
        }
        self.entry_index().remove(id);
        Ok(())
    }

    /// Acquires the lease of a stream.
    pub(crate) async fn acquire_lease(
        &self,
        stream: &StreamName,
    ) -> Result<LeaseGuard<'_>, ClaimError> {
        match self.renewer.acquire(&self.names.lease(stream)?).await? {
            LeaseAcquisition::Won(held) => {
                self.metrics.count(LOCKS_ACQUIRED, 1);
                Ok(LeaseGuard { member: self, held, retained: false })
            }
            LeaseAcquisition::Held { by, .. } => {
                Err(ClaimError::AlreadyClaimed { stream: stream.clone(), by: Some(by) })
            }
        }
    }

    /// Releases leases, so that other consumers are notified at once. On failure they expire.
    pub(crate) async fn release_leases(&self, leases: &[LeaseName]) {
        match self.renewer.release(leases).await {
            Ok(count) => self.metrics.count(LOCKS_RELEASED, count),
            Err(error) => {
                warn!(count = leases.len(), %error, "could not release leases; they will expire");
            }
        }
    }

    pub(crate) fn entry_index(&self) -> MutexGuard<'_, EntryIndex> {
        lock(&self.entry_index)
    }

    pub(crate) fn recently_released(&self) -> MutexGuard<'_, HashMap<StreamName, Instant>> {
        lock(&self.recently_released)
    }

    pub(crate) fn count_owned(&self) {
        self.metrics.gauge(OWNED, self.owned_set.len());
    }
}

/// Lifecycle of the assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lifecycle {
    /// Everything runs.
    Running,
    /// No new streams are acquired; owned streams are kept.
    Closing,
    /// Nothing runs.
    Stopped,
}

/// Waits until the assignment has reached this state. Cancel-safe.
pub(crate) async fn lifecycle_reached(
    lifecycle: &mut watch::Receiver<Lifecycle>,
    wanted: Lifecycle,
) {
    // An error means that the sender is gone: everything has stopped.
    let _ = lifecycle.wait_for(|lifecycle| *lifecycle >= wanted).await;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

/// A lease whose stream is not owned yet. On drop it is released, so that a cancelled caller leaves no lease behind.
pub(crate) struct LeaseGuard<'a> {
    member: &'a AssignmentMember,
    pub(crate) held: HeldLease,
    retained: bool,
}

impl LeaseGuard<'_> {
    pub(crate) fn fence(&self) -> &Fence {
        self.held.fence()
    }

    /// Keeps the lease: the stream is owned.
    pub(crate) fn retain(mut self) {
        self.retained = true;
    }

    /// Releases the lease now.
    pub(crate) async fn release(mut self) {
        self.retained = true;
        self.member.release_leases(std::slice::from_ref(&self.held.fence().lease)).await;
    }
}

impl Drop for LeaseGuard<'_> {
    fn drop(&mut self) {
        if !self.retained {
            self.member.renewer.release_later(&self.held.fence().lease);
        }
    }
}

//! This process as a member of a service: what all its parts share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::limits::BATCH_MAX;
use headwater_stream::{
    Acquired, Backend, EntryId, Epoch, Fence, Fields, GroupStart, HeldLease, LeaseKeeper,
    LeaseName, Result, Settle, Settled, Settlement, StreamError, StreamName, Then,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use crate::config::AssignmentConfig;
use crate::input;
use crate::known::Known;
use crate::metrics::Metrics;
use crate::names::{Identity, Names};
use crate::notification::Broker;
use crate::slots::Slots;

pub(crate) struct Member {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) names: Names,
    pub(crate) identity: Identity,
    pub(crate) config: AssignmentConfig,
    pub(crate) keeper: LeaseKeeper,
    /// Shows others that this process is alive.
    pub(crate) member_lease: LeaseName,
    pub(crate) slots: Arc<Slots>,
    pub(crate) broker: Arc<Broker>,
    pub(crate) metrics: Metrics,
    known: Mutex<Known>,
    /// Leases that belong to no stream of ours any more and are still to be released.
    forsaken: Mutex<Vec<(StreamName, LeaseName)>>,
    /// What we gave back and when, so that we do not take it again at once.
    given_back: Mutex<HashMap<StreamName, Instant>>,
}

impl Member {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        names: Names,
        identity: Identity,
        config: AssignmentConfig,
    ) -> Result<Self> {
        let metrics = Metrics::new(&names.service);
        let leases = Arc::clone(&backend);
        let keeper = LeaseKeeper::new(leases, identity.holder.clone(), config.keeper())?;
        Ok(Self {
            keeper,
            member_lease: names.member_lease(identity.holder.as_str())?,
            slots: Slots::new(config.streams_max),
            broker: Broker::new(config.notifications_max, config.streams_max, metrics.clone()),
            metrics,
            known: Mutex::default(),
            forsaken: Mutex::default(),
            given_back: Mutex::default(),
            backend,
            names,
            identity,
            config,
        })
    }

    /// Creates the input with its group, and makes sure that leases can guard it.
    pub(crate) async fn prepare(&self) -> Result<()> {
        self.ensure_group().await?;
        // A settle that can only be refused: by its fence where lease and input fit together, else for the reason that
        // would otherwise stop the first `done`.
        let lease = self.names.lease(&self.names.input)?;
        let fence = Fence { lease, epoch: Epoch(0) };
        match self.settle(Some(&fence), &[Settlement::done(EntryId::MIN)]).await {
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

    /// Creates the group from the beginning, also after it was lost.
    pub(crate) async fn ensure_group(&self) -> Result<()> {
        let (input, group) = (&self.names.input, &self.names.group);
        if self.backend.ensure_group(input, group, GroupStart::Beginning).await? {
            self.known().clear();
        }
        Ok(())
    }

    /// Shows others that this process is alive. The lease first: a member without one is taken for dead.
    pub(crate) async fn join(&self) -> Result<()> {
        if let Acquired::Held { by, .. } = self.keeper.acquire(&self.member_lease).await? {
            warn!(lease = %self.member_lease, %by, "somebody else holds our member lease");
        }
        let member = self.identity.holder.as_str();
        self.backend.set_add(&self.names.members, &[member], None).await?;
        Ok(())
    }

    /// The opposite of `join`.
    pub(crate) async fn leave(&self) -> Result<()> {
        // The lease first: it is what counts, the list is tidied by whoever looks.
        self.keeper.release(std::slice::from_ref(&self.member_lease)).await?;
        let member = self.identity.holder.as_str();
        self.backend.set_remove(&self.names.members, &[member]).await?;
        Ok(())
    }

    /// Ends deliveries of input entries.
    pub(crate) async fn settle(
        &self,
        fence: Option<&Fence>,
        entries: &[Settlement],
    ) -> Result<Settled> {
        let settle = Settle {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: &self.identity.consumer,
            fence,
            entries,
        };
        self.backend.settle(settle).await
    }

    /// Gives entries back unhandled. Needs no fence: what is pending for another consumer stays as it is.
    pub(crate) async fn give_back_entries(&self, ids: &[EntryId]) -> Result<()> {
        for chunk in ids.chunks(BATCH_MAX) {
            let entries: Vec<Settlement> =
                chunk.iter().map(|id| Settlement { id: *id, then: Then::Release }).collect();
            self.settle(None, &entries).await?;
        }
        Ok(())
    }

    /// Moves an input entry to the dead letters, once: whoever has it in hand.
    pub(crate) async fn bury(
        &self,
        id: EntryId,
        fields: &Fields,
        reason: &str,
        fence: Option<&Fence>,
    ) -> Result<()> {
        let (letter, removable) = input::dead_letter(id, fields, reason);
        let then = Then::Append { to: self.names.dead_letters.clone(), fields: letter };
        let settled = self.settle(fence, &[Settlement { id, then }]).await?;
        // The letter holds it all. Were we to die here, an entry stays that nobody is given again.
        if settled.applied > 0 && removable {
            self.backend.delete_entries(&self.names.input, &[id]).await?;
        }
        self.known().forget(id);
        Ok(())
    }

    /// Takes the lease of a stream; `None` if somebody else holds it.
    pub(crate) async fn lock(&self, stream: &StreamName) -> Result<Option<Locked<'_>>> {
        let lease = self.names.lease(stream)?;
        let Some(held) = self.keeper.acquire(&lease).await?.won() else { return Ok(None) };
        self.metrics.locks_acquired(1);
        Ok(Some(Locked { member: self, stream: stream.clone(), held, kept: false }))
    }

    /// Releases leases so that others hear of it at once. If that fails they run out.
    pub(crate) async fn unlock(&self, leases: &[LeaseName]) {
        match self.keeper.release(leases).await {
            Ok(count) => self.metrics.locks_released(count),
            Err(error) => {
                warn!(count = leases.len(), %error, "leases were not released, they run out");
            }
        }
    }

    /// Leaves the release of a lease to the next heartbeat.
    pub(crate) fn forsake(&self, stream: StreamName, lease: LeaseName) {
        lock(&self.forsaken).push((stream, lease));
    }

    /// Releases what was left to the heartbeat, except for streams that are ours again.
    pub(crate) async fn unlock_forsaken(&self) {
        let forsaken = std::mem::take(&mut *lock(&self.forsaken));
        let leases: Vec<LeaseName> = forsaken
            .into_iter()
            .filter(|(stream, _)| !self.slots.contains(stream))
            .map(|(_, lease)| lease)
            .collect();
        if !leases.is_empty() {
            self.unlock(&leases).await;
        }
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.known)
    }

    pub(crate) fn given_back(&self) -> MutexGuard<'_, HashMap<StreamName, Instant>> {
        lock(&self.given_back)
    }

    pub(crate) fn count_owned(&self) {
        self.metrics.owned(self.slots.len());
    }
}

/// How far the assignment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Everything runs.
    Running,
    /// Nothing new is taken; what is owned is kept.
    Closing,
    /// Nothing runs.
    Stopped,
}

/// Returns when the assignment has got that far. Cancel-safe.
pub(crate) async fn reached(stage: &mut watch::Receiver<Stage>, wanted: Stage) {
    // An error means that nobody is left to set the stage: everything has stopped.
    let _ = stage.wait_for(|stage| *stage >= wanted).await;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

/// A lease that belongs to no stream of ours yet. Dropped without a word, it is released by the next heartbeat, so
/// that a caller who went away leaves nothing locked.
pub(crate) struct Locked<'a> {
    member: &'a Member,
    stream: StreamName,
    held: HeldLease,
    kept: bool,
}

impl Locked<'_> {
    pub(crate) fn fence(&self) -> &Fence {
        self.held.fence()
    }

    /// The stream is ours; the lease stays.
    pub(crate) fn keep(mut self) -> HeldLease {
        self.kept = true;
        self.held.clone()
    }

    /// Releases the lease now.
    pub(crate) async fn unlock(mut self) {
        self.kept = true;
        self.member.unlock(std::slice::from_ref(&self.held.fence().lease)).await;
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.member.forsake(self.stream.clone(), self.held.fence().lease.clone());
        }
    }
}

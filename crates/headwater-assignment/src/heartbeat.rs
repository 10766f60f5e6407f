//! The heartbeat: keeps all input entries alive in one call, and disowns streams whose leases were lost.
//!
//! Upstream: an interval, and losses from the lease renewer, which renews all leases in one call and retries. So an
//! interval costs the same few round trips for any number of streams.
//! Guarantees: a stream is disowned as soon as its lease is no longer valid, and stays disowned. A failed heartbeat is
//! retried several times before others could take the stream for abandoned.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::limits::LEASES_MAX;
use headwater_stream::{EntryId, Fence, LossCause, LostLease, LostLeases, Result, StreamError};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use crate::member::{AssignmentMember, Lifecycle, lifecycle_reached};
use crate::metrics::{HEARTBEAT_SECONDS, HEARTBEATS_FAILED, LOCKS_EXTENDED};
use crate::notification::Disowned;
use crate::owned::{Owned, OwnershipPhase};

/// Renews leases and runs heartbeats until the assignment has stopped.
pub(crate) async fn run(
    member: Arc<AssignmentMember>,
    mut losses: LostLeases,
    mut lifecycle: watch::Receiver<Lifecycle>,
) {
    tokio::select! {
        () = member.renewer.run(lifecycle_reached(&mut lifecycle, Lifecycle::Stopped)) => {}
        () = keep_alive(&member, &mut losses) => {}
    }
}

async fn keep_alive(member: &AssignmentMember, losses: &mut LostLeases) {
    let every = member.config.heartbeat_every;
    let mut next = Instant::now() + every;
    let mut renewed_before = 0;
    loop {
        tokio::select! {
            // Losses first, because they say the cause.
            biased;
            lost = receive(losses) => {
                member.disown_lost(&lost);
                continue;
            }
            () = sleep_until(next) => {}
        }
        let started = Instant::now();
        let beat = member.run_heartbeat_once(every / 2);
        tokio::pin!(beat);
        // Streams that are lost while it waits for replies are disowned at once.
        let result = loop {
            tokio::select! {
                result = &mut beat => break result,
                lost = receive(losses) => member.disown_lost(&lost),
            }
        };
        let renewed = member.renewer.renewed();
        member.metrics.count(LOCKS_EXTENDED, (renewed - renewed_before) as usize);
        renewed_before = renewed;
        match result {
            Ok(()) => {
                member.metrics.time(HEARTBEAT_SECONDS, started.elapsed());
                next = started + every;
            }
            Err(error) => {
                member.metrics.count(HEARTBEATS_FAILED, 1);
                warn!(%error, "heartbeat failed; retrying");
                next = Instant::now() + every / 8;
            }
        }
    }
}

/// Waits for a loss and returns all that are known. Cancel-safe.
async fn receive(losses: &mut LostLeases) -> Vec<LostLease> {
    let mut lost = Vec::new();
    losses.recv_many(&mut lost, LEASES_MAX).await;
    lost
}

impl AssignmentMember {
    /// Keeps all entries alive once; waits at most `limit` for the reply.
    pub(crate) async fn run_heartbeat_once(&self, limit: Duration) -> Result<()> {
        // Also those that a call was ending when their lease was lost.
        self.disown_lost(&[]);
        let owned: Vec<(Owned, OwnershipPhase)> = self
            .owned_set
            .owned()
            .into_iter()
            .map(|owned| {
                let phase = owned.phase();
                (owned, phase)
            })
            .collect();
        let ids: Vec<EntryId> = owned.iter().map(|(owned, _)| owned.entry()).collect();
        let late = |_| StreamError::Unavailable {
            problem: format!("no reply to a heartbeat within {limit:?}"),
            source: None,
        };
        match timeout(limit, self.keep_entries_alive(&ids)).await.map_err(late).flatten() {
            Ok(missing) => self.handle_missing(&owned, &missing).await?,
            // The group was deleted (flush). The leases are gone too, so the renewer reports the loss.
            Err(StreamError::NoGroup { .. }) => self.restore_group().await?,
            Err(error) => return Err(error),
        }
        if !self.renewer.holds(&self.member_lease) {
            self.join().await?;
        }
        Ok(())
    }

    /// Disowns streams whose leases are no longer valid. A call that is ending one finds out itself, unless the server
    /// has said that the lease is lost.
    pub(crate) fn disown_lost(&self, lost: &[LostLease]) {
        let causes: HashMap<&Fence, LossCause> =
            lost.iter().map(|lost| (&lost.fence, lost.cause)).collect();
        for owned in self.owned_set.owned() {
            if causes.get(owned.guard().fence()) == Some(&LossCause::LostOnServer) {
                self.disown(&owned, Disowned::LeaseLost);
            } else if !owned.guard().is_valid() && owned.phase() != OwnershipPhase::Ending {
                self.disown(&owned, Disowned::LeaseUnconfirmed);
            }
        }
    }

    /// Handles entries that are no longer pending for this consumer: ended by a call with a lost reply, or
    /// reclaimed.
    async fn handle_missing(
        &self,
        owned: &[(Owned, OwnershipPhase)],
        missing: &HashSet<EntryId>,
    ) -> Result<()> {
        for (owned, phase) in owned {
            let is_missing = missing.contains(&owned.entry());
            match phase {
                OwnershipPhase::Uncertain(reason) if is_missing => self.confirm_end(owned, *reason),
                OwnershipPhase::Uncertain(_) => owned.reset_uncertain(),
                OwnershipPhase::Active if is_missing && owned.phase() == OwnershipPhase::Active => {
                    self.reclaim_entry(owned).await?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reclaims the entry: this process holds the lease, so no other consumer may have it.
    async fn reclaim_entry(&self, owned: &Owned) -> Result<()> {
        match self.reclaim(owned.entry(), owned.guard().fence()).await {
            Ok(Some(_)) => debug!(stream = %owned.stream(), "input entry reclaimed"),
            Ok(None) if owned.phase() == OwnershipPhase::Active => {
                self.disown(owned, Disowned::EntryGone);
            }
            Ok(None) => {}
            Err(StreamError::Fenced { .. }) => self.disown(owned, Disowned::LeaseLost),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

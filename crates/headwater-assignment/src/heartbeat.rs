//! The heartbeat: renews all leases in one call and keeps all input entries alive in another, concurrently,
//! so an interval costs one round trip for any number of streams.
//!
//! Guarantees: a stream is disowned by a local timer as soon as its lease is no longer valid, and stays
//! disowned. A failed heartbeat is retried several times before that.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{EntryId, LossCause, LostLease, Result, StreamError};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use crate::member::{AssignmentMember, Lifecycle, lifecycle_reached};
use crate::notification::Disowned;
use crate::owned::{Owned, OwnershipPhase};

/// Runs heartbeats until the assignment has stopped.
pub(crate) async fn run(member: Arc<AssignmentMember>, mut lifecycle: watch::Receiver<Lifecycle>) {
    let every = member.config.heartbeat_every;
    let mut next = Instant::now() + every;
    loop {
        tokio::select! {
            () = lifecycle_reached(&mut lifecycle, Lifecycle::Stopped) => return,
            () = sleep_until(next) => {}
            // Run at once, so that the leases of disowned streams are released for other consumers.
            _ = member.keeper.lapsed() => {}
        }
        let started = Instant::now();
        match beat(&member, every).await {
            Ok(()) => {
                member.metrics.heartbeat(started.elapsed());
                next = started + every;
            }
            Err(error) => {
                member.metrics.heartbeat_failed();
                warn!(%error, "heartbeat failed; retrying");
                next = Instant::now() + every / 8;
            }
        }
    }
}

/// One heartbeat. Leases that lapse while it waits for replies are disowned at once.
async fn beat(member: &AssignmentMember, every: Duration) -> Result<()> {
    let beat = member.run_heartbeat_once(every / 2);
    tokio::pin!(beat);
    loop {
        tokio::select! {
            result = &mut beat => return result,
            _ = member.keeper.lapsed() => member.disown_lapsed(),
        }
    }
}

impl AssignmentMember {
    /// Renews everything once; waits at most `limit` for the replies.
    pub(crate) async fn run_heartbeat_once(&self, limit: Duration) -> Result<()> {
        // First: a process that was paused must not renew leases it has lost.
        self.disown_lapsed();
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
        let (renewed, kept, ()) = tokio::join!(
            timeout(limit, self.keeper.run_once()),
            timeout(limit, self.keep_entries_alive(&ids)),
            async {
                // Leases that could not be released expire.
                let _ = timeout(limit, self.release_deferred()).await;
            },
        );
        let renewed =
            self.handle_renewed(&owned, renewed.unwrap_or_else(|_| Err(late(limit)))).await;
        let kept = match kept.unwrap_or_else(|_| Err(late(limit))) {
            Ok(missing) => self.handle_missing(&owned, &missing).await,
            // The group was deleted (flush). The leases are gone too, so the renewal has reported the loss.
            Err(StreamError::NoGroup { .. }) => self.ensure_group().await,
            Err(error) => Err(error),
        };
        renewed.and(kept)
    }

    /// Disowns streams whose leases are no longer valid.
    pub(crate) fn disown_lapsed(&self) {
        for owned in self.owned_set.owned() {
            if !owned.guard().is_valid() && owned.phase() != OwnershipPhase::Ending {
                self.disown(&owned, Disowned::LeaseUnconfirmed);
            }
        }
    }

    async fn handle_renewed(
        &self,
        owned: &[(Owned, OwnershipPhase)],
        renewed: Result<Vec<LostLease>>,
    ) -> Result<()> {
        let lost = renewed?;
        self.metrics.locks_extended(owned.len().saturating_sub(lost.len()));
        let lost: HashMap<_, _> = lost.into_iter().map(|lost| (lost.fence, lost.cause)).collect();
        for (owned, _) in owned {
            match lost.get(owned.guard().fence()) {
                Some(LossCause::LostOnServer) => self.disown(owned, Disowned::LeaseLost),
                Some(LossCause::Lapsed) => self.disown(owned, Disowned::LeaseUnconfirmed),
                None => {}
            }
        }
        if !self.keeper.holds(&self.member_lease) {
            self.join().await?;
        }
        Ok(())
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

fn late(limit: Duration) -> StreamError {
    StreamError::Unavailable {
        problem: format!("no reply to a heartbeat within {limit:?}"),
        source: None,
    }
}

//! Rebalance: those who own more than their fair share give idle streams back, a few with each sweep.
//!
//! Members show that they live by a lease each. Everybody computes the share from the same lists, so no coordinator is
//! needed; what is given back is taken by those below their share (see `sweep`).

use std::collections::HashSet;

use headwater_stream::{HolderName, LeaseName, Result, StreamName};
use tracing::{debug, info};

use crate::config::Rebalance;
use crate::member::AssignmentMember;
use crate::notification::Disowned;

impl AssignmentMember {
    /// Gives away what is above our share of the `listed` streams. Returns the share, if a rebalance is wanted.
    pub(crate) async fn rebalance(&self, scanned: &HashSet<&StreamName>) -> Result<Option<usize>> {
        let Rebalance::Idle { per_sweep } = self.config.rebalance else { return Ok(None) };
        let members = self.live_members().await?.len().max(1);
        // What became ours since the listing counts as well, or it would seem to be above our share.
        let owned = self.owned_set.owned();
        let new = owned.iter().filter(|owned| !scanned.contains(owned.stream())).count();
        let share = (scanned.len() + new).div_ceil(members);
        let leave_max = owned.len().saturating_sub(share).min(per_sweep);
        let mut leaving = Vec::new();
        for owned in owned {
            if leaving.len() == leave_max {
                break;
            }
            if let Ok(attempt) = owned.begin_release_if_idle() {
                leaving.push((owned, attempt));
            }
        }
        if !leaving.is_empty() {
            info!(count = leaving.len(), share, members, "giving streams to others");
            self.release_streams(leaving, Disowned::Rebalanced).await?;
        }
        Ok(Some(share))
    }

    /// The members whose lease is held. Those without one are removed from the list.
    pub(crate) async fn live_members(&self) -> Result<Vec<HolderName>> {
        let scanned = self.backend.set_members(&self.names.members).await?;
        let (mut names, mut leases): (Vec<String>, Vec<LeaseName>) = (Vec::new(), Vec::new());
        for name in scanned {
            // What others wrote into the set and is no name cannot be a member.
            if let Ok(lease) = self.names.member_lease(&name) {
                names.push(name);
                leases.push(lease);
            }
        }
        let holders = self.backend.leases(&leases).await?;
        let (mut live, mut dead) = (Vec::new(), Vec::new());
        for (name, holder) in names.into_iter().zip(holders) {
            match holder {
                // Whether that one lives is not known.
                Some(info) if info.is_wrong_type() => {}
                Some(info) => live.push(info.holder),
                None => dead.push(name),
            }
        }
        if !dead.is_empty() {
            debug!(count = dead.len(), "dead members removed from the list");
            let dead: Vec<&str> = dead.iter().map(String::as_str).collect();
            self.backend.set_remove(&self.names.members, &dead).await?;
        }
        Ok(live)
    }
}

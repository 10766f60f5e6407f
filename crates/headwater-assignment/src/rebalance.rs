//! Rebalancing: consumers above their fair share release idle streams, a few per sweep.
//!
//! Every member holds a lease. All members compute the share from the same data, so no coordinator is
//! needed; consumers below their share acquire the released streams (see `sweep`).

use std::collections::HashSet;

use headwater_stream::{HolderName, LeaseName, Result, StreamName};
use tracing::{debug, info};

use crate::config::Rebalance;
use crate::member::AssignmentMember;
use crate::notification::Disowned;

impl AssignmentMember {
    /// Releases streams above the fair share of the `scanned` streams. Returns the share, if rebalancing is
    /// enabled.
    pub(crate) async fn rebalance(&self, scanned: &HashSet<&StreamName>) -> Result<Option<usize>> {
        let Rebalance::Idle { per_sweep } = self.config.rebalance else { return Ok(None) };
        let members = self.live_members().await?.len().max(1);
        // Include streams acquired since the scan, or they would count as above the share.
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
            info!(
                count = leaving.len(),
                share, members, "rebalancing: releasing streams to other consumers"
            );
            self.release_streams(leaving, Disowned::Rebalanced).await?;
        }
        Ok(Some(share))
    }

    /// The members that hold their lease. Members without one are removed from the set.
    pub(crate) async fn live_members(&self) -> Result<Vec<HolderName>> {
        let scanned = self.backend.set_members(&self.names.members).await?;
        let (mut names, mut leases): (Vec<String>, Vec<LeaseName>) = (Vec::new(), Vec::new());
        for name in scanned {
            // An invalid name in the set cannot be a member.
            if let Ok(lease) = self.names.member_lease(&name) {
                names.push(name);
                leases.push(lease);
            }
        }
        let holders = self.backend.leases(&leases).await?;
        let (mut live, mut dead) = (Vec::new(), Vec::new());
        for (name, holder) in names.into_iter().zip(holders) {
            match holder {
                // Unknown whether this member is alive.
                Some(info) if info.is_wrong_type() => {}
                Some(info) => live.push(info.holder),
                None => dead.push(name),
            }
        }
        if !dead.is_empty() {
            debug!(count = dead.len(), "removed dead members");
            let dead: Vec<&str> = dead.iter().map(String::as_str).collect();
            self.backend.set_remove(&self.names.members, &dead).await?;
        }
        Ok(live)
    }
}

//! Rebalancing: consumers above their fair share release idle streams, a few per sweep.
//!
//! Every member holds a lease. All members compute the share from the same data, so no coordinator is
//! needed; consumers below their share acquire the released streams (see `sweep`).

use std::collections::HashSet;

use headwater_stream::{Result, StreamName};
use tracing::info;

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
}

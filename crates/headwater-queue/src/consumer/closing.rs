//! The end of work on a partition, in good order.
//!
//! Upstream: `workplace`, when a partition is handed over or the subscription stops. Promises: handlers at work may
//! finish within the drain time, then they are cancelled; everything else is released and no attempt is counted; when it
//! returns nothing is in hand, everything is settled (while the lease allowed it), and nothing can arrive any more.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use super::worker::{Phase, Worker};

/// How long settling may take after the last handler ended, if the backend does not answer.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

impl Worker {
    /// Finishes what is in hand: with [`Phase::Closing`] what is being handled, with [`Phase::Draining`] everything.
    pub(super) async fn finish_up(self: &Arc<Self>, phase: Phase, drain: Duration) {
        self.close(phase);
        self.feed.remove(self).await;
        let quiet = self.until(|state| state.phase == Phase::Ended || state.is_quiet());
        if tokio::time::timeout(drain, quiet).await.is_err() {
            warn!(stream = %self.rules.stream, ?drain, "handlers did not end in time: they are cancelled");
            self.cut_short();
        }
        self.settle_soon();
        let settled = self.until(|state| state.phase == Phase::Ended || state.is_settled());
        tokio::select! {
            _ = tokio::time::timeout(SETTLED_WITHIN, settled) => {}
            () = self.lease.lost() => {}
        }
        self.end();
    }
}

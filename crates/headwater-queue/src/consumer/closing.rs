//! The end of work on a partition, in good order.
//!
//! Upstream: `workplace`, when a partition is handed over or the subscription stops. Promises: handlers at work may
//! finish within the drain time, then they are cancelled; everything else is released and no attempt is counted; when it
//! returns nothing is in hand, everything is settled (while the lease allowed it), and nothing can arrive any more.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use super::worker::{Phase, Worker};

/// How long the last read may take to end, at least, if the backend does not answer.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);
/// How long settling may take after the last handler ended, if the backend does not answer.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

impl Worker {
    /// Finishes what is in hand: with [`Phase::Closing`] what is being handled, with [`Phase::Draining`] everything.
    pub(super) async fn finish_up(self: &Arc<Self>, phase: Phase, drain: Duration) {
        let until = Instant::now() + drain;
        self.close(phase);
        let removing = async {
            self.feed.remove(self).await;
            self.gather_unseen().await;
        };
        if tokio::time::timeout(drain.max(REMOVED_WITHIN), removing).await.is_err() {
            // What it may still bring is released, or stays pending for whoever is next.
            warn!(stream = %self.rules.stream, "the last read did not end in time");
        }
        let quiet = self.until(|state| state.phase == Phase::Ended || state.is_quiet());
        if tokio::time::timeout_at(until, quiet).await.is_err() {
            warn!(stream = %self.rules.stream, ?drain, "handlers did not end in time: they are cancelled");
            self.cut_short();
        }
        self.settle_soon();
        let settled = self.until(|state| state.phase == Phase::Ended || state.is_settled());
        tokio::select! {
            _ = tokio::time::timeout(SETTLED_WITHIN, settled) => {}
            () = self.lease.lost() => {}
        }
        self.abandon();
    }
}

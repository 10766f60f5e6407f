//! Claims whose runs ended while the database was unavailable.
//!
//! Upstream: `worker`. Downstream: the store. Guarantees: each is released when the database is available again, unless it has
//! expired. An expired claim counts as a crash of its worker, and this worker did not crash.

use std::sync::{Mutex, MutexGuard};

use tokio::time::Instant;
use tracing::info;

use crate::claim::{ClaimRelease, ClaimReleased, ReleaseReason};
use crate::error::Result;
use crate::handler::Run;
use crate::limits::BATCH_MAX;
use crate::local_queue::DueQueue;
use crate::store::Store;

/// At most one claim per run that was in flight.
#[derive(Default)]
pub(crate) struct LapsedClaims(Mutex<Vec<ClaimRelease>>);

impl LapsedClaims {
    /// Adds the claim of a run, unless the database reported it as lost.
    pub(crate) fn add(&self, run: &Run) {
        if !run.claim.is_lost() {
            let (issue_id, epoch, reason) = (run.issue().id, run.epoch(), ReleaseReason::Shutdown);
            self.lock().push(ClaimRelease { issue_id, epoch, reason });
        }
    }

    /// Releases the claims, and queues their issues. Claims of a call that fails stay for the next one.
    pub(crate) async fn release(&self, store: &dyn Store, queue: &DueQueue) -> Result<()> {
        loop {
            let claims: Vec<ClaimRelease> = self.lock().iter().take(BATCH_MAX).copied().collect();
            if claims.is_empty() {
                return Ok(());
            }
            let released = store.release_claims(&claims).await?;
            self.lock().drain(..claims.len());
            for (claim, released) in claims.iter().zip(released) {
                if let ClaimReleased::Requeued { .. } = released {
                    info!(
                        issue_id = %claim.issue_id, epoch = %claim.epoch,
                        "claim released after the database was unavailable"
                    );
                    queue.add(claim.issue_id, Instant::now());
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ClaimRelease>> {
        self.0.lock().expect("no code panics while it holds this lock")
    }
}

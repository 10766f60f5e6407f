//! Operator actions on issues: release from quarantine and retry, followed by a nudge.
//!
//! Upstream: the command line and HTTP. Downstream: `admin` for the change, `nudge` for the nudge. Guarantees: the
//! change is committed when a call has returned, which does not wait for the stream; if the nudge is lost, the next sweep
//! sends it. Not here: the transitions (see `state`).

use crate::admin::{EventLogFilter, IssueRetried, QuarantineCleared};
use crate::claim::Nudge;
use crate::error::{IssueError, Result};
use crate::issue::IssueId;
use crate::nudge::Nudger;
use crate::store::Store;

/// Ends a quarantine and nudges. [`NotFound`](crate::IssueError::NotFound) if the issue does not exist.
pub async fn release(
    store: &dyn Store,
    nudger: &Nudger,
    issue_id: IssueId,
) -> Result<QuarantineCleared> {
    let released = store.release(issue_id).await?;
    if released == QuarantineCleared::Queued {
        nudge(store, nudger, issue_id).await;
    }
    Ok(released)
}

/// Ends quarantines and nudges. Returns how many were ended; issues that are not quarantined or do not exist are skipped.
/// Quarantines ended before an error stay ended.
pub async fn release_all(store: &dyn Store, nudger: &Nudger, issues: &[IssueId]) -> Result<u64> {
    let mut count = 0;
    for issue_id in issues {
        match release(store, nudger, *issue_id).await {
            Ok(QuarantineCleared::Queued | QuarantineCleared::Idle) => count += 1,
            Ok(QuarantineCleared::NotQuarantined) | Err(IssueError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

/// Makes a quarantined or waiting issue claimable now, and nudges. [`NotFound`](crate::IssueError::NotFound) if it does
/// not exist.
pub async fn retry(store: &dyn Store, nudger: &Nudger, issue_id: IssueId) -> Result<IssueRetried> {
    let retried = store.retry(issue_id).await?;
    if retried == IssueRetried::Queued {
        nudge(store, nudger, issue_id).await;
    }
    Ok(retried)
}

/// Queues a nudge with the oldest unprocessed event log, if it can be read.
async fn nudge(store: &dyn Store, nudger: &Nudger, issue_id: IssueId) {
    let filter = EventLogFilter { processed: Some(false), ..EventLogFilter::default() };
    let oldest = store.event_logs(issue_id, &filter, 1).await.unwrap_or_default();
    let event_log_id = oldest.first().map(|log| log.id).unwrap_or_default();
    nudger.enqueue(Nudge { issue_id, event_log_id });
}

//! Operator actions on issues: release from quarantine and retry, followed by a nudge.
//!
//! Upstream: the command line and HTTP. Downstream: `admin` for the change, `nudge` for the nudge. Guarantees: the
//! change is committed when a call has returned; if the nudge is lost, the next sweep sends it. Not here: the
//! transitions (see `state`).

use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use crate::admin::{EventLogFilter, IssueRetried, QuarantineCleared};
use crate::claim::Nudge;
use crate::error::{IssueError, Result};
use crate::issue::IssueId;
use crate::nudge::Nudger;
use crate::store::Store;

/// Timeout of sending nudges.
const STREAM_DEADLINE: Duration = Duration::from_secs(2);

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

/// Ends quarantines, then sends all nudges at once. Returns how many were ended; issues that are not quarantined or do
/// not exist are skipped. Quarantines ended before an error stay ended.
pub async fn release_all(store: &dyn Store, nudger: &Nudger, issues: &[IssueId]) -> Result<u64> {
    let (mut count, mut nudges) = (0, Vec::new());
    let mut releasing = Ok(());
    for issue_id in issues {
        match store.release(*issue_id).await {
            Ok(QuarantineCleared::Queued) => {
                count += 1;
                nudges.push(nudge_for(store, *issue_id).await);
            }
            Ok(QuarantineCleared::Idle) => count += 1,
            Ok(QuarantineCleared::NotQuarantined) | Err(IssueError::NotFound { .. }) => {}
            Err(error) => {
                releasing = Err(error);
                break;
            }
        }
    }
    send(nudger, &nudges).await;
    releasing.map(|()| count)
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

async fn nudge(store: &dyn Store, nudger: &Nudger, issue_id: IssueId) {
    send(nudger, &[nudge_for(store, issue_id).await]).await;
}

/// A nudge with the oldest unprocessed event log, if it can be read.
async fn nudge_for(store: &dyn Store, issue_id: IssueId) -> Nudge {
    let filter = EventLogFilter { processed: Some(false), ..EventLogFilter::default() };
    let oldest = store.event_logs(issue_id, &filter, 1).await.unwrap_or_default();
    Nudge { issue_id, event_log_id: oldest.first().map(|log| log.id).unwrap_or_default() }
}

/// Never fails: the change is committed, and a lost nudge only delays processing until the next sweep.
async fn send(nudger: &Nudger, nudges: &[Nudge]) {
    if nudges.is_empty() {
        return;
    }
    let sent = timeout(STREAM_DEADLINE, nudger.send(nudges)).await;
    if !matches!(sent, Ok(Ok(()))) {
        let count = nudges.len();
        warn!(
            count,
            "nudges were not sent because the stream is unavailable; the next sweep sends them"
        );
    }
}

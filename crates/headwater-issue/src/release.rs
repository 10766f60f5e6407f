//! What an operator wants to be worked on now: an issue is released or tried again, and somebody is told at once.
//!
//! Upstream: the command line and HTTP. Downstream: `operator` for the change, `nudge` for the word. Promises: the change is
//! committed when a call has returned; if the word is lost, the next sweep says it. Not here: what a release does (see
//! `state`).

use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use crate::claim::Nudge;
use crate::error::Result;
use crate::issue::IssueId;
use crate::nudge::Nudger;
use crate::operator::{EventLogFilter, Released, Retried};
use crate::store::Store;

/// How long an operator waits for a stream that is away.
const STREAM_DEADLINE: Duration = Duration::from_secs(2);

/// Ends a quarantine, and nudges. [`NotFound`](crate::IssueError::NotFound) if there is no such issue.
pub async fn release(store: &dyn Store, nudger: &Nudger, issue_id: IssueId) -> Result<Released> {
    let released = store.release(issue_id).await?;
    if released == Released::Queued {
        nudge(store, nudger, issue_id).await;
    }
    Ok(released)
}

/// Makes an issue claimable now, be it quarantined or waiting, and nudges. [`NotFound`](crate::IssueError::NotFound) if there
/// is no such issue.
pub async fn retry(store: &dyn Store, nudger: &Nudger, issue_id: IssueId) -> Result<Retried> {
    let retried = store.retry(issue_id).await?;
    if retried == Retried::Queued {
        nudge(store, nudger, issue_id).await;
    }
    Ok(retried)
}

/// Never fails: the change is made, and what goes wrong here only delays it until the next sweep.
async fn nudge(store: &dyn Store, nudger: &Nudger, issue_id: IssueId) {
    let filter = EventLogFilter { processed: Some(false), ..EventLogFilter::default() };
    let oldest = store.event_logs(issue_id, &filter, 1).await.unwrap_or_default();
    let event_log_id = oldest.first().map(|log| log.id).unwrap_or_default();
    let sent = timeout(STREAM_DEADLINE, nudger.send(&[Nudge { issue_id, event_log_id }])).await;
    if !matches!(sent, Ok(Ok(()))) {
        warn!(%issue_id, "the stream is away, the issue waits for the next sweep");
    }
}

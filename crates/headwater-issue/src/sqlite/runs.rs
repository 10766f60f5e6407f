//! Ended runs on SQLite: the rows of `issue_runs`.
//!
//! Upstream: `state_batch`, when it saves issues whose run a transition has ended.

use headwater_stream::clock::Timestamp;
use serde_json::json;
use sqlx::Error;
use sqlx::sqlite::SqliteConnection;

use super::statements::{json_rows, to_column};
use crate::issue::{ClaimEpoch, IssueId};
use crate::state::EndedRun;

/// Writes one row for each of these runs, in one statement. The issues still have the time of the claim.
pub(super) async fn write(
    connection: &mut SqliteConnection,
    ended: &[(IssueId, EndedRun)],
    now: Timestamp,
) -> Result<(), Error> {
    if ended.is_empty() {
        return Ok(());
    }
    let row = |(issue, run): &(IssueId, EndedRun)| {
        let EndedRun { epoch, worker, result, error, events } = run;
        json!([issue.0, epoch.0, worker, result.as_str(), error, events])
    };
    sqlx::query(
        // A row that exists, because tables were changed by hand, stays: history never prevents the end of a run.
        "INSERT OR IGNORE INTO issue_runs
             (issue_id, epoch, worker, claimed_at, ended_at, result, error, events)
         SELECT i.id, run.value ->> 1, run.value ->> 2, coalesce(i.processing_started_at, ?2), ?2,
             run.value ->> 3, run.value ->> 4, run.value ->> 5
         FROM json_each(?1) AS run CROSS JOIN issues AS i ON i.id = run.value ->> 0",
    )
    .bind(json_rows(ended.iter().map(row).collect()))
    .bind(to_column(now))
    .execute(connection)
    .await?;
    Ok(())
}

/// Marks expired runs whose result came later. A run that ended otherwise keeps its result.
pub(super) async fn mark_fenced(
    connection: &mut SqliteConnection,
    fenced: &[(IssueId, ClaimEpoch)],
) -> Result<(), Error> {
    if fenced.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "UPDATE issue_runs SET result = 'fenced' FROM json_each(?1) AS run
         WHERE issue_id = run.value ->> 0 AND epoch = run.value ->> 1 AND result = 'expired'",
    )
    .bind(json_rows(fenced.iter().map(|(issue, epoch)| json!([issue.0, epoch.0])).collect()))
    .execute(connection)
    .await?;
    Ok(())
}

//! Dead letters on SQLite: records of quarantines.
//!
//! Upstream: `state_batch`, when it saves issues that a transition has quarantined or released.

use std::collections::BTreeSet;

use headwater_stream::clock::Timestamp;
use sqlx::Error;
use sqlx::sqlite::SqliteConnection;

use super::statements::{json_rows, to_column};
use crate::issue::IssueId;
use crate::limits::RUN_EVENTS_MAX;
use crate::row_decoding::to_i64;

fn ids(issues: &BTreeSet<IssueId>) -> String {
    json_rows(issues.iter().map(|issue| issue.0.into()).collect())
}

/// Writes a dead letter for each of these issues, and its error on the oldest unprocessed event logs.
pub(super) async fn write(
    connection: &mut SqliteConnection,
    issues: &BTreeSet<IssueId>,
) -> Result<(), Error> {
    if issues.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "INSERT INTO dead_letters
             (issue_id, error, attempts, crashes, pending_events, event_log_id, quarantined_at)
         SELECT i.id, coalesce(i.last_error, ''), i.attempts, i.crashes, i.pending_events,
             coalesce((SELECT min(e.id) FROM event_logs AS e
                 WHERE e.issue_id = i.id AND e.processed_at IS NULL), 0), i.quarantined_at
         FROM json_each(?1) AS asked CROSS JOIN issues AS i ON i.id = asked.value ORDER BY i.id",
    )
    .bind(ids(issues))
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "UPDATE event_logs SET processing_error = oldest.error
         FROM (SELECT e.id, i.last_error AS error FROM json_each(?1) AS asked
             CROSS JOIN issues AS i ON i.id = asked.value
             CROSS JOIN event_logs AS e ON e.id IN (
                 SELECT x.id FROM event_logs AS x
                 WHERE x.issue_id = i.id AND x.processed_at IS NULL ORDER BY x.id LIMIT ?2)) AS oldest
         WHERE event_logs.id = oldest.id",
    )
    .bind(ids(issues))
    .bind(to_i64(RUN_EVENTS_MAX))
    .execute(connection)
    .await?;
    Ok(())
}

/// Marks the dead letters of these issues as released.
pub(super) async fn release(
    connection: &mut SqliteConnection,
    issues: &BTreeSet<IssueId>,
    now: Timestamp,
) -> Result<(), Error> {
    if issues.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "UPDATE dead_letters SET released_at = ?2
         WHERE released_at IS NULL AND issue_id IN (SELECT value FROM json_each(?1))",
    )
    .bind(ids(issues))
    .bind(to_column(now))
    .execute(connection)
    .await?;
    Ok(())
}

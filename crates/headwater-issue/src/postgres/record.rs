//! Records events on PostgreSQL with one function call per batch.

use std::collections::HashSet;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Error, Row};

use crate::error::{IssueError, Result};
use crate::event_batch::{ValidatedEvent, conflict, unknown_integration};
use crate::issue::{DebounceWindow, EventLogId, IssueId, Recorded};
use crate::row_decoding::{ms, optional_timestamp, to_i64};

/// Stores events with distinct keys, in the transaction of `connection` or in its own.
pub(super) async fn record(
    connection: &mut PgConnection,
    events: &[ValidatedEvent<'_>],
    debounce: &DebounceWindow,
) -> Result<Vec<Result<Recorded>>, Error> {
    let texts =
        |text: fn(&ValidatedEvent<'_>) -> String| events.iter().map(text).collect::<Vec<_>>();
    let originals: Vec<Option<&[u8]>> =
        events.iter().map(|one| one.original.map(str::as_bytes)).collect();
    let statement =
        "SELECT * FROM headwater_record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)";
    let rows = sqlx::query(statement)
        .bind(texts(|one| one.event.integration.clone()))
        .bind(texts(|one| one.event.external_project_id.clone()))
        .bind(texts(|one| one.event.external_issue_id.clone()))
        .bind(texts(|one| one.event.source.clone()))
        .bind(texts(|one| one.event.event_type.clone()))
        .bind(texts(|one| one.key.clone()))
        .bind(events.iter().map(|one| one.digest.clone()).collect::<Vec<_>>())
        .bind(texts(|one| one.payload.clone().into_owned()))
        .bind(ms(debounce.quiet_for))
        .bind(ms(debounce.max_wait))
        .bind(to_i64(debounce.events_max))
        .bind(originals)
        .bind(
            events
                .iter()
                .map(|one| one.event.trace.map(|trace| trace.to_string()))
                .collect::<Vec<_>>(),
        )
        .fetch_all(connection)
        .await?;
    let mut nudged = HashSet::new();
    events.iter().zip(&rows).map(|(event, row)| read(event, row, &mut nudged)).collect()
}

/// Result of one event. The inner error concerns only this event.
fn read(
    event: &ValidatedEvent<'_>,
    row: &PgRow,
    nudged: &mut HashSet<IssueId>,
) -> Result<Result<Recorded>, Error> {
    if !row.try_get::<bool, _>(1)? {
        return Ok(Err(unknown_integration(event.event)));
    }
    let (Some(issue_id), Some(event_log_id)): (Option<i64>, Option<i64>) =
        (row.try_get(2)?, row.try_get(3)?)
    else {
        // Only in a caller's transaction with a snapshot older than a concurrent commit.
        let problem =
            "another transaction recorded this event concurrently; repeat the transaction";
        return Ok(Err(IssueError::Unavailable { problem: problem.into(), source: None }));
    };
    if !row.try_get::<bool, _>(5)? {
        return Ok(Err(conflict(event.event, &event.key)));
    }
    let issue_id = IssueId(issue_id);
    let new: bool = row.try_get(4)?;
    let wanted = if new {
        row.try_get(7)?
    } else {
        !row.try_get::<bool, _>(6)? && row.try_get::<&str, _>(8)? == "queued"
    };
    Ok(Ok(Recorded {
        issue_id,
        event_log_id: EventLogId(event_log_id),
        duplicate: !new,
        nudge: wanted && nudged.insert(issue_id),
        not_before: optional_timestamp(row.try_get(9)?),
    }))
}

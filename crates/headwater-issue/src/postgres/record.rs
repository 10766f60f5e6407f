//! Records events on PostgreSQL with one function call per batch.

use std::collections::{HashMap, HashSet};

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Error, Row};

use super::timestamps::time;
use crate::error::{IssueError, Result};
use crate::event_batch::{ValidatedEvent, conflict, unknown_integration};
use crate::issue::{DebounceWindow, EventLogId, IssueId, NewEvent, Recorded};
use crate::row_decoding::{ms, to_i64};

/// Stores events with distinct keys, in the transaction of `connection` or in its own.
pub(super) async fn record(
    connection: &mut PgConnection,
    events: &[ValidatedEvent<'_>],
    debounce: &DebounceWindow,
) -> Result<Vec<Result<Recorded>>, Error> {
    let (first, counts) = issues_of(events);
    let text = |text: fn(&NewEvent) -> &str| -> Vec<&str> {
        events.iter().map(|one| text(one.event)).collect()
    };
    let mut originals: Vec<Option<&[u8]>> =
        events.iter().map(|one| one.original.map(str::as_bytes)).collect();
    if originals.iter().all(Option::is_none) {
        originals.clear();
    }
    let traces = events.iter().map(|one| one.event.trace.map(|trace| trace.to_string()));
    let rows = sqlx::query(
        "SELECT * FROM headwater_record_events($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
    )
    .bind(text(|event| &event.integration))
    .bind(text(|event| &event.external_project_id))
    .bind(text(|event| &event.external_issue_id))
    .bind(first)
    .bind(counts)
    .bind(text(|event| &event.source))
    .bind(text(|event| &event.event_type))
    .bind(events.iter().map(|one| one.key.as_str()).collect::<Vec<_>>())
    .bind(events.iter().map(|one| one.digest.as_slice()).collect::<Vec<_>>())
    .bind(events.iter().map(|one| one.payload.as_ref()).collect::<Vec<&str>>())
    .bind(ms(debounce.quiet_for))
    .bind(ms(debounce.max_wait))
    .bind(to_i64(debounce.events_max))
    .bind(originals)
    .bind(traces.collect::<Vec<Option<String>>>())
    .fetch_all(connection)
    .await?;
    let mut nudged = HashSet::new();
    events.iter().zip(&rows).map(|(event, row)| read(event, row, &mut nudged)).collect()
}

/// For each event: the position, from 1, of the first event of its issue, and the number of events of its issue.
fn issues_of(events: &[ValidatedEvent<'_>]) -> (Vec<i64>, Vec<i64>) {
    let mut issues: HashMap<(&str, &str, &str), (i64, i64)> = HashMap::with_capacity(events.len());
    for (index, one) in events.iter().enumerate() {
        issues.entry(names(one)).or_insert((to_i64(index + 1), 0)).1 += 1;
    }
    events.iter().map(|one| issues[&names(one)]).unzip()
}

/// Integration, project and issue of an event.
fn names<'a>(one: &ValidatedEvent<'a>) -> (&'a str, &'a str, &'a str) {
    let NewEvent { integration, external_project_id, external_issue_id, .. } = one.event;
    (integration, external_project_id, external_issue_id)
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
        !row.try_get::<bool, _>(6)? && row.try_get::<bool, _>(8)?
    };
    Ok(Ok(Recorded {
        issue_id,
        event_log_id: EventLogId(event_log_id),
        duplicate: !new,
        nudge: wanted && nudged.insert(issue_id),
        not_before: time(row, 9)?,
    }))
}

//! Columns and rows of both stores, and their database errors.
//!
//! Upstream: `sqlite` and `postgres`, whose statements return these columns in this order, times as milliseconds and
//! JSON as text. Guarantees: an unexpected value is a `Schema` error, never a panic.

use std::collections::HashSet;

use headwater_queue::TraceContext;
use headwater_stream::clock::Timestamp;

use crate::admin::IssueDeadLetter;
use crate::claim::{IssueRun, RunResult};
use crate::error::{IssueError, SharedError};
use crate::issue::{
    ClaimEpoch, DeadLetterId, EventLog, EventLogId, Issue, IssueId, OutboxId, ProcessingStatus,
};
use crate::outbox::types::{OutboxKind, OutboxRow};
use crate::sql::SqlRow;
use crate::transaction::StoreConnection;

/// Timestamp of a column.
pub(crate) fn timestamp(ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Timestamp of a nullable column.
pub(crate) fn optional_timestamp(ms: Option<i64>) -> Option<Timestamp> {
    ms.map(timestamp)
}

/// Trace context of a nullable column; `None` if another program wrote an invalid one.
pub(crate) fn trace(text: Option<String>) -> Option<TraceContext> {
    TraceContext::parse(&text?)
}

/// Converts a count or a limit into a parameter.
pub(crate) fn to_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Converts a column into a count.
pub(crate) fn count<T: TryFrom<i64>>(value: i64) -> Result<T, sqlx::Error> {
    T::try_from(value)
        .map_err(|_| sqlx::Error::Decode(format!("count {value} is out of range").into()))
}

/// The parsed value of an enum column; an error if `parsed` is `None`.
pub(crate) fn known_value<T>(name: &str, parsed: Option<T>) -> Result<T, sqlx::Error> {
    parsed.ok_or_else(|| sqlx::Error::Decode(format!("unknown enum value `{name}`").into()))
}

/// Converts a duration into a parameter in milliseconds.
pub(crate) fn ms(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Maps a database error; `what` is the operation.
pub(crate) fn database_error(what: &str, error: sqlx::Error) -> IssueError {
    let problem = format!("{what}: {error}");
    let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
    match (&error, code.as_ref()) {
        (sqlx::Error::InvalidArgument(problem), _) => {
            IssueError::Invalid { what: "a value".into(), problem: format!("{what}: {problem}") }
        }
        // SQL state classes 22 and 23: invalid data. 42: the schema does not match.
        (sqlx::Error::Database(_), code) if code.len() == 5 && code.starts_with("22") => {
            IssueError::Invalid { what: "a value".into(), problem }
        }
        (sqlx::Error::Database(_), code) if code.len() == 5 && code.starts_with("23") => {
            IssueError::Invalid { what: "a value".into(), problem }
        }
        (sqlx::Error::Database(_), code) if code.len() == 5 && code.starts_with("42") => {
            IssueError::Schema { problem }
        }
        (sqlx::Error::Database(database), _)
            if !database.kind().eq(&sqlx::error::ErrorKind::Other) =>
        {
            IssueError::Invalid { what: "a value".into(), problem }
        }
        (
            sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::ColumnNotFound(_)
            | sqlx::Error::Decode(_),
            _,
        ) => IssueError::Schema { problem },
        _ => IssueError::Unavailable { problem, source: Some(std::sync::Arc::new(error)) },
    }
}

/// Maps an error of opening a store: permanent errors become `Invalid`, so that the caller does not retry.
pub(crate) fn connect_error(error: IssueError) -> IssueError {
    let IssueError::Unavailable { source: Some(source), .. } = &error else { return error };
    let source = source.downcast_ref::<sqlx::Error>();
    let Some(database_error) = source.and_then(sqlx::Error::as_database_error) else {
        return error;
    };
    let code = database_error.code().unwrap_or_default();
    // SQLite codes are numbers whose lowest byte is the primary code. SQL states have five characters.
    let kind = code.parse::<u32>().ok().filter(|_| code.len() < 5).map(|code| code & 0xff);
    let problem = match (code.as_ref(), kind) {
        // Authentication failed, or the database does not exist.
        ("28P01" | "28000" | "3D000", _) => database_error.message(),
        (_, Some(8)) => "the file is not writable",
        (_, Some(14)) => {
            "the file cannot be opened; check the permissions of the file and its directory"
        }
        (_, Some(26)) => "the file is not a SQLite database",
        _ => return error,
    };
    IssueError::invalid("the database URL", problem)
}

/// Whether the call conflicted with another transaction: deadlock or serialization failure. Nothing was changed.
#[cfg(feature = "postgres")]
pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
    // 23503, foreign key: the issue was deleted while the call waited for its lock; the retry creates it again.
    code.len() == 5 && (code.starts_with("40") || code == "23503")
}

/// Whether one row may have caused the error: it is locked, too large, or in conflict.
pub(crate) fn is_row_error(source: &SharedError) -> bool {
    let error = source.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    let code = error.and_then(|error| error.code()).unwrap_or_default();
    // Deadlock or serialization failure, program limit, out of memory, lock not available, statement timeout.
    let class = code.len() == 5 && ["40", "54"].iter().any(|class| code.starts_with(class));
    class || ["53200", "55P03", "57014"].contains(&code.as_ref())
}

/// The columns of [`read_issue`]; `i` is the issue, `g` its integration.
macro_rules! issue_columns {
    () => {
        "i.id, g.name, g.provider, i.external_project_id, i.external_issue_id, i.processing_status,
         i.pending_events, i.claim_epoch, i.claim_owner, headwater_ms(i.claim_expires_at),
         headwater_ms(i.not_before), i.attempts, i.crashes, i.superseded, headwater_ms(i.quarantined_at),
         i.last_error, i.fields::text, i.discussions::text, headwater_ms(i.processing_started_at),
         headwater_ms(i.last_processed_at), headwater_ms(i.nudged_at), headwater_ms(i.created_at),
         headwater_ms(i.updated_at)"
    };
}
pub(crate) use issue_columns;

/// The columns of [`read_event_log`]; `e` is the event log.
macro_rules! event_log_columns {
    () => {
        "e.id, e.issue_id, e.source, e.event_type, e.dedup_key, e.payload::text, headwater_ms(e.created_at),
         headwater_ms(e.processed_at), e.processing_error, e.trace"
    };
}
pub(crate) use event_log_columns;

/// The columns of [`read_dead_letter`]; `d` is the dead letter, `i` its issue, `g` the integration.
macro_rules! dead_letter_columns {
    () => {
        "d.id, d.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, d.error, d.attempts,
         d.crashes, d.pending_events, d.event_log_id, headwater_ms(d.quarantined_at), headwater_ms(d.released_at)"
    };
}
pub(crate) use dead_letter_columns;

/// The columns of [`read_outbox`]; `o` is the row, `i` its issue, `g` the integration.
macro_rules! outbox_columns {
    () => {
        "o.id, o.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, o.kind, o.target,
         o.idempotency_key, o.payload::text, o.deliveries, o.attempts, headwater_ms(o.created_at), o.crashes"
    };
}
pub(crate) use outbox_columns;

/// Reads an issue from the columns of `issue_columns!`.
pub(crate) fn read_issue(row: &SqlRow) -> Result<Issue, sqlx::Error> {
    let status: String = row.get(5)?;
    Ok(Issue {
        id: IssueId(row.get(0)?),
        integration: row.get(1)?,
        provider: row.get(2)?,
        external_project_id: row.get(3)?,
        external_issue_id: row.get(4)?,
        status: known_value(&status, ProcessingStatus::parse(&status))?,
        pending_events: count(row.get(6)?)?,
        claim_epoch: ClaimEpoch(row.get(7)?),
        claim_owner: row.get(8)?,
        claim_expires_at: optional_timestamp(row.get(9)?),
        not_before: optional_timestamp(row.get(10)?),
        attempts: count(row.get(11)?)?,
        crashes: count(row.get(12)?)?,
        superseded: count(row.get(13)?)?,
        quarantined_at: optional_timestamp(row.get(14)?),
        last_error: row.get(15)?,
        fields: row.get(16)?,
        discussions: row.get(17)?,
        processing_started_at: optional_timestamp(row.get(18)?),
        last_processed_at: optional_timestamp(row.get(19)?),
        nudged_at: optional_timestamp(row.get(20)?),
        created_at: timestamp(row.get(21)?),
        updated_at: timestamp(row.get(22)?),
    })
}

/// Reads an event log from the columns of `event_log_columns!`.
pub(crate) fn read_event_log(row: &SqlRow) -> Result<EventLog, sqlx::Error> {
    Ok(EventLog {
        id: EventLogId(row.get(0)?),
        issue_id: IssueId(row.get(1)?),
        source: row.get(2)?,
        event_type: row.get(3)?,
        dedup_key: row.get(4)?,
        payload: row.get(5)?,
        created_at: timestamp(row.get(6)?),
        processed_at: optional_timestamp(row.get(7)?),
        processing_error: row.get(8)?,
        trace: trace(row.get(9)?),
    })
}

/// Reads an outbox row from the columns of `outbox_columns!`.
pub(crate) fn read_outbox(row: &SqlRow) -> Result<OutboxRow, sqlx::Error> {
    let kind: String = row.get(6)?;
    Ok(OutboxRow {
        id: OutboxId(row.get(0)?),
        issue_id: IssueId(row.get(1)?),
        integration: row.get(2)?,
        provider: row.get(3)?,
        external_project_id: row.get(4)?,
        external_issue_id: row.get(5)?,
        kind: known_value(&kind, OutboxKind::parse(&kind))?,
        target: row.get(7)?,
        idempotency_key: row.get(8)?,
        payload: row.get(9)?,
        deliveries: count(row.get(10)?)?,
        attempts: count(row.get(11)?)?,
        created_at: timestamp(row.get(12)?),
        crashes: count(row.get(13)?)?,
    })
}

/// Reads a dead letter from the columns of `dead_letter_columns!`.
pub(crate) fn read_dead_letter(row: &SqlRow) -> Result<IssueDeadLetter, sqlx::Error> {
    Ok(IssueDeadLetter {
        id: DeadLetterId(row.get(0)?),
        issue_id: IssueId(row.get(1)?),
        integration: row.get(2)?,
        provider: row.get(3)?,
        external_project_id: row.get(4)?,
        external_issue_id: row.get(5)?,
        error: row.get(6)?,
        attempts: count(row.get(7)?)?,
        crashes: count(row.get(8)?)?,
        pending_events: count(row.get(9)?)?,
        event_log_id: EventLogId(row.get(10)?),
        quarantined_at: timestamp(row.get(11)?),
        released_at: optional_timestamp(row.get(12)?),
    })
}

/// Reads a run from the columns that `admin_queries` lists.
pub(crate) fn read_run(row: &SqlRow) -> Result<IssueRun, sqlx::Error> {
    let result: String = row.get(5)?;
    Ok(IssueRun {
        issue_id: IssueId(row.get(0)?),
        epoch: ClaimEpoch(row.get(1)?),
        worker: row.get(2)?,
        claimed_at: timestamp(row.get(3)?),
        ended_at: timestamp(row.get(4)?),
        result: known_value(&result, RunResult::parse(&result))?,
        error: row.get(6)?,
        events: count(row.get(7)?)?,
    })
}

/// Describes the inconsistency of an issue; `None` if it is consistent.
pub(crate) fn inconsistency(
    status: ProcessingStatus,
    pending_events: i64,
    unprocessed: i64,
    quarantined: bool,
) -> Option<String> {
    if pending_events != unprocessed {
        return Some(format!(
            "pending_events is {pending_events}, but {unprocessed} event logs are unprocessed"
        ));
    }
    let idle = status == ProcessingStatus::Idle;
    match (idle, quarantined, unprocessed > 0) {
        (true, false, true) => Some("it is idle with unprocessed event logs".into()),
        (false, true, _) => Some(format!("it is quarantined and {status}")),
        (false, _, false) => Some(format!("it is {status} without unprocessed event logs")),
        _ => None,
    }
}

/// Returns those of these event logs that do not exist.
pub(crate) async fn missing_event_logs(
    connection: StoreConnection<'_>,
    ids: &[EventLogId],
) -> Result<Vec<EventLogId>, sqlx::Error> {
    let select =
        "SELECT id FROM event_logs WHERE id IN (SELECT value::bigint FROM headwater_each($1))";
    let asked = serde_json::json!(ids.iter().map(|id| id.0).collect::<Vec<_>>()).to_string();
    let rows = connection.fetch_all(select, &[(&asked).into()]).await?;
    let existing: HashSet<i64> = rows.iter().map(|row| row.get(0)).collect::<Result<_, _>>()?;
    Ok(ids.iter().copied().filter(|id| !existing.contains(&id.0)).collect())
}

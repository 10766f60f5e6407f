//! Decodes rows of both stores, and maps database errors.
//!
//! Upstream: `sqlite` and `postgres`, whose statements return these columns in this order, times as milliseconds and
//! JSON as text. Guarantees: an unexpected value is a `Schema` error, never a panic.

use headwater_queue::TraceContext;
use headwater_stream::clock::Timestamp;

use crate::error::{IssueError, SharedError};
use crate::issue::ProcessingStatus;

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
    code.len() == 5 && code.starts_with("40")
}

/// Whether one row may have caused the error: it is locked, too large, or in conflict.
pub(crate) fn is_row_error(source: &SharedError) -> bool {
    let error = source.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    let code = error.and_then(|error| error.code()).unwrap_or_default();
    // Deadlock or serialization failure, program limit, out of memory, lock not available, statement timeout.
    let class = code.len() == 5 && ["40", "54"].iter().any(|class| code.starts_with(class));
    class || ["53200", "55P03", "57014"].contains(&code.as_ref())
}

/// Reads an issue from the columns of `issue_columns!`.
macro_rules! read_issue {
    ($row:expr) => {{
        let row = $row;
        let status: String = row.try_get(5)?;
        $crate::issue::Issue {
            id: $crate::issue::IssueId(row.try_get(0)?),
            integration: row.try_get(1)?,
            provider: row.try_get(2)?,
            external_project_id: row.try_get(3)?,
            external_issue_id: row.try_get(4)?,
            status: $crate::row_decoding::known_value(
                &status,
                $crate::issue::ProcessingStatus::parse(&status),
            )?,
            pending_events: $crate::row_decoding::count(row.try_get(6)?)?,
            claim_epoch: $crate::issue::ClaimEpoch(row.try_get(7)?),
            claim_owner: row.try_get(8)?,
            claim_expires_at: $crate::row_decoding::optional_timestamp(row.try_get(9)?),
            not_before: $crate::row_decoding::optional_timestamp(row.try_get(10)?),
            attempts: $crate::row_decoding::count(row.try_get(11)?)?,
            crashes: $crate::row_decoding::count(row.try_get(12)?)?,
            superseded: $crate::row_decoding::count(row.try_get(13)?)?,
            quarantined_at: $crate::row_decoding::optional_timestamp(row.try_get(14)?),
            last_error: row.try_get(15)?,
            fields: row.try_get(16)?,
            discussions: row.try_get(17)?,
            processing_started_at: $crate::row_decoding::optional_timestamp(row.try_get(18)?),
            last_processed_at: $crate::row_decoding::optional_timestamp(row.try_get(19)?),
            nudged_at: $crate::row_decoding::optional_timestamp(row.try_get(20)?),
            created_at: $crate::row_decoding::timestamp(row.try_get(21)?),
            updated_at: $crate::row_decoding::timestamp(row.try_get(22)?),
        }
    }};
}
pub(crate) use read_issue;

/// Reads an event log from the columns of `event_log_columns!`.
macro_rules! read_event_log {
    ($row:expr) => {{
        let row = $row;
        $crate::issue::EventLog {
            id: $crate::issue::EventLogId(row.try_get(0)?),
            issue_id: $crate::issue::IssueId(row.try_get(1)?),
            source: row.try_get(2)?,
            event_type: row.try_get(3)?,
            dedup_key: row.try_get(4)?,
            payload: row.try_get(5)?,
            created_at: $crate::row_decoding::timestamp(row.try_get(6)?),
            processed_at: $crate::row_decoding::optional_timestamp(row.try_get(7)?),
            processing_error: row.try_get(8)?,
            trace: $crate::row_decoding::trace(row.try_get(9)?),
        }
    }};
}
pub(crate) use read_event_log;

/// Reads an outbox row from the columns of `outbox_columns!`.
macro_rules! read_outbox {
    ($row:expr) => {{
        let row = $row;
        let kind: String = row.try_get(6)?;
        $crate::outbox::types::OutboxRow {
            id: $crate::issue::OutboxId(row.try_get(0)?),
            issue_id: $crate::issue::IssueId(row.try_get(1)?),
            integration: row.try_get(2)?,
            provider: row.try_get(3)?,
            external_project_id: row.try_get(4)?,
            external_issue_id: row.try_get(5)?,
            kind: $crate::row_decoding::known_value(
                &kind,
                $crate::outbox::types::OutboxKind::parse(&kind),
            )?,
            target: row.try_get(7)?,
            idempotency_key: row.try_get(8)?,
            payload: row.try_get(9)?,
            deliveries: $crate::row_decoding::count(row.try_get(10)?)?,
            attempts: $crate::row_decoding::count(row.try_get(11)?)?,
            created_at: $crate::row_decoding::timestamp(row.try_get(12)?),
            crashes: $crate::row_decoding::count(row.try_get(13)?)?,
        }
    }};
}
pub(crate) use read_outbox;

/// Reads a dead letter from the columns of `dead_letter_columns!`.
macro_rules! read_dead_letter {
    ($row:expr) => {{
        let row = $row;
        $crate::admin::IssueDeadLetter {
            id: $crate::issue::DeadLetterId(row.try_get(0)?),
            issue_id: $crate::issue::IssueId(row.try_get(1)?),
            integration: row.try_get(2)?,
            provider: row.try_get(3)?,
            external_project_id: row.try_get(4)?,
            external_issue_id: row.try_get(5)?,
            error: row.try_get(6)?,
            attempts: $crate::row_decoding::count(row.try_get(7)?)?,
            crashes: $crate::row_decoding::count(row.try_get(8)?)?,
            pending_events: $crate::row_decoding::count(row.try_get(9)?)?,
            event_log_id: $crate::issue::EventLogId(row.try_get(10)?),
            quarantined_at: $crate::row_decoding::timestamp(row.try_get(11)?),
            released_at: $crate::row_decoding::optional_timestamp(row.try_get(12)?),
        }
    }};
}
pub(crate) use read_dead_letter;

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

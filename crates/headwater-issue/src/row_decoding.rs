//! Rows as data: what both dialects read alike.
//!
//! Upstream: `sqlite` and `postgres`, whose statements give these columns in this order, times as milliseconds and JSON as
//! text. Promises: a value that does not fit is an error about the schema, never a panic.

use headwater_stream::clock::Timestamp;

use crate::error::{IssueError, SharedError};
use crate::issue::ProcessingStatus;

/// A time from a column.
pub(crate) fn timestamp(ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// A time that may be absent.
pub(crate) fn optional_timestamp(ms: Option<i64>) -> Option<Timestamp> {
    ms.map(timestamp)
}

/// A count or a limit as a parameter.
pub(crate) fn to_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// A count from a column.
pub(crate) fn count<T: TryFrom<i64>>(value: i64) -> Result<T, sqlx::Error> {
    T::try_from(value).map_err(|_| sqlx::Error::Decode(format!("a count is {value}").into()))
}

/// A name from a column that only has certain ones.
pub(crate) fn known_value<T>(name: &str, parsed: Option<T>) -> Result<T, sqlx::Error> {
    parsed.ok_or_else(|| sqlx::Error::Decode(format!("`{name}` is none of our names").into()))
}

/// Milliseconds for a column.
pub(crate) fn ms(duration: std::time::Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// What became of a call to the database, as an error of ours. `what` is what was tried.
pub(crate) fn database_error(what: &str, error: sqlx::Error) -> IssueError {
    let problem = format!("{what}: {error}");
    let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
    match (&error, code.as_ref()) {
        (sqlx::Error::InvalidArgument(problem), _) => {
            IssueError::Invalid { what: "a value".into(), problem: format!("{what}: {problem}") }
        }
        // Classes 22 and 23 of SQL states: the data is at fault. 42: the tables are not ours.
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

/// An error of opening: what a database says for good is a wrong URL, and waiting for it is of no use.
pub(crate) fn connect_error(error: IssueError) -> IssueError {
    let IssueError::Unavailable { source: Some(source), .. } = &error else { return error };
    let source = source.downcast_ref::<sqlx::Error>();
    let Some(said) = source.and_then(sqlx::Error::as_database_error) else { return error };
    let code = said.code().unwrap_or_default();
    // SQLite has numbers, whose lowest byte is the kind of error. SQL states have five characters.
    let kind = code.parse::<u32>().ok().filter(|_| code.len() < 5).map(|code| code & 0xff);
    let problem = match (code.as_ref(), kind) {
        // Classes 28 and 3D: who asks, and for what.
        ("28P01" | "28000" | "3D000", _) => said.message(),
        (_, Some(8)) => "the file may not be written",
        (_, Some(14)) => {
            "the file cannot be opened; may this user read and write it and its directory?"
        }
        (_, Some(26)) => "the file is no SQLite database",
        _ => return error,
    };
    IssueError::invalid("the database URL", problem)
}

/// Whether another transaction stood in the way: a deadlock, or a conflict. Nothing was changed.
#[cfg(feature = "postgres")]
pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
    code.len() == 5 && code.starts_with("40")
}

/// Whether the server answered with what may be the fault of one row: it is locked, or too large, or in conflict.
pub(crate) fn is_row_error(source: &SharedError) -> bool {
    let error = source.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    let code = error.and_then(|error| error.code()).unwrap_or_default();
    // A deadlock or a conflict, out of memory, beyond a limit, a lock that was not to be had, too long a statement.
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

/// The problem of an issue whose books do not balance, in words; none if they do.
pub(crate) fn imbalance(
    status: ProcessingStatus,
    pending_events: i64,
    unprocessed: i64,
    quarantined: bool,
) -> Option<String> {
    if pending_events != unprocessed {
        return Some(format!(
            "it counts {pending_events} pending event logs, but {unprocessed} are unprocessed"
        ));
    }
    let idle = status == ProcessingStatus::Idle;
    match (idle, quarantined, unprocessed > 0) {
        (true, false, true) => Some("it is idle with unprocessed event logs".into()),
        (false, true, _) => Some(format!("it is quarantined and {status}")),
        (false, _, false) => Some(format!("it is {status} with nothing to process")),
        _ => None,
    }
}

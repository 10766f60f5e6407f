//! Parameter types of the statements, and conversion of column values.

use headwater_analytics::RunMetrics;
use headwater_issue::IssueId;
use headwater_stream::clock::Timestamp;
use sqlx::Error;
use uuid::Uuid;

use crate::tickets::Author;
use crate::tickets::ticket::TicketStatus;

/// A ticket to insert.
pub(crate) struct NewTicketRow<'a> {
    pub(crate) ticket_id: Uuid,
    pub(crate) issue_id: IssueId,
    pub(crate) title: &'a str,
    pub(crate) user_id: Option<&'a str>,
    pub(crate) now: Timestamp,
}

/// A message to insert.
pub(crate) struct NewMessageRow<'a> {
    pub(crate) message_id: Uuid,
    pub(crate) ticket_id: Uuid,
    pub(crate) author: Author,
    pub(crate) content: &'a str,
    /// Run metrics of an answer.
    pub(crate) run: RunMetrics,
    pub(crate) now: Timestamp,
}

/// A search. `patterns` are `LIKE` patterns, escaped with a backslash.
pub(crate) struct SearchParameters<'a> {
    pub(crate) patterns: &'a [String],
    pub(crate) user_id: Option<&'a str>,
    pub(crate) except: &'a str,
    pub(crate) limit: i64,
}

/// A row of `desk_reservations`.
#[derive(Clone, Debug)]
pub(crate) struct ReservationRow {
    pub(crate) id: String,
    pub(crate) issue_id: i64,
    pub(crate) day: i64,
    pub(crate) tokens: i64,
    pub(crate) tokens_if_lost: i64,
    pub(crate) expires_at: i64,
}

impl ReservationRow {
    /// Key of the row of `desk_usage` with the total of the issue.
    pub(crate) fn issue_scope(&self) -> String {
        format!("issue:{}", self.issue_id)
    }

    /// Key of the row of `desk_usage` with the total of the day.
    pub(crate) fn day_scope(&self) -> String {
        format!("day:{}", self.day)
    }
}

/// Number of newest tickets that one search scans.
pub(crate) const SEARCHED_MAX: i64 = 1000;

pub(crate) fn to_ms(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn from_ms(ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Run metrics as a column value; `None` if nothing is known.
pub(crate) fn run_json(run: &RunMetrics) -> Option<String> {
    let known = *run != RunMetrics::default();
    known.then(|| serde_json::to_string(run).expect("numbers are JSON"))
}

pub(crate) fn parse_status(name: &str) -> Result<TicketStatus, Error> {
    TicketStatus::parse(name).ok_or_else(|| invalid_value("status", name))
}

pub(crate) fn parse_author(name: &str) -> Result<Author, Error> {
    Author::parse(name).ok_or_else(|| invalid_value("author", name))
}

pub(crate) fn parse_id(text: &str) -> Result<Uuid, Error> {
    Uuid::parse_str(text).map_err(|_| invalid_value("id", text))
}

fn invalid_value(what: &str, value: &str) -> Error {
    Error::Decode(format!("invalid {what} `{value}` in the ticket tables").into())
}

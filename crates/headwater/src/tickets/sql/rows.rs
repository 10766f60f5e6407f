//! What the two dialects share: how values stand in rows.

use headwater_analytics::RunFigures;
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
    /// What an answer took.
    pub(crate) run: RunFigures,
    pub(crate) now: Timestamp,
}

/// What a search looks for: patterns of `LIKE`, escaped with a backslash.
pub(crate) struct SearchRow<'a> {
    pub(crate) patterns: &'a [String],
    pub(crate) user_id: Option<&'a str>,
    pub(crate) except: &'a str,
    pub(crate) limit: i64,
}

/// A reservation of tokens.
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
    /// The row of `desk_usage` that sums up the issue.
    pub(crate) fn issue_scope(&self) -> String {
        format!("issue:{}", self.issue_id)
    }

    /// The row of `desk_usage` that sums up the day.
    pub(crate) fn day_scope(&self) -> String {
        format!("day:{}", self.day)
    }
}

/// Tickets that one search looks at, newest first.
pub(crate) const SEARCHED_MAX: i64 = 1000;

pub(crate) fn ms(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn time(ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Figures as a column holds them: nothing where nothing is known.
pub(crate) fn figures(run: &RunFigures) -> Option<String> {
    let known = *run != RunFigures::default();
    known.then(|| serde_json::to_string(run).expect("numbers are JSON"))
}

pub(crate) fn status(name: &str) -> Result<TicketStatus, Error> {
    TicketStatus::parse(name).ok_or_else(|| odd("status", name))
}

pub(crate) fn author(name: &str) -> Result<Author, Error> {
    Author::parse(name).ok_or_else(|| odd("author", name))
}

pub(crate) fn id(text: &str) -> Result<Uuid, Error> {
    Uuid::parse_str(text).map_err(|_| odd("id", text))
}

fn odd(what: &str, value: &str) -> Error {
    Error::Decode(format!("the {what} `{value}` is not one of ours").into())
}

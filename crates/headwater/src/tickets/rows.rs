//! What the two dialects share: how values stand in rows.

use headwater_analytics::RunFigures;
use headwater_issue::IssueId;
use headwater_stream::clock::Timestamp;
use sqlx::Error;
use uuid::Uuid;

use super::ticket::TicketStatus;
use crate::ticket_events::Author;

/// A ticket to insert.
pub(super) struct NewTicketRow<'a> {
    pub(super) ticket_id: Uuid,
    pub(super) issue_id: IssueId,
    pub(super) title: &'a str,
    pub(super) user_id: Option<&'a str>,
    pub(super) now: Timestamp,
}

/// A message to insert.
pub(super) struct NewMessageRow<'a> {
    pub(super) message_id: Uuid,
    pub(super) ticket_id: Uuid,
    pub(super) author: Author,
    pub(super) content: &'a str,
    /// What an answer took.
    pub(super) run: RunFigures,
    pub(super) now: Timestamp,
}

/// What a search looks for: patterns of `LIKE`, escaped with a backslash.
pub(super) struct SearchRow<'a> {
    pub(super) patterns: &'a [String],
    pub(super) user_id: Option<&'a str>,
    pub(super) except: &'a str,
    pub(super) limit: i64,
}

/// A reservation of tokens.
#[derive(Clone, Debug)]
pub(super) struct ReservationRow {
    pub(super) id: String,
    pub(super) issue_id: i64,
    pub(super) day: i64,
    pub(super) tokens: i64,
    pub(super) tokens_if_lost: i64,
    pub(super) expires_at: i64,
}

impl ReservationRow {
    /// The row of `desk_usage` that sums up the issue.
    pub(super) fn issue_scope(&self) -> String {
        format!("issue:{}", self.issue_id)
    }

    /// The row of `desk_usage` that sums up the day.
    pub(super) fn day_scope(&self) -> String {
        format!("day:{}", self.day)
    }
}

/// Tickets that one search looks at, newest first.
pub(super) const SEARCHED_MAX: i64 = 1000;

pub(super) fn ms(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn time(ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Figures as a column holds them: nothing where nothing is known.
pub(super) fn figures(run: &RunFigures) -> Option<String> {
    let known = *run != RunFigures::default();
    known.then(|| serde_json::to_string(run).expect("numbers are JSON"))
}

pub(super) fn status(name: &str) -> Result<TicketStatus, Error> {
    TicketStatus::parse(name).ok_or_else(|| odd("status", name))
}

pub(super) fn author(name: &str) -> Result<Author, Error> {
    Author::parse(name).ok_or_else(|| odd("author", name))
}

pub(super) fn id(text: &str) -> Result<Uuid, Error> {
    Uuid::parse_str(text).map_err(|_| odd("id", text))
}

fn odd(what: &str, value: &str) -> Error {
    Error::Decode(format!("the {what} `{value}` is not one of ours").into())
}

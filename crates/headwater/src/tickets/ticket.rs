//! The plain data of tickets: what goes into the tables and what comes out.
//!
//! Upstream: routes and stream entries. Downstream: `store`. Promises: what was checked here holds no text beyond its limit.

use headwater_issue::{IssueError, IssueId};
use headwater_stream::clock::Timestamp;
use uuid::Uuid;

use crate::limits::{CONTENT_BYTES_MAX, TITLE_BYTES_MAX, USER_ID_BYTES_MAX};
use crate::text;
use crate::tickets::Author;

/// Whether a ticket wants attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TicketStatus {
    /// It does.
    Open,
    /// It is settled; a message of its user opens it again.
    Closed,
}

impl TicketStatus {
    /// The name in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }

    /// The status of this name, if there is one.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Open, Self::Closed].into_iter().find(|one| one.as_str() == name)
    }
}

/// A ticket, a row of `tickets`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Its place among all tickets.
    pub number: i64,
    /// What everybody knows it by.
    pub ticket_id: Uuid,
    /// The issue that its messages are events of.
    pub issue_id: IssueId,
    /// What it is about.
    pub title: String,
    /// Whose it is, if that is known.
    pub user_id: Option<String>,
    /// Whether it wants attention.
    pub status: TicketStatus,
    /// Whether a person answers it.
    pub handed_over: bool,
    /// When it was opened.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// A message, a row of `ticket_messages`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketMessage {
    /// Its place; grows within a ticket.
    pub seq: i64,
    /// What everybody knows it by.
    pub message_id: Uuid,
    /// Its ticket.
    pub ticket_id: Uuid,
    /// Who wrote it.
    pub author: Author,
    /// The text.
    pub content: String,
    /// When.
    pub created_at: Timestamp,
}

/// A ticket to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewTicket {
    /// What it is about.
    pub title: String,
    /// Its first message.
    pub content: String,
    /// Whose it is.
    pub user_id: Option<String>,
    /// The id of its first message, so that the call can be repeated. Default: a new one.
    pub message_id: Option<Uuid>,
}

/// A message to add.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTicketMessage {
    /// The text.
    pub content: String,
    /// Who wrote it: a user or an agent.
    pub author: Author,
    /// Its id, so that the call can be repeated. Default: a new one.
    pub message_id: Option<Uuid>,
}

/// A message that is in its ticket now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// The ticket.
    pub ticket_id: Uuid,
    /// The message.
    pub message_id: Uuid,
    /// The issue of the ticket.
    pub issue_id: IssueId,
    /// Whether it was there before; then nothing was changed.
    pub duplicate: bool,
}

/// Which tickets to list, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TicketFilter {
    /// Only those.
    pub status: Option<TicketStatus>,
    /// Only those of this user.
    pub user_id: Option<String>,
    /// Only those with a smaller number: the last of the page before.
    pub before: Option<i64>,
}

/// Why something was not done with a ticket.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The caller's text or ids are wrong.
    #[error("{0}")]
    Invalid(String),
    /// There is no such ticket.
    #[error("there is no ticket {0}")]
    NotFound(Uuid),
    /// The message id was used for another message. Nothing was changed.
    #[error("message_id {0} was used for another message; give this one its own")]
    Conflict(Uuid),
    /// The database did not do it. The same call may succeed later.
    #[error(transparent)]
    Issue(#[from] IssueError),
}

impl TicketError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Issue(error) if error.is_transient())
    }
}

/// A title within its limit, on one line.
pub(crate) fn checked_title(title: &str) -> Result<String, TicketError> {
    let checked = text::one_line(title, usize::MAX);
    if checked.is_empty() || checked.len() > TITLE_BYTES_MAX {
        return Err(TicketError::Invalid(format!("title must have 1 to {TITLE_BYTES_MAX} bytes")));
    }
    Ok(checked)
}

/// The text of a message within its limit.
pub(crate) fn checked_content(content: &str) -> Result<String, TicketError> {
    let checked = text::cleaned(content);
    if checked.trim().is_empty() || checked.len() > CONTENT_BYTES_MAX {
        return Err(TicketError::Invalid(format!(
            "content must have 1 to {CONTENT_BYTES_MAX} bytes"
        )));
    }
    Ok(checked)
}

/// The name of a user within its limit.
pub(crate) fn checked_user(user_id: Option<String>) -> Result<Option<String>, TicketError> {
    let Some(user_id) = user_id else { return Ok(None) };
    let is_odd = user_id.chars().any(char::is_control);
    if user_id.trim().is_empty() || user_id.len() > USER_ID_BYTES_MAX || is_odd {
        return Err(TicketError::Invalid(format!(
            "user_id must have 1 to {USER_ID_BYTES_MAX} bytes and no control characters"
        )));
    }
    Ok(Some(user_id))
}

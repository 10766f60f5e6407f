//! Data types of tickets, and validation of input.
//!
//! Upstream: routes and stream entries. Downstream: `store`. Guarantees: validated text is within its limit.

use headwater_issue::{IssueError, IssueId};
use headwater_stream::clock::Timestamp;
use uuid::Uuid;

use crate::limits::{CONTENT_BYTES_MAX, TITLE_BYTES_MAX, USER_ID_BYTES_MAX};
use crate::text;
use crate::tickets::Author;

/// Status of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TicketStatus {
    /// Needs attention.
    Open,
    /// Closed; a message of its user reopens it.
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

    /// Parses a name; `None` if it is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Open, Self::Closed].into_iter().find(|one| one.as_str() == name)
    }
}

/// A ticket, a row of `tickets`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Sequence number among all tickets; grows.
    pub number: i64,
    /// Public id.
    pub ticket_id: Uuid,
    /// The issue that has its messages as events.
    pub issue_id: IssueId,
    /// The subject.
    pub title: String,
    /// The user, if known.
    pub user_id: Option<String>,
    /// Open or closed.
    pub status: TicketStatus,
    /// Whether it was handed over to a person.
    pub handed_over: bool,
    /// Since when it is handed over; `None` if it is not.
    pub handed_over_at: Option<Timestamp>,
    /// Why it was handed over, if known.
    pub hand_over_reason: Option<String>,
    /// The person who answers it; `None` if it is not handed over, or nobody has taken it.
    pub assignee: Option<String>,
    /// When it was opened.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// A message, a row of `ticket_messages`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketMessage {
    /// Sequence number; grows within a ticket.
    pub seq: i64,
    /// Public id.
    pub message_id: Uuid,
    /// Its ticket.
    pub ticket_id: Uuid,
    /// Who wrote it.
    pub author: Author,
    /// The name of the agent who wrote it, if known.
    pub agent: Option<String>,
    /// The text.
    pub content: String,
    /// When it was stored.
    pub created_at: Timestamp,
    /// The entry of `ticket_events` that it was imported from, in sortable form.
    pub entry: Option<String>,
}

/// Sorts those items that were imported from `ticket_events` by their entries. The places of all other items stay.
///
/// Several processes import the entries of one ticket, so the order of their imports means nothing.
pub(crate) fn sort_imported<T>(items: &mut Vec<T>, entry: impl Fn(&T) -> Option<String>) {
    let entries: Vec<Option<String>> = items.iter().map(entry).collect();
    let places: Vec<usize> = (0..items.len()).filter(|place| entries[*place].is_some()).collect();
    let mut sorted = places.clone();
    sorted.sort_by(|one, other| entries[*one].cmp(&entries[*other]));
    if sorted == places {
        return;
    }
    let mut taken: Vec<Option<T>> = items.drain(..).map(Some).collect();
    let mut order: Vec<usize> = (0..taken.len()).collect();
    for (place, from) in places.into_iter().zip(sorted) {
        order[place] = from;
    }
    items.extend(order.into_iter().filter_map(|from| taken[from].take()));
}

/// A ticket to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewTicket {
    /// The subject.
    pub title: String,
    /// Its first message.
    pub content: String,
    /// The user.
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
    /// The name of the agent, as the model sees it. Only for an agent.
    pub agent: Option<String>,
    /// Its id, so that the call can be repeated. Default: a new one.
    pub message_id: Option<Uuid>,
}

/// Result of posting a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostedMessage {
    /// The ticket.
    pub ticket_id: Uuid,
    /// The message.
    pub message_id: Uuid,
    /// The issue of the ticket.
    pub issue_id: IssueId,
    /// Whether the message existed before; then nothing was changed.
    pub duplicate: bool,
}

/// Which tickets to list, newest first by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TicketFilter {
    /// Only tickets with this status.
    pub status: Option<TicketStatus>,
    /// Only tickets of this user.
    pub user_id: Option<String>,
    /// Only tickets that are handed over, or that are not.
    pub handed_over: Option<bool>,
    /// Only tickets of this assignee.
    pub assignee: Option<String>,
    /// Only tickets that are handed over and have no assignee.
    pub unassigned: bool,
    /// Only tickets whose id begins so: lower-case hexadecimal digits and dashes.
    pub id_prefix: Option<String>,
    /// Only tickets behind the one with this number: the last one of the previous page.
    pub after: Option<i64>,
    /// The oldest one first.
    pub oldest_first: bool,
}

/// Why an operation on a ticket failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The caller's input is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The ticket does not exist.
    #[error("ticket `{0}` does not exist")]
    NotFound(Uuid),
    /// The message id was used for another message. Nothing was changed.
    #[error("`message_id` `{0}` was used for another message; use a new id")]
    Conflict(Uuid),
    /// The ticket is not handed over, so nobody can take it.
    #[error(
        "ticket `{0}` is not handed over, so it has no assignee; an answer of an agent takes it over (`headwater ticket reply`)"
    )]
    NotHandedOver(Uuid),
    /// Another person has taken the ticket.
    #[error(
        "ticket `{ticket_id}` is assigned to `{assignee}`; `headwater ticket assign` gives it to another person"
    )]
    Assigned {
        /// The ticket.
        ticket_id: Uuid,
        /// Who has it.
        assignee: String,
    },
    /// As many searches for words as may run at the same time are running. The same search may succeed later.
    #[error("{0} searches for words in tickets are running, which is the limit; retry later")]
    SearchesBusy(usize),
    /// The database failed. The same call may succeed later if [`is_transient`](Self::is_transient).
    #[error(transparent)]
    Issue(#[from] IssueError),
}

impl TicketError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::SearchesBusy(_) => true,
            Self::Issue(error) => error.is_transient(),
            _ => false,
        }
    }
}

/// Validates a title and puts it on one line.
pub(crate) fn checked_title(title: &str) -> Result<String, TicketError> {
    let checked = text::one_line(title, usize::MAX);
    if checked.is_empty() || checked.len() > TITLE_BYTES_MAX {
        return Err(TicketError::Invalid(format!(
            "`title` must have 1 to {TITLE_BYTES_MAX} bytes"
        )));
    }
    Ok(checked)
}

/// Validates the text of a message.
pub(crate) fn checked_content(content: &str) -> Result<String, TicketError> {
    let checked = text::cleaned(content);
    if checked.trim().is_empty() || checked.len() > CONTENT_BYTES_MAX {
        return Err(TicketError::Invalid(format!(
            "`content` must have 1 to {CONTENT_BYTES_MAX} bytes"
        )));
    }
    Ok(checked)
}

/// Validates a user id.
pub(crate) fn checked_user(user_id: Option<String>) -> Result<Option<String>, TicketError> {
    checked_name("user_id", user_id)
}

/// Validates the name of an agent.
pub(crate) fn checked_agent(
    author: Author,
    agent: Option<String>,
) -> Result<Option<String>, TicketError> {
    if agent.is_some() && author != Author::Agent {
        let problem = "`agent` is only for messages with `author` = `agent`";
        return Err(TicketError::Invalid(problem.to_owned()));
    }
    checked_name("agent", agent)
}

/// Validates the name of an assignee.
pub(crate) fn checked_assignee(name: String) -> Result<String, TicketError> {
    checked_name("assignee", Some(name)).map(Option::unwrap_or_default)
}

fn checked_name(field: &str, name: Option<String>) -> Result<Option<String>, TicketError> {
    let Some(name) = name else { return Ok(None) };
    let has_control = name.chars().any(char::is_control);
    if name.trim().is_empty() || name.len() > USER_ID_BYTES_MAX || has_control {
        return Err(TicketError::Invalid(format!(
            "`{field}` must have 1 to {USER_ID_BYTES_MAX} bytes and no control characters"
        )));
    }
    Ok(Some(name))
}

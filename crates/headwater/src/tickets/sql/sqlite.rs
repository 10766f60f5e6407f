//! SQLite dialect of the ticket statements.
//!
//! Upstream: `statements` runs them.

use headwater_stream::clock::Timestamp;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Error, Row};
use uuid::Uuid;

use crate::desk::budget::BudgetUsage;
use crate::desk::tools::FoundTicket;
use crate::tickets::sql::rows::{
    self, NewMessageRow, NewTicketRow, ReservationRow, SEARCHED_MAX, SearchParameters,
};
use crate::tickets::sql::statements::implement_statements;
use crate::tickets::ticket::{Ticket, TicketFilter, TicketMessage, TicketStatus};

macro_rules! select_ticket {
    ($rest:literal) => {
        concat!(
            "SELECT number, ticket_id, issue_id, title, user_id, status, handed_over, ",
            "created_at, updated_at FROM tickets ",
            $rest
        )
    };
}

macro_rules! select_message {
    ($rest:literal) => {
        concat!(
            "SELECT seq, message_id, ticket_id, author, content, created_at FROM ticket_messages ",
            $rest
        )
    };
}

const INSERT_TICKET: &str =
    "INSERT INTO tickets (ticket_id, issue_id, title, user_id, created_at, updated_at)
     VALUES ($1, $2, $3, $4, $5, $5) ON CONFLICT (ticket_id) DO NOTHING";
const TICKET: &str = select_ticket!("WHERE ticket_id = $1");
/// A write transaction locks the whole file, so no row lock is needed.
const LOCK_TICKET: &str = TICKET;
const CHANGE_TICKET: &str =
    "UPDATE tickets SET status = $2, handed_over = $3, updated_at = $4 WHERE ticket_id = $1";
const TICKETS: &str = select_ticket!(
    "WHERE number < $1 AND ($2 IS NULL OR status = $2) AND ($3 IS NULL OR user_id = $3)
     ORDER BY number DESC LIMIT $4"
);

const INSERT_MESSAGE: &str =
    "INSERT INTO ticket_messages (message_id, ticket_id, author, content, created_at, run)
     VALUES ($1, $2, $3, $4, $5, $6)";
const MESSAGE: &str = select_message!("WHERE message_id = $1");
const MESSAGES: &str = select_message!("WHERE ticket_id = $1 AND seq > $2 ORDER BY seq LIMIT $3");

const SEARCH: &str = "SELECT t.ticket_id, t.title, t.status, (
         SELECT m.content FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.author <> 'user'
         ORDER BY m.seq DESC LIMIT 1)
     FROM (SELECT number, ticket_id, title, status FROM tickets WHERE $1 IS NULL OR user_id = $1
         ORDER BY number DESC LIMIT $2) t
     WHERE t.ticket_id <> $3 AND EXISTS (SELECT 1 FROM json_each($4) w WHERE t.title LIKE w.value ESCAPE '\\' OR EXISTS (
         SELECT 1 FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.content LIKE w.value ESCAPE '\\'))
     ORDER BY t.number DESC LIMIT $5";

/// Both statements run in one transaction, so nothing is settled in between.
const ROLL_UP: [&str; 2] = [
    "INSERT INTO desk_usage (scope, tokens)
     SELECT scope, sum(counted) FROM (
         SELECT 'issue:' || issue_id AS scope, CASE WHEN settled_at IS NULL THEN tokens_if_lost ELSE tokens END AS counted
         FROM desk_reservations WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1)
         UNION ALL
         SELECT 'day:' || day, CASE WHEN settled_at IS NULL THEN tokens_if_lost ELSE tokens END
         FROM desk_reservations WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1)
     ) WHERE true GROUP BY scope
     ON CONFLICT (scope) DO UPDATE SET tokens = desk_usage.tokens + excluded.tokens",
    "UPDATE desk_reservations SET rolled_up = TRUE
     WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1)",
];

implement_statements!(SqliteConnection, SqliteRow, bind_patterns = as_json);

/// SQLite has no array parameters.
fn as_json(patterns: &[String]) -> String {
    serde_json::json!(patterns).to_string()
}

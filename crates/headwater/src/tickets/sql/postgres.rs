//! PostgreSQL dialect of the ticket statements.
//!
//! Upstream: `statements` runs them.

use headwater_stream::clock::Timestamp;
use sqlx::postgres::{PgConnection, PgRow};
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
            "SELECT number, ticket_id::text, issue_id, title, user_id, status, handed_over, ",
            "headwater_ms(created_at), headwater_ms(updated_at) FROM tickets ",
            $rest
        )
    };
}

macro_rules! select_message {
    ($rest:literal) => {
        concat!(
            "SELECT seq, message_id::text, ticket_id::text, author, content, headwater_ms(created_at) ",
            "FROM ticket_messages ",
            $rest
        )
    };
}

const INSERT_TICKET: &str =
    "INSERT INTO tickets (ticket_id, issue_id, title, user_id, created_at, updated_at)
     VALUES ($1::text::uuid, $2, $3, $4, to_timestamp($5::bigint / 1000.0), to_timestamp($5::bigint / 1000.0))
     ON CONFLICT (ticket_id) DO NOTHING";
const TICKET: &str = select_ticket!("WHERE ticket_id = $1::text::uuid");
const LOCK_TICKET: &str = select_ticket!("WHERE ticket_id = $1::text::uuid FOR UPDATE");
const CHANGE_TICKET: &str =
    "UPDATE tickets SET status = $2, handed_over = $3, updated_at = to_timestamp($4::bigint / 1000.0)
     WHERE ticket_id = $1::text::uuid";
const TICKETS: &str = select_ticket!(
    "WHERE number < $1 AND ($2::text IS NULL OR status = $2) AND ($3::text IS NULL OR user_id = $3)
     ORDER BY number DESC LIMIT $4"
);

const INSERT_MESSAGE: &str =
    "INSERT INTO ticket_messages (message_id, ticket_id, author, content, created_at, run)
     VALUES ($1::text::uuid, $2::text::uuid, $3, $4, to_timestamp($5::bigint / 1000.0), $6)";
const MESSAGE: &str = select_message!("WHERE message_id = $1::text::uuid");
const MESSAGES: &str =
    select_message!("WHERE ticket_id = $1::text::uuid AND seq > $2 ORDER BY seq LIMIT $3");

const SEARCH: &str = "SELECT t.ticket_id::text, t.title, t.status, (
         SELECT m.content FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.author <> 'user'
         ORDER BY m.seq DESC LIMIT 1)
     FROM (SELECT number, ticket_id, title, status FROM tickets WHERE $1::text IS NULL OR user_id = $1
         ORDER BY number DESC LIMIT $2) t
     WHERE t.ticket_id::text <> $3 AND (t.title ILIKE ANY ($4::text[]) OR EXISTS (
         SELECT 1 FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.content ILIKE ANY ($4::text[])))
     ORDER BY t.number DESC LIMIT $5";

/// The advisory lock ensures that only one process aggregates at a time; others skip.
const ROLL_UP: [&str; 1] = ["WITH done AS (
         UPDATE desk_reservations SET rolled_up = true WHERE id IN (
             SELECT id FROM desk_reservations
             WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1)
                 AND (SELECT pg_try_advisory_xact_lock(7522537965574778738))
             LIMIT 50000 FOR UPDATE SKIP LOCKED)
         RETURNING issue_id, day, CASE WHEN settled_at IS NULL THEN tokens_if_lost ELSE tokens END AS counted
     ), counts AS (
         SELECT 'issue:' || issue_id AS scope, counted FROM done
         UNION ALL SELECT 'day:' || day, counted FROM done
     )
     INSERT INTO desk_usage (scope, tokens)
     SELECT scope, CAST(sum(counted) AS bigint) FROM counts GROUP BY scope
     ON CONFLICT (scope) DO UPDATE SET tokens = desk_usage.tokens + excluded.tokens"];

implement_statements!(PgConnection, PgRow, bind_patterns = std::convert::identity);

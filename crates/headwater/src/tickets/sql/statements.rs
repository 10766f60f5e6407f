//! The statements of the ticket tables, for both databases.
//!
//! Upstream: `store` and its parts, inside a transaction of `headwater-issue` or on a read connection. Downstream:
//! `StoreConnection`, which executes one text on SQLite and on PostgreSQL.

use std::sync::Arc;

use headwater_analytics::RunMetrics;
use headwater_issue::{IssueError, IssueId, SqlRow, SqlValue, StoreConnection, Transaction};
use headwater_stream::clock::Timestamp;
use sqlx::Error;
use uuid::Uuid;

use crate::desk::budget::BudgetUsage;
use crate::desk::tools::FoundTicket;
use crate::tickets::Author;
use crate::tickets::ticket::{Ticket, TicketError, TicketFilter, TicketMessage, TicketStatus};

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

/// A failed statement.
pub(crate) fn database_error(what: &str, error: Error) -> TicketError {
    let problem = format!("ticket store: {what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }.into()
}

/// Executes a statement that returns no rows.
async fn execute(
    connection: StoreConnection<'_>,
    what: &str,
    sql: &'static str,
    parameters: &[SqlValue<'_>],
) -> Result<(), TicketError> {
    let done = connection.execute(sql, parameters).await;
    done.map(drop).map_err(|error| database_error(what, error))
}

/// Executes a statement and reads its rows.
pub(crate) async fn list<T>(
    connection: StoreConnection<'_>,
    what: &str,
    sql: &'static str,
    parameters: &[SqlValue<'_>],
    read: impl Fn(&SqlRow) -> Result<T, Error>,
) -> Result<Vec<T>, TicketError> {
    let rows = connection.fetch_all(sql, parameters).await;
    let read: Result<_, Error> = rows.and_then(|rows| rows.iter().map(read).collect());
    read.map_err(|error| database_error(what, error))
}

/// Does nothing if the ticket exists.
pub(crate) async fn insert_ticket(
    connection: StoreConnection<'_>,
    row: &NewTicketRow<'_>,
) -> Result<(), TicketError> {
    let insert = "INSERT INTO tickets (ticket_id, issue_id, title, user_id, created_at, updated_at)
         VALUES ($1::text::uuid, $2, $3, $4, headwater_time($5), headwater_time($5))
         ON CONFLICT (ticket_id) DO NOTHING";
    let (ticket_id, now) = (row.ticket_id.to_string(), to_ms(row.now));
    let parameters = [
        (&ticket_id).into(),
        row.issue_id.0.into(),
        row.title.into(),
        row.user_id.into(),
        now.into(),
    ];
    execute(connection, "insert_ticket", insert, &parameters).await
}

/// Locks the ticket until the end of the transaction.
pub(crate) async fn lock_ticket(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
) -> Result<Option<Ticket>, TicketError> {
    let select = select_ticket!("WHERE ticket_id = $1::text::uuid FOR UPDATE");
    let id = ticket_id.to_string();
    Ok(list(connection, "lock_ticket", select, &[(&id).into()], read_ticket).await?.pop())
}

pub(crate) async fn ticket(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
) -> Result<Option<Ticket>, TicketError> {
    let select = select_ticket!("WHERE ticket_id = $1::text::uuid");
    let id = ticket_id.to_string();
    Ok(list(connection, "ticket", select, &[(&id).into()], read_ticket).await?.pop())
}

pub(crate) async fn change_ticket(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    status: TicketStatus,
    handed_over: bool,
    now: Timestamp,
) -> Result<(), TicketError> {
    let update = "UPDATE tickets SET status = $2, handed_over = $3, updated_at = headwater_time($4)
         WHERE ticket_id = $1::text::uuid";
    let id = ticket_id.to_string();
    let parameters = [(&id).into(), status.as_str().into(), handed_over.into(), to_ms(now).into()];
    execute(connection, "change_ticket", update, &parameters).await
}

pub(crate) async fn insert_message(
    connection: StoreConnection<'_>,
    row: &NewMessageRow<'_>,
) -> Result<(), TicketError> {
    let insert =
        "INSERT INTO ticket_messages (message_id, ticket_id, author, content, created_at, run)
         VALUES ($1::text::uuid, $2::text::uuid, $3, $4, headwater_time($5), $6)";
    let (message_id, ticket_id) = (row.message_id.to_string(), row.ticket_id.to_string());
    let run = run_json(&row.run);
    let parameters = [
        (&message_id).into(),
        (&ticket_id).into(),
        row.author.as_str().into(),
        row.content.into(),
        to_ms(row.now).into(),
        run.as_deref().into(),
    ];
    execute(connection, "insert_message", insert, &parameters).await
}

pub(crate) async fn message(
    connection: StoreConnection<'_>,
    message_id: Uuid,
) -> Result<Option<TicketMessage>, TicketError> {
    let select = select_message!("WHERE message_id = $1::text::uuid");
    let id = message_id.to_string();
    Ok(list(connection, "message", select, &[(&id).into()], read_message).await?.pop())
}

pub(crate) async fn messages(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    after: i64,
    limit: i64,
) -> Result<Vec<TicketMessage>, TicketError> {
    let select =
        select_message!("WHERE ticket_id = $1::text::uuid AND seq > $2 ORDER BY seq LIMIT $3");
    let id = ticket_id.to_string();
    let parameters = [(&id).into(), after.into(), limit.into()];
    list(connection, "messages", select, &parameters, read_message).await
}

pub(crate) async fn tickets(
    connection: StoreConnection<'_>,
    filter: &TicketFilter,
    limit: i64,
) -> Result<Vec<Ticket>, TicketError> {
    let select = select_ticket!(
        "WHERE number < $1 AND ($2::text IS NULL OR status = $2) AND ($3::text IS NULL OR user_id = $3)
         ORDER BY number DESC LIMIT $4"
    );
    let parameters = [
        filter.before.unwrap_or(i64::MAX).into(),
        filter.status.map(TicketStatus::as_str).into(),
        filter.user_id.as_deref().into(),
        limit.into(),
    ];
    list(connection, "tickets", select, &parameters, read_ticket).await
}

/// Scans only the newest tickets, so that the cost does not grow with their number.
pub(crate) async fn search(
    connection: StoreConnection<'_>,
    search: &SearchParameters<'_>,
) -> Result<Vec<FoundTicket>, TicketError> {
    let select = "SELECT t.ticket_id::text, t.title, t.status, (
             SELECT m.content FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.author <> 'user'
             ORDER BY m.seq DESC LIMIT 1)
         FROM (SELECT number, ticket_id, title, status FROM tickets WHERE $1::text IS NULL OR user_id = $1
             ORDER BY number DESC LIMIT $2) t
         WHERE t.ticket_id::text <> $3 AND EXISTS (SELECT 1 FROM headwater_each($4) w
             WHERE lower(t.title) LIKE lower(w.value) ESCAPE '\\' OR EXISTS (
                 SELECT 1 FROM ticket_messages m
                 WHERE m.ticket_id = t.ticket_id AND lower(m.content) LIKE lower(w.value) ESCAPE '\\'))
         ORDER BY t.number DESC LIMIT $5";
    let patterns = serde_json::json!(search.patterns).to_string();
    let parameters = [
        search.user_id.into(),
        SEARCHED_MAX.into(),
        search.except.into(),
        (&patterns).into(),
        search.limit.into(),
    ];
    let read = |row: &SqlRow| {
        let (ticket_id, title, status) = (row.get(0)?, row.get(1)?, row.get(2)?);
        Ok(FoundTicket { ticket_id, title, status, answer: row.get(3)? })
    };
    list(connection, "search", select, &parameters, read).await
}

/// Tokens counted against the budgets of an issue and of a day, from one snapshot.
pub(crate) async fn token_usage(
    connection: StoreConnection<'_>,
    row: &ReservationRow,
    now: i64,
) -> Result<[BudgetUsage; 2], TicketError> {
    let select = "SELECT
             coalesce((SELECT tokens FROM desk_usage WHERE scope = $1), 0),
             coalesce((SELECT tokens FROM desk_usage WHERE scope = $2), 0),
             coalesce(sum(counted) FILTER (WHERE of_issue), 0)::bigint,
             coalesce(sum(unsettled) FILTER (WHERE of_issue), 0)::bigint,
             coalesce(sum(counted) FILTER (WHERE of_day), 0)::bigint,
             coalesce(sum(unsettled) FILTER (WHERE of_day), 0)::bigint
         FROM (
             SELECT issue_id = $3 AS of_issue, day = $4 AS of_day,
                 CASE WHEN settled_at IS NULL AND expires_at <= $5 THEN tokens_if_lost ELSE tokens END AS counted,
                 CASE WHEN settled_at IS NULL AND expires_at > $5 THEN tokens ELSE 0 END AS unsettled
             FROM desk_reservations
             WHERE (issue_id = $3 OR day = $4) AND NOT rolled_up AND id <> $6
         ) AS open";
    let (issue, day) = (format!("issue:{}", row.issue_id), format!("day:{}", row.day));
    let parameters = [
        (&issue).into(),
        (&day).into(),
        row.issue_id.into(),
        row.day.into(),
        now.into(),
        (&row.id).into(),
    ];
    let read = |found: &SqlRow| {
        let number = |index| Ok::<_, Error>(u64::try_from(found.get::<i64>(index)?).unwrap_or(0));
        let spent = |usage, counted: usize| {
            let total = number(usage)?.saturating_add(number(counted)?);
            Ok::<_, Error>(BudgetUsage { total, unsettled: number(counted + 1)? })
        };
        Ok([spent(0, 2)?, spent(1, 4)?])
    };
    let usage = list(connection, "token_usage", select, &parameters, read).await?.pop();
    usage.ok_or_else(|| database_error("token_usage", Error::RowNotFound))
}

/// Does nothing if the reservation exists, because it was settled before.
pub(crate) async fn insert_reservation(
    connection: StoreConnection<'_>,
    row: &ReservationRow,
) -> Result<(), TicketError> {
    let insert =
        "INSERT INTO desk_reservations (id, issue_id, day, tokens, tokens_if_lost, expires_at)
         VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (id) DO NOTHING";
    let ReservationRow { id, issue_id, day, tokens, tokens_if_lost, expires_at } = row;
    let parameters = [
        id.into(),
        (*issue_id).into(),
        (*day).into(),
        (*tokens).into(),
        (*tokens_if_lost).into(),
        (*expires_at).into(),
    ];
    execute(connection, "insert_reservation", insert, &parameters).await
}

pub(crate) async fn remove_reservation(
    connection: StoreConnection<'_>,
    row: &ReservationRow,
) -> Result<(), TicketError> {
    let delete = "DELETE FROM desk_reservations WHERE id = $1 AND settled_at IS NULL";
    execute(connection, "remove_reservation", delete, &[(&row.id).into()]).await
}

/// Only the first settlement counts. It is stored even without a reservation, so that a delayed insert of the
/// reservation has no effect.
pub(crate) async fn settle_reservation(
    connection: StoreConnection<'_>,
    row: &ReservationRow,
    used: i64,
    now: i64,
) -> Result<(), TicketError> {
    let upsert =
        "INSERT INTO desk_reservations (id, issue_id, day, tokens, tokens_if_lost, expires_at, settled_at)
         VALUES ($1, $2, $3, $4, $4, $5, $6)
         ON CONFLICT (id) DO UPDATE SET tokens = excluded.tokens, settled_at = excluded.settled_at
         WHERE desk_reservations.settled_at IS NULL AND NOT desk_reservations.rolled_up";
    let parameters = [
        (&row.id).into(),
        row.issue_id.into(),
        row.day.into(),
        used.into(),
        row.expires_at.into(),
        now.into(),
    ];
    execute(connection, "settle_reservation", upsert, &parameters).await
}

/// Aggregates settled and expired reservations, and deletes aggregated ones that expired before `remove_before`. Runs
/// inside a transaction.
pub(crate) async fn roll_up_reservations(
    transaction: &mut dyn Transaction,
    now: i64,
    remove_before: i64,
) -> Result<(), TicketError> {
    let what = "roll_up_reservations";
    let statements: &[&'static str] = match transaction.connection() {
        StoreConnection::Postgres(_) => &[ROLL_UP_POSTGRES],
        _ => &ROLL_UP_SQLITE,
    };
    for statement in statements {
        execute(transaction.connection(), what, statement, &[now.into()]).await?;
    }
    let delete = "DELETE FROM desk_reservations WHERE rolled_up AND expires_at <= $1";
    execute(transaction.connection(), what, delete, &[remove_before.into()]).await
}

/// The advisory lock ensures that only one process aggregates at a time; others skip.
const ROLL_UP_POSTGRES: &str = "WITH done AS (
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
     ON CONFLICT (scope) DO UPDATE SET tokens = desk_usage.tokens + excluded.tokens";

/// Both statements run in one transaction, so nothing is settled in between.
const ROLL_UP_SQLITE: [&str; 2] = [
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

fn read_ticket(row: &SqlRow) -> Result<Ticket, Error> {
    let status: String = row.get(5)?;
    Ok(Ticket {
        number: row.get(0)?,
        ticket_id: read_id(row, 1)?,
        issue_id: IssueId(row.get(2)?),
        title: row.get(3)?,
        user_id: row.get(4)?,
        status: TicketStatus::parse(&status).ok_or_else(|| invalid_value("status", &status))?,
        handed_over: row.get(6)?,
        created_at: from_ms(row.get(7)?),
        updated_at: from_ms(row.get(8)?),
    })
}

fn read_message(row: &SqlRow) -> Result<TicketMessage, Error> {
    let author: String = row.get(3)?;
    Ok(TicketMessage {
        seq: row.get(0)?,
        message_id: read_id(row, 1)?,
        ticket_id: read_id(row, 2)?,
        author: Author::parse(&author).ok_or_else(|| invalid_value("author", &author))?,
        content: row.get(4)?,
        created_at: from_ms(row.get(5)?),
    })
}

fn read_id(row: &SqlRow, index: usize) -> Result<Uuid, Error> {
    let text: String = row.get(index)?;
    Uuid::parse_str(&text).map_err(|_| invalid_value("id", &text))
}

fn invalid_value(what: &str, value: &str) -> Error {
    Error::Decode(format!("invalid {what} `{value}` in the ticket tables").into())
}

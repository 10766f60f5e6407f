//! The tables of tickets in SQLite: statements and nothing else.
//!
//! Upstream: `store`, inside a transaction of `headwater-issue` or on one of its connections.

use headwater_stream::clock::Timestamp;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Error, Executor, Row};
use uuid::Uuid;

use super::rows::{self, NewMessageRow, NewTicketRow, SEARCHED_MAX, SearchRow};
use super::ticket::{Ticket, TicketFilter, TicketMessage, TicketStatus};
use crate::desk::tools::FoundTicket;

const MIGRATIONS: [&str; 2] =
    [include_str!("migrations/sqlite_0001.sql"), include_str!("migrations/sqlite_0002.sql")];

/// The newest version of the tables that this program knows.
pub(super) const VERSION: usize = MIGRATIONS.len();

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
            "SELECT seq, message_id, ticket_id, author, content, created_at ",
            "FROM ticket_messages ",
            $rest
        )
    };
}

/// Applies what is missing; the transaction has the right to write.
pub(super) async fn migrate(connection: &mut SqliteConnection) -> Result<usize, Error> {
    connection
        .execute("CREATE TABLE IF NOT EXISTS desk_migrations (version INTEGER PRIMARY KEY)")
        .await?;
    let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM desk_migrations")
        .fetch_one(&mut *connection)
        .await?;
    let applied = usize::try_from(newest.try_get::<i64, _>(0)?).unwrap_or(0);
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(applied) {
        connection.execute(sqlx::raw_sql(*sql)).await?;
        sqlx::query("INSERT INTO desk_migrations (version) VALUES ($1)")
            .bind(i64::try_from(index + 1).unwrap_or(i64::MAX))
            .execute(&mut *connection)
            .await?;
    }
    Ok(applied.max(MIGRATIONS.len()))
}

/// One that is there already stays as it is.
pub(super) async fn insert_ticket(
    connection: &mut SqliteConnection,
    row: &NewTicketRow<'_>,
) -> Result<(), Error> {
    sqlx::query(
        "INSERT INTO tickets (ticket_id, issue_id, title, user_id, created_at, updated_at)
         VALUES ($1, $2, $3, $4, $5, $5) ON CONFLICT (ticket_id) DO NOTHING",
    )
    .bind(row.ticket_id.to_string())
    .bind(row.issue_id.0)
    .bind(row.title)
    .bind(row.user_id)
    .bind(rows::ms(row.now))
    .execute(connection)
    .await?;
    Ok(())
}

/// The ticket. Whoever writes has the whole file, so nothing needs a lock.
pub(super) async fn lock_ticket(
    connection: &mut SqliteConnection,
    ticket_id: Uuid,
) -> Result<Option<Ticket>, Error> {
    let row = sqlx::query(select_ticket!("WHERE ticket_id = $1"))
        .bind(ticket_id.to_string())
        .fetch_optional(connection)
        .await?;
    row.as_ref().map(read_ticket).transpose()
}

pub(super) async fn ticket(
    connection: &mut SqliteConnection,
    ticket_id: Uuid,
) -> Result<Option<Ticket>, Error> {
    let row = sqlx::query(select_ticket!("WHERE ticket_id = $1"))
        .bind(ticket_id.to_string())
        .fetch_optional(connection)
        .await?;
    row.as_ref().map(read_ticket).transpose()
}

pub(super) async fn change_ticket(
    connection: &mut SqliteConnection,
    ticket_id: Uuid,
    status: TicketStatus,
    handed_over: bool,
    now: Timestamp,
) -> Result<(), Error> {
    sqlx::query(
        "UPDATE tickets SET status = $2, handed_over = $3, updated_at = $4 WHERE ticket_id = $1",
    )
    .bind(ticket_id.to_string())
    .bind(status.as_str())
    .bind(handed_over)
    .bind(rows::ms(now))
    .execute(connection)
    .await?;
    Ok(())
}

pub(super) async fn insert_message(
    connection: &mut SqliteConnection,
    row: &NewMessageRow<'_>,
) -> Result<(), Error> {
    sqlx::query(
        "INSERT INTO ticket_messages (message_id, ticket_id, author, content, created_at, run)
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(row.message_id.to_string())
    .bind(row.ticket_id.to_string())
    .bind(row.author.as_str())
    .bind(row.content)
    .bind(rows::ms(row.now))
    .bind(rows::figures(&row.run))
    .execute(connection)
    .await?;
    Ok(())
}

pub(super) async fn message(
    connection: &mut SqliteConnection,
    message_id: Uuid,
) -> Result<Option<TicketMessage>, Error> {
    let row = sqlx::query(select_message!("WHERE message_id = $1"))
        .bind(message_id.to_string())
        .fetch_optional(connection)
        .await?;
    row.as_ref().map(read_message).transpose()
}

pub(super) async fn messages(
    connection: &mut SqliteConnection,
    ticket_id: Uuid,
    after: i64,
    limit: i64,
) -> Result<Vec<TicketMessage>, Error> {
    let rows =
        sqlx::query(select_message!("WHERE ticket_id = $1 AND seq > $2 ORDER BY seq LIMIT $3"))
            .bind(ticket_id.to_string())
            .bind(after)
            .bind(limit)
            .fetch_all(connection)
            .await?;
    rows.iter().map(read_message).collect()
}

pub(super) async fn tickets(
    connection: &mut SqliteConnection,
    filter: &TicketFilter,
    limit: i64,
) -> Result<Vec<Ticket>, Error> {
    let rows = sqlx::query(select_ticket!(
        "WHERE number < $1 AND ($2 IS NULL OR status = $2) AND ($3 IS NULL OR user_id = $3)
         ORDER BY number DESC LIMIT $4"
    ))
    .bind(filter.before.unwrap_or(i64::MAX))
    .bind(filter.status.map(TicketStatus::as_str))
    .bind(filter.user_id.as_deref())
    .bind(limit)
    .fetch_all(connection)
    .await?;
    rows.iter().map(read_ticket).collect()
}

/// Looks at the newest tickets only, so that a search costs the same however many there are.
pub(super) async fn search(
    connection: &mut SqliteConnection,
    search: &SearchRow<'_>,
) -> Result<Vec<FoundTicket>, Error> {
    let rows = sqlx::query(
        "SELECT t.ticket_id, t.title, t.status, (
             SELECT m.content FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.author <> 'user'
             ORDER BY m.seq DESC LIMIT 1)
         FROM (SELECT number, ticket_id, title, status FROM tickets WHERE $1 IS NULL OR user_id = $1
             ORDER BY number DESC LIMIT $2) t
         WHERE t.ticket_id <> $3 AND EXISTS (SELECT 1 FROM json_each($4) w WHERE t.title LIKE w.value ESCAPE '\\' OR EXISTS (
             SELECT 1 FROM ticket_messages m WHERE m.ticket_id = t.ticket_id AND m.content LIKE w.value ESCAPE '\\'))
         ORDER BY t.number DESC LIMIT $5",
    )
    .bind(search.user_id)
    .bind(SEARCHED_MAX)
    .bind(search.except)
    .bind(serde_json::json!(search.patterns).to_string())
    .bind(search.limit)
    .fetch_all(connection)
    .await?;
    let read = |row: &SqliteRow| {
        Ok(FoundTicket {
            ticket_id: row.try_get(0)?,
            title: row.try_get(1)?,
            status: row.try_get(2)?,
            answer: row.try_get(3)?,
        })
    };
    rows.iter().map(read).collect()
}

/// Counts tokens as spent if the limit allows. Returns whether it did.
pub(super) async fn spend(
    connection: &mut SqliteConnection,
    scope: &str,
    tokens: i64,
    limit: i64,
) -> Result<bool, Error> {
    sqlx::query(
        "INSERT INTO desk_usage (scope, tokens) VALUES ($1, 0) ON CONFLICT (scope) DO NOTHING",
    )
    .bind(scope)
    .execute(&mut *connection)
    .await?;
    let spent = sqlx::query(
        "UPDATE desk_usage SET tokens = tokens + $2 WHERE scope = $1 AND tokens + $2 <= $3",
    )
    .bind(scope)
    .bind(tokens)
    .bind(limit)
    .execute(connection)
    .await?;
    Ok(spent.rows_affected() == 1)
}

pub(super) async fn correct(
    connection: &mut SqliteConnection,
    scope: &str,
    by: i64,
) -> Result<(), Error> {
    sqlx::query(
        "UPDATE desk_usage SET tokens = CASE WHEN tokens + $2 < 0 THEN 0 ELSE tokens + $2 END WHERE scope = $1",
    )
    .bind(scope)
    .bind(by)
    .execute(connection)
    .await?;
    Ok(())
}

fn read_ticket(row: &SqliteRow) -> Result<Ticket, Error> {
    Ok(Ticket {
        number: row.try_get(0)?,
        ticket_id: rows::id(row.try_get(1)?)?,
        issue_id: headwater_issue::IssueId(row.try_get(2)?),
        title: row.try_get(3)?,
        user_id: row.try_get(4)?,
        status: rows::status(row.try_get(5)?)?,
        handed_over: row.try_get(6)?,
        created_at: rows::time(row.try_get(7)?),
        updated_at: rows::time(row.try_get(8)?),
    })
}

fn read_message(row: &SqliteRow) -> Result<TicketMessage, Error> {
    Ok(TicketMessage {
        seq: row.try_get(0)?,
        message_id: rows::id(row.try_get(1)?)?,
        ticket_id: rows::id(row.try_get(2)?)?,
        author: rows::author(row.try_get(3)?)?,
        content: row.try_get(4)?,
        created_at: rows::time(row.try_get(5)?),
    })
}

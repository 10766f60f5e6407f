//! The statements of the ticket tables, for both databases.
//!
//! Upstream: `store` and its parts, inside a transaction of `headwater-issue` or on a read connection. Downstream:
//! `StoreConnection`, which executes one text on SQLite and on PostgreSQL. Not here: lists and searches (see `ticket_lists`).

use std::sync::Arc;

use headwater_analytics::RunMetrics;
use headwater_issue::{IssueError, IssueId, SqlRow, SqlValue, StoreConnection, Transaction};
use headwater_stream::clock::Timestamp;
use sqlx::Error;
use uuid::Uuid;

use crate::desk::budget::BudgetUsage;
use crate::tickets::Author;
use crate::tickets::ticket::{Ticket, TicketError, TicketMessage, TicketStatus};

macro_rules! select_ticket {
    ($rest:literal) => {
        concat!(
            "SELECT number, ticket_id::text, issue_id, title, user_id, status, handed_over, ",
            "headwater_ms(created_at), headwater_ms(updated_at), handed_over_at, hand_over_reason, assignee ",
            "FROM tickets ",
            $rest
        )
    };
}

pub(super) use select_ticket;

macro_rules! select_message {
    ($rest:literal) => {
        concat!(
            "SELECT seq, message_id::text, ticket_id::text, author, content, headwater_ms(created_at), ",
            "agent, entry ",
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
}

/// A message to insert.
pub(crate) struct NewMessageRow<'a> {
    pub(crate) message_id: Uuid,
    pub(crate) ticket_id: Uuid,
    pub(crate) author: Author,
    /// The name of an agent.
    pub(crate) agent: Option<&'a str>,
    pub(crate) content: &'a str,
    /// The entry of `ticket_events` that it was imported from, in sortable form.
    pub(crate) entry: Option<&'a str>,
    /// Run metrics of an answer.
    pub(crate) run: RunMetrics,
}

/// A row of `desk_reservations`.
#[derive(Clone, Debug)]
pub(crate) struct ReservationRow {
    pub(crate) id: String,
    pub(crate) issue_id: i64,
    pub(crate) day_scope: String,
    /// Empty if the author is unknown.
    pub(crate) user_scope: String,
    /// Empty if the author is not a stranger.
    pub(crate) strangers_scope: String,
    pub(crate) tokens: i64,
    pub(crate) tokens_if_lost: i64,
    pub(crate) expires_at: i64,
}

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
pub(crate) async fn execute(
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
         VALUES ($1::text::uuid, $2, $3, $4, headwater_now(), headwater_now())
         ON CONFLICT (ticket_id) DO NOTHING";
    let ticket_id = row.ticket_id.to_string();
    let parameters =
        [(&ticket_id).into(), row.issue_id.0.into(), row.title.into(), row.user_id.into()];
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

/// The ticket of an issue, locked.
pub(crate) async fn lock_ticket_of(
    connection: StoreConnection<'_>,
    issue_id: IssueId,
) -> Result<Option<Ticket>, TicketError> {
    let select = select_ticket!("WHERE issue_id = $1 FOR UPDATE");
    Ok(list(connection, "lock ticket", select, &[issue_id.0.into()], read_ticket).await?.pop())
}

/// Whether a draft of an issue waits for a decision.
pub(crate) async fn has_pending_draft(
    connection: StoreConnection<'_>,
    issue_id: IssueId,
) -> Result<bool, TicketError> {
    let select = "SELECT number FROM drafts WHERE issue_id = $1 AND status = 'pending' LIMIT 1";
    let read = |row: &SqlRow| row.get::<i64>(0);
    let found = list(connection, "pending draft", select, &[issue_id.0.into()], read).await?;
    Ok(!found.is_empty())
}

/// Deletes the oldest messages of the ticket of an issue, at most `limit`. Returns whether there may be more.
pub(crate) async fn delete_messages_of(
    connection: StoreConnection<'_>,
    issue_id: IssueId,
    limit: usize,
) -> Result<bool, TicketError> {
    let delete = "DELETE FROM ticket_messages WHERE seq IN (SELECT m.seq FROM ticket_messages AS m
         JOIN tickets AS t ON t.ticket_id = m.ticket_id WHERE t.issue_id = $1 ORDER BY m.seq LIMIT $2)";
    let limited = i64::try_from(limit).unwrap_or(i64::MAX);
    let deleted = connection.execute(delete, &[issue_id.0.into(), limited.into()]).await;
    let deleted = deleted.map_err(|error| database_error("delete messages", error))?;
    Ok(deleted >= limit as u64)
}

/// Deletes the ticket of an issue with its messages, drafts, effects and token counts.
pub(crate) async fn delete_ticket_of(
    transaction: &mut dyn Transaction,
    issue_id: IssueId,
) -> Result<(), TicketError> {
    for delete in [
        "DELETE FROM ticket_messages WHERE ticket_id IN (SELECT ticket_id FROM tickets WHERE issue_id = $1)",
        "DELETE FROM tickets WHERE issue_id = $1",
        "DELETE FROM desk_reservations WHERE issue_id = $1",
        "DELETE FROM drafts WHERE issue_id = $1",
        "DELETE FROM tool_effects WHERE issue_id = $1",
    ] {
        execute(transaction.connection(), "delete ticket", delete, &[issue_id.0.into()]).await?;
    }
    let delete = "DELETE FROM desk_usage WHERE scope = $1";
    let scope = format!("issue:{issue_id}");
    execute(transaction.connection(), "delete ticket", delete, &[(&scope).into()]).await
}

/// Status, hand-over and newest message of a ticket.
pub(crate) type TicketVersion = (String, bool, i64);

/// The versions of those of these tickets that exist.
pub(crate) async fn versions(
    connection: StoreConnection<'_>,
    tickets: &[Uuid],
) -> Result<Vec<(Uuid, TicketVersion)>, TicketError> {
    let select = "SELECT t.ticket_id::text, t.status, t.handed_over,
             coalesce((SELECT max(m.seq) FROM ticket_messages AS m WHERE m.ticket_id = t.ticket_id), 0)
         FROM tickets AS t WHERE t.ticket_id IN (SELECT value::uuid FROM headwater_each($1))";
    let ids = serde_json::to_string(tickets).expect("ids are JSON");
    let read = |row: &SqlRow| {
        let version = (row.get::<String>(1)?, row.get::<bool>(2)?, row.get::<i64>(3)?);
        Ok((read_id(row, 0)?, version))
    };
    list(connection, "versions of tickets", select, &[(&ids).into()], read).await
}

pub(crate) async fn change_ticket(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    status: TicketStatus,
    handed_over: bool,
) -> Result<(), TicketError> {
    // The end of a hand-over ends its queue entry, too.
    let update = "UPDATE tickets SET status = $2, handed_over = $3, updated_at = headwater_now(),
             handed_over_at = CASE WHEN NOT $3 THEN NULL WHEN handed_over THEN handed_over_at
                 ELSE headwater_ms(headwater_now()) END,
             hand_over_reason = CASE WHEN $3 THEN hand_over_reason END,
             assignee = CASE WHEN $3 THEN assignee END
         WHERE ticket_id = $1::text::uuid";
    let id = ticket_id.to_string();
    let parameters = [(&id).into(), status.as_str().into(), handed_over.into()];
    execute(connection, "change_ticket", update, &parameters).await
}

/// Adds a reason and an assignee to a ticket that is handed over; those that it has stay.
pub(crate) async fn describe_hand_over(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    reason: &str,
    assignee: Option<&str>,
) -> Result<(), TicketError> {
    let update = "UPDATE tickets SET hand_over_reason = coalesce(hand_over_reason, $2),
             assignee = coalesce(assignee, $3)
         WHERE ticket_id = $1::text::uuid AND handed_over";
    let id = ticket_id.to_string();
    let parameters = [(&id).into(), reason.into(), assignee.into()];
    execute(connection, "describe_hand_over", update, &parameters).await
}

/// Characters of reasons beyond which no further one is added: they are part of each listed ticket.
const HAND_OVER_REASONS_MAX: i64 = 8_000;

/// Adds a further reason to those of a ticket that is handed over, up to [`HAND_OVER_REASONS_MAX`].
pub(crate) async fn add_hand_over_reason(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    reason: &str,
) -> Result<(), TicketError> {
    let update = "UPDATE tickets
         SET hand_over_reason = coalesce(hand_over_reason || '. Also: ', '') || $2
         WHERE ticket_id = $1::text::uuid AND handed_over AND length(coalesce(hand_over_reason, '')) < $3";
    let id = ticket_id.to_string();
    let parameters = [(&id).into(), reason.into(), HAND_OVER_REASONS_MAX.into()];
    execute(connection, "add_hand_over_reason", update, &parameters).await
}

/// Sets or removes the assignee of a ticket.
pub(crate) async fn set_assignee(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    assignee: Option<&str>,
) -> Result<(), TicketError> {
    let update = "UPDATE tickets SET assignee = $2, updated_at = headwater_now()
         WHERE ticket_id = $1::text::uuid";
    let id = ticket_id.to_string();
    execute(connection, "set_assignee", update, &[(&id).into(), assignee.into()]).await
}

/// The entry of `ticket_events` that decided the status of a ticket; `None` if no entry did.
pub(crate) async fn status_entry(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
) -> Result<Option<String>, TicketError> {
    let select = "SELECT status_entry FROM tickets WHERE ticket_id = $1::text::uuid";
    let id = ticket_id.to_string();
    let read = |row: &SqlRow| row.get::<Option<String>>(0);
    Ok(list(connection, "status_entry", select, &[(&id).into()], read).await?.pop().flatten())
}

pub(crate) async fn set_status_entry(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    entry: &str,
) -> Result<(), TicketError> {
    let update = "UPDATE tickets SET status_entry = $2 WHERE ticket_id = $1::text::uuid";
    let id = ticket_id.to_string();
    execute(connection, "set_status_entry", update, &[(&id).into(), entry.into()]).await
}

/// The event of this program that decided the status of a ticket, and whose entry was not read from the stream yet.
pub(crate) async fn status_event(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
) -> Result<Option<String>, TicketError> {
    let select = "SELECT status_event FROM tickets WHERE ticket_id = $1::text::uuid";
    let id = ticket_id.to_string();
    let read = |row: &SqlRow| row.get::<Option<String>>(0);
    Ok(list(connection, "status_event", select, &[(&id).into()], read).await?.pop().flatten())
}

pub(crate) async fn set_status_event(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    event: Option<Uuid>,
) -> Result<(), TicketError> {
    let update = "UPDATE tickets SET status_event = $2 WHERE ticket_id = $1::text::uuid";
    let (id, event) = (ticket_id.to_string(), event.map(|event| event.to_string()));
    let parameters = [(&id).into(), event.as_deref().into()];
    execute(connection, "set_status_event", update, &parameters).await
}

/// Sets the title and, if it is unknown, the user of a ticket that was opened by a message before `TICKET_CREATED` came.
/// Does nothing if the issue has this event already.
pub(crate) async fn set_title(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    title: &str,
    user_id: Option<&str>,
) -> Result<(), TicketError> {
    let update = "UPDATE tickets SET title = $2, user_id = coalesce(user_id, $3)
         WHERE ticket_id = $1::text::uuid AND NOT EXISTS (SELECT 1 FROM event_logs e
             WHERE e.issue_id = tickets.issue_id AND e.event_type = 'TICKET_CREATED')";
    let id = ticket_id.to_string();
    execute(connection, "set_title", update, &[(&id).into(), title.into(), user_id.into()]).await
}

/// Whether the ticket of an issue was reopened after this event log.
pub(crate) async fn was_reopened(
    connection: StoreConnection<'_>,
    issue_id: IssueId,
    after: i64,
) -> Result<bool, TicketError> {
    let select = "SELECT 1::bigint FROM event_logs
         WHERE issue_id = $1 AND id > $2 AND event_type = 'TICKET_REOPENED' LIMIT 1";
    let read = |row: &SqlRow| row.get::<i64>(0);
    let parameters = [issue_id.0.into(), after.into()];
    Ok(!list(connection, "was_reopened", select, &parameters, read).await?.is_empty())
}

pub(crate) async fn insert_message(
    connection: StoreConnection<'_>,
    row: &NewMessageRow<'_>,
) -> Result<(), TicketError> {
    let insert =
        "INSERT INTO ticket_messages (message_id, ticket_id, author, content, created_at, run, agent, entry)
         VALUES ($1::text::uuid, $2::text::uuid, $3, $4, headwater_now(), $5, $6, $7)";
    let (message_id, ticket_id) = (row.message_id.to_string(), row.ticket_id.to_string());
    let run = run_json(&row.run);
    let parameters = [
        (&message_id).into(),
        (&ticket_id).into(),
        row.author.as_str().into(),
        row.content.into(),
        run.as_deref().into(),
        row.agent.into(),
        row.entry.into(),
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

/// The newest messages before a sequence number, in order.
pub(crate) async fn messages_before(
    connection: StoreConnection<'_>,
    ticket_id: Uuid,
    before: i64,
    limit: i64,
) -> Result<Vec<TicketMessage>, TicketError> {
    let select =
        select_message!("WHERE ticket_id = $1::text::uuid AND seq < $2 ORDER BY seq DESC LIMIT $3");
    let id = ticket_id.to_string();
    let parameters = [(&id).into(), before.into(), limit.into()];
    let mut found = list(connection, "messages", select, &parameters, read_message).await?;
    found.reverse();
    Ok(found)
}

/// Tokens counted against the budgets of an issue, a day, an author and all strangers, from one snapshot.
pub(crate) async fn token_usage(
    connection: StoreConnection<'_>,
    row: &ReservationRow,
    now: i64,
) -> Result<[BudgetUsage; 4], TicketError> {
    let select = "SELECT
             coalesce((SELECT tokens FROM desk_usage WHERE scope = $1), 0),
             coalesce((SELECT tokens FROM desk_usage WHERE scope = $4), 0),
             coalesce((SELECT tokens FROM desk_usage WHERE scope = $2), 0),
             coalesce(sum(counted) FILTER (WHERE of_issue), 0)::bigint,
             coalesce(sum(unsettled) FILTER (WHERE of_issue), 0)::bigint,
             coalesce(sum(counted) FILTER (WHERE of_day), 0)::bigint,
             coalesce(sum(unsettled) FILTER (WHERE of_day), 0)::bigint,
             coalesce(sum(counted) FILTER (WHERE of_user), 0)::bigint,
             coalesce(sum(unsettled) FILTER (WHERE of_user), 0)::bigint,
             coalesce((SELECT tokens FROM desk_usage WHERE scope = $7), 0),
             coalesce(sum(counted) FILTER (WHERE of_strangers), 0)::bigint,
             coalesce(sum(unsettled) FILTER (WHERE of_strangers), 0)::bigint
         FROM (
             SELECT issue_id = $3 AS of_issue, day_scope = $4 AS of_day, user_scope = $2 AND $2 <> '' AS of_user,
                 strangers_scope = $7 AND $7 <> '' AS of_strangers,
                 CASE WHEN settled_at IS NULL AND expires_at <= $5 THEN tokens_if_lost ELSE tokens END AS counted,
                 CASE WHEN settled_at IS NULL AND expires_at > $5 THEN tokens ELSE 0 END AS unsettled
             FROM desk_reservations
             WHERE (issue_id = $3 OR day_scope = $4) AND NOT rolled_up AND id <> $6
         ) AS open";
    let issue = format!("issue:{}", row.issue_id);
    let parameters = [
        (&issue).into(),
        (&row.user_scope).into(),
        row.issue_id.into(),
        (&row.day_scope).into(),
        now.into(),
        (&row.id).into(),
        (&row.strangers_scope).into(),
    ];
    let read = |found: &SqlRow| {
        let number = |index| Ok::<_, Error>(u64::try_from(found.get::<i64>(index)?).unwrap_or(0));
        let spent = |usage, counted: usize| {
            let total = number(usage)?.saturating_add(number(counted)?);
            Ok::<_, Error>(BudgetUsage { total, unsettled: number(counted + 1)? })
        };
        Ok([spent(0, 3)?, spent(1, 5)?, spent(2, 7)?, spent(9, 10)?])
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
        "INSERT INTO desk_reservations (id, issue_id, day_scope, user_scope, tokens, tokens_if_lost, expires_at, strangers_scope)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO NOTHING";
    let ReservationRow { id, issue_id, day_scope, user_scope, strangers_scope, .. } = row;
    let ReservationRow { tokens, tokens_if_lost, expires_at, .. } = row;
    let parameters = [
        id.into(),
        (*issue_id).into(),
        day_scope.into(),
        user_scope.into(),
        (*tokens).into(),
        (*tokens_if_lost).into(),
        (*expires_at).into(),
        strangers_scope.into(),
    ];
    execute(connection, "insert_reservation", insert, &parameters).await
}

/// The other reservations of the issue that are not settled expire at this time at the latest.
pub(crate) async fn lapse_reservations(
    connection: StoreConnection<'_>,
    row: &ReservationRow,
    at: i64,
) -> Result<(), TicketError> {
    let update = "UPDATE desk_reservations SET expires_at = $3
         WHERE issue_id = $1 AND id <> $2 AND NOT rolled_up AND settled_at IS NULL AND expires_at > $3";
    let parameters = [row.issue_id.into(), (&row.id).into(), at.into()];
    execute(connection, "lapse_reservations", update, &parameters).await
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
    let upsert = "INSERT INTO desk_reservations
             (id, issue_id, day_scope, user_scope, tokens, tokens_if_lost, expires_at, settled_at, strangers_scope)
         VALUES ($1, $2, $3, $4, $5, $5, $6, $7, $8)
         ON CONFLICT (id) DO UPDATE SET tokens = excluded.tokens, settled_at = excluded.settled_at
         WHERE desk_reservations.settled_at IS NULL AND NOT desk_reservations.rolled_up";
    let parameters = [
        (&row.id).into(),
        row.issue_id.into(),
        (&row.day_scope).into(),
        (&row.user_scope).into(),
        used.into(),
        row.expires_at.into(),
        now.into(),
        (&row.strangers_scope).into(),
    ];
    execute(connection, "settle_reservation", upsert, &parameters).await
}

/// Aggregates settled and expired reservations. Runs inside a transaction.
pub(crate) async fn roll_up_reservations(
    transaction: &mut dyn Transaction,
    now: i64,
) -> Result<(), TicketError> {
    let what = "roll_up_reservations";
    let statements: &[&'static str] = match transaction.connection() {
        StoreConnection::Postgres(_) => &[ROLL_UP_POSTGRES],
        _ => &ROLL_UP_SQLITE,
    };
    for statement in statements {
        execute(transaction.connection(), what, statement, &[now.into()]).await?;
    }
    Ok(())
}

/// The advisory lock ensures that only one process aggregates at a time; others skip.
const ROLL_UP_POSTGRES: &str = "WITH done AS (
         UPDATE desk_reservations SET rolled_up = true WHERE id IN (
             SELECT id FROM desk_reservations
             WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1)
                 AND (SELECT pg_try_advisory_xact_lock(7522537965574778738))
             LIMIT 50000 FOR UPDATE SKIP LOCKED)
         RETURNING issue_id, day_scope, user_scope, strangers_scope, CASE WHEN settled_at IS NULL THEN tokens_if_lost ELSE tokens END AS counted
     ), counts AS (
         SELECT 'issue:' || issue_id AS scope, counted FROM done
         UNION ALL SELECT day_scope, counted FROM done
         UNION ALL SELECT user_scope, counted FROM done WHERE user_scope <> ''
         UNION ALL SELECT strangers_scope, counted FROM done WHERE strangers_scope <> ''
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
         SELECT day_scope, CASE WHEN settled_at IS NULL THEN tokens_if_lost ELSE tokens END
         FROM desk_reservations WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1)
         UNION ALL
         SELECT user_scope, CASE WHEN settled_at IS NULL THEN tokens_if_lost ELSE tokens END
         FROM desk_reservations WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1) AND user_scope <> ''
         UNION ALL
         SELECT strangers_scope, CASE WHEN settled_at IS NULL THEN tokens_if_lost ELSE tokens END
         FROM desk_reservations WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1) AND strangers_scope <> ''
     ) WHERE true GROUP BY scope
     ON CONFLICT (scope) DO UPDATE SET tokens = desk_usage.tokens + excluded.tokens",
    "UPDATE desk_reservations SET rolled_up = TRUE
     WHERE NOT rolled_up AND (settled_at IS NOT NULL OR expires_at <= $1)",
];

pub(super) fn read_ticket(row: &SqlRow) -> Result<Ticket, Error> {
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
        handed_over_at: row.get::<Option<i64>>(9)?.map(from_ms),
        hand_over_reason: row.get(10)?,
        assignee: row.get(11)?,
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
        agent: row.get(6)?,
        entry: row.get(7)?,
    })
}

fn read_id(row: &SqlRow, index: usize) -> Result<Uuid, Error> {
    let text: String = row.get(index)?;
    Uuid::parse_str(&text).map_err(|_| invalid_value("id", &text))
}

fn invalid_value(what: &str, value: &str) -> Error {
    Error::Decode(format!("invalid {what} `{value}` in the ticket tables").into())
}

//! Outbox rows on SQLite: insert rows, take rows for delivery, one per kind and issue, and settle deliveries.

use std::collections::HashSet;

use headwater_stream::clock::Timestamp;
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnection;
use sqlx::{Error, Row};

use super::WriteTx;
use super::statements::{json_rows, to_column};
use crate::error::Result;
use crate::issue::{IssueId, OutboxId};
use crate::outbox::types::{
    NewOutboxRow, OutboxDelivery, OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake,
};
use crate::row_decoding::{outbox_columns, read_outbox, to_i64};
use crate::sql::sqlite_rows;
use crate::validate::error_text;

/// Whether any row may be due.
pub(super) async fn is_due(
    connection: &mut SqliteConnection,
    now: Timestamp,
) -> Result<bool, Error> {
    let row = sqlx::query(
        "SELECT EXISTS (SELECT 1 FROM outbox WHERE status IN ('pending', 'taken') AND due_at <= ?1)",
    )
    .bind(to_column(now))
    .fetch_one(connection)
    .await?;
    row.try_get(0)
}

/// Appends a row after all others of its kind and issue; ids increase in delivery order.
pub(super) async fn insert(
    connection: &mut SqliteConnection,
    issue_id: IssueId,
    row: &NewOutboxRow,
    key: &str,
    now: Timestamp,
) -> Result<OutboxId, Error> {
    let inserted = sqlx::query(
        "INSERT INTO outbox
             (issue_id, kind, target, idempotency_key, payload, due_at, created_at, status,
                 newest_event_log_id, integration_id)
         SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?6, iif(EXISTS (SELECT 1 FROM outbox
             WHERE issue_id = ?1 AND kind = ?2 AND status IN ('waiting', 'pending', 'taken')), 'waiting', 'pending'),
             (SELECT max(id) FROM event_logs WHERE issue_id = ?1),
             (SELECT integration_id FROM issues WHERE id = ?1)
         RETURNING id",
    )
    .bind(issue_id.0)
    .bind(row.kind.as_str())
    .bind(row.target.as_str())
    .bind(key)
    .bind(row.payload.as_str())
    .bind(to_column(now))
    .fetch_one(connection)
    .await?;
    Ok(OutboxId(inserted.try_get(0)?))
}

pub(super) async fn take(tx: &mut WriteTx, take: &OutboxTake) -> Result<Vec<OutboxRow>, Error> {
    let ids = choose(due_by_target(tx, take).await?, take);
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let ids = json_rows(ids.into_iter().map(Value::from).collect());
    sqlx::query(
        "UPDATE outbox SET status = 'taken', deliveries = deliveries + 1, taken_by = ?1, due_at = ?2,
             crashes = crashes + (status = 'taken')
         WHERE id IN (SELECT value FROM json_each(?3))",
    )
    .bind(take.worker.as_str())
    .bind(to_column(tx.now.after(take.ttl)))
    .bind(ids.as_str())
    .execute(&mut *tx.transaction)
    .await?;
    let select = concat!(
        "SELECT ",
        outbox_columns!(),
        " FROM outbox o JOIN issues i ON i.id = o.issue_id
              JOIN integrations g ON g.id = i.integration_id
          WHERE o.id IN (SELECT value FROM json_each($1)) ORDER BY o.id"
    );
    let rows = sqlite_rows(&mut tx.transaction, select, &[(&ids).into()]).await?;
    rows.iter().map(read_outbox).collect()
}

/// The due rows of one target, up to its free slots.
struct DueTarget {
    in_flight: usize,
    is_failing: bool,
    served: u64,
    /// Ids and due times in delivery order.
    rows: Vec<(i64, i64)>,
}

/// The due rows of each target, with one index probe per target regardless of its number of rows.
async fn due_by_target(tx: &mut WriteTx, take: &OutboxTake) -> Result<Vec<DueTarget>, Error> {
    let mut due = Vec::new();
    let mut last: (i64, String, String) = (i64::MIN, String::new(), String::new());
    loop {
        let next = sqlx::query(
            "SELECT o.integration_id, o.kind, o.target, g.name
             FROM outbox o INDEXED BY idx_outbox_target JOIN integrations g ON g.id = o.integration_id
             WHERE o.status IN ('pending', 'taken') AND (o.integration_id, o.kind, o.target) > (?1, ?2, ?3)
             ORDER BY o.integration_id, o.kind, o.target LIMIT 1",
        )
        .bind(last.0)
        .bind(last.1.as_str())
        .bind(last.2.as_str())
        .fetch_optional(&mut *tx.transaction)
        .await?;
        let Some(next) = next else { return Ok(due) };
        last = (next.try_get(0)?, next.try_get(1)?, next.try_get(2)?);
        let integration: String = next.try_get(3)?;
        let state = take.targets.iter().find(|one| {
            let target = &one.target;
            target.integration == integration
                && target.kind.as_str() == last.1
                && target.target == last.2
        });
        let limit = state.map_or(take.per_target, |state| state.free_slots).min(take.limit);
        let rows = sqlx::query(
            "SELECT id, due_at FROM outbox INDEXED BY idx_outbox_target
             WHERE integration_id = ?1 AND kind = ?2 AND target = ?3 AND status IN ('pending', 'taken')
                 AND due_at <= ?4
             ORDER BY due_at, id LIMIT ?5",
        )
        .bind(last.0)
        .bind(last.1.as_str())
        .bind(last.2.as_str())
        .bind(to_column(tx.now))
        .bind(to_i64(limit))
        .fetch_all(&mut *tx.transaction)
        .await?;
        let rows = rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
        due.push(DueTarget {
            in_flight: state.map_or(0, |state| state.in_flight),
            is_failing: state.is_some_and(|state| state.is_failing),
            served: state.map_or(0, |state| state.served),
            rows: rows.collect::<Result<_, Error>>()?,
        });
    }
}

/// Which rows to take, in the order that [`OutboxTake`] describes.
fn choose(due: Vec<DueTarget>, take: &OutboxTake) -> Vec<i64> {
    let mut ranked = Vec::new();
    for target in &due {
        let oldest = target.rows.first().map(|(_, due_at)| *due_at);
        for (index, (id, _)) in target.rows.iter().enumerate() {
            let rank = (target.in_flight + index, target.served, oldest);
            ranked.push((rank, target.is_failing, *id));
        }
    }
    ranked.sort_unstable();
    let mut failing = 0;
    ranked.retain(|(_, is_failing, _)| {
        failing += usize::from(*is_failing);
        !is_failing || failing <= take.failing_limit
    });
    ranked.into_iter().take(take.limit).map(|(.., id)| id).collect()
}

pub(super) async fn settle(
    tx: &mut WriteTx,
    settlements: &[OutboxSettlement],
) -> Result<Vec<OutboxSettled>, Error> {
    // If a row is named twice, the first settlement counts.
    let mut named = HashSet::new();
    let first: Vec<bool> = settlements.iter().map(|one| named.insert(one.id)).collect();
    let rows = settlements.iter().zip(&first).filter(|(_, first)| **first);
    let rows = rows.map(|(one, _)| write(one, tx.now)).collect();
    let done = sqlx::query(
        "UPDATE outbox SET
             status = new.row ->> 2, attempts = attempts + (new.row ->> 3),
             due_at = coalesce(new.row ->> 4, due_at),
             last_error = coalesce(new.row ->> 5, last_error), taken_by = NULL,
             delivered_at = iif(new.row ->> 2 = 'delivered', ?2, NULL),
             crashes = iif(new.row ->> 2 = 'pending', 0, crashes)
         FROM (SELECT value AS row FROM json_each(?1)) AS new
         WHERE outbox.id = new.row ->> 0 AND outbox.deliveries = new.row ->> 1
             AND outbox.status = 'taken'
         RETURNING outbox.id, outbox.issue_id, outbox.status IN ('delivered', 'dead'), outbox.kind",
    )
    .bind(json_rows(rows))
    .bind(to_column(tx.now))
    .fetch_all(&mut *tx.transaction)
    .await?;
    let mut unblocked = Vec::new();
    for row in &done {
        let is_final: bool = row.try_get(2)?;
        if is_final {
            unblocked.push(json!([row.try_get::<i64, _>(1)?, row.try_get::<&str, _>(3)?]));
        }
    }
    let done = done.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<i64>, Error>>()?;
    unblock_next(&mut tx.transaction, unblocked).await?;
    let settled = settlements.iter().zip(first).map(|(one, first)| {
        if first && done.contains(&one.id.0) { OutboxSettled::Done } else { OutboxSettled::Fenced }
    });
    Ok(settled.collect())
}

/// Makes the oldest waiting row of each of these issues and kinds deliverable, unless another row is in flight.
async fn unblock_next(
    connection: &mut SqliteConnection,
    unblocked: Vec<Value>,
) -> Result<(), Error> {
    if unblocked.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "UPDATE outbox SET status = 'pending' WHERE status = 'waiting' AND id IN (
             SELECT (SELECT id FROM outbox WHERE issue_id = freed.value ->> 0 AND kind = freed.value ->> 1
                 AND status IN ('waiting', 'pending', 'taken') ORDER BY id LIMIT 1)
             FROM json_each(?1) AS freed)",
    )
    .bind(json_rows(unblocked))
    .execute(connection)
    .await?;
    Ok(())
}

/// Makes a dead row deliverable again, as the next row of its issue. Returns whether such a row exists.
pub(super) async fn requeue_dead(tx: &mut WriteTx, id: OutboxId) -> Result<bool, Error> {
    let requeued = sqlx::query(
        "UPDATE outbox SET attempts = 0, crashes = 0, due_at = ?2, status = iif(EXISTS (
             SELECT 1 FROM outbox AS other WHERE other.issue_id = outbox.issue_id AND other.kind = outbox.kind
                 AND other.status IN ('waiting', 'pending', 'taken')), 'waiting', 'pending')
         WHERE id = ?1 AND status = 'dead'",
    )
    .bind(id.0)
    .bind(to_column(tx.now))
    .execute(&mut *tx.transaction)
    .await?;
    Ok(requeued.rows_affected() > 0)
}

/// Id, deliveries, and the new status, counted attempts, due time and error.
fn write(settlement: &OutboxSettlement, now: Timestamp) -> Value {
    let (id, deliveries) = (settlement.id.0, settlement.deliveries);
    match &settlement.delivery {
        OutboxDelivery::Delivered => json!([id, deliveries, "delivered", 0, null, null]),
        OutboxDelivery::Retry { after, error } => {
            json!([id, deliveries, "pending", 1, to_column(now.after(*after)), error_text(error)])
        }
        OutboxDelivery::Unavailable { after, error } => {
            json!([id, deliveries, "pending", 0, to_column(now.after(*after)), error_text(error)])
        }
        OutboxDelivery::Dead { error } => {
            json!([id, deliveries, "dead", 1, null, error_text(error)])
        }
        OutboxDelivery::Release => json!([id, deliveries, "pending", 0, to_column(now), null]),
    }
}

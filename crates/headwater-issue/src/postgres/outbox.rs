//! Outbox rows on PostgreSQL: take rows for delivery, one per kind and issue, and settle deliveries.

use std::collections::HashSet;

use headwater_stream::clock::Timestamp;
use sqlx::postgres::PgConnection;
use sqlx::{Error, Row};

use crate::error::Result;
use crate::outbox::types::{
    OutboxDelivery, OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake,
};
use crate::row_decoding::{ms, read_outbox, to_i64};
use crate::sql::SqlRow;
use crate::validate::error_text;

pub(super) async fn take(
    connection: &mut PgConnection,
    take: &OutboxTake,
    latest: Timestamp,
) -> Result<Vec<OutboxRow>, Error> {
    let known = &take.targets;
    let rows = sqlx::query(
        "SELECT * FROM headwater_take_outbox(
             $1, CASE WHEN headwater_ms(headwater_now()) <= $13 THEN $2 ELSE 0 END, $3, $4, $5, $6, $7, $8, $9, $10,
             $11, $12)",
    )
    .bind(&take.worker)
    .bind(to_i64(take.limit))
    .bind(ms(take.ttl))
    .bind(to_i64(take.per_target))
    .bind(to_i64(take.failing_limit))
    .bind(known.iter().map(|one| one.target.integration.as_str()).collect::<Vec<_>>())
    .bind(known.iter().map(|one| one.target.kind.as_str()).collect::<Vec<_>>())
    .bind(known.iter().map(|one| one.target.target.as_str()).collect::<Vec<_>>())
    .bind(known.iter().map(|one| to_i64(one.in_flight)).collect::<Vec<_>>())
    .bind(known.iter().map(|one| to_i64(one.free_slots)).collect::<Vec<_>>())
    .bind(known.iter().map(|one| one.is_failing).collect::<Vec<_>>())
    .bind(known.iter().map(|one| i64::try_from(one.served).unwrap_or(i64::MAX)).collect::<Vec<_>>())
    .bind(i64::try_from(latest.as_millis()).unwrap_or(i64::MAX))
    .fetch_all(connection)
    .await?;
    rows.into_iter().map(|row| read_outbox(&SqlRow::Postgres(row))).collect()
}

/// Update of a settled row: status, counted attempts, next due time, and error.
struct OutboxRowUpdate {
    status: &'static str,
    attempts: i64,
    after_ms: Option<i64>,
    error: Option<String>,
}

impl OutboxRowUpdate {
    fn of(delivery: &OutboxDelivery) -> Self {
        let (status, attempts, after_ms, error) = match delivery {
            OutboxDelivery::Delivered => ("delivered", 0, None, None),
            OutboxDelivery::Retry { after, error } => ("pending", 1, Some(ms(*after)), Some(error)),
            OutboxDelivery::Unavailable { after, error } => {
                ("pending", 0, Some(ms(*after)), Some(error))
            }
            OutboxDelivery::Dead { error } => ("dead", 1, None, Some(error)),
            OutboxDelivery::Release => ("pending", 0, Some(0), None),
        };
        Self { status, attempts, after_ms, error: error.map(|error| error_text(error)) }
    }
}

pub(super) async fn settle(
    connection: &mut PgConnection,
    settlements: &[OutboxSettlement],
) -> Result<Vec<OutboxSettled>, Error> {
    // If a row is named twice, the first settlement counts.
    let mut named = HashSet::new();
    let first: Vec<bool> = settlements.iter().map(|one| named.insert(one.id)).collect();
    let counted =
        || settlements.iter().zip(&first).filter(|(_, first)| **first).map(|(one, _)| one);
    let updates: Vec<OutboxRowUpdate> =
        counted().map(|one| OutboxRowUpdate::of(&one.delivery)).collect();
    let rows = sqlx::query("SELECT * FROM headwater_settle_outbox($1, $2, $3, $4, $5, $6)")
        .bind(counted().map(|one| one.id.0).collect::<Vec<_>>())
        .bind(counted().map(|one| i64::from(one.deliveries)).collect::<Vec<_>>())
        .bind(updates.iter().map(|update| update.status).collect::<Vec<_>>())
        .bind(updates.iter().map(|update| update.attempts).collect::<Vec<_>>())
        .bind(updates.iter().map(|update| update.after_ms).collect::<Vec<_>>())
        .bind(updates.iter().map(|update| update.error.clone()).collect::<Vec<_>>())
        .fetch_all(connection)
        .await?;
    let done = rows.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<i64>, Error>>()?;
    let settled = settlements.iter().zip(&first).map(|(one, first)| {
        if *first && done.contains(&one.id.0) { OutboxSettled::Done } else { OutboxSettled::Fenced }
    });
    Ok(settled.collect())
}

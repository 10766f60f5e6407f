//! Administrative operations on PostgreSQL: statements of `admin_queries`, release and retry.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgConnection;
use sqlx::{Error, Row};

use super::PostgresStore;
use crate::admin_queries::{SqlStore, WaitEnded};
use crate::error::Result;
use crate::issue::{IssueId, OutboxId, ProcessingStatus};
use crate::row_decoding::{known_value, ms};
use crate::sql::{SqlRow, SqlValue};
use crate::transaction::StoreConnection;

pub(super) async fn heartbeat_worker(
    connection: &mut PgConnection,
    worker: &str,
    ttl: Duration,
) -> Result<(), Error> {
    // Also removes expired workers, except rows locked by other transactions.
    sqlx::query(
        "WITH now AS MATERIALIZED (SELECT headwater_now() AS now),
         gone AS (DELETE FROM workers WHERE worker IN (SELECT worker FROM workers, now
             WHERE (expires_at <= now AND worker != $1) OR (worker = $1 AND $2 = 0)
             FOR UPDATE OF workers SKIP LOCKED))
         INSERT INTO workers (worker, started_at, seen_at, expires_at)
         SELECT $1, now, now, now + headwater_interval($2) FROM now WHERE $2 > 0
         ON CONFLICT (worker) DO UPDATE
             SET seen_at = excluded.seen_at, expires_at = excluded.expires_at",
    )
    .bind(worker)
    .bind(ms(ttl))
    .execute(connection)
    .await?;
    Ok(())
}

#[async_trait]
impl SqlStore for PostgresStore {
    async fn query(
        &self,
        what: &str,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<Vec<SqlRow>> {
        self.call(what, async |connection| {
            StoreConnection::Postgres(connection).fetch_all(sql, parameters).await
        })
        .await
    }

    async fn execute(
        &self,
        what: &str,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<()> {
        self.query(what, sql, parameters).await.map(drop)
    }

    async fn handle_clock_step(&self) -> Result<()> {
        self.check_clock().await
    }

    async fn end_wait(&self, what: &str, id: IssueId, retry: bool) -> Result<Option<WaitEnded>> {
        self.call(what, async |connection| {
            let row = sqlx::query("SELECT * FROM headwater_release_issue($1, $2)")
                .bind(id.0)
                .bind(retry)
                .fetch_optional(&mut *connection)
                .await?;
            let Some(row) = row else { return Ok(None) };
            let status: String = row.try_get(2)?;
            Ok(Some(WaitEnded {
                was_quarantined: row.try_get(0)?,
                changed: row.try_get(1)?,
                status: known_value(&status, ProcessingStatus::parse(&status))?,
            }))
        })
        .await
    }

    async fn requeue_dead_outbox(&self, id: OutboxId) -> Result<bool> {
        let requeue = "SELECT * FROM headwater_requeue_dead_outbox($1)";
        let requeued = self.query("retrying an outbox row", requeue, &[id.0.into()]).await?;
        if !requeued.is_empty() {
            self.listener.wake();
        }
        Ok(!requeued.is_empty())
    }
}

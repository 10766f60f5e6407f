//! Administrative operations on SQLite: statements of `admin_queries`, release and retry.

use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::Timestamp;
use sqlx::Error;

use super::state_batch::StateBatch;
use super::statements::to_column;
use super::{SqliteStore, WriteTx};
use crate::admin_queries::{SqlStore, WaitEnded};
use crate::error::Result;
use crate::issue::{IssueId, OutboxId};
use crate::sql::{SqlRow, SqlValue, sqlite_rows};
use crate::state::{Transition, TransitionEffect};

pub(super) async fn heartbeat_worker(
    tx: &mut WriteTx,
    worker: &str,
    ttl: Duration,
) -> Result<(), Error> {
    let now = to_column(tx.now);
    // Also removes expired workers.
    sqlx::query("DELETE FROM workers WHERE expires_at <= ?1 OR (worker = ?2 AND ?3)")
        .bind(now)
        .bind(worker)
        .bind(ttl.is_zero())
        .execute(&mut *tx.transaction)
        .await?;
    if ttl.is_zero() {
        return Ok(());
    }
    sqlx::query(
        "INSERT INTO workers (worker, started_at, seen_at, expires_at) VALUES (?1, ?2, ?2, ?3)
         ON CONFLICT (worker) DO UPDATE SET seen_at = ?2, expires_at = ?3",
    )
    .bind(worker)
    .bind(now)
    .bind(to_column(tx.now.after(ttl)))
    .execute(&mut *tx.transaction)
    .await?;
    Ok(())
}

/// The statement and its parameters at this time. SQLite's own clock is not used: tests set the clock of the store.
fn at<'a>(now: Timestamp, sql: &str, parameters: &[SqlValue<'a>]) -> (String, Vec<SqlValue<'a>>) {
    let now = SqlValue::from(to_column(now));
    let parameters: Vec<_> = parameters.iter().copied().chain([now]).collect();
    (sql.replace("headwater_now()", &format!("${}", parameters.len())), parameters)
}

#[async_trait]
impl SqlStore for SqliteStore {
    async fn query(
        &self,
        what: &str,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<Vec<SqlRow>> {
        let (sql, parameters) = at(self.clock.now(), sql, parameters);
        self.call(what, async |connection| sqlite_rows(connection, &sql, &parameters).await).await
    }

    async fn execute(
        &self,
        what: &str,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<()> {
        self.write(what, async |tx| {
            let (sql, parameters) = at(tx.now, sql, parameters);
            sqlite_rows(&mut tx.transaction, &sql, &parameters).await.map(drop)
        })
        .await
    }

    async fn handle_clock_step(&self) -> Result<()> {
        self.bounded("reading the clock", self.check_clock()).await
    }

    async fn end_wait(&self, what: &str, id: IssueId, retry: bool) -> Result<Option<WaitEnded>> {
        let transition = if retry { Transition::Retry } else { Transition::Release };
        self.write(what, async |WriteTx { transaction, now }| {
            let mut states = StateBatch::load(transaction, [id], *now).await?;
            let before = states.get(id).map(|state| state.quarantined_at.is_some());
            let effect = states.apply(id, &transition);
            let status = states.get(id).map(|state| state.status);
            states.save(transaction).await?;
            let ended = before.zip(effect).zip(status);
            Ok(ended.map(|((was_quarantined, effect), status)| WaitEnded {
                was_quarantined,
                changed: effect != TransitionEffect::Nothing,
                status,
            }))
        })
        .await
    }

    async fn requeue_dead_outbox(&self, id: OutboxId) -> Result<bool> {
        let requeuing = self
            .write("retrying an outbox row", async |tx| super::outbox::requeue_dead(tx, id).await);
        let is_requeued = requeuing.await?;
        if is_requeued {
            self.wake.notify_one();
        }
        Ok(is_requeued)
    }
}

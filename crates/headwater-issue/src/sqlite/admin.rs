//! Administrative operations on SQLite: listings, facts, consistency check, release and retry.

use std::time::Duration;

use sqlx::{Error, Row};

use super::state_batch::StateBatch;
use super::statements::{
    dead_letter_columns, event_log_columns, issue_columns, outbox_columns, to_column,
};
use super::{SqliteStore, WriteTx};
use crate::admin::{
    Backlog, ConsistencyReport, DeadOutboxRow, EventLogFilter, IntegrationInfo, IssueDeadLetter,
    IssueFacts, IssueFilter, IssueRetried, QuarantineCleared, WorkerInfo,
};
use crate::admin_queries::{implement_admin_store, read_consistency_report};
use crate::connect::with_deadline;
use crate::error::{IssueError, Result};
use crate::issue::{
    DeadLetterId, EventLog, IntegrationId, Issue, IssueId, OutboxId, ProcessingStatus,
};
use crate::limits::{CONSISTENCY_CHECK_DEADLINE, PAGE_MAX};
use crate::row_decoding::{
    count, database_error, known_value, optional_timestamp, read_dead_letter, read_event_log,
    read_issue, read_outbox, timestamp, to_i64,
};
use crate::state::{Transition, TransitionEffect};
use crate::validate;

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

impl SqliteStore {
    /// Applies a transition requested by an operator to one issue. `NotFound` if it does not exist.
    async fn apply_operator_transition(
        &self,
        what: &str,
        id: IssueId,
        transition: Transition,
    ) -> Result<(TransitionEffect, ProcessingStatus)> {
        let applied = self
            .write(what, async |WriteTx { transaction, now }| {
                let mut states = StateBatch::load(transaction, [id], *now).await?;
                let effect = states.apply(id, &transition);
                let status = states.get(id).map(|state| state.status);
                states.save(transaction).await?;
                Ok(effect.zip(status))
            })
            .await?;
        applied.ok_or_else(|| IssueError::NotFound { what: format!("issue {id}") })
    }
}

implement_admin_store! { for SqliteStore, with {
    async fn ensure_integration(&self, name: &str, provider: &str) -> Result<IntegrationId> {
        validate::name("name", name)?;
        validate::name("provider", provider)?;
        let (id, found): (i64, String) = self
            .write("creating an integration", async |tx| {
                sqlx::query(
                    "INSERT INTO integrations (name, provider, created_at) VALUES (?1, ?2, ?3)
                     ON CONFLICT (name) DO NOTHING",
                )
                .bind(name)
                .bind(provider)
                .bind(to_column(tx.now))
                .execute(&mut *tx.transaction)
                .await?;
                let row = sqlx::query("SELECT id, provider FROM integrations WHERE name = ?1")
                    .bind(name)
                    .fetch_one(&mut *tx.transaction)
                    .await?;
                Ok((row.try_get(0)?, row.try_get(1)?))
            })
            .await?;
        if found != provider {
            return Err(IssueError::OtherProvider { integration: name.into(), provider: found });
        }
        Ok(IntegrationId(id))
    }

    async fn release(&self, id: IssueId) -> Result<QuarantineCleared> {
        match self.apply_operator_transition("releasing an issue", id, Transition::Release).await? {
            (TransitionEffect::Queued, _) => Ok(QuarantineCleared::Queued),
            (TransitionEffect::Finished, _) => Ok(QuarantineCleared::Idle),
            _ => Ok(QuarantineCleared::NotQuarantined),
        }
    }

    async fn retry(&self, id: IssueId) -> Result<IssueRetried> {
        match self.apply_operator_transition("retrying an issue", id, Transition::Retry).await? {
            (TransitionEffect::Queued, _) => Ok(IssueRetried::Queued),
            (_, ProcessingStatus::Processing) => Ok(IssueRetried::Processing),
            _ => Ok(IssueRetried::Idle),
        }
    }

    async fn issue_facts(&self, id: IssueId) -> Result<Option<IssueFacts>> {
        self.bounded("reading the clock", self.check_clock()).await?;
        let now = self.clock.now();
        self.call("reading the facts about an issue", async |connection| {
            let row = sqlx::query(concat!(
                "SELECT ",
                issue_columns!(),
                ", (SELECT e.created_at FROM event_logs e
                    WHERE e.issue_id = i.id AND e.processed_at IS NULL ORDER BY e.id LIMIT 1),
                   (SELECT count(*) FROM workers WHERE expires_at > ?2),
                   EXISTS (SELECT 1 FROM workers
                    WHERE worker = i.claim_owner AND expires_at > ?2)
                  FROM issues i JOIN integrations g ON g.id = i.integration_id WHERE i.id = ?1"
            ))
            .bind(id.0)
            .bind(to_column(now))
            .fetch_optional(&mut *connection)
            .await?;
            let Some(row) = row else { return Ok(None) };
            Ok(Some(IssueFacts {
                issue: read_issue!(&row),
                oldest_pending_at: optional_timestamp(row.try_get(23)?),
                workers_alive: count(row.try_get(24)?)?,
                owner_alive: row.try_get(25)?,
                now,
            }))
        })
        .await
    }

    async fn check_consistency(&self, limit: usize) -> Result<ConsistencyReport> {
        validate::page(limit)?;
        let reading = async {
            // One transaction, so that all queries see one snapshot.
            let mut reading = self.readers.begin().await?;
            Ok(read_consistency_report!(reading, limit))
        };
        let reading = async { reading.await.map_err(|error| database_error("checking consistency", error)) };
        with_deadline(CONSISTENCY_CHECK_DEADLINE, "checking consistency", reading).await
    }

    async fn backlog(&self) -> Result<Backlog> {
        let now = self.clock.now();
        self.call("counting the backlog", async |connection| {
            let row = sqlx::query(
                "SELECT (SELECT count(*) FROM issues WHERE processing_status = 'queued'),
                     (SELECT count(*) FROM issues WHERE processing_status = 'processing'),
                     (SELECT count(*) FROM issues WHERE quarantined_at IS NOT NULL),
                     (SELECT count(*) FROM outbox WHERE status IN ('waiting', 'pending', 'taken')),
                     (SELECT count(*) FROM outbox WHERE status = 'dead'),
                     (SELECT min(created_at) FROM outbox WHERE status IN ('waiting', 'pending', 'taken'))",
            )
            .fetch_one(&mut *connection)
            .await?;
            let oldest = optional_timestamp(row.try_get(5)?);
            Ok(Backlog {
                queued: count(row.try_get(0)?)?,
                processing: count(row.try_get(1)?)?,
                quarantined: count(row.try_get(2)?)?,
                outbox_pending: count(row.try_get(3)?)?,
                outbox_dead: count(row.try_get(4)?)?,
                outbox_lag: oldest.map_or(Duration::ZERO, |oldest| now.since(oldest)),
            })
        })
        .await
    }

    async fn workers(&self) -> Result<Vec<WorkerInfo>> {
        self.bounded("reading the clock", self.check_clock()).await?;
        let now = self.clock.now();
        self.call("listing workers", async |connection| {
            let rows = sqlx::query(
                "SELECT worker, started_at, seen_at, expires_at, (SELECT count(*) FROM issues
                     WHERE processing_status = 'processing' AND claim_owner = worker)
                 FROM workers WHERE expires_at > ?1 ORDER BY worker LIMIT ?2",
            )
            .bind(to_column(now))
            .bind(to_i64(PAGE_MAX))
            .fetch_all(&mut *connection)
            .await?;
            let read = |row: &sqlx::sqlite::SqliteRow| {
                Ok(WorkerInfo {
                    worker: row.try_get(0)?,
                    started_at: timestamp(row.try_get(1)?),
                    seen_at: timestamp(row.try_get(2)?),
                    expires_at: timestamp(row.try_get(3)?),
                    claims: count(row.try_get(4)?)?,
                })
            };
            rows.iter().map(read).collect()
        })
        .await
    }

    async fn retry_outbox(&self, id: OutboxId) -> Result<()> {
        let requeuing = self.write("retrying an outbox row", async |tx| {
            super::outbox::requeue_dead(tx, id).await
        });
        if !requeuing.await? {
            return Err(IssueError::NotFound { what: format!("dead outbox row {id}") });
        }
        self.wake.notify_one();
        Ok(())
    }
} }

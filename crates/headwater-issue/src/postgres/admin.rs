//! Administrative operations on PostgreSQL: listings, facts, consistency check, release and retry.

use std::time::Duration;

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection, Error, Executor, Row};

use super::PostgresStore;
use super::statements::{dead_letter_columns, event_log_columns, issue_columns, outbox_columns};
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
    count, database_error, known_value, ms, optional_timestamp, read_dead_letter, read_event_log,
    read_issue, read_outbox, timestamp, to_i64,
};
use crate::validate;

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

/// Result of ending a quarantine or a wait.
struct WaitEnded {
    was_quarantined: bool,
    changed: bool,
    status: ProcessingStatus,
}

impl PostgresStore {
    /// Ends a quarantine, or any wait.
    async fn end_wait(&self, what: &str, id: IssueId, retry: bool) -> Result<WaitEnded> {
        let ended = self
            .call(what, async |connection| {
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
            .await?;
        ended.ok_or_else(|| IssueError::NotFound { what: format!("issue {id}") })
    }
}

implement_admin_store! { for PostgresStore, with {
    async fn ensure_integration(&self, name: &str, provider: &str) -> Result<IntegrationId> {
        validate::name("name", name)?;
        validate::name("provider", provider)?;
        let (id, found): (i64, String) = self
            .call("creating an integration", async |connection| {
                sqlx::query(
                    "INSERT INTO integrations (name, provider) VALUES ($1, $2)
                     ON CONFLICT (name) DO NOTHING",
                )
                .bind(name)
                .bind(provider)
                .execute(&mut *connection)
                .await?;
                let row = sqlx::query("SELECT id, provider FROM integrations WHERE name = $1")
                    .bind(name)
                    .fetch_one(&mut *connection)
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
        let ended = self.end_wait("releasing an issue", id, false).await?;
        Ok(match (ended.was_quarantined, ended.status) {
            (false, _) => QuarantineCleared::NotQuarantined,
            (true, ProcessingStatus::Queued) => QuarantineCleared::Queued,
            (true, _) => QuarantineCleared::Idle,
        })
    }

    async fn retry(&self, id: IssueId) -> Result<IssueRetried> {
        let ended = self.end_wait("retrying an issue", id, true).await?;
        Ok(match (ended.changed, ended.status) {
            (true, ProcessingStatus::Queued) => IssueRetried::Queued,
            (_, ProcessingStatus::Processing) => IssueRetried::Processing,
            _ => IssueRetried::Idle,
        })
    }

    async fn issue_facts(&self, id: IssueId) -> Result<Option<IssueFacts>> {
        self.check_clock().await?;
        self.call("reading the facts about an issue", async |connection| {
            let row = sqlx::query(concat!(
                "SELECT ",
                issue_columns!(),
                ", (SELECT headwater_ms(e.created_at) FROM event_logs e
                    WHERE e.issue_id = i.id AND e.processed_at IS NULL ORDER BY e.id LIMIT 1),
                   (SELECT count(*) FROM workers WHERE expires_at > clock_timestamp()),
                   EXISTS (SELECT 1 FROM workers
                    WHERE worker = i.claim_owner AND expires_at > clock_timestamp()),
                   headwater_ms(headwater_now())
                  FROM issues i JOIN integrations g ON g.id = i.integration_id WHERE i.id = $1"
            ))
            .bind(id.0)
            .fetch_optional(&mut *connection)
            .await?;
            let Some(row) = row else { return Ok(None) };
            Ok(Some(IssueFacts {
                issue: read_issue!(&row),
                oldest_pending_at: optional_timestamp(row.try_get(23)?),
                workers_alive: count(row.try_get(24)?)?,
                owner_alive: row.try_get(25)?,
                now: timestamp(row.try_get(26)?),
            }))
        })
        .await
    }

    async fn check_consistency(&self, limit: usize) -> Result<ConsistencyReport> {
        validate::page(limit)?;
        let reading = self.connections.run(async |connection| {
            // One snapshot for all queries.
            let mut reading = connection
                .begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                .await?;
            // It reads all event logs, which may take longer than any other call.
            let timeout_ms = CONSISTENCY_CHECK_DEADLINE.as_millis();
            let timeouts = format!(
                "SET LOCAL statement_timeout = {timeout_ms}; SET LOCAL lock_timeout = {timeout_ms}"
            );
            reading.execute(sqlx::raw_sql(AssertSqlSafe(timeouts))).await?;
            let report = read_consistency_report!(reading, limit);
            reading.rollback().await?;
            Ok(report)
        });
        let reading = async { reading.await.map_err(|error| database_error("checking consistency", error)) };
        with_deadline(CONSISTENCY_CHECK_DEADLINE, "checking consistency", reading).await
    }

    async fn backlog(&self) -> Result<Backlog> {
        self.call("counting the backlog", async |connection| {
            let row = sqlx::query(
                "SELECT (SELECT count(*) FROM issues WHERE processing_status = 'queued'),
                     (SELECT count(*) FROM issues WHERE processing_status = 'processing'),
                     (SELECT count(*) FROM issues WHERE quarantined_at IS NOT NULL),
                     (SELECT count(*) FROM outbox WHERE status IN ('waiting', 'pending', 'taken')),
                     (SELECT count(*) FROM outbox WHERE status = 'dead'),
                     (SELECT headwater_ms(min(created_at)) FROM outbox
                      WHERE status IN ('waiting', 'pending', 'taken')),
                     headwater_ms(headwater_now())",
            )
            .fetch_one(&mut *connection)
            .await?;
            let (oldest, now) = (optional_timestamp(row.try_get(5)?), timestamp(row.try_get(6)?));
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
        self.check_clock().await?;
        self.call("listing workers", async |connection| {
            let rows = sqlx::query(
                "SELECT worker, headwater_ms(started_at), headwater_ms(seen_at),
                     headwater_ms(expires_at), (SELECT count(*) FROM issues
                     WHERE processing_status = 'processing' AND claim_owner = worker)
                 FROM workers WHERE expires_at > clock_timestamp() ORDER BY worker LIMIT $1",
            )
            .bind(to_i64(PAGE_MAX))
            .fetch_all(&mut *connection)
            .await?;
            let read = |row: &sqlx::postgres::PgRow| {
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
        let requeued = self
            .call("retrying an outbox row", async |connection| {
                let requeued = sqlx::query("SELECT * FROM headwater_requeue_dead_outbox($1)")
                    .bind(id.0)
                    .fetch_all(&mut *connection)
                    .await?;
                Ok(requeued.len())
            })
            .await?;
        if requeued == 0 {
            return Err(IssueError::NotFound { what: format!("dead outbox row {id}") });
        }
        self.listener.wake();
        Ok(())
    }
} }

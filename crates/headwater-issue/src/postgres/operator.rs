//! What an operator asks and tells: listings, facts, the audit, release and retry.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgPool;
use sqlx::{Error, Row};

use super::PostgresStore;
use super::statements::{
    dead_letter_columns, event_log_columns, issue_columns, number, outbox_columns,
};
use crate::check;
use crate::error::{IssueError, Result};
use crate::issue::{
    DeadLetterId, EventLog, IntegrationId, Issue, IssueId, OutboxId, ProcessingStatus,
};
use crate::limits::PAGE_MAX;
use crate::operator::{
    Audit, Backlog, DeadLetter, DeadOutbox, Discrepancy, EventLogFilter, Integration, IssueFilter,
    Operator, Released, Retried, WhyFacts, WorkerInfo,
};
use crate::rows::{
    count, imbalance, known, maybe_time, ms, read_dead_letter, read_event_log, read_issue,
    read_outbox, time,
};

pub(super) async fn beat_worker(pool: &PgPool, worker: &str, ttl: Duration) -> Result<(), Error> {
    // Workers of long ago are of no interest, and nobody else removes them; those somebody just touches are left.
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
    .execute(pool)
    .await?;
    Ok(())
}

/// What freeing an issue found and did.
struct Freed {
    was_quarantined: bool,
    changed: bool,
    status: ProcessingStatus,
}

impl PostgresStore {
    /// Ends a quarantine, or any wait.
    async fn free(&self, what: &str, id: IssueId, retry: bool) -> Result<Freed> {
        let freed = self
            .limited(what, async {
                let row = sqlx::query("SELECT * FROM headwater_free_1($1, $2)")
                    .bind(id.0)
                    .bind(retry)
                    .fetch_optional(&self.pool)
                    .await?;
                let Some(row) = row else { return Ok(None) };
                let status: String = row.try_get(2)?;
                Ok(Some(Freed {
                    was_quarantined: row.try_get(0)?,
                    changed: row.try_get(1)?,
                    status: known(&status, ProcessingStatus::parse(&status))?,
                }))
            })
            .await?;
        freed.ok_or_else(|| IssueError::NotFound { what: format!("issue {id}") })
    }
}

#[async_trait]
impl Operator for PostgresStore {
    async fn ensure_integration(&self, name: &str, provider: &str) -> Result<IntegrationId> {
        check::name("name", name)?;
        check::name("provider", provider)?;
        let (id, found): (i64, String) = self
            .limited("creating an integration", async {
                sqlx::query(
                    "INSERT INTO integrations (name, provider) VALUES ($1, $2)
                     ON CONFLICT (name) DO NOTHING",
                )
                .bind(name)
                .bind(provider)
                .execute(&self.pool)
                .await?;
                let row = sqlx::query("SELECT id, provider FROM integrations WHERE name = $1")
                    .bind(name)
                    .fetch_one(&self.pool)
                    .await?;
                Ok((row.try_get(0)?, row.try_get(1)?))
            })
            .await?;
        if found != provider {
            return Err(IssueError::OtherProvider { integration: name.into(), provider: found });
        }
        Ok(IntegrationId(id))
    }

    async fn integrations(&self, after: Option<&str>) -> Result<Vec<Integration>> {
        self.limited("listing integrations", async {
            let rows = sqlx::query(
                "SELECT id, name, provider FROM integrations WHERE name > $1 ORDER BY name LIMIT $2",
            )
            .bind(after.unwrap_or_default())
            .bind(number(PAGE_MAX))
            .fetch_all(&self.pool)
            .await?;
            let read = |row: &sqlx::postgres::PgRow| {
                Ok(Integration {
                    id: IntegrationId(row.try_get(0)?),
                    name: row.try_get(1)?,
                    provider: row.try_get(2)?,
                })
            };
            rows.iter().map(read).collect()
        })
        .await
    }

    async fn issue(&self, id: IssueId) -> Result<Option<Issue>> {
        self.limited("reading an issue", async {
            let row = sqlx::query(concat!(
                "SELECT ",
                issue_columns!(),
                " FROM issues i JOIN integrations g ON g.id = i.integration_id WHERE i.id = $1"
            ))
            .bind(id.0)
            .fetch_optional(&self.pool)
            .await?;
            row.map(|row| Ok(read_issue!(&row))).transpose()
        })
        .await
    }

    async fn find_issue(
        &self,
        integration: &str,
        external_project_id: &str,
        external_issue_id: &str,
    ) -> Result<Option<Issue>> {
        self.limited("finding an issue", async {
            let row = sqlx::query(concat!(
                "SELECT ",
                issue_columns!(),
                " FROM issues i JOIN integrations g ON g.id = i.integration_id
                  WHERE g.name = $1 AND i.external_project_id = $2 AND i.external_issue_id = $3"
            ))
            .bind(integration)
            .bind(external_project_id)
            .bind(external_issue_id)
            .fetch_optional(&self.pool)
            .await?;
            row.map(|row| Ok(read_issue!(&row))).transpose()
        })
        .await
    }

    async fn issues(&self, filter: &IssueFilter, rows: usize) -> Result<Vec<Issue>> {
        check::page(rows)?;
        self.limited("listing issues", async {
            let rows = sqlx::query(concat!(
                "SELECT ",
                issue_columns!(),
                " FROM issues i JOIN integrations g ON g.id = i.integration_id
                  WHERE i.id > $1 AND ($2::text IS NULL OR i.processing_status = $2)
                      AND ($3::boolean IS NULL OR (i.quarantined_at IS NOT NULL) = $3)
                      AND ($4::text IS NULL OR g.name = $4)
                  ORDER BY i.id LIMIT $5"
            ))
            .bind(filter.after.map_or(i64::MIN, |after| after.0))
            .bind(filter.status.map(ProcessingStatus::as_str))
            .bind(filter.quarantined)
            .bind(filter.integration.as_deref())
            .bind(number(rows))
            .fetch_all(&self.pool)
            .await?;
            rows.iter().map(|row| Ok(read_issue!(row))).collect()
        })
        .await
    }

    async fn event_logs(
        &self,
        issue_id: IssueId,
        filter: &EventLogFilter,
        rows: usize,
    ) -> Result<Vec<EventLog>> {
        check::page(rows)?;
        self.limited("listing event logs", async {
            let rows = sqlx::query(concat!(
                "SELECT ",
                event_log_columns!(),
                " FROM event_logs e WHERE e.issue_id = $1 AND e.id > $2
                      AND ($3::boolean IS NULL OR (e.processed_at IS NOT NULL) = $3)
                  ORDER BY e.id LIMIT $4"
            ))
            .bind(issue_id.0)
            .bind(filter.after.map_or(i64::MIN, |after| after.0))
            .bind(filter.processed)
            .bind(number(rows))
            .fetch_all(&self.pool)
            .await?;
            rows.iter().map(|row| Ok(read_event_log!(row))).collect()
        })
        .await
    }

    async fn release(&self, id: IssueId) -> Result<Released> {
        let freed = self.free("releasing an issue", id, false).await?;
        Ok(match (freed.was_quarantined, freed.status) {
            (false, _) => Released::NotQuarantined,
            (true, ProcessingStatus::Queued) => Released::Queued,
            (true, _) => Released::Idle,
        })
    }

    async fn retry(&self, id: IssueId) -> Result<Retried> {
        let freed = self.free("retrying an issue", id, true).await?;
        Ok(match (freed.changed, freed.status) {
            (true, ProcessingStatus::Queued) => Retried::Queued,
            (_, ProcessingStatus::Processing) => Retried::Processing,
            _ => Retried::Idle,
        })
    }

    async fn facts_for_why(&self, id: IssueId) -> Result<Option<WhyFacts>> {
        self.limited("reading the facts about an issue", async {
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
            .fetch_optional(&self.pool)
            .await?;
            let Some(row) = row else { return Ok(None) };
            Ok(Some(WhyFacts {
                issue: read_issue!(&row),
                oldest_pending_at: maybe_time(row.try_get(23)?),
                workers_alive: count(row.try_get(24)?)?,
                owner_alive: row.try_get(25)?,
                now: time(row.try_get(26)?),
            }))
        })
        .await
    }

    async fn audit(&self, rows: usize) -> Result<Audit> {
        check::page(rows)?;
        self.limited("auditing", async {
            // One snapshot, so that all of it is seen at one moment.
            let mut reading =
                self.pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
            let totals = sqlx::query(
                "SELECT (SELECT count(*) FROM issues), (SELECT count(*) FROM event_logs),
                     (SELECT count(*) FROM event_logs WHERE processed_at IS NOT NULL),
                     (SELECT coalesce(sum(pending_events), 0)::bigint FROM issues
                      WHERE quarantined_at IS NULL),
                     (SELECT coalesce(sum(pending_events), 0)::bigint FROM issues
                      WHERE quarantined_at IS NOT NULL)",
            )
            .fetch_one(&mut *reading)
            .await?;
            let wrong = sqlx::query(
                "SELECT i.id, i.processing_status, i.pending_events, coalesce(e.unprocessed, 0),
                     i.quarantined_at IS NOT NULL, count(*) OVER ()
                 FROM issues AS i LEFT JOIN (
                     SELECT issue_id, count(*) AS unprocessed FROM event_logs
                     WHERE processed_at IS NULL GROUP BY issue_id) AS e ON e.issue_id = i.id
                 WHERE i.pending_events != coalesce(e.unprocessed, 0)
                     OR (i.processing_status = 'idle' AND i.quarantined_at IS NULL
                         AND i.pending_events > 0)
                     OR (i.processing_status != 'idle'
                         AND (i.quarantined_at IS NOT NULL OR i.pending_events = 0))
                 ORDER BY i.id LIMIT $1",
            )
            .bind(number(rows))
            .fetch_all(&mut *reading)
            .await?;
            let mut audit = Audit {
                issues: count(totals.try_get(0)?)?,
                recorded: count(totals.try_get(1)?)?,
                processed: count(totals.try_get(2)?)?,
                pending: count(totals.try_get(3)?)?,
                quarantined: count(totals.try_get(4)?)?,
                ..Audit::default()
            };
            for row in &wrong {
                audit.discrepancies_total = count(row.try_get(5)?)?;
                let status: String = row.try_get(1)?;
                let status = known(&status, ProcessingStatus::parse(&status))?;
                let (pending_events, unprocessed) = (row.try_get(2)?, row.try_get(3)?);
                let quarantined = row.try_get(4)?;
                let problem = imbalance(status, pending_events, unprocessed, quarantined);
                audit.discrepancies.push(Discrepancy {
                    issue_id: IssueId(row.try_get(0)?),
                    status,
                    pending_events,
                    unprocessed: count(unprocessed)?,
                    quarantined,
                    problem: problem.unwrap_or_default(),
                });
            }
            Ok(audit)
        })
        .await
    }

    async fn backlog(&self) -> Result<Backlog> {
        self.limited("counting the backlog", async {
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
            .fetch_one(&self.pool)
            .await?;
            let (oldest, now) = (maybe_time(row.try_get(5)?), time(row.try_get(6)?));
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
        self.limited("listing workers", async {
            let rows = sqlx::query(
                "SELECT worker, headwater_ms(started_at), headwater_ms(seen_at),
                     headwater_ms(expires_at), (SELECT count(*) FROM issues
                     WHERE processing_status = 'processing' AND claim_owner = worker)
                 FROM workers WHERE expires_at > clock_timestamp() ORDER BY worker LIMIT $1",
            )
            .bind(number(PAGE_MAX))
            .fetch_all(&self.pool)
            .await?;
            let read = |row: &sqlx::postgres::PgRow| {
                Ok(WorkerInfo {
                    worker: row.try_get(0)?,
                    started_at: time(row.try_get(1)?),
                    seen_at: time(row.try_get(2)?),
                    expires_at: time(row.try_get(3)?),
                    claims: count(row.try_get(4)?)?,
                })
            };
            rows.iter().map(read).collect()
        })
        .await
    }

    async fn dead_letters(
        &self,
        after: Option<DeadLetterId>,
        rows: usize,
    ) -> Result<Vec<DeadLetter>> {
        check::page(rows)?;
        self.limited("listing dead letters", async {
            let rows = sqlx::query(concat!(
                "SELECT ",
                dead_letter_columns!(),
                " FROM dead_letters d JOIN issues i ON i.id = d.issue_id
                      JOIN integrations g ON g.id = i.integration_id
                  WHERE d.id > $1 ORDER BY d.id LIMIT $2"
            ))
            .bind(after.map_or(i64::MIN, |after| after.0))
            .bind(number(rows))
            .fetch_all(&self.pool)
            .await?;
            rows.iter().map(|row| Ok(read_dead_letter!(row))).collect()
        })
        .await
    }

    async fn dead_outbox(&self, after: Option<OutboxId>, rows: usize) -> Result<Vec<DeadOutbox>> {
        check::page(rows)?;
        self.limited("listing dead rows of the outbox", async {
            let rows = sqlx::query(concat!(
                "SELECT ",
                outbox_columns!(),
                ", coalesce(o.last_error, '') FROM outbox o JOIN issues i ON i.id = o.issue_id
                       JOIN integrations g ON g.id = i.integration_id
                   WHERE o.status = 'dead' AND o.id > $1 ORDER BY o.id LIMIT $2"
            ))
            .bind(after.map_or(i64::MIN, |after| after.0))
            .bind(number(rows))
            .fetch_all(&self.pool)
            .await?;
            let read = |row: &sqlx::postgres::PgRow| {
                Ok(DeadOutbox { row: read_outbox!(row), error: row.try_get(14)? })
            };
            rows.iter().map(read).collect()
        })
        .await
    }

    async fn retry_outbox(&self, id: OutboxId) -> Result<()> {
        let revived = self
            .limited("retrying a row of the outbox", async {
                let revived = sqlx::query("SELECT * FROM headwater_revive_1($1)")
                    .bind(id.0)
                    .fetch_all(&self.pool)
                    .await?;
                Ok(revived.len())
            })
            .await?;
        if revived == 0 {
            return Err(IssueError::NotFound { what: format!("dead row {id} of the outbox") });
        }
        self.listener.wake();
        Ok(())
    }
}

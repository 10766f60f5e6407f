//! What an operator asks and tells: listings, facts, the audit, release and retry.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{Error, Row};

use super::statements::{
    column, dead_letter_columns, event_log_columns, issue_columns, outbox_columns,
};
use super::states::States;
use super::{SqliteStore, Writing};
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
    count, imbalance, known, maybe_time, read_dead_letter, read_event_log, read_issue, read_outbox,
    time,
};
use crate::state::{Effect, Transition};

/// A limit as a parameter.
fn limit(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

pub(super) async fn beat_worker(
    writing: &mut Writing,
    worker: &str,
    ttl: Duration,
) -> Result<(), Error> {
    let now = column(writing.now);
    // Workers of long ago are of no interest, and nobody else removes them.
    sqlx::query("DELETE FROM workers WHERE expires_at <= ?1 OR (worker = ?2 AND ?3)")
        .bind(now)
        .bind(worker)
        .bind(ttl.is_zero())
        .execute(&mut *writing.transaction)
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
    .bind(column(writing.now.after(ttl)))
    .execute(&mut *writing.transaction)
    .await?;
    Ok(())
}

impl SqliteStore {
    /// One step of one issue, taken by an operator; none if there is no such issue.
    async fn operate(
        &self,
        what: &str,
        id: IssueId,
        transition: Transition,
    ) -> Result<(Effect, ProcessingStatus)> {
        let stepped = self
            .limited(what, async {
                let mut writing = self.writing().await?;
                let mut states = States::load(&mut writing.transaction, [id], writing.now).await?;
                let effect = states.step(id, &transition);
                let status = states.get(id).map(|state| state.status);
                states.save(&mut writing.transaction).await?;
                writing.transaction.commit().await?;
                Ok(effect.zip(status))
            })
            .await?;
        stepped.ok_or_else(|| IssueError::NotFound { what: format!("issue {id}") })
    }
}

#[async_trait]
impl Operator for SqliteStore {
    async fn ensure_integration(&self, name: &str, provider: &str) -> Result<IntegrationId> {
        check::name("name", name)?;
        check::name("provider", provider)?;
        let (id, found): (i64, String) = self
            .limited("creating an integration", async {
                let mut writing = self.writing().await?;
                sqlx::query(
                    "INSERT INTO integrations (name, provider, created_at) VALUES (?1, ?2, ?3)
                     ON CONFLICT (name) DO NOTHING",
                )
                .bind(name)
                .bind(provider)
                .bind(column(writing.now))
                .execute(&mut *writing.transaction)
                .await?;
                let row = sqlx::query("SELECT id, provider FROM integrations WHERE name = ?1")
                    .bind(name)
                    .fetch_one(&mut *writing.transaction)
                    .await?;
                writing.transaction.commit().await?;
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
                "SELECT id, name, provider FROM integrations WHERE name > ?1 ORDER BY name LIMIT ?2",
            )
            .bind(after.unwrap_or_default())
            .bind(limit(PAGE_MAX))
            .fetch_all(&self.readers)
            .await?;
            let read = |row: &sqlx::sqlite::SqliteRow| {
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
                " FROM issues i JOIN integrations g ON g.id = i.integration_id WHERE i.id = ?1"
            ))
            .bind(id.0)
            .fetch_optional(&self.readers)
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
                  WHERE g.name = ?1 AND i.external_project_id = ?2 AND i.external_issue_id = ?3"
            ))
            .bind(integration)
            .bind(external_project_id)
            .bind(external_issue_id)
            .fetch_optional(&self.readers)
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
                  WHERE i.id > ?1 AND (?2 IS NULL OR i.processing_status = ?2)
                      AND (?3 IS NULL OR (i.quarantined_at IS NOT NULL) = ?3)
                      AND (?4 IS NULL OR g.name = ?4)
                  ORDER BY i.id LIMIT ?5"
            ))
            .bind(filter.after.map_or(i64::MIN, |after| after.0))
            .bind(filter.status.map(ProcessingStatus::as_str))
            .bind(filter.quarantined)
            .bind(filter.integration.as_deref())
            .bind(limit(rows))
            .fetch_all(&self.readers)
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
                " FROM event_logs e WHERE e.issue_id = ?1 AND e.id > ?2
                      AND (?3 IS NULL OR (e.processed_at IS NOT NULL) = ?3)
                  ORDER BY e.id LIMIT ?4"
            ))
            .bind(issue_id.0)
            .bind(filter.after.map_or(i64::MIN, |after| after.0))
            .bind(filter.processed)
            .bind(limit(rows))
            .fetch_all(&self.readers)
            .await?;
            rows.iter().map(|row| Ok(read_event_log!(row))).collect()
        })
        .await
    }

    async fn release(&self, id: IssueId) -> Result<Released> {
        match self.operate("releasing an issue", id, Transition::Release).await? {
            (Effect::Queued, _) => Ok(Released::Queued),
            (Effect::Finished, _) => Ok(Released::Idle),
            _ => Ok(Released::NotQuarantined),
        }
    }

    async fn retry(&self, id: IssueId) -> Result<Retried> {
        match self.operate("retrying an issue", id, Transition::Retry).await? {
            (Effect::Queued, _) => Ok(Retried::Queued),
            (_, ProcessingStatus::Processing) => Ok(Retried::Processing),
            _ => Ok(Retried::Idle),
        }
    }

    async fn facts_for_why(&self, id: IssueId) -> Result<Option<WhyFacts>> {
        let now = self.clock.now();
        self.limited("reading the facts about an issue", async {
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
            .bind(column(now))
            .fetch_optional(&self.readers)
            .await?;
            let Some(row) = row else { return Ok(None) };
            Ok(Some(WhyFacts {
                issue: read_issue!(&row),
                oldest_pending_at: maybe_time(row.try_get(23)?),
                workers_alive: count(row.try_get(24)?)?,
                owner_alive: row.try_get(25)?,
                now,
            }))
        })
        .await
    }

    async fn audit(&self, rows: usize) -> Result<Audit> {
        check::page(rows)?;
        self.limited("auditing", async {
            // One transaction, so that all of it is seen at one moment.
            let mut reading = self.readers.begin().await?;
            let totals = sqlx::query(
                "SELECT (SELECT count(*) FROM issues), (SELECT count(*) FROM event_logs),
                     (SELECT count(*) FROM event_logs WHERE processed_at IS NOT NULL),
                     (SELECT coalesce(sum(pending_events), 0) FROM issues
                      WHERE quarantined_at IS NULL),
                     (SELECT coalesce(sum(pending_events), 0) FROM issues
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
                 ORDER BY i.id LIMIT ?1",
            )
            .bind(limit(rows))
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
        let now = self.clock.now();
        self.limited("counting the backlog", async {
            let row = sqlx::query(
                "SELECT (SELECT count(*) FROM issues WHERE processing_status = 'queued'),
                     (SELECT count(*) FROM issues WHERE processing_status = 'processing'),
                     (SELECT count(*) FROM issues WHERE quarantined_at IS NOT NULL),
                     (SELECT count(*) FROM outbox WHERE status IN ('waiting', 'pending', 'taken')),
                     (SELECT count(*) FROM outbox WHERE status = 'dead'),
                     (SELECT min(created_at) FROM outbox WHERE status IN ('waiting', 'pending', 'taken'))",
            )
            .fetch_one(&self.readers)
            .await?;
            let oldest = maybe_time(row.try_get(5)?);
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
        let now = self.clock.now();
        self.limited("listing workers", async {
            let rows = sqlx::query(
                "SELECT worker, started_at, seen_at, expires_at, (SELECT count(*) FROM issues
                     WHERE processing_status = 'processing' AND claim_owner = worker)
                 FROM workers WHERE expires_at > ?1 ORDER BY worker LIMIT ?2",
            )
            .bind(column(now))
            .bind(limit(PAGE_MAX))
            .fetch_all(&self.readers)
            .await?;
            let read = |row: &sqlx::sqlite::SqliteRow| {
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
                  WHERE d.id > ?1 ORDER BY d.id LIMIT ?2"
            ))
            .bind(after.map_or(i64::MIN, |after| after.0))
            .bind(limit(rows))
            .fetch_all(&self.readers)
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
                   WHERE o.status = 'dead' AND o.id > ?1 ORDER BY o.id LIMIT ?2"
            ))
            .bind(after.map_or(i64::MIN, |after| after.0))
            .bind(limit(rows))
            .fetch_all(&self.readers)
            .await?;
            let read = |row: &sqlx::sqlite::SqliteRow| {
                Ok(DeadOutbox { row: read_outbox!(row), error: row.try_get(14)? })
            };
            rows.iter().map(read).collect()
        })
        .await
    }

    async fn retry_outbox(&self, id: OutboxId) -> Result<()> {
        let revived = self
            .limited("retrying a row of the outbox", async {
                let mut writing = self.writing().await?;
                let revived = super::outbox::revive(&mut writing, id).await?;
                writing.transaction.commit().await?;
                Ok(revived)
            })
            .await?;
        if !revived {
            return Err(IssueError::NotFound { what: format!("dead row {id} of the outbox") });
        }
        self.wake.notify_one();
        Ok(())
    }
}

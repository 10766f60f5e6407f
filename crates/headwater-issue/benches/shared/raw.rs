//! Raw SQL on the same tables: one transaction per event, one transaction per job.

use headwater_issue::{IssueId, NewEvent};
use sqlx::Row;
use sqlx::postgres::PgPool;
use sqlx::sqlite::SqlitePool;

/// Raw SQL on one of the stores.
#[derive(Clone)]
pub(crate) enum Raw {
    Postgres(PgPool),
    Sqlite(SqlitePool),
}

/// One body for both databases; only the time, the JSON type and the start of the transaction differ.
macro_rules! raw_record {
    ($transaction:expr, $event:expr, $now:literal, $json:literal) => {{
        let mut transaction = $transaction;
        let event: &NewEvent = $event;
        let issue = sqlx::query(concat!(
            "INSERT INTO issues (integration_id, external_project_id, external_issue_id, created_at, updated_at)
             VALUES (1, $1, $2, ", $now, ", ", $now, ")
             ON CONFLICT (integration_id, external_project_id, external_issue_id)
             DO UPDATE SET updated_at = excluded.updated_at RETURNING id"
        ))
        .bind(&event.external_project_id)
        .bind(&event.external_issue_id)
        .fetch_one(&mut *transaction)
        .await?
        .try_get::<i64, _>(0)?;
        let logged = sqlx::query(concat!(
            "INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest,
                 payload, payload_bytes, created_at)
             VALUES ($1, 1, $2, $3, $4, $5, $6", $json, ", $7, ", $now, ")
             ON CONFLICT (integration_id, dedup_key) DO NOTHING"
        ))
        .bind(issue)
        .bind(&event.source)
        .bind(&event.event_type)
        .bind(&event.dedup_key)
        .bind(&[0_u8; 32][..])
        .bind(&event.payload)
        .bind(event.payload.len() as i64)
        .execute(&mut *transaction)
        .await?;
        if logged.rows_affected() == 1 {
            sqlx::query(
                "UPDATE issues SET pending_events = pending_events + 1,
                     processing_status = CASE WHEN processing_status = 'idle' THEN 'queued'
                         ELSE processing_status END
                 WHERE id = $1",
            )
            .bind(issue)
            .execute(&mut *transaction)
            .await?;
        }
        transaction.commit().await?;
        Ok(())
    }};
}

macro_rules! raw_run {
    ($transaction:expr, $issue:expr, $now:literal, $text:literal) => {{
        let mut transaction = $transaction;
        let issue: i64 = $issue;
        let claimed = sqlx::query(concat!(
            "UPDATE issues SET processing_status = 'processing', processing_started_at = ",
            $now,
            ", claim_epoch = claim_epoch + 1
             WHERE id = $1 AND processing_status = 'queued' RETURNING id"
        ))
        .bind(issue)
        .fetch_optional(&mut *transaction)
        .await?;
        anyhow::ensure!(claimed.is_some());
        let events = sqlx::query(concat!(
            "SELECT id, source, event_type, payload",
            $text,
            " FROM event_logs
             WHERE issue_id = $1 AND processed_at IS NULL ORDER BY id"
        ))
        .bind(issue)
        .fetch_all(&mut *transaction)
        .await?;
        for event in &events {
            sqlx::query(concat!("UPDATE event_logs SET processed_at = ", $now, " WHERE id = $1"))
                .bind(event.try_get::<i64, _>(0)?)
                .execute(&mut *transaction)
                .await?;
        }
        sqlx::query(concat!(
            "UPDATE issues SET processing_status = 'idle', pending_events = pending_events - $2,
                 last_processed_at = ",
            $now,
            " WHERE id = $1"
        ))
        .bind(issue)
        .bind(events.len() as i64)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }};
}

impl Raw {
    pub(crate) async fn record(&self, event: &NewEvent) -> anyhow::Result<()> {
        match self {
            Self::Postgres(pool) => raw_record!(pool.begin().await?, event, "now()", "::jsonb"),
            Self::Sqlite(pool) => raw_record!(
                pool.begin_with("BEGIN IMMEDIATE").await?,
                event,
                "(unixepoch() * 1000)",
                ""
            ),
        }
    }

    pub(crate) async fn run(&self, issue: IssueId) -> anyhow::Result<()> {
        match self {
            Self::Postgres(pool) => raw_run!(pool.begin().await?, issue.0, "now()", "::text"),
            Self::Sqlite(pool) => {
                raw_run!(
                    pool.begin_with("BEGIN IMMEDIATE").await?,
                    issue.0,
                    "(unixepoch() * 1000)",
                    ""
                )
            }
        }
    }
}

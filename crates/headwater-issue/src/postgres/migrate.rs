//! The tables and functions, brought up to date when the store is opened.
//!
//! Promises: several processes may start at once; one of them writes, the others wait for its lock. A database of a newer
//! version is refused and left alone.

use sqlx::postgres::PgPool;
use sqlx::{Executor, Row};

use crate::error::{IssueError, Result};
use crate::rows::database_error;

const MIGRATIONS: [&str; 2] =
    [include_str!("migrations/0001_issues.sql"), include_str!("migrations/0002_transitions.sql")];

/// The advisory lock of migrations: "headwater" as a number that nobody else has picked.
const LOCK: i64 = 0x6865_6164_7761_7465;

/// Brings everything up to date, and returns what tells this database from every other.
pub(super) async fn migrate(pool: &PgPool) -> Result<String> {
    let version =
        apply(pool).await.map_err(|error| database_error("migrating the database", error))?;
    if version > MIGRATIONS.len() {
        let known = MIGRATIONS.len();
        let problem = format!(
            "it has version {version}, this program knows versions up to {known}; upgrade it"
        );
        return Err(IssueError::Schema { problem });
    }
    identity(pool).await.map_err(|error| database_error("reading the identity", error))
}

async fn identity(pool: &PgPool) -> Result<String, sqlx::Error> {
    sqlx::query("SELECT identity FROM headwater_identity").fetch_one(pool).await?.try_get(0)
}

/// Applies what is missing, in one transaction, and returns the version that is there then.
async fn apply(pool: &PgPool) -> Result<usize, sqlx::Error> {
    let mut transaction = pool.begin().await?;
    // Others that start at the same time may migrate for longer than a call waits for a row.
    transaction.execute("SET LOCAL lock_timeout = 0").await?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *transaction).await?;
    transaction
        .execute(
            "CREATE TABLE IF NOT EXISTS headwater_migrations (
                 version bigint PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())",
        )
        .await?;
    let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM headwater_migrations")
        .fetch_one(&mut *transaction)
        .await?;
    let applied = crate::rows::count(newest.try_get::<i64, _>(0)?)?;
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(applied) {
        transaction.execute(sqlx::raw_sql(*sql)).await?;
        sqlx::query("INSERT INTO headwater_migrations (version) VALUES ($1)")
            .bind(i64::try_from(index + 1).unwrap_or(i64::MAX))
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(applied.max(MIGRATIONS.len()))
}

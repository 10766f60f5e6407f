//! The tables, brought up to date when the store is opened.
//!
//! Promises: several processes may start at once on one file; one of them writes, the others wait. A file of a newer
//! version is refused and left alone.

use std::time::Duration;

use headwater_stream::clock::Clock;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{Row, SqlitePool};

use crate::error::{IssueError, Result};
use crate::rows::database_error;

const MIGRATIONS: [&str; 1] = [include_str!("migrations/0001_issues.sql")];

/// Between two tries to open a file that another process is just creating.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Opens the connection that writes and brings the tables up to date. Ends when its caller's patience does.
pub(super) async fn open_and_migrate(
    pool: SqlitePoolOptions,
    connect: &SqliteConnectOptions,
    clock: &dyn Clock,
) -> Result<SqlitePool> {
    loop {
        let opened = async {
            let writer = pool.clone().connect_with(connect.clone()).await?;
            migrate(&writer, clock).await.map(|version| (writer, version))
        };
        match opened.await {
            Ok((writer, version)) if version <= MIGRATIONS.len() => return Ok(writer),
            Ok((_, version)) => {
                let known = MIGRATIONS.len();
                let problem = format!(
                    "it has version {version}, this program knows versions up to {known}; upgrade it"
                );
                return Err(IssueError::Schema { problem });
            }
            // The switch to WAL does not wait for its turn, so we do.
            Err(error) if is_busy(&error) => tokio::time::sleep(BUSY_PAUSE).await,
            Err(error) => return Err(database_error("opening the SQLite database", error)),
        }
    }
}

/// SQLITE_BUSY and SQLITE_LOCKED, with all their extended codes.
fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.and_then(|code| code.parse::<u32>().ok())
        .is_some_and(|code| [5, 6].contains(&(code & 0xff)))
}

/// Applies what is missing, in one transaction, and returns the version that is there then.
async fn migrate(writer: &SqlitePool, clock: &dyn Clock) -> Result<usize, sqlx::Error> {
    let mut transaction = writer.begin_with("BEGIN IMMEDIATE").await?;
    sqlx::query(
        "CREATE TABLE IF NOT EXISTS headwater_migrations (
             version INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL) STRICT",
    )
    .execute(&mut *transaction)
    .await?;
    let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM headwater_migrations")
        .fetch_one(&mut *transaction)
        .await?;
    let applied = crate::rows::count(newest.try_get::<i64, _>(0)?)?;
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(applied) {
        sqlx::raw_sql(*sql).execute(&mut *transaction).await?;
        sqlx::query("INSERT INTO headwater_migrations (version, applied_at) VALUES (?1, ?2)")
            .bind(i64::try_from(index + 1).unwrap_or(i64::MAX))
            .bind(super::statements::column(clock.now()))
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(applied.max(MIGRATIONS.len()))
}

/// What tells this database from every other.
pub(super) async fn identity(writer: &SqlitePool) -> Result<String> {
    let read = async {
        let row = sqlx::query("SELECT identity FROM headwater_identity").fetch_one(writer).await?;
        row.try_get(0)
    };
    read.await.map_err(|error| database_error("reading the identity of the database", error))
}

//! The tables, brought up to date when the store is opened.
//!
//! Promises: several processes may start at once on one file; one of them writes, the others wait. A file of a newer
//! version is refused and left alone, and so is one that was made by other migrations than ours.

use std::collections::BTreeMap;
use std::time::Duration;

use headwater_stream::clock::Clock;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteRow};
use sqlx::{Row, SqlitePool};

use crate::error::Result;
use crate::migrations::{self, Verdict};
use crate::row_decoding::database_error;

/// Never change the text of one that somebody may have applied: such a file is refused. Add another one.
const MIGRATIONS: [&str; 4] = [
    include_str!("migrations/0001_issues.sql"),
    include_str!("migrations/0002_outbox_kinds.sql"),
    include_str!("migrations/0003_clock_steps.sql"),
    include_str!("migrations/0004_originals_and_targets.sql"),
];

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
            migrate(&writer, clock).await.map(|verdict| (writer, verdict))
        };
        match opened.await {
            Ok((writer, Verdict::Fits(_))) => return Ok(writer),
            Ok((_, Verdict::Newer(version))) => {
                return Err(migrations::newer(version, &MIGRATIONS));
            }
            Ok((_, Verdict::Differs(version))) => return Err(migrations::differs(version)),
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

/// Applies what is missing, in one transaction, if what is there is ours.
async fn migrate(writer: &SqlitePool, clock: &dyn Clock) -> Result<Verdict, sqlx::Error> {
    let mut transaction = writer.begin_with("BEGIN IMMEDIATE").await?;
    sqlx::raw_sql(
        "CREATE TABLE IF NOT EXISTS headwater_migrations (
             version INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL) STRICT;
         CREATE TABLE IF NOT EXISTS headwater_migration_checksums (
             version INTEGER PRIMARY KEY, sha256 TEXT NOT NULL) STRICT;",
    )
    .execute(&mut *transaction)
    .await?;
    let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM headwater_migrations")
        .fetch_one(&mut *transaction)
        .await?;
    let applied = crate::row_decoding::count(newest.try_get::<i64, _>(0)?)?;
    let rows = sqlx::query("SELECT version, sha256 FROM headwater_migration_checksums")
        .fetch_all(&mut *transaction)
        .await?;
    let read = |row: &SqliteRow| Ok((row.try_get(0)?, row.try_get(1)?));
    let written = rows.iter().map(read).collect::<Result<BTreeMap<_, _>, sqlx::Error>>()?;
    let verdict = migrations::compare(&MIGRATIONS, applied, &written);
    let Verdict::Fits(checksums) = &verdict else { return Ok(verdict) };
    for (version, sql) in (1_i64..).zip(MIGRATIONS).skip(applied) {
        sqlx::raw_sql(sql).execute(&mut *transaction).await?;
        sqlx::query("INSERT INTO headwater_migrations (version, applied_at) VALUES (?1, ?2)")
            .bind(version)
            .bind(super::statements::to_column(clock.now()))
            .execute(&mut *transaction)
            .await?;
    }
    for (version, checksum) in checksums {
        sqlx::query("INSERT INTO headwater_migration_checksums (version, sha256) VALUES (?1, ?2)")
            .bind(version)
            .bind(checksum)
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(verdict)
}

/// What tells this database from every other.
pub(super) async fn identity(writer: &SqlitePool) -> Result<String> {
    let read = async {
        let row = sqlx::query("SELECT identity FROM headwater_identity").fetch_one(writer).await?;
        row.try_get(0)
    };
    read.await.map_err(|error| database_error("reading the identity of the database", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_migration_that_somebody_may_have_applied_has_another_text_than_it_had() {
        let applied = [
            "e0be7f070e7e684a3fbbc730e2b6516a9fef3d1643759a6777a3937297b00bf0",
            "962ad3ad375acf7827e47ff7c4db6dc335733ab9766f6420ddac16487e7b5c84",
            "95df3c1b835e9092d2ea1bfcc0e07f132e547e8af56f252304d93502c7da3270",
            "b5edadba48c9994eaf1bc5720892b7652be175842e6bd9d4f1de3fd4994e1151",
        ];
        let ours = MIGRATIONS.map(migrations::checksum);
        assert_eq!(ours, applied, "do not change a migration: add one, and its checksum here");
    }
}

//! The tables and functions, brought up to date when the store is opened.
//!
//! Promises: several processes may start at once; one of them writes, the others wait for its lock. A database of a newer
//! version is refused and left alone, and so is one that was made by other migrations than ours.

use std::collections::BTreeMap;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Connection, Executor, Row};

use super::connections::PgConnections;

use crate::error::Result;
use crate::migrations::{self, Verdict};
use crate::row_decoding::database_error;

const TRANSITIONS: &str = include_str!("migrations/0002_transitions.sql");

/// Never change the text of one that somebody may have applied: such a database is refused. Add another one.
const MIGRATIONS: [&str; 8] = [
    include_str!("migrations/0001_issues.sql"),
    TRANSITIONS,
    include_str!("migrations/0003_outbox_kinds.sql"),
    TRANSITIONS,
    include_str!("migrations/0005_put_off.sql"),
    include_str!("migrations/0006_put_off_stays.sql"),
    include_str!("migrations/0007_clock_steps.sql"),
    include_str!("migrations/0008_originals_and_targets.sql"),
];

/// The advisory lock of migrations: "headwater" as a number that nobody else has picked.
const LOCK: i64 = 0x6865_6164_7761_7465;

/// Brings everything up to date, and returns what tells this database from every other.
pub(super) async fn migrate(connections: &PgConnections) -> Result<String> {
    let applied = connections.run(apply).await;
    let verdict = applied.map_err(|error| database_error("migrating the database", error))?;
    match verdict {
        Verdict::Fits(_) => {}
        Verdict::Newer(version) => return Err(migrations::newer(version, &MIGRATIONS)),
        Verdict::Differs(version) => return Err(migrations::differs(version)),
    }
    connections.run(identity).await.map_err(|error| database_error("reading the identity", error))
}

async fn identity(connection: &mut PgConnection) -> Result<String, sqlx::Error> {
    let row = sqlx::query("SELECT identity FROM headwater_identity").fetch_one(connection).await?;
    row.try_get(0)
}

/// Applies what is missing, in one transaction, if what is there is ours.
async fn apply(connection: &mut PgConnection) -> Result<Verdict, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // Others that start at the same time may migrate for longer than a call waits for a row.
    transaction.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0").await?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *transaction).await?;
    transaction
        .execute(
            "CREATE TABLE IF NOT EXISTS headwater_migrations (
                 version bigint PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());
             CREATE TABLE IF NOT EXISTS headwater_migration_checksums (
                 version bigint PRIMARY KEY, sha256 text NOT NULL)",
        )
        .await?;
    let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM headwater_migrations")
        .fetch_one(&mut *transaction)
        .await?;
    let applied = crate::row_decoding::count(newest.try_get::<i64, _>(0)?)?;
    let rows = sqlx::query("SELECT version, sha256 FROM headwater_migration_checksums")
        .fetch_all(&mut *transaction)
        .await?;
    let read = |row: &PgRow| Ok((row.try_get(0)?, row.try_get(1)?));
    let written = rows.iter().map(read).collect::<Result<BTreeMap<_, _>, sqlx::Error>>()?;
    let verdict = migrations::compare(&MIGRATIONS, applied, &written);
    let Verdict::Fits(checksums) = &verdict else {
        transaction.rollback().await?;
        return Ok(verdict);
    };
    if applied < MIGRATIONS.len() {
        // Large tables take their time. But nobody is kept waiting behind a lock that is not to be had: rather begin anew.
        transaction
            .execute("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = '5s'")
            .await?;
    }
    for (version, sql) in (1_i64..).zip(MIGRATIONS).skip(applied) {
        transaction.execute(sqlx::raw_sql(sql)).await?;
        sqlx::query("INSERT INTO headwater_migrations (version) VALUES ($1)")
            .bind(version)
            .execute(&mut *transaction)
            .await?;
    }
    for (version, checksum) in checksums {
        sqlx::query("INSERT INTO headwater_migration_checksums (version, sha256) VALUES ($1, $2)")
            .bind(version)
            .bind(checksum)
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_migration_that_somebody_may_have_applied_has_another_text_than_it_had() {
        let applied = [
            "f146a020375b6f62cc755d229f0e629dda418021eb3fd2af83677b7690f38c7a",
            "792e6a65c37ea406952a8b9494136cc10f58ad126969e0b21201aad8d353f3ea",
            "e4f203f54844b989b17650d4ada0587cdee5746dd01a0c20c682b82a80dbc2db",
            "792e6a65c37ea406952a8b9494136cc10f58ad126969e0b21201aad8d353f3ea",
            "ab7ffb123b072d45c8448f345d467a9c11638c48611b8dd7d91bc717cecad064",
            "8c689229116e81d2736c059ba57b95838dba8480183f79d8cddafd316e6363cb",
            "579a3041c630fd50d2c0956b59cd90e76d8058af345a20f0bdfae205f76fa158",
            "0ed2d56112147562275b53c0c74c5c2563d09a025aa9e7c0699780b25d7b865c",
        ];
        let ours = MIGRATIONS.map(migrations::checksum);
        assert_eq!(ours, applied, "do not change a migration: add one, and its checksum here");
    }
}

//! Applies schema migrations and installs the functions of `functions/` when a store is opened.
//!
//! Guarantees: several processes may start at once; an advisory lock serializes them. Everything is one transaction: a
//! database is migrated completely or not at all.

use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Row};

use super::connections::PgConnections;
use super::functions;

use crate::connect::SchemaPolicy;
use crate::error::{IssueError, Result};
use crate::migrations::{self, ISSUES, Migration, OwnedMigrations, schema_error};
use crate::row_decoding::database_error;

/// Key of the advisory lock of migrations: "headwate" in ASCII.
pub(super) const LOCK: i64 = 0x6865_6164_7761_7465;

/// Migrates the issue tables, installs the functions, and returns the identity of the database.
pub(super) async fn open(connections: &PgConnections, policy: SchemaPolicy) -> Result<String> {
    apply(connections, ISSUES, true, policy).await?;
    connections.run(identity).await.map_err(|error| database_error("reading the identity", error))
}

/// Applies the migrations of an application.
pub(super) async fn migrate(
    connections: &PgConnections,
    list: &[Migration],
    policy: SchemaPolicy,
) -> Result<()> {
    migrations::validate(list)?;
    apply(connections, list, false, policy).await
}

/// Applies the migrations of one owner. Those of the issue tables come with the functions.
async fn apply(
    connections: &PgConnections,
    list: &[Migration],
    is_issue_schema: bool,
    policy: SchemaPolicy,
) -> Result<()> {
    let owned = OwnedMigrations::new(list, |one| one.postgres);
    if policy == SchemaPolicy::Require {
        return require(connections, &owned, is_issue_schema).await;
    }
    let applied = connections.run(async |connection| {
        let mut transaction = connection.begin().await?;
        // Another process may migrate for longer than a statement may wait.
        transaction.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0").await?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)")
            .bind(LOCK)
            .execute(&mut *transaction)
            .await?;
        if is_issue_schema {
            // Statements of other processes queue behind a lock request. Gives up early: opening a store is retried.
            transaction.execute("SET LOCAL lock_timeout = '5s'").await?;
        }
        let earlier = "SELECT to_regclass('headwater_migration_checksums') IS NOT NULL";
        if sqlx::query(earlier).fetch_one(&mut *transaction).await?.try_get(0)? {
            return Err(migrations::earlier_build());
        }
        // Hides the notice that the table of migrations exists.
        transaction.execute("SET LOCAL client_min_messages = warning").await?;
        owned.apply(&mut *transaction).await?;
        if is_issue_schema {
            functions::install(&mut transaction).await?;
        }
        transaction.commit().await
    });
    applied.await.map_err(schema_error)
}

/// Checks that nothing is missing, without a change.
async fn require(
    connections: &PgConnections,
    owned: &OwnedMigrations,
    is_issue_schema: bool,
) -> Result<()> {
    let checked = connections.run(async |connection| {
        let exists = "SELECT to_regclass('headwater_migrations') IS NOT NULL";
        let has_table = sqlx::query(exists).fetch_one(&mut *connection).await?.try_get(0)?;
        owned.require(&mut *connection, has_table).await?;
        match is_issue_schema {
            true => functions::outdated(connection).await,
            false => Ok(None),
        }
    });
    match checked.await.map_err(schema_error)? {
        None => Ok(()),
        Some(problem) => Err(IssueError::OutdatedSchema { problem, is_empty: false }),
    }
}

async fn identity(connection: &mut PgConnection) -> Result<String, sqlx::Error> {
    let row = sqlx::query("SELECT identity FROM headwater_identity").fetch_one(connection).await?;
    row.try_get(0)
}

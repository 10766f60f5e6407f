//! Applies schema migrations and installs the functions of `functions/` when a store is opened.
//!
//! Guarantees: several processes may start at once; an advisory lock serializes them. Everything is one transaction: a
//! database is migrated completely or not at all.

use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Row};

use super::connections::PgConnections;
use super::functions;

use crate::error::Result;
use crate::migrations::{ISSUES, Migration, OwnedMigrations, schema_error};
use crate::row_decoding::database_error;

/// Key of the advisory lock of migrations: "headwate" in ASCII.
const LOCK: i64 = 0x6865_6164_7761_7465;

/// Migrates the issue tables, installs the functions, and returns the identity of the database.
pub(super) async fn open(connections: &PgConnections) -> Result<String> {
    migrate(connections, ISSUES).await?;
    connections.run(identity).await.map_err(|error| database_error("reading the identity", error))
}

/// Applies the migrations of one owner.
pub(super) async fn migrate(connections: &PgConnections, list: &[Migration]) -> Result<()> {
    let migrations = OwnedMigrations::new(list, |one| one.postgres);
    let installs_functions = std::ptr::eq(list, ISSUES);
    let applied = connections.run(async |connection| {
        let mut transaction = connection.begin().await?;
        // Another process may migrate for longer than a statement may wait.
        transaction.execute("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0").await?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)")
            .bind(LOCK)
            .execute(&mut *transaction)
            .await?;
        // Statements queue behind a lock request, so give up early and let the caller retry. Also hides the notice that
        // the table of migrations exists.
        transaction
            .execute("SET LOCAL lock_timeout = '5s'; SET LOCAL client_min_messages = warning")
            .await?;
        migrations.apply(&mut *transaction).await?;
        if installs_functions {
            functions::install(&mut transaction).await?;
        }
        transaction.commit().await
    });
    applied.await.map_err(schema_error)
}

async fn identity(connection: &mut PgConnection) -> Result<String, sqlx::Error> {
    let row = sqlx::query("SELECT identity FROM headwater_identity").fetch_one(connection).await?;
    row.try_get(0)
}

//! Applies schema migrations when a store is opened.
//!
//! Guarantees: several processes may open one file at once; `BEGIN IMMEDIATE` serializes them. Everything is one
//! transaction: a database is migrated completely or not at all.

use std::time::Duration;

use sqlx::migrate::MigrateError;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{Row, SqlitePool};

use crate::connect::SchemaPolicy;
use crate::error::Result;
use crate::migrations::{self, ISSUES, Migration, OwnedMigrations, schema_error};
use crate::row_decoding::database_error;

/// Between two tries to open a file that another process is just creating.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Opens the connection that writes and migrates the issue tables. Retries without limit while another process creates the
/// file; the caller sets the deadline.
pub(super) async fn open_and_migrate(
    pool: SqlitePoolOptions,
    connect: &SqliteConnectOptions,
    policy: SchemaPolicy,
) -> Result<SqlitePool> {
    loop {
        let opened = async {
            let writer = pool.clone().connect_with(connect.clone()).await?;
            apply(&writer, ISSUES, policy).await.map(|()| writer)
        };
        match opened.await {
            Ok(writer) => return Ok(writer),
            // The switch to WAL fails at once where other statements would wait for the lock.
            Err(error) if is_busy(&error) => tokio::time::sleep(BUSY_PAUSE).await,
            Err(error @ sqlx::Error::Migrate(_)) => return Err(schema_error(error)),
            Err(error) => return Err(database_error("opening the SQLite database", error)),
        }
    }
}

/// Applies the migrations of an application.
pub(super) async fn migrate(
    writer: &SqlitePool,
    list: &[Migration],
    policy: SchemaPolicy,
) -> Result<()> {
    migrations::validate(list)?;
    apply(writer, list, policy).await.map_err(schema_error)
}

async fn apply(
    writer: &SqlitePool,
    list: &[Migration],
    policy: SchemaPolicy,
) -> Result<(), sqlx::Error> {
    let owned = OwnedMigrations::new(list, |one| one.sqlite);
    if policy == SchemaPolicy::Require {
        let mut connection = writer.acquire().await?;
        let exists = "SELECT count(*) FROM sqlite_master WHERE name = 'headwater_migrations'";
        let count: i64 = sqlx::query(exists).fetch_one(&mut *connection).await?.try_get(0)?;
        return owned.require(&mut *connection, count > 0).await;
    }
    let mut transaction = writer.begin_with("BEGIN IMMEDIATE").await?;
    let earlier = "SELECT count(*) FROM sqlite_master WHERE name = 'headwater_migration_checksums'";
    if sqlx::query(earlier).fetch_one(&mut *transaction).await?.try_get::<i64, _>(0)? > 0 {
        return Err(migrations::earlier_build());
    }
    owned.apply(&mut *transaction).await?;
    transaction.commit().await
}

/// SQLITE_BUSY and SQLITE_LOCKED, with all their extended codes.
fn is_busy(error: &sqlx::Error) -> bool {
    if let sqlx::Error::Migrate(error) = error {
        let (MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _)) = &**error
        else {
            return false;
        };
        return is_busy(inner);
    }
    let code = error.as_database_error().and_then(|error| error.code());
    code.and_then(|code| code.parse::<u32>().ok())
        .is_some_and(|code| [5, 6].contains(&(code & 0xff)))
}

/// The random identity of the database, the prefix of its idempotency keys.
pub(super) async fn identity(writer: &SqlitePool) -> Result<String> {
    let read = async {
        let row = sqlx::query("SELECT identity FROM headwater_identity").fetch_one(writer).await?;
        row.try_get(0)
    };
    read.await.map_err(|error| database_error("reading the identity of the database", error))
}

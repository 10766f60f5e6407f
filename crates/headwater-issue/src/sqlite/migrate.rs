//! Applies schema migrations when a store is opened.
//!
//! Guarantees: several processes may open one file at once; `BEGIN IMMEDIATE` serializes them. Everything is one
//! transaction: a database is migrated completely or not at all.

use std::time::Duration;

use sqlx::migrate::MigrateError;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{Row, Sqlite, SqlitePool, Transaction};

use crate::connect::{SchemaPolicy, with_deadline};
use crate::error::Result;
use crate::migrations::{
    self, ISSUES, MIGRATION_TIMEOUT, Migration, OwnedMigrations, schema_error,
};
use crate::row_decoding::database_error;

const OPENING: &str = "opening the SQLite database";
const MIGRATING: &str = "migrating the database";

/// Between two tries to open a file that another process is just creating.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Opens the connection that writes and migrates the issue tables. Retries while another process creates the file, until the
/// deadline.
pub(super) async fn open_and_migrate(
    pool: SqlitePoolOptions,
    connect: &SqliteConnectOptions,
    policy: SchemaPolicy,
    deadline: Duration,
) -> Result<SqlitePool> {
    let opening = async {
        loop {
            let opened = async {
                let writer = pool.clone().connect_with(connect.clone()).await?;
                begin(&writer, ISSUES, policy).await.map(|begun| (writer, begun))
            };
            match opened.await {
                Ok(opened) => return Ok(opened),
                // The switch to WAL fails at once where other statements would wait for the lock.
                Err(error) if is_busy(&error) => tokio::time::sleep(BUSY_PAUSE).await,
                Err(error @ sqlx::Error::Migrate(_)) => return Err(schema_error(error)),
                Err(error) => return Err(database_error(OPENING, error)),
            }
        }
    };
    let (writer, begun) = with_deadline(deadline, OPENING, opening).await?;
    apply(begun, ISSUES).await?;
    Ok(writer)
}

/// Applies the migrations of an application. `deadline` is for the lock of the file.
pub(super) async fn migrate(
    writer: &SqlitePool,
    list: &[Migration],
    policy: SchemaPolicy,
    deadline: Duration,
) -> Result<()> {
    migrations::validate(list)?;
    let beginning = async { begin(writer, list, policy).await.map_err(schema_error) };
    apply(with_deadline(deadline, MIGRATING, beginning).await?, list).await
}

/// Begins the transaction of the migrations; `None` if they are required to be applied already, and are.
async fn begin(
    writer: &SqlitePool,
    list: &[Migration],
    policy: SchemaPolicy,
) -> Result<Option<Transaction<'static, Sqlite>>, sqlx::Error> {
    if policy == SchemaPolicy::Migrate {
        return writer.begin_with("BEGIN IMMEDIATE").await.map(Some);
    }
    let mut connection = writer.acquire().await?;
    let exists = "SELECT count(*) FROM sqlite_master WHERE name = 'headwater_migrations'";
    let count: i64 = sqlx::query(exists).fetch_one(&mut *connection).await?.try_get(0)?;
    owned(list).require(&mut *connection, count > 0).await.map(|()| None)
}

/// Applies the migrations in the transaction, if there is one, and commits it. They may change large tables.
async fn apply(begun: Option<Transaction<'static, Sqlite>>, list: &[Migration]) -> Result<()> {
    let Some(mut transaction) = begun else { return Ok(()) };
    let applying = async {
        let earlier =
            "SELECT count(*) FROM sqlite_master WHERE name = 'headwater_migration_checksums'";
        if sqlx::query(earlier).fetch_one(&mut *transaction).await?.try_get::<i64, _>(0)? > 0 {
            return Err(migrations::earlier_build());
        }
        owned(list).apply(&mut *transaction).await?;
        transaction.commit().await
    };
    with_deadline(MIGRATION_TIMEOUT, MIGRATING, async { applying.await.map_err(schema_error) })
        .await
}

fn owned(list: &[Migration]) -> OwnedMigrations {
    OwnedMigrations::new(list, |one| one.sqlite)
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

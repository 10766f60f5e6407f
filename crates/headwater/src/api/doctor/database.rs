//! Checks of the database server: version, persistence, connections, migrations and clock.

use std::time::SystemTime;

use headwater_issue::{Store, StoreConnection};
use sqlx::{PgConnection, Row, SqliteConnection};

use crate::api::doctor::{Finding, clock};
use crate::config::Settings;

/// Connections that should stay free for other clients.
const SPARE: i64 = 5;

/// Checks the server.
pub(super) async fn server(settings: &Settings, store: &dyn Store) -> Result<Vec<Finding>, String> {
    let mut reading = store.read_connection().await.map_err(|error| error.to_string())?;
    let checked = match reading.connection() {
        StoreConnection::Postgres(connection) => postgres(settings, connection).await,
        StoreConnection::Sqlite(connection) => sqlite(settings, connection).await,
        _ => Ok(vec![Finding::ok("database", settings.database_shown())]),
    };
    reading.release().await;
    checked.map_err(|error| error.to_string())
}

async fn postgres(
    settings: &Settings,
    connection: &mut PgConnection,
) -> Result<Vec<Finding>, sqlx::Error> {
    let before = SystemTime::now();
    let row = sqlx::query(
        "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'),
            current_setting('full_page_writes'), current_setting('max_connections')::bigint,
            (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
            (SELECT max(version) FROM headwater_migrations WHERE version < 1000),
            (extract(epoch FROM clock_timestamp()) * 1000)::bigint",
    )
    .fetch_one(connection)
    .await?;
    let theirs: i64 = row.try_get(7)?;
    let skew = clock("database", before, u64::try_from(theirs).unwrap_or_default());
    let text = |index: usize| row.try_get::<String, _>(index);
    let found = format!("postgres {} at {}", text(0)?, settings.database_shown());
    let mut findings = vec![Finding::ok("database", found)];
    for (name, index, harm) in [
        ("fsync", 1, "a machine crash may lose commits or corrupt the database"),
        ("full_page_writes", 3, "a machine crash may corrupt the database"),
    ] {
        findings.push(match text(index)?.as_str() {
            "off" => Finding::error(
                "persistence",
                format!("{name} is off: {harm}"),
                &format!("set `{name} = on`"),
            ),
            state => Finding::ok("persistence", format!("{name} is {state}")),
        });
    }
    findings.push(match text(2)?.as_str() {
        "off" => Finding::warning(
            "persistence",
            "synchronous_commit is off: a server crash may lose the latest acknowledged commits",
            "set `synchronous_commit = on`",
        ),
        state => Finding::ok("persistence", format!("synchronous_commit is {state}")),
    });
    let (most, used): (i64, i64) = (row.try_get(4)?, row.try_get(5)?);
    let wanted =
        i64::from(settings.database_connections) + i64::from(settings.database_http_connections);
    findings.push(if used.max(wanted) + SPARE > most {
        Finding::warning(
            "connections",
            format!("{used} of {most} in use; each Headwater process uses up to {wanted}"),
            "raise `max_connections` of PostgreSQL, or lower `database.connections` and `database.http_connections`",
        )
    } else {
        Finding::ok(
            "connections",
            format!("{used} of {most} in use; each Headwater process uses up to {wanted}"),
        )
    });
    findings.push(migrations(row.try_get(6)?));
    findings.push(skew);
    Ok(findings)
}

async fn sqlite(
    settings: &Settings,
    connection: &mut SqliteConnection,
) -> Result<Vec<Finding>, sqlx::Error> {
    let row = sqlx::query(
        "SELECT sqlite_version(), (SELECT journal_mode FROM pragma_journal_mode),
            (SELECT synchronous FROM pragma_synchronous), (SELECT max(version) FROM headwater_migrations WHERE version < 1000)",
    )
    .fetch_one(connection)
    .await?;
    let (version, journal): (String, String) = (row.try_get(0)?, row.try_get(1)?);
    let found = format!("sqlite {version} at {} (single machine only)", settings.database_shown());
    let mut findings = vec![Finding::ok("database", found)];
    findings.push(match journal.as_str() {
        "wal" => Finding::ok("persistence", "journal_mode is wal"),
        other => Finding::warning(
            "persistence",
            format!("journal_mode is {other}: readers and writers block each other"),
            "move the file to a local disk that supports WAL",
        ),
    });
    findings.push(match row.try_get::<i64, _>(2)? {
        0 => Finding::error(
            "persistence",
            "synchronous is off",
            "set `PRAGMA synchronous` to NORMAL or FULL",
        ),
        1 => Finding::ok("persistence", "synchronous is normal"),
        _ => Finding::ok("persistence", "synchronous is full"),
    });
    findings.push(migrations(row.try_get(3)?));
    Ok(findings)
}

fn migrations(version: i64) -> Finding {
    Finding::ok("migrations", format!("schema version {version} is up to date"))
}

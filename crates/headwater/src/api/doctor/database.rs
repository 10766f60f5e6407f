//! The database server itself: version, persistence, connections, tables and clock, in the words of each dialect.

use std::time::SystemTime;

use headwater_issue::{Connection, Store};
use sqlx::{PgConnection, Row, SqliteConnection};

use crate::api::doctor::{Finding, clock};
use crate::config::Settings;

/// Connections that others should have beside ours.
const SPARE: i64 = 5;

/// Looks at the server.
pub(super) async fn server(settings: &Settings, store: &dyn Store) -> Result<Vec<Finding>, String> {
    let mut reading = store.read_connection().await.map_err(|error| error.to_string())?;
    let looked = match reading.connection() {
        Connection::Postgres(connection) => postgres(settings, connection).await,
        Connection::Sqlite(connection) => sqlite(settings, connection).await,
        _ => Ok(vec![Finding::fine("database", settings.database_shown())]),
    };
    reading.release().await;
    looked.map_err(|error| error.to_string())
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
            (SELECT max(version) FROM headwater_migrations),
            (extract(epoch FROM clock_timestamp()) * 1000)::bigint",
    )
    .fetch_one(connection)
    .await?;
    let theirs: i64 = row.try_get(7)?;
    let skew = clock("database", before, u64::try_from(theirs).unwrap_or_default());
    let text = |index: usize| row.try_get::<String, _>(index);
    let found = format!("postgres {} at {}", text(0)?, settings.database_shown());
    let mut findings = vec![Finding::fine("database", found)];
    for (name, index, harm) in [
        (
            "fsync",
            1,
            "what was committed may be lost, or the database may break, when the machine fails",
        ),
        ("full_page_writes", 3, "the database may break when the machine fails"),
    ] {
        findings.push(match text(index)?.as_str() {
            "off" => Finding::error(
                "persistence",
                format!("{name} is off: {harm}"),
                &format!("set `{name} = on`"),
            ),
            state => Finding::fine("persistence", format!("{name} is {state}")),
        });
    }
    findings.push(match text(2)?.as_str() {
        "off" => Finding::warning(
            "persistence",
            "synchronous_commit is off: the last moment of what was acknowledged may be lost when the server fails",
            "set `synchronous_commit = on`",
        ),
        state => Finding::fine("persistence", format!("synchronous_commit is {state}")),
    });
    let (most, used): (i64, i64) = (row.try_get(4)?, row.try_get(5)?);
    let wanted = i64::from(settings.database_connections);
    findings.push(if used.max(wanted) + SPARE > most {
        Finding::warning(
            "connections",
            format!("{used} of {most} are in use, and a process here takes up to {wanted}"),
            "raise `max_connections` of the server, or lower `database.connections` here",
        )
    } else {
        Finding::fine(
            "connections",
            format!("{used} of {most} are in use, up to {wanted} by a process here"),
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
            (SELECT synchronous FROM pragma_synchronous), (SELECT max(version) FROM headwater_migrations)",
    )
    .fetch_one(connection)
    .await?;
    let (version, journal): (String, String) = (row.try_get(0)?, row.try_get(1)?);
    let found = format!("sqlite {version} at {}, for one machine", settings.database_shown());
    let mut findings = vec![Finding::fine("database", found)];
    findings.push(match journal.as_str() {
        "wal" => Finding::fine("persistence", "journal_mode is wal"),
        other => Finding::warning(
            "persistence",
            format!("journal_mode is {other}: readers and writers wait for each other"),
            "put the file on a local disk, where WAL works",
        ),
    });
    findings.push(match row.try_get::<i64, _>(2)? {
        0 => Finding::error(
            "persistence",
            "synchronous is off",
            "set `PRAGMA synchronous` to NORMAL or FULL",
        ),
        1 => Finding::fine("persistence", "synchronous is normal"),
        _ => Finding::fine("persistence", "synchronous is full"),
    });
    findings.push(migrations(row.try_get(3)?));
    Ok(findings)
}

fn migrations(version: i64) -> Finding {
    Finding::fine("migrations", format!("tables are of version {version}, which is up to date"))
}

//! The DuckDB schema and its version.

use std::path::Path;

use duckdb::Connection;

use super::failed;
use crate::error::{AnalyticsError, Result};

/// Incremented on changes that an older program would misread.
const VERSION: i64 = 2;

const MARK: &str = "CREATE TABLE IF NOT EXISTS warehouse (version BIGINT NOT NULL)";

/// `events` has a row per entry. An event may have two entries (the outbox delivers at least once; a rebuild reads it
/// from SQL), so the view `ticket_events` shows each event once. `dead_letters` has no copies since version 2.
const TABLES: &str = "
CREATE TABLE IF NOT EXISTS positions (
  source VARCHAR PRIMARY KEY, entry_ms UBIGINT NOT NULL, entry_seq UBIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS dead_letters (
  topic VARCHAR NOT NULL, entry_ms UBIGINT NOT NULL, entry_seq UBIGINT NOT NULL,
  original_id VARCHAR, failures UINTEGER NOT NULL, reason VARCHAR NOT NULL, failed_at TIMESTAMP NOT NULL
);
ALTER TABLE dead_letters ADD COLUMN IF NOT EXISTS identity VARCHAR;
";

/// The columns of `events`.
const EVENT_COLUMNS: &str = "
  entry_ms UBIGINT, entry_seq UBIGINT,
  event_type VARCHAR NOT NULL, ticket_id VARCHAR NOT NULL, message_id VARCHAR, user_id VARCHAR, content VARCHAR,
  occurred_at TIMESTAMP NOT NULL,
  run_events UINTEGER, tokens_in UINTEGER, tokens_out UINTEGER, cost DOUBLE";

const VIEW: &str = "
CREATE OR REPLACE VIEW ticket_events AS
  SELECT * FROM events QUALIFY 1 = row_number() OVER (
    PARTITION BY event_type, ticket_id, coalesce(message_id, entry_ms || '-' || entry_seq)
    ORDER BY entry_ms, entry_seq
  );
";

/// The table that a rebuild fills. It exists only during a rebuild.
pub(super) const REBUILD_TABLE: &str = "events_rebuild";
pub(super) const DROP_REBUILD_TABLE: &str = "DROP TABLE IF EXISTS events_rebuild;";

/// Creates an empty table for a rebuild.
pub(super) fn create_rebuild_table() -> String {
    format!("{DROP_REBUILD_TABLE} CREATE TABLE {REBUILD_TABLE} ({EVENT_COLUMNS});")
}

/// Replaces `events` by the table of the rebuild, in the transaction of the caller.
pub(super) fn replace_events() -> String {
    format!(
        "DROP VIEW ticket_events; DROP TABLE events; ALTER TABLE {REBUILD_TABLE} RENAME TO events; {VIEW}"
    )
}

/// Creates missing tables; fails on a file of a newer version without changing it.
pub(super) fn prepare(connection: &Connection, path: &Path) -> Result<()> {
    connection.execute_batch(MARK).map_err(|error| failed("mark its file", error))?;
    check(connection, path)?;
    let events = format!("CREATE TABLE IF NOT EXISTS events ({EVENT_COLUMNS});");
    // A rebuild that was interrupted has left its table.
    let tables = format!("BEGIN; {TABLES} {events} {VIEW} {DROP_REBUILD_TABLE} COMMIT;");
    connection.execute_batch(&tables).map_err(|error| failed("create its tables", error))?;
    let mark =
        "INSERT INTO warehouse SELECT $1 WHERE NOT EXISTS (FROM warehouse WHERE version >= $1)";
    connection.execute(mark, [VERSION]).map_err(|error| failed("mark its file", error))?;
    Ok(())
}

/// Fails on a file of a newer version.
pub(super) fn check(connection: &Connection, path: &Path) -> Result<()> {
    let found: i64 = connection
        .query_row("SELECT coalesce(max(version), 0) FROM warehouse", [], |row| row.get(0))
        .map_err(|error| failed("read the version of its file", error))?;
    if found > VERSION {
        let path = path.display().to_string();
        return Err(AnalyticsError::Newer { path, found, known: VERSION });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use headwater_stream::EntryId;
    use headwater_stream::clock::Timestamp;
    use serde_json::json;

    use super::super::{AnalyticsStore, DeadLetterRow};
    use super::*;

    #[tokio::test]
    async fn a_version_1_file_is_migrated_and_keeps_its_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("analytics.duckdb");
        let old = Connection::open(&path).unwrap();
        let letters = "topic VARCHAR NOT NULL, entry_ms UBIGINT NOT NULL, entry_seq UBIGINT NOT NULL,
            original_id VARCHAR, failures UINTEGER NOT NULL, reason VARCHAR NOT NULL, failed_at TIMESTAMP NOT NULL";
        old.execute_batch(&format!(
            "{MARK}; INSERT INTO warehouse VALUES (1); CREATE TABLE dead_letters ({letters});
             INSERT INTO dead_letters VALUES ('orders', 1, 0, '1-0', 5, 'boom', now());"
        ))
        .unwrap();
        old.close().unwrap();

        let store = AnalyticsStore::open(&path).unwrap();
        let letter = |entry| DeadLetterRow {
            topic: "orders".to_owned(),
            entry: EntryId::new(entry, 0),
            identity: "0:2-0:0-0:g".to_owned(),
            original_id: Some(EntryId::new(2, 0)),
            failures: 5,
            reason: "boom".to_owned(),
            failed_at: Timestamp::from_millis(7),
        };
        assert_eq!(store.store_dead_letters("orders", &[letter(2), letter(3)]).unwrap(), 1);
        assert_eq!(store.store_dead_letters("orders", &[letter(4)]).unwrap(), 0);
        drop(store);
        let store = AnalyticsStore::open(&path).unwrap();
        assert_eq!(store.store_dead_letters("orders", &[letter(5)]).unwrap(), 0);
        let sql =
            "SELECT count(*) AS n, (SELECT max(version) FROM warehouse) AS v FROM dead_letters";
        let table = store.reader().query(sql).await.unwrap();
        assert_eq!(table.rows, [[json!(2), json!(VERSION)]]);
    }

    #[test]
    fn a_file_of_a_newer_version_is_rejected_and_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("analytics.duckdb");
        let newer = Connection::open(&path).unwrap();
        newer.execute_batch(&format!("{MARK}; INSERT INTO warehouse VALUES (99);")).unwrap();
        newer.close().unwrap();
        let refused = AnalyticsStore::open(&path);
        assert!(matches!(refused, Err(AnalyticsError::Newer { found: 99, .. })), "{refused:?}");
        let newer = Connection::open(&path).unwrap();
        let tables = "SELECT count(*) FROM duckdb_tables()";
        assert_eq!(newer.query_row(tables, [], |row| row.get::<_, i64>(0)).unwrap(), 1);
    }
}

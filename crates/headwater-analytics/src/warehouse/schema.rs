//! The tables, and what reads them.

use std::path::Path;

use duckdb::Connection;

use super::failed;
use crate::error::{AnalyticsError, Result};

/// Raised whenever tables change in a way that an older program would get wrong.
const VERSION: i64 = 1;

/// `events` has a row per entry. An event may lie in two entries (the outbox delivers at least once; a rebuild reads it
/// from SQL), so `ticket_events`, which everybody asks, shows each event once.
const TABLES: &str = "
CREATE TABLE IF NOT EXISTS warehouse (version BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS positions (
  source VARCHAR PRIMARY KEY, entry_ms UBIGINT NOT NULL, entry_seq UBIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS events (
  entry_ms UBIGINT, entry_seq UBIGINT,
  event_type VARCHAR NOT NULL, ticket_id VARCHAR NOT NULL, message_id VARCHAR, user_id VARCHAR, content VARCHAR,
  occurred_at TIMESTAMP NOT NULL,
  run_events UINTEGER, tokens_in UINTEGER, tokens_out UINTEGER, cost DOUBLE
);
CREATE TABLE IF NOT EXISTS dead_letters (
  topic VARCHAR NOT NULL, entry_ms UBIGINT NOT NULL, entry_seq UBIGINT NOT NULL,
  original_id VARCHAR, failures UINTEGER NOT NULL, reason VARCHAR NOT NULL, failed_at TIMESTAMP NOT NULL
);
CREATE OR REPLACE VIEW ticket_events AS
  SELECT * FROM events QUALIFY 1 = row_number() OVER (
    PARTITION BY event_type, ticket_id, coalesce(message_id, entry_ms || '-' || entry_seq)
    ORDER BY entry_ms, entry_seq
  );
";

/// Creates what is missing.
pub(super) fn prepare(connection: &Connection, path: &Path) -> Result<()> {
    let tables = format!("BEGIN; {TABLES} COMMIT;");
    connection.execute_batch(&tables).map_err(|error| failed("create its tables", error))?;
    let mark = "INSERT INTO warehouse SELECT ? WHERE NOT EXISTS (FROM warehouse)";
    connection.execute(mark, [VERSION]).map_err(|error| failed("mark its file", error))?;
    check(connection, path)
}

/// Refuses a file of a newer version.
pub(super) fn check(connection: &Connection, path: &Path) -> Result<()> {
    let found: i64 = connection
        .query_row("SELECT max(version) FROM warehouse", [], |row| row.get(0))
        .map_err(|error| failed("read the version of its file", error))?;
    if found > VERSION {
        let path = path.display().to_string();
        return Err(AnalyticsError::Newer { path, found, known: VERSION });
    }
    Ok(())
}

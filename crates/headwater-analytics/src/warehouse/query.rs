//! Asking: one `SELECT`, bounded in time and rows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use duckdb::Connection;
use serde_json::{Map, Value};

use super::{WarehouseReader, failed};
use crate::error::{AnalyticsError, Result};
use crate::limits::{ANSWER_ROWS_MAX, QUERY_TIME_MAX, SQL_BYTES_MAX};
use crate::table::Table;

/// How often a query is told to stop until it does.
const STOP_EVERY: Duration = Duration::from_millis(20);

impl WarehouseReader {
    /// Answers one `SELECT`. It changes nothing, takes at most [`QUERY_TIME_MAX`] and gives at most
    /// [`ANSWER_ROWS_MAX`] rows.
    ///
    /// If the caller goes away, the query is stopped.
    pub async fn query(&self, sql: &str) -> Result<Table> {
        self.query_within(sql, QUERY_TIME_MAX).await
    }

    async fn query_within(&self, sql: &str, limit: Duration) -> Result<Table> {
        if sql.len() > SQL_BYTES_MAX {
            let problem = format!("{} bytes; the limit is {SQL_BYTES_MAX}", sql.len());
            return Err(AnalyticsError::invalid("a query", problem));
        }
        let sql = sql.trim().trim_end_matches(';').to_owned();
        let connection = {
            let shared = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            shared.try_clone().map_err(|error| failed("open a connection", error))?
        };
        let stop = StopOnDrop { handle: connection.interrupt_handle(), has_ended: Arc::default() };
        let has_ended = Arc::clone(&stop.has_ended);
        let answer = tokio::task::spawn_blocking(move || {
            let answer = answer(&connection, &sql);
            has_ended.store(true, Ordering::Release);
            answer
        });
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(table)) => table,
            Ok(Err(ended)) => Err(failed("answer", ended)),
            Err(_) => Err(AnalyticsError::TooSlow { limit }),
        }
    }
}

/// Stops a query that nobody waits for any more.
struct StopOnDrop {
    handle: Arc<duckdb::InterruptHandle>,
    has_ended: Arc<AtomicBool>,
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if self.has_ended.load(Ordering::Acquire) {
            return;
        }
        let (handle, has_ended) = (Arc::clone(&self.handle), Arc::clone(&self.has_ended));
        // Again and again: an interruption that meets no statement is forgotten, and there are several statements.
        std::thread::spawn(move || {
            while !has_ended.load(Ordering::Acquire) {
                handle.interrupt();
                std::thread::sleep(STOP_EVERY);
            }
        });
    }
}

fn answer(connection: &Connection, sql: &str) -> Result<Table> {
    refuse_all_but_one_select(connection, sql)?;
    let columns = columns(connection, sql)?;
    // DuckDB knows how each of its types is written in JSON.
    let question = format!(
        "SELECT to_json(answer)::VARCHAR FROM (\n{sql}\n) AS answer LIMIT {}",
        ANSWER_ROWS_MAX + 1
    );
    let read = || {
        let mut statement = connection.prepare(&question)?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
        rows.collect::<duckdb::Result<Vec<String>>>()
    };
    let mut lines = read().map_err(refused)?;
    let is_cut = lines.len() > ANSWER_ROWS_MAX;
    lines.truncate(ANSWER_ROWS_MAX);
    let rows = lines.iter().map(|line| row(line, &columns)).collect::<Result<_>>()?;
    Ok(Table { columns, rows, is_cut })
}

fn row(line: &str, columns: &[String]) -> Result<Vec<Value>> {
    let mut object: Map<String, Value> =
        serde_json::from_str(line).map_err(|error| failed("write a row as JSON", error))?;
    Ok(columns.iter().map(|column| object.remove(column).unwrap_or(Value::Null)).collect())
}

fn columns(connection: &Connection, sql: &str) -> Result<Vec<String>> {
    let read = || {
        let mut statement = connection.prepare(&format!("DESCRIBE (\n{sql}\n)"))?;
        let names = statement.query_map([], |row| row.get::<_, String>(0))?;
        names.collect::<duckdb::Result<Vec<String>>>()
    };
    read().map_err(refused)
}

/// DuckDB's own parser decides what a text is: it can write `SELECT`s as JSON, and nothing else.
fn refuse_all_but_one_select(connection: &Connection, sql: &str) -> Result<()> {
    let parsed: String = connection
        .query_row("SELECT json_serialize_sql(?::VARCHAR)::VARCHAR", [sql], |row| row.get(0))
        .map_err(refused)?;
    let parsed: Value = serde_json::from_str(&parsed).map_err(|error| failed("parse", error))?;
    if parsed["error"] == Value::Bool(true) {
        let problem = parsed["error_message"].as_str().unwrap_or("it cannot be parsed");
        return Err(AnalyticsError::invalid(
            "a query",
            format!("{problem} (only one SELECT is allowed)"),
        ));
    }
    match parsed["statements"].as_array().map_or(0, Vec::len) {
        1 => Ok(()),
        count => {
            Err(AnalyticsError::invalid("a query", format!("{count} statements; ask one SELECT")))
        }
    }
}

fn refused(error: duckdb::Error) -> AnalyticsError {
    AnalyticsError::Query(error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Warehouse;
    use super::*;

    fn warehouse() -> (tempfile::TempDir, Warehouse) {
        let folder = tempfile::tempdir().unwrap();
        let warehouse = Warehouse::open(&folder.path().join("analytics.duckdb")).unwrap();
        (folder, warehouse)
    }

    #[tokio::test]
    async fn values_of_every_kind_come_back() {
        let (_folder, warehouse) = warehouse();
        let sql = "SELECT 1 AS one, 1.5::DOUBLE AS half, 'x\"y' AS text, NULL AS nothing, true AS yes,
                     DATE '2026-11-15' AS day, [1, 2] AS list, 170141183460469231731687303715884105727 AS huge;";
        let table = warehouse.reader().query(sql).await.unwrap();
        assert_eq!(table.columns, ["one", "half", "text", "nothing", "yes", "day", "list", "huge"]);
        let row = &table.rows[0];
        assert_eq!(row[..5], [json!(1), json!(1.5), json!("x\"y"), json!(null), json!(true)]);
        assert_eq!(row[5..7], [json!("2026-11-15"), json!([1, 2])]);
    }

    #[tokio::test]
    async fn whatever_is_not_one_select_is_refused_and_changes_nothing() {
        let (folder, warehouse) = warehouse();
        let elsewhere = folder.path().join("elsewhere.csv");
        let copy = format!("COPY (SELECT 1) TO '{}'", elsewhere.display());
        for sql in [
            "DELETE FROM events",
            "DROP TABLE events",
            "SELECT 1; DROP TABLE events",
            "SELECT 1) AS a; DROP TABLE events; SELECT * FROM (SELECT 1",
            "INSERT INTO warehouse VALUES (99)",
            "PRAGMA database_list",
            "ATTACH 'x.duckdb'",
            "SET enable_external_access = true",
            &copy,
            "COMMIT",
            "",
            ";",
            "SELEC 1",
        ] {
            let result = warehouse.reader().query(sql).await;
            assert!(matches!(result, Err(AnalyticsError::Invalid { .. })), "{sql}: {result:?}");
        }
        assert!(!elsewhere.exists());
        let table = warehouse
            .reader()
            .query("SELECT max(version) AS v, (SELECT count(*) FROM events) AS n FROM warehouse")
            .await;
        assert_eq!(table.unwrap().rows, [[json!(1), json!(0)]]);
    }

    #[tokio::test]
    async fn no_query_reads_another_file() {
        let (folder, warehouse) = warehouse();
        let secret = folder.path().join("secret.csv");
        std::fs::write(&secret, "a\n1\n").unwrap();
        for sql in [
            format!("SELECT * FROM read_csv('{}')", secret.display()),
            format!("SELECT * FROM '{}'", secret.display()),
            format!("SELECT * FROM read_text('{}')", secret.display()),
            "SELECT * FROM glob('*')".to_owned(),
        ] {
            let result = warehouse.reader().query(&sql).await;
            assert!(matches!(result, Err(AnalyticsError::Query(_))), "{sql}: {result:?}");
        }
    }

    #[tokio::test]
    async fn a_query_that_never_ends_is_stopped() {
        let (_folder, warehouse) = warehouse();
        let sql = "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b";
        let result = warehouse.reader().query_within(sql, Duration::from_millis(50)).await;
        assert!(matches!(result, Err(AnalyticsError::TooSlow { .. })), "{result:?}");
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_cut_and_says_so() {
        let (_folder, warehouse) = warehouse();
        let sql = format!("SELECT * FROM range({})", ANSWER_ROWS_MAX + 5);
        let table = warehouse.reader().query(&sql).await.unwrap();
        assert_eq!((table.rows.len(), table.is_cut), (ANSWER_ROWS_MAX, true));
    }
}

//! Queries: a single `SELECT`, limited in time, rows and bytes.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use duckdb::Connection;
use serde_json::{Map, Value};
use tokio::sync::oneshot;

use super::{AnalyticsReader, FileConnection, ReopenableFile, failed};
use crate::error::{AnalyticsError, Result};
use crate::limits::{ANSWER_BYTES_MAX, ANSWER_ROWS_MAX, MEMORY_MAX, QUERY_TIME, SQL_BYTES_MAX};
use crate::table::Table;

/// Interval at which a cancelled query is interrupted until it ends.
const INTERRUPT_EVERY: Duration = Duration::from_millis(20);

/// Stack of a query thread. DuckDB recurses as deep as a query is nested, and a stack overflow ends the process. Only
/// the used part takes memory.
const STACK_BYTES: usize = 256 * 1024 * 1024;

/// Allowed table functions. Others change database settings or run text as SQL.
const TABLE_FUNCTIONS: [&str; 6] =
    ["generate_series", "json_each", "json_tree", "range", "repeat", "unnest"];

/// Functions with side effects, and those that reveal settings of the machine such as file paths.
const DENIED_FUNCTIONS: [&str; 7] =
    ["current_setting", "currval", "getenv", "getvariable", "nextval", "setseed", "write_log"];

/// DuckDB error kinds caused by the query itself. Other errors concern the machine and may contain file paths.
const QUERY_ERRORS: [&str; 12] = [
    "Binder",
    "Catalog",
    "Constraint",
    "Conversion",
    "Dependency",
    "Invalid Input",
    "Invalid Type",
    "Mismatch Type",
    "Not implemented",
    "Out of Range",
    "Parser",
    "Syntax",
];

impl AnalyticsReader {
    /// Runs one `SELECT`. It changes nothing, takes at most [`QUERY_TIME`] and returns at most
    /// [`ANSWER_ROWS_MAX`] rows and [`ANSWER_BYTES_MAX`] bytes.
    ///
    /// Dropping the future stops the query.
    pub async fn query(&self, sql: &str) -> Result<Table> {
        self.query_within(sql, QUERY_TIME, ()).await
    }

    /// Like [`Self::query`], with another time limit. `permit` is dropped when the query has ended, which may be after this
    /// future was dropped; use it to limit concurrent queries.
    pub async fn query_within(
        &self,
        sql: &str,
        limit: Duration,
        permit: impl Send + 'static,
    ) -> Result<Table> {
        if sql.len() > SQL_BYTES_MAX {
            let problem = format!("{} bytes; the limit is {SQL_BYTES_MAX}", sql.len());
            return Err(AnalyticsError::invalid("a query", problem));
        }
        let sql = sql.trim().trim_end_matches(';').to_owned();
        let connection = self.file.connect()?;
        let has_ended = Arc::new(Mutex::new(false));
        let _stop =
            StopOnDrop { handle: connection.interrupt_handle(), has_ended: Arc::clone(&has_ended) };
        let file = Arc::clone(&self.file);
        let open = QueryConnection { connection: Some(connection), has_ended, file };
        let (sender, answered) = oneshot::channel();
        let answering = move || {
            let _permit = permit;
            let table = open.answer(&sql);
            drop(open);
            // The caller may be gone.
            let _ = sender.send(table);
        };
        std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(answering)
            .map_err(|error| failed("start the query thread", error))?;
        match tokio::time::timeout(limit, answered).await {
            Ok(Ok(table)) => table,
            Ok(Err(ended)) => Err(failed("run the query", ended)),
            Err(_) => Err(AnalyticsError::TooSlow { limit }),
        }
    }
}

/// A connection that runs one query. It is closed under a lock, because interrupting a closed connection is a
/// use-after-free.
struct QueryConnection {
    connection: Option<FileConnection>,
    has_ended: Arc<Mutex<bool>>,
    file: Arc<ReopenableFile>,
}

impl QueryConnection {
    fn answer(&self, sql: &str) -> Result<Table> {
        let connection = self.connection.as_ref().expect("open until dropped");
        let answered = answer(connection, sql);
        if let Err(error) = &answered {
            self.file.check_failure(connection, error);
        }
        answered
    }
}

impl Drop for QueryConnection {
    fn drop(&mut self) {
        let mut has_ended = self.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        self.connection = None;
        *has_ended = true;
    }
}

/// Interrupts the query on drop.
struct StopOnDrop {
    handle: Arc<duckdb::InterruptHandle>,
    has_ended: Arc<Mutex<bool>>,
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        let (handle, has_ended) = (Arc::clone(&self.handle), Arc::clone(&self.has_ended));
        // Interrupts the query if it is running. Returns whether it was.
        let interrupt = move || {
            let has_ended = has_ended.lock().unwrap_or_else(PoisonError::into_inner);
            if !*has_ended {
                handle.interrupt();
            }
            !*has_ended
        };
        // Repeated, because an interrupt between two statements has no effect.
        if interrupt() {
            std::thread::spawn(move || {
                while interrupt() {
                    std::thread::sleep(INTERRUPT_EVERY);
                }
            });
        }
    }
}

fn answer(connection: &Connection, sql: &str) -> Result<Table> {
    require_single_select(connection, sql)?;
    let columns = columns(connection, sql)?;
    // DuckDB converts all its types to JSON. One row more than the limit shows that the result is truncated.
    let sql_text = format!(
        "SELECT line FROM (
             SELECT line, sum(strlen(line)) OVER (ROWS UNBOUNDED PRECEDING) - strlen(line) AS before FROM (
                 SELECT to_json(answer)::VARCHAR AS line FROM (\n{sql}\n) AS answer({}) LIMIT {}))
         WHERE before <= {ANSWER_BYTES_MAX}",
        (0..columns.len()).map(column_alias).collect::<Vec<_>>().join(", "),
        ANSWER_ROWS_MAX + 1
    );
    let read = || {
        let mut statement = connection.prepare(&sql_text)?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
        rows.collect::<duckdb::Result<Vec<String>>>()
    };
    let mut lines = read().map_err(query_error)?;
    let bytes: usize = lines.iter().map(String::len).sum();
    let truncated = lines.len() > ANSWER_ROWS_MAX || bytes > ANSWER_BYTES_MAX;
    if truncated {
        lines.pop();
    }
    let rows = lines.iter().map(|line| row(line, columns.len())).collect::<Result<_>>()?;
    Ok(Table { columns, rows, truncated })
}

/// Internal alias of a column: columns of a query may have the same name.
fn column_alias(index: usize) -> String {
    format!("c{index}")
}

fn row(line: &str, columns: usize) -> Result<Vec<Value>> {
    let mut object: Map<String, Value> = serde_json::from_str(&with_finite_numbers(line))
        .map_err(|error| failed("write a row as JSON", error))?;
    let value = |index| object.remove(&column_alias(index));
    let values: Option<Vec<Value>> = (0..columns).map(value).collect();
    values.ok_or_else(|| failed("write a row as JSON", "a column is missing"))
}

/// Quotes `NaN`, `Infinity` and `-Infinity`, which DuckDB writes although they are not valid JSON.
fn with_finite_numbers(line: &str) -> Cow<'_, str> {
    if !line.contains("NaN") && !line.contains("Infinity") {
        return Cow::Borrowed(line);
    }
    let mut text = String::with_capacity(line.len() + 16);
    let (mut rest, mut is_string) = (line, false);
    while let Some(c) = rest.chars().next() {
        let number = ["NaN", "Infinity", "-Infinity"].iter().find(|name| rest.starts_with(**name));
        let taken = match number.filter(|_| !is_string) {
            Some(name) => {
                text.push_str(&format!("\"{name}\""));
                name.len()
            }
            None => {
                is_string ^= c == '"';
                // An escaped character does not end a string.
                let escaped = usize::from(c == '\\');
                let taken = rest.chars().take(1 + escaped).map(char::len_utf8).sum();
                text.push_str(&rest[..taken]);
                taken
            }
        };
        rest = &rest[taken..];
    }
    Cow::Owned(text)
}

fn columns(connection: &Connection, sql: &str) -> Result<Vec<String>> {
    let read = || {
        let mut statement = connection.prepare(&format!("DESCRIBE (\n{sql}\n)"))?;
        let names = statement.query_map([], |row| row.get::<_, String>(0))?;
        names.collect::<duckdb::Result<Vec<String>>>()
    };
    Ok(unique(read().map_err(query_error)?))
}

/// Makes column names unique by appending a number.
fn unique(mut names: Vec<String>) -> Vec<String> {
    for index in 1..names.len() {
        let is_free = |name: &String| {
            !names.iter().enumerate().any(|(at, other)| at != index && other == name)
        };
        if names[..index].contains(&names[index]) {
            let numbered = |number| format!("{}_{number}", names[index]);
            let free = (1..).map(numbered).find(|name| is_free(name));
            names[index] = free.expect("there are more numbers than columns");
        }
    }
    names
}

/// DuckDB's error for a statement that is not a `SELECT`.
const NO_SELECT: &str = "Only SELECT statements can be serialized";

/// Parses the text with DuckDB, which serializes only `SELECT` statements as JSON.
fn require_single_select(connection: &Connection, sql: &str) -> Result<()> {
    let parsed: String = connection
        .query_row("SELECT json_serialize_sql(?::VARCHAR)::VARCHAR", [sql], |row| row.get(0))
        .map_err(query_error)?;
    let parsed: Value = serde_json::from_str(&parsed)
        .map_err(|_| AnalyticsError::invalid("a query", "it is nested too deeply"))?;
    if parsed["error"] == Value::Bool(true) {
        let problem = parsed["error_message"].as_str().unwrap_or("it cannot be parsed");
        let problem = match problem.starts_with(NO_SELECT) {
            true => "only one SELECT is allowed".to_owned(),
            false => format!("{problem} (only one SELECT is allowed)"),
        };
        return Err(AnalyticsError::invalid("a query", problem));
    }
    match parsed["statements"].as_array().map_or(0, Vec::len) {
        1 => {
            check_functions(&parsed["statements"])?;
            check_tables(connection, &parsed["statements"])
        }
        count => Err(AnalyticsError::invalid(
            "a query",
            format!("{count} statements; only one SELECT is allowed"),
        )),
    }
}

/// Rejects functions with side effects or access to the machine.
fn check_functions(part: &Value) -> Result<()> {
    let name = part["function_name"].as_str().unwrap_or_default().to_lowercase();
    let function = &part["function"];
    let of_table = match part["type"].as_str() {
        Some("TABLE_FUNCTION") => function["function_name"].as_str().unwrap_or_default(),
        _ => "range",
    };
    if DENIED_FUNCTIONS.contains(&name.as_str())
        || !TABLE_FUNCTIONS.contains(&of_table.to_lowercase().as_str())
    {
        let name = if name.is_empty() { of_table } else { &name };
        return Err(AnalyticsError::invalid(
            "a query",
            format!("function `{name}` is not allowed"),
        ));
    }
    match part {
        Value::Array(parts) => parts.iter().try_for_each(check_functions),
        Value::Object(parts) => parts.values().try_for_each(check_functions),
        _ => Ok(()),
    }
}

/// Allows only analytics tables and those the query itself defines: views of DuckDB reveal file paths.
fn check_tables(connection: &Connection, parsed: &Value) -> Result<()> {
    let read = || {
        let mut statement = connection.prepare(
            "SELECT lower(table_name), internal FROM duckdb_tables()
             UNION ALL SELECT lower(view_name), internal FROM duckdb_views()",
        )?;
        let names = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        names.collect::<duckdb::Result<Vec<(String, bool)>>>()
    };
    let known = read().map_err(|error| failed("list its tables", error))?;
    let is_known =
        |name: &str, internal: bool| known.iter().any(|it| it.0 == name && it.1 == internal);
    let mut names = TableNames::default();
    names.collect(parsed);
    let invalid = |problem: String| Err(AnalyticsError::invalid("a query", problem));
    // Outside its scope, such a name would refer to the view of DuckDB.
    if let Some(name) = names.defined.iter().find(|name| is_known(name, true)) {
        return invalid(format!("name `{name}` is reserved by DuckDB; choose another"));
    }
    for UsedTable { qualifier, name } in &names.used {
        let is_ours = is_known(name, false) && matches!(qualifier.as_str(), "" | "main");
        let is_defined = qualifier.is_empty() && names.defined.contains(name);
        if !is_ours && !is_defined {
            let problem = "is not an analytics table; see docs/analytics.md for the list";
            return invalid(format!(
                "`{}` {problem}",
                [qualifier.as_str(), name].join(".").trim_start_matches('.')
            ));
        }
    }
    match names.shows {
        true => invalid("DESCRIBE, SHOW and SUMMARIZE are not allowed".to_owned()),
        false => Ok(()),
    }
}

/// Table names in a parsed query, in lower case.
#[derive(Default)]
struct TableNames {
    defined: Vec<String>,
    used: Vec<UsedTable>,
    shows: bool,
}

struct UsedTable {
    /// Catalog and schema.
    qualifier: String,
    name: String,
}

impl TableNames {
    fn collect(&mut self, part: &Value) {
        let text = |name: &str| part[name].as_str().unwrap_or_default().to_lowercase();
        match part["type"].as_str() {
            Some("BASE_TABLE") => {
                let qualifier = [text("catalog_name"), text("schema_name")].join(".");
                let qualifier = qualifier.trim_matches('.').to_owned();
                self.used.push(UsedTable { qualifier, name: text("table_name") });
            }
            Some("SHOW_REF") => self.shows = true,
            _ => {}
        }
        // Each is `{"key": NAME, "value": ...}`.
        let defined = part["cte_map"]["map"].as_array().into_iter().flatten();
        self.defined.extend(defined.filter_map(|one| Some(one["key"].as_str()?.to_lowercase())));
        match part {
            Value::Array(parts) => parts.iter().for_each(|part| self.collect(part)),
            Value::Object(parts) => parts.values().for_each(|part| self.collect(part)),
            _ => {}
        }
    }
}

/// Converts an error of DuckDB. Errors that concern the machine are not shown to the user.
fn query_error(error: duckdb::Error) -> AnalyticsError {
    let problem = error.to_string();
    if problem.starts_with("Out of Memory Error") {
        let problem = format!("it needs more than {MEMORY_MAX} of memory; select fewer rows");
        return AnalyticsError::Query(problem);
    }
    let is_of_query = QUERY_ERRORS
        .iter()
        .any(|kind| problem.strip_prefix(kind).is_some_and(|rest| rest.starts_with(" Error")));
    match is_of_query || problem.starts_with("INTERRUPT") {
        true => AnalyticsError::Query(problem),
        false => failed("run the query", problem),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::AnalyticsStore;
    use super::*;

    fn store() -> (tempfile::TempDir, AnalyticsStore) {
        let folder = tempfile::tempdir().unwrap();
        let store = AnalyticsStore::open(&folder.path().join("analytics.duckdb")).unwrap();
        (folder, store)
    }

    #[tokio::test]
    async fn values_of_all_types_are_returned() {
        let (_folder, store) = store();
        let sql = "SELECT 1 AS one, 1.5::DOUBLE AS half, 'x\"y' AS text, NULL AS nothing, true AS yes,
                     DATE '2026-11-15' AS day, [1, 2] AS list, 170141183460469231731687303715884105727 AS huge;";
        let table = store.reader().query(sql).await.unwrap();
        assert_eq!(table.columns, ["one", "half", "text", "nothing", "yes", "day", "list", "huge"]);
        let row = &table.rows[0];
        assert_eq!(row[..5], [json!(1), json!(1.5), json!("x\"y"), json!(null), json!(true)]);
        assert_eq!(row[5..7], [json!("2026-11-15"), json!([1, 2])]);
    }

    /// Interrupting a connection that was just closed used to end the process.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn cancelling_a_query_as_it_completes_is_safe() {
        let (_folder, store) = store();
        for micros in (0..3_000).step_by(10) {
            let reader = store.reader();
            let asking =
                tokio::time::timeout(Duration::from_micros(micros), reader.query("SELECT 1"));
            // Completed or not, depending on timing.
            let _ = asking.await;
            assert!(store.reader().query("SELECT 1").await.is_ok());
        }
    }

    #[tokio::test]
    async fn anything_but_a_single_select_is_rejected_and_changes_nothing() {
        let (folder, store) = store();
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
            let result = store.reader().query(sql).await;
            assert!(matches!(result, Err(AnalyticsError::Invalid { .. })), "{sql}: {result:?}");
        }
        assert!(!elsewhere.exists());
        let table = store
            .reader()
            .query("SELECT max(version) AS v, (SELECT count(*) FROM events) AS n FROM warehouse")
            .await;
        assert_eq!(table.unwrap().rows, [[json!(2), json!(0)]]);
    }

    #[tokio::test]
    async fn no_query_reads_another_file() {
        let (folder, store) = store();
        let secret = folder.path().join("secret.csv");
        std::fs::write(&secret, "a\n1\n").unwrap();
        for sql in [
            format!("SELECT * FROM read_csv('{}')", secret.display()),
            format!("SELECT * FROM '{}'", secret.display()),
            format!("SELECT * FROM read_text('{}')", secret.display()),
            "SELECT * FROM glob('*')".to_owned(),
        ] {
            let result = store.reader().query(&sql).await;
            let is_refused =
                matches!(result, Err(AnalyticsError::Query(_) | AnalyticsError::Invalid { .. }));
            assert!(is_refused, "{sql}: {result:?}");
        }
    }

    #[tokio::test]
    async fn functions_with_side_effects_are_rejected_everywhere_in_a_query() {
        let (folder, store) = store();
        let logs = folder.path().join("logs");
        let logging = format!(
            "enable_logging('QueryLog', storage='file', storage_path='{}')",
            logs.display()
        );
        for sql in [
            format!("SELECT * FROM {logging}"),
            format!("WITH a AS (SELECT * FROM {logging}) SELECT (SELECT count(*) FROM a)"),
            "SELECT 1 WHERE EXISTS (SELECT * FROM Enable_Logging('QueryLog'))".to_owned(),
            "SELECT * FROM query('SELECT 1')".to_owned(),
            "SELECT * FROM checkpoint()".to_owned(),
            "SELECT [nextval('s')]".to_owned(),
            "SELECT write_log('x')".to_owned(),
        ] {
            let result = store.reader().query(&sql).await;
            assert!(matches!(result, Err(AnalyticsError::Invalid { .. })), "{sql}: {result:?}");
        }
        let sql = "SELECT count(*) AS n FROM range(3) a, generate_series(1, 2) b, unnest([1, 2]) c";
        assert_eq!(store.reader().query(sql).await.unwrap().rows, [[json!(12)]]);
    }

    #[tokio::test]
    async fn columns_of_the_same_name_keep_their_values() {
        let (_folder, store) = store();
        let table = store.reader().query("SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS A").await;
        let table = table.unwrap();
        assert_eq!(table.rows, [[json!(1), json!(2), json!(3), json!(4)]]);
        let lines: Value = serde_json::from_str(&table.to_json_lines()).unwrap();
        assert_eq!(lines.as_object().unwrap().len(), 4, "{lines}");
        let join = "SELECT * FROM (SELECT 1 AS a) AS x, (SELECT 2 AS a) AS y";
        assert_eq!(store.reader().query(join).await.unwrap().rows, [[json!(1), json!(2)]]);
    }

    #[tokio::test]
    async fn non_finite_numbers_are_returned_as_text() {
        let (_folder, store) = store();
        let sql = "SELECT 'NaN'::DOUBLE AS n, 'inf'::FLOAT AS i, '-inf'::DOUBLE AS m,
                     [1.5, 'nan'::DOUBLE] AS list, {'NaN': 'Infinity'::DOUBLE} AS \"In\"\"finity\", 'NaN \\' AS text";
        let row = store.reader().query(sql).await.unwrap().rows.remove(0);
        let expected =
            json!(["NaN", "Infinity", "-Infinity", [1.5, "NaN"], {"NaN": "Infinity"}, "NaN \\"]);
        assert_eq!(Value::Array(row), expected);
    }

    /// No result or error reveals file paths or settings of the machine.
    #[tokio::test]
    async fn no_query_reveals_file_paths_or_machine_settings() {
        let (folder, store) = store();
        let folder = folder.path().display().to_string();
        let reader = store.reader();
        let named = |sql: &str| {
            let connection = reader.file.connect().unwrap();
            let mut statement = connection.prepare(sql).unwrap();
            let names = statement.query_map([], |row| row.get::<_, String>(0)).unwrap();
            names.collect::<duckdb::Result<Vec<String>>>().unwrap()
        };
        // All internal views and tables of DuckDB, with every qualified name.
        let views = named(
            "SELECT unnest([view_name, schema_name || '.' || view_name, database_name || '.' || schema_name || '.' || view_name])
             FROM duckdb_views() WHERE internal",
        );
        assert!(views.len() > 100, "{views:?}");
        let mut refused: Vec<String> =
            views.iter().map(|name| format!("SELECT * FROM {name}")).collect();
        // All table functions except the allowed ones.
        let functions = named(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type IN ('table', 'table_macro', 'pragma')
             AND regexp_full_match(function_name, '[a-z_0-9]+')",
        );
        assert!(functions.len() > 50, "{functions:?}");
        let is_refused = |name: &&String| !TABLE_FUNCTIONS.contains(&name.as_str());
        refused.extend(
            functions.iter().filter(is_refused).map(|name| format!("SELECT * FROM {name}()")),
        );
        refused.extend(
            [
                "SELECT current_setting('temp_directory')",
                "SELECT Current_Setting('secret_directory')",
                "SELECT getenv('HOME')",
                "SELECT * FROM (SHOW DATABASES)",
                "SELECT * FROM (DESCRIBE pg_settings)",
                "FROM pragma_database_list",
                "SELECT (SELECT path FROM \"Duckdb_Databases\" LIMIT 1)",
                "WITH a AS (SELECT * FROM pg_settings) SELECT * FROM a",
                "WITH pg_settings AS (SELECT 1) SELECT * FROM pg_settings",
                "SELECT (WITH pg_settings AS (SELECT 1) SELECT 1), * FROM pg_settings",
                "SELECT * FROM '/etc/passwd'",
            ]
            .map(str::to_owned),
        );
        for sql in &refused {
            let result = reader.query(sql).await;
            assert!(matches!(result, Err(AnalyticsError::Invalid { .. })), "{sql}: {result:?}");
        }
        // All other functions without arguments, and some errors.
        let functions = named(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type IN ('scalar', 'macro')
             AND len(parameters) = 0 AND regexp_full_match(function_name, '[a-z_0-9]+')",
        );
        let mut asked: Vec<String> =
            functions.iter().map(|name| format!("SELECT {name}()")).collect();
        asked.extend(
            [
                "SELECT 1 / 'x'",
                "SELECT nothing()",
                "SELECT nothing FROM events",
                "SELECT current_database(), current_schemas(true)",
            ]
            .map(str::to_owned),
        );
        for sql in &asked {
            let shown = match reader.query(sql).await {
                Ok(table) => table.to_csv(),
                // Only logged.
                Err(AnalyticsError::Store { .. }) => String::new(),
                Err(error) => error.to_string(),
            };
            assert!(!shown.contains(&folder) && !shown.contains("/tmp"), "{sql}: {shown}");
        }
        let ours = "WITH Mine AS (SELECT * FROM main.ticket_events) SELECT count(*) FROM mine, dead_letters AS d";
        assert_eq!(reader.query(ours).await.unwrap().rows, [[json!(0)]]);
    }

    #[tokio::test]
    async fn a_deeply_nested_query_does_not_end_the_process() {
        let (_folder, store) = store();
        let chain: Vec<String> =
            (1..1000).map(|n| format!("c{n} AS (SELECT * FROM c{})", n - 1)).collect();
        let sql = format!("WITH c0 AS (SELECT 1 AS one), {} SELECT * FROM c999", chain.join(", "));
        let _ = store.reader().query(&sql).await;
        let sum = format!("SELECT {}1", "1 + ".repeat(3000));
        let result = store.reader().query(&sum).await;
        assert!(result.is_err() || result.is_ok_and(|table| table.rows == [[json!(3001)]]));
        assert!(store.reader().query("SELECT 1").await.is_ok());
    }

    #[tokio::test]
    async fn a_result_with_too_many_bytes_is_truncated() {
        let (_folder, store) = store();
        let sql = "SELECT range AS n, repeat('x', 10000) AS text FROM range(20000)";
        let table = store.reader().query(sql).await.unwrap();
        assert!(table.truncated && table.rows.len() < ANSWER_BYTES_MAX / 10_000 + 1);
        assert_eq!(table.rows.last().unwrap()[0], json!(table.rows.len() - 1), "in order");
    }

    #[tokio::test]
    async fn a_query_over_the_time_limit_is_stopped() {
        let (_folder, store) = store();
        let sql = "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b";
        let result = store.reader().query_within(sql, Duration::from_millis(50), ()).await;
        assert!(matches!(result, Err(AnalyticsError::TooSlow { .. })), "{result:?}");
    }

    #[tokio::test]
    async fn the_permit_is_dropped_by_the_query_thread_and_not_by_the_caller() {
        struct DropProbe(std::sync::mpsc::Sender<std::thread::ThreadId>);
        impl Drop for DropProbe {
            fn drop(&mut self) {
                let _ = self.0.send(std::thread::current().id());
            }
        }
        let (_folder, store) = store();
        let (sender, dropped) = std::sync::mpsc::channel();
        let sql = "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b";
        let limit = Duration::from_millis(50);
        let result = store.reader().query_within(sql, limit, DropProbe(sender)).await;
        assert!(matches!(result, Err(AnalyticsError::TooSlow { .. })), "{result:?}");
        // The caller timed out; the query thread held the permit.
        let by = dropped.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_ne!(by, std::thread::current().id());
    }

    #[tokio::test]
    async fn a_result_with_too_many_rows_is_truncated() {
        let (_folder, store) = store();
        let sql = format!("SELECT * FROM range({})", ANSWER_ROWS_MAX + 5);
        let table = store.reader().query(&sql).await.unwrap();
        assert_eq!((table.rows.len(), table.truncated), (ANSWER_ROWS_MAX, true));
    }
}

//! The table `metrics_history`: one row for each process and minute.
//!
//! Upstream: `mod.rs`. Downstream: transactions and read connections of the store; one text for both databases. Guarantees:
//! a row that is written again replaces the old one; a row that cannot be read is skipped.

use std::sync::Arc;

use headwater_issue::{IssueError, SqlRow, Store};
use headwater_stream::clock::Timestamp;
use serde_json::{Map, Value, json};

use crate::telemetry::history::series::HistorySample;

/// Rows of one deletion.
const DELETE_BATCH: i64 = 500;

/// A minute of a process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HistoryRow {
    /// Minutes since 1970.
    pub(crate) minute: u64,
    pub(crate) process: String,
    pub(crate) sample: HistorySample,
    /// In the first row of a process.
    pub(crate) start: Option<ProcessStart>,
}

/// When a process started, and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessStart {
    pub(crate) at: Timestamp,
    pub(crate) version: String,
}

fn failed(what: &str, error: sqlx::Error) -> IssueError {
    let problem = format!("{what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }
}

fn column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Writes rows in one transaction.
pub(super) async fn write(store: &dyn Store, rows: &[HistoryRow]) -> Result<(), IssueError> {
    let upsert = "INSERT INTO metrics_history (minute, process, data) VALUES ($1, $2, $3)
         ON CONFLICT (minute, process) DO UPDATE SET data = excluded.data";
    let mut transaction = store.begin().await?;
    for row in rows {
        let data = Value::Object(to_json(row)).to_string();
        let parameters = [column(row.minute).into(), (&row.process).into(), (&data).into()];
        let written = transaction.connection().execute(upsert, &parameters).await;
        written.map_err(|error| failed("failed to write the history of metrics", error))?;
    }
    transaction.commit().await
}

/// The rows from minute `from` to before `to`, newest first, at most `limit`.
pub(super) async fn read(
    store: &dyn Store,
    from: u64,
    to: u64,
    limit: usize,
) -> Result<Vec<HistoryRow>, IssueError> {
    let select = "SELECT minute, process, data FROM metrics_history
         WHERE minute >= $1 AND minute < $2 ORDER BY minute DESC, process LIMIT $3";
    let parameters = [column(from).into(), column(to).into(), column(limit as u64).into()];
    let mut reading = store.read_connection().await?;
    let rows = reading.connection().fetch_all(select, &parameters).await;
    reading.release().await;
    let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(read_row).collect());
    let rows = rows.map_err(|error| failed("failed to read the history of metrics", error))?;
    Ok(rows.into_iter().flatten().collect())
}

/// Deletes rows older than `before`, in batches. Returns how many of this batch; call it until that is 0.
pub(crate) async fn delete_batch(store: &dyn Store, before: Timestamp) -> Result<u64, IssueError> {
    let delete = "DELETE FROM metrics_history WHERE (minute, process) IN
         (SELECT minute, process FROM metrics_history WHERE minute < $1 ORDER BY minute LIMIT $2)";
    let parameters = [column(before.as_millis() / super::MINUTE_MS).into(), DELETE_BATCH.into()];
    let mut transaction = store.begin().await?;
    let deleted = transaction.connection().execute(delete, &parameters).await;
    let deleted =
        deleted.map_err(|error| failed("failed to delete old history of metrics", error))?;
    transaction.commit().await?;
    Ok(deleted)
}

fn to_json(row: &HistoryRow) -> Map<String, Value> {
    let mut fields = row.sample.to_json();
    if let Some(ProcessStart { at, version }) = &row.start {
        fields.insert("started".to_owned(), json!(at.as_millis()));
        fields.insert("version".to_owned(), json!(version));
    }
    fields
}

/// `None` if the data is not what this program writes.
fn read_row(row: &SqlRow) -> Result<Option<HistoryRow>, sqlx::Error> {
    let (minute, process): (i64, String) = (row.get(0)?, row.get(1)?);
    let data: Value = serde_json::from_str(&row.get::<String>(2)?).unwrap_or_default();
    let Some(fields) = data.as_object() else { return Ok(None) };
    let start = fields.get("started").and_then(Value::as_u64).map(|at| ProcessStart {
        at: Timestamp::from_millis(at),
        version: fields.get("version").and_then(Value::as_str).unwrap_or_default().to_owned(),
    });
    let minute = u64::try_from(minute).unwrap_or(0);
    Ok(Some(HistoryRow { minute, process, sample: HistorySample::from_json(fields), start }))
}

#[cfg(test)]
mod tests {
    use headwater_issue::{StoreOptions, connect};
    use headwater_testkit::Postgres;

    use super::*;

    fn row(minute: u64, process: &str) -> HistoryRow {
        let fields = json!({"n": 6});
        let sample = HistorySample::from_json(fields.as_object().unwrap());
        HistoryRow { minute, process: process.to_owned(), sample, start: None }
    }

    async fn rows_are_written_replaced_read_and_deleted(url: &str) {
        let store = connect(url, &StoreOptions::default()).await.unwrap();
        crate::tickets::migrate(store.as_ref()).await.unwrap();
        let store = store.as_ref();
        let at = Timestamp::from_millis(1_767_225_600_123);
        let start = Some(ProcessStart { at, version: "1.2.3".to_owned() });
        let first = HistoryRow { start, ..row(10, "a'; DROP TABLE metrics_history; --") };
        let all = [first.clone(), row(10, "b"), row(11, "b"), row(12, "b")];
        write(store, &all).await.unwrap();
        write(store, &all).await.unwrap();
        let found = read(store, 10, 12, 100).await.unwrap();
        assert_eq!(found, [row(11, "b"), first, row(10, "b")]);
        assert_eq!(read(store, 0, 100, 1).await.unwrap(), [row(12, "b")], "the newest are read");

        let mut transaction = store.begin().await.unwrap();
        let damage = "UPDATE metrics_history SET data = '[1, 2' WHERE minute = 12";
        transaction.connection().execute(damage, &[]).await.unwrap();
        transaction.commit().await.unwrap();
        assert_eq!(read(store, 12, 13, 100).await.unwrap(), [], "a damaged row is a gap");

        let minute_12 = Timestamp::from_millis(12 * 60_000);
        assert_eq!(delete_batch(store, minute_12).await.unwrap(), 3);
        assert_eq!(delete_batch(store, minute_12).await.unwrap(), 0);
        let many: Vec<_> = (100..700).map(|minute| row(minute, "c")).collect();
        write(store, &many).await.unwrap();
        let later = Timestamp::from_millis(10_000 * 60_000);
        assert_eq!(delete_batch(store, later).await.unwrap(), 500, "a batch is bounded");
        store.close().await;
    }

    #[tokio::test]
    async fn sqlite_rows_are_written_replaced_read_and_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("a.db").display());
        rows_are_written_replaced_read_and_deleted(&url).await;
    }

    #[tokio::test]
    async fn postgres_rows_are_written_replaced_read_and_deleted() {
        let database = Postgres::shared().unwrap().database().unwrap();
        rows_are_written_replaced_read_and_deleted(&database.url()).await;
    }
}

//! The `audit_log` table in SQLite and PostgreSQL.
//!
//! Upstream: `mod.rs`. Downstream: transactions and read connections of the store. Guarantees: a batch is one
//! transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_issue::{IssueError, SqlRow, Store};
use headwater_stream::clock::Timestamp;
use tracing::warn;

use crate::http::audit::{AuditRow, AuditWrite};

/// The log is trimmed when it exceeds the maximum by this many entries.
const TRIM_EVERY: u64 = 1000;

/// Entries that one transaction removes.
const TRIM_BATCH: u64 = 500;

/// Transactions of one call: more than are written meanwhile, so that also a much lower maximum is reached.
const TRIM_BATCHES_MAX: u64 = 20;

const _: () = assert!(TRIM_BATCH * TRIM_BATCHES_MAX > TRIM_EVERY);

fn failed(what: &str, error: sqlx::Error) -> IssueError {
    let problem = format!("{what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }
}

/// Removes the oldest entries above the maximum, in small transactions. If there are too many for one call, the next ones remove the
/// rest.
pub(super) async fn trim(store: &dyn Store, rows_max: u64) -> Result<(), IssueError> {
    let delete = "DELETE FROM audit_log WHERE id IN (SELECT id FROM audit_log WHERE id <=
             (SELECT id FROM audit_log ORDER BY id DESC LIMIT 1 OFFSET $1) ORDER BY id LIMIT $2)";
    let to_i64 = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    for _ in 0..TRIM_BATCHES_MAX {
        let mut transaction = store.begin().await?;
        let parameters = [to_i64(rows_max).into(), to_i64(TRIM_BATCH).into()];
        let trimmed = transaction.connection().execute(delete, &parameters).await;
        let trimmed = trimmed.map_err(|error| failed("failed to trim the audit log", error))?;
        transaction.commit().await?;
        if trimmed < TRIM_BATCH {
            break;
        }
    }
    Ok(())
}

/// Writes batches.
pub(super) struct AuditWriter {
    store: Arc<dyn Store>,
    /// `None`: nothing is removed.
    rows_max: Option<u64>,
    since_trim: AtomicU64,
}

impl AuditWriter {
    pub(super) fn new(store: Arc<dyn Store>, rows_max: Option<u64>) -> Self {
        Self { store, rows_max, since_trim: AtomicU64::new(0) }
    }

    /// Writes a batch in one transaction; every item gets its result.
    pub(super) async fn write(&self, batch: &[AuditWrite]) -> Vec<Result<(), IssueError>> {
        let written = self.write_all(batch).await;
        let begun =
            batch.iter().filter(|write| matches!(write, AuditWrite::Begin(_))).count() as u64;
        // Batches are written one at a time, so the counter cannot change in between.
        let is_due = self.since_trim.fetch_add(begun, Ordering::Relaxed) + begun >= TRIM_EVERY;
        if let Some(rows_max) = self.rows_max.filter(|_| is_due) {
            self.since_trim.store(0, Ordering::Relaxed);
            if let Err(error) = trim(self.store.as_ref(), rows_max).await {
                warn!(%error, "failed to trim the audit log");
            }
        }
        batch.iter().map(|_| written.clone()).collect()
    }

    async fn write_all(&self, batch: &[AuditWrite]) -> Result<(), IssueError> {
        let mut transaction = self.store.begin().await?;
        for write in batch {
            let connection = transaction.connection();
            let written = match write {
                AuditWrite::Begin(entry) => {
                    let insert = "INSERT INTO audit_log (id, at, caller, role, client, method, path)
                         VALUES ($1, headwater_time($2), $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING";
                    let at = i64::try_from(entry.at.as_millis()).unwrap_or(i64::MAX);
                    let AuditRow { id, caller, role, client, method, path, .. } = entry;
                    let parameters = [
                        id.into(),
                        at.into(),
                        caller.into(),
                        role.into(),
                        client.into(),
                        method.into(),
                        path.into(),
                    ];
                    connection.execute(insert, &parameters).await
                }
                AuditWrite::End { id, status } => {
                    let update = "UPDATE audit_log SET status = $2 WHERE id = $1";
                    connection.execute(update, &[id.into(), i64::from(*status).into()]).await
                }
            };
            written.map_err(|error| failed("failed to write the audit log", error))?;
        }
        transaction.commit().await
    }
}

/// A page of entries before `before`, newest first.
pub(super) async fn page(
    store: &dyn Store,
    before: Option<&str>,
    limit: usize,
) -> Result<Vec<AuditRow>, IssueError> {
    let select = "SELECT id, headwater_ms(at), caller, role, client, method, path, status
         FROM audit_log WHERE id < $1 ORDER BY id DESC LIMIT $2";
    // Ids consist of hexadecimal digits and dashes, which sort before `g`.
    let before = before.unwrap_or("g");
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut reading = store.read_connection().await?;
    let rows = reading.connection().fetch_all(select, &[before.into(), limit.into()]).await;
    reading.release().await;
    let entries = rows.and_then(|rows| rows.iter().map(read).collect());
    entries.map_err(|error| failed("failed to read the audit log", error))
}

fn read(row: &SqlRow) -> Result<AuditRow, sqlx::Error> {
    let status: Option<i64> = row.get(7)?;
    Ok(AuditRow {
        id: row.get(0)?,
        at: Timestamp::from_millis(u64::try_from(row.get::<i64>(1)?).unwrap_or_default()),
        caller: row.get(2)?,
        role: row.get(3)?,
        client: row.get(4)?,
        method: row.get(5)?,
        path: row.get(6)?,
        status: status.and_then(|status| u16::try_from(status).ok()),
    })
}

#[cfg(test)]
mod tests {
    use headwater_issue::{StoreOptions, connect};
    use headwater_testkit::Postgres;

    use super::*;

    fn entry(number: u64) -> AuditRow {
        AuditRow {
            id: format!("{number:08}"),
            at: Timestamp::from_millis(1_767_225_600_123 + number),
            caller: "ann'; DROP TABLE audit_log; --".to_owned(),
            role: "admin".to_owned(),
            client: "127.0.0.1".to_owned(),
            method: "POST".to_owned(),
            path: "/api/v1/issues/1/retry".to_owned(),
            status: None,
        }
    }

    async fn entries_are_written_completed_paged_and_trimmed(url: &str) {
        let store = connect(url, &StoreOptions::default()).await.unwrap();
        crate::tickets::migrate(store.as_ref()).await.unwrap();
        crate::tickets::migrate(store.as_ref()).await.unwrap();
        let writer = AuditWriter::new(Arc::clone(&store), Some(100));
        let begin: Vec<_> = (0..250).map(|number| AuditWrite::Begin(entry(number))).collect();
        assert!(writer.write(&begin).await.iter().all(Result::is_ok));
        let end = AuditWrite::End { id: entry(249).id, status: 200 };
        assert!(writer.write(&[end]).await[0].is_ok());

        let newest = page(store.as_ref(), None, 2).await.unwrap();
        assert_eq!(newest, [AuditRow { status: Some(200), ..entry(249) }, entry(248)]);
        let next = page(store.as_ref(), Some(&newest[1].id), 1).await.unwrap();
        assert_eq!(next, [entry(247)]);

        // Opening in append-only mode removes nothing; a server trims to its setting.
        crate::http::audit::AuditLog::open_append_only(Arc::clone(&store)).await.unwrap();
        let appending = AuditWriter::new(Arc::clone(&store), None);
        let more: Vec<_> = (0..TRIM_EVERY).map(|number| AuditWrite::Begin(entry(number))).collect();
        assert!(appending.write(&more).await.iter().all(Result::is_ok));
        let there = page(store.as_ref(), None, 2000).await.unwrap().len();
        assert_eq!(there as u64, TRIM_EVERY);

        crate::http::audit::AuditLog::open(Arc::clone(&store), 100).await.unwrap();
        let kept = page(store.as_ref(), None, 1000).await.unwrap();
        assert_eq!(kept.len(), 100);
        assert_eq!(kept[99], entry(TRIM_EVERY - 100));
        trim(store.as_ref(), 100).await.unwrap();
        assert_eq!(page(store.as_ref(), None, 1000).await.unwrap().len(), 100);
        store.close().await;
    }

    #[tokio::test]
    async fn sqlite_entries_are_written_completed_paged_and_trimmed() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("a.db").display());
        entries_are_written_completed_paged_and_trimmed(&url).await;
    }

    #[tokio::test]
    async fn postgres_entries_are_written_completed_paged_and_trimmed() {
        let database = Postgres::shared().unwrap().database().unwrap();
        entries_are_written_completed_paged_and_trimmed(&database.url()).await;
    }
}

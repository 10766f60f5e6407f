//! The `audit_log` table in SQLite and PostgreSQL.
//!
//! Upstream: `mod.rs`. Downstream: transactions and read connections of the store. Guarantees: a batch is one
//! transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_issue::{IssueError, ReadConnection, SqlRow, Store};
use headwater_stream::clock::Timestamp;
use tracing::warn;

use crate::http::audit::{AuditFilter, AuditRow, AuditRows, AuditWrite};

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
                AuditWrite::Remove { id } => {
                    let delete = "DELETE FROM audit_log WHERE id = $1 AND status IS NULL";
                    connection.execute(delete, &[id.into()]).await
                }
            };
            written.map_err(|error| failed("failed to write the audit log", error))?;
        }
        transaction.commit().await
    }
}

/// A page of the entries before `before` that match, newest first: at most `limit` of the next `searched_max`.
pub(super) async fn page(
    store: &dyn Store,
    filter: &AuditFilter,
    before: Option<&str>,
    (limit, searched_max): (usize, usize),
) -> Result<AuditRows, IssueError> {
    let mut reading = store.read_connection().await?;
    let page = read_page(&mut reading, filter, before, (limit, searched_max)).await;
    reading.release().await;
    page.map_err(|error| failed("failed to read the audit log", error))
}

async fn read_page(
    reading: &mut ReadConnection,
    filter: &AuditFilter,
    before: Option<&str>,
    (limit, searched_max): (usize, usize),
) -> Result<AuditRows, sqlx::Error> {
    let select = "SELECT id, headwater_ms(at), caller, role, client, method, path, status FROM (
             SELECT id, at, caller, role, client, method, path, status FROM audit_log
             WHERE id < $1 AND id >= $2 ORDER BY id DESC LIMIT $3) AS searched
         WHERE ($4::text IS NULL OR caller = $4) AND ($5::text IS NULL OR lower(path) LIKE $5 ESCAPE '!')
             AND at >= headwater_time($6)
         ORDER BY id DESC LIMIT $7";
    let to_i64 = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    // Ids consist of hexadecimal digits and dashes, which sort before `g`.
    let before = before.unwrap_or("g");
    let first = filter.from.map(first_id).unwrap_or_default();
    let pattern = filter.path.as_deref().map(pattern);
    let from_ms = filter.from.map_or(0, Timestamp::as_millis);
    let parameters = [
        before.into(),
        (&first).into(),
        to_i64(searched_max).into(),
        filter.caller.as_deref().into(),
        pattern.as_deref().into(),
        i64::try_from(from_ms).unwrap_or(i64::MAX).into(),
        to_i64(limit).into(),
    ];
    let rows = reading.connection().fetch_all(select, &parameters).await?;
    let entries: Vec<AuditRow> = rows.iter().map(read).collect::<Result<_, _>>()?;
    // A full page ends with its last entry, any other one with the last that was compared.
    let end = entries.last().filter(|_| entries.len() == limit).map(|entry| entry.id.clone());
    let select = "SELECT count(*), min(id) FROM (SELECT id FROM audit_log
             WHERE id < $1 AND id >= $2 ORDER BY id DESC LIMIT $3) AS searched";
    let first = end.as_deref().unwrap_or(&first);
    let parameters = [before.into(), first.into(), to_i64(searched_max).into()];
    let counted = reading.connection().fetch_optional(select, &parameters).await?;
    let counted = counted.ok_or(sqlx::Error::RowNotFound)?;
    let searched = usize::try_from(counted.get::<i64>(0)?).unwrap_or_default();
    let last: Option<String> = counted.get(1)?;
    let next = end.or_else(|| last.filter(|_| searched == searched_max));
    Ok(AuditRows { entries, searched, next })
}

/// What the ids of entries of a time or later begin with, or are greater than. An id has the time at which it was made, which may be a
/// little before the time of its entry.
fn first_id(from: Timestamp) -> String {
    const MARGIN_MS: u64 = 1000;
    // UUIDs have 48 bits for their milliseconds.
    let ms = from.as_millis().saturating_sub(MARGIN_MS).min(0xffff_ffff_ffff);
    format!("{:08x}-{:04x}-", ms >> 16, ms & 0xffff)
}

/// A pattern of `LIKE ... ESCAPE '!'` for texts in lower case that contain this one.
fn pattern(text: &str) -> String {
    let escaped = text.to_lowercase().replace('!', "!!").replace('%', "!%").replace('_', "!_");
    format!("%{escaped}%")
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

    async fn newest_of(store: &dyn Store, before: Option<&str>, limit: usize) -> Vec<AuditRow> {
        page(store, &AuditFilter::default(), before, (limit, 10_000)).await.unwrap().entries
    }

    /// Entry `number` was made so many minutes after the first; each tenth is a purge by `boss`.
    fn minute(number: u64) -> AuditRow {
        let at = Timestamp::from_millis(1_767_225_600_123 + number * 60_000);
        let ms = at.as_millis();
        let id = format!("{:08x}-{:04x}-7000-8000-{number:012x}", ms >> 16, ms & 0xffff);
        let plain = AuditRow { id, at, ..entry(number) };
        match number % 10 {
            0 => AuditRow {
                caller: "boss".to_owned(),
                path: format!("/api/v1/topics/100%25_{number}/dead-letters/Purge"),
                ..plain
            },
            _ => plain,
        }
    }

    async fn entries_are_found_by_caller_path_and_time(url: &str) {
        let store = connect(url, &StoreOptions::default()).await.unwrap();
        crate::tickets::migrate(store.as_ref()).await.unwrap();
        let writer = AuditWriter::new(Arc::clone(&store), None);
        let begin: Vec<_> = (0..100).map(|number| AuditWrite::Begin(minute(number))).collect();
        assert!(writer.write(&begin).await.iter().all(Result::is_ok));
        let find = async |filter: &AuditFilter, before: Option<&str>, limit, searched_max| {
            let found = page(store.as_ref(), filter, before, (limit, searched_max)).await.unwrap();
            (found.entries, found.searched, found.next)
        };
        let purges =
            |numbers: &[u64]| numbers.iter().map(|number| minute(*number)).collect::<Vec<_>>();
        let boss = AuditFilter { caller: Some("boss".to_owned()), ..AuditFilter::default() };
        let all = purges(&[90, 80, 70, 60, 50, 40, 30, 20, 10, 0]);
        assert_eq!(find(&boss, None, 50, 1000).await, (all.clone(), 100, None));
        for (caller, path, count) in [
            (None, "dead-letters/purge", 10),
            (None, "100%25_", 10),
            (Some("boss"), "PURGE", 10),
            // Neither is a wildcard.
            (None, "100_25", 0),
            (None, "topics/%/dead-letters", 0),
            (Some("bos"), "purge", 0),
            (Some("boss"), "retry", 0),
            (None, "'; DROP TABLE audit_log; --", 0),
        ] {
            let (caller, path) = (caller.map(str::to_owned), Some(path.to_owned()));
            let filter = AuditFilter { caller, path, from: None };
            let (found, searched, next) = find(&filter, None, 50, 1000).await;
            assert_eq!((found.len(), searched, next), (count, 100, None), "{filter:?}");
        }

        // A full page ends with its last entry, another one where its search ends.
        let (found, searched, next) = find(&boss, None, 3, 1000).await;
        assert_eq!((found, searched), (purges(&[90, 80, 70]), 30));
        let (found, searched, next) = find(&boss, next.as_deref(), 50, 25).await;
        assert_eq!((found, searched), (purges(&[60, 50]), 25));
        assert_eq!(next, Some(minute(45).id));
        let (found, searched, next) = find(&boss, next.as_deref(), 50, 4).await;
        assert_eq!((found, searched), (vec![], 4), "an empty page with a next one");
        let (found, searched, next) = find(&boss, next.as_deref(), 50, 1000).await;
        assert_eq!((found, searched, next), (purges(&[40, 30, 20, 10, 0]), 41, None));

        // Entries before a time are not read.
        let from = AuditFilter { from: Some(minute(80).at), ..AuditFilter::default() };
        let (found, searched, next) = find(&from, None, 50, 1000).await;
        assert_eq!((found.len(), searched, next), (20, 20, None));
        assert_eq!(found.last(), Some(&minute(80)));
        let after = Timestamp::from_millis(minute(80).at.as_millis() + 1);
        let after = AuditFilter { from: Some(after), ..boss.clone() };
        assert_eq!(find(&after, None, 50, 1000).await.0, purges(&[90]));
        let from = Timestamp::from_rfc3339("9999-12-31T23:59:59Z");
        let future = AuditFilter { from, ..boss };
        assert_eq!(find(&future, None, 50, 1000).await, (vec![], 0, None));
        store.close().await;
    }

    #[tokio::test]
    async fn sqlite_entries_are_found_by_caller_path_and_time() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", directory.path().join("a.db").display());
        entries_are_found_by_caller_path_and_time(&url).await;
    }

    #[tokio::test]
    async fn postgres_entries_are_found_by_caller_path_and_time() {
        let database = Postgres::shared().unwrap().database().unwrap();
        entries_are_found_by_caller_path_and_time(&database.url()).await;
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

        let newest = newest_of(store.as_ref(), None, 2).await;
        assert_eq!(newest, [AuditRow { status: Some(200), ..entry(249) }, entry(248)]);
        let next = newest_of(store.as_ref(), Some(&newest[1].id), 1).await;
        assert_eq!(next, [entry(247)]);

        // Only what has no status yet is removed.
        let remove = |number| AuditWrite::Remove { id: entry(number).id };
        let removed = writer.write(&[remove(249), remove(248)]).await;
        assert!(removed.iter().all(Result::is_ok));
        let newest = newest_of(store.as_ref(), None, 2).await;
        assert_eq!(newest, [AuditRow { status: Some(200), ..entry(249) }, entry(247)]);
        assert!(writer.write(&[AuditWrite::Begin(entry(248))]).await[0].is_ok());

        // Opening in append-only mode removes nothing; a server trims to its setting.
        crate::http::audit::AuditLog::open_append_only(Arc::clone(&store)).await.unwrap();
        let appending = AuditWriter::new(Arc::clone(&store), None);
        let more: Vec<_> = (0..TRIM_EVERY).map(|number| AuditWrite::Begin(entry(number))).collect();
        assert!(appending.write(&more).await.iter().all(Result::is_ok));
        let there = newest_of(store.as_ref(), None, 2000).await.len();
        assert_eq!(there as u64, TRIM_EVERY);

        crate::http::audit::AuditLog::open(Arc::clone(&store), 100).await.unwrap();
        let kept = newest_of(store.as_ref(), None, 1000).await;
        assert_eq!(kept.len(), 100);
        assert_eq!(kept[99], entry(TRIM_EVERY - 100));
        trim(store.as_ref(), 100).await.unwrap();
        assert_eq!(newest_of(store.as_ref(), None, 1000).await.len(), 100);
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

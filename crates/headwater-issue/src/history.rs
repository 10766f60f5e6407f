//! Deletes history: processed event logs and runs after their retention, and whole issues.
//!
//! Upstream: the retention task and the erasure of a user, in the binary. Downstream: transactions of the caller, so that its own rows
//! of an issue are deleted with it. Guarantees: an old issue is deleted only if nothing of it is pending: no event, no
//! quarantine, no undelivered outbox row. Pages are in the order of ids and need no index of their own. Ages are measured by the
//! database's clock. A deleted event log is no longer known: the same event sent again later is a new one.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};
use serde_json::json;

use crate::error::{IssueError, Result};
use crate::issue::{ClaimEpoch, EventLogId, IssueId};
use crate::row_decoding::{ms, to_i64};
use crate::sql::SqlRow;
use crate::store::Store;
use crate::transaction::{StoreConnection, Transaction};

/// One page of a pass over a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryPage<Id> {
    /// Rows of the page that were deleted, or can be.
    pub found: Vec<Id>,
    /// Where the next page begins; `None` after the last one.
    pub next: Option<Id>,
}

/// Which issue may be deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteCondition {
    /// Nothing is pending, and nothing changed for this long.
    IdleFor(Duration),
    /// No run and no delivery is in progress. What is pending is deleted.
    NotInUse,
}

/// Deletes processed event logs that are older than `keep`, in one page of `limit` rows.
pub async fn delete_event_logs(
    store: &dyn Store,
    after: EventLogId,
    keep: Duration,
    limit: usize,
) -> Result<HistoryPage<EventLogId>> {
    let select = "SELECT id, coalesce(processed_at <= headwater_time($2), false), created_at > headwater_time($2)
         FROM event_logs WHERE id > $1 ORDER BY id LIMIT $3";
    let page = page(store, select, after.0, keep, limit).await?;
    if !page.found.is_empty() {
        let mut transaction = store.begin().await?;
        let delete = "DELETE FROM event_logs WHERE processed_at IS NOT NULL
             AND id IN (SELECT value::bigint FROM headwater_each($1))";
        let ids = json!(page.found).to_string();
        let deleted = transaction.connection().execute(delete, &[(&ids).into()]).await;
        deleted.map_err(|error| failed("deleting event logs", error))?;
        transaction.commit().await?;
    }
    Ok(HistoryPage {
        found: page.found.into_iter().map(EventLogId).collect(),
        next: page.next.map(EventLogId),
    })
}

/// Deletes runs that ended longer than `keep` ago, in one page of `limit` rows after `after`.
pub async fn delete_runs(
    store: &dyn Store,
    after: (IssueId, ClaimEpoch),
    keep: Duration,
    limit: usize,
) -> Result<HistoryPage<(IssueId, ClaimEpoch)>> {
    let select = "SELECT issue_id, epoch, ended_at <= headwater_time($3) FROM issue_runs
         WHERE (issue_id, epoch) > ($1::bigint, $2::bigint) ORDER BY issue_id, epoch LIMIT $4";
    let (IssueId(issue_id), ClaimEpoch(epoch)) = after;
    let mut reading = store.read_connection().await?;
    let before = time_before(reading.connection(), keep).await;
    let rows = match before {
        Ok(before) => {
            let parameters = [issue_id.into(), epoch.into(), before.into(), to_i64(limit).into()];
            let rows = reading.connection().fetch_all(select, &parameters).await;
            rows.map(|rows| (before, rows))
        }
        Err(error) => Err(error),
    };
    reading.release().await;
    let read =
        |row: &SqlRow| Ok(((IssueId(row.get(0)?), ClaimEpoch(row.get(1)?)), row.get::<bool>(2)?));
    let read = rows.and_then(|(before, rows)| {
        let rows: std::result::Result<Vec<_>, sqlx::Error> = rows.iter().map(read).collect();
        Ok((before, rows?))
    });
    let (before, rows) = read.map_err(|error| failed("reading runs", error))?;
    let last = rows.last().map(|(id, _)| *id);
    let next = last.filter(|_| rows.len() >= limit);
    let found: Vec<_> = rows.into_iter().filter_map(|(id, is_old)| is_old.then_some(id)).collect();
    if let (Some((IssueId(last_issue), ClaimEpoch(last_epoch))), false) = (last, found.is_empty()) {
        let delete = "DELETE FROM issue_runs WHERE ended_at <= headwater_time($3)
             AND (issue_id, epoch) > ($1::bigint, $2::bigint) AND (issue_id, epoch) <= ($4::bigint, $5::bigint)";
        let parameters = [issue_id, epoch, before, last_issue, last_epoch].map(Into::into);
        let mut transaction = store.begin().await?;
        let deleted = transaction.connection().execute(delete, &parameters).await;
        deleted.map_err(|error| failed("deleting runs", error))?;
        transaction.commit().await?;
    }
    Ok(HistoryPage { found, next })
}

/// Finds issues that nothing is pending for and that did not change for `idle_for`, in one page of `limit` rows.
pub async fn idle_issues(
    store: &dyn Store,
    after: IssueId,
    idle_for: Duration,
    limit: usize,
) -> Result<HistoryPage<IssueId>> {
    let select = "SELECT i.id, i.processing_status = 'idle' AND i.pending_events = 0 AND i.quarantined_at IS NULL
             AND i.updated_at <= headwater_time($2), false
         FROM issues AS i WHERE i.id > $1 ORDER BY i.id LIMIT $3";
    let page = page(store, select, after.0, idle_for, limit).await?;
    Ok(HistoryPage {
        found: page.found.into_iter().map(IssueId).collect(),
        next: page.next.map(IssueId),
    })
}

/// Reads a page of rows: id, whether it is found, and whether it and the following ones are too young.
async fn page(
    store: &dyn Store,
    select: &'static str,
    after: i64,
    age: Duration,
    limit: usize,
) -> Result<HistoryPage<i64>> {
    let mut reading = store.read_connection().await?;
    let before = time_before(reading.connection(), age).await;
    let rows = match before {
        Ok(before) => {
            let parameters = [after.into(), before.into(), to_i64(limit).into()];
            reading.connection().fetch_all(select, &parameters).await
        }
        Err(error) => Err(error),
    };
    reading.release().await;
    let read = |row: &SqlRow| Ok((row.get::<i64>(0)?, row.get::<bool>(1)?, row.get::<bool>(2)?));
    let rows: std::result::Result<Vec<_>, sqlx::Error> =
        rows.and_then(|rows| rows.iter().map(read).collect());
    let rows = rows.map_err(|error| failed("reading history", error))?;
    let is_last = rows.len() < limit || rows.iter().any(|(_, _, is_young)| *is_young);
    let next = rows.last().map(|(id, ..)| *id).filter(|_| !is_last);
    let found = rows.into_iter().filter_map(|(id, is_found, _)| is_found.then_some(id)).collect();
    Ok(HistoryPage { found, next })
}

/// Locks an issue and returns whether it may be deleted. Lock rows of your own that refer to it before.
pub async fn lock_deletable(
    transaction: &mut dyn Transaction,
    issue_id: IssueId,
    condition: DeleteCondition,
) -> Result<bool> {
    let lock = "SELECT id FROM issues WHERE id = $1 FOR UPDATE";
    let locked = transaction.connection().fetch_all(lock, &[issue_id.0.into()]).await;
    locked.map_err(|error| failed("locking an issue", error))?;
    // A statement of its own: it sees what the transaction that had the lock before has committed.
    let (select, age) = match condition {
        DeleteCondition::IdleFor(age) => (
            "SELECT i.processing_status = 'idle' AND i.pending_events = 0 AND i.quarantined_at IS NULL
                 AND i.updated_at <= headwater_time($2) AND NOT EXISTS (SELECT 1 FROM outbox AS o
                     WHERE o.issue_id = i.id AND o.status IN ('waiting', 'pending', 'taken'))
             FROM issues AS i WHERE i.id = $1",
            age,
        ),
        DeleteCondition::NotInUse => (
            "SELECT i.processing_status <> 'processing' AND $2::bigint IS NOT NULL
                 AND NOT EXISTS (SELECT 1 FROM outbox AS o WHERE o.issue_id = i.id AND o.status = 'taken')
             FROM issues AS i WHERE i.id = $1",
            Duration::ZERO,
        ),
    };
    let before = time_before(transaction.connection(), age).await;
    let before = before.map_err(|error| failed("reading the time", error))?;
    let parameters = [issue_id.0.into(), before.into()];
    let row = transaction.connection().fetch_optional(select, &parameters).await;
    let is_deletable = row.and_then(|row| row.map_or(Ok(false), |row| row.get::<bool>(0)));
    is_deletable.map_err(|error| failed("checking an issue", error))
}

/// Deletes the oldest processed event logs, runs and delivered or dead outbox rows of an issue that [`lock_deletable`] has locked, at
/// most `limit` of each. Returns whether there may be more: then commit, so that the transaction stays short, and begin again.
pub async fn delete_history_of(
    transaction: &mut dyn Transaction,
    issue_id: IssueId,
    limit: usize,
) -> Result<bool> {
    let mut has_more = false;
    for delete in [
        "DELETE FROM event_logs WHERE id IN (SELECT id FROM event_logs
             WHERE issue_id = $1 AND processed_at IS NOT NULL ORDER BY id LIMIT $2)",
        "DELETE FROM issue_runs WHERE issue_id = $1 AND epoch IN (SELECT epoch FROM issue_runs
             WHERE issue_id = $1 ORDER BY epoch LIMIT $2)",
        "DELETE FROM outbox WHERE id IN (SELECT id FROM outbox
             WHERE issue_id = $1 AND status IN ('delivered', 'dead') ORDER BY id LIMIT $2)",
    ] {
        let parameters = [issue_id.0.into(), to_i64(limit).into()];
        let deleted = transaction.connection().execute(delete, &parameters).await;
        let deleted = deleted.map_err(|error| failed("deleting the history of an issue", error))?;
        has_more |= deleted >= limit as u64;
    }
    Ok(has_more)
}

/// Deletes an issue that [`lock_deletable`] has locked, with its event logs, runs, outbox rows and dead letters.
pub async fn delete_issue(transaction: &mut dyn Transaction, issue_id: IssueId) -> Result<()> {
    for delete in [
        "DELETE FROM event_logs WHERE issue_id = $1",
        "DELETE FROM issue_runs WHERE issue_id = $1",
        "DELETE FROM outbox WHERE issue_id = $1",
        "DELETE FROM dead_letters WHERE issue_id = $1",
        "DELETE FROM issues WHERE id = $1",
    ] {
        let deleted = transaction.connection().execute(delete, &[issue_id.0.into()]).await;
        deleted.map_err(|error| failed("deleting an issue", error))?;
    }
    Ok(())
}

/// The time `age` ago by the database's clock, in milliseconds since 1970.
async fn time_before(
    connection: StoreConnection<'_>,
    age: Duration,
) -> std::result::Result<i64, sqlx::Error> {
    let now = match connection {
        #[cfg(feature = "sqlite")]
        StoreConnection::Sqlite(_) => {
            i64::try_from(SystemClock.now().as_millis()).unwrap_or(i64::MAX)
        }
        other => {
            let rows = other.fetch_all("SELECT headwater_ms(headwater_now())", &[]).await?;
            rows.first().map_or(Ok(0), |row| row.get(0))?
        }
    };
    Ok(now.saturating_sub(ms(age)))
}

fn failed(what: &str, error: sqlx::Error) -> IssueError {
    let problem = format!("{what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }
}

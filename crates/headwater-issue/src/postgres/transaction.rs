//! Caller's transactions on PostgreSQL.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Error, Executor, Row};
use tokio::runtime::Handle;

use super::connections::{Checkout, PgConnections, report_open_transaction, report_timeout};
use super::record;
use crate::connect::timed_out;
use crate::error::{IssueError, Result};
use crate::event_batch::{EventBatch, reject_all};
use crate::issue::{DebounceWindow, IssueId, NewEvent, OutboxId, Recorded};
use crate::outbox::types::{KeyedOutboxRow, OutboxWritten};
use crate::row_decoding::database_error;
use crate::transaction::{StoreConnection, Transaction};
use crate::validate;

/// Stores events inside a caller's transaction; issues are queued at the commit. Nudge after the commit.
///
/// The issues stay locked until the commit, so commit soon. Requires the isolation level `READ COMMITTED`. Roll back on
/// `Unavailable`; `Invalid`, `UnknownIntegration` and `DedupConflict` concern single events and leave the transaction
/// usable.
pub async fn record_in(
    connection: &mut PgConnection,
    events: &[NewEvent],
    debounce: &DebounceWindow,
) -> Vec<Result<Recorded>> {
    let batch = match debounce.validate().and_then(|()| EventBatch::prepare(events)) {
        Ok(batch) => batch,
        Err(error) => return reject_all(events.len(), &error),
    };
    match record::record(connection, &batch.events, debounce).await {
        Ok(stored) => {
            let needs_retry = batch.needs_retry(&stored);
            let mut results = batch.into_results(&stored);
            for index in needs_retry {
                let alone = std::slice::from_ref(&events[index]);
                results[index] = Box::pin(record_in(connection, alone, debounce)).await.remove(0);
            }
            results
        }
        Err(error) => reject_all(events.len(), &broken("recording events", error)),
    }
}

/// Writes outbox rows of an issue inside a caller's transaction, like
/// [`Transaction::write_outbox`](crate::Transaction::write_outbox). Deliverers are notified at the commit.
///
/// The issue stays locked until then. Requires the isolation level `READ COMMITTED`.
pub async fn outbox_in(
    connection: &mut PgConnection,
    issue_id: IssueId,
    rows: &[KeyedOutboxRow],
) -> Result<Vec<OutboxWritten>> {
    validate::keyed_outbox(rows)?;
    if rows.is_empty() {
        return Ok(vec![]);
    }
    let texts = |text: fn(&KeyedOutboxRow) -> &str| rows.iter().map(text).collect::<Vec<_>>();
    let written = sqlx::query("SELECT * FROM headwater_enqueue_outbox($1, $2, $3, $4, $5)")
        .bind(issue_id.0)
        .bind(texts(|one| &one.key))
        .bind(texts(|one| one.row.kind.as_str()))
        .bind(texts(|one| &one.row.target))
        .bind(texts(|one| &one.row.payload))
        .fetch_all(connection)
        .await
        .map_err(|error| broken("writing to the outbox", error))?;
    if written.is_empty() {
        return Err(IssueError::NotFound { what: format!("issue {issue_id}") });
    }
    let read = |row: &PgRow| {
        let written = OutboxWritten { id: OutboxId(row.try_get(0)?), duplicate: row.try_get(1)? };
        Ok((written, row.try_get::<bool, _>(2)?))
    };
    let mut results = Vec::with_capacity(rows.len());
    for (one, row) in rows.iter().zip(&written) {
        let (written, same) =
            read(row).map_err(|error| database_error("reading the outbox", error))?;
        if !same {
            return Err(IssueError::OutboxConflict { issue_id, key: one.key.clone() });
        }
        results.push(written);
    }
    Ok(results)
}

/// Every database error breaks the transaction, so it is `Unavailable`.
fn broken(what: &str, error: Error) -> IssueError {
    report_timeout(&error);
    let problem = format!("{what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }
}

/// Number of the next transaction of this process.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// A transaction on its own connection.
///
/// Its number is stored in a transaction-local setting, and the commit fails if the setting is missing: in a
/// transaction that failed, that the caller ended, or that is a different one.
#[derive(Debug)]
pub(super) struct PostgresTransaction {
    /// `None` after the commit.
    connection: Option<Checkout>,
    number: u64,
    /// Whether a call was cancelled or timed out. The connection is unusable then.
    is_interrupted: bool,
    deadline: Duration,
}

impl PostgresTransaction {
    /// Begins a transaction, in one round trip.
    pub(super) async fn begin(connections: &PgConnections, deadline: Duration) -> Result<Self> {
        let failed = |error| database_error("beginning a transaction", error);
        let mut connection = connections.checkout().await.map_err(failed)?;
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        // Inside an older transaction `BEGIN` is only a warning; the timestamps reveal it.
        let begin = format!(
            "BEGIN; SELECT transaction_timestamp() = statement_timestamp(),
                 set_config('headwater.transaction', '{number}', true)"
        );
        let begun = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(begin))).await;
        let begun = begun.inspect_err(report_timeout).map_err(failed)?;
        let is_new = begun.first().map_or(Ok(false), |row| row.try_get::<bool, _>(0));
        if !is_new.map_err(failed)? {
            report_open_transaction();
            let problem = "beginning a transaction: the connection was inside another transaction";
            return Err(IssueError::Unavailable { problem: problem.to_owned(), source: None });
        }
        Ok(Self { connection: Some(connection), number, is_interrupted: false, deadline })
    }

    /// Runs `call` within the deadline. After an interruption every further call fails.
    async fn run<T>(
        &mut self,
        what: &str,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T>,
    ) -> Result<T> {
        let connection = self.connection.as_mut().filter(|_| !self.is_interrupted);
        let Some(connection) = connection else {
            let problem = format!("{what}: an earlier call of this transaction was interrupted");
            return Err(IssueError::Unavailable { problem, source: None });
        };
        // Remains set if this future is dropped.
        self.is_interrupted = true;
        let result = tokio::time::timeout(self.deadline, call(connection)).await;
        self.is_interrupted = result.is_err();
        result.unwrap_or_else(|_| Err(timed_out(what, self.deadline)))
    }
}

#[async_trait]
impl Transaction for PostgresTransaction {
    async fn record(
        &mut self,
        events: &[NewEvent],
        debounce: &DebounceWindow,
    ) -> Vec<Result<Recorded>> {
        let recording = self.run("recording events", async |connection| {
            Ok(record_in(connection, events, debounce).await)
        });
        recording.await.unwrap_or_else(|error| reject_all(events.len(), &error))
    }

    async fn write_outbox(
        &mut self,
        issue_id: IssueId,
        rows: &[KeyedOutboxRow],
    ) -> Result<Vec<OutboxWritten>> {
        self.run("writing to the outbox", async |connection| {
            outbox_in(connection, issue_id, rows).await
        })
        .await
    }

    fn connection(&mut self) -> StoreConnection<'_> {
        let connection = self
            .connection
            .as_mut()
            .expect("only the commit takes the connection, and it consumes the transaction");
        StoreConnection::Postgres(connection)
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        // Division by zero if this is a different transaction; the server skips the `COMMIT` then.
        let commit = format!(
            "SELECT 1 / coalesce((current_setting('headwater.transaction', true) = '{}')::int, 0); COMMIT",
            self.number
        );
        let committing = self.run("committing", async |connection| {
            let committed = connection.execute(sqlx::raw_sql(AssertSqlSafe(commit))).await;
            committed.map(|_| ()).map_err(|error| broken("committing", error))
        });
        committing.await?;
        if let Some(connection) = self.connection.take() {
            connection.release_after_commit();
        }
        Ok(())
    }
}

impl Drop for PostgresTransaction {
    /// Rolls back on a task. The connection returns to the pool only if that succeeds within the deadline.
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take().filter(|_| !self.is_interrupted) else {
            return;
        };
        // Without a runtime the process is ending, and the connection with it.
        let Ok(runtime) = Handle::try_current() else { return };
        let rollback = async move {
            connection.execute(sqlx::raw_sql("ROLLBACK")).await?;
            connection.release().await
        };
        let deadline = self.deadline;
        runtime.spawn(async move {
            match tokio::time::timeout(deadline, rollback).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::debug!(%error, "a transaction was rolled back by closing its connection");
                }
                Err(_) => tracing::debug!("a transaction was rolled back by closing its connection"),
            }
        });
    }
}

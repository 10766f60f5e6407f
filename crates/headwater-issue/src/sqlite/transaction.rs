//! Caller's transactions on SQLite.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use serde_json::Value;
use sqlx::sqlite::SqliteConnection;
use sqlx::{Error, Row};
use tokio::sync::Notify;

use super::file_identity::FileIdentity;
use super::statements::json_rows;
use super::{WriteTx, record};
use crate::connect::with_deadline;
use crate::error::{IssueError, Result};
use crate::event_batch::{EventBatch, reject_all};
use crate::issue::{DebounceWindow, IssueId, NewEvent, OutboxId, Recorded};
use crate::outbox::types::{KeyedOutboxRow, OutboxWritten, caller_key};
use crate::row_decoding::database_error;
use crate::transaction::{StoreConnection, Transaction};
use crate::validate;

/// Stores events inside a caller's transaction; issues are queued at the commit. Nudge after the commit.
///
/// Begin the transaction with `BEGIN IMMEDIATE`; otherwise the first write may fail with `SQLITE_BUSY`. Roll back on
/// `Unavailable`; other errors concern single events and leave the transaction usable.
pub async fn record_in(
    connection: &mut SqliteConnection,
    events: &[NewEvent],
    debounce: &DebounceWindow,
) -> Vec<Result<Recorded>> {
    record_at(connection, events, debounce, SystemClock.now()).await
}

async fn record_at(
    connection: &mut SqliteConnection,
    events: &[NewEvent],
    debounce: &DebounceWindow,
    now: Timestamp,
) -> Vec<Result<Recorded>> {
    let batch = match debounce.validate().and_then(|()| EventBatch::prepare(events)) {
        Ok(batch) => batch,
        Err(error) => return reject_all(events.len(), &error),
    };
    match record::record(connection, &batch.events, debounce, now).await {
        Ok(stored) => {
            let needs_retry = batch.needs_retry(&stored);
            let mut results = batch.into_results(&stored);
            for index in needs_retry {
                let alone = std::slice::from_ref(&events[index]);
                results[index] =
                    Box::pin(record_at(connection, alone, debounce, now)).await.remove(0);
            }
            results
        }
        Err(error) => reject_all(events.len(), &database_error("recording events", error)),
    }
}

/// Writes outbox rows of an issue inside a caller's transaction, like
/// [`Transaction::write_outbox`](crate::Transaction::write_outbox). Deliverers find them by polling every second; a
/// transaction of [`Store::begin`](crate::Store::begin) wakes those of its process at once.
///
/// Begin the transaction with `BEGIN IMMEDIATE`.
pub async fn outbox_in(
    connection: &mut SqliteConnection,
    issue_id: IssueId,
    rows: &[KeyedOutboxRow],
) -> Result<Vec<OutboxWritten>> {
    outbox_at(connection, issue_id, rows, SystemClock.now()).await
}

async fn outbox_at(
    connection: &mut SqliteConnection,
    issue_id: IssueId,
    rows: &[KeyedOutboxRow],
    now: Timestamp,
) -> Result<Vec<OutboxWritten>> {
    validate::keyed_outbox(rows)?;
    if rows.is_empty() {
        return Ok(vec![]);
    }
    let failed = |error| database_error("writing to the outbox", error);
    let identity = identity_of(connection, issue_id).await.map_err(failed)?;
    let Some(identity) = identity else {
        return Err(IssueError::NotFound { what: format!("issue {issue_id}") });
    };
    let keys: Vec<String> =
        rows.iter().map(|one| caller_key(&identity, issue_id, &one.key)).collect();
    let known = known_rows(connection, &keys).await.map_err(failed)?;
    let differs = |(one, key): (&KeyedOutboxRow, &String)| {
        known.get(key).is_some_and(|known| {
            let row = &one.row;
            known.content != [row.kind.as_str(), row.target.as_str(), row.payload.as_str()]
        })
    };
    if let Some(index) = rows.iter().zip(&keys).position(differs) {
        return Err(IssueError::OutboxConflict { issue_id, key: rows[index].key.clone() });
    }
    let mut results = Vec::with_capacity(rows.len());
    for (one, key) in rows.iter().zip(&keys) {
        results.push(match known.get(key) {
            Some(known) => OutboxWritten { id: known.id, duplicate: true },
            None => {
                let id = super::outbox::insert(connection, issue_id, &one.row, key, now);
                OutboxWritten { id: id.await.map_err(failed)?, duplicate: false }
            }
        });
    }
    Ok(results)
}

/// The identity of the database, if the issue exists.
async fn identity_of(
    connection: &mut SqliteConnection,
    issue_id: IssueId,
) -> Result<Option<String>, Error> {
    let row = sqlx::query("SELECT identity FROM headwater_identity, issues WHERE issues.id = ?1")
        .bind(issue_id.0)
        .fetch_optional(connection)
        .await?;
    row.map(|row| row.try_get(0)).transpose()
}

/// An existing row: its id, and its kind, target and payload.
struct ExistingOutboxRow {
    id: OutboxId,
    content: [String; 3],
}

async fn known_rows(
    connection: &mut SqliteConnection,
    keys: &[String],
) -> Result<HashMap<String, ExistingOutboxRow>, Error> {
    let rows = sqlx::query(
        "SELECT idempotency_key, id, kind, target, payload FROM outbox
         WHERE idempotency_key IN (SELECT value FROM json_each(?1))",
    )
    .bind(json_rows(keys.iter().map(|key| Value::from(key.as_str())).collect()))
    .fetch_all(connection)
    .await?;
    let read = |row: &sqlx::sqlite::SqliteRow| {
        let content = [row.try_get(2)?, row.try_get(3)?, row.try_get(4)?];
        Ok((row.try_get(0)?, ExistingOutboxRow { id: OutboxId(row.try_get(1)?), content }))
    };
    rows.iter().map(read).collect()
}

/// A transaction on the writer connection.
///
/// After a call that was cancelled, timed out or failed with `Unavailable`, a part of it may be in the transaction: every
/// further call fails, also the commit.
pub(super) struct SqliteTransaction {
    tx: WriteTx,
    deadline: Duration,
    file: FileIdentity,
    wake: Arc<Notify>,
    wakes: bool,
    is_interrupted: bool,
}

impl std::fmt::Debug for SqliteTransaction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteTransaction").finish_non_exhaustive()
    }
}

impl SqliteTransaction {
    pub(super) fn new(
        tx: WriteTx,
        deadline: Duration,
        file: FileIdentity,
        wake: Arc<Notify>,
    ) -> Self {
        Self { tx, deadline, file, wake, wakes: false, is_interrupted: false }
    }

    /// Runs `call` within the deadline.
    async fn run<T>(
        &mut self,
        what: &str,
        call: impl AsyncFnOnce(&mut WriteTx) -> Result<T>,
    ) -> Result<T> {
        if self.is_interrupted {
            let problem = format!("{what}: an earlier call of this transaction was interrupted");
            return Err(IssueError::Unavailable { problem, source: None });
        }
        // Remains set if this future is dropped.
        self.is_interrupted = true;
        let result = with_deadline(self.deadline, what, call(&mut self.tx)).await;
        self.is_interrupted = matches!(result, Err(IssueError::Unavailable { .. }));
        result
    }
}

#[async_trait]
impl Transaction for SqliteTransaction {
    async fn record(
        &mut self,
        events: &[NewEvent],
        debounce: &DebounceWindow,
    ) -> Vec<Result<Recorded>> {
        let recording = self.run("recording events", async |WriteTx { transaction, now }| {
            let results = record_at(transaction, events, debounce, *now).await;
            match results.iter().find(|one| matches!(one, Err(IssueError::Unavailable { .. }))) {
                Some(Err(error)) => Err(error.clone()),
                _ => Ok(results),
            }
        });
        recording.await.unwrap_or_else(|error| reject_all(events.len(), &error))
    }

    async fn write_outbox(
        &mut self,
        issue_id: IssueId,
        rows: &[KeyedOutboxRow],
    ) -> Result<Vec<OutboxWritten>> {
        let writing = self.run("writing to the outbox", async |WriteTx { transaction, now }| {
            outbox_at(transaction, issue_id, rows, *now).await
        });
        let written = writing.await?;
        self.wakes |= written.iter().any(|one| !one.duplicate);
        Ok(written)
    }

    fn connection(&mut self) -> StoreConnection<'_> {
        StoreConnection::Sqlite(&mut self.tx.transaction)
    }

    async fn commit(mut self: Box<Self>) -> Result<()> {
        self.run("committing", async |_| Ok(())).await?;
        let Self { tx, deadline, file, wake, wakes, .. } = *self;
        let commit = async {
            let committed = tx.transaction.commit().await.and_then(|()| file.check());
            committed.map_err(|error| database_error("committing", error))
        };
        with_deadline(deadline, "committing", commit).await?;
        if wakes {
            wake.notify_one();
        }
        Ok(())
    }
}

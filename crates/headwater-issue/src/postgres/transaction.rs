//! Events and outbox rows inside a transaction of the caller.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Error, Postgres, Row};

use super::record;
use crate::check;
use crate::deadline::within;
use crate::delivery::{KeyedOutbox, OutboxWritten};
use crate::error::{IssueError, Result};
use crate::issue::{IssueId, NewEvent, OutboxId, Quiet, Recorded};
use crate::prepared::{Batch, refuse_all};
use crate::rows::database_error;
use crate::transaction::{Connection, Transaction};

/// Stores events inside a transaction of your own; nothing is queued before you commit. Nudge after that.
///
/// The issues of these events stay locked until you commit, so do that soon. The isolation level must be the default,
/// `READ COMMITTED`. Roll back on `Unavailable`; `Invalid`, `UnknownIntegration` and `DedupConflict` concern single
/// events and leave the transaction usable.
pub async fn record_in(
    connection: &mut PgConnection,
    events: &[NewEvent],
    quiet: &Quiet,
) -> Vec<Result<Recorded>> {
    let batch = match quiet.check().and_then(|()| Batch::prepare(events)) {
        Ok(batch) => batch,
        Err(error) => return refuse_all(events.len(), &error),
    };
    match record::record(connection, &batch.events, quiet).await {
        Ok(stored) => {
            let undecided = batch.undecided(&stored);
            let mut answers = batch.answer(&stored);
            for index in undecided {
                let alone = std::slice::from_ref(&events[index]);
                answers[index] = Box::pin(record_in(connection, alone, quiet)).await.remove(0);
            }
            answers
        }
        Err(error) => refuse_all(events.len(), &broken("recording events", error)),
    }
}

/// Puts rows into the outbox of an issue inside a transaction of your own, as
/// [`Transaction::write_outbox`](crate::Transaction::write_outbox) does. Deliverers are told when you commit.
///
/// The issue stays locked until then. The isolation level must be the default, `READ COMMITTED`.
pub async fn outbox_in(
    connection: &mut PgConnection,
    issue_id: IssueId,
    rows: &[KeyedOutbox],
) -> Result<Vec<OutboxWritten>> {
    check::keyed_outbox(rows)?;
    if rows.is_empty() {
        return Ok(vec![]);
    }
    let texts = |text: fn(&KeyedOutbox) -> &str| rows.iter().map(text).collect::<Vec<_>>();
    let written = sqlx::query("SELECT * FROM headwater_outbox_1($1, $2, $3, $4, $5)")
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
    let mut answers = Vec::with_capacity(rows.len());
    for (one, row) in rows.iter().zip(&written) {
        let (written, same) =
            read(row).map_err(|error| database_error("reading the outbox", error))?;
        if !same {
            return Err(IssueError::OutboxConflict { issue_id, key: one.key.clone() });
        }
        answers.push(written);
    }
    Ok(answers)
}

/// The transaction is broken, whatever the cause was.
fn broken(what: &str, error: Error) -> IssueError {
    let problem = format!("{what}: {error}");
    IssueError::Unavailable { problem, source: Some(Arc::new(error)) }
}

/// A transaction on a connection of the store.
#[derive(Debug)]
pub(super) struct PostgresTransaction {
    pub(super) transaction: sqlx::Transaction<'static, Postgres>,
    pub(super) deadline: Duration,
}

#[async_trait]
impl Transaction for PostgresTransaction {
    async fn record(&mut self, events: &[NewEvent], quiet: &Quiet) -> Vec<Result<Recorded>> {
        let call = async { Ok(record_in(&mut self.transaction, events, quiet).await) };
        let answers = within(self.deadline, "recording events", call).await;
        answers.unwrap_or_else(|error| refuse_all(events.len(), &error))
    }

    async fn write_outbox(
        &mut self,
        issue_id: IssueId,
        rows: &[KeyedOutbox],
    ) -> Result<Vec<OutboxWritten>> {
        let call = outbox_in(&mut self.transaction, issue_id, rows);
        within(self.deadline, "writing to the outbox", call).await
    }

    fn connection(&mut self) -> Connection<'_> {
        Connection::Postgres(&mut self.transaction)
    }

    async fn commit(self: Box<Self>) -> Result<()> {
        let Self { transaction, deadline } = *self;
        let commit =
            async { transaction.commit().await.map_err(|error| broken("committing", error)) };
        within(deadline, "committing", commit).await
    }
}

//! Caller's transactions: the caller's tables and the tables of this crate change together.
//!
//! Upstream: callers with tables in the same database; [`Store::begin`](crate::Store::begin) begins a transaction.
//! Downstream: `sqlite` and `postgres`. Guarantees: nothing is visible before the commit; dropping rolls back;
//! deliverers are notified of outbox rows at the commit. The issues it touched stay locked until then, and on SQLite
//! every other write of the process waits: commit soon, and do not call the store meanwhile. Not here: nudges. The
//! caller sends them after the commit (`Nudger::nudge_recorded`), or the sweep does.

use std::any::Any;

use async_trait::async_trait;

use crate::error::Result;
use crate::issue::{DebounceWindow, IssueId, NewEvent, Recorded};
use crate::outbox::types::{KeyedOutboxRow, OutboxWritten};

/// A transaction in progress. After `Unavailable` it can only be dropped; after any other error it is still usable.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use headwater_issue::{DebounceWindow, KeyedOutboxRow, NewEvent, NewOutboxRow, OutboxKind, StoreConnection};
/// # use headwater_issue::{StoreOptions, connect};
/// let store = connect("sqlite::memory:", &StoreOptions::default()).await?;
/// store.ensure_integration("desk", "desk").await?;
///
/// let mut transaction = store.begin().await?;
/// match transaction.connection() {
///     StoreConnection::Sqlite(sqlite) => {
///         sqlx::query("CREATE TABLE tickets (id TEXT PRIMARY KEY)").execute(&mut *sqlite).await?;
///         sqlx::query("INSERT INTO tickets VALUES ('42')").execute(&mut *sqlite).await?;
///     }
///     other => panic!("expected a SQLite connection, got {other:?}"),
/// }
/// let event = NewEvent::new("desk", "42", "message", r#"{"text":"My parcel is late."}"#);
/// let recorded = transaction.record(&[event], &DebounceWindow::default()).await.remove(0)?;
/// let (target, payload) = ("ticket_events".to_owned(), r#"{"type":"TICKET_CREATED"}"#.to_owned());
/// let row = NewOutboxRow { kind: OutboxKind::Event, target, payload };
/// transaction.write_outbox(recorded.issue_id, &[KeyedOutboxRow { key: "created".into(), row }]).await?;
/// transaction.commit().await?;
/// assert_eq!(store.backlog().await?.outbox_pending, 1);
/// # Ok(()) }
/// # #[cfg(not(feature = "sqlite"))] fn main() {}
/// ```
#[async_trait]
pub trait Transaction: Send + std::fmt::Debug {
    /// Stores events like [`Store::record`](crate::Store::record); issues are queued at the commit.
    async fn record(
        &mut self,
        events: &[NewEvent],
        debounce: &DebounceWindow,
    ) -> Vec<Result<Recorded>>;

    /// Appends rows to the outbox of an issue, after the rows of earlier runs and before those of later runs.
    ///
    /// A row with a known key is not written again while the old row is retained (see
    /// [`SweepOptions::keep`](crate::SweepOptions::keep)): the same row is reported as a duplicate, a different row
    /// fails the call with [`OutboxConflict`](crate::IssueError::OutboxConflict). `NotFound` if the issue does not
    /// exist. At most [`OUTBOX_PER_RUN_MAX`](crate::limits::OUTBOX_PER_RUN_MAX) rows.
    async fn write_outbox(
        &mut self,
        issue_id: IssueId,
        rows: &[KeyedOutboxRow],
    ) -> Result<Vec<OutboxWritten>>;

    /// The connection, for the caller's own statements. Do not begin or end transactions on it.
    fn connection(&mut self) -> StoreConnection<'_>;

    /// Commits. After `Unavailable` the effect is unknown: repeat the whole transaction; its keys make that idempotent.
    async fn commit(self: Box<Self>) -> Result<()>;
}

/// The connection of a [`Transaction`] or a [`ReadConnection`].
#[derive(Debug)]
#[non_exhaustive]
pub enum StoreConnection<'a> {
    /// A PostgreSQL connection.
    #[cfg(feature = "postgres")]
    Postgres(&'a mut sqlx::PgConnection),
    /// A SQLite connection.
    #[cfg(feature = "sqlite")]
    Sqlite(&'a mut sqlx::SqliteConnection),
    /// A connection of a store outside this crate.
    Other(&'a mut (dyn Any + Send)),
}

/// A connection of a store, for reading the caller's own tables. To write, [`begin`](crate::Store::begin) a
/// transaction.
///
/// Return it with [`release`](ReadConnection::release) after the last statement. A PostgreSQL connection that is
/// dropped instead is closed, because a statement may still be running on it.
#[derive(Debug)]
pub struct ReadConnection(ReadConnectionInner);

#[derive(Debug)]
enum ReadConnectionInner {
    #[cfg(feature = "postgres")]
    Postgres(crate::postgres::Checkout),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::pool::PoolConnection<sqlx::Sqlite>),
    Other(Box<dyn Any + Send>),
}

impl ReadConnection {
    #[cfg(feature = "postgres")]
    pub(crate) fn postgres(checkout: crate::postgres::Checkout) -> Self {
        Self(ReadConnectionInner::Postgres(checkout))
    }

    #[cfg(feature = "sqlite")]
    pub(crate) fn sqlite(connection: sqlx::pool::PoolConnection<sqlx::Sqlite>) -> Self {
        Self(ReadConnectionInner::Sqlite(connection))
    }

    /// Wraps the connection of a store outside this crate.
    pub fn other(connection: Box<dyn Any + Send>) -> Self {
        Self(ReadConnectionInner::Other(connection))
    }

    /// The connection, for reading statements. A SQLite connection rejects writes.
    pub fn connection(&mut self) -> StoreConnection<'_> {
        match &mut self.0 {
            #[cfg(feature = "postgres")]
            ReadConnectionInner::Postgres(checkout) => StoreConnection::Postgres(checkout),
            #[cfg(feature = "sqlite")]
            ReadConnectionInner::Sqlite(connection) => StoreConnection::Sqlite(connection),
            ReadConnectionInner::Other(connection) => StoreConnection::Other(&mut **connection),
        }
    }

    /// Returns the connection to the pool, or closes it if it is no longer usable.
    pub async fn release(self) {
        #[cfg(feature = "postgres")]
        if let ReadConnectionInner::Postgres(checkout) = self.0
            && let Err(error) = checkout.release().await
        {
            tracing::debug!(%error, "a read connection was closed instead of returned to the pool");
        }
    }
}

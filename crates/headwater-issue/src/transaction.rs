//! A transaction of the caller's own on a store: rows of his tables and ours, committed together or not at all.
//!
//! Upstream: whoever keeps tables beside ours in the same database; [`Store::begin`](crate::Store::begin) begins one.
//! Downstream: the folders `sqlite` and `postgres`. Promises: nothing shows before the commit; dropping it rolls back; what
//! was put into the outbox is announced when it is committed. The issues it touched stay locked until then, and on SQLite
//! every other write of the process waits: commit soon, and call nothing of the store meanwhile.
//! Not here: nudges, which are the caller's to send after the commit (`Nudger::after`), or the sweep's.

use std::any::Any;

use async_trait::async_trait;

use crate::delivery::{KeyedOutbox, OutboxWritten};
use crate::error::Result;
use crate::issue::{IssueId, NewEvent, Quiet, Recorded};

/// A transaction that has begun. After `Unavailable` only dropping it is of use; every other error leaves it usable.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use headwater_issue::{Connection, KeyedOutbox, NewEvent, NewOutbox, OutboxKind, Quiet, StoreOptions, connect};
/// let store = connect("sqlite::memory:", &StoreOptions::default()).await?;
/// store.ensure_integration("desk", "desk").await?;
///
/// let mut transaction = store.begin().await?;
/// match transaction.connection() {
///     Connection::Sqlite(sqlite) => {
///         sqlx::query("CREATE TABLE tickets (id TEXT PRIMARY KEY)").execute(&mut *sqlite).await?;
///         sqlx::query("INSERT INTO tickets VALUES ('42')").execute(&mut *sqlite).await?;
///     }
///     other => panic!("this store is a SQLite file, not {other:?}"),
/// }
/// let event = NewEvent::new("desk", "42", "message", r#"{"text":"My parcel is late."}"#);
/// let recorded = transaction.record(&[event], &Quiet::default()).await.remove(0)?;
/// let (target, payload) = ("ticket_events".to_owned(), r#"{"type":"TICKET_CREATED"}"#.to_owned());
/// let row = NewOutbox { kind: OutboxKind::Event, target, payload };
/// transaction.write_outbox(recorded.issue_id, &[KeyedOutbox { key: "created".into(), row }]).await?;
/// transaction.commit().await?;
/// assert_eq!(store.backlog().await?.outbox_pending, 1);
/// # Ok(()) }
/// # #[cfg(not(feature = "sqlite"))] fn main() {}
/// ```
#[async_trait]
pub trait Transaction: Send + std::fmt::Debug {
    /// Stores events as [`Store::record`](crate::Store::record) does; nothing is queued before the commit.
    async fn record(&mut self, events: &[NewEvent], quiet: &Quiet) -> Vec<Result<Recorded>>;

    /// Puts rows into the outbox of an issue, behind all that is there: those of earlier runs come first, those of later
    /// runs after it.
    ///
    /// A row whose key this issue has seen is not written again, as long as the old one is kept (see
    /// [`SweepOptions::keep`](crate::SweepOptions::keep)): the answer says so if it is the same row, else the whole
    /// call is [`OutboxConflict`](crate::IssueError::OutboxConflict). `NotFound` if there is no such issue. At most
    /// [`OUTBOX_PER_RUN_MAX`](crate::limits::OUTBOX_PER_RUN_MAX) rows.
    async fn write_outbox(
        &mut self,
        issue_id: IssueId,
        rows: &[KeyedOutbox],
    ) -> Result<Vec<OutboxWritten>>;

    /// The connection, for statements of your own. Leave beginning and ending to [`commit`](Transaction::commit) and drop.
    fn connection(&mut self) -> Connection<'_>;

    /// Makes all of it so. After `Unavailable` it may have happened: repeat the whole transaction, its keys make that safe.
    async fn commit(self: Box<Self>) -> Result<()>;
}

/// The connection of a [`Transaction`] or a [`ReadConnection`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Connection<'a> {
    /// To a Postgres server.
    #[cfg(feature = "postgres")]
    Postgres(&'a mut sqlx::PgConnection),
    /// To a SQLite file.
    #[cfg(feature = "sqlite")]
    Sqlite(&'a mut sqlx::SqliteConnection),
    /// Of a store that is not in this crate.
    Other(&'a mut (dyn Any + Send)),
}

/// A connection of a store, for reading tables of your own. To write, [`begin`](crate::Store::begin).
///
/// Hand it back with [`release`](ReadConnection::release) when the last statement has returned. One to PostgreSQL that is
/// dropped before that is closed, because a statement may still be running on it.
#[derive(Debug)]
pub struct ReadConnection(Reading);

#[derive(Debug)]
enum Reading {
    #[cfg(feature = "postgres")]
    Postgres(crate::postgres::Checkout),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::pool::PoolConnection<sqlx::Sqlite>),
    Other(Box<dyn Any + Send>),
}

impl ReadConnection {
    #[cfg(feature = "postgres")]
    pub(crate) fn postgres(checkout: crate::postgres::Checkout) -> Self {
        Self(Reading::Postgres(checkout))
    }

    #[cfg(feature = "sqlite")]
    pub(crate) fn sqlite(connection: sqlx::pool::PoolConnection<sqlx::Sqlite>) -> Self {
        Self(Reading::Sqlite(connection))
    }

    /// The connection of a store that is not in this crate.
    pub fn other(connection: Box<dyn Any + Send>) -> Self {
        Self(Reading::Other(connection))
    }

    /// The connection, for statements that read. One to SQLite refuses to write.
    pub fn connection(&mut self) -> Connection<'_> {
        match &mut self.0 {
            #[cfg(feature = "postgres")]
            Reading::Postgres(checkout) => Connection::Postgres(checkout),
            #[cfg(feature = "sqlite")]
            Reading::Sqlite(connection) => Connection::Sqlite(connection),
            Reading::Other(connection) => Connection::Other(&mut **connection),
        }
    }

    /// Hands the connection back for the next caller; one that cannot be used any more is closed.
    pub async fn release(self) {
        #[cfg(feature = "postgres")]
        if let Reading::Postgres(checkout) = self.0
            && let Err(error) = checkout.release().await
        {
            tracing::debug!(%error, "a connection that was read from is closed");
        }
    }
}

//! The connection pool. A connection returns to the pool only after its call has completed and the server has reported
//! that no transaction is open on it.
//!
//! Upstream: every call of the store. Downstream: the sqlx pool, which is private to this module.
//!
//! Reason: an sqlx future that is dropped halfway leaves its connection in an unknown state; after a cancelled `BEGIN`,
//! inside a transaction that sqlx does not know of. The next call on that connection would succeed, be confirmed, and
//! be rolled back when the connection closes. Therefore a [`Checkout`] that is dropped before
//! [`release`](Checkout::release) closes its connection, and `release` asks the server before the caller confirms
//! anything.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use metrics::counter;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Error, Executor, Postgres, Row};
use tokio::runtime::Handle;
use tracing::error;

use crate::connect::StoreOptions;
use crate::metrics::{CONNECTIONS_IN_TRANSACTION, IDLE_IN_TRANSACTION_TIMEOUTS};

/// A connection that was idle for longer is checked before use.
const IDLE_UNCHECKED_MAX: Duration = Duration::from_secs(1);

/// Lock timeout of a call; after it, the rest of a batch is retried without the locked row.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of returning a connection to the pool.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// SQL state of a session terminated because its transaction was idle for too long.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "25P03";

/// The connection pool of a store.
#[derive(Clone, Debug)]
pub(super) struct PgConnections {
    pool: PgPool,
    options: PgConnectOptions,
}

impl PgConnections {
    /// Creates the pool; it connects lazily.
    pub(super) fn new(connect: PgConnectOptions, options: &StoreOptions) -> Self {
        // The SQL functions rely on READ COMMITTED. The timeouts end what a cancelled caller left behind.
        let deadline = options.call_deadline.as_millis().max(1);
        let settings = format!(
            "SET default_transaction_isolation = 'read committed'; SET statement_timeout = {deadline};
             SET idle_in_transaction_session_timeout = {deadline}; SET lock_timeout = {}",
            options.call_deadline.min(LOCK_TIMEOUT).as_millis().max(1)
        );
        let pool = PgPoolOptions::new()
            .max_connections(options.connections_max)
            .acquire_timeout(options.call_deadline)
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if connection.is_in_transaction() || connection.should_flush() {
                        report_open_transaction();
                        return Ok(false);
                    }
                    if meta.idle_for > IDLE_UNCHECKED_MAX {
                        return is_outside_transaction(connection).await;
                    }
                    Ok(true)
                })
            })
            .after_connect(move |connection, _| {
                let settings = settings.clone();
                Box::pin(async move {
                    connection.execute(sqlx::raw_sql(AssertSqlSafe(settings))).await.map(|_| ())
                })
            })
            .connect_lazy_with(connect.clone());
        Self { pool, options: connect }
    }

    /// Acquires a connection from the pool. Cancel-safe.
    pub(super) async fn checkout(&self) -> Result<Checkout, Error> {
        Ok(Checkout { connection: self.pool.acquire().await?, may_return: false })
    }

    /// Runs `call` on a connection. `Ok` means that its changes are committed; a transaction left open is an error.
    ///
    /// Dropping this future closes the connection; the effect of `call` is unknown then.
    pub(super) async fn run<T>(
        &self,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut checkout = self.checkout().await?;
        let result = call(&mut checkout).await.inspect_err(report_timeout);
        match checkout.release().await {
            Err(error) if result.is_ok() => Err(error),
            _ => result,
        }
    }

    /// Runs `call`, which only reads, on a new connection outside the pool.
    pub(super) async fn run_on_new_connection<T>(
        &self,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut connection = PgConnection::connect_with(&self.options).await?;
        let result = call(&mut connection).await;
        // An error of closing does not affect what was read.
        let _ = connection.close().await;
        result
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

/// A connection acquired from the pool. If it is dropped without [`release`](Self::release), it is closed.
#[derive(Debug)]
pub struct Checkout {
    connection: PoolConnection<Postgres>,
    may_return: bool,
}

impl Checkout {
    /// Returns the connection to the pool if no transaction is open on it. Costs one round trip.
    ///
    /// On error the connection is closed, and its changes since the checkout may be rolled back: do not confirm them.
    pub async fn release(mut self) -> Result<(), Error> {
        if is_outside_transaction(&mut self.connection).await? {
            self.may_return = true;
            return Ok(());
        }
        Err(Error::Protocol("the connection was inside an unexpected open transaction".to_owned()))
    }

    /// Returns the connection to the pool after a successful `COMMIT`.
    pub(super) fn release_after_commit(mut self) {
        self.may_return = true;
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        // Without a runtime the process is ending, and the connection with it.
        let runtime = Handle::try_current();
        match runtime.ok().filter(|_| self.may_return) {
            // sqlx pings without a timeout when a connection is returned. On timeout the connection is closed.
            Some(runtime) => {
                let returning = self.connection.return_to_pool();
                runtime.spawn(tokio::time::timeout(RETURN_TIMEOUT, returning));
            }
            None => self.connection.close_on_drop(),
        }
    }
}

impl Deref for Checkout {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for Checkout {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}

/// Asks the server whether no transaction is open, after the statements still running on the connection.
///
/// Both timestamps are equal if the query starts its own transaction, and differ inside an older one. Requires the
/// simple query protocol: with a prepared statement they always differ. In a failed transaction the query is an error.
async fn is_outside_transaction(connection: &mut PgConnection) -> Result<bool, Error> {
    let check = sqlx::raw_sql("SELECT transaction_timestamp() = statement_timestamp()");
    let rows = connection.fetch_all(check).await.inspect_err(report_timeout)?;
    let is_outside = rows.first().map_or(Ok(false), |row| row.try_get(0))?;
    if !is_outside {
        report_open_transaction();
    }
    Ok(is_outside)
}

pub(super) fn report_open_transaction() {
    counter!(CONNECTIONS_IN_TRANSACTION).increment(1);
    error!(
        "a pooled connection was inside an open transaction and was closed; its changes were not confirmed"
    );
}

/// Reports a session that the server terminated because it was idle inside a transaction, which only a bug can cause.
pub(super) fn report_timeout(error: &Error) {
    let code = error.as_database_error().and_then(|error| error.code());
    if code.as_deref() == Some(IDLE_IN_TRANSACTION_TIMEOUT) {
        counter!(IDLE_IN_TRANSACTION_TIMEOUTS).increment(1);
        error!(%error, "PostgreSQL terminated a session that was idle inside a transaction; its changes are rolled back");
    }
}

//! PgConnections to the server, and the one rule of using them: a connection goes back to the pool only after its call ran to
//! its end and the server said that no transaction is open on it.
//!
//! Upstream: every call of the store. Downstream: the pool of sqlx, which nothing else can reach.
//!
//! Why: a future of sqlx that is dropped half-way leaves its connection in an unknown state, after a cancelled `BEGIN` inside
//! an open transaction that sqlx does not know of. The next call on such a connection would be answered, confirmed by us, and
//! rolled back when the connection ends. So a [`Checkout`] that is dropped before [`release`](Checkout::release) closes its
//! connection, and `release` asks the server before the caller may confirm anything.

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

/// A connection that was idle for this long is checked before it is used.
const IDLE_TRUST: Duration = Duration::from_secs(1);

/// How long a call waits for a row that another transaction has locked; then the rest of its batch goes on without that row.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(1);

/// How long a connection may take to return to the pool.
const RETURN_MAX: Duration = Duration::from_secs(5);

/// SQL state of a session that the server ended because its transaction was idle for too long.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "25P03";

/// The connections of a store.
#[derive(Clone, Debug)]
pub(super) struct PgConnections {
    pool: PgPool,
    options: PgConnectOptions,
}

impl PgConnections {
    /// Connects when the first call needs a connection.
    pub(super) fn new(connect: PgConnectOptions, options: &StoreOptions) -> Self {
        // What the functions rely on: each statement sees what was committed before it. What a lost caller left behind
        // ends with its deadline.
        let deadline = options.call_deadline.as_millis().max(1);
        let settings = format!(
            "SET default_transaction_isolation = 'read committed'; SET statement_timeout = {deadline};
             SET idle_in_transaction_session_timeout = {deadline}; SET lock_timeout = {}",
            options.call_deadline.min(LOCK_WAIT_MAX).as_millis().max(1)
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
                    if meta.idle_for > IDLE_TRUST {
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

    /// Takes a connection out of the pool, or makes one. Cancel-safe.
    pub(super) async fn checkout(&self) -> Result<Checkout, Error> {
        Ok(Checkout { connection: self.pool.acquire().await?, may_return: false })
    }

    /// Runs `call` on a connection. `Ok` means that what `call` did is committed, unless `call` left a transaction of its own
    /// open on purpose, which is an error.
    ///
    /// Dropping this future closes the connection; whether `call` took effect is unknown then.
    pub(super) async fn run<T>(
        &self,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut checkout = self.checkout().await?;
        let answer = call(&mut checkout).await.inspect_err(report_timeout);
        match checkout.release().await {
            Err(error) if answer.is_ok() => Err(error),
            _ => answer,
        }
    }

    /// Runs `call`, which only reads, on a connection that is made for it and shares nothing with the pool.
    pub(super) async fn run_apart<T>(
        &self,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut connection = PgConnection::connect_with(&self.options).await?;
        let answer = call(&mut connection).await;
        // What was read stays so, however the connection ends.
        let _ = connection.close().await;
        answer
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }
}

/// A connection that is out of the pool. Dropped before it is released, it is closed, and with it ends what it was doing.
#[derive(Debug)]
pub struct Checkout {
    connection: PoolConnection<Postgres>,
    may_return: bool,
}

impl Checkout {
    /// Returns the connection to the pool if no transaction is open on it, at the cost of one round trip.
    ///
    /// An error means that the connection is closed instead, and that what was done on it since the checkout may be rolled
    /// back: do not confirm it.
    pub async fn release(mut self) -> Result<(), Error> {
        if is_outside_transaction(&mut self.connection).await? {
            self.may_return = true;
            return Ok(());
        }
        Err(Error::Protocol(
            "the connection was inside a transaction that no call will commit".to_owned(),
        ))
    }

    /// Returns the connection after a statement that ended its transaction, which the caller has seen succeed.
    pub(super) fn release_after_commit(mut self) {
        self.may_return = true;
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        // Without a runtime the process ends, and the connection with it.
        let runtime = Handle::try_current();
        match runtime.ok().filter(|_| self.may_return) {
            // sqlx pings on the way back and waits for the reply for ever. Given up, the connection is closed and the next
            // caller may make another one.
            Some(runtime) => {
                let returning = self.connection.return_to_pool();
                runtime.spawn(tokio::time::timeout(RETURN_MAX, returning));
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

/// Asks the server whether no transaction is open, after waiting for whatever still runs on the connection.
///
/// Both times are those of the message when it begins its own transaction, and differ inside an older one. The simple
/// query protocol matters: with a prepared statement, the times differ always. In a failed transaction it is an error.
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
        "a pooled connection was inside an open transaction and is closed; nothing it did is confirmed"
    );
}

/// Reports a session that the server ended because it was idle inside a transaction: nothing of ours does that on purpose.
pub(super) fn report_timeout(error: &Error) {
    let code = error.as_database_error().and_then(|error| error.code());
    if code.as_deref() == Some(IDLE_IN_TRANSACTION_TIMEOUT) {
        counter!(IDLE_IN_TRANSACTION_TIMEOUTS).increment(1);
        error!(%error, "PostgreSQL ended a session that was idle inside a transaction; its changes are rolled back");
    }
}

//! Opens a store from its URL, and bounds database calls by a deadline.
//!
//! Upstream: the caller, and the stores for `with_deadline`. Downstream: `sqlite` and `postgres`.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};

use crate::error::{IssueError, Result};
use crate::store::Store;

/// What opening a store may change in the schema of its database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchemaPolicy {
    /// Applies missing migrations.
    #[default]
    Migrate,
    /// Changes nothing: fails with [`IssueError::OutdatedSchema`] if migrations are missing.
    Require,
}

/// Options for opening a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Clock of a SQLite store; a PostgreSQL store uses the server's clock. Default: the system clock.
    pub clock: Arc<dyn Clock>,
    /// Timeout of every call; a call that exceeds it fails with `Unavailable`. Default: 10 s.
    pub call_deadline: Duration,
    /// Maximum number of open connections. Default: 16. SQLite always writes through one.
    pub connections_max: u32,
    /// Whether missing migrations are applied, those of [`Store::migrate`] included. Default: yes.
    pub schema: SchemaPolicy,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            call_deadline: Duration::from_secs(10),
            connections_max: 16,
            schema: SchemaPolicy::default(),
        }
    }
}

/// Runs `call` and fails with `Unavailable` after `deadline`; the effect of the call is unknown then.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) async fn with_deadline<T>(
    deadline: Duration,
    what: &str,
    call: impl Future<Output = Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(deadline, call).await {
        Ok(result) => result,
        Err(_) => Err(timed_out(what, deadline)),
    }
}

/// The error of a call that reached its deadline.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
pub(crate) fn timed_out(what: &str, deadline: Duration) -> IssueError {
    let problem = format!("{what}: no reply within {deadline:?}");
    IssueError::Unavailable { problem, source: None }
}

/// Opens the store at `url` and applies missing migrations, unless [`StoreOptions::schema`] forbids it.
///
/// | URL | store |
/// |---|---|
/// | `sqlite:FILE` | one file, created if missing |
/// | `sqlite::memory:` | in memory, lost when the store is closed |
/// | `postgres://user:password@host:port/database` | a PostgreSQL server |
pub async fn connect(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    if options.call_deadline.is_zero() || options.connections_max == 0 {
        let problem = "must be greater than zero";
        return Err(IssueError::invalid("call_deadline or connections_max", problem));
    }
    let opened = match url.split_once(':') {
        Some(("sqlite", _)) => open_sqlite(url, options).await,
        Some(("postgres" | "postgresql", _)) => open_postgres(url, options).await,
        _ => Err(IssueError::invalid(
            "the database URL",
            "must begin with `sqlite:` or `postgres://`",
        )),
    };
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    return opened.map_err(crate::row_decoding::connect_error);
    #[cfg(not(any(feature = "sqlite", feature = "postgres")))]
    opened
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    crate::sqlite::open(url, options).await
}

#[cfg(not(feature = "sqlite"))]
async fn open_sqlite(_url: &str, _options: &StoreOptions) -> Result<Arc<dyn Store>> {
    Err(IssueError::invalid(
        "the database URL",
        "this program was built without the feature `sqlite`",
    ))
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    crate::postgres::open(url, options).await
}

#[cfg(not(feature = "postgres"))]
async fn open_postgres(_url: &str, _options: &StoreOptions) -> Result<Arc<dyn Store>> {
    Err(IssueError::invalid(
        "the database URL",
        "this program was built without the feature `postgres`",
    ))
}

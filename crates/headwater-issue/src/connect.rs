//! The one place where a URL becomes a store.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};

use crate::error::{IssueError, Result};
use crate::store::Store;

/// How to open a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// The time, for SQLite, which has no server's clock to go by. Default: the machine's.
    pub clock: Arc<dyn Clock>,
    /// How long any call may take before it fails with `Unavailable`. Default: 10 s.
    pub call_deadline: Duration,
    /// The most connections to keep open. Default: 16; SQLite always writes through one.
    pub connections_max: u32,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            call_deadline: Duration::from_secs(10),
            connections_max: 16,
        }
    }
}

/// Opens the store that `url` names, and brings its tables up to date.
///
/// | URL | store |
/// |---|---|
/// | `sqlite:FILE` | one file, created if it is missing |
/// | `sqlite::memory:` | in this process, gone with it |
/// | `postgres://user:password@host:port/database` | a Postgres server |
pub async fn connect(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    if options.call_deadline.is_zero() || options.connections_max == 0 {
        let problem = "it is zero; no call could succeed";
        return Err(IssueError::invalid("call_deadline or connections_max", problem));
    }
    let opened = match url.split_once(':') {
        Some(("sqlite", _)) => open_sqlite(url, options).await,
        Some(("postgres" | "postgresql", _)) => open_postgres(url, options).await,
        _ => Err(IssueError::invalid(
            "the database URL",
            "it must begin with sqlite: or postgres://",
        )),
    };
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    return opened.map_err(crate::rows::opening_error);
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

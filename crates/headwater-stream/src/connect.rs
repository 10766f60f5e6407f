//! Opens a backend from its URL.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;
use crate::clock::{Clock, SystemClock};
use crate::error::{Result, StreamError};

/// How to open a backend.
#[derive(Clone, Debug)]
pub struct Options {
    /// The clock of the embedded backend; Redis uses the server's. Default: the system clock.
    pub clock: Arc<dyn Clock>,
    /// Maximum duration of a call before it fails with `Unavailable`; the wait of a read is added. Default: 5 s.
    pub call_deadline: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { clock: Arc::new(SystemClock), call_deadline: Duration::from_secs(5) }
    }
}

/// Opens the backend that `url` names.
///
/// | URL | backend |
/// |---|---|
/// | `embedded:memory` | in memory; the data is lost when the process exits |
/// | `embedded:DIR` | in this process, durable in a directory; `?sync=always` (default) or `?sync=interval`, `?max_bytes=` of memory, `?compact_bytes=` of log between snapshots |
/// | `redis://[user:password@]host:port/[database]` | one Redis server |
/// | `rediss://…` | the same over TLS; `?ca=FILE` trusts this certificate |
/// | `redis-sentinel://host:port,host:port/service[/database]` | the primary that Sentinel names |
/// | `redis-cluster://host:port,host:port` | a Redis Cluster |
pub async fn connect(url: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    if options.call_deadline.is_zero() {
        return Err(StreamError::invalid("call_deadline", "it must be greater than zero"));
    }
    match url.split_once(':') {
        Some(("embedded", location)) => open_embedded(location, options).await,
        Some(("redis" | "rediss" | "redis-sentinel" | "redis-cluster", _)) => {
            open_redis(url, options).await
        }
        _ => Err(StreamError::invalid(
            "the stream URL",
            "it must start with embedded:, redis://, rediss://, redis-sentinel:// or redis-cluster://",
        )),
    }
}

/// Validates a stream URL as [`connect`] does, without opening it. Fails with [`StreamError::Invalid`].
pub fn validate_url(url: &str) -> Result<()> {
    match url.split_once(':') {
        #[cfg(feature = "embedded")]
        Some(("embedded", location)) => crate::embedded::check_location(location),
        #[cfg(feature = "redis")]
        Some(("redis" | "rediss" | "redis-sentinel" | "redis-cluster", _)) => {
            crate::redis::validate_url(url)
        }
        // `connect` reports the error.
        _ => Ok(()),
    }
}

#[cfg(feature = "embedded")]
async fn open_embedded(location: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    crate::embedded::open(location, options).await
}

#[cfg(not(feature = "embedded"))]
async fn open_embedded(_location: &str, _options: &Options) -> Result<Arc<dyn Backend>> {
    Err(StreamError::invalid(
        "the stream URL",
        "this program was built without the feature `embedded`",
    ))
}

#[cfg(feature = "redis")]
async fn open_redis(url: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    crate::redis::open(url, options).await
}

#[cfg(not(feature = "redis"))]
async fn open_redis(_url: &str, _options: &Options) -> Result<Arc<dyn Backend>> {
    Err(StreamError::invalid(
        "the stream URL",
        "this program was built without the feature `redis`",
    ))
}

//! Opens a backend from its URL.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;
use crate::clock::{Clock, SystemClock};
use crate::credentials::CredentialProvider;
use crate::error::{Result, StreamError};

/// How to open a backend.
#[derive(Clone, Debug)]
pub struct Options {
    /// The clock of the embedded backend; Redis uses the server's. Default: the system clock.
    pub clock: Arc<dyn Clock>,
    /// Maximum duration of a call before it fails with `Unavailable`; the wait of a read is added. Default: 5 s.
    pub call_deadline: Duration,
    /// A Redis connection on which nothing was received for this long is checked with `PING`, and nothing else is written to it
    /// until the server has replied. Default: 5 s.
    pub silence_max: Duration,
    /// Credentials of Redis that change; `None` for those in the URL. Not used for Sentinels. Default: `None`.
    pub credentials: Option<Arc<dyn CredentialProvider>>,
    /// Whether missing flags of `notify-keyspace-events` are set on Redis. Without them, leases that expire are found by polling,
    /// some seconds later. Default: `true`.
    pub configure_notifications: bool,
    /// Open a Redis backend without a connection: the first call connects, and [`Backend::probe`] reports problems. Default:
    /// `false`, opening fails if the server cannot be used. The embedded backend ignores it.
    pub lazy: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            call_deadline: Duration::from_secs(5),
            silence_max: Duration::from_secs(5),
            credentials: None,
            configure_notifications: true,
            lazy: false,
        }
    }
}

/// Opens the backend that `url` names.
///
/// | URL | backend |
/// |---|---|
/// | `embedded:memory` | in memory; the data is lost when the process exits |
/// | `embedded:DIR` | in this process, durable in a directory; `?sync=always` (default) or `?sync=interval`, `?max_bytes=` of memory, `?compact_bytes=` of log between snapshots |
/// | `redis://[user:password@]host:port/[database]` | one Redis server |
/// | `rediss://…` | the same over TLS; `?ca=FILE` trusts this certificate, `?cert=FILE&key=FILE` is the client certificate, `?sni=NAME` the name of the server |
/// | `unix://[user:password@]/path?db=0` | one Redis server at a unix socket; also `redis+unix://` |
/// | `redis-sentinel://host:port,host:port/service[/database]` | the primary that Sentinel names; `?sentinel_user=` and `?sentinel_password=` for the Sentinels, `?tls=true` |
/// | `redis-cluster://host:port,host:port` | a Redis Cluster; `?tls=true` |
///
/// For Redis, `?client_name=` is the name of the connections in `CLIENT LIST` (default `headwater`), and `?prefix=` is what all keys and
/// channels begin with (default: nothing). Values are percent-encoded.
pub async fn connect(url: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    for (name, time) in
        [("call_deadline", options.call_deadline), ("silence_max", options.silence_max)]
    {
        if time.is_zero() {
            return Err(StreamError::invalid(name, "it must be greater than zero"));
        }
    }
    match url.split_once(':') {
        Some(("embedded", location)) => open_embedded(location, options).await,
        Some((scheme, _)) if is_redis(scheme) => open_redis(url, options).await,
        _ => Err(StreamError::invalid(
            "the stream URL",
            "it must start with embedded:, redis://, rediss://, unix://, redis-sentinel:// or redis-cluster://",
        )),
    }
}

fn is_redis(scheme: &str) -> bool {
    let known = ["redis", "rediss", "redis+unix", "unix", "redis-sentinel", "redis-cluster"];
    known.contains(&scheme)
}

/// Validates a stream URL as [`connect`] does, without opening it. Fails with [`StreamError::Invalid`].
pub fn validate_url(url: &str) -> Result<()> {
    match url.split_once(':') {
        #[cfg(feature = "embedded")]
        Some(("embedded", location)) => crate::embedded::check_location(location),
        #[cfg(feature = "redis")]
        Some((scheme, _)) if is_redis(scheme) => crate::redis::validate_url(url),
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

//! The backend trait: streams, delays, leases, registry and de-duplication behind one object.

use std::time::Duration;

use async_trait::async_trait;

use crate::clock::Timestamp;
use crate::dedup::Dedup;
use crate::delays::Delays;
use crate::error::Result;
use crate::leases::Leases;
use crate::registry::Registry;
use crate::streams::Streams;

/// All parts of a backend.
#[async_trait]
pub trait Backend: Streams + Delays + Leases + Registry + Dedup {
    /// Kind, address, version and detected capabilities of this backend, as of the last [`probe`](Self::probe).
    fn describe(&self) -> BackendDescription;

    /// Connects if necessary and describes the current state. Fails with `Invalid` if the server cannot be used with this URL, and
    /// otherwise as other calls do.
    async fn probe(&self) -> Result<BackendDescription> {
        self.now().await?;
        Ok(self.describe())
    }

    /// The hash slot of a key in a Redis Cluster; `None` if keys are not distributed. All keys of one atomic step must share a
    /// slot.
    fn cluster_slot(&self, key: &str) -> Option<u16>;

    /// Maximum duration of a call, during which it may be re-sent; `None` if there is no limit. Idempotency ids must be kept
    /// longer than this to prevent duplicates.
    fn call_deadline(&self) -> Option<Duration> {
        None
    }

    /// The current time of the backend: of the server's clock, or of the injected one.
    async fn now(&self) -> Result<Timestamp>;

    /// Identifies the run of the server that holds this key. It changes when the server restarts or another one takes over;
    /// then the newest writes may be missing. `None` if that cannot happen, or if the server does not tell.
    async fn server_run(&self, key: &str) -> Result<Option<String>> {
        let _ = key;
        Ok(None)
    }

    /// Completes calls in flight, makes them durable and closes the backend. Later calls fail with `Unavailable`.
    async fn close(&self) -> Result<()>;
}

/// Description of a backend, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendDescription {
    /// `embedded` or `redis`.
    pub kind: &'static str,
    /// Its address, without credentials.
    pub address: String,
    /// The server's version, if there is a server.
    pub version: Option<String>,
    /// Detected settings and capabilities: name and value.
    pub facts: Vec<(&'static str, String)>,
}

//! A backend is all seams together, behind one object.

use std::time::Duration;

use async_trait::async_trait;

use crate::clock::Timestamp;
use crate::dedup::Dedup;
use crate::delays::Delays;
use crate::error::Result;
use crate::leases::Leases;
use crate::registry::Registry;
use crate::streams::Streams;

/// Streams, delays, leases, registry and de-duplication in one place.
#[async_trait]
pub trait Backend: Streams + Delays + Leases + Registry + Dedup {
    /// What this backend is and which ways it chose when it was opened.
    fn describe(&self) -> Description;

    /// The hash slot of a key in a Redis Cluster; `None` where keys are not spread over servers. Things that one atomic
    /// step touches must share a slot.
    fn cluster_slot(&self, key: &str) -> Option<u16>;

    /// How long a call may take before it is given up, and may have been repeated until then; `None` where none is. Ids
    /// that are remembered for less do not keep a repeated call from counting twice.
    fn call_deadline(&self) -> Option<Duration> {
        None
    }

    /// The time by the clock that decides here: the server's, or the injected one.
    async fn now(&self) -> Result<Timestamp>;

    /// Finishes what was begun, makes it durable and stops. Later calls fail with `Unavailable`.
    async fn close(&self) -> Result<()>;
}

/// What a backend is, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// `embedded` or `redis`.
    pub kind: &'static str,
    /// Where it is, without credentials.
    pub address: String,
    /// The server's version, where there is a server.
    pub version: Option<String>,
    /// What was found and chosen at the start: name and value.
    pub facts: Vec<(&'static str, String)>,
}

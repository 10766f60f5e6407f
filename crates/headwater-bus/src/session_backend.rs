//! The journal of a bus: the backend that its sessions lie in, and the keys they have there.
//!
//! Upstream: a bus, which stores the events of sessions there. Downstream: `session`, which reads them back and keeps
//! what belongs to a session beside them.
//! Promises: a local bus has one, too, in memory; so sessions work the same on every bus.

use std::fmt;
use std::sync::Arc;

use headwater_stream::Backend;

use crate::error::Result;
use crate::keys::Keys;
use crate::name::Namespace;

/// Where the sessions of a bus lie. Clones are the same place.
#[derive(Clone)]
pub struct SessionBackend {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) keys: Keys,
    pub(crate) namespace: Namespace,
}

impl SessionBackend {
    /// A journal in a backend, behind a prefix of keys, in the namespace `default`.
    pub fn new(backend: Arc<dyn Backend>, prefix: &str) -> Result<Self> {
        let namespace = Namespace::new("default")?;
        Ok(Self { backend, keys: Keys::new(prefix)?, namespace })
    }
}

impl fmt::Debug for SessionBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let backend = self.backend.describe();
        f.debug_struct("SessionBackend")
            .field("backend", &backend.kind)
            .field("prefix", &self.keys.prefix())
            .finish_non_exhaustive()
    }
}

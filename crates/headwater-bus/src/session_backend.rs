//! The storage of a bus's sessions: a stream backend, its key names and the namespace.
//!
//! Upstream: a bus stores session events there. Downstream: `session` reads them and stores session metadata beside
//! them.

use std::fmt;
use std::sync::Arc;

use headwater_stream::Backend;

use crate::error::Result;
use crate::keys::Keys;
use crate::name::Namespace;

/// Storage of the sessions of a bus. Clones share it.
#[derive(Clone)]
pub struct SessionBackend {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) keys: Keys,
    pub(crate) namespace: Namespace,
}

impl SessionBackend {
    /// Storage in a backend, with a key prefix, in the namespace `default`.
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

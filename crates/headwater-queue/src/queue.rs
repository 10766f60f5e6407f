//! The queue: entry point of this crate, bound to one backend.
//!
//! Upstream: applications. Downstream: the backend; `metadata` caches the topics.

mod metadata;

use std::fmt;
use std::sync::Arc;

use headwater_stream::Backend;

use self::metadata::MetadataCache;
pub(crate) use self::metadata::{TopicCopy, UseExpired};
use crate::config::QueueConfig;
use crate::consumer::SharedTasks;
use crate::error::Result;
use crate::group::Coordinator;
use crate::keys::Layout;

/// Topics on one backend. Clones share the same queue.
#[derive(Clone)]
pub struct Queue {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) config: QueueConfig,
    pub(crate) coordinator: Coordinator,
    /// Background tasks shared by its subscriptions.
    pub(crate) shared_tasks: Arc<SharedTasks>,
    metadata: MetadataCache,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("backend", &self.inner.backend.describe()).finish()
    }
}

impl Queue {
    /// Creates a queue with default settings.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self::with_config(backend, QueueConfig::default()).expect("the default settings are valid")
    }

    /// Creates a queue. Fails if a setting is invalid.
    pub fn with_config(backend: Arc<dyn Backend>, config: QueueConfig) -> Result<Self> {
        config.validate()?;
        let coordinator = Coordinator::new(Arc::clone(&backend), config.clone());
        let inner = Inner {
            backend,
            config,
            coordinator,
            shared_tasks: Arc::default(),
            metadata: MetadataCache::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The backend of this queue.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.inner.backend
    }

    /// The key layout of topics created on this backend.
    pub(crate) fn layout(&self) -> Layout {
        let is_clustered = self.inner.backend.cluster_slot("").is_some();
        if is_clustered { Layout::Clustered } else { Layout::Partitioned }
    }
}

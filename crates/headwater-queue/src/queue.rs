//! The queue: entry point of this crate, bound to one backend.
//!
//! Upstream: applications. Downstream: the backend.
//! Guarantees: cached topic metadata is at most the topic's `refresh` old when it is used.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use headwater_stream::Backend;
use tokio::time::Instant;

use crate::config::QueueConfig;
use crate::consumer::SharedTasks;
use crate::error::Result;
use crate::group::Coordinator;
use crate::keys::Layout;
use crate::topic::{Topic, TopicName};

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
    topic_cache: Mutex<HashMap<TopicName, (Instant, Arc<Topic>)>>,
    /// Counts invalidations of `topic_cache`, for callers with a cache of their own.
    invalidations: AtomicU64,
}

/// Cached topics; beyond it, expired ones are evicted.
const TOPIC_CACHE_MAX: usize = 100_000;

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
            topic_cache: Mutex::default(),
            invalidations: AtomicU64::new(0),
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

    /// A topic, at most its `refresh` old. A topic that was not created is plain.
    pub(crate) async fn topic(&self, name: &TopicName) -> Result<Arc<Topic>> {
        Ok(self.topic_since(name).await?.1)
    }

    /// Like [`Self::topic`], with the time it was read.
    pub(crate) async fn topic_since(&self, name: &TopicName) -> Result<(Instant, Arc<Topic>)> {
        let now = Instant::now();
        if let Some((read_at, topic)) = self.inner.topic_cache().get(name)
            && now.duration_since(*read_at) < topic.policies.refresh
        {
            return Ok((*read_at, topic.clone()));
        }
        self.read_topic_with_time(name).await
    }

    /// Reads a topic from the backend.
    pub(crate) async fn read_topic(&self, name: &TopicName) -> Result<Arc<Topic>> {
        Ok(self.read_topic_with_time(name).await?.1)
    }

    async fn read_topic_with_time(&self, name: &TopicName) -> Result<(Instant, Arc<Topic>)> {
        // The age counts from before the request: the reply may be that old.
        let requested_at = Instant::now();
        let topic = Arc::new(Topic::read(&*self.inner.backend, name).await?);
        let mut topic_cache = self.inner.topic_cache();
        if topic_cache.len() >= TOPIC_CACHE_MAX {
            topic_cache
                .retain(|_, (at, topic)| requested_at.duration_since(*at) < topic.policies.refresh);
        }
        topic_cache.insert(name.clone(), (requested_at, topic.clone()));
        Ok((requested_at, topic))
    }

    /// Drops a topic from the cache after it was changed.
    pub(crate) fn invalidate(&self, name: &TopicName) {
        self.inner.topic_cache().remove(name);
        self.inner.invalidations.fetch_add(1, Ordering::Release);
    }

    /// Number of invalidations so far.
    pub(crate) fn invalidations(&self) -> u64 {
        self.inner.invalidations.load(Ordering::Acquire)
    }
}

impl Inner {
    fn topic_cache(&self) -> std::sync::MutexGuard<'_, HashMap<TopicName, (Instant, Arc<Topic>)>> {
        self.topic_cache.lock().expect("no code panics while it holds this lock")
    }
}

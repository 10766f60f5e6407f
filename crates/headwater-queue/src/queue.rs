//! The queue: entry point of this crate, bound to one backend.
//!
//! Upstream: applications. Downstream: the backend.
//! Guarantees: cached topic metadata is at most the topic's `refresh` old when it is used, except to settle pulled messages
//! while it cannot be read.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_stream::Backend;
use tokio::time::{Instant, timeout};
use tracing::warn;

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
    topic_cache: Mutex<HashMap<TopicName, TopicCacheEntry>>,
    /// Counts invalidations of `topic_cache`, for callers with a cache of their own.
    invalidations: AtomicU64,
}

#[derive(Clone)]
struct TopicCacheEntry {
    read_at: Instant,
    /// When it could not be read again.
    failed_at: Option<Instant>,
    topic: Arc<Topic>,
}

impl TopicCacheEntry {
    fn is_expired(&self, now: Instant) -> bool {
        now.duration_since(self.read_at) >= self.topic.policies.refresh
    }
}

/// How long a call that can use an expired topic waits for a fresh one, and the pause after an attempt that failed.
const REFRESH_WAIT_MAX: Duration = Duration::from_secs(1);
const REFRESH_RETRY_AFTER: Duration = Duration::from_secs(5);
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
        if let Some(cached) = self.inner.topic_cache().get(name)
            && !cached.is_expired(now)
        {
            return Ok((cached.read_at, Arc::clone(&cached.topic)));
        }
        self.read_topic_with_time(name).await
    }

    /// Like [`Self::topic`], but returns an expired topic if the metadata cannot be read in time. For callers that need the
    /// layout only: partitions are added, never removed.
    pub(crate) async fn topic_or_expired(&self, name: &TopicName) -> Result<Arc<Topic>> {
        let now = Instant::now();
        let cached = self.inner.topic_cache().get(name).cloned();
        let Some(cached) = cached.filter(|cached| cached.is_expired(now)) else {
            return self.topic(name).await;
        };
        if cached.failed_at.is_some_and(|at| now.duration_since(at) < REFRESH_RETRY_AFTER) {
            return Ok(cached.topic);
        }
        match timeout(REFRESH_WAIT_MAX, self.read_topic(name)).await {
            Ok(Ok(topic)) => return Ok(topic),
            Ok(Err(error)) if !error.is_transient() => return Err(error),
            Ok(Err(_)) | Err(_) => {}
        }
        warn!(topic = %name, "the metadata of the topic cannot be read; messages are settled with an older copy");
        if let Some(cached) = self.inner.topic_cache().get_mut(name) {
            cached.failed_at = Some(Instant::now());
        }
        Ok(cached.topic)
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
            topic_cache.retain(|_, cached| !cached.is_expired(requested_at));
        }
        let cached =
            TopicCacheEntry { read_at: requested_at, failed_at: None, topic: topic.clone() };
        topic_cache.insert(name.clone(), cached);
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
    fn topic_cache(&self) -> std::sync::MutexGuard<'_, HashMap<TopicName, TopicCacheEntry>> {
        self.topic_cache.lock().expect("no code panics while it holds this lock")
    }
}

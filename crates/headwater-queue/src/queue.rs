//! A queue: topics on one backend, as one process sees them.
//!
//! Upstream: applications. Downstream: the backend. Everything else of this crate begins here.
//! Promises: what it knows of a topic is at most `refresh` old when it is relied on.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use headwater_stream::Backend;
use tokio::time::Instant;

use crate::config::QueueConfig;
use crate::consumer::Consumers;
use crate::error::Result;
use crate::group::Coordinator;
use crate::keys::Layout;
use crate::topic::{Topic, TopicName};

/// Topics on one backend. Clones are the same queue.
#[derive(Clone)]
pub struct Queue {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) config: QueueConfig,
    pub(crate) coordinator: Coordinator,
    /// What its subscriptions share.
    pub(crate) consumers: Arc<Consumers>,
    topic_cache: Mutex<HashMap<TopicName, (Instant, Arc<Topic>)>>,
    /// Grows whenever something that is topic_cache was invalidations, for those who keep what they know elsewhere.
    invalidations: AtomicU64,
}

/// Topics that are remembered; beyond it, those that nobody refreshed go first.
const TOPIC_CACHE_MAX: usize = 100_000;

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("backend", &self.inner.backend.describe()).finish()
    }
}

impl Queue {
    /// A queue on a backend, with default settings.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self::with_config(backend, QueueConfig::default()).expect("the default settings are valid")
    }

    /// A queue with settings of its own.
    pub fn with_config(backend: Arc<dyn Backend>, config: QueueConfig) -> Result<Self> {
        config.validate()?;
        let coordinator = Coordinator::new(Arc::clone(&backend), config.clone());
        let inner = Inner {
            backend,
            config,
            coordinator,
            consumers: Arc::default(),
            topic_cache: Mutex::default(),
            invalidations: AtomicU64::new(0),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The backend it lives on.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.inner.backend
    }

    /// The layout of topics that are created here.
    pub(crate) fn layout(&self) -> Layout {
        let is_clustered = self.inner.backend.cluster_slot("").is_some();
        if is_clustered { Layout::Clustered } else { Layout::Partitioned }
    }

    /// A topic, as it was at most its `refresh` ago. One that nobody created is plain.
    pub(crate) async fn topic(&self, name: &TopicName) -> Result<Arc<Topic>> {
        Ok(self.topic_since(name).await?.1)
    }

    /// The same, with the time it was so.
    pub(crate) async fn topic_since(&self, name: &TopicName) -> Result<(Instant, Arc<Topic>)> {
        let now = Instant::now();
        if let Some((read_at, topic)) = self.inner.topic_cache().get(name)
            && now.duration_since(*read_at) < topic.policies.refresh
        {
            return Ok((*read_at, topic.clone()));
        }
        self.read_topic_with_time(name).await
    }

    /// A topic as it is now.
    pub(crate) async fn read_topic(&self, name: &TopicName) -> Result<Arc<Topic>> {
        Ok(self.read_topic_with_time(name).await?.1)
    }

    async fn read_topic_with_time(&self, name: &TopicName) -> Result<(Instant, Arc<Topic>)> {
        // Age counts from before the scope: the answer may be as old as that.
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

    /// Forgets what is topic_cache of a topic, after it was changed here.
    pub(crate) fn invalidate(&self, name: &TopicName) {
        self.inner.topic_cache().remove(name);
        self.inner.invalidations.fetch_add(1, Ordering::Release);
    }

    /// Another number than before if something was invalidations since.
    pub(crate) fn invalidations(&self) -> u64 {
        self.inner.invalidations.load(Ordering::Acquire)
    }
}

impl Inner {
    fn topic_cache(&self) -> std::sync::MutexGuard<'_, HashMap<TopicName, (Instant, Arc<Topic>)>> {
        self.topic_cache.lock().expect("no code panics while it holds this lock")
    }
}

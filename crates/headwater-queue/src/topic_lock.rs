//! A lock on a topic: growing and deleting it exclude each other.
//!
//! Upstream: `topics`. Downstream: a lease without background renewal, so that it expires if the holder dies.
//! Guarantees: of two processes that change a topic, one waits until the other releases the lock or its lease expires.
//! Not here: creating a topic, which is one atomic step.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{AcquireResult, Backend, Fence, HolderName, Renewal, unique_holder};
use tokio::time::Instant;
use tracing::warn;

use crate::error::{QueueError, Result};
use crate::keys;
use crate::queue::Queue;
use crate::topic::TopicName;

/// Lease time of the lock. Every step between two renewals is shorter.
const TTL: Duration = Duration::from_secs(10);
/// How long to wait for the lock; longer than the lease of a dead holder.
const WAIT: Duration = Duration::from_secs(15);
/// Poll interval while waiting for the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

const _: () = assert!(WAIT.as_millis() > TTL.as_millis());

/// An exclusive lock on one topic. If dropped without `release`, it expires after [`TTL`].
pub(crate) struct TopicLock {
    backend: Arc<dyn Backend>,
    topic: TopicName,
    holder: HolderName,
    fence: Fence,
}

impl TopicLock {
    /// Acquires the lock; waits up to [`WAIT`], then fails with [`QueueError::Busy`].
    pub(crate) async fn acquire(queue: &Queue, topic: &TopicName) -> Result<Self> {
        let backend = Arc::clone(&queue.inner.backend);
        let (lease, holder) = (keys::topic_lock(topic), new_holder());
        let started = Instant::now();
        loop {
            match backend.acquire(&lease, &holder, TTL).await? {
                AcquireResult::Won(epoch) => {
                    let fence = Fence { lease, epoch };
                    return Ok(Self { backend, topic: topic.clone(), holder, fence });
                }
                AcquireResult::Held { by, .. } if started.elapsed() >= WAIT => {
                    return Err(QueueError::Busy { topic: topic.to_string(), by: by.to_string() });
                }
                AcquireResult::Held { remaining, .. } => {
                    tokio::time::sleep(remaining.clamp(Duration::from_millis(1), POLL_INTERVAL))
                        .await;
                }
            }
        }
    }

    /// Extends the lock by [`TTL`]. Fails if the lock was lost: then the topic must not be changed any further.
    pub(crate) async fn renew(&self) -> Result<()> {
        let fence = std::slice::from_ref(&self.fence);
        match self.backend.renew(&self.holder, fence, TTL).await?[..] {
            [Renewal::Kept] => Ok(()),
            _ => Err(QueueError::Busy {
                topic: self.topic.to_string(),
                by: "the lock of this process expired; another process may hold it".to_owned(),
            }),
        }
    }

    /// Releases the lock.
    pub(crate) async fn release(self) {
        let fence = std::slice::from_ref(&self.fence);
        if let Err(error) = self.backend.release(&self.holder, fence).await {
            warn!(topic = %self.topic, %error, "releasing the topic lock failed, it expires instead");
        }
    }
}

/// A unique holder name.
fn new_holder() -> HolderName {
    unique_holder(&format!("change:{}", std::process::id())).expect("numbers make a valid name")
}

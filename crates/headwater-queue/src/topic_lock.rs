//! The right to change a topic: growing and deleting it exclude each other.
//!
//! Upstream: `topics`. Downstream: a lease that nobody renews in the background, so that it ends with its holder.
//! Promises: of two processes that want to change a topic, one waits for the other, or for the end of its lease if it
//! died. Not here: creating a topic, which is one atomic step.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater_stream::{Acquire, Backend, Fence, HolderName, Renewal};
use tokio::time::Instant;
use tracing::warn;

use crate::error::{QueueError, Result};
use crate::keys;
use crate::queue::Queue;
use crate::topic::TopicName;

/// How long a change outlives the process that began it. Each single step of a change is shorter.
const TTL: Duration = Duration::from_secs(10);
/// How long to wait for somebody else's change; longer than one that nobody goes on with.
const WAIT: Duration = Duration::from_secs(15);
/// How often to look whether it ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

const _: () = assert!(WAIT.as_millis() > TTL.as_millis());

/// The right to change one topic. Dropped without `end`, it ends by itself after [`TTL`].
pub(crate) struct TopicLock {
    backend: Arc<dyn Backend>,
    topic: TopicName,
    holder: HolderName,
    fence: Fence,
}

impl TopicLock {
    /// Waits until nobody else changes the topic.
    pub(crate) async fn acquire(queue: &Queue, topic: &TopicName) -> Result<Self> {
        let backend = Arc::clone(&queue.inner.backend);
        let (lease, holder) = (keys::change(topic), new_holder());
        let started = Instant::now();
        loop {
            match backend.acquire(&lease, &holder, TTL).await? {
                Acquire::Won(epoch) => {
                    let fence = Fence { lease, epoch };
                    return Ok(Self { backend, topic: topic.clone(), holder, fence });
                }
                Acquire::Held { by, .. } if started.elapsed() >= WAIT => {
                    return Err(QueueError::Busy { topic: topic.to_string(), by: by.to_string() });
                }
                Acquire::Held { remaining, .. } => {
                    tokio::time::sleep(remaining.clamp(Duration::from_millis(1), POLL_INTERVAL))
                        .await;
                }
            }
        }
    }

    /// Goes on for another [`TTL`], unless the right is lost: then nothing more may be changed.
    pub(crate) async fn renew(&self) -> Result<()> {
        let fence = std::slice::from_ref(&self.fence);
        match self.backend.renew(&self.holder, fence, TTL).await?[..] {
            [Renewal::Kept] => Ok(()),
            _ => Err(QueueError::Busy {
                topic: self.topic.to_string(),
                by: "this process was too slow, somebody may have taken over".to_owned(),
            }),
        }
    }

    /// Lets the next one change it.
    pub(crate) async fn release(self) {
        let fence = std::slice::from_ref(&self.fence);
        if let Err(error) = self.backend.release(&self.holder, fence).await {
            warn!(topic = %self.topic, %error, "a change of a topic ends later than it could");
        }
    }
}

/// A name that nobody else has: random per process, counted within it.
fn new_holder() -> HolderName {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let random = RandomState::new().hash_one(count);
    HolderName::new(format!("change:{}:{count}:{random:x}", std::process::id()))
        .expect("numbers make a name")
}

//! Sends messages: validates, chooses the partition, appends.
//!
//! Upstream: applications. Downstream: the streams of a topic.
//! Promises: what is invalid is refused before anything happens; a partition is never chosen by what was known longer
//! ago than the topic's `refresh`; a send that was confirmed is in its partition, and every other outcome is an error.
//! Not here: repeating a send that failed. Whoever does so gives the message an id, so that it counts once.

mod batch;

mod outlet;
mod route;
mod stamp;

use std::fmt;
use std::sync::Arc;

use headwater_stream::EntryId;
use tokio::time::{Instant, timeout_at};

use self::route::{Route, Routes};
use self::stamp::Stamp;
use crate::config::ProducerConfig;
use crate::error::{QueueError, Result};
use crate::message::NewMessage;
use crate::queue::Queue;
use crate::topic::Partition;

/// Sends messages to topics. Clones are the same producer; their concurrent sends share round trips.
#[derive(Clone)]
pub struct Producer {
    inner: Arc<Inner>,
}

struct Inner {
    queue: Queue,
    config: ProducerConfig,
    routes: Routes,
    stamp: Stamp,
}

/// Where a message is that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Its entry in the partition.
    pub id: EntryId,
    /// The partition.
    pub partition: Partition,
    /// Whether a message with its id was sent before, within the window; then nothing was sent now.
    pub duplicate: bool,
}

impl Queue {
    /// A producer. One serves a whole process.
    pub fn producer(&self, config: ProducerConfig) -> Result<Producer> {
        config.validate()?;
        let routes = Routes::new(self.clone());
        let inner = Inner { queue: self.clone(), config, routes, stamp: Stamp::default() };
        Ok(Producer { inner: Arc::new(inner) })
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("queue", &self.inner.queue)
            .field("config", &self.inner.config)
            .finish_non_exhaustive()
    }
}

impl Producer {
    /// Sends a message; returns when it is in its partition. A topic that nobody created is plain.
    ///
    /// After [`QueueError::DeadlineExceeded`], or an error of the backend that is transient, it may have been sent: repeat
    /// it with the same id. The same holds for a send that is dropped before it returns.
    pub async fn send(&self, topic: &str, message: NewMessage) -> Result<Sent> {
        let until = Instant::now() + self.inner.config.deadline;
        let route = self.route(topic, until).await?;
        message.validate(&route.topic)?;
        let partition = self.partition_of(&route, &message)?;
        let outlet = route.outlet(partition);
        let fields = message.into_fields(&outlet.envelope, self.inner.stamp.now())?;
        let sending = outlet.append(&self.inner.queue, &route.topic, fields);
        let sent = match timeout_at(until, sending).await {
            Ok(sent) => sent,
            Err(_) => Err(self.too_late(topic)),
        };
        outlet.count(&sent);
        sent
    }

    /// What is known of the topic, read again if it is too old.
    async fn route(&self, topic: &str, until: Instant) -> Result<Arc<Route>> {
        if let Some(route) = self.inner.routes.fresh(topic) {
            return Ok(route);
        }
        let reading = self.inner.routes.read(topic);
        timeout_at(until, reading).await.unwrap_or_else(|_| Err(self.too_late(topic)))
    }

    /// The partition a valid message goes to.
    fn partition_of(&self, route: &Route, message: &NewMessage) -> Result<Partition> {
        if message.id.is_some() {
            return Err(QueueError::invalid("an id", "ids of messages are not supported yet"));
        }
        if let Some(partition) = message.partition {
            return Ok(partition);
        }
        let partitions = route.topic.partitions;
        let chosen = self.inner.config.partitioner.partition(message.key.as_deref(), partitions);
        if chosen >= partitions {
            let problem = format!(
                "the partitioner chose {chosen}; topic `{}` has partitions 0 to {}",
                route.topic.name,
                partitions - 1
            );
            return Err(QueueError::invalid("a partition", problem));
        }
        Ok(chosen)
    }

    fn too_late(&self, topic: &str) -> QueueError {
        let deadline = self.inner.config.deadline;
        QueueError::DeadlineExceeded { topic: topic.to_owned(), deadline }
    }
}

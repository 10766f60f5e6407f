//! Inspection: read-only statistics and listings of topics and groups.
//!
//! Upstream: command line, HTTP interface, dashboards. Downstream: the backend, which is only read.
//! Guarantees: nothing is changed; every listing is paged and bounded; a missing topic or group is an error.
//! Partitions are read one after another: a view of several partitions is not a consistent snapshot.

mod delayed;
mod groups;
mod messages;
mod pending;
mod topics;

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use headwater_stream::StreamStats;

use crate::error::{QueueError, Result};
use crate::keys;
use crate::queue::Queue;
use crate::topic::{Partition, Topic, TopicName};

pub use delayed::DelayedView;
pub use groups::{ConsumerView, GroupPartitionView, GroupView, MemberView, OwnerView};
pub use messages::{Bound, MessageQuery, StoredMessage};
pub use pending::{PendingFilter, PendingView};
pub use topics::{PartitionView, TopicView};

/// Partitions read concurrently.
const CONCURRENT_STATS: usize = 16;

/// Inspects topics and groups without changing them.
#[derive(Clone, Debug)]
pub struct Inspector {
    queue: Queue,
}

impl Queue {
    /// Inspects topics and groups.
    pub fn inspect(&self) -> Inspector {
        Inspector { queue: self.clone() }
    }

    /// Reads a topic; fails with [`QueueError::NoTopic`] if it was not created and nothing is stored under its name.
    pub(crate) async fn existing_topic(&self, name: &str) -> Result<Arc<Topic>> {
        let topic = self.read_topic(&TopicName::new(name)?).await?;
        if !topic.layout.is_plain() {
            return Ok(topic);
        }
        let backend = &self.inner.backend;
        let exists = backend.stats_without_lag(&keys::stream(&topic, 0)).await?.is_some()
            || backend.stats_without_lag(&keys::dead_letters(&topic)).await?.is_some()
            || backend.delay_stats(&keys::delays(&topic, 0)).await?.waiting > 0;
        if exists { Ok(topic) } else { Err(QueueError::NoTopic { topic: name.to_owned() }) }
    }

    /// Statistics of each partition's stream, by partition number; `None` for one without a stream.
    pub(crate) async fn partition_stats(&self, topic: &Topic) -> Result<Vec<Option<StreamStats>>> {
        let streams: Vec<_> = (0..topic.partitions).map(|p| keys::stream(topic, p)).collect();
        let backend = &self.inner.backend;
        let looks = streams.into_iter().map(|name| {
            let backend = Arc::clone(backend);
            async move { backend.stats(&name).await }
        });
        Ok(stream::iter(looks).buffered(CONCURRENT_STATS).try_collect().await?)
    }
}

/// The selected partition, or all. Fails if it does not exist.
pub(crate) fn select_partitions(
    topic: &Topic,
    only: Option<Partition>,
) -> Result<std::ops::Range<Partition>> {
    match only {
        None => Ok(0..topic.partitions),
        Some(partition) if partition < topic.partitions => Ok(partition..partition + 1),
        Some(partition) => {
            let last = topic.partitions - 1;
            let problem = format!("{partition}; topic `{}` has partitions 0 to {last}", topic.name);
            Err(QueueError::invalid("a partition", problem))
        }
    }
}

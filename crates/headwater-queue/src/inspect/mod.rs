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

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt, stream};
use headwater_stream::{StreamError, StreamStats};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::error::{QueueError, Result};
use crate::keys;
use crate::queue::Queue;
use crate::topic::{Partition, Topic, TopicName};

pub(crate) use groups::{group_names, group_of_partition};

pub use delayed::DelayedView;
pub use groups::{ConsumerView, GroupPartitionView, GroupView, MemberView, OwnerView};
pub use messages::{Bound, MessageQuery, StoredMessage};
pub use pending::{PendingFilter, PendingView};
pub use topics::{PartitionView, TopicView};

/// Partitions read concurrently.
const CONCURRENT_STATS: usize = 16;

/// A read that takes longer does not count as one of those at once.
const SLOW_AFTER: Duration = Duration::from_millis(250);
/// How many times as many reads are running at most, with the slow ones.
const RUNNING_FACTOR_MAX: usize = 8;

/// Reads several topics concurrently, and returns the results in their order. Starts further reads while fewer than `at_once` are
/// running, not counting those that have taken longer than 250 ms: the topics of a server that does not answer delay the others
/// little, and cost one deadline together. At most eight times `at_once` are running, the slow ones included. Cancel-safe if the
/// reads are.
pub async fn read_each<F: Future>(at_once: usize, reads: Vec<F>) -> Vec<F::Output> {
    let (running, starting) =
        (Semaphore::new(at_once * RUNNING_FACTOR_MAX), Semaphore::new(at_once));
    join_all(reads.into_iter().map(|reading| read_one(&running, &starting, reading))).await
}

async fn read_one<F: Future>(running: &Semaphore, starting: &Semaphore, reading: F) -> F::Output {
    let _running = running.acquire().await.expect("the semaphore is never closed");
    let permit = starting.acquire().await.expect("the semaphore is never closed");
    let mut reading = pin!(reading);
    match timeout(SLOW_AFTER, reading.as_mut()).await {
        Ok(read) => read,
        Err(_) => {
            drop(permit);
            reading.await
        }
    }
}

/// What could be read of the partitions of a topic.
#[derive(Default)]
pub(crate) struct ReadPartitions {
    /// Statistics of each partition's stream, by partition number; `None` for one without a stream, or that could not be read.
    stats: Vec<Option<StreamStats>>,
    /// Why a partition could not be read, by partition number.
    problems: Vec<Option<String>>,
    /// One of the errors.
    error: Option<StreamError>,
}

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

    /// Statistics of each partition whose server answers. Fails if none does.
    pub(crate) async fn readable_partition_stats(&self, topic: &Topic) -> Result<ReadPartitions> {
        let backend = &self.inner.backend;
        let reads = (0..topic.partitions).map(|partition| {
            let (backend, stream) = (Arc::clone(backend), keys::stream(topic, partition));
            async move { backend.stats(&stream).await }
        });
        let mut read = ReadPartitions::default();
        for result in read_each(CONCURRENT_STATS, reads.collect()).await {
            let (stats, problem) = match result {
                Ok(stats) => (stats, None),
                Err(error) if error.is_transient() => {
                    let problem = error.to_string();
                    read.error.get_or_insert(error);
                    (None, Some(problem))
                }
                Err(error) => return Err(error.into()),
            };
            read.stats.push(stats);
            read.problems.push(problem);
        }
        match read.error {
            Some(error) if read.problems.iter().all(Option::is_some) => Err(error.into()),
            _ => Ok(read),
        }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_reads_at_the_same_time_have_a_maximum() {
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let read = || async {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            sleep(Duration::from_secs(5)).await;
            running.fetch_sub(1, Ordering::SeqCst);
        };

        let read = read_each(2, (0..100).map(|_| read()).collect()).await;

        assert_eq!((read.len(), most.into_inner()), (100, 2 * RUNNING_FACTOR_MAX));
    }

    #[tokio::test(start_paused = true)]
    async fn reads_without_an_answer_delay_the_others_little() {
        let (began, deadline) = (Instant::now(), Duration::from_secs(5));
        let read = |number: u32| async move {
            if number.is_multiple_of(2) {
                sleep(deadline).await;
            }
            (number, began.elapsed())
        };

        let read = read_each(4, (0..40).map(read).collect()).await;

        assert!(read.iter().map(|(number, _)| *number).eq(0..40), "{read:?}");
        // Twenty without an answer, four at once.
        let waited = SLOW_AFTER * 5;
        for (number, took) in read {
            let limit = if number.is_multiple_of(2) { waited + deadline } else { waited };
            assert!(took <= limit, "{number} took {took:?}");
        }
    }
}

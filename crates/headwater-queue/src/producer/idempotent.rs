//! Idempotent sends: a message with an id is appended once within the producer's window, however often it is sent.
//!
//! Downstream: `append_once` of the backend, which remembers the ids of one stream. A duplicate must therefore go to
//! the partition of the first message: the partition is chosen by the key, else by the id, and after a resize the id is
//! also looked up in the partition it had before.
//! Not here: a first send still in flight, by a process that does not know of the resize yet, while the duplicate
//! already goes to the new partition. Order per key takes precedence.

use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{
    AppendedEntry, Coalescer, CoalescerConfig, Fields, IdempotentEntry, StreamError,
};

use super::partition_handle::PartitionHandle;
use super::topic_cache::CachedTopic;
use super::{Producer, Sent, missing_result};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::message::NewMessage;
use crate::partitioner::hash_partition;
use crate::topic::{Partition, Resize};

/// Assumed maximum difference between the clocks of this machine and of the backend, for deciding which resizes are
/// recent. Clocks may be off by hours; a large value costs one more lookup per send for a day after a resize.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Batches concurrent sends of messages with ids.
pub(super) type IdempotentSends = Coalescer<IdempotentEntry, Result<AppendedEntry>>;

/// The id of a message, and where it may have been sent before.
#[derive(Clone, Debug)]
pub(super) struct IdempotencyKey {
    pub(super) id: String,
    /// The partitions it had before recent resizes.
    pub(super) earlier: Vec<Partition>,
}

impl Producer {
    /// Chooses the partition of a message without an explicit one, by its key or id.
    pub(super) fn choose_partition(&self, message: &NewMessage, partitions: u16) -> Partition {
        let partitioner = &self.inner.config.partitioner;
        match (&message.id, &message.key) {
            // A partition that changes with each send would never find the first message.
            (Some(id), None) => hash_partition(id, partitions),
            (Some(id), Some(_)) if !partitioner.is_stable() => hash_partition(id, partitions),
            (_, key) => partitioner.partition(key.as_deref(), partitions),
        }
    }

    /// Takes the id out of a message.
    pub(super) fn take_idempotency_key(
        &self,
        cached: &CachedTopic,
        message: &mut NewMessage,
        partition: Partition,
    ) -> Option<IdempotencyKey> {
        let mut earlier = Vec::new();
        if message.id.is_some() && message.partition.is_none() {
            let relevant = self.inner.config.idempotence_window
                + Resize::propagation_time(cached.topic.policies.refresh)
                + CLOCK_SKEW_MAX;
            let since = SystemClock.now().before(relevant);
            for resize in cached.topic.resizes.iter().filter(|resize| resize.began >= since) {
                let old = self.choose_partition(message, resize.from);
                if old != partition && !earlier.contains(&old) && old < cached.topic.partitions {
                    earlier.push(old);
                }
            }
        }
        message.id.take().map(|id| IdempotencyKey { id, earlier })
    }

    /// Appends one entry, unless its id is known. Concurrent calls are batched.
    pub(super) async fn append_idempotent(
        &self,
        cached: &CachedTopic,
        handle: &PartitionHandle,
        key: IdempotencyKey,
        fields: Fields,
    ) -> Result<Sent> {
        if let Some(duplicate) = self.find_duplicates(cached, &[&key]).await?.remove(0) {
            return Ok(duplicate);
        }
        let bytes = fields.bytes();
        let sends = handle.idempotent_sends(|| self.idempotent_sends(cached, handle));
        let entry = IdempotentEntry { id: key.id, fields };
        let AppendedEntry { id, duplicate } = match sends.call_with_size(entry, bytes).await {
            Ok(appended) => appended?,
            Err(gone) => {
                let problem = gone.to_string();
                return Err(StreamError::Unavailable { problem, source: Some(gone.into()) }.into());
            }
        };
        Ok(Sent { id, partition: handle.partition, duplicate })
    }

    /// Appends entries in order, except those whose ids are known.
    pub(super) async fn append_idempotent_all(
        &self,
        cached: &CachedTopic,
        handle: &PartitionHandle,
        entries: Vec<(IdempotencyKey, Fields)>,
    ) -> Result<Vec<Sent>> {
        let ids: Vec<&IdempotencyKey> = entries.iter().map(|(key, _)| key).collect();
        let duplicates = self.find_duplicates(cached, &ids).await?;
        let new: Vec<IdempotentEntry> = entries
            .into_iter()
            .zip(&duplicates)
            .filter(|(_, duplicate)| duplicate.is_none())
            .map(|((key, fields), _)| IdempotentEntry { id: key.id, fields })
            .collect();
        let (keep, retention) =
            (self.inner.config.idempotence_window, &cached.topic.policies.retention);
        let appended =
            self.inner.queue.backend().append_once(&handle.stream, &new, keep, retention).await?;
        let mut appended = appended.into_iter().map(|AppendedEntry { id, duplicate }| Sent {
            id,
            partition: handle.partition,
            duplicate,
        });
        let results = duplicates.into_iter().map(|duplicate| duplicate.or_else(|| appended.next()));
        results.collect::<Option<_>>().ok_or_else(missing_result)
    }

    /// Looks up ids in the partitions they had before recent resizes.
    async fn find_duplicates(
        &self,
        cached: &CachedTopic,
        keys: &[&IdempotencyKey],
    ) -> Result<Vec<Option<Sent>>> {
        let mut found: Vec<Option<Sent>> = vec![None; keys.len()];
        let mut partitions: Vec<Partition> =
            keys.iter().flat_map(|key| key.earlier.iter().copied()).collect();
        partitions.sort_unstable();
        partitions.dedup();
        for partition in partitions {
            let indices: Vec<usize> =
                (0..keys.len()).filter(|at| keys[*at].earlier.contains(&partition)).collect();
            let asked: Vec<&str> = indices.iter().map(|at| keys[*at].id.as_str()).collect();
            let stream = keys::stream(&cached.topic, partition);
            let known = self.inner.queue.backend().appended(&stream, &asked).await?;
            for (at, id) in indices.into_iter().zip(known) {
                found[at] = found[at].or(id.map(|id| Sent { id, partition, duplicate: true }));
            }
        }
        Ok(found)
    }

    fn idempotent_sends(&self, cached: &CachedTopic, handle: &PartitionHandle) -> IdempotentSends {
        let backend = self.inner.queue.backend().clone();
        let stream = handle.stream.clone();
        let retention = cached.topic.policies.retention;
        let keep = self.inner.config.idempotence_window;
        let execute_batch = move |entries: Vec<IdempotentEntry>| {
            let (backend, stream) = (backend.clone(), stream.clone());
            async move {
                match backend.append_once(&stream, &entries, keep, &retention).await {
                    Ok(appended) => appended.into_iter().map(Ok).collect(),
                    Err(error) => {
                        let error = QueueError::from(error);
                        entries.iter().map(|_| Err(error.duplicate())).collect()
                    }
                }
            }
        };
        Coalescer::new(CoalescerConfig::default(), execute_batch)
            .expect("the default settings are valid")
    }
}

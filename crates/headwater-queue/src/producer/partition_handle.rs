//! The producer's handle of one partition: its stream, the shared fields of its messages, its counters.

use std::sync::OnceLock;

use headwater_stream::{EntryId, StreamName};
use metrics::{Counter, counter};

use super::Sent;
use super::idempotent::IdempotentSends;
use crate::error::Result;
use crate::keys;
use crate::message::PartitionFields;
use crate::metrics::PRODUCED;
use crate::topic::{Partition, Topic};

/// The producer's handle of one partition.
pub(super) struct PartitionHandle {
    pub(super) partition: Partition,
    pub(super) stream: StreamName,
    pub(super) partition_fields: PartitionFields,
    pub(super) delayed: Counter,
    pub(super) errors: Counter,
    sent: Counter,
    duplicates: Counter,
    idempotent_sends: OnceLock<IdempotentSends>,
}

impl PartitionHandle {
    pub(super) fn new(topic: &Topic, partition: Partition) -> Self {
        let produced = |result: &'static str| {
            let (topic, partition) = (topic.name.to_string(), partition.to_string());
            counter!(PRODUCED, "topic" => topic, "partition" => partition, "result" => result)
        };
        Self {
            partition,
            stream: keys::stream(topic, partition),
            partition_fields: PartitionFields::new(topic, partition),
            delayed: produced("delayed"),
            errors: produced("error"),
            sent: produced("ok"),
            duplicates: produced("duplicate"),
            idempotent_sends: OnceLock::new(),
        }
    }

    /// The batcher of sends with ids, started by the first of them.
    pub(super) fn idempotent_sends(
        &self,
        start: impl FnOnce() -> IdempotentSends,
    ) -> &IdempotentSends {
        self.idempotent_sends.get_or_init(start)
    }

    /// The result for a new entry.
    pub(super) fn sent(&self, id: EntryId) -> Sent {
        Sent { id, partition: self.partition, duplicate: false }
    }

    /// Counts sent messages.
    pub(super) fn count_sent(&self, messages: usize) {
        self.sent.increment(messages as u64);
    }

    /// Counts results.
    pub(super) fn count(&self, results: &[Result<Sent>]) {
        let (mut sent, mut duplicates, mut errors) = (0, 0, 0);
        for result in results {
            match result {
                Ok(Sent { duplicate: false, .. }) => sent += 1,
                Ok(Sent { duplicate: true, .. }) => duplicates += 1,
                Err(_) => errors += 1,
            }
        }
        let counts = [(&self.sent, sent), (&self.duplicates, duplicates), (&self.errors, errors)];
        for (counter, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            counter.increment(count);
        }
    }
}

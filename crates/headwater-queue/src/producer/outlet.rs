//! The way into one partition: its stream, what its messages have in common, its counters.

use headwater_stream::{Fields, StreamName};
use metrics::{Counter, counter};

use super::Sent;
use crate::error::Result;
use crate::keys;
use crate::message::Envelope;
use crate::metrics::PRODUCED;
use crate::queue::Queue;
use crate::topic::{Partition, Topic};

/// The way into one partition.
pub(super) struct Outlet {
    pub(super) partition: Partition,
    pub(super) stream: StreamName,
    pub(super) envelope: Envelope,
    sent: Counter,
    duplicates: Counter,
    errors: Counter,
}

impl Outlet {
    pub(super) fn new(topic: &Topic, partition: Partition) -> Self {
        let produced = |result: &'static str| {
            let (topic, partition) = (topic.name.to_string(), partition.to_string());
            counter!(PRODUCED, "topic" => topic, "partition" => partition, "result" => result)
        };
        Self {
            partition,
            stream: keys::stream(topic, partition),
            envelope: Envelope::new(topic, partition),
            sent: produced("ok"),
            duplicates: produced("duplicate"),
            errors: produced("error"),
        }
    }

    /// Appends one entry. Those of other callers go with it.
    pub(super) async fn append(
        &self,
        queue: &Queue,
        topic: &Topic,
        fields: Fields,
    ) -> Result<Sent> {
        let retention = &topic.policies.retention;
        let ids = queue.backend().append(&self.stream, &[fields], retention).await?;
        Ok(Sent { id: ids[0], partition: self.partition, duplicate: false })
    }

    /// Counts what became of a message.
    pub(super) fn count(&self, sent: &Result<Sent>) {
        match sent {
            Ok(Sent { duplicate: false, .. }) => self.sent.increment(1),
            Ok(Sent { duplicate: true, .. }) => self.duplicates.increment(1),
            Err(_) => self.errors.increment(1),
        }
    }
}

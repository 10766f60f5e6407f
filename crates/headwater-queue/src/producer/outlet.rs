//! The way into one partition: its stream, what its messages have in common, its counters.

use std::sync::OnceLock;

use headwater_stream::{EntryId, StreamName};
use metrics::{Counter, counter};

use super::Sent;
use super::once::OnceSends;
use crate::error::Result;
use crate::keys;
use crate::message::Envelope;
use crate::metrics::PRODUCED;
use crate::topic::{Partition, Topic};

/// The way into one partition.
pub(super) struct Outlet {
    pub(super) partition: Partition,
    pub(super) stream: StreamName,
    pub(super) envelope: Envelope,
    pub(super) delayed: Counter,
    pub(super) errors: Counter,
    sent: Counter,
    duplicates: Counter,
    once_sends: OnceLock<OnceSends>,
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
            delayed: produced("delayed"),
            errors: produced("error"),
            sent: produced("ok"),
            duplicates: produced("duplicate"),
            once_sends: OnceLock::new(),
        }
    }

    /// What carries out sends with ids, started by the first of them.
    pub(super) fn once_sends(&self, start: impl FnOnce() -> OnceSends) -> &OnceSends {
        self.once_sends.get_or_init(start)
    }

    /// What is told of a new entry.
    pub(super) fn sent(&self, id: EntryId) -> Sent {
        Sent { id, partition: self.partition, duplicate: false }
    }

    /// Counts messages that were sent.
    pub(super) fn count_sent(&self, messages: usize) {
        self.sent.increment(messages as u64);
    }

    /// Counts what became of messages.
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

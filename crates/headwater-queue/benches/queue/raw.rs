//! The commands of the raw loop: entries with one field, as the queue writes them for messages without a key.

use headwater_testkit::bench::{Pipelines, command};

use crate::{BenchTopic, PAYLOAD_BYTES};

/// Pipelines of appends, round robin over the partitions.
pub(crate) fn pipelines(topic: &BenchTopic, pipeline: usize) -> Pipelines {
    Pipelines::new(&append_commands(topic), pipeline)
}

/// One append per partition.
pub(crate) fn append_commands(topic: &BenchTopic) -> Vec<Vec<u8>> {
    let payload = "x".repeat(PAYLOAD_BYTES);
    topic.keys.iter().map(|key| command(&["XADD", key, "*", "payload", &payload])).collect()
}

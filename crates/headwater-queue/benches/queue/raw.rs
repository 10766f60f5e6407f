//! The commands of the raw loop: entries with the same fields as the queue's.

use headwater_testkit::bench::{Pipelines, command};

use crate::{BenchTopic, PAYLOAD_BYTES};

/// Pipelines of appends, round robin over the partitions.
pub(crate) fn pipelines(topic: &BenchTopic, pipeline: usize) -> Pipelines {
    Pipelines::new(&append_commands(topic), pipeline)
}

/// One append per partition.
pub(crate) fn append_commands(topic: &BenchTopic) -> Vec<Vec<u8>> {
    let each = topic.keys.iter().enumerate();
    each.map(|(partition, key)| append_command(&topic.name, partition, key)).collect()
}

fn append_command(topic: &str, partition: usize, key: &str) -> Vec<u8> {
    let (payload, partition) = ("x".repeat(PAYLOAD_BYTES), partition.to_string());
    command(&[
        "XADD",
        key,
        "*",
        "payload",
        &payload,
        "timestamp",
        "2026-01-01T00:00:00.000Z",
        "retryCount",
        "0",
        "maxRetries",
        "4",
        "topic",
        topic,
        "partitionId",
        &partition,
        "headers",
        "{}",
    ])
}

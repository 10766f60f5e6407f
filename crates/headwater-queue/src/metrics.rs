//! Every metric of this crate: name, labels, meaning. No other module defines metric names.
//! The label consumer is the configured name of the process, or `worker:HOST`: the same after each start.

/// Messages sent. Labels: topic, partition, result (`ok`, `duplicate`, `delayed`, `error`; `refused`, with an empty
/// partition: over a limit, or in a batch with such a message).
pub const PRODUCED: &str = "headwater_produced_total";
/// Messages handled. Labels: topic, partition, group, consumer, result (`done`, `retry`, `release`, `dead_letter`;
/// `skipped`: a retry for another group).
pub const CONSUMED: &str = "headwater_consumed_total";
/// Entries settled. Labels: topic, partition, group.
pub const ACKS: &str = "headwater_acks_total";
/// Failed attempts that are retried. Labels: topic, partition, group.
pub const RETRIES: &str = "headwater_retries_total";
/// Messages that became dead letters. Labels: topic, partition, group, result (cause: `attempts`, `crashes`, `handler`,
/// `malformed`, `missing`).
pub const DEAD_LETTERS: &str = "headwater_dead_letters_total";
/// Anomalies that were handled automatically. Labels: topic, group, result (kind).
pub const ANOMALIES: &str = "headwater_queue_anomalies_total";
/// Handlers that exceeded `handler_timeout`. Labels: topic, partition, group, result (`dropped`: the future was
/// dropped; `late`: it blocked its thread and could not be dropped, so its outcome counts).
pub const HANDLER_TIMEOUTS: &str = "headwater_handler_timeouts_total";
/// Entries of a topic. Labels: topic, partition.
pub const TOPIC_LENGTH: &str = "headwater_topic_length";
/// Entries delivered and not acknowledged. Labels: topic, partition, group.
pub const PENDING: &str = "headwater_pending";
/// Messages in flight in this process. Labels: topic, group, consumer.
pub const IN_FLIGHT: &str = "headwater_inflight";
/// Partitions this process owns. Labels: topic, group, consumer.
pub const PARTITIONS_OWNED: &str = "headwater_partitions_owned";
/// Handler duration in seconds. Labels: topic, group, result.
pub const HANDLE_LATENCY: &str = "headwater_handle_latency_seconds";
/// Duration of a settle call in seconds. Labels: topic, group.
pub const ACK_LATENCY: &str = "headwater_ack_latency_seconds";
/// Seconds from sending to the end of handling. Labels: topic, group.
pub const END_TO_END_LATENCY: &str = "headwater_end_to_end_latency_seconds";

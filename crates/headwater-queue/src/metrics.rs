//! Every metric of this crate: its name, its labels, its meaning. All names are here and nowhere else.

/// Messages sent. Labels: topic, partition, result (`ok`, `duplicate`, `delayed`, `error`; `refused`, without a partition:
/// they break a limit, or go in a batch with one that does).
pub const PRODUCED: &str = "headwater_produced_total";
/// Messages handled. Labels: topic, partition, group, consumer, result (`done`, `retry`, `release`, `dead_letter`;
/// `skipped`: tried again by another group).
pub const CONSUMED: &str = "headwater_consumed_total";
/// Entries settled. Labels: topic, partition, group.
pub const ACKS: &str = "headwater_acks_total";
/// Messages that failed and are tried again. Labels: topic, partition, group.
pub const RETRIES: &str = "headwater_retries_total";
/// Messages that became dead letters. Labels: topic, partition, group, result (why: `attempts`, `crashes`, `handler`, `malformed`, `missing`).
pub const DEAD_LETTERS: &str = "headwater_dead_letters_total";
/// Things that went wrong and were mended. Labels: topic, group, result (what).
pub const ANOMALIES: &str = "headwater_queue_anomalies_total";
/// Handlers that took longer than `handler_timeout`. Labels: topic, partition, group, result (`dropped`: it waited for
/// something and was given up; `late`: it blocked its thread, so that it could not be, and its outcome counts).
pub const HANDLER_TIMEOUTS: &str = "headwater_handler_timeouts_total";
/// Entries of a topic. Labels: topic, partition.
pub const TOPIC_LENGTH: &str = "headwater_topic_length";
/// Entries delivered and not settled. Labels: topic, partition, group.
pub const PENDING: &str = "headwater_pending";
/// Messages in the hands of this process. Labels: topic, group, consumer.
pub const IN_FLIGHT: &str = "headwater_inflight";
/// Partitions this process owns. Labels: topic, group, consumer.
pub const PARTITIONS_OWNED: &str = "headwater_partitions_owned";
/// Seconds a handler took. Labels: topic, group, result.
pub const HANDLE_LATENCY: &str = "headwater_handle_latency_seconds";
/// Seconds a settle took. Labels: topic, group.
pub const ACK_LATENCY: &str = "headwater_ack_latency_seconds";
/// Seconds from sending to the end of handling. Labels: topic, group.
pub const END_TO_END_LATENCY: &str = "headwater_end_to_end_latency_seconds";

//! The metrics of one partition; handles are looked up once.
//!
//! Upstream: `partition_driver` and `handler_pool`. Downstream: the recorder that the application installed.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::retry_or_dead_letter::{DeadLetterCause, DeliveryResult};
use crate::metrics as names;
use crate::topic::{GroupName, Partition, TopicName};

const RESULTS: [&str; 5] = ["done", "retry", "release", "dead_letter", "skipped"];

#[derive(Debug)]
pub(super) struct PartitionMetrics {
    topic: String,
    group: String,
    partition: String,
    /// Counter of messages and histogram of seconds for each of `RESULTS`.
    handled: [(Counter, Histogram); 5],
    in_flight: Gauge,
    retries: Counter,
    acks: Counter,
    ack_latency: Histogram,
    end_to_end: Histogram,
}

impl PartitionMetrics {
    pub(super) fn new(
        topic: &TopicName,
        partition: Partition,
        group: &GroupName,
        consumer: &str,
    ) -> Self {
        let (topic, group) = (topic.to_string(), group.to_string());
        let partition = partition.to_string();
        let handled = RESULTS.map(|result| {
            let count = counter!(
                names::CONSUMED,
                "topic" => topic.clone(), "partition" => partition.clone(), "group" => group.clone(),
                "consumer" => consumer.to_owned(), "result" => result
            );
            let seconds = histogram!(
                names::HANDLE_LATENCY,
                "topic" => topic.clone(), "group" => group.clone(), "result" => result
            );
            (count, seconds)
        });
        let count = |name: &'static str| {
            counter!(
                name,
                "topic" => topic.clone(), "partition" => partition.clone(), "group" => group.clone()
            )
        };
        let seconds = |name: &'static str| histogram!(name, "topic" => topic.clone(), "group" => group.clone());
        let in_flight = gauge!(
            names::IN_FLIGHT,
            "topic" => topic.clone(), "group" => group.clone(), "consumer" => consumer.to_owned()
        );
        Self {
            in_flight,
            retries: count(names::RETRIES),
            acks: count(names::ACKS),
            ack_latency: seconds(names::ACK_LATENCY),
            end_to_end: seconds(names::END_TO_END_LATENCY),
            handled,
            topic,
            group,
            partition,
        }
    }

    /// Records the result of a delivery and the duration of its handler; `None` if the handler was not called.
    pub(super) fn record_result(&self, result: DeliveryResult, took: Option<Duration>) {
        let index = match result {
            DeliveryResult::Done => 0,
            DeliveryResult::Retry => 1,
            DeliveryResult::Release => 2,
            DeliveryResult::DeadLetter(cause) => {
                self.record_dead_letter(cause);
                3
            }
            DeliveryResult::Skipped => 4,
        };
        let (count, seconds) = &self.handled[index];
        count.increment(1);
        if let Some(took) = took {
            seconds.record(took);
        }
        if result == DeliveryResult::Retry {
            self.retries.increment(1);
        }
    }

    /// Sets the number of in-flight messages of the subscription.
    pub(super) fn set_in_flight(&self, messages: usize) {
        self.in_flight.set(messages as f64);
    }

    /// Records the time from sending a message to the end of its handling.
    pub(super) fn record_end_to_end(&self, took: Duration) {
        self.end_to_end.record(took);
    }

    /// Records a settle call: entries and duration.
    pub(super) fn record_settled(&self, entries: usize, took: Duration) {
        self.acks.increment(entries as u64);
        self.ack_latency.record(took);
    }

    fn record_dead_letter(&self, cause: DeadLetterCause) {
        counter!(
            names::DEAD_LETTERS,
            "topic" => self.topic.clone(), "partition" => self.partition.clone(),
            "group" => self.group.clone(), "result" => cause.as_str()
        )
        .increment(1);
    }

    /// Records a handler that exceeded `handler_timeout`.
    pub(super) fn record_handler_timeout(&self, result: &'static str) {
        counter!(
            names::HANDLER_TIMEOUTS,
            "topic" => self.topic.clone(), "partition" => self.partition.clone(),
            "group" => self.group.clone(), "result" => result
        )
        .increment(1);
    }

    /// Records an anomaly that the consumer handled: which, and how often.
    pub(super) fn record_anomaly(&self, what: &'static str, times: usize) {
        if times > 0 {
            record_anomaly(&self.topic, &self.group, what, times as u64);
        }
    }
}

/// Records an anomaly of a topic that the consumer handled.
pub(super) fn record_anomaly(topic: &str, group: &str, what: &'static str, times: u64) {
    counter!(
        names::ANOMALIES,
        "topic" => topic.to_owned(), "group" => group.to_owned(), "result" => what
    )
    .increment(times);
}

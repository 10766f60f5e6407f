//! The metrics of one partition, looked up once.
//!
//! Upstream: `worker` and `settling`. Downstream: whatever recorder the application installed.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::verdict::{Ended, Why};
use crate::metrics as names;
use crate::topic::{GroupName, Partition, TopicName};

const RESULTS: [&str; 5] = ["done", "retry", "release", "dead_letter", "skipped"];

#[derive(Debug)]
pub(super) struct Meters {
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

impl Meters {
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

    /// A delivery ended after its handler took this long; `None` if no handler saw it.
    pub(super) fn ended(&self, result: Ended, took: Option<Duration>) {
        let index = match result {
            Ended::Done => 0,
            Ended::Retry => 1,
            Ended::Release => 2,
            Ended::DeadLetter(why) => {
                self.dead_letter(why);
                3
            }
            Ended::Skipped => 4,
        };
        let (count, seconds) = &self.handled[index];
        count.increment(1);
        if let Some(took) = took {
            seconds.record(took);
        }
        if result == Ended::Retry {
            self.retries.increment(1);
        }
    }

    /// So many messages of the subscription are in hand.
    pub(super) fn in_flight(&self, messages: usize) {
        self.in_flight.set(messages as f64);
    }

    /// A message is tried again in its lane.
    pub(super) fn again(&self, took: Duration) {
        self.ended(Ended::Retry, Some(took));
    }

    /// This long from sending a message to the end of its handling.
    pub(super) fn end_to_end(&self, took: Duration) {
        self.end_to_end.record(took);
    }

    /// So many entries were settled in a call that took so long.
    pub(super) fn settled(&self, entries: usize, took: Duration) {
        self.acks.increment(entries as u64);
        self.ack_latency.record(took);
    }

    fn dead_letter(&self, why: Why) {
        counter!(
            names::DEAD_LETTERS,
            "topic" => self.topic.clone(), "partition" => self.partition.clone(),
            "group" => self.group.clone(), "result" => why.as_str()
        )
        .increment(1);
    }

    /// A handler took longer than it may: what became of it.
    pub(super) fn handler_timeout(&self, result: &'static str) {
        counter!(
            names::HANDLER_TIMEOUTS,
            "topic" => self.topic.clone(), "partition" => self.partition.clone(),
            "group" => self.group.clone(), "result" => result
        )
        .increment(1);
    }

    /// Something went wrong and was mended: what, and how often.
    pub(super) fn anomaly(&self, what: &'static str, times: usize) {
        if times > 0 {
            anomaly(&self.topic, &self.group, what, times as u64);
        }
    }
}

/// Something went wrong with a topic and was mended.
pub(super) fn anomaly(topic: &str, group: &str, what: &'static str, times: u64) {
    counter!(
        names::ANOMALIES,
        "topic" => topic.to_owned(), "group" => group.to_owned(), "result" => what
    )
    .increment(times);
}

//! What becomes of a message: the rules of a partition, applied to what its handler said.
//!
//! Upstream: `runner`. Downstream: `worker`, which carries it out.
//! Promises: two counters with limits of their own. Failures are tries whose outcome is known; crashes are deliveries
//! without one. Whichever runs out first makes a dead letter that says so, with all bytes intact.
//! Not here: time, tasks and the backend. These are pure functions.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::limits::DELAY_MAX;
use headwater_stream::{DelayName, Due, EntryId, Epoch, MapName, StreamName, Then};

use super::lanes::Item;
use crate::config::{ConsumerConfig, Order};
use crate::dead_letter::{self, Origin};
use crate::keys;
use crate::message::{Malformed, Message, read_id};
use crate::retry::{Outcome, RetryPolicy};
use crate::topic::{GroupName, Partition, Topic};

/// The rules by which messages of one partition are handled.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    pub(super) topic: Arc<Topic>,
    pub(super) partition: Partition,
    pub(super) stream: StreamName,
    delays: DelayName,
    dead_letters: StreamName,
    group: GroupName,
    order: Order,
    retry: RetryPolicy,
    epoch: Option<Epoch>,
}

/// What happens next to a message.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Its delivery ends.
    End(Ending),
    /// It stays in hand and is tried again in its lane.
    Again {
        /// After this time.
        after: Duration,
    },
}

/// How a delivery ends.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) then: Then,
    pub(super) result: Ended,
}

/// How a delivery ended, for those who count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Done,
    Retry,
    Release,
    DeadLetter(Why),
    /// It is for another group.
    Skipped,
}

/// Why a message is a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Attempts,
    Crashes,
    Handler,
    Malformed,
}

impl Why {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Attempts => "attempts",
            Self::Crashes => "crashes",
            Self::Handler => "handler",
            Self::Malformed => "malformed",
        }
    }
}

impl Rules {
    pub(super) fn new(
        topic: Arc<Topic>,
        partition: Partition,
        group: GroupName,
        config: &ConsumerConfig,
        epoch: Option<Epoch>,
    ) -> Self {
        Self {
            stream: keys::stream(&topic, partition),
            delays: keys::delays(&topic, partition),
            dead_letters: keys::dead_letters(&topic),
            order: config.order,
            retry: config.retry.clone(),
            topic,
            partition,
            group,
            epoch,
        }
    }

    /// Where the witness of the partition lies.
    pub(super) fn witness(&self) -> MapName {
        keys::witness(&self.topic, self.partition)
    }

    /// The message for the handler, or what becomes of an entry that no handler shall see.
    pub(super) fn admit(&self, item: &Item) -> Result<Message, Ending> {
        let mut message = match self.read(item) {
            Ok(message) => message,
            Err(malformed) => return Err(self.malformed(item, &malformed)),
        };
        if message.retry_group.as_ref().is_some_and(|group| group != self.group.as_str()) {
            return Err(Ending { then: Then::Done, result: Ended::Skipped });
        }
        let crashes_max = u64::from(self.retry.max_crashes);
        let deliveries_max = match self.order {
            Order::Relaxed => crashes_max,
            // Tries in a lane are deliveries, too.
            Order::PerKey => crashes_max + u64::from(self.attempts_max(&message)),
        };
        if item.delivery.deliveries > deliveries_max {
            let reason = format!(
                "delivered {deliveries_max} times without an outcome: whoever handles it dies, or loses its lease"
            );
            return Err(self.dead_letter(
                item,
                &message,
                message.failures(),
                &reason,
                Why::Crashes,
            ));
        }
        message.epoch = self.epoch;
        Ok(message)
    }

    /// What becomes of a message after it was handled.
    pub(super) fn judge(&self, item: &Item, outcome: Outcome) -> Verdict {
        let (then, result) = match outcome {
            Outcome::Done => (Then::Done, Ended::Done),
            Outcome::Release => (Then::Release, Ended::Release),
            Outcome::Retry { after, reason } => return self.judge_failure(item, after, &reason),
            Outcome::DeadLetter { reason } => {
                return Verdict::End(match self.read(item) {
                    Ok(message) => {
                        let failures = message.attempt;
                        self.dead_letter(item, &message, failures, &reason, Why::Handler)
                    }
                    Err(malformed) => self.malformed(item, &malformed),
                });
            }
        };
        Verdict::End(Ending { then, result })
    }

    fn judge_failure(&self, item: &Item, after: Option<Duration>, reason: &str) -> Verdict {
        let message = match self.read(item) {
            Ok(message) => message,
            Err(malformed) => return Verdict::End(self.malformed(item, &malformed)),
        };
        let attempts_max = self.attempts_max(&message);
        if message.attempt >= attempts_max {
            let reason = format!("{reason} (attempt {} of {attempts_max})", message.attempt);
            let failures = message.attempt;
            let ending = self.dead_letter(item, &message, failures, &reason, Why::Attempts);
            return Verdict::End(ending);
        }
        let after = after.unwrap_or_else(|| self.retry.backoff.wait(message.attempt, chance()));
        let after = after.min(DELAY_MAX);
        if self.order == Order::PerKey && item.key.is_some() {
            return Verdict::Again { after };
        }
        let then = Then::PutAside {
            delays: self.delays.clone(),
            to: self.stream.clone(),
            due: Due::After(after),
            fields: message.to_retry(&self.group),
        };
        Verdict::End(Ending { then, result: Ended::Retry })
    }

    /// The entry as a message, its failures in the lane counted.
    fn read(&self, item: &Item) -> Result<Message, Malformed> {
        let mut message = Message::read(&self.topic.name, self.partition, item.delivery.clone())
            .map_err(|(malformed, _)| malformed)?;
        message.attempt = message.attempt.saturating_add(item.failures);
        Ok(message)
    }

    /// Deliveries of an entry that may be tries in its lane, whatever the message itself allows: at least so many are no
    /// sign of a crash.
    pub(super) fn tries_in_lane(&self) -> u64 {
        match self.order {
            Order::Relaxed => 0,
            // A message may allow no more than one try.
            Order::PerKey => u64::from(self.retry.max_attempts.unwrap_or(1)),
        }
    }

    fn attempts_max(&self, message: &Message) -> u32 {
        let retries = message.max_retries.unwrap_or(self.topic.policies.max_retries);
        self.retry.max_attempts.unwrap_or_else(|| retries.saturating_add(1))
    }

    fn dead_letter(
        &self,
        item: &Item,
        message: &Message,
        failures: u32,
        reason: &str,
        why: Why,
    ) -> Ending {
        self.to_dead_letters(item, message.first_id(), Some(failures), reason, why)
    }

    fn malformed(&self, item: &Item, malformed: &Malformed) -> Ending {
        let original = item.delivery.fields.get(crate::message::ORIGINAL_MESSAGE_ID);
        let first_id = original.and_then(read_id).unwrap_or(item.delivery.id);
        self.to_dead_letters(item, first_id, None, &malformed.to_string(), Why::Malformed)
    }

    fn to_dead_letters(
        &self,
        item: &Item,
        first_id: EntryId,
        failures: Option<u32>,
        reason: &str,
        why: Why,
    ) -> Ending {
        let origin = Origin {
            topic: &self.topic.name,
            partition: self.partition,
            first_id,
            group: &self.group,
        };
        let now = SystemClock.now();
        let fields = dead_letter::to_fields(&origin, &item.delivery.fields, failures, reason, now);
        let then = Then::Append { to: self.dead_letters.clone(), fields };
        Ending { then, result: Ended::DeadLetter(why) }
    }
}

/// Evenly from 0 to 1.
fn chance() -> f64 {
    (RandomState::new().hash_one(0_u8) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use headwater_stream::{Delivery, Fields};
    use tokio::time::Instant;

    use super::*;
    use crate::keys::Layout;
    use crate::retry::Backoff;
    use crate::topic::TopicName;

    fn rules(order: Order) -> Rules {
        let topic = Topic::plain(TopicName::new("orders").unwrap(), Layout::Partitioned);
        let backoff = Backoff::Fixed(Duration::from_secs(3));
        let retry = RetryPolicy { backoff, ..Default::default() };
        let config = ConsumerConfig { order, retry, ..Default::default() };
        Rules::new(Arc::new(topic), 0, GroupName::new("billing").unwrap(), &config, None)
    }

    fn item(fields: &[(&'static str, &'static str)], deliveries: u64) -> Item {
        let fields = Fields::new(fields.iter().copied());
        let key = fields.get("key").cloned();
        let delivery = Delivery { id: EntryId::new(7, 0), fields, deliveries };
        Item { delivery, failures: 0, key, came_at: Instant::now() }
    }

    fn result(verdict: Verdict) -> Ended {
        match verdict {
            Verdict::End(ending) => ending.result,
            Verdict::Again { .. } => panic!("it was to end"),
        }
    }

    #[test]
    fn failures_run_out_at_the_limit_of_subscription_or_message_or_topic() {
        let mut rules = rules(Order::Relaxed);
        let failed = |rules: &Rules, fields: &[_]| {
            result(rules.judge(&item(fields, 1), Outcome::retry("no")))
        };
        let attempts = Ended::DeadLetter(Why::Attempts);
        assert_eq!(failed(&rules, &[("retryCount", "3")]), Ended::Retry);
        assert_eq!(failed(&rules, &[("retryCount", "4")]), attempts);
        assert_eq!(failed(&rules, &[("retryCount", "1"), ("maxRetries", "1")]), attempts);
        rules.retry.max_attempts = Some(3);
        assert_eq!(failed(&rules, &[("retryCount", "1"), ("maxRetries", "1")]), Ended::Retry);
        assert_eq!(failed(&rules, &[("retryCount", "2")]), attempts);
    }

    #[test]
    fn crashes_run_out_on_their_own() {
        let relaxed = rules(Order::Relaxed);
        assert!(relaxed.admit(&item(&[("payload", "")], 5)).is_ok());
        let ending = relaxed.admit(&item(&[("payload", "")], 6)).unwrap_err();
        assert_eq!(ending.result, Ended::DeadLetter(Why::Crashes));
        let Then::Append { fields, to } = ending.then else { panic!("a dead letter was expected") };
        assert_eq!(to.as_str(), "stream:topic:orders:dlq");
        assert_eq!(fields.get("retryCount").unwrap(), "0", "a crash is no failure");
        let per_key = rules(Order::PerKey);
        assert!(per_key.admit(&item(&[("key", "k")], 10)).is_ok());
        assert!(per_key.admit(&item(&[("key", "k")], 11)).is_err());
    }

    #[test]
    fn a_message_with_a_key_waits_in_its_lane_only_if_order_is_asked_for() {
        let keyed = item(&[("key", "k"), ("payload", "p")], 1);
        let retry = || Outcome::retry("no");
        assert_eq!(result(rules(Order::Relaxed).judge(&keyed, retry())), Ended::Retry);
        let per_key = rules(Order::PerKey);
        let Verdict::Again { after } = per_key.judge(&keyed, retry()) else { panic!() };
        assert_eq!(after, Duration::from_secs(3));
        assert_eq!(result(per_key.judge(&item(&[("payload", "p")], 1), retry())), Ended::Retry);
        let fifth = Item { failures: 4, ..keyed };
        let attempts = Ended::DeadLetter(Why::Attempts);
        assert_eq!(result(per_key.judge(&fifth, retry())), attempts);
    }

    #[test]
    fn what_another_group_tries_again_is_left_to_it() {
        let rules = rules(Order::Relaxed);
        let came_back = |group| {
            item(&[("payload", "p"), ("originalMessageId", "5-0"), ("retryGroup", group)], 1)
        };
        assert!(rules.admit(&came_back("billing")).is_ok());
        let ending = rules.admit(&came_back("shipping")).unwrap_err();
        assert_eq!(ending.result, Ended::Skipped);
        assert!(matches!(ending.then, Then::Done));
    }

    #[test]
    fn a_malformed_entry_keeps_all_its_bytes_and_its_count() {
        let fields = [("retryCount", "many"), ("payload", "p"), ("odd", "\u{0}")];
        let ending = rules(Order::Relaxed).admit(&item(&fields, 1)).unwrap_err();
        assert_eq!(ending.result, Ended::DeadLetter(Why::Malformed));
        let Then::Append { fields: letter, .. } = ending.then else { panic!() };
        for (name, value) in fields {
            assert_eq!(letter.get(name).unwrap(), value);
        }
        let reason = letter.get("reason").unwrap();
        assert_eq!(reason, "field `retryCount` is not a number: `many`");
    }

    #[test]
    fn chance_is_spread_between_zero_and_one() {
        let drawn: Vec<f64> = (0..1000).map(|_| chance()).collect();
        assert!(drawn.iter().all(|chance| (0.0..1.0).contains(chance)));
        let low = drawn.iter().filter(|chance| **chance < 0.5).count();
        assert!((350..650).contains(&low), "{low} of 1000 below a half");
    }
}

//! Decides the disposition of a message from its handler's outcome: done, retry, release or dead letter.
//!
//! Upstream: `handler_pool`. Downstream: `partition_state`, which executes the decision.
//! Guarantees: failed attempts and crashes have separate limits. A failed attempt has a known outcome; a crash is a
//! delivery without one. Reaching either limit makes a dead letter that states the cause and keeps all bytes.
//! Not here: time, tasks and the backend. These are pure functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::limits::DELAY_MAX;
use headwater_stream::{DelayName, DueTime, EntryId, Epoch, MapName, SettleAction, StreamName};

use super::key_queues::InFlightMessage;
use crate::config::{ConsumerConfig, MessageOrder};
use crate::dead_letter::{self, DeadLetterOrigin};
use crate::handler::{Outcome, RetryPolicy};
use crate::keys;
use crate::message::{MalformedMessage, Message, read_id};
use crate::topic::{GroupName, Partition, Topic};

/// How the messages of one partition are handled: limits, retries and where follow-up entries go.
#[derive(Clone, Debug)]
pub(super) struct MessagePolicy {
    pub(super) topic: Arc<Topic>,
    pub(super) partition: Partition,
    pub(super) stream: StreamName,
    delays: DelayName,
    dead_letters: StreamName,
    group: GroupName,
    order: MessageOrder,
    retry: RetryPolicy,
    /// Retries of a message that sets no limit. Follows the topic while the partition is consumed.
    max_retries: Arc<AtomicU32>,
    epoch: Option<Epoch>,
}

/// What happens to a message after its handler returned.
#[derive(Debug)]
pub(super) enum Disposition {
    /// Its delivery is finished and settled.
    Settle(FinishedDelivery),
    /// It stays in flight, blocks its key and is retried.
    RetryInPlace {
        /// Backoff before the next attempt.
        after: Duration,
    },
}

/// A finished delivery and how to settle it.
#[derive(Debug)]
pub(super) struct FinishedDelivery {
    pub(super) action: SettleAction,
    pub(super) result: DeliveryResult,
}

/// Result of a delivery, as counted by metrics and stats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeliveryResult {
    Done,
    Retry,
    Release,
    DeadLetter(DeadLetterCause),
    /// A retry for another group.
    Skipped,
}

/// Why a message became a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeadLetterCause {
    Attempts,
    Crashes,
    Handler,
    Malformed,
}

impl DeadLetterCause {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Attempts => "attempts",
            Self::Crashes => "crashes",
            Self::Handler => "handler",
            Self::Malformed => "malformed",
        }
    }
}

impl MessagePolicy {
    pub(super) fn new(
        topic: Arc<Topic>,
        partition: Partition,
        group: GroupName,
        config: &ConsumerConfig,
        max_retries: Arc<AtomicU32>,
        epoch: Option<Epoch>,
    ) -> Self {
        Self {
            max_retries,
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

    /// The key of the partition's data epoch.
    pub(super) fn data_epoch(&self) -> MapName {
        keys::data_epoch(&self.topic, self.partition)
    }

    /// The message for the handler, or how to settle an entry that must not reach the handler.
    pub(super) fn accept(&self, item: &InFlightMessage) -> Result<Message, FinishedDelivery> {
        let mut message = match self.read(item) {
            Ok(message) => message,
            Err(malformed) => return Err(self.malformed(item, &malformed)),
        };
        if message.retry_group.as_ref().is_some_and(|group| group != self.group.as_str()) {
            return Err(FinishedDelivery {
                action: SettleAction::Ack,
                result: DeliveryResult::Skipped,
            });
        }
        let crashes_max = u64::from(self.retry.max_crashes);
        let deliveries_max = match self.order {
            MessageOrder::Relaxed => crashes_max,
            // Each attempt in place is a delivery, too.
            MessageOrder::PerKey => crashes_max + u64::from(self.attempts_max(&message)),
        };
        if item.delivery.deliveries > deliveries_max {
            let reason = format!(
                "delivered {deliveries_max} times without an outcome: its consumers crash or lose their lease"
            );
            return Err(self.dead_letter(
                item,
                &message,
                message.failures(),
                &reason,
                DeadLetterCause::Crashes,
            ));
        }
        message.epoch = self.epoch;
        Ok(message)
    }

    /// Decides what happens to a message after its handler returned.
    pub(super) fn decide(&self, item: &InFlightMessage, outcome: Outcome) -> Disposition {
        let (action, result) = match outcome {
            Outcome::Done => (SettleAction::Ack, DeliveryResult::Done),
            Outcome::Release => (SettleAction::Release, DeliveryResult::Release),
            Outcome::Retry { after, reason } => return self.decide_failure(item, after, &reason),
            Outcome::DeadLetter { reason } => {
                return Disposition::Settle(match self.read(item) {
                    Ok(message) => {
                        let failures = message.attempt;
                        self.dead_letter(
                            item,
                            &message,
                            failures,
                            &reason,
                            DeadLetterCause::Handler,
                        )
                    }
                    Err(malformed) => self.malformed(item, &malformed),
                });
            }
        };
        Disposition::Settle(FinishedDelivery { action, result })
    }

    fn decide_failure(
        &self,
        item: &InFlightMessage,
        after: Option<Duration>,
        reason: &str,
    ) -> Disposition {
        let message = match self.read(item) {
            Ok(message) => message,
            Err(malformed) => return Disposition::Settle(self.malformed(item, &malformed)),
        };
        let attempts_max = self.attempts_max(&message);
        if message.attempt >= attempts_max {
            let reason = format!("{reason} (attempt {} of {attempts_max})", message.attempt);
            let failures = message.attempt;
            let finished =
                self.dead_letter(item, &message, failures, &reason, DeadLetterCause::Attempts);
            return Disposition::Settle(finished);
        }
        let after =
            after.unwrap_or_else(|| self.retry.backoff.delay(message.attempt, fastrand::f64()));
        let after = after.min(DELAY_MAX);
        if self.order == MessageOrder::PerKey && item.key.is_some() {
            return Disposition::RetryInPlace { after };
        }
        let action = SettleAction::Reschedule {
            delays: self.delays.clone(),
            to: self.stream.clone(),
            due: DueTime::After(after),
            fields: message.to_retry(&self.group),
        };
        Disposition::Settle(FinishedDelivery { action, result: DeliveryResult::Retry })
    }

    /// The entry as a message, including its failed attempts in place.
    fn read(&self, item: &InFlightMessage) -> Result<Message, MalformedMessage> {
        let mut message = Message::read(&self.topic.name, self.partition, item.delivery.clone())
            .map_err(|(malformed, _)| malformed)?;
        message.attempt = message.attempt.saturating_add(item.failures);
        Ok(message)
    }

    /// Deliveries of an entry that may be attempts in place, whatever limit the message sets: so many deliveries do not
    /// indicate a crash.
    pub(super) fn in_place_attempts(&self) -> u64 {
        match self.order {
            MessageOrder::Relaxed => 0,
            // A message may allow a single attempt.
            MessageOrder::PerKey => u64::from(self.retry.max_attempts.unwrap_or(1)),
        }
    }

    fn attempts_max(&self, message: &Message) -> u32 {
        let retries =
            message.max_retries.unwrap_or_else(|| self.max_retries.load(Ordering::Relaxed));
        self.retry.max_attempts.unwrap_or_else(|| retries.saturating_add(1))
    }

    fn dead_letter(
        &self,
        item: &InFlightMessage,
        message: &Message,
        failures: u32,
        reason: &str,
        cause: DeadLetterCause,
    ) -> FinishedDelivery {
        self.to_dead_letters(item, message.first_id(), Some(failures), reason, cause)
    }

    fn malformed(&self, item: &InFlightMessage, malformed: &MalformedMessage) -> FinishedDelivery {
        let original = item.delivery.fields.get(crate::message::ORIGINAL_MESSAGE_ID);
        let first_id = original.and_then(read_id).unwrap_or(item.delivery.id);
        self.to_dead_letters(
            item,
            first_id,
            None,
            &malformed.to_string(),
            DeadLetterCause::Malformed,
        )
    }

    fn to_dead_letters(
        &self,
        item: &InFlightMessage,
        first_id: EntryId,
        failures: Option<u32>,
        reason: &str,
        cause: DeadLetterCause,
    ) -> FinishedDelivery {
        let origin = DeadLetterOrigin {
            topic: &self.topic.name,
            partition: self.partition,
            first_id,
            group: &self.group,
        };
        let now = SystemClock.now();
        let fields = dead_letter::to_fields(&origin, &item.delivery.fields, failures, reason, now);
        let action = SettleAction::Append { to: self.dead_letters.clone(), fields };
        FinishedDelivery { action, result: DeliveryResult::DeadLetter(cause) }
    }
}

#[cfg(test)]
mod tests {
    use headwater_stream::{DeliveredEntry, Fields};
    use tokio::time::Instant;

    use super::*;
    use crate::keys::Layout;
    use crate::topic::TopicName;
    use headwater_stream::Backoff;

    fn policy(order: MessageOrder) -> MessagePolicy {
        let topic = Topic::plain(TopicName::new("orders").unwrap(), Layout::Partitioned);
        let backoff = Backoff::Fixed(Duration::from_secs(3));
        let retry = RetryPolicy { backoff, ..Default::default() };
        let config = ConsumerConfig { order, retry, ..Default::default() };
        let (retries, group) =
            (topic.policies.max_retries.into(), GroupName::new("billing").unwrap());
        MessagePolicy::new(Arc::new(topic), 0, group, &config, Arc::new(retries), None)
    }

    fn item(fields: &[(&'static str, &'static str)], deliveries: u64) -> InFlightMessage {
        let fields = Fields::new(fields.iter().copied());
        let key = fields.get("key").cloned();
        let delivery = DeliveredEntry { id: EntryId::new(7, 0), fields, deliveries };
        InFlightMessage { delivery, failures: 0, key, received_at: Instant::now() }
    }

    fn result(disposition: Disposition) -> DeliveryResult {
        match disposition {
            Disposition::Settle(finished) => finished.result,
            Disposition::RetryInPlace { .. } => panic!("expected a settled message"),
        }
    }

    #[test]
    fn a_message_becomes_a_dead_letter_at_the_attempt_limit_of_subscription_message_or_topic() {
        let mut policy = policy(MessageOrder::Relaxed);
        let failed = |policy: &MessagePolicy, fields: &[_]| {
            result(policy.decide(&item(fields, 1), Outcome::retry("no")))
        };
        let attempts = DeliveryResult::DeadLetter(DeadLetterCause::Attempts);
        assert_eq!(failed(&policy, &[("retryCount", "3")]), DeliveryResult::Retry);
        assert_eq!(failed(&policy, &[("retryCount", "4")]), attempts);
        assert_eq!(failed(&policy, &[("retryCount", "1"), ("maxRetries", "1")]), attempts);
        policy.retry.max_attempts = Some(3);
        assert_eq!(
            failed(&policy, &[("retryCount", "1"), ("maxRetries", "1")]),
            DeliveryResult::Retry
        );
        assert_eq!(failed(&policy, &[("retryCount", "2")]), attempts);
    }

    #[test]
    fn crashes_have_their_own_limit() {
        let relaxed = policy(MessageOrder::Relaxed);
        assert!(relaxed.accept(&item(&[("payload", "")], 5)).is_ok());
        let finished = relaxed.accept(&item(&[("payload", "")], 6)).unwrap_err();
        assert_eq!(finished.result, DeliveryResult::DeadLetter(DeadLetterCause::Crashes));
        let SettleAction::Append { fields, to } = finished.action else {
            panic!("expected a dead letter")
        };
        assert_eq!(to.as_str(), "stream:topic:orders:dlq");
        assert_eq!(fields.get("retryCount").unwrap(), "0", "a crash is not a failed attempt");
        let per_key = policy(MessageOrder::PerKey);
        assert!(per_key.accept(&item(&[("key", "k")], 10)).is_ok());
        assert!(per_key.accept(&item(&[("key", "k")], 11)).is_err());
    }

    #[test]
    fn a_keyed_message_is_retried_in_place_only_with_per_key_order() {
        let keyed = item(&[("key", "k"), ("payload", "p")], 1);
        let retry = || Outcome::retry("no");
        assert_eq!(
            result(policy(MessageOrder::Relaxed).decide(&keyed, retry())),
            DeliveryResult::Retry
        );
        let per_key = policy(MessageOrder::PerKey);
        let Disposition::RetryInPlace { after } = per_key.decide(&keyed, retry()) else { panic!() };
        assert_eq!(after, Duration::from_secs(3));
        assert_eq!(
            result(per_key.decide(&item(&[("payload", "p")], 1), retry())),
            DeliveryResult::Retry
        );
        let fifth = InFlightMessage { failures: 4, ..keyed };
        let attempts = DeliveryResult::DeadLetter(DeadLetterCause::Attempts);
        assert_eq!(result(per_key.decide(&fifth, retry())), attempts);
    }

    #[test]
    fn a_retry_for_another_group_is_skipped() {
        let policy = policy(MessageOrder::Relaxed);
        let retried = |group| {
            item(&[("payload", "p"), ("originalMessageId", "5-0"), ("retryGroup", group)], 1)
        };
        assert!(policy.accept(&retried("billing")).is_ok());
        let finished = policy.accept(&retried("shipping")).unwrap_err();
        assert_eq!(finished.result, DeliveryResult::Skipped);
        assert!(matches!(finished.action, SettleAction::Ack));
    }

    #[test]
    fn a_malformed_entry_keeps_all_its_bytes_and_its_retry_count() {
        let fields = [("retryCount", "many"), ("payload", "p"), ("odd", "\u{0}")];
        let finished = policy(MessageOrder::Relaxed).accept(&item(&fields, 1)).unwrap_err();
        assert_eq!(finished.result, DeliveryResult::DeadLetter(DeadLetterCause::Malformed));
        let SettleAction::Append { fields: letter, .. } = finished.action else { panic!() };
        for (name, value) in fields {
            assert_eq!(letter.get(name).unwrap(), value);
        }
        let reason = letter.get("reason").unwrap();
        assert_eq!(reason, "field `retryCount` is not a number: `many`");
    }
}

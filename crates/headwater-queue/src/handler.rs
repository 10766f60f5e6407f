//! The handler of a subscription, the outcome it returns for a message, and the retry policy.
//!
//! Upstream: applications. Downstream: `consumer::retry_or_dead_letter` decides by outcome and policy.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{QueueError, Result};
use crate::limits::ATTEMPTS_MAX;
use crate::message::Message;

/// Result of handling a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Handled: the message is acknowledged.
    Done,
    /// Failed: the message is retried until it reaches the attempt limit, then it becomes a dead letter.
    Retry {
        /// Delay before the retry; `None` uses the [`RetryPolicy`].
        after: Option<Duration>,
        /// Why it failed; recorded in the dead letter.
        reason: String,
    },
    /// Released unhandled: redelivered later, not counted as an attempt.
    Release,
    /// Cannot succeed: the message becomes a dead letter at once.
    DeadLetter {
        /// Why it cannot succeed.
        reason: String,
    },
}

impl Outcome {
    /// A retry after the backoff of the policy.
    pub fn retry(reason: impl fmt::Display) -> Self {
        Self::Retry { after: None, reason: reason.to_string() }
    }

    /// A retry after this delay.
    pub fn retry_after(after: Duration, reason: impl fmt::Display) -> Self {
        Self::Retry { after: Some(after), reason: reason.to_string() }
    }

    /// A dead letter.
    pub fn dead_letter(reason: impl fmt::Display) -> Self {
        Self::DeadLetter { reason: reason.to_string() }
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// An error becomes a retry, with the error and its sources as the reason.
impl<T: Into<Outcome>, E: fmt::Display> From<Result<T, E>> for Outcome {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(outcome) => outcome.into(),
            Err(error) => Self::retry(format!("{error:#}")),
        }
    }
}

/// Handles messages. Implemented for every `Fn(Message) -> impl Future` whose output is an [`Outcome`], `()`, or a
/// `Result` of one of them.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Handles one message. A panic counts as a failed attempt.
    async fn handle(&self, message: Message) -> Outcome;
}

#[async_trait]
impl<F, Fut> Handler for F
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future + Send,
    Fut::Output: Into<Outcome>,
{
    async fn handle(&self, message: Message) -> Outcome {
        self(message).await.into()
    }
}

/// When and how often a failed message is retried.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    /// Attempts in total, 1 to 1,000. `None` (default): the message's `maxRetries`, else the topic's, plus one.
    pub max_attempts: Option<u32>,
    /// Deliveries without an outcome (the process crashed, perhaps because of the message) after which the message
    /// becomes a dead letter, 1 to 1,000. Default: 5.
    pub max_crashes: u32,
    /// Delay before the next attempt.
    pub backoff: Backoff,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { max_attempts: None, max_crashes: 5, backoff: Backoff::default() }
    }
}

impl RetryPolicy {
    pub(crate) fn validate(&self) -> Result<()> {
        let counts =
            [("max_attempts", self.max_attempts.unwrap_or(1)), ("max_crashes", self.max_crashes)];
        for (name, count) in counts {
            if !(1..=ATTEMPTS_MAX).contains(&count) {
                return Err(QueueError::invalid(
                    name,
                    format!("{count}; must be 1 to {ATTEMPTS_MAX}"),
                ));
            }
        }
        self.backoff.validate()
    }
}

/// Delay before a failed message is retried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backoff {
    /// Constant.
    Fixed(Duration),
    /// Exponential with jitter, so that messages that failed together are not retried together.
    Exponential {
        /// Delay after the first failure. Default: 1 s.
        first: Duration,
        /// Multiplier per failure, 1 to 1,000. Default: 2.
        factor: f64,
        /// Maximum delay. Default: 60 s.
        max: Duration,
        /// Random share of the delay, 0 to 1. Default: 1 (full jitter).
        jitter: f64,
    },
}

impl Default for Backoff {
    fn default() -> Self {
        Self::Exponential {
            first: Duration::from_secs(1),
            factor: 2.0,
            max: Duration::from_secs(60),
            jitter: 1.0,
        }
    }
}

impl Backoff {
    /// The delay after the `failures`th failure (from 1). `random` is uniform in 0..1.
    pub fn delay(&self, failures: u32, random: f64) -> Duration {
        match *self {
            Self::Fixed(delay) => delay,
            Self::Exponential { first, factor, max, jitter } => {
                let exponent = failures.saturating_sub(1).min(10_000);
                let full = first.as_secs_f64() * factor.powi(exponent as i32);
                let full = full.min(max.as_secs_f64());
                Duration::from_secs_f64(full * (1.0 - jitter * random.clamp(0.0, 1.0)))
            }
        }
    }

    fn validate(&self) -> Result<()> {
        let Self::Exponential { factor, max, jitter, first } = *self else { return Ok(()) };
        if !(1.0..=1000.0).contains(&factor) {
            return Err(QueueError::invalid("factor", format!("{factor}; must be 1 to 1000")));
        }
        if !(0.0..=1.0).contains(&jitter) {
            return Err(QueueError::invalid("jitter", format!("{jitter}; must be 0 to 1")));
        }
        if first > max {
            return Err(QueueError::invalid(
                "first",
                format!("{first:?} is greater than `max` ({max:?})"),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_its_maximum_and_jitter_only_shortens_it() {
        let backoff = Backoff::default();
        let seconds: Vec<u64> = (1..=8).map(|n| backoff.delay(n, 0.0).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(backoff.delay(3, 1.0), Duration::ZERO);
        assert_eq!(backoff.delay(3, 0.5), Duration::from_secs(2));
        assert_eq!(backoff.delay(u32::MAX, 0.0), Duration::from_secs(60));
        assert_eq!(Backoff::Fixed(Duration::from_secs(3)).delay(9, 0.5), Duration::from_secs(3));
    }

    #[test]
    fn invalid_numbers_are_rejected() {
        let exponential = |factor, jitter| Backoff::Exponential {
            first: Duration::from_secs(1),
            factor,
            max: Duration::from_secs(2),
            jitter,
        };
        for backoff in [exponential(0.5, 1.0), exponential(f64::NAN, 1.0), exponential(2.0, 1.5)] {
            let policy = RetryPolicy { backoff, ..Default::default() };
            assert!(matches!(policy.validate(), Err(QueueError::Invalid { .. })), "{policy:?}");
        }
        let none = RetryPolicy { max_attempts: Some(0), ..Default::default() };
        assert!(none.validate().is_err());
        assert!(RetryPolicy::default().validate().is_ok());
    }

    #[test]
    fn return_values_of_handlers_become_outcomes() {
        assert_eq!(Outcome::from(()), Outcome::Done);
        assert_eq!(Outcome::from(Ok::<(), String>(())), Outcome::Done);
        assert_eq!(Outcome::from(Err::<(), _>("no route")), Outcome::retry("no route"));
        assert_eq!(Outcome::from(Ok::<_, String>(Outcome::Release)), Outcome::Release);
    }
}

//! What a handler says of a message, and when a failed one is tried again.
//!
//! Upstream: applications. Downstream: `consumer`, which carries it out.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{QueueError, Result};
use crate::limits::ATTEMPTS_MAX;
use crate::message::Message;

/// What becomes of a message after it was handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done.
    Done,
    /// It failed and is tried again, until it runs out of attempts.
    Retry {
        /// When; `None` leaves it to the [`RetryPolicy`].
        after: Option<Duration>,
        /// Why, for the dead letter it may become.
        reason: String,
    },
    /// It is given back unhandled; this delivery does not count.
    Release,
    /// It can never succeed: it goes to the dead letters now.
    DeadLetter {
        /// Why.
        reason: String,
    },
}

impl Outcome {
    /// Tries again when the policy says.
    pub fn retry(reason: impl fmt::Display) -> Self {
        Self::Retry { after: None, reason: reason.to_string() }
    }

    /// Tries again after this time.
    pub fn retry_after(after: Duration, reason: impl fmt::Display) -> Self {
        Self::Retry { after: Some(after), reason: reason.to_string() }
    }

    /// Gives up.
    pub fn dead_letter(reason: impl fmt::Display) -> Self {
        Self::DeadLetter { reason: reason.to_string() }
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// An error is a retry, whose reason is the error with its sources.
impl<T: Into<Outcome>, E: fmt::Display> From<Result<T, E>> for Outcome {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(outcome) => outcome.into(),
            Err(error) => Self::retry(format!("{error:#}")),
        }
    }
}

/// Handles messages. Any `Fn(Message) -> impl Future` whose output is an [`Outcome`], `()`, or a
/// `Result` of one of them is one.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Handles one message. A panic counts as a failure.
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

/// When and how often a failed message is tried again.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    /// Tries in all; `None` (default) leaves it to the message's own `maxRetries`, or else to the topic.
    pub max_attempts: Option<u32>,
    /// Deliveries without an outcome (the process died, the message may be why) before the dead letters. Default: 5.
    pub max_crashes: u32,
    /// How long to wait before the next try.
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
                return Err(QueueError::invalid(name, format!("{count}; 1 to {ATTEMPTS_MAX}")));
            }
        }
        self.backoff.validate()
    }
}

/// How long to wait before a message is tried again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backoff {
    /// Always the same.
    Fixed(Duration),
    /// Longer each time, and any time up to that: full jitter, so that what failed together does not return together.
    Exponential {
        /// The longest wait before the second try. Default: 1 s.
        first: Duration,
        /// How much longer each time. Default: 2.
        factor: f64,
        /// The longest wait. Default: 60 s.
        max: Duration,
        /// How much of the wait is left to chance: 0 for none, 1 (default) for all of it.
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
    /// The wait after the `failures`th failure (from 1). `chance` is drawn evenly from 0 to 1.
    pub fn wait(&self, failures: u32, chance: f64) -> Duration {
        match *self {
            Self::Fixed(wait) => wait,
            Self::Exponential { first, factor, max, jitter } => {
                let doublings = failures.saturating_sub(1).min(10_000);
                let full = first.as_secs_f64() * factor.powi(doublings as i32);
                let full = full.min(max.as_secs_f64());
                Duration::from_secs_f64(full * (1.0 - jitter * chance.clamp(0.0, 1.0)))
            }
        }
    }

    fn validate(&self) -> Result<()> {
        let Self::Exponential { factor, max, jitter, first } = *self else { return Ok(()) };
        if !(1.0..=1000.0).contains(&factor) {
            return Err(QueueError::invalid("factor", format!("{factor}; 1 to 1000")));
        }
        if !(0.0..=1.0).contains(&jitter) {
            return Err(QueueError::invalid("jitter", format!("{jitter}; 0 to 1")));
        }
        if first > max {
            return Err(QueueError::invalid("first", format!("{first:?} is above max {max:?}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_its_cap_and_chance_only_shortens_it() {
        let backoff = Backoff::default();
        let seconds: Vec<u64> = (1..=8).map(|n| backoff.wait(n, 0.0).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(backoff.wait(3, 1.0), Duration::ZERO);
        assert_eq!(backoff.wait(3, 0.5), Duration::from_secs(2));
        assert_eq!(backoff.wait(u32::MAX, 0.0), Duration::from_secs(60));
        assert_eq!(Backoff::Fixed(Duration::from_secs(3)).wait(9, 0.5), Duration::from_secs(3));
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
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
    fn what_handlers_return_becomes_an_outcome() {
        assert_eq!(Outcome::from(()), Outcome::Done);
        assert_eq!(Outcome::from(Ok::<(), String>(())), Outcome::Done);
        assert_eq!(Outcome::from(Err::<(), _>("no route")), Outcome::retry("no route"));
        assert_eq!(Outcome::from(Ok::<_, String>(Outcome::Release)), Outcome::Release);
    }
}

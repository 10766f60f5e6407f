//! The handler of a subscription, the outcome it returns for a message, and the retry policy.
//!
//! Upstream: applications. Downstream: `consumer::retry_or_dead_letter` decides by outcome and policy.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::{Backoff, StreamError};

use crate::error::{QueueError, Result};
use crate::limits::{ATTEMPTS_MAX, REASON_BYTES_MAX};
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

    /// A retry because of an error. The reason is the error with its sources.
    pub fn retry_error(error: &(dyn Error + '_)) -> Self {
        Self::Retry { after: None, reason: with_sources(error) }
    }

    /// A dead letter because of an error. The reason is the error with its sources.
    pub fn dead_letter_error(error: &(dyn Error + '_)) -> Self {
        Self::DeadLetter { reason: with_sources(error) }
    }

    /// A dead letter.
    pub fn dead_letter(reason: impl fmt::Display) -> Self {
        Self::DeadLetter { reason: reason.to_string() }
    }
}

/// An error and its sources, joined by `: `. A source that the text before it contains already is left out, since many
/// errors print their source. At most [`SOURCES_MAX`] of them, each cut to [`SOURCE_BYTES_MAX`] bytes, so that the first
/// cause is not lost when a reason is truncated.
fn with_sources(error: &(dyn Error + '_)) -> String {
    let cut = |text: String| text[..text.floor_char_boundary(SOURCE_BYTES_MAX)].to_owned();
    let mut chain = vec![cut(error.to_string())];
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cut(cause.to_string());
        if chain.last().is_none_or(|last| !last.contains(&text)) {
            // A chain that is too long keeps its beginning and its end, the first cause.
            if chain.len() > SOURCES_MAX {
                chain.pop();
            }
            chain.push(text);
        }
        source = cause.source();
    }
    chain.join(": ")
}

/// Sources of an error in a reason, and bytes of each.
const SOURCES_MAX: usize = 8;
const SOURCE_BYTES_MAX: usize = 400;
const _: () = assert!((SOURCES_MAX + 1) * (SOURCE_BYTES_MAX + 2) <= REASON_BYTES_MAX);

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// An error becomes a retry. The reason is its text in the alternate form (`{error:#}`), which has the sources of an
/// `anyhow::Error`; for other errors use [`Outcome::retry_error`].
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
        self.backoff.validate().map_err(|error| match error {
            StreamError::Invalid { what, problem } => QueueError::Invalid { what, problem },
            other => other.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn invalid_numbers_are_rejected() {
        let backoff = Backoff::Exponential { first: SECOND, factor: 0.5, max: SECOND, jitter: 1.0 };
        for policy in [
            RetryPolicy { backoff, ..Default::default() },
            RetryPolicy { max_attempts: Some(0), ..Default::default() },
        ] {
            assert!(matches!(policy.validate(), Err(QueueError::Invalid { .. })), "{policy:?}");
        }
        assert!(RetryPolicy::default().validate().is_ok());
    }

    #[test]
    fn return_values_of_handlers_become_outcomes() {
        assert_eq!(Outcome::from(()), Outcome::Done);
        assert_eq!(Outcome::from(Ok::<(), String>(())), Outcome::Done);
        assert_eq!(Outcome::from(Err::<(), _>("no route")), Outcome::retry("no route"));
        assert_eq!(Outcome::from(Ok::<_, String>(Outcome::Release)), Outcome::Release);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct ChainedError {
        text: String,
        #[source]
        source: Option<Box<ChainedError>>,
    }

    fn chain(texts: &[&str]) -> ChainedError {
        let mut error = None;
        for text in texts.iter().rev() {
            error = Some(ChainedError { text: (*text).to_owned(), source: error.map(Box::new) });
        }
        error.unwrap()
    }

    #[test]
    fn the_reason_of_an_error_has_its_sources_and_is_bounded() {
        let error = chain(&["charging failed", "the bank refused: no such card", "no such card"]);
        let reason = "charging failed: the bank refused: no such card";
        assert_eq!(Outcome::retry_error(&error), Outcome::retry(reason));
        assert_eq!(Outcome::dead_letter_error(&error), Outcome::dead_letter(reason));

        let long: Vec<String> = (0..100).map(|n| format!("{n}-{}", "é".repeat(1000))).collect();
        let mut texts: Vec<&str> = long.iter().map(String::as_str).collect();
        texts.push("the first cause");
        let Outcome::Retry { reason, .. } = Outcome::retry_error(&chain(&texts)) else { panic!() };
        assert!(reason.len() <= REASON_BYTES_MAX, "{}", reason.len());
        assert!(reason.starts_with("0-é") && reason.ends_with("the first cause"));
    }
}

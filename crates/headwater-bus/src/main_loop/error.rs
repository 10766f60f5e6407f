//! Errors of requests, for the code that executes them and for callers.

use std::fmt;
use std::time::Duration;

use headwater_stream::StreamError;

use super::budget::OverBudget;
use crate::builtin_events::{RequestFailure, RequestUsage};
use crate::error::BusError;
use crate::limits::FAILURE_BYTES_MAX;
use crate::name::{RequestId, SessionId};

/// Why an attempt failed. Every error converts into it with `?` and is retried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecuteError {
    pub(crate) reason: String,
    pub(crate) is_permanent: bool,
}

impl ExecuteError {
    /// A failure to be retried.
    pub fn retry(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), is_permanent: false }
    }

    /// A permanent failure: the request fails without further attempts.
    pub fn give_up(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), is_permanent: true }
    }
}

// Does not implement `Error`, so that the blanket conversion below is possible.
impl<E: std::error::Error> From<E> for ExecuteError {
    fn from(error: E) -> Self {
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            if !reason.contains(&text) {
                reason = format!("{reason}: {text}");
            }
            source = cause.source();
        }
        Self::retry(reason)
    }
}

/// Why a request has no output.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MainLoopError {
    /// The request failed. Submit it again under a new id to retry.
    #[error("request `{}` failed ({}): {}", .0.request_id, .0.kind, .0.error)]
    Failed(Box<FailedRequest>),

    /// No reply within the timeout. The request continues; `reply` and `wait` fetch its reply later.
    #[error("no reply to request `{request_id}` within {after:?}; it may still arrive")]
    TimedOut {
        /// The request.
        request_id: RequestId,
        /// The timeout.
        after: Duration,
    },

    /// The deadline passed without a reply, possibly before the request was submitted. No worker starts it any more,
    /// and a running one stops it; `reply` and `wait` fetch the worker's reply.
    #[error("no reply to request `{request_id}` by its deadline; `reply` fetches a later one")]
    DeadlinePassed {
        /// The request.
        request_id: RequestId,
    },

    /// It is unknown whether the request was submitted. Submit it again under the same id; that is idempotent.
    #[error("request `{request_id}` may not have been submitted: {source}")]
    NotSubmitted {
        /// The request.
        request_id: RequestId,
        /// Error of the bus.
        source: BusError,
    },

    /// The reply is no longer kept.
    #[error("the reply to request `{request_id}` is no longer kept")]
    ReplyGone {
        /// The request.
        request_id: RequestId,
    },

    /// The reply could not be decoded.
    #[error("the reply to request `{request_id}` cannot be decoded: {problem}")]
    Unreadable {
        /// The request.
        request_id: RequestId,
        /// The decoding error.
        problem: String,
    },

    /// The parent request exceeded its budget.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),

    /// Error of the bus or its backend.
    #[error(transparent)]
    Bus(#[from] BusError),
}

impl MainLoopError {
    /// Whether a retry of the same call may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::NotSubmitted { source, .. } | Self::Bus(source) => source.is_transient(),
            _ => false,
        }
    }

    /// Why the request failed, if it did.
    pub fn failure(&self) -> Option<RequestFailure> {
        match self {
            Self::Failed(failed) => Some(failed.kind),
            Self::DeadlinePassed { .. } => Some(RequestFailure::DeadlinePassed),
            _ => None,
        }
    }
}

impl From<StreamError> for MainLoopError {
    fn from(error: StreamError) -> Self {
        Self::Bus(error.into())
    }
}

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedRequest {
    /// The request.
    pub request_id: RequestId,
    /// Failure category.
    pub kind: RequestFailure,
    /// Error message.
    pub error: String,
    /// The session in which it was executed, if execution started.
    pub session: Option<SessionId>,
    /// Resources charged to the request.
    pub usage: RequestUsage,
}

/// Truncates an error message to `FAILURE_BYTES_MAX`.
pub(super) fn truncate_message(mut text: String) -> String {
    if text.len() > FAILURE_BYTES_MAX {
        let mut end = FAILURE_BYTES_MAX;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_is_retried_and_keeps_its_sources() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::num::ParseIntError);
        let fails = || -> Result<(), ExecuteError> {
            let number: Result<u8, _> = "x".parse();
            number.map_err(Outer)?;
            Ok(())
        };
        let expected = ExecuteError::retry("outer: invalid digit found in string");
        assert_eq!(fails(), Err(expected));
        assert!(ExecuteError::give_up("never").is_permanent);
    }

    #[test]
    fn long_messages_are_truncated_between_characters() {
        let long = truncate_message("键".repeat(FAILURE_BYTES_MAX));
        assert!(long.len() <= FAILURE_BYTES_MAX + '…'.len_utf8() && long.ends_with("键…"));
        assert_eq!(truncate_message("short".to_owned()), "short");
    }
}

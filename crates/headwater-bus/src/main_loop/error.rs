//! What can go wrong with a request, for those who carry it out and for those who wait.

use std::fmt;
use std::time::Duration;

use headwater_stream::StreamError;

use super::budget::OverBudget;
use crate::builtin_events::{RequestFailure, RequestUsage};
use crate::error::BusError;
use crate::limits::FAILURE_BYTES_MAX;
use crate::name::{RequestId, SessionId};

/// Why a request could not be carried out this time. Every error becomes one with `?`, and is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecuteError {
    pub(crate) reason: String,
    pub(crate) is_permanent: bool,
}

impl ExecuteError {
    /// It may work the next time.
    pub fn retry(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), is_permanent: false }
    }

    /// It can never work: the request fails now.
    pub fn give_up(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string(), is_permanent: true }
    }
}

// Not an error itself, so that all errors can become one.
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

/// Why there is no output of a request.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MainLoopError {
    /// It was given up. A new try needs a new id.
    #[error("request `{}` failed ({}): {}", .0.request_id, .0.kind, .0.error)]
    Failed(Box<FailedRequest>),

    /// No reply came in time. The request goes on; `reply` and `wait` fetch what comes of it.
    #[error("no reply to request `{request_id}` within {after:?}; it may still come")]
    TimedOut {
        /// The request.
        request_id: RequestId,
        /// How long it was waited for.
        after: Duration,
    },

    /// The deadline of the request passed before a reply came, and perhaps before it was submitted. No worker begins it
    /// any more, and one that runs it ends; `reply` and `wait` fetch what the worker answers.
    #[error(
        "no reply to request `{request_id}` by its deadline; `reply` fetches one that comes later"
    )]
    DeadlinePassed {
        /// The request.
        request_id: RequestId,
    },

    /// It is not known whether the request was taken. Submit it again under the same id: it counts once.
    #[error("request `{request_id}` may not have been submitted: {source}")]
    NotSubmitted {
        /// The request.
        request_id: RequestId,
        /// What the bus said.
        source: BusError,
    },

    /// There was a reply, but it is not kept any more.
    #[error("the reply to request `{request_id}` is not kept any more")]
    ReplyGone {
        /// The request.
        request_id: RequestId,
    },

    /// The reply is not what was asked for.
    #[error("the reply to request `{request_id}` cannot be read: {problem}")]
    Unreadable {
        /// The request.
        request_id: RequestId,
        /// What does not fit.
        problem: String,
    },

    /// The run on whose behalf it was asked is over its budget.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),

    /// The bus or its backend refused.
    #[error(transparent)]
    Bus(#[from] BusError),
}

impl MainLoopError {
    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::NotSubmitted { source, .. } | Self::Bus(source) => source.is_transient(),
            _ => false,
        }
    }

    /// Why the request was given up, if it was.
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

/// A request that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedRequest {
    /// The request.
    pub request_id: RequestId,
    /// Why.
    pub kind: RequestFailure,
    /// Why, in words.
    pub error: String,
    /// The session in which it was tried, if it came that far.
    pub session: Option<SessionId>,
    /// What it took, as far as it was charged.
    pub usage: RequestUsage,
}

/// Cuts what somebody said down to what an event can carry.
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
    fn every_error_is_tried_again_and_keeps_its_causes() {
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
    fn long_reasons_are_cut_between_characters() {
        let long = truncate_message("键".repeat(FAILURE_BYTES_MAX));
        assert!(long.len() <= FAILURE_BYTES_MAX + '…'.len_utf8() && long.ends_with("键…"));
        assert_eq!(truncate_message("short".to_owned()), "short");
    }
}

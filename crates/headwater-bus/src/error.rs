//! Errors of a bus, split by what the caller does next.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use headwater_queue::QueueError;
use headwater_stream::StreamError;

use crate::name::{EventId, SubscriptionId};

/// Result alias of this crate.
pub type Result<T, E = BusError> = std::result::Result<T, E>;

/// Why a call to a bus failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BusError {
    /// Invalid argument. Fix the call; it had no effect.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// The argument.
        what: String,
        /// What is wrong, and what is allowed.
        problem: String,
    },

    /// The payload exceeds the limit. Store the data elsewhere and publish a reference; the call had no effect.
    #[error("event `{event_type}` has {bytes} bytes of payload; the limit is {limit}")]
    TooLarge {
        /// The type of the event.
        event_type: String,
        /// Size of its payload.
        bytes: usize,
        /// The limit.
        limit: usize,
    },

    /// The event type is not registered on this bus. Register it; the call had no effect.
    #[error("event type `{event_type}` is not registered on this bus: {problem}")]
    NotRegistered {
        /// The event type.
        event_type: String,
        /// Whether it is missing or registered by another Rust type.
        problem: String,
    },

    /// An entry could not be decoded.
    #[error(transparent)]
    Decode(#[from] DecodeError),

    /// The backend did not confirm the event: it may or may not be stored. With an id of the caller's, publishing it
    /// again is idempotent.
    #[error("event `{event_id}` was not confirmed and may or may not be stored: {source}")]
    Unconfirmed {
        /// The event.
        event_id: EventId,
        /// Error of the backend.
        source: Arc<StreamError>,
    },

    /// The circuit breaker is open after repeated backend failures. The call had no effect.
    #[error("circuit breaker is open after repeated backend failures; retry in {retry_after:?}")]
    BreakerOpen {
        /// Time until the next call is admitted.
        retry_after: Duration,
    },

    /// The spool is full, and the event is not stored. Wait until it is drained or raise the limit. If an earlier attempt
    /// was not confirmed, the error is [`Unconfirmed`](Self::Unconfirmed) instead.
    #[error("spool `{}` is full: {bytes} of {limit} bytes", directory.display())]
    SpoolFull {
        /// The directory.
        directory: PathBuf,
        /// Bytes of the events in it.
        bytes: u64,
        /// Its limit.
        limit: u64,
    },

    /// The spool cannot be used. The source tells why: `Locked` by another process, `Corrupt`, `Invalid` if it belongs to
    /// another bus, `Unavailable` after an I/O error. Nothing was changed.
    #[error("spool `{}` cannot be used: {source}", directory.display())]
    Spool {
        /// The directory.
        directory: PathBuf,
        /// Error of the embedded backend.
        source: Arc<StreamError>,
    },

    /// The bus is closed.
    #[error("the bus is closed")]
    Closed,

    /// Handlers of this process failed. The event is stored.
    #[error("{} handlers of event `{event_id}` failed, the first with: {}", failures.len(),
        failures.first().map_or("", |failure| failure.reason.as_str()))]
    Handlers {
        /// The event.
        event_id: EventId,
        /// The failed handlers.
        failures: Vec<HandlerFailure>,
    },

    /// The backend returned an error. [`StreamError`] tells whether a retry may succeed.
    #[error(transparent)]
    Backend(Arc<StreamError>),

    /// A durable subscription could not be created.
    #[error(transparent)]
    Queue(Arc<QueueError>),
}

impl BusError {
    /// An invalid argument and what is wrong with it.
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    /// Rejects a dedup window shorter than a backend call may take: a retried call could be stored twice.
    pub(crate) fn check_dedup_window(
        name: &str,
        time: Duration,
        call_deadline: Option<Duration>,
    ) -> Result<()> {
        match call_deadline {
            Some(deadline) if time < deadline => {
                let problem = format!(
                    "{time:?}; a backend call may be retried for {deadline:?}, and a retry after the window \
                     stores a duplicate; use several times that, or a shorter `call_deadline`"
                );
                Err(Self::invalid(name, problem))
            }
            _ => Ok(()),
        }
    }

    /// Whether a retry of the same call may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unconfirmed { .. } | Self::BreakerOpen { .. } | Self::SpoolFull { .. } => true,
            Self::Spool { source: error, .. } | Self::Backend(error) => error.is_transient(),
            Self::Queue(error) => error.is_transient(),
            _ => false,
        }
    }
}

impl From<StreamError> for BusError {
    fn from(error: StreamError) -> Self {
        Self::Backend(Arc::new(error))
    }
}

impl From<QueueError> for BusError {
    fn from(error: QueueError) -> Self {
        match error {
            QueueError::Backend(error) => Self::from(error),
            error => Self::Queue(Arc::new(error)),
        }
    }
}

/// Why an entry could not be decoded. Such an entry is parked unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// A required field is missing or is not valid text.
    #[error("field `{field}` {problem}")]
    Malformed {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The type is not registered.
    #[error("event type `{event_type}` is not registered")]
    UnknownType {
        /// The event type.
        event_type: String,
    },
    /// The version is newer than the registered one, or older without an upcaster.
    #[error("version {version} of `{event_type}` cannot be decoded; {problem}")]
    UnknownVersion {
        /// The event type.
        event_type: String,
        /// The version of the entry.
        version: u32,
        /// The registered versions.
        problem: String,
    },
    /// The payload does not match the type.
    #[error("invalid payload for version {version} of `{event_type}`: {problem}")]
    Payload {
        /// The event type.
        event_type: String,
        /// The version of the entry.
        version: u32,
        /// The decoding error.
        problem: String,
    },
}

/// A failed handler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("subscription {subscription}: {reason}")]
pub struct HandlerFailure {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// How it failed.
    pub kind: FailureKind,
    /// Error message of the handler, if it has one.
    pub reason: String,
}

/// How a handler failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// It returned an error.
    Failed,
    /// It panicked.
    Panicked,
    /// It exceeded its timeout.
    TimedOut,
}

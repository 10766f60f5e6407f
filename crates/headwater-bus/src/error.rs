//! What can go wrong on a bus, split by what the caller does next.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use headwater_queue::QueueError;
use headwater_stream::StreamError;

use crate::name::{EventId, SubscriptionId};

/// A result of this crate.
pub type Result<T, E = BusError> = std::result::Result<T, E>;

/// Why a call to a bus failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BusError {
    /// The caller asked for something the bus does not do. Mend the call; nothing happened.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// The payload is larger than an event may be. Store it elsewhere and publish where it is; nothing happened.
    #[error("an event `{event_type}` of {bytes} bytes is too large; the limit is {limit}")]
    TooLarge {
        /// The type of the event.
        event_type: String,
        /// How large its payload is.
        bytes: usize,
        /// How large it may be.
        limit: usize,
    },

    /// The registry of this bus does not allow the type. Register it; nothing happened.
    #[error("the event type `{event_type}` is not registered on this bus: {problem}")]
    NotRegistered {
        /// The type's name.
        event_type: String,
        /// Whether it is missing or somebody else's.
        problem: String,
    },

    /// An entry is no event that this bus knows.
    #[error(transparent)]
    Decode(#[from] DecodeError),

    /// The backend did not confirm the event: it may be stored or not. Publish it again under the same id, with a bus
    /// that remembers ids, and it counts once.
    #[error("event {event_id} was not confirmed, it may be stored or not: {source}")]
    Unconfirmed {
        /// The event.
        event_id: EventId,
        /// What the backend said.
        source: Arc<StreamError>,
    },

    /// The backend failed so often that it is left alone for a while. Nothing happened.
    #[error("the backend is left alone after failures; try again in {retry_after:?}")]
    BreakerOpen {
        /// When the next attempt is made.
        retry_after: Duration,
    },

    /// The event could not be kept in the spool, and is not stored. After an attempt to store it that was not confirmed, it is
    /// [`Unconfirmed`](Self::Unconfirmed) instead.
    #[error(transparent)]
    Spool(#[from] SpoolError),

    /// A durable subscription of a local bus does not keep up. Publish again later; nothing happened.
    #[error("the group `{group}` has {limit} events waiting, which is the limit")]
    QueueFull {
        /// The group.
        group: String,
        /// How many may wait.
        limit: usize,
    },

    /// The bus was closed.
    #[error("the bus is closed")]
    Closed,

    /// Handlers of this process failed; the event is stored all the same.
    #[error("{} of the handlers of event {event_id} failed, the first with: {}", failures.len(),
        failures.first().map_or("", |failure| failure.reason.as_str()))]
    Handlers {
        /// The event.
        event_id: EventId,
        /// Which ones, and why.
        failures: Vec<HandlerFailure>,
    },

    /// The backend refused. [`StreamError`] says whether the same call may succeed later.
    #[error(transparent)]
    Backend(Arc<StreamError>),

    /// A durable subscription could not be made.
    #[error(transparent)]
    Queue(Arc<QueueError>),
}

impl BusError {
    /// An invalid argument: which one, and what is wrong with it.
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    /// Refuses to remember ids for less time than a call of the backend may take, in which it may be repeated: the same thing
    /// would count twice.
    pub(crate) fn check_dedup_window(
        name: &str,
        time: Duration,
        call_deadline: Option<Duration>,
    ) -> Result<()> {
        match call_deadline {
            Some(deadline) if time < deadline => {
                let problem = format!(
                    "{time:?}; a call of the backend may take {deadline:?}, and what it repeats \
                     would count twice; take several times that, or a shorter `call_deadline`"
                );
                Err(Self::invalid(name, problem))
            }
            _ => Ok(()),
        }
    }

    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unconfirmed { .. } | Self::BreakerOpen { .. } | Self::QueueFull { .. } => true,
            Self::Spool(error) => matches!(error, SpoolError::Full { .. }),
            Self::Backend(error) => error.is_transient(),
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

/// Why an entry is not an event that a registry knows. It is parked, with its bytes as they are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// A field that every event has is missing or is no text.
    #[error("the field `{field}` {problem}")]
    Malformed {
        /// Which field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Nobody registered the type.
    #[error("the type `{event_type}` is not registered")]
    UnknownType {
        /// Its name.
        event_type: String,
    },
    /// The version is newer than what is registered, or older without a way up.
    #[error("version {version} of `{event_type}` cannot be read; {problem}")]
    UnknownVersion {
        /// The type's name.
        event_type: String,
        /// The version of the entry.
        version: u32,
        /// What is registered.
        problem: String,
    },
    /// The payload does not fit the type.
    #[error("the payload does not fit version {version} of `{event_type}`: {problem}")]
    Payload {
        /// The type's name.
        event_type: String,
        /// The version of the entry.
        version: u32,
        /// What does not fit, and where.
        problem: String,
    },
}

/// What is wrong with a spool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpoolError {
    /// It holds as much as it may. Wait until it is replayed, or raise the limit; nothing was added.
    #[error("the spool `{}` is full: {bytes} of {limit} bytes", file.display())]
    Full {
        /// The file.
        file: PathBuf,
        /// What it holds.
        bytes: u64,
        /// What it may hold.
        limit: u64,
    },
    /// It belongs to another bus. Use another file, or open it with that bus; nothing was changed.
    #[error("the spool `{}` belongs to the bus `{owner}`, not to `{bus}`", file.display())]
    WrongOwner {
        /// The file.
        file: PathBuf,
        /// Whose it is.
        owner: String,
        /// Who wanted it.
        bus: String,
    },
    /// Another process, or another bus of this one, has it open.
    #[error("the spool `{}` is in use", file.display())]
    InUse {
        /// The file.
        file: PathBuf,
    },
    /// It is damaged before its end. Move it aside and see what can be saved; nothing was changed.
    #[error("the spool `{}` is damaged at byte {offset}: {problem}", file.display())]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// Where the first unreadable record begins.
        offset: u64,
        /// What does not fit.
        problem: String,
    },
    /// The operating system refused. Mend the disk or the permissions.
    #[error("the spool `{}` cannot be used: {problem}", file.display())]
    Disk {
        /// The file.
        file: PathBuf,
        /// Its own words.
        problem: String,
    },
}

/// A handler that failed, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("subscription {subscription}: {reason}")]
pub struct HandlerFailure {
    /// Whose handler it is.
    pub subscription: SubscriptionId,
    /// How it failed.
    pub kind: FailureKind,
    /// Why, in its own words where it has some.
    pub reason: String,
}

/// How a handler failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// It said so.
    Failed,
    /// It panicked.
    Panicked,
    /// It took longer than it may.
    TimedOut,
}

//! Errors of sessions, split by what the caller does next.

use std::fmt;

use headwater_queue::QueueError;
use headwater_stream::{EntryId, StreamError};

use crate::error::BusError;
use crate::name::SessionId;

/// Why a call on a session failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The session does not exist.
    #[error("no session `{session}` exists")]
    NotFound {
        /// The session.
        session: SessionId,
    },

    /// A session with this id exists. Recover it or choose another id; the call had no effect.
    #[error("session `{session}` already exists: {problem}")]
    Exists {
        /// The session.
        session: SessionId,
        /// What exists, and what to do.
        problem: String,
    },

    /// A fork or import made no progress for so long that maintenance removed it. Repeat it; the call had no effect.
    #[error(
        "the fork or import of session `{session}` made no progress for too long and was removed; repeat it"
    )]
    CopyRemoved {
        /// The new session.
        session: SessionId,
    },

    /// The session was unused for longer than its TTL. Its events are deleted.
    #[error("session `{session}` expired with {entries} entries, the last at {through}")]
    Expired {
        /// The session.
        session: SessionId,
        /// Total number of its entries.
        entries: u64,
        /// Its last entry.
        through: EntryId,
    },

    /// Events are missing that no snapshot of these folds includes. `Sessions::recover_incomplete` continues without
    /// them.
    #[error("session `{session}` is incomplete: {missing}")]
    Incomplete {
        /// The session.
        session: SessionId,
        /// The missing entries.
        missing: MissingEntries,
    },

    /// A fold panicked on an event. Fix the fold; increment its version if its state changes.
    #[error("fold `{fold}` panicked on entry {entry_id} of session `{session}`: {reason}")]
    Fold {
        /// The session.
        session: SessionId,
        /// The fold.
        fold: String,
        /// The entry.
        entry_id: EntryId,
        /// The panic message.
        reason: String,
    },

    /// A snapshot could not be taken. The session continues without it.
    #[error("snapshot of session `{session}` failed: {problem}")]
    Snapshot {
        /// The session.
        session: SessionId,
        /// The reason.
        problem: String,
    },

    /// The session could not be compacted; nothing was trimmed.
    #[error("session `{session}` cannot be compacted: {problem}")]
    Compaction {
        /// The session.
        session: SessionId,
        /// The reason.
        problem: String,
    },

    /// Compaction removed entries while they were read. Retry; the snapshots include them.
    #[error("session `{session}` was compacted while it was being read; retry")]
    CompactedWhileReading {
        /// The session.
        session: SessionId,
    },

    /// The metadata of the session is invalid. Another program may have written it.
    #[error("metadata of session `{session}` is invalid: {problem}")]
    Damaged {
        /// The session.
        session: SessionId,
        /// What is invalid.
        problem: String,
    },

    /// An import file is invalid. Nothing was imported.
    #[error("line {line} of the import is invalid: {problem}")]
    Import {
        /// Line number, from 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },

    /// Error of the bus or its backend.
    #[error(transparent)]
    Bus(#[from] BusError),
}

impl SessionError {
    /// Whether a retry of the same call may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::CompactedWhileReading { .. } => true,
            Self::Bus(error) => error.is_transient(),
            _ => false,
        }
    }

    /// Whether the backend rejected the credentials or a command. The same call may succeed once they are corrected.
    pub fn is_denied(&self) -> bool {
        let is_denied = |error: &StreamError| matches!(error, StreamError::Denied { .. });
        match self {
            Self::Bus(BusError::Backend(error)) => is_denied(error),
            Self::Bus(BusError::Queue(error)) => {
                matches!(&**error, QueueError::Backend(error) if is_denied(error))
            }
            _ => false,
        }
    }
}

impl From<StreamError> for SessionError {
    fn from(error: StreamError) -> Self {
        Self::Bus(error.into())
    }
}

/// Missing entries of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingEntries {
    /// Entries after this one are missing; `EntryId::MIN` from the beginning.
    pub after: EntryId,
    /// Entries before this one are missing; `EntryId::MAX` if nothing is left.
    pub before: EntryId,
    /// How many, if known. For [`Deleted`](MissingReason::Deleted): all deleted entries, also outside this range.
    pub count: Option<u64>,
    /// Why they are missing.
    pub reason: MissingReason,
}

/// Why entries are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingReason {
    /// Compacted: snapshots of other folds, or of other versions of these folds, include them.
    Compacted,
    /// Trimmed by another program, for example with `MAXLEN`.
    Trimmed,
    /// The stream was deleted, or expired by a setting of another program.
    Lost,
    /// Deleted by another program, for example with `XDEL`, or the stream was emptied.
    Deleted,
    /// Unknown whether anything is missing: the session was not created by `Sessions`.
    Unknown,
}

impl fmt::Display for MissingEntries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            Some(1) => f.write_str("1 entry")?,
            Some(count) => write!(f, "{count} entries")?,
            None => f.write_str("an unknown number of entries")?,
        }
        write!(f, " after {} and before {}", self.after, self.before)?;
        f.write_str(match self.reason {
            MissingReason::Compacted => ", compacted into snapshots of other folds",
            MissingReason::Trimmed => ", trimmed by another program",
            MissingReason::Lost => ", the stream was deleted or expired",
            MissingReason::Deleted => ", deleted by another program",
            MissingReason::Unknown => ", if any: the session was not created by this library",
        })
    }
}

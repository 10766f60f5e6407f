//! What can go wrong with a session, split by what the caller does next.

use std::fmt;

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, StreamError};

use crate::error::BusError;
use crate::name::SessionId;

/// Why something could not be done with a session.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// There is no such session, and never was one here.
    #[error("there is no session `{session}`")]
    NotFound {
        /// The id asked for.
        session: SessionId,
    },

    /// There is one with this id. Recover it, or choose another id; nothing happened.
    #[error("the session `{session}` exists already: {problem}")]
    Exists {
        /// Its id.
        session: SessionId,
        /// What is there.
        problem: String,
    },

    /// It is being made of another session or of a file, or whoever did so died. It is removed when nobody goes on with
    /// it, or by `Sessions::delete`.
    #[error("the session `{session}` is not finished: {what} began or went on last at {since}")]
    Unfinished {
        /// Its id.
        session: SessionId,
        /// What it is being made of.
        what: String,
        /// When that began or last went on.
        since: Timestamp,
    },

    /// Nobody used it for longer than it was to live. Its events are gone.
    #[error("the session `{session}` expired with {entries} entries, the last at {through}")]
    Expired {
        /// Its id.
        session: SessionId,
        /// How many entries it had in all.
        entries: u64,
        /// Its last entry.
        through: EntryId,
    },

    /// Some of its events are gone and no snapshot of these folds stands for them. `Sessions::recover_incomplete` goes
    /// on without them.
    #[error("the session `{session}` is incomplete: {missing}")]
    Incomplete {
        /// Its id.
        session: SessionId,
        /// What is missing.
        missing: MissingEntries,
    },

    /// A fold panicked on an event. Mend the fold, and give it a new version if its state changes.
    #[error("the fold `{fold}` panicked on entry {entry_id} of session `{session}`: {reason}")]
    Fold {
        /// Whose event.
        session: SessionId,
        /// The fold.
        fold: String,
        /// The event.
        entry_id: EntryId,
        /// What it said.
        reason: String,
    },

    /// A snapshot could not be taken. The session goes on without it.
    #[error("no snapshot of session `{session}` can be taken: {problem}")]
    Snapshot {
        /// Of which session.
        session: SessionId,
        /// Why not.
        problem: String,
    },

    /// A session could not be compacted; nothing was trimmed.
    #[error("the session `{session}` cannot be compacted: {problem}")]
    Compaction {
        /// Its id.
        session: SessionId,
        /// Why not.
        problem: String,
    },

    /// Compactions removed entries while they were copied. Try again; snapshots stand for what is gone.
    #[error("the session `{session}` was compacted while it was read; try again")]
    CompactedWhileReading {
        /// Its id.
        session: SessionId,
    },

    /// What is known of the session beside its events does not make sense. Something else wrote there.
    #[error("what is kept of session `{session}` cannot be read: {problem}")]
    Damaged {
        /// Its id.
        session: SessionId,
        /// What is wrong.
        problem: String,
    },

    /// A file of a session is not what it should be. Nothing was imported.
    #[error("line {line} of the import is wrong: {problem}")]
    Import {
        /// Which line, from 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },

    /// The bus or its backend refused.
    #[error(transparent)]
    Bus(#[from] BusError),
}

impl SessionError {
    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::CompactedWhileReading { .. } => true,
            Self::Bus(error) => error.is_transient(),
            _ => false,
        }
    }
}

impl From<StreamError> for SessionError {
    fn from(error: StreamError) -> Self {
        Self::Bus(error.into())
    }
}

/// Entries of a session that are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingEntries {
    /// Entries after this one are missing; `EntryId::MIN` from the beginning.
    pub after: EntryId,
    /// Entries before this one are missing; `EntryId::MAX` if nothing is left.
    pub before: EntryId,
    /// How many, if it is known. Of [`Deleted`](MissingReason::Deleted) entries: all that were, wherever they were.
    pub count: Option<u64>,
    /// What became of them.
    pub reason: MissingReason,
}

/// What became of entries that are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingReason {
    /// They were compacted: snapshots of other folds, or of other versions of these folds, stand for them.
    Compacted,
    /// Something else trimmed the stream, such as `MAXLEN` of another program.
    Trimmed,
    /// The stream was deleted, or it expired by a setting of another program.
    Lost,
    /// Another program deleted entries that were stored, such as by `XDEL`, or emptied the stream.
    Deleted,
    /// Nobody knows whether anything is missing: the session began outside of `Sessions`, unseen.
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
            MissingReason::Trimmed => ", trimmed by something else",
            MissingReason::Lost => ", the stream was deleted or expired",
            MissingReason::Deleted => ", deleted by another program",
            MissingReason::Unknown => ", if there were any: anonymous saw how the session began",
        })
    }
}

//! Errors of a backend, split by what the caller does next.

/// Any error, as a source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// Result type of this crate.
pub type Result<T, E = StreamError> = std::result::Result<T, E>;

/// Why a call to a backend failed.
///
/// After `Invalid`, `WrongType`, `Fenced` and `NoGroup` the call had no effect. After `Unavailable` the effect is unknown: the
/// call may have been executed, so a retry may cause a duplicate. The same holds after `Full` for a call that was in flight when
/// the disk of an embedded backend became full: its changes are kept in memory and written when there is space again. Calls made
/// while the disk is full fail with `Full` and have no effect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// An argument is invalid. Fix the arguments; retrying will not help.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it, and the limit.
        problem: String,
    },

    /// The name holds a value of another type. Choose another name or delete the value.
    #[error("`{name}` holds a value of another type; choose another name or delete it")]
    WrongType {
        /// The name, as the backend knows it.
        name: String,
    },

    /// The consumer group does not exist on this stream. Create it with `ensure_group`.
    #[error("stream `{stream}` has no group `{group}`; create it with `ensure_group`")]
    NoGroup {
        /// The stream.
        stream: String,
        /// The missing group.
        group: String,
    },

    /// The lease is stale: it expired, was released, or has another holder. Stop working on what it protects.
    #[error("lease `{lease}` is no longer held in epoch {epoch}; nothing was changed")]
    Fenced {
        /// The lease of the fence.
        lease: String,
        /// The epoch of the fence.
        epoch: u64,
    },

    /// Memory, disk or a configured limit is exhausted. Consume, trim, or raise the limit.
    #[error("the backend is full: {problem}")]
    Full {
        /// Which limit was reached; the server's message if there is one.
        problem: String,
    },

    /// The server denied the user or the command. Fix the credentials or the permissions.
    #[error("the server denied access: {problem}")]
    Denied {
        /// The server's message.
        problem: String,
    },

    /// The backend did not reply within the deadline. The same call may succeed later.
    #[error("the backend is unavailable: {problem}")]
    Unavailable {
        /// What failed.
        problem: String,
        /// The cause, if there is one.
        #[source]
        source: Option<BoxError>,
    },

    /// A file of an embedded backend is corrupt before its end. Restore it from a backup; nothing was changed.
    #[error("`{file}` is corrupt at byte {offset}: {problem}")]
    Corrupt {
        /// The corrupt file.
        file: String,
        /// Offset of the first unreadable record.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },

    /// Another process uses this directory. Stop it, or use another directory.
    #[error("`{directory}` is in use by another process")]
    Locked {
        /// The directory.
        directory: String,
    },

    /// An embedded backend has stopped: a thread panicked, and its state is unknown. Open it again; retrying will not help.
    #[error("the embedded backend has stopped: {problem}")]
    Stopped {
        /// What happened.
        problem: String,
    },

    /// The server sent an unexpected reply. It is probably not a Redis server of a supported version.
    #[error("unexpected reply from the server: {problem}")]
    Protocol {
        /// What was expected and what was received.
        problem: String,
    },
}

impl StreamError {
    /// An invalid argument: which one, and what is wrong with it.
    pub fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    /// An unavailable backend with its cause.
    #[cfg(any(feature = "embedded", feature = "redis"))]
    pub(crate) fn unavailable(problem: impl Into<String>, source: impl Into<BoxError>) -> Self {
        Self::Unavailable { problem: problem.into(), source: Some(source.into()) }
    }

    /// A copy of the error, for several callers that shared a call. The source becomes part of the message.
    pub fn duplicate(&self) -> Self {
        match self {
            Self::Invalid { what, problem } => Self::invalid(what, problem),
            Self::WrongType { name } => Self::WrongType { name: name.clone() },
            Self::NoGroup { stream, group } => {
                Self::NoGroup { stream: stream.clone(), group: group.clone() }
            }
            Self::Fenced { lease, epoch } => Self::Fenced { lease: lease.clone(), epoch: *epoch },
            Self::Full { problem } => Self::Full { problem: problem.clone() },
            Self::Denied { problem } => Self::Denied { problem: problem.clone() },
            Self::Unavailable { problem, source } => {
                let cause = source.as_ref().map_or(String::new(), |source| format!(": {source}"));
                Self::Unavailable { problem: format!("{problem}{cause}"), source: None }
            }
            Self::Corrupt { file, offset, problem } => {
                Self::Corrupt { file: file.clone(), offset: *offset, problem: problem.clone() }
            }
            Self::Locked { directory } => Self::Locked { directory: directory.clone() },
            Self::Stopped { problem } => Self::Stopped { problem: problem.clone() },
            Self::Protocol { problem } => Self::Protocol { problem: problem.clone() },
        }
    }

    /// Whether the same call may succeed later without intervention.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Full { .. })
    }
}

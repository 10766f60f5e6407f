//! What can go wrong in a backend, split by what the caller does next.

/// Any error as a source of ours.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// A result of this crate.
pub type Result<T, E = StreamError> = std::result::Result<T, E>;

/// Why a call to a backend failed.
///
/// `Invalid`, `WrongType`, `Fenced` and `NoGroup` mean that the call had no effect. After `Unavailable`
/// the effect is unknown: the call may have happened, so a caller that repeats it must expect a duplicate. So it is after
/// `Full` for a call that was under way when the disk of an embedded backend became full: its changes are kept in memory
/// and written when there is space again. Calls made while the disk is full are refused with `Full` and have no effect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The caller asked for something no backend does. Mend the call; repeating it fails again.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it, and which limit it breaks.
        problem: String,
    },

    /// Something that is not ours lies under this name. Choose another name or remove the foreign value.
    #[error("`{name}` holds a value of another kind; choose another name or remove it")]
    WrongType {
        /// The name, as the backend knows it.
        name: String,
    },

    /// The consumer group does not exist on this stream. `ensure_group` creates it.
    #[error("stream `{stream}` has no group `{group}`; create it with `ensure_group`")]
    NoGroup {
        /// The stream asked for.
        stream: String,
        /// The group it lacks.
        group: String,
    },

    /// The lease has a newer holder, or none. Stop working on what it guards at once.
    #[error("lease `{lease}` is no longer held with epoch {epoch}: nothing was changed")]
    Fenced {
        /// The lease that was presented.
        lease: String,
        /// The epoch that was presented.
        epoch: u64,
    },

    /// The backend has no room for more: memory, disk or a configured budget. Consume, trim, or raise the limit.
    #[error("the backend is full: {problem}")]
    Full {
        /// Which limit was reached, in the backend's own words where it has some.
        problem: String,
    },

    /// The server refuses this user or this command. Mend the credentials or the permissions.
    #[error("the server denied access: {problem}")]
    Denied {
        /// The server's own words.
        problem: String,
    },

    /// The backend did not answer in time, or not at all. The same call may succeed later.
    #[error("the backend is unavailable: {problem}")]
    Unavailable {
        /// What was tried and for how long.
        problem: String,
        /// The cause, where there is one.
        #[source]
        source: Option<BoxError>,
    },

    /// A file of an embedded backend is damaged in the middle. Restore it from a copy; nothing was changed.
    #[error("`{file}` is damaged at byte {offset}: {problem}")]
    Corrupt {
        /// The damaged file.
        file: String,
        /// Where the first unreadable record begins.
        offset: u64,
        /// What does not fit.
        problem: String,
    },

    /// Another process has this directory open. Stop it, or use another directory.
    #[error("`{directory}` is in use by another process")]
    Locked {
        /// The directory.
        directory: String,
    },

    /// The server sent something that no server should. Probably not the server it is taken for.
    #[error("the server answered something unexpected: {problem}")]
    Protocol {
        /// What came instead of what.
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

    /// The same error for one more caller, where several shared a call. Its cause becomes part of the text.
    pub fn again(&self) -> Self {
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
            Self::Protocol { problem } => Self::Protocol { problem: problem.clone() },
        }
    }

    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Full { .. })
    }
}

//! What can go wrong with analytics, split by what the caller does next.

/// A result of this crate.
pub type Result<T, E = AnalyticsError> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnalyticsError {
    /// The caller asked for something that is not done here. Mend the call; nothing happened.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// The question cannot be answered: DuckDB refused it. Mend the SQL.
    #[error("the query failed: {0}")]
    Query(String),

    /// The query took too long and was stopped.
    #[error("the query was stopped after {} s; ask for less, or for a report", limit.as_secs())]
    TooSlow {
        /// How long a query may take.
        limit: std::time::Duration,
    },

    /// There is no file to ask. Whoever ingests makes it, and so does a rebuild.
    #[error("there is no DuckDB file {path}")]
    Missing {
        /// Where it was looked for.
        path: String,
    },

    /// Another process has the file open. Ask that process (`--url`), or stop it.
    #[error("the DuckDB file {path} is in use by another process; ask it over HTTP, or stop it")]
    InUse {
        /// The file.
        path: String,
    },

    /// The file was written by a newer Headwater. Use that one, or build the file anew (`Warehouse::rebuild`).
    #[error("the DuckDB file {path} has version {found}; this program knows version {known}")]
    Newer {
        /// The file.
        path: String,
        /// The version in it.
        found: i64,
        /// The version this program writes.
        known: i64,
    },

    /// DuckDB failed: the disk is full, say. Nothing of the batch was stored, so it may be tried again.
    #[error("DuckDB could not {what}: {problem}")]
    Warehouse {
        /// What was to be done.
        what: &'static str,
        /// What DuckDB said.
        problem: String,
    },

    /// What a rebuild reads could not be read. Nothing has changed.
    #[error("the events to rebuild from could not be read: {0}")]
    Source(String),

    /// The streams could not be reached, or refused.
    #[error(transparent)]
    Queue(#[from] headwater_queue::QueueError),
}

impl AnalyticsError {
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }
}

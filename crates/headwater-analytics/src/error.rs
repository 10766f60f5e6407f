//! Errors of this crate, split by what the caller does next.

/// A result of this crate.
pub type Result<T, E = AnalyticsError> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnalyticsError {
    /// An argument is invalid. Fix it; nothing was changed.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it and what is allowed.
        problem: String,
    },

    /// DuckDB rejected the query. Fix the SQL.
    #[error("the query failed: {0}")]
    Query(String),

    /// The query exceeded the time limit and was stopped.
    #[error("query exceeded the limit of {} s and was cancelled; select fewer rows, or allow more time", limit.as_secs())]
    TooSlow {
        /// The time limit of a query.
        limit: std::time::Duration,
    },

    /// The file does not exist. Ingestion or a rebuild creates it.
    #[error("DuckDB file `{path}` does not exist; start the server or run a rebuild to create it")]
    Missing {
        /// The path.
        path: String,
    },

    /// Another process has the file open. Query that process (`--url`), or stop it.
    #[error(
        "DuckDB file `{path}` is in use by another process; query the running server with `--url`, or stop that process"
    )]
    InUse {
        /// The file.
        path: String,
    },

    /// The file was written by a newer Headwater. Use that version, or rebuild the file.
    #[error(
        "DuckDB file `{path}` has version {found}; this program supports up to version {known}"
    )]
    Newer {
        /// The file.
        path: String,
        /// The version in it.
        found: i64,
        /// The version this program writes.
        known: i64,
    },

    /// DuckDB failed, for example because the disk is full. Nothing of the batch was stored; it may be retried.
    #[error("DuckDB could not {what}: {problem}")]
    Store {
        /// The operation.
        what: &'static str,
        /// The error of DuckDB.
        problem: String,
    },

    /// Reading the events for a rebuild failed. Nothing was changed.
    #[error("reading the events for the rebuild failed: {0}")]
    Source(String),

    /// The queue failed.
    #[error(transparent)]
    Queue(#[from] headwater_queue::QueueError),
}

impl AnalyticsError {
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }
}

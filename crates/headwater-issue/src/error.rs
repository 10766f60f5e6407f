//! What can go wrong with issues, split by what the caller does next.
//!
//! Upstream: everything in this crate. Promises: an error can be cloned, so that one failed group commit tells each of
//! its callers; every variant but `Unavailable` means that the call had no effect.

use std::sync::Arc;

use crate::issue::{ClaimEpoch, IssueId};

/// Any error as a source of ours; shared, so that all callers of one batch can have it.
pub type SharedError = Arc<dyn std::error::Error + Send + Sync + 'static>;

/// A result of this crate.
pub type Result<T, E = IssueError> = std::result::Result<T, E>;

/// Why a call failed.
///
/// After `Unavailable` the effect is unknown: the call may have happened. Repeating it is safe for everything in this
/// crate: a record is a duplicate then, a completion says that it was there already, a claim has a new epoch.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IssueError {
    /// The caller asked for something that no store does. Mend the call; repeating it fails again.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which argument.
        what: String,
        /// What is wrong with it, and which limit it breaks.
        problem: String,
    },

    /// There is no integration of this name. Create it with `ensure_integration`, or mend the sender's address.
    #[error("there is no integration `{integration}`; create it first")]
    UnknownIntegration {
        /// The name asked for.
        integration: String,
    },

    /// The integration exists with another provider. Choose another name.
    #[error(
        "integration `{integration}` belongs to the provider `{provider}`; choose another name"
    )]
    OtherProvider {
        /// The name asked for.
        integration: String,
        /// The provider it has.
        provider: String,
    },

    /// The de-duplication key was used before for a different event. The new event was not stored; give it its own key.
    #[error(
        "the key `{dedup_key}` of integration `{integration}` was used for another event; the new one was not stored"
    )]
    DedupConflict {
        /// The integration within which keys are unique.
        integration: String,
        /// The key.
        dedup_key: String,
    },

    /// The key was used before for another row in the outbox of this issue. Nothing was written; give the row its own key.
    #[error(
        "the key `{key}` was used for another row in the outbox of issue {issue_id}; nothing was written"
    )]
    OutboxConflict {
        /// The issue within which keys are unique.
        issue_id: IssueId,
        /// The key.
        key: String,
    },

    /// There is no such issue, or no such row of the outbox.
    #[error("{what} does not exist")]
    NotFound {
        /// What was asked for.
        what: String,
    },

    /// The claim has a newer holder, or none. Stop working on this issue at once; nothing was changed.
    #[error("issue {issue_id} is no longer claimed with epoch {epoch}: nothing was changed")]
    Fenced {
        /// The issue that was claimed.
        issue_id: IssueId,
        /// The epoch that was presented.
        epoch: ClaimEpoch,
    },

    /// The database was written by a newer version of this program, or by another text of one of its migrations, or is
    /// not ours. Run the program that made it, or upgrade this one; nothing was changed.
    #[error("the schema of the database does not fit: {problem}")]
    Schema {
        /// What is there and what was expected.
        problem: String,
    },

    /// The database did not answer in time, or not at all. The same call may succeed later.
    #[error("the database is unavailable: {problem}")]
    Unavailable {
        /// What was tried, and what came instead.
        problem: String,
        /// The cause, where there is one.
        #[source]
        source: Option<SharedError>,
    },
}

impl IssueError {
    /// An invalid argument: which one, and what is wrong with it.
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    /// Whether a batch failed for what may be the fault of one of its items, so that the others are worth a call of their
    /// own. Not so if the database is away.
    pub(crate) fn may_concern_one(&self) -> bool {
        match self {
            Self::Invalid { .. } => true,
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            Self::Unavailable { source: Some(source), .. } => crate::rows::is_of_one_row(source),
            _ => false,
        }
    }

    /// Whether the same call may succeed later without anybody mending anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}

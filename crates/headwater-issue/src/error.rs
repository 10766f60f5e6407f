//! The error type of this crate, split by what the caller does next.
//!
//! Errors can be cloned, so that every caller of a failed batch gets one. Every variant except `Unavailable` means that
//! the call had no effect.

use std::sync::Arc;

use crate::issue::{ClaimEpoch, IssueId};

/// Source of an error; shared by all callers of a batch.
pub type SharedError = Arc<dyn std::error::Error + Send + Sync + 'static>;

/// A result of this crate.
pub type Result<T, E = IssueError> = std::result::Result<T, E>;

/// Why a call failed.
///
/// After `Unavailable` the effect is unknown: the call may have taken effect. Every call of this crate can be retried:
/// a repeated record is a duplicate, a repeated completion reports `repeated`, a repeated claim has a new epoch.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IssueError {
    /// An argument is invalid. Fix the arguments; retrying will not help.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Name of the argument.
        what: String,
        /// What is wrong, and which limit it exceeds.
        problem: String,
    },

    /// The integration does not exist. Create it with `ensure_integration`, or fix the name that the sender uses.
    #[error("integration `{integration}` does not exist; create it first")]
    UnknownIntegration {
        /// The requested name.
        integration: String,
    },

    /// The integration exists with a different provider. Use a different name.
    #[error("integration `{integration}` belongs to provider `{provider}`; use a different name")]
    OtherProvider {
        /// The requested name.
        integration: String,
        /// The provider of the existing integration.
        provider: String,
    },

    /// The de-duplication key was already used for a different event. The new event was not stored; use a unique key.
    #[error(
        "de-duplication key `{dedup_key}` of integration `{integration}` was already used for a different event; the new event was not stored"
    )]
    DedupConflict {
        /// The integration within which keys are unique.
        integration: String,
        /// The key.
        dedup_key: String,
    },

    /// The key was already used for a different outbox row of this issue. Nothing was written; use a unique key.
    #[error(
        "key `{key}` was already used for a different outbox row of issue `{issue_id}`; nothing was written"
    )]
    OutboxConflict {
        /// The issue within which keys are unique.
        issue_id: IssueId,
        /// The key.
        key: String,
    },

    /// The issue or outbox row does not exist.
    #[error("{what} does not exist")]
    NotFound {
        /// The requested object.
        what: String,
    },

    /// The claim is lost: another worker holds it, or it ended. Stop working on the issue; nothing was changed.
    #[error(
        "claim on issue `{issue_id}` with epoch {epoch} is no longer held; nothing was changed"
    )]
    Fenced {
        /// The claimed issue.
        issue_id: IssueId,
        /// The presented epoch.
        epoch: ClaimEpoch,
    },

    /// The schema does not match: it was created by a newer version, by a different text of a migration, or by another
    /// program. Run the version that created it, or upgrade; nothing was changed.
    #[error("the database schema does not match: {problem}")]
    Schema {
        /// What was found and what was expected.
        problem: String,
    },

    /// Migrations are missing, and the store was opened with [`SchemaPolicy::Require`](crate::SchemaPolicy::Require).
    /// Nothing was changed.
    #[error("{problem}")]
    OutdatedSchema {
        /// What is missing.
        problem: String,
        /// Whether no migration was ever applied.
        is_empty: bool,
    },

    /// The database did not reply in time, or the call failed. The same call may succeed later.
    #[error("the database is unavailable: {problem}")]
    Unavailable {
        /// The operation and its error.
        problem: String,
        /// The cause, if known.
        #[source]
        source: Option<SharedError>,
    },
}

impl IssueError {
    /// An invalid argument: its name and the problem.
    pub(crate) fn invalid(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), problem: problem.into() }
    }

    /// Whether one item may have caused the failure of a batch, so that the items should be retried one by one. False
    /// if the database is unavailable.
    pub(crate) fn is_item_error(&self) -> bool {
        match self {
            Self::Invalid { .. } => true,
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            Self::Unavailable { source: Some(source), .. } => {
                crate::row_decoding::is_row_error(source)
            }
            _ => false,
        }
    }

    /// Whether the same call may succeed later without a change.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}

//! Why analytics did not do something, split by who has to do what next: as a refusal over HTTP, and as the end of a verb.

use axum::http::StatusCode;
use headwater_analytics::AnalyticsError;
use std::time::Duration;
use tracing::error;

use crate::exit::CliError;
use crate::http::ApiError;

/// How soon to come back when others ask.
const BUSY_FOR: Duration = Duration::from_secs(1);

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    /// Another program is needed.
    #[error(
        "this program was built without analytics; `cargo build --release -p headwater --features analytics` builds it \
         with a DuckDB library, which `cargo xtask setup` fetches (docs/analytics.md)"
    )]
    NotBuiltIn,
    /// The settings do not want it.
    #[error("analytics is off: the setting `analytics.path` is empty")]
    Off,
    /// The file is not open.
    #[error("analytics cannot be asked yet: {0}")]
    NotOpen(String),
    /// Others ask.
    #[error("{0} questions are being answered, and no more at once; ask again")]
    Busy(usize),
    /// One is under way.
    #[error("a rebuild is under way; `GET /api/v1/analytics` says how far it is")]
    Rebuilding,
    /// What the crate says.
    #[error(transparent)]
    Analytics(#[from] AnalyticsError),
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        let message = problem.to_string();
        match problem {
            Problem::NotBuiltIn | Problem::Off => {
                Self::new(StatusCode::NOT_IMPLEMENTED, "no_analytics", message)
            }
            // The reason names files; it is in the log since it became so.
            Problem::NotOpen(_) => {
                Self::unavailable("analytics cannot be asked yet; the log says why")
            }
            Problem::Busy(_) => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "busy", message).retry_after(BUSY_FOR)
            }
            Problem::Rebuilding => Self::new(StatusCode::CONFLICT, "conflict", message),
            Problem::Analytics(AnalyticsError::Invalid { .. } | AnalyticsError::Query(_)) => {
                Self::invalid(message)
            }
            Problem::Analytics(AnalyticsError::TooSlow { .. }) => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "too_slow", message)
            }
            Problem::Analytics(other) => {
                error!(error = %other, "analytics did not answer a request");
                Self::unavailable("analytics does not answer; the log says why")
            }
        }
    }
}

impl From<Problem> for CliError {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Analytics(AnalyticsError::Invalid { .. } | AnalyticsError::Query(_)) => {
                Self::usage(problem.to_string())
            }
            other => Self::new(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_analytics_says_how_to_have_it() {
        let refused = ApiError::from(Problem::NotBuiltIn);
        assert_eq!(refused.status(), StatusCode::NOT_IMPLEMENTED);
        let failure = CliError::from(Problem::NotBuiltIn).to_string();
        assert!(failure.contains("--features analytics") && failure.contains("docs/analytics.md"));
    }
}

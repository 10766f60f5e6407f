//! Errors of analytics requests, mapped to HTTP responses and exit codes.

use axum::http::StatusCode;
use headwater_analytics::AnalyticsError;
use std::time::Duration;
use tracing::error;

use crate::exit::CliError;
use crate::http::ApiError;

/// `Retry-After` when all query slots are in use.
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why an analytics request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnalyticsRequestError {
    /// Built without the feature `analytics`.
    #[error(
        "this program was built without analytics; `cargo build --release -p headwater --features analytics` builds it \
         with a DuckDB library, which `cargo xtask setup` fetches (docs/analytics.md)"
    )]
    NotBuiltIn,
    /// Disabled by the settings.
    #[error("analytics is disabled: setting `analytics.path` is empty")]
    Off,
    /// The file is not open.
    #[error("analytics is not available yet: {0}")]
    NotOpen(String),
    /// All query slots are in use.
    #[error("{0} queries are running, which is the limit; retry later")]
    Busy(usize),
    /// A rebuild is running.
    #[error("a rebuild is already running; `GET /api/v1/analytics` shows its progress")]
    RebuildRunning,
    /// The query exceeded its time limit.
    #[error(
        "the query was cancelled after {} s (`analytics.query_timeout`); select fewer rows, or raise this setting, and \
         `http.request_timeout` above it", .0.as_secs()
    )]
    TooSlow(Duration),
    /// The analytics store failed.
    #[error(transparent)]
    Analytics(#[from] AnalyticsError),
}

impl From<AnalyticsRequestError> for ApiError {
    fn from(problem: AnalyticsRequestError) -> Self {
        let message = problem.to_string();
        match problem {
            AnalyticsRequestError::NotBuiltIn | AnalyticsRequestError::Off => {
                Self::new(StatusCode::NOT_IMPLEMENTED, "no_analytics", message)
            }
            // The reason contains paths; it was logged when the state changed.
            AnalyticsRequestError::NotOpen(_) => {
                Self::unavailable("analytics is not available yet; see the server log")
            }
            AnalyticsRequestError::Busy(_) => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "busy", message)
                    .retry_after(BUSY_RETRY_AFTER)
            }
            AnalyticsRequestError::RebuildRunning => {
                Self::new(StatusCode::CONFLICT, "conflict", message)
            }
            AnalyticsRequestError::Analytics(
                AnalyticsError::Invalid { .. } | AnalyticsError::Query(_),
            ) => Self::invalid(message),
            AnalyticsRequestError::TooSlow(_) => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "too_slow", message)
            }
            AnalyticsRequestError::Analytics(other) => {
                error!(error = %other, "analytics request failed");
                Self::unavailable("analytics is unavailable; see the server log")
            }
        }
    }
}

impl From<AnalyticsRequestError> for CliError {
    fn from(problem: AnalyticsRequestError) -> Self {
        match problem {
            AnalyticsRequestError::Analytics(
                AnalyticsError::Invalid { .. } | AnalyticsError::Query(_),
            ) => Self::usage(problem.to_string()),
            other => Self::new(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_analytics_explains_how_to_enable_it() {
        let refused = ApiError::from(AnalyticsRequestError::NotBuiltIn);
        assert_eq!(refused.status(), StatusCode::NOT_IMPLEMENTED);
        let failure = CliError::from(AnalyticsRequestError::NotBuiltIn).to_string();
        assert!(failure.contains("--features analytics") && failure.contains("docs/analytics.md"));
    }
}

//! The one shape of every refusal: `{"error":{"code","message"}}`.
//!
//! Upstream: every route and every layer. Promises: a code is a word for programs and never changes its meaning; a message is a
//! sentence for people that says what to do, and tells nothing of our insides.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use headwater_issue::IssueError;
use serde::Serialize;
use tracing::{error, warn};
use utoipa::ToSchema;

/// How soon to come back when the database was away.
const COME_BACK_AFTER: Duration = Duration::from_secs(2);

/// What is said of an address that no route has.
pub(crate) const NOTHING_HERE: &str = "there is nothing at this address";

/// What SQLite and PostgreSQL say when there is no room.
const DISK_FULL: [&str; 2] = ["disk is full", "No space left on device"];

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: &'static str,
    message: String,
    header: Option<(HeaderName, HeaderValue)>,
}

impl ApiError {
    /// A refusal with this status, word and sentence.
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), header: None }
    }

    /// 400: the request itself is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", message)
    }

    /// 404: there is no such thing.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// 503: come back after a while.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
            .retry_after(COME_BACK_AFTER)
    }

    /// 500: a mistake of ours; what it is stands in the log.
    pub(crate) fn internal() -> Self {
        let message = "something went wrong here; the log says what";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// What the streams did not do, other than by the caller's fault. The reason may name servers; it is for the log.
    pub(crate) fn of_streams(problem: &dyn std::error::Error, is_transient: bool) -> Self {
        if is_transient {
            warn!(error = %problem, "the streams did not answer a request");
            return Self::unavailable("the streams do not answer; try again");
        }
        error!(error = %problem, "a request failed");
        Self::internal()
    }

    /// What the streams had no room for.
    pub(crate) fn streams_are_full(problem: &dyn std::error::Error) -> Self {
        warn!(error = %problem, "the streams are full");
        Self::unavailable(
            "the streams are full: let topics keep less, or give Redis more memory (`maxmemory`) or its disk more room",
        )
    }

    /// Says when to come back, in whole seconds and at least one.
    pub(crate) fn retry_after(self, after: Duration) -> Self {
        let seconds = after.as_millis().div_ceil(1000).max(1);
        let seconds = HeaderValue::from_str(&seconds.to_string()).expect("digits are a header");
        self.with_header(header::RETRY_AFTER, seconds)
    }

    /// The same refusal, with one more thing to know.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.message = format!("{}; {more}", self.message);
        self
    }

    /// Adds a header to the answer.
    pub(crate) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.header = Some((name, value));
        self
    }

    /// The status of the answer.
    #[cfg(test)]
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// The sentence for people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The word for programs.
    pub(crate) fn code(&self) -> &'static str {
        self.code
    }
}

/// How every refusal looks.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Refusal {
    error: RefusalReason,
}

/// Why a request is refused.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RefusalReason {
    /// A word for programs, which never changes its meaning.
    code: &'static str,
    /// A sentence for people.
    message: String,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = Refusal { error: RefusalReason { code: self.code, message: self.message } };
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some((name, value)) = self.header {
            response.headers_mut().insert(name, value);
        }
        response
    }
}

impl From<IssueError> for ApiError {
    fn from(problem: IssueError) -> Self {
        match &problem {
            IssueError::Invalid { .. } => Self::invalid(problem.to_string()),
            IssueError::NotFound { .. } => Self::not_found(problem.to_string()),
            IssueError::UnknownIntegration { integration } => {
                Self::not_found(format!("there is no integration `{integration}`"))
            }
            IssueError::DedupConflict { .. } => {
                Self::new(StatusCode::CONFLICT, "conflict", problem.to_string())
            }
            // The reason may name servers and tables; it is for the log.
            IssueError::Unavailable { .. } => {
                warn!(error = %problem, "the database did not answer a request");
                let text = problem.to_string();
                if DISK_FULL.iter().any(|words| text.contains(words)) {
                    return Self::unavailable("the disk of the database is full; make room on it");
                }
                Self::unavailable("the database does not answer; try again")
            }
            _ => {
                error!(error = %problem, "a request failed");
                Self::internal()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_from_a_database_that_is_away() {
        let told = |problem: &str| {
            let problem = problem.to_owned();
            ApiError::from(IssueError::Unavailable { problem, source: None }).message().to_owned()
        };
        let full = "committing: (code: 13) database or disk is full";
        assert_eq!(told(full), "the disk of the database is full; make room on it");
        assert_eq!(told("pool timed out"), "the database does not answer; try again");
    }
}

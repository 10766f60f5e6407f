//! The error response of all routes: `{"error":{"code","message"}}`.
//!
//! Upstream: every route and middleware. Guarantees: a code is stable and meant for programs; a message says what to do
//! and reveals no internals. The cause stays in this process: a command that runs the routes itself prints it.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use headwater_issue::IssueError;
use serde::Serialize;
use tracing::{error, warn};
use utoipa::ToSchema;

use crate::text::with_causes;

/// `Retry-After` of an unavailable dependency.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(2);

/// Message for a path without a route.
pub(crate) const NOT_FOUND_MESSAGE: &str = "no such path";

/// Messages of SQLite and PostgreSQL for a full disk.
const DISK_FULL: [&str; 2] = ["disk is full", "No space left on device"];

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: &'static str,
    message: String,
    header: Option<Box<(HeaderName, HeaderValue)>>,
    cause: Option<Box<ErrorCause>>,
}

/// Why a request failed, with names of servers and tables. An extension of the response, which is never sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ErrorCause(pub(crate) String);

impl ApiError {
    /// An error with this status, code and message.
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), header: None, cause: None }
    }

    /// 400: the request is invalid.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", message)
    }

    /// 404: the object does not exist.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// 503: retry later.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
            .retry_after(RETRY_AFTER_DEFAULT)
    }

    /// 500: a bug or an unexpected error; details are in the log.
    pub(crate) fn internal() -> Self {
        let message = "internal error; see the server log";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// An error of the stream backend that is not the caller's fault. Details go only to the log, because they may
    /// name servers.
    pub(crate) fn from_stream_error(problem: &dyn std::error::Error, is_transient: bool) -> Self {
        if is_transient {
            warn!(error = %problem, "stream backend did not answer a request");
            let unavailable = Self::unavailable("stream backend unavailable; try again later");
            return unavailable.caused_by(problem);
        }
        error!(error = %problem, "request failed");
        Self::internal().caused_by(problem)
    }

    fn caused_by(mut self, problem: &dyn std::error::Error) -> Self {
        self.cause = Some(Box::new(ErrorCause(with_causes(problem))));
        self
    }

    /// 503: the stream backend rejects the credentials or a command of this process.
    pub(crate) fn streams_denied(problem: &dyn std::error::Error) -> Self {
        error!(error = %problem, "stream backend denied access");
        Self::unavailable(
            "stream backend denied access: fix the password in `stream.url` or the ACL of Redis",
        )
        .caused_by(problem)
    }

    /// The stream backend has no space left.
    pub(crate) fn streams_full(problem: &dyn std::error::Error) -> Self {
        warn!(error = %problem, "stream backend is full");
        Self::unavailable(
            "stream backend is full: reduce topic retention, raise `maxmemory` of Redis, or free disk space",
        )
        .caused_by(problem)
    }

    /// Sets `Retry-After` in whole seconds, at least 1.
    pub(crate) fn retry_after(self, after: Duration) -> Self {
        let seconds = after.as_millis().div_ceil(1000).max(1);
        let seconds = HeaderValue::from_str(&seconds.to_string()).expect("digits are a header");
        self.with_header(header::RETRY_AFTER, seconds)
    }

    /// Appends a detail to the message.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.message = format!("{}; {more}", self.message);
        self
    }

    /// Adds a header to the response.
    pub(crate) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.header = Some(Box::new((name, value)));
        self
    }

    /// Status of the response.
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// The message.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The code.
    pub(crate) fn code(&self) -> &'static str {
        self.code
    }
}

/// Body of every error response.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorResponse {
    error: ErrorBody,
}

/// Code and message of an error.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    /// Stable code for programs.
    code: &'static str,
    /// Message for people.
    message: String,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = ErrorResponse { error: ErrorBody { code: self.code, message: self.message } };
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some((name, value)) = self.header.map(|header| *header) {
            response.headers_mut().insert(name, value);
        }
        if let Some(cause) = self.cause {
            response.extensions_mut().insert(*cause);
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
                Self::not_found(format!("unknown integration `{integration}`"))
            }
            IssueError::DedupConflict { .. } => {
                Self::new(StatusCode::CONFLICT, "conflict", problem.to_string())
            }
            // Details may name servers and tables, so they go only to the log.
            IssueError::Unavailable { .. } => {
                warn!(error = %problem, "database did not answer a request");
                let text = problem.to_string();
                if DISK_FULL.iter().any(|words| text.contains(words)) {
                    return Self::unavailable("database disk is full; free some space")
                        .caused_by(&problem);
                }
                Self::unavailable("database did not answer; try again later").caused_by(&problem)
            }
            _ => {
                error!(error = %problem, "request failed");
                Self::internal().caused_by(&problem)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_distinguished_from_an_unavailable_database() {
        let message = |problem: &str| {
            let problem = problem.to_owned();
            ApiError::from(IssueError::Unavailable { problem, source: None }).message().to_owned()
        };
        let full = "committing: (code: 13) database or disk is full";
        assert_eq!(message(full), "database disk is full; free some space");
        assert_eq!(message("pool timed out"), "database did not answer; try again later");
    }
}

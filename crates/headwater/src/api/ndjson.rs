//! Responses that stream JSON lines.
//!
//! Upstream: routes with a long or slow response. Guarantees: the last line marks the end, or says why there are no
//! more.

use std::convert::Infallible;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt};
use serde_json::json;

use crate::http::ApiError;
use crate::http::body::NDJSON;

/// A response body of lines.
pub(super) fn lines(lines: impl Stream<Item = String> + Send + 'static) -> Response {
    let bytes = lines.map(|line| Ok::<_, Infallible>(Bytes::from(line + "\n")));
    ([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(bytes)).into_response()
}

/// The last line of a failed response.
pub(super) fn error_line(refusal: &ApiError) -> String {
    json!({"error": {"code": refusal.code(), "message": refusal.message()}}).to_string()
}

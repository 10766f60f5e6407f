//! Reads the body of a request within its limits, and JSON out of it.
//!
//! Upstream: routes. Promises: the size is counted while reading, whatever the headers say; JSON is UTF-8, at most 128
//! levels deep, and of the right content type, or the refusal says which of these it is not.

use axum::Json;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::ApiError;
use crate::app::App;
use crate::settings::Http;

/// What is read and thrown away after the limit, so that a client that is still sending gets to read the answer.
const DRAINED_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Reads a body to its end.
pub(crate) async fn read(body: Body, limits: &Http) -> Result<Bytes, ApiError> {
    let reading = async {
        let mut chunks = body.into_data_stream();
        let mut read: Vec<u8> = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| ApiError::invalid("the body ended before its end"))?;
            if read.len() + chunk.len() > limits.body_bytes_max {
                drain(chunks, limits).await;
                return Err(too_large("the body", limits.body_bytes_max as u64));
            }
            read.extend_from_slice(&chunk);
        }
        Ok(Bytes::from(read))
    };
    timeout(limits.read_timeout, reading).await.unwrap_or_else(|_| {
        let message = format!("the body did not arrive within {:?}", limits.read_timeout);
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message))
    })
}

/// Takes what a client is still sending, so that it gets to read the answer.
pub(crate) async fn drain(mut chunks: BodyDataStream, limits: &Http) {
    let mut left = DRAINED_BYTES_MAX;
    let draining = async {
        while let Some(Ok(chunk)) = chunks.next().await {
            left = left.saturating_sub(chunk.len());
            if left == 0 {
                return;
            }
        }
    };
    // Who is slow does not get to read the answer.
    let _ = timeout(limits.read_timeout / 2, draining).await;
}

/// 413: it has more bytes than it may.
pub(crate) fn too_large(what: &str, bytes_max: u64) -> ApiError {
    let message = format!("{what} has more than {bytes_max} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
}

/// Refuses a body that does not say it is JSON.
pub(crate) fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    let is_json =
        kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json {
        return Ok(());
    }
    let message = "the content type must be application/json";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", message))
}

/// JSON out of bytes.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let text =
        std::str::from_utf8(bytes).map_err(|_| ApiError::invalid("the body is not valid UTF-8"))?;
    serde_json::from_str(text).map_err(|error| {
        ApiError::invalid(format!("the body is not the JSON it should be: {error}"))
    })
}

/// JSON as an argument of a route.
pub(crate) struct JsonBody<T>(pub(crate) T);

/// A state of routes that says how much of a body is read.
pub(crate) trait ReadLimits: Send + Sync {
    /// The limits.
    fn read_limits(&self) -> &Http;
}

impl ReadLimits for App {
    fn read_limits(&self) -> &Http {
        &self.settings.http
    }
}

impl<T: DeserializeOwned, S: ReadLimits> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        let bytes = read(request.into_body(), state.read_limits()).await?;
        // Serde would take a list for the fields of an object, one after another.
        if bytes.trim_ascii_start().first() != Some(&b'{') {
            return Err(ApiError::invalid("the body is not a JSON object"));
        }
        parse(&bytes).map(Self)
    }
}

/// The kind of an answer of lines of JSON, which come while the work goes on.
pub(crate) const LINES: &str = "application/x-ndjson";

/// The answer to most requests.
pub(crate) type Answer<T> = Result<Json<T>, ApiError>;

//! Reads request bodies within limits, and decodes JSON.
//!
//! Upstream: routes. Guarantees: the size is counted while reading, regardless of the headers; memory is reserved
//! before it is used (`body_memory.rs`); JSON must be UTF-8, at most 128 levels deep, and have a JSON content type,
//! or the error says which of these is violated.

use std::sync::Arc;

use axum::Json;
use axum::body::{BodyDataStream, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::config::HttpSettings;
use crate::http::{ApiError, BodyMemory, decoded_bytes};
use crate::server::app_state::App;

/// How much of an oversized body is read and discarded, so that the client receives the response.
const DRAIN_BYTES_MAX: usize = 32 * 1024 * 1024;

/// A complete request body with its memory reservation.
pub(crate) struct RequestBody {
    /// The raw bytes.
    pub(crate) bytes: Bytes,
    memory: Option<Arc<BodyMemory>>,
}

impl RequestBody {
    /// Decodes the body as JSON. Reserves memory first.
    pub(crate) async fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        let text = std::str::from_utf8(&self.bytes)
            .map_err(|_| ApiError::invalid("request body is not valid UTF-8"))?;
        self.parse_text(text).await
    }

    /// Decodes JSON from text derived from the body.
    pub(crate) async fn parse_text<T: DeserializeOwned>(&self, text: &str) -> Result<T, ApiError> {
        if let Some(memory) = &self.memory {
            memory.reserve(decoded_bytes(text.as_bytes())).await?;
        }
        serde_json::from_str(text)
            .map_err(|error| ApiError::invalid(format!("invalid JSON in request body: {error}")))
    }
}

/// Reads a request body to its end. In-process requests have no memory limit.
pub(crate) async fn read(request: Request, limits: &HttpSettings) -> Result<RequestBody, ApiError> {
    let memory = request.extensions().get::<Arc<BodyMemory>>().cloned();
    let body = request.into_body();
    let reading = async {
        let mut chunks = body.into_data_stream();
        let mut read: Vec<u8> = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| ApiError::invalid("request body ended early"))?;
            let length = read.len() + chunk.len();
            if length > limits.body_bytes_max {
                drain(chunks, limits).await;
                return Err(too_large("request body", limits.body_bytes_max as u64));
            }
            if let Err(refusal) = grow(&mut read, length, memory.as_deref()).await {
                drop(read);
                drain(chunks, limits).await;
                return Err(refusal);
            }
            read.extend_from_slice(&chunk);
        }
        Ok(RequestBody { bytes: Bytes::from(read), memory: memory.clone() })
    };
    timeout(limits.read_timeout, reading).await.unwrap_or_else(|_| {
        let message = format!("request body not received within {:?}", limits.read_timeout);
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message))
    })
}

/// Grows the buffer to at least `length` bytes, doubling its capacity, and reserves the memory.
async fn grow(
    read: &mut Vec<u8>,
    length: usize,
    memory: Option<&BodyMemory>,
) -> Result<(), ApiError> {
    if length > read.capacity() {
        let more = length.max(2 * read.capacity()) - read.capacity();
        if let Some(memory) = memory {
            memory.reserve(more as u64).await?;
        }
        read.reserve_exact(read.capacity() + more - read.len());
    }
    Ok(())
}

/// Discards the rest of a body, so that the client receives the response.
pub(crate) async fn drain(mut chunks: BodyDataStream, limits: &HttpSettings) {
    let mut left = DRAIN_BYTES_MAX;
    let draining = async {
        while let Some(Ok(chunk)) = chunks.next().await {
            left = left.saturating_sub(chunk.len());
            if left == 0 {
                return;
            }
        }
    };
    // A client that is slower than this may not receive the response.
    let _ = timeout(limits.read_timeout / 2, draining).await;
}

/// 413: `what` has more bytes than allowed.
pub(crate) fn too_large(what: &str, bytes_max: u64) -> ApiError {
    let message = format!("{what} has more than {bytes_max} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
}

/// Rejects a body whose content type is not JSON.
pub(crate) fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    let is_json =
        kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json {
        return Ok(());
    }
    let message = "content type must be `application/json`";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", message))
}

/// Extracts a JSON body.
pub(crate) struct JsonBody<T>(pub(crate) T);

/// A router state that provides body limits.
pub(crate) trait ReadLimits: Send + Sync {
    /// The limits.
    fn read_limits(&self) -> &HttpSettings;
}

impl ReadLimits for App {
    fn read_limits(&self) -> &HttpSettings {
        &self.settings.http
    }
}

impl<T: DeserializeOwned, S: ReadLimits> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        let body = read(request, state.read_limits()).await?;
        // Serde would accept an array in place of an object.
        if body.bytes.trim_ascii_start().first() != Some(&b'{') {
            return Err(ApiError::invalid("request body is not a JSON object"));
        }
        body.parse().await.map(Self)
    }
}

/// Content type of streamed JSON lines.
pub(crate) const NDJSON: &str = "application/x-ndjson";

/// Result of most routes.
pub(crate) type JsonResult<T> = Result<Json<T>, ApiError>;

//! Reads the body of a request within its limits, and JSON out of it.
//!
//! Upstream: routes. Promises: the size is counted while reading, whatever the headers say; memory is reserved before it is
//! used (`body_memory`); JSON is UTF-8, at most 128 levels deep, and of the right content type, or the refusal says which of
//! these it is not.

use std::sync::Arc;

use axum::Json;
use axum::body::{BodyDataStream, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::config::Http;
use crate::http::{ApiError, BodyMemory, decoded_bytes};
use crate::server::app_state::App;

/// What is read and thrown away after the limit, so that a client that is still sending gets to read the answer.
const DRAINED_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The body of a request, complete, with the memory that it has reserved.
pub(crate) struct Received {
    /// As they came.
    pub(crate) bytes: Bytes,
    memory: Option<Arc<BodyMemory>>,
}

impl Received {
    /// JSON out of the body. Memory is reserved for it first.
    pub(crate) async fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        let text = std::str::from_utf8(&self.bytes)
            .map_err(|_| ApiError::invalid("the body is not valid UTF-8"))?;
        self.parse_text(text).await
    }

    /// The same out of text that was made of the body.
    pub(crate) async fn parse_text<T: DeserializeOwned>(&self, text: &str) -> Result<T, ApiError> {
        if let Some(memory) = &self.memory {
            memory.reserve(decoded_bytes(text.as_bytes())).await?;
        }
        serde_json::from_str(text).map_err(|error| {
            ApiError::invalid(format!("the body is not the JSON it should be: {error}"))
        })
    }
}

/// Reads the body of a request to its end. Requests inside this process have no limit of memory.
pub(crate) async fn read(request: Request, limits: &Http) -> Result<Received, ApiError> {
    let memory = request.extensions().get::<Arc<BodyMemory>>().cloned();
    let body = request.into_body();
    let reading = async {
        let mut chunks = body.into_data_stream();
        let mut read: Vec<u8> = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| ApiError::invalid("the body ended before its end"))?;
            let length = read.len() + chunk.len();
            if length > limits.body_bytes_max {
                drain(chunks, limits).await;
                return Err(too_large("the body", limits.body_bytes_max as u64));
            }
            if let Err(refusal) = grow(&mut read, length, memory.as_deref()).await {
                drop(read);
                drain(chunks, limits).await;
                return Err(refusal);
            }
            read.extend_from_slice(&chunk);
        }
        Ok(Received { bytes: Bytes::from(read), memory: memory.clone() })
    };
    timeout(limits.read_timeout, reading).await.unwrap_or_else(|_| {
        let message = format!("the body did not arrive within {:?}", limits.read_timeout);
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message))
    })
}

/// Makes room for so many bytes, doubling the room, with its memory reserved.
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
        let body = read(request, state.read_limits()).await?;
        // Serde would take a list for the fields of an object, one after another.
        if body.bytes.trim_ascii_start().first() != Some(&b'{') {
            return Err(ApiError::invalid("the body is not a JSON object"));
        }
        body.parse().await.map(Self)
    }
}

/// The kind of an answer of lines of JSON, which come while the work goes on.
pub(crate) const LINES: &str = "application/x-ndjson";

/// The answer to most requests.
pub(crate) type Answer<T> = Result<Json<T>, ApiError>;

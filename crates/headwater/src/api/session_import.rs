//! Imports a session from JSON lines.
//!
//! Upstream: `http/router.rs` and `cli/verbs/session.rs`. Downstream: the import of `headwater-bus`. Guarantees: the
//! session appears when it is complete. If an import fails (invalid line; truncated, oversized or slow body; disconnect;
//! shutdown; kill), its id stays free, and the entries stored so far are removed, at once or by maintenance. If the
//! backend fails so that the outcome is unknown, the error says so. There is no total timeout: each chunk must arrive within `http.read_timeout`, the average
//! rate must be at least [`BYTES_PER_SECOND_MIN`], and the total at most `http.import_bytes_max`.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, BodyDataStream};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use futures_util::StreamExt;
use headwater_bus::limits::IMPORT_LINE_BYTES_MAX;
use headwater_bus::{Import, SessionId};
use tokio::time::{Instant, timeout};
use tracing::warn;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::sessions::{SessionDto, created, parse_session_id};
use crate::config::HttpSettings;
use crate::http::body::{drain, too_large};
use crate::http::extract::PathParams;
use crate::http::{ApiError, BodyMemory, decoded_bytes};
use crate::server::app_state::App;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::text::shell_word;

/// Minimum average rate after the first `http.read_timeout`. Only the time spent waiting for the client counts.
const BYTES_PER_SECOND_MIN: u64 = 256;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(import))
}

/// Import a session from the lines of an export. The session appears when it is complete.
#[utoipa::path(post, path = "/sessions/{session}/import", tag = "sessions", params(("session" = String, Path)),
    request_body(content = String, content_type = "application/x-ndjson"),
    responses((status = 201, body = SessionDto), (status = 400), (status = 408, description = "No data received in time."),
        (status = 409, description = "The session exists."),
        (status = 413, description = "The import exceeds `http.import_bytes_max`."),
        (status = 429, description = "Too many imports and forks in progress.")))]
async fn import(
    State(app): State<App>,
    PathParams(session): PathParams<String>,
    request: Request,
) -> Result<(StatusCode, Json<SessionDto>), ApiError> {
    let session = parse_session_id(&session)?;
    let (limits, sessions) = (app.settings.http.clone(), app.sessions.clone());
    let content_length = content_length(request.headers());
    let memory = request.extensions().get::<Arc<BodyMemory>>().cloned();
    let mut body = ImportBody::new(request.into_body(), &limits, app.shutdown.clone());
    let mut import = sessions.import(&session);
    let importing = async move {
        let fed = match content_length > limits.import_bytes_max {
            true => Err(body.too_large()),
            false => feed_lines(&mut import, &mut body, memory.as_deref()).await,
        };
        let imported = match fed {
            Ok(()) => import.complete().await.map_err(ApiError::from),
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = imported {
            let refusal = abandon(&mut import, &session, refusal).await;
            if !body.is_over {
                drain(body.chunks, &limits).await;
            }
            if let Some(refusal) = refusal {
                return Err(refusal);
            }
        } else if let Err(error) = import.open().await {
            warn!(%session, %error, "imported session could not be opened yet");
        }
        created(&sessions, session).await
    };
    app.background_jobs.run(importing).await
}

/// Removes the entries of a failed import. Returns the error, extended if the outcome is unknown; `None` if the session
/// is complete after all and only the reply of the backend was lost.
async fn abandon(import: &mut Import, session: &SessionId, refusal: ApiError) -> Option<ApiError> {
    match import.abandon().await {
        Ok(false) => Some(refusal),
        Ok(true) => None,
        Err(error) => {
            warn!(%session, %error, "outcome of a failed import is unknown");
            Some(refusal.and(&format!(
                "whether session `{session}` was imported is unknown: check it with `headwater session show {}`",
                shell_word(session.as_str())
            )))
        }
    }
}

fn content_length(headers: &HeaderMap) -> u64 {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    length.and_then(|length| length.parse().ok()).unwrap_or(0)
}

/// Passes each line of the body to the import. Reserves memory for one line at a time.
async fn feed_lines(
    import: &mut Import,
    body: &mut ImportBody,
    memory: Option<&BodyMemory>,
) -> Result<(), ApiError> {
    let (mut rest, mut searched): (Vec<u8>, usize) = (Vec::new(), 0);
    while let Some(chunk) = body.next().await? {
        rest.extend_from_slice(&chunk);
        let mut begin = 0;
        while let Some(length) = rest[searched..].iter().position(|byte| *byte == b'\n') {
            let end = searched + length;
            import_line(import, &rest[begin..end], memory).await?;
            (begin, searched) = (end + 1, end + 1);
        }
        rest.drain(..begin);
        searched = rest.len();
        if rest.len() > IMPORT_LINE_BYTES_MAX {
            let problem = format!("a line exceeds {IMPORT_LINE_BYTES_MAX} bytes");
            return Err(ApiError::invalid(problem));
        }
    }
    if !rest.is_empty() {
        import_line(import, &rest, memory).await?;
    }
    Ok(())
}

async fn import_line(
    import: &mut Import,
    line: &[u8],
    memory: Option<&BodyMemory>,
) -> Result<(), ApiError> {
    let reserved = memory.map(BodyMemory::for_part);
    if let Some(reserved) = &reserved {
        reserved.reserve(line.len() as u64 + decoded_bytes(line)).await?;
    }
    Ok(import.line(line_text(line)?).await?)
}

fn line_text(line: &[u8]) -> Result<&str, ApiError> {
    std::str::from_utf8(line).map_err(|_| ApiError::invalid("a line is not valid UTF-8"))
}

/// A request body in chunks, with its limits.
struct ImportBody {
    chunks: BodyDataStream,
    limits: HttpSettings,
    shutdown: ShutdownSignal,
    bytes: u64,
    /// Total time spent waiting for chunks.
    waited: Duration,
    /// No more chunks will come.
    is_over: bool,
}

impl ImportBody {
    fn new(body: Body, limits: &HttpSettings, shutdown: ShutdownSignal) -> Self {
        let (chunks, limits) = (body.into_data_stream(), limits.clone());
        Self { chunks, limits, shutdown, bytes: 0, waited: Duration::ZERO, is_over: false }
    }

    /// The next chunk; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        let (begin, longest) = (Instant::now(), self.limits.read_timeout);
        let waiting = longest.min(self.allowed_wait().saturating_sub(self.waited));
        self.is_over = true;
        let chunk = tokio::select! {
            chunk = timeout(waiting, self.chunks.next()) => chunk,
            () = self.shutdown.wait() => {
                return Err(ApiError::unavailable("the server is shutting down; repeat the import"));
            }
        };
        self.waited += begin.elapsed();
        let chunk = chunk.map_err(|_| {
            let message = match waiting == longest {
                true => format!("no data received for {waiting:?}; repeat the import"),
                false => format!(
                    "received fewer than {BYTES_PER_SECOND_MIN} bytes per second; repeat the import"
                ),
            };
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message)
        })?;
        let Some(chunk) = chunk else { return Ok(None) };
        let chunk = chunk.map_err(|_| ApiError::invalid("request body ended early"))?;
        self.is_over = false;
        self.bytes += chunk.len() as u64;
        if self.bytes > self.limits.import_bytes_max {
            return Err(self.too_large());
        }
        Ok(Some(chunk))
    }

    /// How long to wait in total, given the bytes received so far.
    fn allowed_wait(&self) -> Duration {
        self.limits.read_timeout + Duration::from_millis(self.bytes * 1000 / BYTES_PER_SECOND_MIN)
    }

    fn too_large(&self) -> ApiError {
        let what = "import (`http.import_bytes_max`)";
        too_large(what, self.limits.import_bytes_max)
    }
}

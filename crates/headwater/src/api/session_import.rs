//! Import: a session made of the lines of a body.
//!
//! Upstream: `router`, and the verb `session import`. Downstream: the import of `headwater-bus`.
//! Promises: however it ends early (a wrong line, a body that is cut off, too long or too slow, a caller that hangs up, a stop of
//! the process), what was stored is no session and is removed. If the streams fail at that, too, the answer says so; then, and
//! after a kill, the same import can be repeated at once and replaces what is left. It may take as long as lines come: each
//! part of the body within `http.read_timeout`, all of them at [`BYTES_PER_SECOND_MIN`] at least, and within
//! `http.import_bytes_max`.

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

use crate::api::sessions::{SessionView, made, named};
use crate::config::Http;
use crate::http::body::{drain, too_large};
use crate::http::extract::PathOf;
use crate::http::{ApiError, BodyMemory, decoded_bytes};
use crate::server::app_state::App;
use crate::server::shutdown::Stopping;

/// Bytes that come in a second, on average, beyond a first `http.read_timeout`. Only waiting for them counts, not storing them.
const BYTES_PER_SECOND_MIN: u64 = 256;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(import))
}

/// Makes a session of lines that an export wrote. What an earlier import of the same session left unfinished is replaced.
#[utoipa::path(post, path = "/sessions/{session}/import", tag = "sessions", params(("session" = String, Path)),
    request_body(content = String, content_type = "application/x-ndjson"),
    responses((status = 201, body = SessionView), (status = 400), (status = 408, description = "The lines stopped coming."),
        (status = 409, description = "There is one with this id."),
        (status = 413, description = "More bytes than `http.import_bytes_max`."),
        (status = 429, description = "Too many imports and forks are under way.")))]
async fn import(
    State(app): State<App>,
    PathOf(session): PathOf<String>,
    request: Request,
) -> Result<(StatusCode, Json<SessionView>), ApiError> {
    let session = named(&session)?;
    let (limits, sessions) = (app.settings.http.clone(), app.sessions.clone());
    let announced = announced(request.headers());
    let memory = request.extensions().get::<Arc<BodyMemory>>().cloned();
    let mut body = Chunks::new(request.into_body(), &limits, app.stopping.clone());
    let mut import = sessions.import(&session);
    let importing = async move {
        let fed = match announced > limits.import_bytes_max {
            true => Err(body.too_large()),
            false => feed(&mut import, &mut body, memory.as_deref()).await,
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
            warn!(%session, %error, "an imported session could not be opened yet");
        }
        made(&sessions, session).await
    };
    app.long_work.run(importing).await
}

/// Removes what a failed import stored. Returns the refusal, which tells if that failed, too; `None` if the session turns out to
/// be there: only the reply that said so was lost.
async fn abandon(import: &mut Import, session: &SessionId, refusal: ApiError) -> Option<ApiError> {
    match import.abandon().await {
        Ok(false) => Some(refusal),
        Ok(true) => None,
        Err(error) => {
            warn!(%session, %error, "what a failed import stored could not be removed");
            Some(refusal.and(&format!(
                "what was stored of `{session}` could not be removed: repeat the same import to replace it"
            )))
        }
    }
}

fn announced(headers: &HeaderMap) -> u64 {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    length.and_then(|length| length.parse().ok()).unwrap_or(0)
}

/// Gives every line of a body to an import. Memory is reserved for one line at a time.
async fn feed(
    import: &mut Import,
    body: &mut Chunks,
    memory: Option<&BodyMemory>,
) -> Result<(), ApiError> {
    let (mut rest, mut searched): (Vec<u8>, usize) = (Vec::new(), 0);
    while let Some(chunk) = body.next().await? {
        rest.extend_from_slice(&chunk);
        let mut begin = 0;
        while let Some(length) = rest[searched..].iter().position(|byte| *byte == b'\n') {
            let end = searched + length;
            take(import, &rest[begin..end], memory).await?;
            (begin, searched) = (end + 1, end + 1);
        }
        rest.drain(..begin);
        searched = rest.len();
        if rest.len() > IMPORT_LINE_BYTES_MAX {
            let problem = format!("a line has more than {IMPORT_LINE_BYTES_MAX} bytes");
            return Err(ApiError::invalid(problem));
        }
    }
    if !rest.is_empty() {
        take(import, &rest, memory).await?;
    }
    Ok(())
}

async fn take(
    import: &mut Import,
    line: &[u8],
    memory: Option<&BodyMemory>,
) -> Result<(), ApiError> {
    let reserved = memory.map(BodyMemory::for_a_part);
    if let Some(reserved) = &reserved {
        reserved.reserve(line.len() as u64 + decoded_bytes(line)).await?;
    }
    Ok(import.line(text(line)?).await?)
}

fn text(line: &[u8]) -> Result<&str, ApiError> {
    std::str::from_utf8(line).map_err(|_| ApiError::invalid("a line is not valid UTF-8"))
}

/// A body, part by part, within its limits.
struct Chunks {
    chunks: BodyDataStream,
    limits: Http,
    stopping: Stopping,
    bytes: u64,
    /// How long it was waited for them.
    waited: Duration,
    /// No more is to be expected.
    is_over: bool,
}

impl Chunks {
    fn new(body: Body, limits: &Http, stopping: Stopping) -> Self {
        let (chunks, limits) = (body.into_data_stream(), limits.clone());
        Self { chunks, limits, stopping, bytes: 0, waited: Duration::ZERO, is_over: false }
    }

    /// The next part; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        let (begin, longest) = (Instant::now(), self.limits.read_timeout);
        let waiting = longest.min(self.allowed().saturating_sub(self.waited));
        self.is_over = true;
        let chunk = tokio::select! {
            chunk = timeout(waiting, self.chunks.next()) => chunk,
            () = self.stopping.begun() => {
                return Err(ApiError::unavailable("the process stops; import it again"));
            }
        };
        self.waited += begin.elapsed();
        let chunk = chunk.map_err(|_| {
            let message = match waiting == longest {
                true => format!("no line came for {waiting:?}; import it again"),
                false => format!(
                    "fewer than {BYTES_PER_SECOND_MIN} bytes came a second; import it again"
                ),
            };
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message)
        })?;
        let Some(chunk) = chunk else { return Ok(None) };
        let chunk = chunk.map_err(|_| ApiError::invalid("the body ended before its end"))?;
        self.is_over = false;
        self.bytes += chunk.len() as u64;
        if self.bytes > self.limits.import_bytes_max {
            return Err(self.too_large());
        }
        Ok(Some(chunk))
    }

    /// How long it may be waited in all for what has come so far and a little more.
    fn allowed(&self) -> Duration {
        self.limits.read_timeout + Duration::from_millis(self.bytes * 1000 / BYTES_PER_SECOND_MIN)
    }

    fn too_large(&self) -> ApiError {
        let what = "the import (`http.import_bytes_max`)";
        too_large(what, self.limits.import_bytes_max)
    }
}

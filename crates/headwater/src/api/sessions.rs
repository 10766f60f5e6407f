//! Sessions: list, show, replay, fork, export. Import is in `session_import.rs`, single events in `session_events.rs`.
//!
//! Upstream: `http/router.rs` and `cli/verbs/session.rs`. Downstream: the sessions of `headwater-bus`. Guarantees:
//! missing entries are reported, never skipped silently; the last line distinguishes a complete replay or export from
//! a truncated one; a fork completes even if the client disconnects.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::stream;
use headwater_bus::{
    BusError, Export, ReplayUntil, SessionError, SessionId, SessionInfo, SessionStage, Sessions,
};
use headwater_issue::IssueId;
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{EntryPosition, milliseconds, parse_entry_id, parse_position, time};
use crate::api::names;
use crate::api::ndjson::{error_line, lines};
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::http::token_scope::issue_of_session;
use crate::server::app_state::App;

/// Default and maximum sessions of a page.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

/// Maximum reads of a page with a filter.
const PAGES_MAX: usize = 20;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(replay))
        .routes(routes!(fork))
        .routes(routes!(export))
}

/// A page of sessions.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionPage {
    sessions: Vec<SessionDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
}

/// Metadata of a session.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionDto {
    session: String,
    /// `open` or `expired`.
    stage: &'static str,
    created_at: String,
    /// Stored entries.
    length: u64,
    /// Entries removed by compaction or expiry.
    gone: u64,
    last_entry: Option<String>,
    /// The session it was forked from, and the last entry copied.
    parent: Option<SessionParentDto>,
    /// Lifetime after its last event.
    ttl_ms: Option<u64>,
}

/// Parent of a fork.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionParentDto {
    session: String,
    entry: String,
}

fn to_dto(info: SessionInfo) -> SessionDto {
    SessionDto {
        session: info.session.to_string(),
        stage: match info.stage {
            SessionStage::Open => "open",
            SessionStage::Expired => "expired",
        },
        created_at: time(info.created_at),
        length: info.length,
        gone: info.removed,
        last_entry: info.last_entry.map(|id| id.to_string()),
        parent: info.parent.map(|parent| SessionParentDto {
            session: parent.session.to_string(),
            entry: parent.entry_id.to_string(),
        }),
        ttl_ms: info.ttl.map(milliseconds),
    }
}

/// Page of sessions.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SessionListQuery {
    /// Only those of runs of this issue.
    issue: Option<i64>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Maximum number: 50 by default, 500 at most.
    limit: Option<usize>,
}

/// List sessions in the order of creation.
#[utoipa::path(get, path = "/sessions", tag = "sessions", params(SessionListQuery), responses((status = 200, body = SessionPage)))]
async fn list(
    State(app): State<App>,
    principal: Principal,
    QueryParams(query): QueryParams<SessionListQuery>,
) -> JsonResult<SessionPage> {
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let cursor = query.cursor.as_deref().map(|cursor| parse_entry_id("cursor", cursor));
    let mut after = cursor.transpose()?.unwrap_or(EntryId::MIN);
    let mut sessions = Vec::new();
    for _ in 0..PAGES_MAX {
        let found = app.sessions.list(after, limit).await?;
        let last = found.last().filter(|_| found.len() == limit).map(|info| info.index);
        for info in found {
            let name = info.session.as_str();
            let is_wanted = query.issue.is_none_or(|issue| issue_of_session(name) == Some(issue));
            if is_wanted && is_visible(&app, &principal, name).await? {
                sessions.push(to_dto(info));
            }
        }
        let Some(last) = last else { return Ok(Json(SessionPage { sessions, next_cursor: None })) };
        after = last;
        // Without a filter, a page is one read; with one, it reads on until it has found some.
        if query.issue.is_none() || !sessions.is_empty() {
            break;
        }
    }
    Ok(Json(SessionPage { sessions, next_cursor: Some(after.to_string()) }))
}

/// Whether the caller can see the session: with a limited token, only those of runs of its integrations. A page may then have
/// fewer rows than its limit.
pub(super) async fn is_visible(
    app: &App,
    principal: &Principal,
    session: &str,
) -> Result<bool, ApiError> {
    if principal.integrations.is_none() {
        return Ok(true);
    }
    let Some(issue) = issue_of_session(session) else { return Ok(false) };
    let issue = app.store.issue(IssueId(issue)).await?;
    Ok(issue.is_some_and(|issue| principal.allows(&issue.integration)))
}

/// A session with a summary of its events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionResponse {
    #[serde(flatten)]
    info: SessionDto,
    /// Number of events; `null` if the session is incomplete.
    events: Option<u64>,
    /// Number of entries that match no known event type.
    unreadable: Option<u64>,
    /// Why the events cannot be counted: entries are missing, or the session has expired.
    problem: Option<String>,
}

/// Show a session.
#[utoipa::path(get, path = "/sessions/{session}", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, body = SessionResponse), (status = 404)))]
async fn show(
    State(app): State<App>,
    PathParams(session): PathParams<String>,
) -> JsonResult<SessionResponse> {
    let session = parse_session_id(&session)?;
    let info = find(&app, &session).await?;
    let (events, unreadable, problem) =
        match app.sessions.state_at(&session, ReplayUntil::End).await {
            Ok(state) => (Some(state.events()), Some(state.unreadable()), None),
            Err(error) if error.is_transient() => return Err(error.into()),
            Err(error) => (None, None, Some(error.to_string())),
        };
    Ok(Json(SessionResponse { info: to_dto(info), events, unreadable, problem }))
}

/// Finds a session, also one whose events were written by another program. A read does not register it.
pub(super) async fn find(app: &App, session: &SessionId) -> Result<SessionInfo, SessionError> {
    if let Some(info) = app.sessions.info(session).await? {
        return Ok(info);
    }
    app.sessions.info_including_foreign(session).await.map_err(|error| match error {
        error if error.is_transient() => error,
        // No session, or entries that do not form one.
        _ => SessionError::NotFound { session: session.clone() },
    })
}

/// End of a replay.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SessionReplayQuery {
    /// Up to this entry id or time; by default to the end.
    until: Option<String>,
}

/// Replay the events of a session in order, one JSON value per line; the last line is `{"end":...}` or
/// `{"error":...}`.
#[utoipa::path(get, path = "/sessions/{session}/replay", tag = "sessions", params(("session" = String, Path), SessionReplayQuery),
    responses((status = 200, content_type = "application/x-ndjson", body = String), (status = 404), (status = 409)))]
async fn replay(
    State(app): State<App>,
    PathParams(session): PathParams<String>,
    QueryParams(query): QueryParams<SessionReplayQuery>,
) -> Result<Response, ApiError> {
    let until = parse_until(query.until.as_deref())?;
    let export = app.sessions.export(&parse_session_id(&session)?).await?;
    let replaying = SessionReplay { export, until, events: 0, skipped: 0, is_ended: false };
    Ok(lines(stream::unfold(replaying, |mut replaying| async move {
        let line = replaying.next().await?;
        Some((line, replaying))
    })))
}

/// A replay in progress.
struct SessionReplay {
    export: Export,
    until: ReplayUntil,
    events: u64,
    /// Compacted entries before the first one.
    skipped: u64,
    is_ended: bool,
}

impl SessionReplay {
    async fn next(&mut self) -> Option<String> {
        while !self.is_ended {
            let line = match self.export.next_line().await {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) => return Some(self.fail(error)),
            };
            let line: Value = serde_json::from_str(&line).unwrap_or_default();
            if let Some(head) = line.get("headwater_session") {
                self.skipped =
                    head.pointer("/beginning/after").and_then(Value::as_u64).unwrap_or(0);
            }
            let Some(entry) = line.get("entry") else { continue };
            let event = to_event(entry);
            if self.is_beyond(&event) {
                break;
            }
            self.events += 1;
            return Some(event.to_string());
        }
        if std::mem::replace(&mut self.is_ended, true) {
            return None;
        }
        let end = json!({"end": {"events": self.events, "compacted_before": self.skipped}});
        Some(end.to_string())
    }

    fn fail(&mut self, error: SessionError) -> String {
        self.is_ended = true;
        error_line(&error.into())
    }

    fn is_beyond(&self, event: &Value) -> bool {
        let id = |name: &str| event[name].as_str().and_then(|id| id.parse::<EntryId>().ok());
        match self.until {
            ReplayUntil::End => false,
            ReplayUntil::Entry(last) => id("id").is_some_and(|id| id > last),
            ReplayUntil::Time(last) => {
                let stored = id("original_id").or_else(|| id("id"));
                stored.is_some_and(|id| Timestamp::from_millis(id.ms) > last)
            }
        }
    }
}

/// Turns an exported entry into an event. The payload is parsed if it is JSON.
pub(super) fn to_event(entry: &Value) -> Value {
    let mut fields = Map::new();
    for pair in entry["fields"].as_array().into_iter().flatten() {
        if let (Some(name), value) = (pair[0].as_str(), &pair[1]) {
            fields.insert(name.to_owned(), value.clone());
        }
    }
    let mut take = |name: &str| fields.remove(name).unwrap_or(Value::Null);
    let payload = match take("payload") {
        Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        other => other,
    };
    let original_id = take("original_entry_id");
    let (kind, at, event_id) = (take("type"), take("timestamp"), take("event_id"));
    let kind = kind.as_str().map(|kind| json!(names::shown_event_type(kind))).unwrap_or(kind);
    let mut event = json!({
        "id": entry["id"], "type": kind, "timestamp": at, "event_id": event_id, "payload": payload,
    });
    if !original_id.is_null() {
        event["original_id"] = original_id;
    }
    if !fields.is_empty() {
        event["fields"] = Value::Object(fields);
    }
    event
}

/// A fork of a session.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionForkRequest {
    /// Id of the new session.
    session: String,
    /// Up to this entry id or time; by default to the end.
    until: Option<String>,
}

/// Fork a session, optionally up to an entry or time. The original is not changed.
#[utoipa::path(post, path = "/sessions/{session}/fork", tag = "sessions", params(("session" = String, Path)), request_body = SessionForkRequest,
    responses((status = 201, body = SessionDto), (status = 404), (status = 409, description = "The session exists."),
        (status = 429, description = "Too many imports and forks in progress.")))]
async fn fork(
    State(app): State<App>,
    PathParams(session): PathParams<String>,
    JsonBody(request): JsonBody<SessionForkRequest>,
) -> Result<(StatusCode, Json<SessionDto>), ApiError> {
    let (parent, child) = (parse_session_id(&session)?, parse_session_id(&request.session)?);
    let until = parse_until(request.until.as_deref())?;
    let sessions = Arc::clone(&app.sessions);
    let forking = async move {
        sessions.fork(&parent, until, &child).await?;
        created(&sessions, child).await
    };
    app.background_jobs.run(forking).await
}

/// Export a session as JSON lines for `import`. The last line has their number and checksum.
#[utoipa::path(get, path = "/sessions/{session}/export", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, content_type = "application/x-ndjson", body = String), (status = 404), (status = 409)))]
async fn export(
    State(app): State<App>,
    PathParams(session): PathParams<String>,
) -> Result<Response, ApiError> {
    let export = app.sessions.export(&parse_session_id(&session)?).await?;
    Ok(lines(stream::unfold(Some(export), |export| async move {
        let mut export = export?;
        match export.next_line().await {
            Ok(line) => line.map(|line| (line, Some(export))),
            Err(error) => Some((error_line(&error.into()), None)),
        }
    })))
}

pub(super) async fn created(
    sessions: &Sessions,
    session: SessionId,
) -> Result<(StatusCode, Json<SessionDto>), ApiError> {
    let info = sessions.info(&session).await?.ok_or(SessionError::NotFound { session })?;
    Ok((StatusCode::CREATED, Json(to_dto(info))))
}

pub(super) fn parse_session_id(session: &str) -> Result<SessionId, ApiError> {
    SessionId::new(session).map_err(|error| ApiError::invalid(error.to_string()))
}

fn parse_until(text: Option<&str>) -> Result<ReplayUntil, ApiError> {
    Ok(match text.map(|text| parse_position("until", text)).transpose()? {
        None => ReplayUntil::End,
        Some(EntryPosition::Id(id)) => ReplayUntil::Entry(id),
        Some(EntryPosition::Time(at)) => ReplayUntil::Time(at),
    })
}

impl From<SessionError> for ApiError {
    fn from(problem: SessionError) -> Self {
        let message = problem.to_string();
        match &problem {
            SessionError::NotFound { .. } => Self::not_found(message),
            SessionError::Import { .. } | SessionError::Bus(BusError::Invalid { .. }) => {
                Self::invalid(message)
            }
            SessionError::Exists { session, .. } => {
                let message = format!("session `{session}` already exists; choose another id");
                Self::new(StatusCode::CONFLICT, "conflict", message)
            }
            SessionError::CopyRemoved { .. }
            | SessionError::CompactedWhileReading { .. }
            | SessionError::Expired { .. }
            | SessionError::Incomplete { .. } => {
                Self::new(StatusCode::CONFLICT, "conflict", message)
            }
            other if other.is_denied() => Self::streams_denied(other),
            other => Self::from_stream_error(other, other.is_transient()),
        }
    }
}

//! Sessions: list, show, replay, fork, export. `importing` has the way back.
//!
//! Upstream: `router`, and the verbs of `operator`. Downstream: the sessions of `headwater-bus`.
//! Promises: what is missing of a session is told, never passed over; a replay or an export that is cut off is told from a
//! whole one by its last line; a fork is carried to its end, also when its caller goes away.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::stream;
use headwater_bus::{
    BusError, Export, ReplayUntil, SessionError, SessionId, SessionInfo, SessionStage, Sessions,
};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{Point, entry_id, milliseconds, point, time};
use crate::api::ndjson::{error_line, lines};
use crate::http::ApiError;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};
use crate::http::paging::{self, PageQuery};
use crate::server::app_state::App;

/// Sessions on a page, by default and at most.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(replay))
        .routes(routes!(fork))
        .routes(routes!(export))
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionPage {
    sessions: Vec<SessionView>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<String>,
}

/// What there is to know of a session without reading its events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionView {
    session: String,
    /// `open`; `filling`: a fork or import that is under way, or was cut off; `expired`.
    stage: &'static str,
    created_at: String,
    /// Entries that are there.
    length: u64,
    /// Entries that were compacted, or went when it expired.
    gone: u64,
    last_entry: Option<String>,
    /// The session it was forked from, and the entry it left it at.
    parent: Option<ParentView>,
    /// How long it lives after its last event.
    ttl_ms: Option<u64>,
}

/// Where a session comes from.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ParentView {
    session: String,
    entry: String,
}

fn view(info: SessionInfo) -> SessionView {
    SessionView {
        session: info.session.to_string(),
        stage: match info.stage {
            SessionStage::Copying => "filling",
            SessionStage::Open => "open",
            SessionStage::Expired => "expired",
        },
        created_at: time(info.created_at),
        length: info.length,
        gone: info.removed,
        last_entry: info.last_entry.map(|id| id.to_string()),
        parent: info.parent.map(|parent| ParentView {
            session: parent.session.to_string(),
            entry: parent.entry_id.to_string(),
        }),
        ttl_ms: info.ttl.map(milliseconds),
    }
}

/// Sessions, in the order they were made.
#[utoipa::path(get, path = "/sessions", tag = "sessions", params(PageQuery), responses((status = 200, body = SessionPage)))]
async fn list(State(app): State<App>, QueryOf(query): QueryOf<PageQuery>) -> Answer<SessionPage> {
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let after = query.cursor.as_deref().map(|cursor| entry_id("cursor", cursor)).transpose()?;
    let found = app.sessions.list(after.unwrap_or(EntryId::MIN), limit).await?;
    let next = found.last().filter(|_| found.len() == limit).map(|info| info.index.to_string());
    Ok(Json(SessionPage { sessions: found.into_iter().map(view).collect(), next_cursor: next }))
}

/// A session and what became of its events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionDescription {
    #[serde(flatten)]
    info: SessionView,
    /// Events that count; absent if they cannot be told.
    events: Option<u64>,
    /// Entries that no known type fits.
    unreadable: Option<u64>,
    /// Why its state cannot be told: what is missing, or that it is not finished.
    problem: Option<String>,
}

/// One session.
#[utoipa::path(get, path = "/sessions/{session}", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, body = SessionDescription), (status = 404)))]
async fn show(
    State(app): State<App>,
    PathOf(session): PathOf<String>,
) -> Answer<SessionDescription> {
    let session = named(&session)?;
    let info = match app.sessions.info(&session).await? {
        Some(info) => info,
        // Events that another program wrote, or that waited in the spool of a process that was killed meanwhile. Who looks
        // changes nothing: they are not put into the list.
        None => {
            app.sessions.info_including_foreign(&session).await.map_err(|error| match error {
                error if error.is_transient() => error,
                // There is none, or what is there of it is not to be one.
                _ => SessionError::NotFound { session: session.clone() },
            })?
        }
    };
    let (events, unreadable, problem) =
        match app.sessions.state_at(&session, ReplayUntil::End).await {
            Ok(state) => (Some(state.events()), Some(state.unreadable()), None),
            Err(error) if error.is_transient() => return Err(error.into()),
            Err(error) => (None, None, Some(error.to_string())),
        };
    Ok(Json(SessionDescription { info: view(info), events, unreadable, problem }))
}

/// How far.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReplayQuery {
    /// Up to this entry id or time; by default to the end.
    until: Option<String>,
}

/// The events of a session in their order, one JSON value a line; the last line is `{"end":...}`, or `{"error":...}`.
#[utoipa::path(get, path = "/sessions/{session}/replay", tag = "sessions", params(("session" = String, Path), ReplayQuery),
    responses((status = 200, content_type = "application/x-ndjson", body = String), (status = 404), (status = 409)))]
async fn replay(
    State(app): State<App>,
    PathOf(session): PathOf<String>,
    QueryOf(query): QueryOf<ReplayQuery>,
) -> Result<Response, ApiError> {
    let until = until(query.until.as_deref())?;
    let export = app.sessions.export(&named(&session)?).await?;
    let replaying = Replaying { export, until, events: 0, skipped: 0, is_ended: false };
    Ok(lines(stream::unfold(replaying, |mut replaying| async move {
        let line = replaying.next().await?;
        Some((line, replaying))
    })))
}

/// A replay under way.
struct Replaying {
    export: Export,
    until: ReplayUntil,
    events: u64,
    /// Entries before the first that are compacted.
    skipped: u64,
    is_ended: bool,
}

impl Replaying {
    async fn next(&mut self) -> Option<String> {
        while !self.is_ended {
            let line = match self.export.next_line().await {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) => return Some(self.failed(error)),
            };
            let line: Value = serde_json::from_str(&line).unwrap_or_default();
            if let Some(head) = line.get("headwater_session") {
                self.skipped =
                    head.pointer("/beginning/after").and_then(Value::as_u64).unwrap_or(0);
            }
            let Some(entry) = line.get("entry") else { continue };
            let event = event(entry);
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

    fn failed(&mut self, error: SessionError) -> String {
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

/// An entry of an export as an event. The payload is JSON where it is.
fn event(entry: &Value) -> Value {
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

/// What the new session is called, and how far it follows the old one.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ForkWish {
    /// The id of the new session.
    session: String,
    /// Up to this entry id or time; by default to the end.
    until: Option<String>,
}

/// Makes a session of the events of another one, which stays as it is.
#[utoipa::path(post, path = "/sessions/{session}/fork", tag = "sessions", params(("session" = String, Path)), request_body = ForkWish,
    responses((status = 201, body = SessionView), (status = 404), (status = 409, description = "There is one with this id."),
        (status = 429, description = "Too many imports and forks are under way.")))]
async fn fork(
    State(app): State<App>,
    PathOf(session): PathOf<String>,
    JsonBody(wish): JsonBody<ForkWish>,
) -> Result<(StatusCode, Json<SessionView>), ApiError> {
    let (parent, child) = (named(&session)?, named(&wish.session)?);
    let until = until(wish.until.as_deref())?;
    let sessions = Arc::clone(&app.sessions);
    let forking = async move {
        sessions.fork(&parent, until, &child).await?;
        made(&sessions, child).await
    };
    app.long_work.run(forking).await
}

/// A session as lines of JSON that `import` takes. The last line has their number and checksum.
#[utoipa::path(get, path = "/sessions/{session}/export", tag = "sessions", params(("session" = String, Path)),
    responses((status = 200, content_type = "application/x-ndjson", body = String), (status = 404), (status = 409)))]
async fn export(
    State(app): State<App>,
    PathOf(session): PathOf<String>,
) -> Result<Response, ApiError> {
    let export = app.sessions.export(&named(&session)?).await?;
    Ok(lines(stream::unfold(Some(export), |export| async move {
        let mut export = export?;
        match export.next_line().await {
            Ok(line) => line.map(|line| (line, Some(export))),
            Err(error) => Some((error_line(&error.into()), None)),
        }
    })))
}

pub(super) async fn made(
    sessions: &Sessions,
    session: SessionId,
) -> Result<(StatusCode, Json<SessionView>), ApiError> {
    let info = sessions.info(&session).await?.ok_or(SessionError::NotFound { session })?;
    Ok((StatusCode::CREATED, Json(view(info))))
}

pub(super) fn named(session: &str) -> Result<SessionId, ApiError> {
    SessionId::new(session).map_err(|error| ApiError::invalid(error.to_string()))
}

fn until(text: Option<&str>) -> Result<ReplayUntil, ApiError> {
    Ok(match text.map(|text| point("until", text)).transpose()? {
        None => ReplayUntil::End,
        Some(Point::Id(id)) => ReplayUntil::Entry(id),
        Some(Point::Time(at)) => ReplayUntil::Time(at),
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
                let message = format!(
                    "the session `{session}` exists already, or another fork or import of this id is not finished; choose another id"
                );
                Self::new(StatusCode::CONFLICT, "conflict", message)
            }
            SessionError::Unfinished { .. }
            | SessionError::CompactedWhileReading { .. }
            | SessionError::Expired { .. }
            | SessionError::Incomplete { .. } => {
                Self::new(StatusCode::CONFLICT, "conflict", message)
            }
            other => Self::of_streams(other, other.is_transient()),
        }
    }
}

//! Events of a session page by page, and two sessions side by side.
//!
//! Upstream: `http/router.rs`, the console and `cli/verbs/session.rs`. Guarantees: a comparison reads at most
//! [`COMPARED_MAX`] events of each session and says if there are more.

use axum::Json;
use axum::extract::State;
use headwater_bus::SessionId;
use headwater_stream::{Entry, EntryId};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::sessions::{find, parse_session_id, to_event};
use crate::api::dto::parse_entry_id;
use crate::http::ApiError;
use crate::http::body::JsonResult;
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging::{self, PageQuery};
use crate::server::app_state::App;

/// Default and maximum events of a page.
const EVENTS_DEFAULT: usize = 50;
const EVENTS_MAX: usize = 500;

/// Maximum events of each session in a comparison.
const COMPARED_MAX: usize = 1000;

/// Maximum different events of each session in a comparison.
const DIFFERENT_MAX: usize = 50;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(events)).routes(routes!(diff))
}

/// A page of events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionEventPage {
    /// Each with id, type, timestamp and payload.
    events: Vec<Value>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
}

/// List the stored events of a session in order.
#[utoipa::path(get, path = "/sessions/{session}/events", tag = "sessions", params(("session" = String, Path), PageQuery),
    responses((status = 200, body = SessionEventPage), (status = 404)))]
async fn events(
    State(app): State<App>,
    PathParams(session): PathParams<String>,
    QueryParams(query): QueryParams<PageQuery>,
) -> JsonResult<SessionEventPage> {
    let session = parse_session_id(&session)?;
    let limit = paging::limit(query.limit, EVENTS_DEFAULT, EVENTS_MAX)?;
    let after =
        query.cursor.as_deref().map(|cursor| parse_entry_id("cursor", cursor)).transpose()?;
    let (events, next) = read(&app, &session, after, limit).await?;
    Ok(Json(SessionEventPage { events, next_cursor: next.map(|id| id.to_string()) }))
}

/// Reads events after an entry, limited in bytes as well. Returns the last entry read if there may be more.
async fn read(
    app: &App,
    session: &SessionId,
    after: Option<EntryId>,
    limit: usize,
) -> Result<(Vec<Value>, Option<EntryId>), ApiError> {
    find(app, session).await?;
    let measure = |entry: &Entry| (entry.id, entry.fields.bytes());
    let next = |last: Option<EntryId>, count| {
        app.sessions.entries_after(session, last.or(after).unwrap_or(EntryId::MIN), count)
    };
    let (entries, next) = paging::read_page(limit, measure, next).await?;
    Ok((entries.iter().map(event).collect(), next))
}

fn event(entry: &Entry) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let pairs = entry.fields.iter().map(|(name, value)| json!([text(name), text(value)]));
    to_event(&json!({"id": entry.id.to_string(), "fields": pairs.collect::<Vec<_>>()}))
}

/// The session to compare with.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SessionDiffQuery {
    /// Another session; by default the one that it was forked from.
    with: Option<String>,
}

/// Two sessions side by side.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionDiffResponse {
    /// Number of events at the beginning that are the same in both: type and payload.
    same: usize,
    /// The last event that is the same in both.
    last_same: Option<Value>,
    /// Further events of this session, at most 50.
    only_left: Vec<Value>,
    /// Further events of the other session, at most 50.
    only_right: Vec<Value>,
    /// Whether there are events that were not compared or are left out.
    is_cut: bool,
}

/// Compare two sessions event by event.
#[utoipa::path(get, path = "/sessions/{session}/diff", tag = "sessions", params(("session" = String, Path), SessionDiffQuery),
    responses((status = 200, body = SessionDiffResponse), (status = 404)))]
async fn diff(
    State(app): State<App>,
    PathParams(session): PathParams<String>,
    QueryParams(query): QueryParams<SessionDiffQuery>,
) -> JsonResult<SessionDiffResponse> {
    let left = parse_session_id(&session)?;
    let right = match (query.with, find(&app, &left).await?.parent) {
        (Some(with), _) => parse_session_id(&with)?,
        (None, Some(parent)) => parent.session,
        (None, None) => {
            let message =
                format!("session `{left}` is no fork; name the session to compare it with");
            return Err(ApiError::invalid(message));
        }
    };
    let compared = |session| read(&app, session, None, COMPARED_MAX);
    let ((left, more_left), (right, more_right)) =
        tokio::try_join!(compared(&left), compared(&right))?;
    let mut found = difference(left, right);
    found.is_cut |= more_left.is_some() || more_right.is_some();
    Ok(Json(found))
}

fn difference(mut left: Vec<Value>, mut right: Vec<Value>) -> SessionDiffResponse {
    let is_same =
        |(a, b): &(&Value, &Value)| a["type"] == b["type"] && a["payload"] == b["payload"];
    let same = left.iter().zip(&right).take_while(is_same).count();
    let is_cut = left.len().max(right.len()) > same + DIFFERENT_MAX;
    let rest = |all: &mut Vec<Value>| {
        let mut rest = all.split_off(same);
        rest.truncate(DIFFERENT_MAX);
        rest
    };
    let (only_left, only_right) = (rest(&mut left), rest(&mut right));
    SessionDiffResponse { same, last_same: left.pop(), only_left, only_right, is_cut }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_ends_at_the_first_difference() {
        let event = |id: &str, payload: u32| json!({"id": id, "type": "t", "payload": payload});
        let left = vec![event("1-0", 1), event("2-0", 2), event("3-0", 3)];
        let right = vec![event("7-0", 1), event("8-0", 5)];
        let found = difference(left.clone(), right);
        assert_eq!((found.same, found.is_cut), (1, false));
        assert_eq!(found.last_same, Some(event("1-0", 1)));
        assert_eq!((found.only_left.len(), found.only_right.len()), (2, 1));
        let found = difference(left.clone(), left);
        assert_eq!((found.same, found.only_left.len(), found.only_right.len()), (3, 0, 0));
    }
}

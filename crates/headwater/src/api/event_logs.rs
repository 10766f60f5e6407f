//! One recorded event by its id, as the stream entries of `issue_work` name it (`event_log_id`).
//!
//! Upstream: `http/router.rs`. Downstream: the admin methods of the store.

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use headwater_issue::{EventLog, EventLogId};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::issues::{IssueEventDto, event_to_dto};
use crate::http::ApiError;
use crate::http::body::JsonResult;
use crate::http::extract::PathParams;
use crate::server::app_state::App;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(show)).routes(routes!(original))
}

/// Show an event by its id, with its issue and payload.
#[utoipa::path(get, path = "/event-logs/{id}", tag = "event logs", params(("id" = i64, Path)),
    responses((status = 200, body = IssueEventDto), (status = 404)))]
async fn show(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<IssueEventDto> {
    Ok(Json(event_to_dto(&find(&app, id).await?)))
}

/// Show the original payload of an event, byte for byte if the database could not store it exactly, otherwise as stored.
#[utoipa::path(get, path = "/event-logs/{id}/original", tag = "event logs", params(("id" = i64, Path)),
    responses((status = 200, body = serde_json::Value), (status = 404)))]
async fn original(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> Result<impl IntoResponse, ApiError> {
    let found = find(&app, id).await?;
    let original = app.store.original_payload(found.id).await?;
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((json, original.unwrap_or(found.payload)))
}

async fn find(app: &App, id: i64) -> Result<EventLog, ApiError> {
    let found = app.store.event_log(EventLogId(id)).await?;
    found.ok_or_else(|| {
        ApiError::not_found(format!(
            "event log `{id}` does not exist; it may have been deleted after `retention.events`"
        ))
    })
}

//! The effect ledger: list and show the calls of tools that change something.
//!
//! Upstream: `http/router.rs`. Downstream: `tickets::effects`. Guarantees: read-only.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::desk::effects::{Effect, EffectStatus};
use crate::http::ApiError;
use crate::http::body::JsonResult;
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::limits::{PAGE_DEFAULT, PAGE_MAX};
use crate::server::app_state::App;
use crate::tickets::effects::EffectFilter;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(show))
}

/// Filter of tool calls.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EffectListQuery {
    /// `approved`, `started`, `done`, `failed`, `rejected` or `unknown`.
    status: Option<String>,
    /// Name of a tool.
    tool: Option<String>,
    issue_id: Option<i64>,
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 200 at most.
    limit: Option<usize>,
}

/// A page of tool calls.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EffectPage {
    effects: Vec<EffectDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
}

/// A call of a tool that changes something, or that a person has decided about.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EffectDto {
    id: i64,
    issue_id: i64,
    integration: String,
    tool: String,
    /// `approved` (the next run makes it), `started` (no outcome yet), `done`, `failed` (not carried out), `rejected` (by a person) or
    /// `unknown` (a person has to find out what it has done).
    status: &'static str,
    /// Arguments of the call.
    #[schema(value_type = Object)]
    arguments: Value,
    /// The same for every attempt.
    idempotency_key: String,
    attempts: i64,
    /// What the model was told, as JSON.
    result: Option<String>,
    /// Why there is no outcome yet, why it is unknown, or why an approved call was not made in time.
    problem: Option<String>,
    /// Event log of the oldest message without an answer. A request makes the same call once.
    request: i64,
    /// Draft that named the call.
    draft: Option<i64>,
    /// Name of the token that approved or rejected it.
    decided_by: Option<String>,
    created_at: String,
    started_at: Option<String>,
    ended_at: Option<String>,
}

/// List calls of tools that change something, newest first.
#[utoipa::path(get, path = "/effects", tag = "effects", params(EffectListQuery), responses((status = 200, body = EffectPage)))]
async fn list(
    State(app): State<App>,
    QueryParams(query): QueryParams<EffectListQuery>,
) -> JsonResult<EffectPage> {
    let status = query.status.as_deref().map(|name| {
        EffectStatus::parse(name).ok_or_else(|| {
            let names = EffectStatus::ALL.map(EffectStatus::as_str).join("`, `");
            ApiError::invalid(format!("`status` must be one of `{names}`"))
        })
    });
    if query.tool.as_ref().is_some_and(|name| name.contains('\0')) {
        return Err(ApiError::invalid("`tool` contains a control character"));
    }
    let filter = EffectFilter {
        status: status.transpose()?,
        tool: query.tool,
        issue_id: query.issue_id,
        before: query.cursor,
    };
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let effects = app.tickets.effects(&filter, limit).await?;
    let next_cursor = effects.last().filter(|_| effects.len() == limit).map(|one| one.number);
    Ok(Json(EffectPage { effects: effects.into_iter().map(effect_to_dto).collect(), next_cursor }))
}

/// Show a call of a tool.
#[utoipa::path(get, path = "/effects/{id}", tag = "effects", params(("id" = i64, Path)),
    responses((status = 200, body = EffectDto), (status = 404)))]
async fn show(State(app): State<App>, PathParams(id): PathParams<i64>) -> JsonResult<EffectDto> {
    let effect = app.tickets.effect(id).await?.ok_or_else(|| {
        ApiError::not_found(format!("there is no effect {id}; `headwater effect list` shows all"))
    })?;
    Ok(Json(effect_to_dto(effect)))
}

/// Converts a call to JSON.
pub(super) fn effect_to_dto(effect: Effect) -> EffectDto {
    EffectDto {
        id: effect.number,
        issue_id: effect.issue_id.0,
        integration: effect.integration,
        tool: effect.call.tool,
        status: effect.status.as_str(),
        arguments: effect.call.arguments,
        idempotency_key: effect.key.to_string(),
        attempts: effect.attempts,
        result: effect.result,
        problem: effect.problem,
        request: effect.call.request,
        draft: effect.draft,
        decided_by: effect.decided_by,
        created_at: effect.created_at.to_rfc3339(),
        started_at: effect.started_at.map(|at| at.to_rfc3339()),
        ended_at: effect.ended_at.map(|at| at.to_rfc3339()),
    }
}

//! Prompts of integrations: list, show, compare, set and roll back.
//!
//! Upstream: `http/router.rs`. Downstream: `tickets::prompts`. Guarantees: a text that does not parse changes nothing; changes
//! require the role `admin`, because they decide what the model says to everybody.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::line_diff::{DiffLine, difference};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::limits::{PAGE_DEFAULT, PAGE_MAX};
use crate::server::app_state::App;
use crate::text;
use crate::tickets::prompts::{
    ChangedPrompt, PromptChange, PromptError, PromptState, PromptVersion,
};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show, set))
        .routes(routes!(versions))
        .routes(routes!(diff))
        .routes(routes!(rollback))
}

/// The prompts of all integrations.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PromptListResponse {
    prompts: Vec<PromptStateDto>,
}

/// Which version of the prompt of an integration is active.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PromptStateDto {
    integration: String,
    /// The active version; 0 is the built-in prompt.
    version: i64,
    /// The newest version that was stored.
    newest: i64,
    changed_at: Option<String>,
    /// Name of the token that chose the active version.
    changed_by: Option<String>,
}

/// List the active prompt of each integration of the settings.
#[utoipa::path(get, path = "/prompts", tag = "prompts", responses((status = 200, body = PromptListResponse)))]
async fn list(State(app): State<App>, principal: Principal) -> JsonResult<PromptListResponse> {
    let mut prompts = Vec::new();
    let all = app.settings.integrations.iter();
    for integration in all.filter(|one| principal.allows(&one.id)) {
        prompts.push(state_to_dto(app.tickets.prompt_state(&integration.id).await?));
    }
    Ok(Json(PromptListResponse { prompts }))
}

/// A version of a prompt.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PromptQuery {
    /// A version; 0 is the built-in prompt. Default: the active one.
    version: Option<i64>,
}

/// A version of the prompt of an integration.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PromptVersionDto {
    integration: String,
    version: i64,
    /// Whether runs use it.
    is_active: bool,
    /// The text. `{{integration}}`, `{{provider}}`, `{{date}}` and `{{tools}}` are variables.
    content: String,
    /// Why it was written.
    comment: Option<String>,
    created_at: Option<String>,
    /// Name of the token that stored it.
    created_by: Option<String>,
}

/// Show the prompt of an integration.
#[utoipa::path(get, path = "/prompts/{integration}", tag = "prompts", params(("integration" = String, Path), PromptQuery),
    responses((status = 200, body = PromptVersionDto), (status = 404)))]
async fn show(
    State(app): State<App>,
    PathParams(integration): PathParams<String>,
    QueryParams(query): QueryParams<PromptQuery>,
) -> JsonResult<PromptVersionDto> {
    let active = active(&app, &integration).await?;
    let number = query.version.unwrap_or(active.version);
    let version = app.tickets.prompt_version(&integration, number).await?;
    Ok(Json(version_to_dto(version, &active)))
}

/// Page of versions.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PromptVersionsQuery {
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 200 at most.
    limit: Option<usize>,
}

/// A page of versions.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PromptVersionPage {
    versions: Vec<PromptVersionDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
}

/// List the versions of the prompt of an integration, newest first, without the built-in one.
#[utoipa::path(get, path = "/prompts/{integration}/versions", tag = "prompts",
    params(("integration" = String, Path), PromptVersionsQuery),
    responses((status = 200, body = PromptVersionPage), (status = 404)))]
async fn versions(
    State(app): State<App>,
    PathParams(integration): PathParams<String>,
    QueryParams(query): QueryParams<PromptVersionsQuery>,
) -> JsonResult<PromptVersionPage> {
    let active = active(&app, &integration).await?;
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let found = app.tickets.prompt_versions(&integration, query.cursor, limit).await?;
    let next_cursor = found.last().filter(|_| found.len() == limit).map(|one| one.version);
    let versions = found.into_iter().map(|one| version_to_dto(one, &active)).collect();
    Ok(Json(PromptVersionPage { versions, next_cursor }))
}

/// Two versions to compare.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PromptDiffQuery {
    /// The older version. Default: the one before `to`.
    from: Option<i64>,
    /// The newer version. Default: the active one.
    to: Option<i64>,
}

/// The difference between two versions.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PromptDiffResponse {
    integration: String,
    from: i64,
    to: i64,
    lines: Vec<DiffLine>,
}

/// Compare two versions of the prompt of an integration, line by line.
#[utoipa::path(get, path = "/prompts/{integration}/diff", tag = "prompts",
    params(("integration" = String, Path), PromptDiffQuery),
    responses((status = 200, body = PromptDiffResponse), (status = 404)))]
async fn diff(
    State(app): State<App>,
    PathParams(integration): PathParams<String>,
    QueryParams(query): QueryParams<PromptDiffQuery>,
) -> JsonResult<PromptDiffResponse> {
    let active = active(&app, &integration).await?;
    let to = query.to.unwrap_or(active.version);
    let from = match query.from {
        Some(from) => from,
        None => app.tickets.prompt_version_before(&integration, to).await?,
    };
    let older = app.tickets.prompt_version(&integration, from).await?;
    let newer = app.tickets.prompt_version(&integration, to).await?;
    let lines = difference(&older.content, &newer.content);
    Ok(Json(PromptDiffResponse { integration, from, to, lines }))
}

/// A new prompt.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetPromptRequest {
    /// The text. `{{integration}}`, `{{provider}}`, `{{date}}` and `{{tools}}` are variables, `{{{{` is two braces.
    content: String,
    /// Why it is changed.
    comment: Option<String>,
    /// The active version that you have read; if another one is active, nothing is changed.
    expected_version: Option<i64>,
}

/// An earlier version to activate.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RollbackPromptRequest {
    /// The version; 0 is the built-in prompt. Default: the one before the active one.
    version: Option<i64>,
    /// The active version that you have read; if another one is active, nothing is changed.
    expected_version: Option<i64>,
}

/// Result of a change.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PromptChangedResponse {
    #[serde(flatten)]
    state: PromptStateDto,
    /// False if that text or version was active before.
    changed: bool,
}

/// Store a new version of the prompt of an integration and activate it.
#[utoipa::path(post, path = "/prompts/{integration}", tag = "prompts", params(("integration" = String, Path)),
    request_body = SetPromptRequest,
    responses((status = 200, body = PromptChangedResponse), (status = 400, description = "The text does not parse; the message names the line."),
        (status = 404), (status = 409, description = "Another version is active than expected.")))]
async fn set(
    State(app): State<App>,
    principal: Principal,
    PathParams(integration): PathParams<String>,
    JsonBody(request): JsonBody<SetPromptRequest>,
) -> JsonResult<PromptChangedResponse> {
    let SetPromptRequest { content, comment, expected_version } = request;
    let change = PromptChange::Set { content, comment };
    change_prompt(&app, &principal, &integration, change, expected_version).await
}

/// Activate an earlier version of the prompt of an integration.
#[utoipa::path(post, path = "/prompts/{integration}/rollback", tag = "prompts", params(("integration" = String, Path)),
    request_body = RollbackPromptRequest,
    responses((status = 200, body = PromptChangedResponse), (status = 404),
        (status = 409, description = "Another version is active than expected.")))]
async fn rollback(
    State(app): State<App>,
    principal: Principal,
    PathParams(integration): PathParams<String>,
    JsonBody(request): JsonBody<RollbackPromptRequest>,
) -> JsonResult<PromptChangedResponse> {
    let change = PromptChange::Rollback(request.version);
    change_prompt(&app, &principal, &integration, change, request.expected_version).await
}

async fn change_prompt(
    app: &App,
    principal: &Principal,
    integration: &str,
    change: PromptChange,
    expected: Option<i64>,
) -> JsonResult<PromptChangedResponse> {
    principal.require_role(Role::Admin)?;
    require_integration(app, integration)?;
    let changed = app.tickets.change_prompt(integration, change, expected, &principal.name).await?;
    let ChangedPrompt { state, changed } = changed;
    Ok(Json(PromptChangedResponse { state: state_to_dto(state), changed }))
}

fn require_integration(app: &App, integration: &str) -> Result<(), ApiError> {
    if app.settings.integrations.iter().any(|one| one.id == integration) {
        return Ok(());
    }
    let shown = text::one_line(integration, 60);
    let message = format!(
        "there is no integration `{shown}` in the settings; `headwater prompt list` shows all"
    );
    Err(ApiError::not_found(message))
}

async fn active(app: &App, integration: &str) -> Result<PromptState, ApiError> {
    require_integration(app, integration)?;
    Ok(app.tickets.prompt_state(integration).await?)
}

fn state_to_dto(state: PromptState) -> PromptStateDto {
    PromptStateDto {
        integration: state.integration,
        version: state.version,
        newest: state.newest,
        changed_at: state.changed_at.map(|at| at.to_rfc3339()),
        changed_by: state.changed_by,
    }
}

fn version_to_dto(version: PromptVersion, active: &PromptState) -> PromptVersionDto {
    PromptVersionDto {
        integration: active.integration.clone(),
        version: version.version,
        is_active: version.version == active.version,
        content: version.content,
        comment: version.comment,
        created_at: version.created_at.map(|at| at.to_rfc3339()),
        created_by: version.created_by,
    }
}

impl From<PromptError> for ApiError {
    fn from(problem: PromptError) -> Self {
        let message = problem.to_string();
        match problem {
            PromptError::Invalid(_) => Self::invalid(message),
            PromptError::NoVersion { .. } => Self::not_found(message),
            PromptError::Conflict { .. } => Self::new(StatusCode::CONFLICT, "conflict", message),
            PromptError::Ticket(problem) => problem.into(),
        }
    }
}

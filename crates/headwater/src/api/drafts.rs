//! Drafts: list, show, link, approve, edit and reject answers that wait for a person.
//!
//! Upstream: `http/router.rs`. Downstream: `tickets::drafts`. Guarantees: a draft is decided about once; repeating a
//! decision changes nothing; a draft whose issue has newer events cannot be approved.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_stream::clock::{Clock, SystemClock};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::line_diff::{DiffLine, difference};
use crate::config::Role;
use crate::desk::draft_links::{DraftVersion, LinkAction};
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::limits::{PAGE_DEFAULT, PAGE_MAX};
use crate::server::app_state::App;
use crate::tickets::drafts::{
    DecidedDraft, Draft, DraftDecision, DraftError, DraftFilter, DraftStatus,
};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(link))
        .routes(routes!(approve))
        .routes(routes!(edit))
        .routes(routes!(reject))
}

/// Filter of drafts.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DraftListQuery {
    /// `pending`, `approved`, `rejected`, `outdated` or `note`.
    status: Option<String>,
    integration: Option<String>,
    issue_id: Option<i64>,
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 200 at most.
    limit: Option<usize>,
}

/// A page of drafts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DraftPage {
    drafts: Vec<DraftDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
}

/// An answer that waits for a person, or an internal note.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DraftDto {
    id: i64,
    issue_id: i64,
    integration: String,
    external_project_id: String,
    external_issue_id: String,
    /// `pending`, `approved`, `rejected`, `outdated` or `note`.
    status: &'static str,
    /// The text of the model.
    content: String,
    /// The text of a person, which is posted instead.
    edited: Option<String>,
    /// The text that was posted.
    posted: Option<String>,
    /// What else an approval does, such as `close`.
    effects: Vec<String>,
    /// Session of the model run.
    session_id: Option<String>,
    /// What chose the mode: a rule, or the mode of the integration.
    chosen_by: String,
    /// Grows with each edit; send it with a decision to be sure that it is about the text you have read.
    version: i64,
    created_at: String,
    decided_at: Option<String>,
    /// Name of the token that decided.
    decided_by: Option<String>,
    /// Why it was rejected.
    decision_reason: Option<String>,
    /// Lines that differ between the text of the model and the one of a person; `null` without a text of a person.
    difference: Option<Vec<DiffLine>>,
    /// When it was found to wait longer than `desk.draft_max_wait`.
    overdue_at: Option<String>,
}

/// List drafts and notes, newest first.
#[utoipa::path(get, path = "/drafts", tag = "drafts", params(DraftListQuery), responses((status = 200, body = DraftPage)))]
async fn list(
    State(app): State<App>,
    principal: Principal,
    QueryParams(query): QueryParams<DraftListQuery>,
) -> JsonResult<DraftPage> {
    let status = query.status.as_deref().map(|name| {
        DraftStatus::parse(name).ok_or_else(|| {
            ApiError::invalid(
                "`status` must be `pending`, `approved`, `rejected`, `outdated` or `note`",
            )
        })
    });
    if query.integration.as_ref().is_some_and(|name| name.contains('\0')) {
        return Err(ApiError::invalid("`integration` contains a control character"));
    }
    let filter = DraftFilter {
        status: status.transpose()?,
        integration: query.integration,
        integrations: principal.integrations.as_ref().map(|all| all.to_vec()),
        issue_id: query.issue_id,
        before: query.cursor,
    };
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let drafts = app.tickets.drafts(&filter, limit).await?;
    let next = drafts.last().filter(|_| drafts.len() == limit).map(|draft| draft.number);
    Ok(Json(DraftPage {
        drafts: drafts.into_iter().map(draft_to_dto).collect(),
        next_cursor: next,
    }))
}

/// Show a draft.
#[utoipa::path(get, path = "/drafts/{id}", tag = "drafts", params(("id" = i64, Path)),
    responses((status = 200, body = DraftDto), (status = 404)))]
async fn show(State(app): State<App>, PathParams(id): PathParams<i64>) -> JsonResult<DraftDto> {
    let draft = app.tickets.draft(id).await?.ok_or(DraftError::NotFound(id))?;
    Ok(Json(draft_to_dto(draft)))
}

/// Links that decide about one version of a draft without a token.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DraftLinkResponse {
    id: i64,
    /// The version that the links are about.
    version: i64,
    /// Opens a page whose form posts the draft.
    approve: String,
    /// Opens a page whose form rejects the draft.
    reject: String,
    expires_at: String,
}

/// Make links that approve or reject a draft without a token. Requires the role `write`.
#[utoipa::path(get, path = "/drafts/{id}/link", tag = "drafts", params(("id" = i64, Path)),
    responses((status = 200, body = DraftLinkResponse), (status = 403), (status = 404),
        (status = 409, description = "`conflict`, `outdated`: it does not wait for a decision. `links_disabled`: `desk.link_secret` is not set.")))]
async fn link(
    State(app): State<App>,
    principal: Principal,
    PathParams(id): PathParams<i64>,
) -> JsonResult<DraftLinkResponse> {
    principal.require_role(Role::Write)?;
    let draft = app.tickets.draft(id).await?.ok_or(DraftError::NotFound(id))?;
    let Some(links) = &app.draft_links else {
        let message = "links to drafts are disabled; set `desk.link_secret` and restart the server";
        return Err(ApiError::new(StatusCode::CONFLICT, "links_disabled", message));
    };
    match draft.status {
        DraftStatus::Pending => {}
        DraftStatus::Outdated => return Err(DraftError::Outdated(id).into()),
        status => {
            let problem =
                format!("does not wait for a decision: its status is `{}`", status.as_str());
            return Err(DraftError::Conflict { number: id, problem }.into());
        }
    }
    let now = SystemClock.now();
    let version = draft.version;
    let linked = DraftVersion { number: id, draft_id: draft.draft_id, version };
    Ok(Json(DraftLinkResponse {
        id,
        version,
        approve: links.url(linked, LinkAction::Approve, now),
        reject: links.url(linked, LinkAction::Reject, now),
        expires_at: links.expires_at(now).to_rfc3339(),
    }))
}

/// Approval of a draft.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApproveDraftRequest {
    /// The text to post. Default: the edited text, or that of the model.
    content: Option<String>,
    /// The version that you have read; another one is refused.
    version: Option<i64>,
}

/// A new text of a draft.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EditDraftRequest {
    content: String,
    /// The version that you have read; another one is refused.
    version: Option<i64>,
}

/// Rejection of a draft.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RejectDraftRequest {
    /// Why; the model sees it in its next run.
    reason: Option<String>,
    /// The version that you have read; another one is refused.
    version: Option<i64>,
}

/// Result of a decision.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DraftDecisionResponse {
    #[serde(flatten)]
    draft: DraftDto,
    /// False if the same decision was made before.
    changed: bool,
}

/// Approve a draft: it is posted, once.
#[utoipa::path(post, path = "/drafts/{id}/approve", tag = "drafts", params(("id" = i64, Path)), request_body = ApproveDraftRequest,
    responses((status = 200, body = DraftDecisionResponse), (status = 404),
        (status = 409, description = "`outdated`: its issue has newer events. `conflict`: it was decided about or edited before.")))]
async fn approve(
    State(app): State<App>,
    principal: Principal,
    PathParams(id): PathParams<i64>,
    JsonBody(request): JsonBody<ApproveDraftRequest>,
) -> JsonResult<DraftDecisionResponse> {
    let decision = DraftDecision::Approve { content: request.content };
    decide(app, principal, id, decision, request.version).await
}

/// Replace the text of a draft. It still waits for an approval.
#[utoipa::path(post, path = "/drafts/{id}/edit", tag = "drafts", params(("id" = i64, Path)), request_body = EditDraftRequest,
    responses((status = 200, body = DraftDecisionResponse), (status = 404), (status = 409)))]
async fn edit(
    State(app): State<App>,
    principal: Principal,
    PathParams(id): PathParams<i64>,
    JsonBody(request): JsonBody<EditDraftRequest>,
) -> JsonResult<DraftDecisionResponse> {
    let decision = DraftDecision::Edit { content: request.content };
    decide(app, principal, id, decision, request.version).await
}

/// Reject a draft: it is never posted.
#[utoipa::path(post, path = "/drafts/{id}/reject", tag = "drafts", params(("id" = i64, Path)), request_body = RejectDraftRequest,
    responses((status = 200, body = DraftDecisionResponse), (status = 404), (status = 409)))]
async fn reject(
    State(app): State<App>,
    principal: Principal,
    PathParams(id): PathParams<i64>,
    JsonBody(request): JsonBody<RejectDraftRequest>,
) -> JsonResult<DraftDecisionResponse> {
    let decision = DraftDecision::Reject { reason: request.reason };
    decide(app, principal, id, decision, request.version).await
}

async fn decide(
    app: App,
    principal: Principal,
    id: i64,
    decision: DraftDecision,
    version: Option<i64>,
) -> JsonResult<DraftDecisionResponse> {
    let decided = app.tickets.decide_draft(id, decision, version, &principal.name).await?;
    let DecidedDraft { draft, changed } = decided;
    Ok(Json(DraftDecisionResponse { draft: draft_to_dto(draft), changed }))
}

/// Converts a draft to JSON.
pub(super) fn draft_to_dto(draft: Draft) -> DraftDto {
    let of_person = draft.posted.as_ref().or(draft.edited.as_ref());
    let of_person = of_person.filter(|text| **text != draft.content);
    let difference = of_person.map(|text| difference(&draft.content, text));
    DraftDto {
        id: draft.number,
        issue_id: draft.issue_id.0,
        status: draft.status.as_str(),
        effects: draft.effects.into_iter().map(|effect| effect.target).collect(),
        created_at: draft.created_at.to_rfc3339(),
        decided_at: draft.decided_at.map(|at| at.to_rfc3339()),
        integration: draft.integration,
        external_project_id: draft.external_project_id,
        external_issue_id: draft.external_issue_id,
        content: draft.content,
        edited: draft.edited,
        posted: draft.posted,
        session_id: draft.session_id,
        chosen_by: draft.chosen_by,
        version: draft.version,
        decided_by: draft.decided_by,
        decision_reason: draft.decision_reason,
        difference,
        overdue_at: draft.overdue_at.map(|at| at.to_rfc3339()),
    }
}

impl From<DraftError> for ApiError {
    fn from(problem: DraftError) -> Self {
        let message = problem.to_string();
        match problem {
            DraftError::NotFound(_) => Self::not_found(message),
            DraftError::Outdated(_) => Self::new(StatusCode::CONFLICT, "outdated", message),
            DraftError::Conflict { .. } => Self::new(StatusCode::CONFLICT, "conflict", message),
            DraftError::Ticket(problem) => problem.into(),
        }
    }
}

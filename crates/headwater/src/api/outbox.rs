//! The outbox: list and show replies and events, retry dead ones, and explain why one is not delivered.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use headwater_issue::{
    DeadOutboxRow, IssueError, IssueId, OutboxDiagnosis, OutboxFacts, OutboxFilter, OutboxId,
    OutboxReason, OutboxStatus,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::time;
use crate::api::list_counts;
use crate::api::why::WhyStep;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::server::app_state::App;
use crate::text::counted;

/// Default and maximum rows of a page.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

/// Maximum reads of a page for a limited token.
const PAGES_MAX: usize = 20;

/// Maximum rows retried by one call.
const RETRY_BATCH: usize = 50;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_all))
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(why))
        .routes(routes!(retry))
        .routes(routes!(retry_all))
}

/// A page of dead outbox rows.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxPage {
    rows: Vec<OutboxRowDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
}

/// A reply or event whose delivery attempts are exhausted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxRowDto {
    id: i64,
    issue_id: i64,
    integration: String,
    external_project_id: String,
    external_issue_id: String,
    /// `reply` or `event`.
    kind: &'static str,
    target: String,
    payload: Value,
    attempts: u32,
    crashes: u32,
    created_at: String,
    /// Error of the last attempt.
    error: String,
}

/// Page of outbox rows.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct OutboxListQuery {
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 500 at most. Large rows shorten a page.
    limit: Option<usize>,
}

/// List dead replies and events, oldest first.
#[utoipa::path(get, path = "/outbox/dead", tag = "outbox", params(OutboxListQuery), responses((status = 200, body = OutboxPage)))]
async fn list(
    State(app): State<App>,
    principal: Principal,
    QueryParams(query): QueryParams<OutboxListQuery>,
) -> JsonResult<OutboxPage> {
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let from = query.cursor.map(OutboxId);
    let read = |last: Option<OutboxId>, count| {
        let (app, principal) = (Arc::clone(&app), principal.clone());
        async move { visible_dead_rows(&app, &principal, last.or(from), count).await }
    };
    let measure = |dead: &DeadOutboxRow| (dead.row.id, dead.row.payload.len() + dead.error.len());
    let (rows, last) = paging::read_page(limit, measure, read).await?;
    let next = last.map(|id| id.0);
    Ok(Json(OutboxPage { rows: rows.into_iter().map(to_dto).collect(), next_cursor: next }))
}

/// The dead rows that the caller can see, oldest first. Reads on until it has found enough of them.
pub(super) async fn visible_dead_rows(
    app: &App,
    principal: &Principal,
    mut after: Option<OutboxId>,
    count: usize,
) -> Result<Vec<DeadOutboxRow>, IssueError> {
    let mut found = Vec::new();
    loop {
        let page = app.store.dead_outbox(after, count).await?;
        let is_last = page.len() < count;
        after = page.last().map(|dead| dead.row.id);
        found.extend(page.into_iter().filter(|dead| principal.allows(&dead.row.integration)));
        if is_last || found.len() >= count {
            found.truncate(count);
            return Ok(found);
        }
    }
}

fn to_dto(dead: DeadOutboxRow) -> OutboxRowDto {
    let DeadOutboxRow { row, error } = dead;
    OutboxRowDto {
        id: row.id.0,
        issue_id: row.issue_id.0,
        integration: row.integration,
        external_project_id: row.external_project_id,
        external_issue_id: row.external_issue_id,
        kind: row.kind.as_str(),
        target: row.target,
        payload: serde_json::from_str(&row.payload).unwrap_or(Value::String(row.payload)),
        attempts: row.attempts,
        crashes: row.crashes,
        created_at: time(row.created_at),
        error,
    }
}

/// Filter of outbox rows.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct OutboxRowsQuery {
    /// `waiting`, `pending`, `taken`, `delivered` or `dead`.
    status: Option<String>,
    /// Only those of this issue.
    issue: Option<i64>,
    /// Largest ids first.
    #[serde(default)]
    newest_first: bool,
    /// Also count all that match.
    #[serde(default)]
    count: bool,
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 500 at most.
    limit: Option<usize>,
}

/// A page of outbox rows without their payloads.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxStatePage {
    rows: Vec<OutboxStateDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
    /// With `count`: how many rows match on all pages; 10001 if these are more than 10000, `null` if the database did not count them in time.
    #[serde(skip_serializing_if = "Option::is_none")]
    matching: Option<usize>,
}

/// The state of a reply or event.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxStateDto {
    id: i64,
    issue_id: i64,
    integration: String,
    /// `reply` or `event`.
    kind: &'static str,
    target: String,
    /// `waiting`: an older one comes first. `pending`, `taken`, `delivered` or `dead`.
    status: &'static str,
    attempts: u32,
    crashes: u32,
    created_at: String,
    /// When it is due; while it is taken, when its lease ends.
    due_at: String,
    delivered_at: Option<String>,
    /// Error of the last attempt.
    error: Option<String>,
}

fn state_to_dto(facts: OutboxFacts) -> OutboxStateDto {
    OutboxStateDto {
        id: facts.id.0,
        issue_id: facts.issue_id.0,
        integration: facts.integration,
        kind: facts.kind.as_str(),
        target: facts.target,
        status: facts.status.as_str(),
        attempts: facts.attempts,
        crashes: facts.crashes,
        created_at: time(facts.created_at),
        due_at: time(facts.due_at),
        delivered_at: facts.delivered_at.map(time),
        error: facts.error,
    }
}

/// List replies and events in any state, oldest first. Delivered ones are kept for `retention.outbox`.
#[utoipa::path(get, path = "/outbox", tag = "outbox", params(OutboxRowsQuery), responses((status = 200, body = OutboxStatePage)))]
async fn list_all(
    State(app): State<App>,
    principal: Principal,
    QueryParams(query): QueryParams<OutboxRowsQuery>,
) -> JsonResult<OutboxStatePage> {
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let status = query.status.as_deref().map(|name| {
        OutboxStatus::parse(name).ok_or_else(|| {
            let allowed = "`waiting`, `pending`, `taken`, `delivered` or `dead`";
            ApiError::invalid(format!("`status` must be {allowed}"))
        })
    });
    let filter = OutboxFilter {
        status: status.transpose()?,
        issue: query.issue.map(IssueId),
        after: query.cursor.map(OutboxId),
        newest_first: query.newest_first,
    };
    let counting = async {
        let integrations = principal.integrations.as_deref();
        match query.count {
            true => {
                let store = app.store.as_ref();
                list_counts::or_unknown(
                    list_counts::outbox_rows(store, &filter, integrations).await,
                )
            }
            false => Ok(None),
        }
    };
    let (page, matching) = tokio::join!(visible_rows(&app, &principal, filter, limit), counting);
    let ((rows, next), matching) = (page?, matching?);
    let rows = rows.into_iter().map(state_to_dto).collect();
    Ok(Json(OutboxStatePage { rows, next_cursor: next.map(|id| id.0), matching }))
}

/// A page of the rows that the caller can see, and its last row if there may be more.
async fn visible_rows(
    app: &App,
    principal: &Principal,
    mut filter: OutboxFilter,
    limit: usize,
) -> Result<(Vec<OutboxFacts>, Option<OutboxId>), IssueError> {
    let mut rows = Vec::new();
    // Rows that a limited token cannot see are skipped.
    for _ in 0..PAGES_MAX {
        let page = app.store.outbox_rows(&filter, limit).await?;
        let is_last = page.len() < limit;
        filter.after = page.last().map(|row| row.id);
        rows.extend(page.into_iter().filter(|row| principal.allows(&row.integration)));
        if is_last {
            filter.after = None;
        }
        if is_last || rows.len() >= limit {
            break;
        }
    }
    if rows.len() > limit {
        rows.truncate(limit);
        filter.after = rows.last().map(|row| row.id);
    }
    Ok((rows, filter.after))
}

/// Show the state of a reply or event.
#[utoipa::path(get, path = "/outbox/{id}", tag = "outbox", params(("id" = i64, Path)),
    responses((status = 200, body = OutboxStateDto), (status = 404)))]
async fn show(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<OutboxStateDto> {
    let facts = app.store.outbox_facts(OutboxId(id)).await?;
    let facts = facts.ok_or_else(|| IssueError::NotFound { what: format!("outbox row {id}") })?;
    Ok(Json(state_to_dto(facts)))
}

/// Why a reply or event is not delivered.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxWhyResponse {
    id: i64,
    issue_id: i64,
    /// `reply` or `event`.
    kind: &'static str,
    /// `waiting`, `pending`, `taken`, `delivered` or `dead`.
    status: &'static str,
    /// `delivered`, `dead`, `behind`, `in_progress`, `lease_expired`, `retrying` or `due`.
    reason: &'static str,
    /// Explanation with the next step.
    sentence: String,
    /// The command that helps, or that shows more.
    command: String,
    /// The facts.
    steps: Vec<WhyStep>,
}

/// Explain why a reply or event is not delivered, and name the command that helps.
#[utoipa::path(get, path = "/outbox/{id}/why", tag = "outbox", params(("id" = i64, Path)),
    responses((status = 200, body = OutboxWhyResponse), (status = 404)))]
async fn why(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<OutboxWhyResponse> {
    let facts = app.store.outbox_facts(OutboxId(id)).await?;
    let facts = facts.ok_or_else(|| IssueError::NotFound { what: format!("outbox row {id}") })?;
    let diagnosis = OutboxDiagnosis::from_facts(&facts);
    let reason = match diagnosis.reason {
        OutboxReason::Delivered { .. } => "delivered",
        OutboxReason::Dead { .. } => "dead",
        OutboxReason::Behind { .. } => "behind",
        OutboxReason::Taken { .. } => "in_progress",
        OutboxReason::LeaseExpired { .. } => "lease_expired",
        OutboxReason::Retrying { .. } => "retrying",
        OutboxReason::Due { .. } => "due",
        _ => "other",
    };
    Ok(Json(OutboxWhyResponse {
        id,
        issue_id: facts.issue_id.0,
        kind: facts.kind.as_str(),
        status: facts.status.as_str(),
        reason,
        sentence: diagnosis.to_string(),
        command: diagnosis.command(),
        steps: steps(&facts),
    }))
}

fn steps(facts: &OutboxFacts) -> Vec<WhyStep> {
    let OutboxFacts { integration, target, attempts, crashes, .. } = facts;
    let to = match target.is_empty() {
        true => format!("integration {integration}"),
        false => format!("{target} of integration {integration}"),
    };
    let mut delivery = format!(
        "{}, {}",
        counted(u64::from(*attempts), "failed delivery", "failed deliveries"),
        counted(u64::from(*crashes), "delivery without a result", "deliveries without a result")
    );
    if let Some(error) = &facts.error {
        delivery.push_str(&format!("; last error: {error}"));
    }
    let next = match facts.delivered_at {
        Some(at) => format!("delivered at {}", time(at)),
        None => format!("{}, due at {}", facts.status.as_str(), time(facts.due_at)),
    };
    vec![
        WhyStep { step: "commit", found: format!("at {}, to {to}", time(facts.created_at)) },
        WhyStep { step: "delivery", found: delivery },
        WhyStep { step: "state", found: next },
    ]
}

/// Result of a retry.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxRetryResponse {
    id: i64,
    /// `queued`: it will be delivered again, with its attempts reset.
    result: &'static str,
}

/// Retry a dead reply or event.
#[utoipa::path(post, path = "/outbox/{id}/retry", tag = "outbox", params(("id" = i64, Path)),
    responses((status = 200, body = OutboxRetryResponse), (status = 404)))]
async fn retry(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<OutboxRetryResponse> {
    app.store.retry_outbox(OutboxId(id)).await?;
    Ok(Json(OutboxRetryResponse { id, result: "queued" }))
}

/// Filter of dead rows.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutboxRetryRequest {
    /// Only those of this integration.
    integration: Option<String>,
    /// Only those of this issue.
    issue: Option<i64>,
    /// `next_cursor` of the previous response.
    cursor: Option<i64>,
}

/// Number of retried rows.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxRetryAllResponse {
    queued: u64,
    /// Pass as `cursor` to continue; `null` at the end.
    next_cursor: Option<i64>,
}

/// Retry all dead replies and events, in batches: repeat with `next_cursor` until it is `null`.
#[utoipa::path(post, path = "/outbox/retry", tag = "outbox", request_body = OutboxRetryRequest,
    responses((status = 200, body = OutboxRetryAllResponse)))]
async fn retry_all(
    State(app): State<App>,
    principal: Principal,
    JsonBody(request): JsonBody<OutboxRetryRequest>,
) -> JsonResult<OutboxRetryAllResponse> {
    let filter = OutboxFilter {
        status: Some(OutboxStatus::Dead),
        issue: request.issue.map(IssueId),
        after: request.cursor.map(OutboxId),
        newest_first: false,
    };
    let (rows, next) = visible_rows(&app, &principal, filter, RETRY_BATCH).await?;
    let is_selected = |row: &&OutboxFacts| {
        request.integration.as_ref().is_none_or(|integration| row.integration == *integration)
    };
    let mut queued = 0;
    for row in rows.iter().filter(is_selected) {
        match app.store.retry_outbox(row.id).await {
            Ok(_) => queued += 1,
            // Already retried by another caller.
            Err(IssueError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(OutboxRetryAllResponse { queued, next_cursor: next.map(|id| id.0) }))
}

//! Issues: list, show, explain, events, retry, release.
//!
//! Upstream: `http/router.rs`. Downstream: the admin methods of the store. Guarantees: pages follow ids, so that
//! concurrent changes neither repeat nor skip rows, and are limited in bytes; a change nudges the workers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use headwater_issue::{
    EventLog, EventLogFilter, EventLogId, Issue, IssueError, IssueFilter, IssueId, IssueRetried,
    ProcessingStatus, QuarantineCleared,
};
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::list_counts;
use crate::api::why::{self, WhyResponse};
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::server::app_state::App;
use crate::tickets::IssueUsage;

/// Default and maximum issues of a page.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

/// Issues that one call of `retry` with a filter looks at.
const RETRY_SCAN: usize = 200;

/// Maximum issues released by one call.
const RELEASE_BATCH: usize = 50;

/// Routes below `/api/v1`.
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(events))
        .routes(routes!(original))
        .routes(routes!(why))
        .routes(routes!(retry))
        .routes(routes!(retry_all))
        .routes(routes!(release))
        .routes(routes!(release_all))
}

/// Filter of issues.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct IssueListQuery {
    /// `idle`, `queued` or `processing`.
    status: Option<String>,
    /// Only those that are, or are not, quarantined.
    quarantined: Option<bool>,
    /// Only those of this integration.
    integration: Option<String>,
    /// Only those whose last error contains this text, in upper or lower case.
    error: Option<String>,
    /// Only those that are queued and wait: for a backoff, a budget or further events. Quarantined ones do not.
    #[serde(default)]
    waiting: bool,
    /// Largest ids first.
    #[serde(default)]
    newest_first: bool,
    /// Also count all that match.
    #[serde(default)]
    count: bool,
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 500 at most. Large issues shorten a page.
    limit: Option<usize>,
}

/// A page of issues.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssuePage {
    issues: Vec<IssueDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
    /// With `count`: how many issues match on all pages; 10001 if these are more than 10000, `null` if the database did not count them in time.
    #[serde(skip_serializing_if = "Option::is_none")]
    matching: Option<usize>,
}

/// List issues by id.
#[utoipa::path(get, path = "/issues", tag = "issues", params(IssueListQuery), responses((status = 200, body = IssuePage)))]
async fn list(
    State(app): State<App>,
    principal: Principal,
    QueryParams(query): QueryParams<IssueListQuery>,
) -> JsonResult<IssuePage> {
    let status = query.status.as_deref().map(|name| {
        ProcessingStatus::parse(name)
            .ok_or_else(|| ApiError::invalid("`status` must be `idle`, `queued` or `processing`"))
    });
    let filter = IssueFilter {
        status: status.transpose()?,
        quarantined: query.quarantined,
        integration: query.integration,
        error: query.error,
        waiting: query.waiting,
        after: query.cursor.map(IssueId),
        newest_first: query.newest_first,
    };
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let read = |last: Option<IssueId>, count| {
        let filter = IssueFilter { after: last.or(filter.after), ..filter.clone() };
        let (app, principal) = (Arc::clone(&app), principal.clone());
        async move { visible_issues(&app, &principal, &filter, count).await }
    };
    let page = paging::read_page(limit, |issue| (issue.id, bytes_of(issue)), read);
    let counting = async {
        match query.count {
            true => list_counts::or_unknown(count_visible(&app, &principal, &filter).await),
            false => Ok(None),
        }
    };
    let ((issues, last), matching) = tokio::try_join!(page, counting)?;
    let (issues, next_cursor) = (issues.iter().map(to_dto).collect(), last.map(|id| id.0));
    Ok(Json(IssuePage { issues, next_cursor, matching }))
}

/// How many issues match that the caller can see; more than [`paging::COUNT_MAX`] are one more.
async fn count_visible(
    app: &App,
    principal: &Principal,
    filter: &IssueFilter,
) -> Result<usize, IssueError> {
    let mut count = 0;
    for filter in principal.issue_filters(filter) {
        count += app.store.count_issues(&filter, paging::COUNT_MAX + 1 - count).await?;
    }
    Ok(count)
}

/// The issues that the caller can see, by id.
pub(super) async fn visible_issues(
    app: &App,
    principal: &Principal,
    filter: &IssueFilter,
    count: usize,
) -> Result<Vec<Issue>, IssueError> {
    let mut found = Vec::new();
    for filter in principal.issue_filters(filter) {
        found.extend(app.store.issues(&filter, count).await?);
    }
    found.sort_by_key(|issue| issue.id);
    if filter.newest_first {
        found.reverse();
    }
    found.truncate(count);
    Ok(found)
}

/// Approximate size of an issue in bytes.
fn bytes_of(issue: &Issue) -> usize {
    issue.fields.len() + issue.discussions.len() + issue.last_error.as_ref().map_or(0, String::len)
}

/// Show an issue.
#[utoipa::path(get, path = "/issues/{id}", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = IssueResponse), (status = 404)))]
async fn show(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<IssueResponse> {
    let (issue, usage) =
        tokio::join!(app.store.issue(IssueId(id)), app.tickets.issue_usage(IssueId(id)));
    let issue = to_dto(&issue?.ok_or_else(|| not_found(id))?);
    Ok(Json(IssueResponse { issue, usage: usage?.into() }))
}

/// An issue, and what the models used for it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueResponse {
    #[serde(flatten)]
    issue: IssueDto,
    usage: UsageDto,
}

/// What the models used for an issue: all runs, also those that failed or were superseded.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UsageDto {
    /// Runs, counted for each model that they called.
    runs: i64,
    /// Those of them that failed or were superseded.
    unanswered: i64,
    /// Calls of models.
    calls: i64,
    tokens_in: i64,
    tokens_out: i64,
    /// In the currency of the prices; `null` if no price is set.
    cost: Option<f64>,
}

impl From<IssueUsage> for UsageDto {
    fn from(usage: IssueUsage) -> Self {
        let IssueUsage { runs, unanswered, calls, tokens_in, tokens_out, cost_micros } = usage;
        let cost = cost_micros.map(|micros| micros as f64 / 1e6);
        Self { runs, unanswered, calls, tokens_in, tokens_out, cost }
    }
}

/// Filter of events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct IssueEventsQuery {
    /// Only those that are, or are not, processed.
    processed: Option<bool>,
    /// The newest first.
    #[serde(default)]
    newest_first: bool,
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 500 at most. Large events shorten a page.
    limit: Option<usize>,
}

/// A page of events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueEventPage {
    events: Vec<IssueEventDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
}

/// List the events of an issue, oldest first, or newest first with `newest_first=true`.
#[utoipa::path(get, path = "/issues/{id}/events", tag = "issues", params(("id" = i64, Path), IssueEventsQuery),
    responses((status = 200, body = IssueEventPage), (status = 404)))]
async fn events(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
    QueryParams(query): QueryParams<IssueEventsQuery>,
) -> JsonResult<IssueEventPage> {
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    app.store.issue(IssueId(id)).await?.ok_or_else(|| not_found(id))?;
    let IssueEventsQuery { processed, newest_first, .. } = query;
    let from = query.cursor.map(EventLogId);
    let read = |last: Option<EventLogId>, count| {
        let filter = EventLogFilter { processed, after: last.or(from), newest_first };
        let store = Arc::clone(&app.store);
        async move { store.event_logs(IssueId(id), &filter, count).await }
    };
    let (events, last) =
        paging::read_page(limit, |event| (event.id, event.payload.len()), read).await?;
    let next = last.map(|id| id.0);
    Ok(Json(IssueEventPage {
        events: events.iter().map(event_to_dto).collect(),
        next_cursor: next,
    }))
}

/// Show the original payload of an event, byte for byte if the database could not store it exactly: in the list, NUL
/// and lone surrogates become U+FFFD, numbers beyond the range of a 64-bit float become strings, and of a repeated
/// key the last value counts. Otherwise as stored.
#[utoipa::path(get, path = "/issues/{id}/events/{event}/original", tag = "issues",
    params(("id" = i64, Path), ("event" = i64, Path)), responses((status = 200, body = Value), (status = 404)))]
async fn original(
    State(app): State<App>,
    PathParams((id, event)): PathParams<(i64, i64)>,
) -> Result<impl IntoResponse, ApiError> {
    let filter =
        EventLogFilter { after: Some(EventLogId(event.saturating_sub(1))), ..Default::default() };
    let found = app.store.event_logs(IssueId(id), &filter, 1).await?.pop();
    let found = found
        .filter(|found| found.id == EventLogId(event))
        .ok_or_else(|| ApiError::not_found(format!("issue `{id}` has no event `{event}`")))?;
    let original = app.store.original_payload(found.id).await?;
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((json, original.unwrap_or(found.payload)))
}

/// Explain why an issue has no answer: inbox, wait, claim, run, model, hand-over, outbox.
#[utoipa::path(get, path = "/issues/{id}/why", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = WhyResponse), (status = 404)))]
async fn why(State(app): State<App>, PathParams(id): PathParams<i64>) -> JsonResult<WhyResponse> {
    Ok(Json(why::of_issue(&app, IssueId(id)).await?))
}

/// Result of a retry or release.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueChangeResponse {
    issue_id: i64,
    /// `queued`: it can be claimed now. `processing`: a worker has claimed it. `idle`: no events are pending.
    /// `not_quarantined`: there was nothing to release.
    result: &'static str,
}

/// Make an issue claimable now: ends a backoff or quarantine.
#[utoipa::path(post, path = "/issues/{id}/retry", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = IssueChangeResponse), (status = 404)))]
async fn retry(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<IssueChangeResponse> {
    let result = match headwater_issue::retry(app.store.as_ref(), &app.nudger, IssueId(id)).await? {
        IssueRetried::Queued => "queued",
        IssueRetried::Processing => "processing",
        IssueRetried::Idle => "idle",
    };
    Ok(Json(IssueChangeResponse { issue_id: id, result }))
}

/// Which issues to retry.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct IssueRetryRequest {
    /// Only those of this integration.
    integration: Option<String>,
    /// Only those that wait: for a backoff, a budget or further events. Default: also quarantined ones.
    #[serde(default)]
    waiting: bool,
    /// Only those whose last error contains this text, in upper or lower case.
    error: Option<String>,
    /// `next_cursor` of the previous response.
    cursor: Option<i64>,
}

/// Number of retried issues.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueRetryAllResponse {
    retried: u64,
    /// Pass as `cursor` to continue; `null` at the end.
    next_cursor: Option<i64>,
}

/// Make all waiting issues claimable now, in batches: repeat with `next_cursor` until it is `null`.
#[utoipa::path(post, path = "/issues/retry", tag = "issues", request_body = IssueRetryRequest,
    responses((status = 200, body = IssueRetryAllResponse)))]
async fn retry_all(
    State(app): State<App>,
    principal: Principal,
    JsonBody(request): JsonBody<IssueRetryRequest>,
) -> JsonResult<IssueRetryAllResponse> {
    let filter = IssueFilter {
        integration: request.integration,
        error: request.error,
        waiting: request.waiting,
        after: request.cursor.map(IssueId),
        ..IssueFilter::default()
    };
    let issues = visible_issues(&app, &principal, &filter, RETRY_SCAN).await?;
    let next = issues.last().filter(|_| issues.len() == RETRY_SCAN).map(|issue| issue.id.0);
    let is_selected = |issue: &&Issue| match issue.quarantined_at {
        Some(_) => !request.waiting,
        None => issue.status == ProcessingStatus::Queued && issue.not_before.is_some(),
    };
    let mut retried = 0;
    for issue in issues.iter().filter(is_selected) {
        match headwater_issue::retry(app.store.as_ref(), &app.nudger, issue.id).await {
            Ok(IssueRetried::Queued) => retried += 1,
            // Processed or deleted in the meantime.
            Ok(IssueRetried::Processing | IssueRetried::Idle)
            | Err(IssueError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(IssueRetryAllResponse { retried, next_cursor: next }))
}

/// End the quarantine of an issue.
#[utoipa::path(post, path = "/issues/{id}/release", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = IssueChangeResponse), (status = 404)))]
async fn release(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<IssueChangeResponse> {
    let result =
        match headwater_issue::release(app.store.as_ref(), &app.nudger, IssueId(id)).await? {
            QuarantineCleared::Queued => "queued",
            QuarantineCleared::Idle => "idle",
            QuarantineCleared::NotQuarantined => "not_quarantined",
        };
    Ok(Json(IssueChangeResponse { issue_id: id, result }))
}

/// Filter of quarantined issues.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct IssueReleaseRequest {
    /// Only those of this integration.
    integration: Option<String>,
    /// Only those whose last error contains this text, in upper or lower case.
    error: Option<String>,
    /// `next_cursor` of the previous response.
    cursor: Option<i64>,
}

/// Number of released issues.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueReleaseResponse {
    released: u64,
    /// Pass as `cursor` to continue; `null` at the end.
    next_cursor: Option<i64>,
}

/// End all quarantines, in batches: repeat with `next_cursor` until it is `null`.
#[utoipa::path(post, path = "/issues/release", tag = "issues", request_body = IssueReleaseRequest,
    responses((status = 200, body = IssueReleaseResponse)))]
async fn release_all(
    State(app): State<App>,
    principal: Principal,
    JsonBody(request): JsonBody<IssueReleaseRequest>,
) -> JsonResult<IssueReleaseResponse> {
    let filter = IssueFilter {
        quarantined: Some(true),
        integration: request.integration,
        error: request.error,
        after: request.cursor.map(IssueId),
        ..IssueFilter::default()
    };
    let issues = visible_issues(&app, &principal, &filter, RELEASE_BATCH).await?;
    let next = issues.last().filter(|_| issues.len() == RELEASE_BATCH).map(|issue| issue.id.0);
    let ids: Vec<_> = issues.iter().map(|issue| issue.id).collect();
    let released = headwater_issue::release_all(app.store.as_ref(), &app.nudger, &ids).await?;
    Ok(Json(IssueReleaseResponse { released, next_cursor: next }))
}

fn not_found(id: i64) -> ApiError {
    ApiError::not_found(format!("issue {id} does not exist"))
}

/// An issue.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueDto {
    id: i64,
    integration: String,
    provider: String,
    external_project_id: String,
    external_issue_id: String,
    /// `idle`, `queued` or `processing`.
    processing_status: &'static str,
    pending_events: u64,
    /// Incremented by each claim.
    claim_epoch: i64,
    claim_owner: Option<String>,
    claim_expires_at: Option<String>,
    /// Earliest time at which it can be claimed.
    not_before: Option<String>,
    attempts: u32,
    crashes: u32,
    superseded: u32,
    last_error: Option<String>,
    quarantined_at: Option<String>,
    fields: Value,
    discussions: Value,
    processing_started_at: Option<String>,
    last_processed_at: Option<String>,
    created_at: String,
    updated_at: String,
}

fn to_dto(issue: &Issue) -> IssueDto {
    IssueDto {
        id: issue.id.0,
        integration: issue.integration.clone(),
        provider: issue.provider.clone(),
        external_project_id: issue.external_project_id.clone(),
        external_issue_id: issue.external_issue_id.clone(),
        processing_status: issue.status.as_str(),
        pending_events: issue.pending_events,
        claim_epoch: issue.claim_epoch.0,
        claim_owner: issue.claim_owner.clone(),
        claim_expires_at: time(issue.claim_expires_at),
        not_before: time(issue.not_before),
        attempts: issue.attempts,
        crashes: issue.crashes,
        superseded: issue.superseded,
        last_error: issue.last_error.clone(),
        quarantined_at: time(issue.quarantined_at),
        fields: json_or_text(&issue.fields),
        discussions: json_or_text(&issue.discussions),
        processing_started_at: time(issue.processing_started_at),
        last_processed_at: time(issue.last_processed_at),
        created_at: issue.created_at.to_rfc3339(),
        updated_at: issue.updated_at.to_rfc3339(),
    }
}

/// A recorded event.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueEventDto {
    id: i64,
    issue_id: i64,
    source: String,
    event_type: String,
    dedup_key: String,
    /// `GET /issues/{id}/events/{event}/original` returns what the database cannot store.
    payload: Value,
    created_at: String,
    processed_at: Option<String>,
    processing_error: Option<String>,
}

pub(crate) fn event_to_dto(event: &EventLog) -> IssueEventDto {
    IssueEventDto {
        id: event.id.0,
        issue_id: event.issue_id.0,
        source: event.source.clone(),
        event_type: event.event_type.clone(),
        dedup_key: event.dedup_key.clone(),
        payload: json_or_text(&event.payload),
        created_at: event.created_at.to_rfc3339(),
        processed_at: time(event.processed_at),
        processing_error: event.processing_error.clone(),
    }
}

fn time(at: Option<Timestamp>) -> Option<String> {
    at.map(Timestamp::to_rfc3339)
}

/// Parses stored JSON; anything else is shown as a string.
fn json_or_text(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

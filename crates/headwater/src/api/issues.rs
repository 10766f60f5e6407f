//! Issues over HTTP, for operators: list, show, why, events, retry, release.
//!
//! Upstream: `router`, behind access. Downstream: the operator's side of the store.
//! Promises: pages follow ids, so nothing is shown twice or passed by while things change, and
//! are bounded in bytes; a change nudges the workers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use headwater_issue::{
    EventLog, EventLogFilter, EventLogId, Issue, IssueFilter, IssueId, ProcessingStatus, Reason,
    Released, Retried,
};
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::ApiError;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};
use crate::http::paging;
use crate::server::app_state::App;

/// Issues on one page, if nobody says otherwise, and at most.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

/// Issues that one call releases.
const RELEASED_AT_ONCE: usize = 50;

/// Below `/api/v1`.
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(events))
        .routes(routes!(original))
        .routes(routes!(why))
        .routes(routes!(retry))
        .routes(routes!(release))
        .routes(routes!(release_all))
}

/// Which issues.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// `idle`, `queued` or `processing`.
    status: Option<String>,
    /// Only those that are, or are not, quarantined.
    quarantined: Option<bool>,
    /// Only those of this integration.
    integration: Option<String>,
    /// `next_cursor` of the page before.
    cursor: Option<i64>,
    /// At most this many; 50 by default, 500 at most. A page of large ones has fewer.
    limit: Option<usize>,
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssuePage {
    issues: Vec<IssueView>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<i64>,
}

/// Issues, in the order of their ids.
#[utoipa::path(get, path = "/issues", tag = "issues", params(ListQuery), responses((status = 200, body = IssuePage)))]
async fn list(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Answer<IssuePage> {
    let status = query.status.as_deref().map(|name| {
        ProcessingStatus::parse(name)
            .ok_or_else(|| ApiError::invalid("`status` must be `idle`, `queued` or `processing`"))
    });
    let filter = IssueFilter {
        status: status.transpose()?,
        quarantined: query.quarantined,
        integration: query.integration,
        after: query.cursor.map(IssueId),
    };
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let read = |last: Option<IssueId>, count| {
        let filter = IssueFilter { after: last.or(filter.after), ..filter.clone() };
        let store = Arc::clone(&app.store);
        async move { store.issues(&filter, count).await }
    };
    let (issues, last) = paging::fill(limit, |issue| (issue.id, bytes_of(issue)), read).await?;
    let next = last.map(|id| id.0);
    Ok(Json(IssuePage { issues: issues.iter().map(describe).collect(), next_cursor: next }))
}

/// About how many bytes an issue has.
fn bytes_of(issue: &Issue) -> usize {
    issue.fields.len() + issue.discussions.len() + issue.last_error.as_ref().map_or(0, String::len)
}

/// One issue.
#[utoipa::path(get, path = "/issues/{id}", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = IssueView), (status = 404)))]
async fn show(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<IssueView> {
    let issue = app.store.issue(IssueId(id)).await?;
    Ok(Json(describe(&issue.ok_or_else(|| missing(id))?)))
}

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventsQuery {
    /// Only those that are, or are not, processed.
    processed: Option<bool>,
    /// `next_cursor` of the page before.
    cursor: Option<i64>,
    /// At most this many; 50 by default, 500 at most. A page of large ones has fewer.
    limit: Option<usize>,
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventPage {
    events: Vec<EventView>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<i64>,
}

/// The events of an issue, oldest first.
#[utoipa::path(get, path = "/issues/{id}/events", tag = "issues", params(("id" = i64, Path), EventsQuery),
    responses((status = 200, body = EventPage), (status = 404)))]
async fn events(
    State(app): State<App>,
    PathOf(id): PathOf<i64>,
    QueryOf(query): QueryOf<EventsQuery>,
) -> Answer<EventPage> {
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    app.store.issue(IssueId(id)).await?.ok_or_else(|| missing(id))?;
    let (processed, from) = (query.processed, query.cursor.map(EventLogId));
    let read = |last: Option<EventLogId>, count| {
        let filter = EventLogFilter { processed, after: last.or(from) };
        let store = Arc::clone(&app.store);
        async move { store.event_logs(IssueId(id), &filter, count).await }
    };
    let (events, last) = paging::fill(limit, |event| (event.id, event.payload.len()), read).await?;
    let next = last.map(|id| id.0);
    Ok(Json(EventPage { events: events.iter().map(describe_event).collect(), next_cursor: next }))
}

/// The payload of an event. Exactly as it was received where the list cannot show it: there NUL and lone surrogates are
/// U+FFFD, numbers beyond the range of a 64-bit float are strings, and of a repeated key the last value counts. Otherwise as
/// it is stored, with the same values.
#[utoipa::path(get, path = "/issues/{id}/events/{event}/original", tag = "issues",
    params(("id" = i64, Path), ("event" = i64, Path)), responses((status = 200, body = Value), (status = 404)))]
async fn original(
    State(app): State<App>,
    PathOf((id, event)): PathOf<(i64, i64)>,
) -> Result<impl IntoResponse, ApiError> {
    let filter =
        EventLogFilter { processed: None, after: Some(EventLogId(event.saturating_sub(1))) };
    let found = app.store.event_logs(IssueId(id), &filter, 1).await?.pop();
    let found = found
        .filter(|found| found.id == EventLogId(event))
        .ok_or_else(|| ApiError::not_found(format!("issue {id} has no event {event}")))?;
    let original = app.store.original_payload(found.id).await?;
    let json = [(header::CONTENT_TYPE, "application/json")];
    Ok((json, original.unwrap_or(found.payload)))
}

/// Why an issue is not being worked on, or that it is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WhyView {
    issue_id: i64,
    /// `idle`, `claimed`, `claim_ran_out`, `quarantined`, `no_worker`, `waiting`, `queued` or `other`.
    reason: &'static str,
    /// The same for people, with what to do.
    sentence: String,
    pending_events: u64,
    /// How long its oldest event has waited.
    waiting_ms: Option<u64>,
}

/// Says why an issue stands where it stands.
#[utoipa::path(get, path = "/issues/{id}/why", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = WhyView), (status = 404)))]
async fn why(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<WhyView> {
    let why = headwater_issue::why(app.store.as_ref(), IssueId(id)).await?;
    let reason = match &why.reason {
        Reason::Idle => "idle",
        Reason::Claimed { .. } => "claimed",
        Reason::ClaimRanOut { .. } => "claim_ran_out",
        Reason::Quarantined { .. } => "quarantined",
        Reason::NoWorker => "no_worker",
        Reason::Waiting { .. } => "waiting",
        Reason::Queued { .. } => "queued",
        _ => "other",
    };
    let waiting_ms = why.waiting_for.map(|waited| waited.as_millis());
    Ok(Json(WhyView {
        issue_id: id,
        reason,
        sentence: why.to_string(),
        pending_events: why.pending_events,
        waiting_ms: waiting_ms.and_then(|ms| u64::try_from(ms).ok()),
    }))
}

/// What became of a wish.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueChange {
    issue_id: i64,
    /// `queued`: it will be worked on now. `processing`: a worker has it. `idle`: nothing is pending.
    /// `not_quarantined`: there was nothing to release.
    result: &'static str,
}

/// Makes an issue claimable now: ends a wait or a quarantine.
#[utoipa::path(post, path = "/issues/{id}/retry", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = IssueChange), (status = 404)))]
async fn retry(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<IssueChange> {
    let result = match headwater_issue::retry(app.store.as_ref(), &app.nudger, IssueId(id)).await? {
        Retried::Queued => "queued",
        Retried::Processing => "processing",
        Retried::Idle => "idle",
    };
    Ok(Json(IssueChange { issue_id: id, result }))
}

/// Ends a quarantine.
#[utoipa::path(post, path = "/issues/{id}/release", tag = "issues", params(("id" = i64, Path)),
    responses((status = 200, body = IssueChange), (status = 404)))]
async fn release(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<IssueChange> {
    let result =
        match headwater_issue::release(app.store.as_ref(), &app.nudger, IssueId(id)).await? {
            Released::Queued => "queued",
            Released::Idle => "idle",
            Released::NotQuarantined => "not_quarantined",
        };
    Ok(Json(IssueChange { issue_id: id, result }))
}

/// Which of the quarantined.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReleaseWish {
    /// Only those of this integration.
    integration: Option<String>,
    /// `next_cursor` of the answer before.
    cursor: Option<i64>,
}

/// How many may go on.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssuesReleased {
    released: u64,
    /// Where to go on: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<i64>,
}

/// Ends all quarantines, some at a time: ask again with `next_cursor` until there is none.
#[utoipa::path(post, path = "/issues/release", tag = "issues", request_body = ReleaseWish,
    responses((status = 200, body = IssuesReleased)))]
async fn release_all(
    State(app): State<App>,
    JsonBody(wish): JsonBody<ReleaseWish>,
) -> Answer<IssuesReleased> {
    let filter = IssueFilter {
        quarantined: Some(true),
        integration: wish.integration,
        after: wish.cursor.map(IssueId),
        ..IssueFilter::default()
    };
    let issues = app.store.issues(&filter, RELEASED_AT_ONCE).await?;
    let next = issues.last().filter(|_| issues.len() == RELEASED_AT_ONCE).map(|issue| issue.id.0);
    let ids: Vec<_> = issues.iter().map(|issue| issue.id).collect();
    let released = headwater_issue::release_all(app.store.as_ref(), &app.nudger, &ids).await?;
    Ok(Json(IssuesReleased { released, next_cursor: next }))
}

fn missing(id: i64) -> ApiError {
    ApiError::not_found(format!("there is no issue {id}"))
}

/// An issue.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueView {
    id: i64,
    integration: String,
    provider: String,
    external_project_id: String,
    external_issue_id: String,
    /// `idle`, `queued` or `processing`.
    processing_status: &'static str,
    pending_events: u64,
    /// Grows with each claim.
    claim_epoch: i64,
    claim_owner: Option<String>,
    claim_expires_at: Option<String>,
    /// Nobody claims it before.
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

fn describe(issue: &Issue) -> IssueView {
    IssueView {
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
        fields: parsed(&issue.fields),
        discussions: parsed(&issue.discussions),
        processing_started_at: time(issue.processing_started_at),
        last_processed_at: time(issue.last_processed_at),
        created_at: issue.created_at.to_rfc3339(),
        updated_at: issue.updated_at.to_rfc3339(),
    }
}

/// One stored event.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventView {
    id: i64,
    issue_id: i64,
    source: String,
    event_type: String,
    dedup_key: String,
    /// `GET /issues/{id}/events/{event}/original` has what the database cannot hold.
    payload: Value,
    created_at: String,
    processed_at: Option<String>,
    processing_error: Option<String>,
}

fn describe_event(event: &EventLog) -> EventView {
    EventView {
        id: event.id.0,
        issue_id: event.issue_id.0,
        source: event.source.clone(),
        event_type: event.event_type.clone(),
        dedup_key: event.dedup_key.clone(),
        payload: parsed(&event.payload),
        created_at: event.created_at.to_rfc3339(),
        processed_at: time(event.processed_at),
        processing_error: event.processing_error.clone(),
    }
}

fn time(at: Option<Timestamp>) -> Option<String> {
    at.map(Timestamp::to_rfc3339)
}

/// JSON that the store keeps as text; text that is none of it is shown as text.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

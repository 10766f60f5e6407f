//! Issues over HTTP, for operators: list, show, why, events, retry, release.
//!
//! Upstream: `router`, behind access. Downstream: the operator's side of the store.
//! Promises: pages follow ids, so nothing is shown twice or passed by while things change; a change nudges the workers.

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use headwater_issue::{
    EventLog, EventLogFilter, EventLogId, Issue, IssueFilter, IssueId, Nudge, ProcessingStatus,
    Reason, Released, Retried,
};
use headwater_stream::clock::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::ApiError;
use crate::http::body::Answer;
use crate::http::extract::{PathOf, QueryOf};

/// Issues on one page, if nobody says otherwise, and at most.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

/// Below `/api/v1`.
pub(crate) fn routes() -> Router<App> {
    Router::new()
        .route("/issues", get(list))
        .route("/issues/{id}", get(show))
        .route("/issues/{id}/events", get(events))
        .route("/issues/{id}/why", get(why))
        .route("/issues/{id}/retry", post(retry))
        .route("/issues/{id}/release", post(release))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    status: Option<String>,
    quarantined: Option<bool>,
    integration: Option<String>,
    cursor: Option<i64>,
    limit: Option<usize>,
}

async fn list(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Answer<Value> {
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
    let limit = page(query.limit)?;
    let issues = app.store.issues(&filter, limit).await?;
    let next = issues.last().filter(|_| issues.len() == limit).map(|issue| issue.id.0);
    let issues: Vec<_> = issues.iter().map(describe).collect();
    Ok(Json(json!({"issues": issues, "next_cursor": next})))
}

fn page(limit: Option<usize>) -> Result<usize, ApiError> {
    let limit = limit.unwrap_or(PAGE_DEFAULT);
    if (1..=PAGE_MAX).contains(&limit) {
        return Ok(limit);
    }
    Err(ApiError::invalid(format!("`limit` must be from 1 to {PAGE_MAX}")))
}

async fn show(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<Value> {
    let issue = app.store.issue(IssueId(id)).await?;
    Ok(Json(describe(&issue.ok_or_else(|| missing(id))?)))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    processed: Option<bool>,
    cursor: Option<i64>,
    limit: Option<usize>,
}

async fn events(
    State(app): State<App>,
    PathOf(id): PathOf<i64>,
    QueryOf(query): QueryOf<EventsQuery>,
) -> Answer<Value> {
    let limit = page(query.limit)?;
    let after = query.cursor.map(EventLogId);
    let filter = EventLogFilter { processed: query.processed, after };
    app.store.issue(IssueId(id)).await?.ok_or_else(|| missing(id))?;
    let events = app.store.event_logs(IssueId(id), &filter, limit).await?;
    let next = events.last().filter(|_| events.len() == limit).map(|event| event.id.0);
    let events: Vec<_> = events.iter().map(describe_event).collect();
    Ok(Json(json!({"events": events, "next_cursor": next})))
}

async fn why(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<Value> {
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
    Ok(Json(json!({
        "issue_id": id,
        "reason": reason,
        "sentence": why.to_string(),
        "pending_events": why.pending_events,
        "waiting_ms": waiting_ms.and_then(|ms| u64::try_from(ms).ok()),
    })))
}

async fn retry(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<Value> {
    let result = match app.store.retry(IssueId(id)).await? {
        Retried::Queued => {
            nudge(&app, id);
            "queued"
        }
        Retried::Processing => "processing",
        Retried::Idle => "idle",
    };
    Ok(Json(json!({"issue_id": id, "result": result})))
}

async fn release(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<Value> {
    let result = match app.store.release(IssueId(id)).await? {
        Released::Queued => {
            nudge(&app, id);
            "queued"
        }
        Released::Idle => "idle",
        Released::NotQuarantined => "not_quarantined",
    };
    Ok(Json(json!({"issue_id": id, "result": result})))
}

fn nudge(app: &App, id: i64) {
    app.nudger.send_soon(Nudge { issue_id: IssueId(id), event_log_id: EventLogId(0) });
}

fn missing(id: i64) -> ApiError {
    ApiError::not_found(format!("there is no issue {id}"))
}

fn describe(issue: &Issue) -> Value {
    json!({
        "id": issue.id.0,
        "integration": issue.integration,
        "provider": issue.provider,
        "external_project_id": issue.external_project_id,
        "external_issue_id": issue.external_issue_id,
        "processing_status": issue.status.as_str(),
        "pending_events": issue.pending_events,
        "claim_epoch": issue.claim_epoch.0,
        "claim_owner": issue.claim_owner,
        "claim_expires_at": time(issue.claim_expires_at),
        "not_before": time(issue.not_before),
        "attempts": issue.attempts,
        "crashes": issue.crashes,
        "superseded": issue.superseded,
        "last_error": issue.last_error,
        "quarantined_at": time(issue.quarantined_at),
        "fields": parsed(&issue.fields),
        "discussions": parsed(&issue.discussions),
        "processing_started_at": time(issue.processing_started_at),
        "last_processed_at": time(issue.last_processed_at),
        "created_at": time(Some(issue.created_at)),
        "updated_at": time(Some(issue.updated_at)),
    })
}

fn describe_event(event: &EventLog) -> Value {
    json!({
        "id": event.id.0,
        "issue_id": event.issue_id.0,
        "source": event.source,
        "event_type": event.event_type,
        "dedup_key": event.dedup_key,
        "payload": parsed(&event.payload),
        "created_at": time(Some(event.created_at)),
        "processed_at": time(event.processed_at),
        "processing_error": event.processing_error,
    })
}

fn time(at: Option<Timestamp>) -> Option<String> {
    at.map(Timestamp::to_rfc3339)
}

/// JSON that the store keeps as text; text that is none of it is shown as text.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

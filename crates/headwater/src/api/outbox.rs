//! The outbox: replies and events that were given up after their last try; and another try.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use headwater_issue::{DeadOutbox, IssueError, OutboxId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::time;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};
use crate::http::paging;
use crate::server::app_state::App;

/// Rows on a page, by default and at most.
const PAGE_DEFAULT: usize = 50;
const PAGE_MAX: usize = 500;

/// Rows that one call sends again: a row may hold a megabyte.
const RETRIED_AT_ONCE: usize = 50;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(retry)).routes(routes!(retry_all))
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeadRowPage {
    rows: Vec<DeadRow>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<i64>,
}

/// A reply or an event that nobody got.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeadRow {
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
    /// What went wrong the last time.
    error: String,
}

/// Which rows.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// `next_cursor` of the page before.
    cursor: Option<i64>,
    /// At most this many; 50 by default, 500 at most. A page of large ones has fewer.
    limit: Option<usize>,
}

/// Replies and events that were given up, oldest first.
#[utoipa::path(get, path = "/outbox/dead", tag = "outbox", params(ListQuery), responses((status = 200, body = DeadRowPage)))]
async fn list(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Answer<DeadRowPage> {
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let from = query.cursor.map(OutboxId);
    let read = |last: Option<OutboxId>, count| {
        let store = Arc::clone(&app.store);
        async move { store.dead_outbox(last.or(from), count).await }
    };
    let measure = |dead: &DeadOutbox| (dead.row.id, dead.row.payload.len() + dead.error.len());
    let (rows, last) = paging::fill(limit, measure, read).await?;
    let next = last.map(|id| id.0);
    Ok(Json(DeadRowPage { rows: rows.into_iter().map(view).collect(), next_cursor: next }))
}

fn view(dead: DeadOutbox) -> DeadRow {
    let DeadOutbox { row, error } = dead;
    DeadRow {
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

/// What became of a wish to send something again.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxRetried {
    id: i64,
    /// `queued`: it is sent again, with no attempts counted.
    result: &'static str,
}

/// Sends a reply or an event again that was given up.
#[utoipa::path(post, path = "/outbox/{id}/retry", tag = "outbox", params(("id" = i64, Path)),
    responses((status = 200, body = OutboxRetried), (status = 404)))]
async fn retry(State(app): State<App>, PathOf(id): PathOf<i64>) -> Answer<OutboxRetried> {
    app.store.retry_outbox(OutboxId(id)).await?;
    Ok(Json(OutboxRetried { id, result: "queued" }))
}

/// Which of those that were given up.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RetryWish {
    /// Only those of this integration.
    integration: Option<String>,
    /// `next_cursor` of the answer before.
    cursor: Option<i64>,
}

/// How many are sent again.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxRetriedAll {
    queued: u64,
    /// Where to go on: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<i64>,
}

/// Sends everything again that was given up, some at a time: ask again with `next_cursor` until there is none.
#[utoipa::path(post, path = "/outbox/retry", tag = "outbox", request_body = RetryWish,
    responses((status = 200, body = OutboxRetriedAll)))]
async fn retry_all(
    State(app): State<App>,
    JsonBody(wish): JsonBody<RetryWish>,
) -> Answer<OutboxRetriedAll> {
    let rows = app.store.dead_outbox(wish.cursor.map(OutboxId), RETRIED_AT_ONCE).await?;
    let next = rows.last().filter(|_| rows.len() == RETRIED_AT_ONCE).map(|dead| dead.row.id.0);
    let is_wanted = |dead: &&DeadOutbox| {
        wish.integration.as_ref().is_none_or(|integration| dead.row.integration == *integration)
    };
    let mut queued = 0;
    for dead in rows.iter().filter(is_wanted) {
        match app.store.retry_outbox(dead.row.id).await {
            Ok(_) => queued += 1,
            // Somebody else has done so.
            Err(IssueError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(OutboxRetriedAll { queued, next_cursor: next }))
}

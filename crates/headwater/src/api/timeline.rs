//! The timeline of an issue: its runs, newest first, each with its events, models and outbox rows.
//!
//! Upstream: `http/router.rs`, `cli/verbs/issue.rs` and the console. Downstream: the admin methods of the store, and `model_runs`.
//! Guarantees: read-only; a page follows epochs, so that new runs neither repeat nor skip rows. What a run wrote is found by the time
//! of its end, which its transaction gave to all of it. Limits: events are looked for among the newest ones of the issue
//! (`RUN_EVENTS_SCANNED_MAX`), and outbox rows are kept for `retention.outbox`.

use std::collections::HashMap;

use axum::Json;
use axum::extract::State;
use headwater_issue::{
    ClaimEpoch, EventLog, Issue, IssueError, IssueId, IssueRun, OutboxFacts, ProcessingStatus,
};
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{milliseconds, time};
use crate::http::body::JsonResult;
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::server::app_state::App;
use crate::tickets::StoredModelRun;

/// Default and maximum runs of a page.
const RUNS_DEFAULT: usize = 20;
const RUNS_MAX: usize = 100;

/// Maximum events, and maximum outbox rows, of all runs of a page.
const ROWS_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(timeline))
}

/// Page of runs.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TimelineQuery {
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number of runs: 20 by default, 100 at most.
    limit: Option<usize>,
}

/// The runs of an issue.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueTimeline {
    issue_id: i64,
    /// The run in progress; `null` if there is none.
    running: Option<RunInProgressDto>,
    /// Runs that have ended, newest first.
    runs: Vec<TimelineRunDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
}

/// A run in progress.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RunInProgressDto {
    epoch: i64,
    worker: String,
    claimed_at: Option<String>,
    /// When the claim expires unless the worker renews it.
    claim_expires_at: Option<String>,
}

/// A run that has ended.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TimelineRunDto {
    /// Number of the claim: the epoch.
    epoch: i64,
    worker: String,
    claimed_at: String,
    ended_at: String,
    /// How long it took.
    duration_ms: u64,
    /// How long its oldest event had waited when the issue was claimed; `null` if no event is known.
    wait_ms: Option<u64>,
    /// `done`, `failed`, `deferred`, `quarantined`, `superseded`, `released`, `expired` or `fenced`.
    result: &'static str,
    /// What the result means, with the error.
    reason: String,
    error: Option<String>,
    /// Number of events that it processed.
    processed_events: u64,
    /// Those of them that are still stored; a page lists at most 1000.
    events: Vec<TimelineEventDto>,
    /// What each model used, in the order of their first calls.
    models: Vec<TimelineModelDto>,
    /// Replies and events that it wrote, as long as they are stored; a page lists at most 1000.
    outbox: Vec<TimelineOutboxDto>,
}

/// An event that a run processed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TimelineEventDto {
    id: i64,
    source: String,
    event_type: String,
    created_at: String,
}

/// What a model used in a run.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TimelineModelDto {
    model: String,
    /// `done`, `handed_over`, `failed` or `superseded`.
    result: String,
    calls: i64,
    tokens_in: i64,
    tokens_out: i64,
    /// In the currency of the prices; `null` without a price.
    cost: Option<f64>,
    /// Version of the prompt; 0 is the built-in one.
    prompt_version: i64,
    /// The session with prompt, tool calls and answers.
    session: Option<String>,
}

/// A reply or event that a run wrote.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TimelineOutboxDto {
    id: i64,
    /// `reply` or `event`.
    kind: &'static str,
    target: String,
    /// `waiting`, `pending`, `taken`, `delivered` or `dead`.
    status: &'static str,
    attempts: u32,
    delivered_at: Option<String>,
    /// Error of the last delivery.
    error: Option<String>,
}

/// Show the runs of an issue, newest first: worker, result, events, models and outbox rows of each.
#[utoipa::path(get, path = "/issues/{id}/timeline", tag = "issues", params(("id" = i64, Path), TimelineQuery),
    responses((status = 200, body = IssueTimeline), (status = 404)))]
async fn timeline(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
    QueryParams(query): QueryParams<TimelineQuery>,
) -> JsonResult<IssueTimeline> {
    let limit = paging::limit(query.limit, RUNS_DEFAULT, RUNS_MAX)?;
    let issue_id = IssueId(id);
    let issue = app.store.issue(issue_id).await?;
    let issue = issue.ok_or_else(|| IssueError::NotFound { what: format!("issue {id}") })?;
    let runs = app.store.runs(issue_id, query.cursor.map(ClaimEpoch), limit).await?;
    let next_cursor = runs.last().filter(|_| runs.len() == limit).map(|run| run.epoch.0);
    let mut page = PageRows::default();
    if let (Some(newest), Some(oldest)) = (runs.first(), runs.last()) {
        // Times may step back, epochs do not.
        let from = runs.iter().map(|run| run.ended_at).min().unwrap_or_default();
        let to = runs.iter().map(|run| run.ended_at).max().unwrap_or_default();
        let (events, rows, models) = tokio::join!(
            app.store.processed_event_logs(issue_id, from, to, ROWS_MAX),
            app.store.committed_outbox(issue_id, from, to, ROWS_MAX),
            app.tickets.model_runs(issue_id, (oldest.epoch, newest.epoch))
        );
        for event in events? {
            page.events.entry(event.processed_at).or_default().push(event);
        }
        for row in rows? {
            page.outbox.entry(row.created_at).or_default().push(row);
        }
        for run in models? {
            page.models.entry(run.epoch).or_default().push(run);
        }
    }
    let runs = runs.into_iter().map(|run| page.run(run)).collect();
    Ok(Json(IssueTimeline { issue_id: id, running: running(&issue), runs, next_cursor }))
}

fn running(issue: &Issue) -> Option<RunInProgressDto> {
    (issue.status == ProcessingStatus::Processing).then(|| RunInProgressDto {
        epoch: issue.claim_epoch.0,
        worker: issue.claim_owner.clone().unwrap_or_default(),
        claimed_at: issue.processing_started_at.map(time),
        claim_expires_at: issue.claim_expires_at.map(time),
    })
}

/// What the runs of a page processed, used and wrote.
#[derive(Default)]
struct PageRows {
    events: HashMap<Option<Timestamp>, Vec<EventLog>>,
    outbox: HashMap<Timestamp, Vec<OutboxFacts>>,
    models: HashMap<ClaimEpoch, Vec<StoredModelRun>>,
}

impl PageRows {
    fn run(&mut self, run: IssueRun) -> TimelineRunDto {
        // Only a run with a result has processed events and written rows.
        let has_result = run.result == headwater_issue::RunResult::Done;
        let events = self.events.remove(&Some(run.ended_at)).filter(|_| has_result);
        let outbox = self.outbox.remove(&run.ended_at).filter(|_| has_result);
        let (events, outbox) = (events.unwrap_or_default(), outbox.unwrap_or_default());
        let models = self.models.remove(&run.epoch).unwrap_or_default();
        let oldest = events.iter().map(|event| event.created_at).min();
        TimelineRunDto {
            epoch: run.epoch.0,
            claimed_at: time(run.claimed_at),
            ended_at: time(run.ended_at),
            duration_ms: milliseconds(run.ended_at.since(run.claimed_at)),
            wait_ms: oldest.map(|oldest| milliseconds(run.claimed_at.since(oldest))),
            result: run.result.as_str(),
            reason: run.explain(),
            worker: run.worker,
            error: run.error,
            processed_events: run.events,
            events: events.into_iter().map(event_dto).collect(),
            models: models.into_iter().map(model_dto).collect(),
            outbox: outbox.into_iter().map(outbox_dto).collect(),
        }
    }
}

fn event_dto(event: EventLog) -> TimelineEventDto {
    TimelineEventDto {
        id: event.id.0,
        source: event.source,
        event_type: event.event_type,
        created_at: time(event.created_at),
    }
}

fn model_dto(run: StoredModelRun) -> TimelineModelDto {
    TimelineModelDto {
        model: run.model,
        result: run.result,
        calls: run.calls,
        tokens_in: run.tokens_in,
        tokens_out: run.tokens_out,
        cost: run.cost_micros.map(|micros| micros as f64 / 1e6),
        prompt_version: run.prompt_version,
        session: run.session,
    }
}

fn outbox_dto(row: OutboxFacts) -> TimelineOutboxDto {
    TimelineOutboxDto {
        id: row.id.0,
        kind: row.kind.as_str(),
        target: row.target,
        status: row.status.as_str(),
        attempts: row.attempts,
        delivered_at: row.delivered_at.map(time),
        error: row.error,
    }
}

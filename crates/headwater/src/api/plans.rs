//! Replay plans: make, list, show, pause, resume and cancel them.
//!
//! Upstream: `http/router.rs`. Downstream: `plans`. Guarantees: a dry run changes nothing and counts the same letters; a
//! plan takes no letter that is newer than itself; repeating a pause, resumption or cancellation changes nothing.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use headwater_queue::{DeadLetterFilter, Queue};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dead_letters::filter;
use crate::api::dto::time;
use crate::api::failures;
use crate::api::names::{shown_topic, wire_topic};
use crate::api::run_to_completion;
use crate::http::ApiError;
use crate::http::audit::DryRun;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::limits::{PAGE_DEFAULT, PAGE_MAX};
use crate::server::app_state::App;
use crate::server::plans::explain::{AwaitedGroup, explain};
use crate::server::plans::rows::{self, PlanCommand, PlanError, PlanState, ReplayPlan};
use crate::server::plans::selection::{self, PlanPreview, PlanSelection, PlanTopic};
use crate::server::plans::{REPLAYS_MAX_DEFAULT, STAGES, TOPICS_MAX};
use crate::text;

/// Time to find out what a plan waits for.
const EXPLAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Bytes of a reason in an example.
const REASON_BYTES_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(cancel))
}

/// Which dead letters to replay: those of a cause, or those of topics.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreatePlanRequest {
    /// Id of a cause of `/failures`.
    failure: Option<String>,
    /// Names of topics, at most 50.
    topics: Option<Vec<String>>,
    /// Filter of topics: reason contains this text.
    reason: Option<String>,
    /// Filter of topics: has this key.
    key: Option<String>,
    /// Filter of topics: belongs to this partition.
    partition: Option<u16>,
    /// Filter of topics: failed at this time or later.
    from: Option<String>,
    /// Filter of topics: failed at this time or earlier.
    to: Option<String>,
    /// Skip dead letters that were already replayed this often. Default: 3.
    max_replays: Option<u32>,
    /// Only report what would happen.
    #[serde(default)]
    dry_run: bool,
}

/// What a plan would do.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanPreviewDto {
    /// Always true.
    dry_run: bool,
    /// Letters that would be replayed.
    letters: u64,
    /// Letters that were replayed before, and copies; they are left out.
    already_replayed: u64,
    /// Letters that cannot or must not be replayed; they are left out.
    refused: u64,
    /// Why the first one is refused.
    refusal: Option<String>,
    /// False if there are more letters than a plan takes; the oldest are taken.
    complete: bool,
    cause: Option<String>,
    topics: Vec<String>,
    /// The groups that handle the letters.
    groups: Vec<String>,
    /// At most ten of the letters.
    examples: Vec<PlanExample>,
    steps: Vec<PlanStage>,
}

/// A dead letter of a plan.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanExample {
    topic: String,
    id: String,
    key: Option<String>,
    reason: String,
}

/// A step of every plan. The last one repeats.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanStage {
    letters: u64,
    per_second: u32,
}

/// A replay plan.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanDto {
    id: i64,
    /// `running`, `paused`, `stopped`, `cancelled` or `done`.
    state: &'static str,
    /// Why it stopped.
    reason: Option<String>,
    /// What it waits for, such as streams that do not answer.
    problem: Option<String>,
    failure: Option<String>,
    cause: Option<String>,
    topics: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    filter: Option<PlanFilterDto>,
    /// Letters when the plan was made.
    total: u64,
    /// Letters sent to their partitions.
    sent: u64,
    /// Letters handled by their group.
    settled: u64,
    /// Letters that became dead letters again.
    failed: u64,
    /// Those of them with the same cause as before.
    failed_same_cause: u64,
    /// Letters that were sent and have no outcome yet.
    awaited: u64,
    /// Letters whose outcome cannot be known any more, because their topic was deleted.
    unknown: u64,
    /// Letters that were not sent: refused, or replayed or purged by another operation.
    skipped: u64,
    /// Letters that are not sent yet.
    left: u64,
    step: PlanStepDto,
    created_by: String,
    created_at: String,
    /// When the state changed.
    changed_at: String,
    /// The process that runs it.
    process: Option<String>,
}

/// Filter of a plan.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanFilterDto {
    reason: Option<String>,
    key: Option<String>,
    partition: Option<u16>,
    from: Option<String>,
    to: Option<String>,
}

/// The step that a plan is in.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanStepDto {
    /// Counts from 1.
    number: u32,
    /// `canary` or `ramp`.
    kind: &'static str,
    per_second: u32,
    letters: u64,
    sent: u64,
    failed: u64,
}

/// A page of plans.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanPage {
    plans: Vec<PlanDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<i64>,
}

/// A plan and how it is doing.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanResponse {
    #[serde(flatten)]
    plan: PlanDto,
    why: PlanWhy,
}

/// How a plan is doing.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanWhy {
    /// `sending`, `awaiting`, `no_member`, `no_process`, `unavailable`, `paused`, `stopped`, `cancelled` or `done`.
    reason: &'static str,
    sentence: String,
    /// The command that helps, or that shows more.
    command: String,
}

/// Result of a change.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PlanChangeResponse {
    #[serde(flatten)]
    plan: PlanDto,
    /// False if it was in this state before.
    changed: bool,
}

fn to_dto(plan: &ReplayPlan) -> PlanDto {
    let (progress, selection) = (&plan.progress, &plan.selection);
    let stage = progress.stage.min(STAGES.len() - 1);
    let limits = selection.filter();
    let has_filter = limits != DeadLetterFilter::default();
    PlanDto {
        id: plan.id,
        state: plan.state.as_str(),
        reason: plan.reason.clone(),
        problem: plan.problem.clone().filter(|_| plan.state == PlanState::Running),
        failure: selection.failure.clone(),
        cause: selection.cause.clone(),
        topics: selection.topics.iter().map(|one| shown_topic(&one.topic).into_owned()).collect(),
        filter: has_filter.then(|| PlanFilterDto {
            reason: limits.reason,
            key: limits.key,
            partition: limits.partition,
            from: limits.from.map(time),
            to: limits.to.map(time),
        }),
        total: progress.total,
        sent: progress.sent,
        settled: progress.settled,
        failed: progress.failed,
        failed_same_cause: progress.failed_same_cause,
        awaited: progress.awaited(),
        unknown: progress.unknown,
        skipped: progress.skipped,
        left: progress.left(),
        step: PlanStepDto {
            number: progress.step,
            kind: if stage == 0 { "canary" } else { "ramp" },
            per_second: STAGES[stage].1,
            letters: progress.step_size,
            sent: progress.step_taken,
            failed: progress.step_failed,
        },
        created_by: plan.created_by.clone(),
        created_at: time(plan.created_at),
        changed_at: time(plan.changed_at),
        process: plan.owner.as_ref().and_then(|owner| owner.split('~').next()).map(str::to_owned),
    }
}

/// Make a replay plan, which then runs; or, with `dry_run`, report what it would do.
#[utoipa::path(post, path = "/plans", tag = "plans", request_body = CreatePlanRequest,
    responses((status = 200, description = "Dry run.", body = PlanPreviewDto), (status = 201, body = PlanDto), (status = 404),
        (status = 409, description = "`nothing_to_replay`: no dead letter matches. `too_many_plans`: five plans are running or paused.")))]
async fn create(
    State(app): State<App>,
    Extension(operations): Extension<Operations>,
    principal: Principal,
    JsonBody(request): JsonBody<CreatePlanRequest>,
) -> Result<Response, ApiError> {
    let mut selected = select(&app, &principal, &operations, &request).await?;
    let preview = selection::count(operations.queue(), &mut selected).await?;
    if request.dry_run {
        let preview = preview_to_dto(preview, &selected);
        return Ok((DryRun::mark(request.dry_run), Json(preview)).into_response());
    }
    if preview.ready == 0 {
        let message = "no dead letter matches that can be replayed, so there is nothing to plan";
        return Err(ApiError::new(StatusCode::CONFLICT, "nothing_to_replay", message));
    }
    let plan = run_to_completion(async move {
        let store = app.store.as_ref();
        let id = rows::create(store, &selected, preview.total(), &principal.name).await?;
        Ok(rows::plan(store, id).await?.ok_or(PlanError::NotFound(id))?)
    });
    Ok((StatusCode::CREATED, Json(to_dto(&plan.await?))).into_response())
}

async fn select(
    app: &App,
    principal: &Principal,
    operations: &Operations,
    request: &CreatePlanRequest,
) -> Result<PlanSelection, ApiError> {
    let limits = filter(
        request.reason.clone(),
        request.key.clone(),
        request.partition,
        request.from.as_deref(),
        request.to.as_deref(),
    )?;
    let max_replays = request.max_replays.unwrap_or(REPLAYS_MAX_DEFAULT);
    let topic = |topic: String| PlanTopic { topic, to: String::new() };
    match (&request.failure, &request.topics) {
        (Some(failure), None) if limits == DeadLetterFilter::default() => {
            let (place, cause) =
                failures::dead_letter_cause(app, principal, operations, failure).await?;
            let topics = vec![topic(place)];
            let (failure, cause) = (Some(failure.clone()), Some(cause));
            Ok(PlanSelection { failure, cause, topics, max_replays, ..PlanSelection::default() })
        }
        (Some(_), None) => {
            Err(ApiError::invalid("a filter is for `topics`; a plan for a `failure` has none"))
        }
        (None, Some(names)) if (1..=TOPICS_MAX).contains(&names.len()) => {
            let mut topics: Vec<PlanTopic> = Vec::new();
            for name in names.iter().map(|name| wire_topic(name.clone())) {
                if topics.iter().all(|known| known.topic != name) {
                    topics.push(topic(name));
                }
            }
            Ok(PlanSelection {
                topics,
                reason: limits.reason,
                key: limits.key,
                partition: limits.partition,
                from_ms: limits.from.map(|at| at.as_millis()),
                to_ms: limits.to.map(|at| at.as_millis()),
                max_replays,
                ..PlanSelection::default()
            })
        }
        (None, Some(_)) => {
            Err(ApiError::invalid(format!("`topics` must have 1 to {TOPICS_MAX} names")))
        }
        _ => {
            Err(ApiError::invalid("select dead letters with exactly one of `failure` or `topics`"))
        }
    }
}

fn preview_to_dto(preview: PlanPreview, selection: &PlanSelection) -> PlanPreviewDto {
    let example = |(topic, letter): (String, headwater_queue::DeadLetter)| PlanExample {
        topic: shown_topic(&topic).into_owned(),
        id: letter.id.to_string(),
        key: letter.key,
        reason: text::cut(&letter.reason, REASON_BYTES_MAX).to_owned(),
    };
    let stage = |(letters, per_second)| PlanStage { letters, per_second };
    PlanPreviewDto {
        dry_run: true,
        letters: preview.ready,
        already_replayed: preview.already_replayed,
        refused: preview.refused,
        refusal: preview.refusal,
        complete: preview.is_complete,
        cause: selection.cause.clone(),
        topics: selection.topics.iter().map(|one| shown_topic(&one.topic).into_owned()).collect(),
        groups: preview.groups.into_iter().collect(),
        examples: preview.examples.into_iter().map(example).collect(),
        steps: STAGES.map(stage).into(),
    }
}

/// Filter of plans.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PlanListQuery {
    /// `running`, `paused`, `stopped`, `cancelled` or `done`.
    state: Option<String>,
    /// `next_cursor` of the previous page.
    cursor: Option<i64>,
    /// Maximum number: 50 by default, 200 at most.
    limit: Option<usize>,
}

/// List replay plans, newest first. They are kept for 30 days after their end.
#[utoipa::path(get, path = "/plans", tag = "plans", params(PlanListQuery), responses((status = 200, body = PlanPage)))]
async fn list(
    State(app): State<App>,
    QueryParams(query): QueryParams<PlanListQuery>,
) -> JsonResult<PlanPage> {
    let state = query.state.as_deref().map(|name| {
        PlanState::parse(name).ok_or_else(|| {
            ApiError::invalid(
                "`state` must be `running`, `paused`, `stopped`, `cancelled` or `done`",
            )
        })
    });
    let limit = paging::limit(query.limit, PAGE_DEFAULT, PAGE_MAX)?;
    let plans = rows::list(app.store.as_ref(), state.transpose()?, query.cursor, limit).await?;
    let next = plans.last().filter(|_| plans.len() == limit).map(|plan| plan.id);
    Ok(Json(PlanPage { plans: plans.iter().map(to_dto).collect(), next_cursor: next }))
}

/// Show a replay plan, and explain in one sentence how it is doing.
#[utoipa::path(get, path = "/plans/{id}", tag = "plans", params(("id" = i64, Path)),
    responses((status = 200, body = PlanResponse), (status = 404)))]
async fn show(
    State(app): State<App>,
    Extension(operations): Extension<Operations>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<PlanResponse> {
    let plan = rows::plan(app.store.as_ref(), id).await?.ok_or(PlanError::NotFound(id))?;
    let awaited = match plan.state == PlanState::Running && plan.progress.awaited() > 0 {
        true => awaited_group(&app, operations.queue(), id).await?,
        false => None,
    };
    let said = explain(&plan, awaited.as_ref());
    let why = PlanWhy { reason: said.reason, sentence: said.sentence, command: said.command };
    Ok(Json(PlanResponse { plan: to_dto(&plan), why }))
}

/// The group of a letter without an outcome; one without members if there is one. `None` if the streams do not answer.
async fn awaited_group(
    app: &App,
    queue: &Queue,
    id: i64,
) -> Result<Option<AwaitedGroup>, ApiError> {
    let mut open = rows::letters(app.store.as_ref(), id).await?;
    open.dedup_by(|one, other| one.topic == other.topic && one.group == other.group);
    let inspect = queue.inspect();
    let look = async {
        let mut found = None;
        for letter in open {
            let groups = inspect.groups(&letter.topic).await.ok()?;
            let is_its = |name: &str| letter.group.as_deref().is_none_or(|group| group == name);
            let alive = groups
                .iter()
                .filter(|group| is_its(&group.group))
                .any(|group| group.members.iter().any(|member| member.heartbeat_age.is_some()));
            let awaited = AwaitedGroup {
                topic: shown_topic(&letter.topic).into_owned(),
                group: letter.group,
                has_members: alive,
            };
            if !alive {
                return Some(awaited);
            }
            found = Some(awaited);
        }
        found
    };
    Ok(timeout(EXPLAIN_TIME_MAX, look).await.unwrap_or(None))
}

/// Pause a replay plan: nothing more is sent within a second. What is sent is still observed.
#[utoipa::path(post, path = "/plans/{id}/pause", tag = "plans", params(("id" = i64, Path)),
    responses((status = 200, body = PlanChangeResponse), (status = 404), (status = 409)))]
async fn pause(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<PlanChangeResponse> {
    change(app, id, PlanCommand::Pause).await
}

/// Resume a replay plan. One that has stopped begins with a canary again.
#[utoipa::path(post, path = "/plans/{id}/resume", tag = "plans", params(("id" = i64, Path)),
    responses((status = 200, body = PlanChangeResponse), (status = 404), (status = 409)))]
async fn resume(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<PlanChangeResponse> {
    change(app, id, PlanCommand::Resume).await
}

/// Cancel a replay plan: nothing more is sent within a second. What is left stays a dead letter.
#[utoipa::path(post, path = "/plans/{id}/cancel", tag = "plans", params(("id" = i64, Path)),
    responses((status = 200, body = PlanChangeResponse), (status = 404), (status = 409)))]
async fn cancel(
    State(app): State<App>,
    PathParams(id): PathParams<i64>,
) -> JsonResult<PlanChangeResponse> {
    change(app, id, PlanCommand::Cancel).await
}

async fn change(app: App, id: i64, command: PlanCommand) -> JsonResult<PlanChangeResponse> {
    let changing = async move { Ok(rows::command(app.store.as_ref(), id, command).await?) };
    let (plan, changed) = run_to_completion(changing).await?;
    Ok(Json(PlanChangeResponse { plan: to_dto(&plan), changed }))
}

impl From<PlanError> for ApiError {
    fn from(problem: PlanError) -> Self {
        let message = problem.to_string();
        match problem {
            PlanError::NotFound(_) => Self::not_found(message),
            PlanError::WrongState { .. } => Self::new(StatusCode::CONFLICT, "conflict", message),
            PlanError::TooMany => Self::new(StatusCode::CONFLICT, "too_many_plans", message),
            PlanError::Store(problem) => problem.into(),
        }
    }
}

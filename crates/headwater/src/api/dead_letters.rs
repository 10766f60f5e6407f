//! Dead letters: list, show, replay, replay with another payload, purge.
//!
//! Upstream: `http/router.rs` and `cli/verbs/dlq.rs`. Guarantees: with `progress`, a replay or purge streams its
//! progress as JSON lines and has no timeout; it ends when the client disconnects. Both are idempotent.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use headwater_queue::{
    DeadLetter, DeadLetterFilter, DeadLetterQuery, DeadLetterSelection, MessageHeaders,
    PurgeConfig, PurgeReport, ReplayConfig, ReplayReport,
};
use headwater_stream::Direction;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::sleep;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::{PayloadDto, all_fields, id, parse_entry_id, time};
use crate::api::names::wire_topic;
use crate::api::ndjson::{error_line, lines};
use crate::api::run_to_completion;
use crate::config::Role;
use crate::http::ApiError;
use crate::http::audit::DryRun;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};

/// Interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(browse))
        .routes(routes!(show))
        .routes(routes!(replay))
        .routes(routes!(replay_edited))
        .routes(routes!(purge))
}

/// A message that exhausted its attempts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeadLetterDto {
    /// Entry id of the dead letter.
    id: String,
    topic: Option<String>,
    partition: Option<u16>,
    original_id: Option<String>,
    key: Option<String>,
    #[serde(flatten)]
    payload: PayloadDto,
    headers: MessageHeaders,
    failures: u32,
    sent_at: Option<String>,
    failed_at: Option<String>,
    reason: String,
    replayed_from: Option<String>,
    /// Number of earlier replays.
    replays: u32,
    /// All fields of the entry.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fields: BTreeMap<String, String>,
}

fn to_dto(letter: DeadLetter, with_fields: bool) -> DeadLetterDto {
    DeadLetterDto {
        id: letter.id.to_string(),
        topic: letter.original_topic,
        partition: letter.partition,
        original_id: id(letter.original_id),
        key: letter.key,
        payload: PayloadDto::from_bytes(&letter.payload),
        headers: letter.headers,
        failures: letter.failures,
        sent_at: letter.sent_at.map(time),
        failed_at: letter.failed_at.map(time),
        reason: letter.reason,
        replayed_from: id(letter.replayed_from),
        replays: letter.replays,
        fields: if with_fields { all_fields(&letter.fields) } else { BTreeMap::new() },
    }
}

/// A page of dead letters.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeadLetterPage {
    dead_letters: Vec<DeadLetterDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
}

/// Filter of dead letters.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeadLetterListQuery {
    /// Only those whose reason contains this text.
    reason: Option<String>,
    /// Only those with this key.
    key: Option<String>,
    partition: Option<u16>,
    /// Only those that failed at this time or later.
    from: Option<String>,
    /// Only those that failed at this time or earlier.
    to: Option<String>,
    /// Newest first.
    #[serde(default)]
    newest_first: bool,
    /// Maximum number: 100 by default, 1000 at most.
    limit: Option<usize>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// Selection of dead letters: by id, by filter, or all.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeadLettersRequest {
    /// Entry ids, at most 100.
    ids: Option<Vec<String>>,
    /// Filter: reason contains this text.
    reason: Option<String>,
    /// Filter: has this key.
    key: Option<String>,
    /// Filter: belongs to this partition.
    partition: Option<u16>,
    /// Filter: failed at this time or later.
    from: Option<String>,
    /// Filter: failed at this time or earlier.
    to: Option<String>,
    /// Select all dead letters.
    #[serde(default)]
    all: bool,
    /// Only report what would happen.
    #[serde(default)]
    dry_run: bool,
    /// Replay: maximum rate per second.
    #[schema(value_type = Option<u32>, minimum = 1)]
    per_second: Option<NonZeroU32>,
    /// Replay: skip dead letters that were already replayed this often.
    max_replays: Option<u32>,
    /// Replay: maximum number.
    limit: Option<u64>,
    /// Respond with JSON lines: `{"progress":{"done":N}}` several times a second, then `{"end":...}` or
    /// `{"error":...}`.
    #[serde(default)]
    progress: bool,
}

impl DeadLettersRequest {
    fn letters(&self) -> Result<DeadLetterSelection, ApiError> {
        let filter = filter(
            self.reason.clone(),
            self.key.clone(),
            self.partition,
            self.from.as_deref(),
            self.to.as_deref(),
        )?;
        let has_filter = filter != DeadLetterFilter::default();
        match (&self.ids, has_filter, self.all) {
            (Some(ids), false, false) => {
                let ids =
                    ids.iter().map(|id| parse_entry_id("ids", id)).collect::<Result<_, _>>()?;
                Ok(DeadLetterSelection::Ids(ids))
            }
            (None, true, false) | (None, false, true) => Ok(DeadLetterSelection::Matching(filter)),
            _ => Err(ApiError::invalid(
                "select dead letters with exactly one of `ids`, a filter, or `all: true`",
            )),
        }
    }
}

/// The filter of a request.
pub(super) fn filter(
    reason: Option<String>,
    key: Option<String>,
    partition: Option<u16>,
    from: Option<&str>,
    to: Option<&str>,
) -> Result<DeadLetterFilter, ApiError> {
    let at = |what: &str, text: Option<&str>| match text {
        None => Ok(None),
        Some(text) => Timestamp::from_rfc3339(text).map(Some).ok_or_else(|| {
            ApiError::invalid(format!(
                "invalid `{what}` = `{text}`; expected a time such as 2026-11-15T10:00:00Z"
            ))
        }),
    };
    Ok(DeadLetterFilter { reason, key, partition, from: at("from", from)?, to: at("to", to)? })
}

/// List the dead letters of a topic; copies are listed once.
#[utoipa::path(get, path = "/topics/{topic}/dead-letters", tag = "dead letters", params(("topic" = String, Path), DeadLetterListQuery),
    responses((status = 200, body = DeadLetterPage), (status = 404)))]
async fn browse(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    QueryParams(query): QueryParams<DeadLetterListQuery>,
) -> JsonResult<DeadLetterPage> {
    let defaults = DeadLetterQuery::default();
    let letter_query = DeadLetterQuery {
        filter: filter(
            query.reason,
            query.key,
            query.partition,
            query.from.as_deref(),
            query.to.as_deref(),
        )?,
        direction: if query.newest_first { Direction::Backward } else { Direction::Forward },
        limit: query.limit.unwrap_or(defaults.limit),
        cursor: query.cursor,
    };
    let page =
        operations.queue.dead_letters(&wire_topic(topic)).await?.browse(&letter_query).await?;
    let items = page.items.into_iter().map(|letter| to_dto(letter, false)).collect();
    Ok(Json(DeadLetterPage { dead_letters: items, next_cursor: page.next }))
}

/// Show a dead letter with all its fields.
#[utoipa::path(get, path = "/topics/{topic}/dead-letters/{id}", tag = "dead letters",
    params(("topic" = String, Path), ("id" = String, Path)), responses((status = 200, body = DeadLetterDto), (status = 404)))]
async fn show(
    State(operations): State<Operations>,
    PathParams((topic, id)): PathParams<(String, String)>,
) -> JsonResult<DeadLetterDto> {
    let id = parse_entry_id("id", &id)?;
    let letter = operations.queue.dead_letters(&wire_topic(topic)).await?.show(id).await?;
    Ok(Json(to_dto(letter, true)))
}

/// Result of a replay or its dry run.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReplayResponse {
    replayed: u64,
    already_replayed: u64,
    refused: u64,
    /// Some of the refused dead letters.
    refusals: Vec<RefusedReplayDto>,
    /// `false` for a dry run, or if `limit` left some.
    is_done: bool,
}

/// A dead letter that was not replayed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RefusedReplayDto {
    id: String,
    problem: String,
}

/// Send dead letters to their partitions again.
#[utoipa::path(post, path = "/topics/{topic}/dead-letters/replay", tag = "dead letters", params(("topic" = String, Path)),
    request_body = DeadLettersRequest, responses((status = 200, body = ReplayResponse), (status = 404)))]
async fn replay(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    JsonBody(request): JsonBody<DeadLettersRequest>,
) -> Result<Response, ApiError> {
    let letters = request.letters()?;
    let defaults = ReplayConfig::default();
    let config = ReplayConfig {
        dry_run: request.dry_run,
        per_second: request.per_second.or(defaults.per_second),
        max_replays: request.max_replays.unwrap_or(defaults.max_replays),
        limit: request.limit.or(defaults.limit),
    };
    let dead = operations.queue.dead_letters(&wire_topic(topic)).await?;
    let (done, with_progress) = (Arc::new(AtomicU64::new(0)), request.progress);
    let count = Arc::clone(&done);
    let replaying = async move {
        let report_progress = |report: &ReplayReport| {
            let handled = report.replayed + report.already_replayed + report.refused;
            count.store(handled, Ordering::Relaxed);
        };
        Ok(ReplayResponse::from(
            dead.replay_with_progress(letters, &config, &report_progress).await?,
        ))
    };
    let response = respond(replaying, done, with_progress, &operations).await?;
    Ok((DryRun::mark(request.dry_run), response).into_response())
}

impl From<ReplayReport> for ReplayResponse {
    fn from(report: ReplayReport) -> Self {
        let dto = |refusal: headwater_queue::ReplayRefusal| RefusedReplayDto {
            id: refusal.id.to_string(),
            problem: refusal.problem,
        };
        Self {
            replayed: report.replayed,
            already_replayed: report.already_replayed,
            refused: report.refused,
            refusals: report.refusals.into_iter().map(dto).collect(),
            is_done: report.is_done,
        }
    }
}

/// Another payload for a dead letter.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EditedReplayRequest {
    /// The new payload as text.
    payload: Option<String>,
    /// The new payload as base64.
    payload_base64: Option<String>,
}

/// Where the edited message is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EditedReplayResponse {
    /// Entry id of the message.
    id: String,
    /// False if the dead letter had been replayed before: then nothing was sent.
    replayed: bool,
}

/// Send one dead letter to its partition again, with another payload. Everything else stays as it was.
#[utoipa::path(post, path = "/topics/{topic}/dead-letters/{id}/replay", tag = "dead letters",
    params(("topic" = String, Path), ("id" = String, Path)), request_body = EditedReplayRequest,
    responses((status = 200, body = EditedReplayResponse), (status = 404)))]
async fn replay_edited(
    State(operations): State<Operations>,
    PathParams((topic, id)): PathParams<(String, String)>,
    JsonBody(request): JsonBody<EditedReplayRequest>,
) -> JsonResult<EditedReplayResponse> {
    let id = parse_entry_id("id", &id)?;
    let EditedReplayRequest { payload, payload_base64 } = request;
    if payload.is_none() && payload_base64.is_none() {
        return Err(ApiError::invalid("set `payload` or `payload_base64`"));
    }
    let payload = PayloadDto { payload, payload_base64 }.into_bytes()?;
    let letters = operations.queue.dead_letters(&wire_topic(topic)).await?;
    let sent = async move { Ok(letters.replay_edited(id, payload.into()).await?) };
    let (entry, replayed) = run_to_completion(sent).await?;
    Ok(Json(EditedReplayResponse { id: entry.to_string(), replayed }))
}

/// Result of a purge or its dry run.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PurgeResponse {
    purged: u64,
    is_done: bool,
}

/// Delete dead letters permanently.
#[utoipa::path(post, path = "/topics/{topic}/dead-letters/purge", tag = "dead letters", params(("topic" = String, Path)),
    request_body = DeadLettersRequest, responses((status = 200, body = PurgeResponse), (status = 404)))]
async fn purge(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    principal: Principal,
    JsonBody(request): JsonBody<DeadLettersRequest>,
) -> Result<Response, ApiError> {
    principal.require_role(Role::Admin)?;
    let letters = request.letters()?;
    let config = PurgeConfig { dry_run: request.dry_run };
    let dead = operations.queue.dead_letters(&wire_topic(topic)).await?;
    let (done, with_progress) = (Arc::new(AtomicU64::new(0)), request.progress);
    let count = Arc::clone(&done);
    let purging = async move {
        let report_progress = |report: &PurgeReport| count.store(report.purged, Ordering::Relaxed);
        let PurgeReport { purged, is_done } =
            dead.purge_with_progress(letters, &config, &report_progress).await?;
        Ok(PurgeResponse { purged, is_done })
    };
    let response = respond(purging, done, with_progress, &operations).await?;
    Ok((DryRun::mark(request.dry_run), response).into_response())
}

/// Returns the result of `work`, or with progress a stream of JSON lines that ends with it.
async fn respond<T: Serialize + Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    done: Arc<AtomicU64>,
    with_progress: bool,
    operations: &Operations,
) -> Result<Response, ApiError> {
    if !with_progress {
        return Ok(Json(work.await?).into_response());
    }
    let shutdown = operations.shutdown.clone();
    let state = Some((Box::pin(work), done, shutdown));
    Ok(lines(stream::unfold(state, |state| async move {
        let (mut work, done, shutdown) = state?;
        let ended = tokio::select! {
            ended = &mut work => ended,
            () = shutdown.wait() => Err(ApiError::unavailable("the server is shutting down; run it again")),
            () = sleep(PROGRESS_INTERVAL) => {
                let line = json!({"progress": {"done": done.load(Ordering::Relaxed)}});
                return Some((line.to_string(), Some((work, done, shutdown))));
            }
        };
        let line = match ended {
            Ok(report) => json!({"end": report}).to_string(),
            Err(refusal) => error_line(&refusal),
        };
        Some((line, None))
    })))
}

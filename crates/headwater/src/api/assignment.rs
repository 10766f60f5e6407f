//! Stream assignment: the streams of a service, their owners, adding and releasing.
//!
//! Upstream: `headwater assign` and other programs. Downstream: `headwater-assignment` on the stream backend; no database.
//! Guarantees: reading creates nothing; only the role `admin` takes a stream from its owner.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_assignment::{
    self as assignment, AssignedState, AssignedStream, AssignedStreams, OperatorRelease,
    ReleaseError, ServiceSummary,
};
use headwater_queue::QueueError;
use headwater_stream::{Backend, HolderName, StreamError, StreamName};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{id, milliseconds, parse_entry_id};
use crate::api::{Operations, run_to_completion};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging::{self, PageQuery};

/// Streams on a page.
const LIMIT_DEFAULT: usize = 50;
const LIMIT_MAX: usize = 500;
const _: () = assert!(LIMIT_MAX <= assignment::LIST_MAX);

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(summarize))
        .routes(routes!(list, add))
        .routes(routes!(describe))
        .routes(routes!(release))
}

/// A service: its keys, counts and live consumers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AssignmentServiceResponse {
    service: String,
    /// Input stream; its group is `SERVICE-group`, its dead letters are `SERVICE-input:dlq`.
    input: String,
    /// Streams that no consumer has read yet; `null` if the server does not report it.
    waiting: Option<u64>,
    /// Streams with an owner, and those whose owner died or released them.
    assigned: u64,
    /// Malformed entries, and streams with which too many owners died.
    dead_letters: u64,
    /// Consumers that are alive.
    members: Vec<String>,
}

/// A stream of a service.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AssignedStreamDto {
    /// Input entry.
    entry_id: String,
    /// The stream; `null` if the entry is malformed.
    stream: Option<String>,
    /// `waiting`: not read yet. `owned`. `expired`: its owner died. `released`: its owner gave it back. `blocked`: its
    /// lease key holds a value of another type. `malformed`: the next consumer moves it to the dead letters.
    #[schema(value_type = String)]
    state: &'static str,
    /// Why the entry is malformed.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// Owner.
    holder: Option<String>,
    /// Epoch of the owner; `null` for an owner that is another program without epochs.
    epoch: Option<u64>,
    /// Remaining time of the lease, unless the owner renews it.
    remaining_ms: Option<u64>,
    /// Owners so far, without those that released it.
    owners: u64,
    /// `Info` of the entry, unchanged.
    #[schema(value_type = Option<serde_json::Value>)]
    info: Option<Box<RawValue>>,
}

/// A page of streams.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AssignedStreamPage {
    streams: Vec<AssignedStreamDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
}

fn to_dto(found: AssignedStream) -> AssignedStreamDto {
    let problem = match &found.state {
        AssignedState::Malformed(problem) => Some(problem.clone()),
        _ => None,
    };
    AssignedStreamDto {
        entry_id: found.entry_id.to_string(),
        stream: found.stream.map(|stream| stream.to_string()),
        state: found.state.as_str(),
        problem,
        holder: found.holder.map(|holder| holder.to_string()),
        epoch: found.epoch.map(|epoch| epoch.0),
        remaining_ms: found.remaining.map(milliseconds),
        owners: found.owners,
        // It was parsed as JSON before.
        info: found.info.and_then(|info| RawValue::from_string(info.into()).ok()),
    }
}

/// Describe a service: waiting and assigned streams, dead letters, live consumers.
#[utoipa::path(get, path = "/assignments/{service}", tag = "assignment", params(("service" = String, Path)),
    responses((status = 200, body = AssignmentServiceResponse)))]
async fn summarize(
    State(operations): State<Operations>,
    PathParams(service): PathParams<String>,
) -> JsonResult<AssignmentServiceResponse> {
    let ServiceSummary { input, waiting, assigned, dead_letters, members } =
        assignment::summarize(streams(&operations), &service).await.map_err(failed)?;
    let members = members.iter().map(HolderName::to_string).collect();
    let input = input.to_string();
    Ok(Json(AssignmentServiceResponse { service, input, waiting, assigned, dead_letters, members }))
}

/// List the streams of a service in the order in which they were added. Streams that are done are not listed.
#[utoipa::path(get, path = "/assignments/{service}/streams", tag = "assignment",
    params(("service" = String, Path), PageQuery), responses((status = 200, body = AssignedStreamPage)))]
async fn list(
    State(operations): State<Operations>,
    PathParams(service): PathParams<String>,
    QueryParams(page): QueryParams<PageQuery>,
) -> JsonResult<AssignedStreamPage> {
    let limit = paging::limit(page.limit, LIMIT_DEFAULT, LIMIT_MAX)?;
    let after = page.cursor.map(|cursor| parse_entry_id("cursor", &cursor)).transpose()?;
    let AssignedStreams { streams: found, next } =
        assignment::list(streams(&operations), &service, after, limit).await.map_err(failed)?;
    let streams = found.into_iter().map(to_dto).collect();
    Ok(Json(AssignedStreamPage { streams, next_cursor: id(next) }))
}

/// A stream to add.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AssignmentAddRequest {
    /// Name of the stream.
    stream: String,
    /// Any JSON, for the owner.
    #[schema(value_type = Option<serde_json::Value>)]
    info: Option<Box<RawValue>>,
}

/// An added stream.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AssignmentAddResponse {
    service: String,
    stream: String,
    /// Input entry.
    entry_id: String,
}

/// Add a stream to a service; a consumer with free capacity acquires it.
#[utoipa::path(post, path = "/assignments/{service}/streams", tag = "assignment", params(("service" = String, Path)),
    request_body = AssignmentAddRequest, responses((status = 200, body = AssignmentAddResponse)))]
async fn add(
    State(operations): State<Operations>,
    PathParams(service): PathParams<String>,
    JsonBody(request): JsonBody<AssignmentAddRequest>,
) -> JsonResult<AssignmentAddResponse> {
    let stream = StreamName::new(&request.stream).map_err(failed)?;
    let info = request.info.as_deref().map(RawValue::get);
    let entry =
        assignment::add(streams(&operations), &service, &stream, info).await.map_err(failed)?;
    let (stream, entry_id) = (request.stream, entry.to_string());
    Ok(Json(AssignmentAddResponse { service, stream, entry_id }))
}

/// Describe a stream of a service: its state, owner, epoch and `Info`.
#[utoipa::path(get, path = "/assignments/{service}/streams/{stream}", tag = "assignment",
    params(("service" = String, Path), ("stream" = String, Path)), responses((status = 200, body = AssignedStreamDto), (status = 404)))]
async fn describe(
    State(operations): State<Operations>,
    PathParams((service, stream)): PathParams<(String, String)>,
) -> JsonResult<AssignedStreamDto> {
    let stream = StreamName::new(stream).map_err(failed)?;
    let found = assignment::describe(streams(&operations), &service, &stream).await;
    match found.map_err(failed)? {
        Some(found) => Ok(Json(to_dto(found))),
        None => Err(ApiError::not_found(ReleaseError::NotFound { stream, service }.to_string())),
    }
}

/// A stream that was taken from its owner.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AssignmentReleaseResponse {
    stream: String,
    /// Owner until now; `null` if it was dead or had released the stream already.
    former_holder: Option<String>,
    /// Epoch that is rejected from now on.
    fenced_epoch: Option<u64>,
}

/// Take a stream from its owner, alive or dead; a consumer with free capacity acquires it as new. Counts no death.
#[utoipa::path(post, path = "/assignments/{service}/streams/{stream}/release", tag = "assignment",
    params(("service" = String, Path), ("stream" = String, Path)),
    responses((status = 200, body = AssignmentReleaseResponse), (status = 404),
        (status = 409, description = "The stream has no owner, or an owner that cannot be fenced.")))]
async fn release(
    State(operations): State<Operations>,
    PathParams((service, stream)): PathParams<(String, String)>,
    principal: Principal,
) -> JsonResult<AssignmentReleaseResponse> {
    principal.require_role(Role::Admin)?;
    let stream = StreamName::new(stream).map_err(failed)?;
    let releasing = async move {
        let released = assignment::release(streams(&operations), &service, &stream).await;
        released.map_err(|error| match error {
            ReleaseError::Backend(error) => failed(error),
            ReleaseError::NotFound { .. } => ApiError::not_found(error.to_string()),
            _ => ApiError::new(StatusCode::CONFLICT, "conflict", error.to_string()),
        })
    };
    let OperatorRelease { stream, former_holder, fenced_epoch } =
        run_to_completion(releasing).await?;
    Ok(Json(AssignmentReleaseResponse {
        stream: stream.to_string(),
        former_holder: former_holder.map(|holder| holder.to_string()),
        fenced_epoch: fenced_epoch.map(|epoch| epoch.0),
    }))
}

fn streams(operations: &Operations) -> &dyn Backend {
    &**operations.queue.backend()
}

fn failed(error: StreamError) -> ApiError {
    QueueError::from(error).into()
}

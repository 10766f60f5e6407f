//! Consumer groups: list, describe, reset, delete, and their pending messages.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use headwater_issue::{GROUP, STREAM};
use headwater_queue::{
    BoundedCount, GroupView, Mode, PendingFilter, PendingView, RemovedGroup, Reset, ResetGuard,
    ResetReport, ResetTo,
};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{EntryPosition, UNREAD, id, milliseconds, parse_position};
use crate::api::names::{self, wire_group, wire_topic};
use crate::api::{Operations, run_to_completion};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::audit::DryRun;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::tickets::TICKET_EVENTS;

/// Partitions whose oldest pending message is read; each costs a query.
const OLDEST_PENDING_MAX: usize = 128;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(describe, remove))
        .routes(routes!(reset))
        .routes(routes!(pending))
}

/// A consumer group of a topic.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupResponse {
    topic: String,
    group: String,
    /// Messages delivered and not yet settled, of the partitions that can be read.
    pending: u64,
    /// Messages not yet delivered; `null` if the server does not report it, or a partition cannot be read.
    lag: Option<u64>,
    /// Partitions that cannot be read because a server of the stream backend does not answer: the totals and consumers lack them.
    /// Absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unread_partitions: Vec<u16>,
    members: Vec<MemberDto>,
    consumers: Vec<ConsumerDto>,
    partitions: Vec<GroupPartitionDto>,
}

/// The groups of a topic.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupPage {
    groups: Vec<GroupResponse>,
}

/// A member of a group.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MemberDto {
    member: String,
    consumer: Option<String>,
    /// `owned` or `shared`.
    mode: &'static str,
    heartbeat_age_ms: Option<u64>,
}

/// A consumer as the stream backend reports it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ConsumerDto {
    name: String,
    pending: u64,
    idle_ms: u64,
    partitions: u16,
}

/// One partition of a group.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupPartitionDto {
    partition: u16,
    /// `null` if the server of the partition does not answer.
    pending: Option<u64>,
    lag: Option<u64>,
    last_delivered: Option<String>,
    last_id: Option<String>,
    owner: Option<PartitionOwnerDto>,
    /// Why something of the partition is unknown, its owner as well: its server does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<&'static str>,
    /// Of one group only: the pending message with the lowest id. At most 128 partitions have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_pending: Option<OldestPendingDto>,
}

/// The oldest pending message of a partition.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OldestPendingDto {
    id: String,
    /// Time since it was sent.
    age_ms: u64,
    /// Time since its last delivery; `null` if it was released and waits for the next one.
    idle_ms: Option<u64>,
    deliveries: u64,
}

/// Owner of a partition.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PartitionOwnerDto {
    holder: String,
    epoch: u64,
    heartbeat_age_ms: u64,
    remaining_ms: u64,
}

fn to_response(view: GroupView) -> GroupResponse {
    let unread_partitions = view.unread_partitions();
    let members = view.members.into_iter().map(|member| MemberDto {
        member: member.member,
        consumer: member.consumer,
        mode: match member.mode {
            Mode::Owned => "owned",
            Mode::Shared => "shared",
        },
        heartbeat_age_ms: member.heartbeat_age.map(milliseconds),
    });
    let consumers = view.consumers.into_iter().map(|consumer| ConsumerDto {
        name: consumer.name,
        pending: consumer.pending,
        idle_ms: milliseconds(consumer.idle),
        partitions: consumer.partitions,
    });
    let partitions = view.partitions.into_iter().map(|partition| GroupPartitionDto {
        partition: partition.partition,
        pending: partition.pending,
        lag: partition.lag,
        last_delivered: id(partition.last_delivered),
        last_id: id(partition.last_id),
        owner: partition.owner.map(|owner| PartitionOwnerDto {
            holder: owner.holder,
            epoch: owner.epoch,
            heartbeat_age_ms: milliseconds(owner.heartbeat_age),
            remaining_ms: milliseconds(owner.remaining),
        }),
        problem: partition.problem.map(|_| UNREAD),
        oldest_pending: None,
    });
    GroupResponse {
        unread_partitions,
        members: members.collect(),
        consumers: consumers.collect(),
        partitions: partitions.collect(),
        group: names::shown_group(&view.topic, &view.group).into_owned(),
        topic: names::shown_topic(&view.topic).into_owned(),
        pending: view.pending,
        lag: view.lag,
    }
}

/// List the groups of a topic.
#[utoipa::path(get, path = "/topics/{topic}/groups", tag = "groups", params(("topic" = String, Path)),
    responses((status = 200, body = GroupPage), (status = 404)))]
async fn list(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
) -> JsonResult<GroupPage> {
    let groups = operations.queue.inspect().groups(&wire_topic(topic)).await?;
    Ok(Json(GroupPage { groups: groups.into_iter().map(to_response).collect() }))
}

/// Describe a group: lag, pending messages with the oldest of each partition, consumers, and owners with epoch and heartbeat age.
#[utoipa::path(get, path = "/topics/{topic}/groups/{group}", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path)), responses((status = 200, body = GroupResponse), (status = 404)))]
async fn describe(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
) -> JsonResult<GroupResponse> {
    let (topic, group) = wire_group((topic, group));
    let inspect = operations.queue.inspect();
    let view = inspect.group(&topic, &group).await?;
    let pending =
        view.partitions.iter().filter(|one| one.pending > Some(0)).map(|one| one.partition);
    let pending: Vec<u16> = pending.take(OLDEST_PENDING_MAX).collect();
    let mut response = to_response(view);
    let now = SystemClock.now();
    for oldest in inspect.oldest_pending(&topic, &group, &pending).await? {
        let mut partitions = response.partitions.iter_mut();
        if let Some(of) = partitions.find(|one| one.partition == oldest.partition) {
            of.oldest_pending = Some(OldestPendingDto {
                id: oldest.id.to_string(),
                age_ms: milliseconds(now.since(Timestamp::from_millis(oldest.id.ms))),
                idle_ms: oldest.idle.map(milliseconds),
                deliveries: oldest.deliveries,
            });
        }
    }
    Ok(Json(response))
}

/// Target of a reset.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GroupResetRequest {
    /// `beginning`, `end`, an entry id, or a time.
    to: String,
    /// Only this partition.
    partition: Option<u16>,
    /// Only report what would happen.
    #[serde(default)]
    dry_run: bool,
    /// Reset even if the group has active members.
    #[serde(default)]
    force: bool,
}

/// Result of a reset or its dry run.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupResetResponse {
    /// Messages that will be redelivered.
    again: CountDto,
    /// Messages that will be skipped.
    skipped: CountDto,
    /// Pending messages whose outcome will be ignored.
    dropped: CountDto,
    /// `false` for a dry run.
    is_done: bool,
}

/// A count that may be a lower bound.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CountDto {
    count: u64,
    /// Whether the actual count may be higher.
    or_more: bool,
}

impl From<BoundedCount> for CountDto {
    fn from(counted: BoundedCount) -> Self {
        Self { count: counted.count, or_more: counted.or_more }
    }
}

/// Move a group to another position, partition by partition. If it is interrupted, the error says which partitions
/// are done and what to repeat.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/reset", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path)), request_body = GroupResetRequest,
    responses((status = 200, body = GroupResetResponse), (status = 404), (status = 409, description = "The group has active members."),
        (status = 503, description = "`interrupted`: done on some partitions; the message names them and what to repeat.")))]
async fn reset(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
    principal: Principal,
    JsonBody(request): JsonBody<GroupResetRequest>,
) -> Result<(Option<Extension<DryRun>>, Json<GroupResetResponse>), ApiError> {
    principal.require_role(Role::Admin)?;
    let to = match request.to.as_str() {
        "beginning" => ResetTo::Beginning,
        "end" => ResetTo::End,
        text => match parse_position("to", text).map_err(|_| {
            ApiError::invalid(format!(
                "invalid `to` = `{text}`; expected `beginning`, `end`, an entry id or a time"
            ))
        })? {
            EntryPosition::Id(id) => ResetTo::Id(id),
            EntryPosition::Time(at) => ResetTo::Time(at),
        },
    };
    let (topic, group) = wire_group((topic, group));
    let guard = if request.force { ResetGuard::Force } else { ResetGuard::RequireInactive };
    let reset = Reset { to, partition: request.partition, guard, dry_run: request.dry_run };
    let resetting = async move { Ok(operations.queue.reset_group(&topic, &group, &reset).await?) };
    let ResetReport { redelivered: again, skipped, dropped, is_done, .. } =
        run_to_completion(resetting).await?;
    let response = GroupResetResponse {
        again: again.into(),
        skipped: skipped.into(),
        dropped: dropped.into(),
        is_done,
    };
    Ok((DryRun::mark(request.dry_run), Json(response)))
}

/// A deleted group.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupRemovedResponse {
    topic: String,
    group: String,
    /// Messages that were pending.
    pending: u64,
    /// Messages that were not delivered; `null` if the server does not report it.
    lag: Option<u64>,
    /// Partitions the group was removed from.
    partitions: u16,
}

/// Delete a group. Messages are kept, but retention no longer waits for the group.
#[utoipa::path(delete, path = "/topics/{topic}/groups/{group}", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path)),
    responses((status = 200, body = GroupRemovedResponse), (status = 404), (status = 409, description = "The group has active members.")))]
async fn remove(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
    principal: Principal,
) -> JsonResult<GroupRemovedResponse> {
    principal.require_role(Role::Admin)?;
    let (topic, group) = wire_group((topic, group));
    if [(STREAM, GROUP), (TICKET_EVENTS, AI_PROCESSOR_GROUP)].contains(&(&*topic, &*group)) {
        return Err(ApiError::new(
            StatusCode::CONFLICT,
            "reserved",
            format!(
                "group `{}` of topic `{topic}` is used by the server and cannot be deleted; run `headwater serve` to process it",
                names::shown_group(&topic, &group)
            ),
        ));
    }
    let removed = (topic.clone(), group.clone());
    let removing = async move { Ok(operations.queue.remove_group(&removed.0, &removed.1).await?) };
    let RemovedGroup { pending, lag, partitions } = run_to_completion(removing).await?;
    let group = names::shown_group(&topic, &group).into_owned();
    let topic = names::shown_topic(&topic).into_owned();
    Ok(Json(GroupRemovedResponse { topic, group, pending, lag, partitions }))
}

/// Filter of pending messages.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PendingListQuery {
    partition: Option<u16>,
    /// Only those of this consumer.
    consumer: Option<String>,
    /// Only those idle for at least this many milliseconds.
    min_idle_ms: Option<u64>,
    /// Maximum number: 100 by default, 1000 at most.
    limit: Option<usize>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// A page of pending messages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PendingPage {
    pending: Vec<PendingDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
}

/// A message delivered and not yet settled.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PendingDto {
    id: String,
    partition: u16,
    /// `null` if it was released and waits for its next delivery.
    consumer: Option<String>,
    /// `null` if it was released.
    idle_ms: Option<u64>,
    deliveries: u64,
    /// `delivered` to a consumer, or `released`: it waits for its next delivery.
    state: &'static str,
}

/// List pending messages of all partitions, oldest first.
#[utoipa::path(get, path = "/topics/{topic}/groups/{group}/pending", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path), PendingListQuery),
    responses((status = 200, body = PendingPage), (status = 404)))]
async fn pending(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
    QueryParams(query): QueryParams<PendingListQuery>,
) -> JsonResult<PendingPage> {
    let defaults = PendingFilter::default();
    let filter = PendingFilter {
        partition: query.partition,
        consumer: query.consumer,
        min_idle: Duration::from_millis(query.min_idle_ms.unwrap_or(0)),
        limit: query.limit.unwrap_or(defaults.limit),
        cursor: query.cursor,
    };
    let (topic, group) = wire_group((topic, group));
    let page = operations.queue.inspect().pending(&topic, &group, &filter).await?;
    let dto = |pending: PendingView| PendingDto {
        id: pending.id.to_string(),
        partition: pending.partition,
        state: if pending.consumer.is_some() { "delivered" } else { "released" },
        consumer: pending.consumer,
        idle_ms: pending.idle.map(milliseconds),
        deliveries: pending.deliveries,
    };
    Ok(Json(PendingPage {
        pending: page.items.into_iter().map(dto).collect(),
        next_cursor: page.next,
    }))
}

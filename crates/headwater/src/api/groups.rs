//! Groups: who reads a topic, how far they are, what they have in hand; reset and removal.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_issue::{GROUP, STREAM};
use headwater_queue::{
    Counted, GroupView, Mode, PendingFilter, PendingView, RemovedGroup, Reset, ResetGuard,
    ResetReport, ResetTo,
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{Point, id, milliseconds, point};
use crate::api::{Operations, to_its_end};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Caller;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::tickets::TICKET_EVENTS;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(describe, remove))
        .routes(routes!(reset))
        .routes(routes!(pending))
}

/// A group on a topic.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupDescription {
    topic: String,
    group: String,
    /// Messages delivered and not settled.
    pending: u64,
    /// Messages not delivered yet; absent where the server cannot tell.
    lag: Option<u64>,
    members: Vec<MemberLine>,
    consumers: Vec<ConsumerLine>,
    partitions: Vec<GroupPartitionLine>,
}

/// The groups of a topic.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupPage {
    groups: Vec<GroupDescription>,
}

/// A process that takes part.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MemberLine {
    member: String,
    consumer: Option<String>,
    /// `owned` or `shared`.
    mode: &'static str,
    heartbeat_age_ms: Option<u64>,
}

/// A consumer as the server knows it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ConsumerLine {
    name: String,
    pending: u64,
    idle_ms: u64,
    partitions: u16,
}

/// One partition of a group.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupPartitionLine {
    partition: u16,
    pending: u64,
    lag: Option<u64>,
    last_delivered: Option<String>,
    last_id: Option<String>,
    owner: Option<OwnerLine>,
}

/// Who owns a partition.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OwnerLine {
    holder: String,
    epoch: u64,
    heartbeat_age_ms: u64,
    remaining_ms: u64,
}

fn description(view: GroupView) -> GroupDescription {
    let members = view.members.into_iter().map(|member| MemberLine {
        member: member.member,
        consumer: member.consumer,
        mode: match member.mode {
            Mode::Owned => "owned",
            Mode::Shared => "shared",
        },
        heartbeat_age_ms: member.heartbeat_age.map(milliseconds),
    });
    let consumers = view.consumers.into_iter().map(|consumer| ConsumerLine {
        name: consumer.name,
        pending: consumer.pending,
        idle_ms: milliseconds(consumer.idle),
        partitions: consumer.partitions,
    });
    let partitions = view.partitions.into_iter().map(|partition| GroupPartitionLine {
        partition: partition.partition,
        pending: partition.pending,
        lag: partition.lag,
        last_delivered: id(partition.last_delivered),
        last_id: id(partition.last_id),
        owner: partition.owner.map(|owner| OwnerLine {
            holder: owner.holder,
            epoch: owner.epoch,
            heartbeat_age_ms: milliseconds(owner.heartbeat_age),
            remaining_ms: milliseconds(owner.remaining),
        }),
    });
    GroupDescription {
        members: members.collect(),
        consumers: consumers.collect(),
        partitions: partitions.collect(),
        topic: view.topic,
        group: view.group,
        pending: view.pending,
        lag: view.lag,
    }
}

/// The groups of a topic.
#[utoipa::path(get, path = "/topics/{topic}/groups", tag = "groups", params(("topic" = String, Path)),
    responses((status = 200, body = GroupPage), (status = 404)))]
async fn list(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
) -> Answer<GroupPage> {
    let groups = operations.queue.inspect().groups(&topic).await?;
    Ok(Json(GroupPage { groups: groups.into_iter().map(description).collect() }))
}

/// One group: lag, pending, consumers, owners with epoch and heartbeat age.
#[utoipa::path(get, path = "/topics/{topic}/groups/{group}", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path)), responses((status = 200, body = GroupDescription), (status = 404)))]
async fn describe(
    State(operations): State<Operations>,
    PathOf((topic, group)): PathOf<(String, String)>,
) -> Answer<GroupDescription> {
    Ok(Json(description(operations.queue.inspect().group(&topic, &group).await?)))
}

/// Where the group goes on.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResetWish {
    /// `beginning`, `end`, an entry id, or a time.
    to: String,
    /// Only this partition.
    partition: Option<u16>,
    /// Only say what would happen.
    #[serde(default)]
    dry_run: bool,
    /// Also while members are at work.
    #[serde(default)]
    force: bool,
}

/// What a reset did, or would do.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResetAnswer {
    /// Messages that will be delivered again.
    again: CountView,
    /// Messages that will not be delivered.
    skipped: CountView,
    /// Messages in hand whose outcome will count for nothing.
    dropped: CountView,
    /// `false` for a dry run.
    is_done: bool,
}

/// A count that may have been given up on.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CountView {
    count: u64,
    /// Whether there are more.
    or_more: bool,
}

impl From<Counted> for CountView {
    fn from(counted: Counted) -> Self {
        Self { count: counted.count, or_more: counted.or_more }
    }
}

/// Moves a group to another place, partition by partition. A reset that is interrupted says which partitions are done, and what
/// to repeat.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/reset", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path)), request_body = ResetWish,
    responses((status = 200, body = ResetAnswer), (status = 404), (status = 409, description = "The group is at work."),
        (status = 503, description = "`interrupted`: done on some partitions; the message says which, and what to repeat.")))]
async fn reset(
    State(operations): State<Operations>,
    PathOf((topic, group)): PathOf<(String, String)>,
    caller: Caller,
    JsonBody(wish): JsonBody<ResetWish>,
) -> Answer<ResetAnswer> {
    caller.must_be(Role::Admin)?;
    let to = match wish.to.as_str() {
        "beginning" => ResetTo::Beginning,
        "end" => ResetTo::End,
        text => match point("to", text).map_err(|_| {
            ApiError::invalid(format!(
                "`to` is `{text}`; `beginning`, `end`, an entry id or a time"
            ))
        })? {
            Point::Id(id) => ResetTo::Id(id),
            Point::Time(at) => ResetTo::Time(at),
        },
    };
    let guard = if wish.force { ResetGuard::Force } else { ResetGuard::NobodyAtWork };
    let reset = Reset { to, partition: wish.partition, guard, dry_run: wish.dry_run };
    let resetting = async move { Ok(operations.queue.reset_group(&topic, &group, &reset).await?) };
    let ResetReport { again, skipped, dropped, is_done, .. } = to_its_end(resetting).await?;
    Ok(Json(ResetAnswer {
        again: again.into(),
        skipped: skipped.into(),
        dropped: dropped.into(),
        is_done,
    }))
}

/// A group that is gone.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupRemoved {
    topic: String,
    group: String,
    /// Messages it had in hand, which nobody will settle.
    pending: u64,
    /// Messages it had not read; absent where the server cannot tell.
    lag: Option<u64>,
    /// Partitions it was removed from.
    partitions: u16,
}

/// Removes a group: nothing is kept for it any more. Messages stay.
#[utoipa::path(delete, path = "/topics/{topic}/groups/{group}", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path)),
    responses((status = 200, body = GroupRemoved), (status = 404), (status = 409, description = "A member of it lives.")))]
async fn remove(
    State(operations): State<Operations>,
    PathOf((topic, group)): PathOf<(String, String)>,
    caller: Caller,
) -> Answer<GroupRemoved> {
    caller.must_be(Role::Admin)?;
    if [(STREAM, GROUP), (TICKET_EVENTS, AI_PROCESSOR_GROUP)].contains(&(&*topic, &*group)) {
        return Err(ApiError::new(
            StatusCode::CONFLICT,
            "reserved",
            format!(
                "`{group}` of `{topic}` belongs to the server, which works through it; start `headwater serve`"
            ),
        ));
    }
    let removed = (topic.clone(), group.clone());
    let removing = async move { Ok(operations.queue.remove_group(&removed.0, &removed.1).await?) };
    let RemovedGroup { pending, lag, partitions } = to_its_end(removing).await?;
    Ok(Json(GroupRemoved { topic, group, pending, lag, partitions }))
}

/// Which pending messages.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PendingQuery {
    partition: Option<u16>,
    /// Only those of this consumer.
    consumer: Option<String>,
    /// Only those that have not been touched for so many milliseconds.
    min_idle_ms: Option<u64>,
    /// At most this many; 100 by default, 1000 at most.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PendingPage {
    pending: Vec<PendingLine>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<String>,
}

/// A message that is delivered and not settled.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PendingLine {
    id: String,
    partition: u16,
    consumer: String,
    idle_ms: u64,
    deliveries: u64,
}

/// Messages in hand, of all partitions in the order they were stored.
#[utoipa::path(get, path = "/topics/{topic}/groups/{group}/pending", tag = "groups",
    params(("topic" = String, Path), ("group" = String, Path), PendingQuery),
    responses((status = 200, body = PendingPage), (status = 404)))]
async fn pending(
    State(operations): State<Operations>,
    PathOf((topic, group)): PathOf<(String, String)>,
    QueryOf(query): QueryOf<PendingQuery>,
) -> Answer<PendingPage> {
    let defaults = PendingFilter::default();
    let filter = PendingFilter {
        partition: query.partition,
        consumer: query.consumer,
        min_idle: Duration::from_millis(query.min_idle_ms.unwrap_or(0)),
        limit: query.limit.unwrap_or(defaults.limit),
        cursor: query.cursor,
    };
    let page = operations.queue.inspect().pending(&topic, &group, &filter).await?;
    let line = |pending: PendingView| PendingLine {
        id: pending.id.to_string(),
        partition: pending.partition,
        consumer: pending.consumer,
        idle_ms: milliseconds(pending.idle),
        deliveries: pending.deliveries,
    };
    Ok(Json(PendingPage {
        pending: page.items.into_iter().map(line).collect(),
        next_cursor: page.next,
    }))
}

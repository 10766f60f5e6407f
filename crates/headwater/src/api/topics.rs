//! Topics: create, list, describe, grow, trim, delete.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_issue::STREAM;
use headwater_queue::{Described, Policies, TopicView, Trim};
use headwater_stream::{Retention, TrimGuard};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{id, milliseconds, time};
use crate::api::{Operations, to_its_end};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Caller;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};
use crate::tickets::TICKET_EVENTS;

/// Topics on a page, by default and at most; each is looked at.
const PAGE_DEFAULT: usize = 100;
const PAGE_MAX: usize = 500;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(describe, delete))
        .routes(routes!(grow))
        .routes(routes!(trim))
}

/// A topic to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewTopic {
    name: String,
    /// 1 to 1024; they can grow later, never shrink.
    partitions: u16,
    /// Messages that stay in each partition once every group is done with them.
    retention_count: Option<u64>,
    /// How long messages stay, in milliseconds, once every group is done with them.
    retention_age_ms: Option<u64>,
    /// Bytes that stay of each partition once every group is done with them.
    retention_bytes: Option<u64>,
    /// Bytes the topic may hold; sends are refused above it.
    byte_budget: Option<u64>,
    /// Bytes of a payload.
    payload_bytes_max: Option<usize>,
    /// How often a failed message is tried again.
    max_retries: Option<u32>,
}

/// Whether it was created now.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Created {
    name: String,
    /// `false`: it was there already, with the same settings.
    created: bool,
}

/// Creates a topic.
#[utoipa::path(post, path = "/topics", tag = "topics", request_body = NewTopic,
    responses((status = 201, body = Created), (status = 200, body = Created, description = "It is there already, the same."),
        (status = 409, description = "It is there with other settings.")))]
async fn create(
    State(operations): State<Operations>,
    caller: Caller,
    JsonBody(new): JsonBody<NewTopic>,
) -> Result<(StatusCode, Json<Created>), ApiError> {
    caller.must_be(Role::Admin)?;
    refuse_own(&new.name)?;
    let defaults = Policies::default();
    let policies = Policies {
        retention: Retention {
            max_len: new.retention_count,
            max_age: new.retention_age_ms.map(Duration::from_millis),
            max_bytes: new.retention_bytes,
        },
        byte_budget: new.byte_budget,
        payload_bytes_max: new.payload_bytes_max.unwrap_or(defaults.payload_bytes_max),
        max_retries: new.max_retries.unwrap_or(defaults.max_retries),
        refresh: defaults.refresh,
    };
    let created = operations.queue.topics().create(&new.name, new.partitions, policies).await?;
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(Created { name: new.name, created })))
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicPage {
    topics: Vec<TopicLine>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<String>,
}

/// Which topics.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// At most this many; 100 by default, 500 at most.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// A topic in a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicLine {
    name: String,
    partitions: usize,
    length: u64,
    first_id: Option<String>,
    last_id: Option<String>,
    delayed: u64,
    dead_letters: u64,
    groups: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    created_at: Option<String>,
    /// Since when it is being deleted; delete it again if that was interrupted.
    #[serde(skip_serializing_if = "Option::is_none")]
    deleting_since: Option<String>,
}

/// Topics that were created, by name.
#[utoipa::path(get, path = "/topics", tag = "topics", params(ListQuery), responses((status = 200, body = TopicPage)))]
async fn list(
    State(operations): State<Operations>,
    QueryOf(query): QueryOf<ListQuery>,
) -> Answer<TopicPage> {
    let limit = query.limit.unwrap_or(PAGE_DEFAULT);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(ApiError::invalid(format!("`limit` is {limit}; 1 to {PAGE_MAX}")));
    }
    let mut names = operations.queue.topics().list().await?;
    names.sort();
    let after = query.cursor.unwrap_or_default();
    let mut names = names.into_iter().filter(|name| *name > after);
    let mut items = Vec::new();
    for name in names.by_ref().take(limit) {
        // One that was deleted meanwhile is not in the list.
        match operations.queue.inspect().topic(&name).await {
            Ok(view) => items.push(line(view)),
            Err(headwater_queue::QueueError::NoTopic { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let next = names.next().and_then(|_| items.last().map(|item| item.name.clone()));
    Ok(Json(TopicPage { topics: items, next_cursor: next }))
}

fn line(view: TopicView) -> TopicLine {
    TopicLine {
        name: view.name,
        partitions: view.partitions.len(),
        length: view.length,
        first_id: id(view.first_id),
        last_id: id(view.last_id),
        delayed: view.delayed,
        dead_letters: view.dead_letters,
        groups: view.groups,
        created_at: view.created_at.map(time),
        deleting_since: view.deleting_since.map(time),
    }
}

/// All there is to know of a topic.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicDescription {
    name: String,
    /// `plain`, `standalone` or `cluster`: how its keys are spelt.
    layout: String,
    created_at: Option<String>,
    updated_at: Option<String>,
    length: u64,
    first_id: Option<String>,
    last_id: Option<String>,
    bytes: Option<u64>,
    /// Messages that wait for their time.
    delayed: u64,
    next_due: Option<String>,
    dead_letters: u64,
    dead_letters_key: String,
    dead_letters_slot: Option<u16>,
    /// Whether keys are moving to new partitions.
    is_growing: bool,
    /// Since when it is being deleted; delete it again if that was interrupted.
    #[serde(skip_serializing_if = "Option::is_none")]
    deleting_since: Option<String>,
    policies: PoliciesView,
    groups: Vec<String>,
    partitions: Vec<PartitionDescription>,
}

/// What a topic keeps and how it is used.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PoliciesView {
    retention_count: Option<u64>,
    retention_age_ms: Option<u64>,
    retention_bytes: Option<u64>,
    byte_budget: Option<u64>,
    payload_bytes_max: usize,
    max_retries: u32,
}

/// One partition, with its keys.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PartitionDescription {
    partition: u16,
    length: u64,
    first_id: Option<String>,
    last_id: Option<String>,
    bytes: Option<u64>,
    stream_key: String,
    delays_key: String,
    slot: Option<u16>,
}

/// Describes a topic, with keys and slots.
#[utoipa::path(get, path = "/topics/{topic}", tag = "topics", params(("topic" = String, Path)),
    responses((status = 200, body = TopicDescription), (status = 404)))]
async fn describe(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
) -> Answer<TopicDescription> {
    let view = operations.queue.inspect().topic(&topic).await?;
    let described = operations.queue.topics().describe(&topic).await?;
    Ok(Json(description(view, described)))
}

fn description(view: TopicView, described: Described) -> TopicDescription {
    let policies = &view.policies;
    let retention = policies.retention;
    // A topic that grew between the two looks has partitions that only one of them saw.
    let partitions =
        view.partitions.iter().zip(described.partitions).map(|(seen, keys)| PartitionDescription {
            partition: seen.partition,
            length: seen.length,
            first_id: id(seen.first_id),
            last_id: id(seen.last_id),
            bytes: seen.bytes,
            stream_key: keys.stream_key,
            delays_key: keys.delays_key,
            slot: keys.slot,
        });
    TopicDescription {
        layout: format!("{:?}", view.layout).to_lowercase(),
        created_at: view.created_at.map(time),
        updated_at: view.updated_at.map(time),
        length: view.length,
        first_id: id(view.first_id),
        last_id: id(view.last_id),
        bytes: view.bytes,
        delayed: view.delayed,
        next_due: view.next_due.map(time),
        dead_letters: view.dead_letters,
        dead_letters_key: described.dead_letters_key,
        dead_letters_slot: described.dead_letters_slot,
        is_growing: view.is_growing,
        deleting_since: view.deleting_since.map(time),
        policies: PoliciesView {
            retention_count: retention.max_len,
            retention_age_ms: retention.max_age.map(milliseconds),
            retention_bytes: retention.max_bytes,
            byte_budget: policies.byte_budget,
            payload_bytes_max: policies.payload_bytes_max,
            max_retries: policies.max_retries,
        },
        partitions: partitions.collect(),
        groups: view.groups,
        name: view.name,
    }
}

/// How many partitions there shall be.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Grow {
    partitions: u16,
}

/// Adds partitions; keys that move keep their order.
#[utoipa::path(post, path = "/topics/{topic}/grow", tag = "topics", params(("topic" = String, Path)), request_body = Grow,
    responses((status = 200, body = TopicDescription), (status = 404), (status = 409)))]
async fn grow(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    caller: Caller,
    JsonBody(grow): JsonBody<Grow>,
) -> Answer<TopicDescription> {
    caller.must_be(Role::Admin)?;
    refuse_own(&topic)?;
    operations.queue.topics().grow(&topic, grow.partitions).await?;
    describe(State(operations), PathOf(topic)).await
}

/// What stays; at least one of the three.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrimWish {
    /// The newest messages of each partition.
    count: Option<u64>,
    /// Those that are not older, in milliseconds.
    age_ms: Option<u64>,
    /// About so many bytes of each partition.
    bytes: Option<u64>,
    /// Only this partition.
    partition: Option<u16>,
    /// Also messages that some group has not read or not acknowledged: they are lost.
    #[serde(default)]
    force: bool,
}

/// What a trim did.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TrimAnswer {
    removed: u64,
    /// Whether messages stayed only because some group still needs them.
    held_back: bool,
}

/// Removes the oldest messages.
#[utoipa::path(post, path = "/topics/{topic}/trim", tag = "topics", params(("topic" = String, Path)), request_body = TrimWish,
    responses((status = 200, body = TrimAnswer), (status = 404)))]
async fn trim(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    caller: Caller,
    JsonBody(wish): JsonBody<TrimWish>,
) -> Answer<TrimAnswer> {
    caller.must_be(Role::Admin)?;
    let trim = Trim {
        keep: Retention {
            max_len: wish.count,
            max_age: wish.age_ms.map(Duration::from_millis),
            max_bytes: wish.bytes,
        },
        guard: if wish.force { TrimGuard::Force } else { TrimGuard::Safe },
        partition: wish.partition,
    };
    let report = operations.queue.trim(&topic, &trim).await?;
    Ok(Json(TrimAnswer { removed: report.removed, held_back: report.held_back }))
}

/// The streams of the desk are one stream each, as other programs know them. A topic of the same name would hide them, and
/// with them what waits there.
fn refuse_own(topic: &str) -> Result<(), ApiError> {
    if ![TICKET_EVENTS, STREAM].contains(&topic) {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::CONFLICT,
        "reserved",
        format!("`{topic}` belongs to the server, which makes and keeps it; choose another name"),
    ))
}

/// Whether there was one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    deleted: bool,
}

/// Deletes a topic with all its messages, delayed ones and dead letters. One whose deletion was interrupted has
/// `deleting_since`; deleting it again finishes that.
#[utoipa::path(delete, path = "/topics/{topic}", tag = "topics", params(("topic" = String, Path)),
    responses((status = 200, body = Deleted),
        (status = 503, description = "`interrupted`: some partitions are deleted; the message says which, and what to repeat.")))]
async fn delete(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    caller: Caller,
) -> Answer<Deleted> {
    caller.must_be(Role::Admin)?;
    // One with partitions that somebody has made is in the way of the server's own.
    let described = operations.queue.topics().describe(&topic).await;
    if !described.is_ok_and(|described| !described.topic.layout.is_plain()) {
        refuse_own(&topic)?;
    }
    let deleting = async move { Ok(operations.queue.topics().delete(&topic).await?) };
    Ok(Json(Deleted { deleted: to_its_end(deleting).await? }))
}

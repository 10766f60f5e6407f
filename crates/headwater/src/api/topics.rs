//! Topics: create, list, describe, alter, grow, delete; `topic_trim.rs` trims them.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use headwater_issue::STREAM;
use headwater_queue::limits::PARTITIONS_MAX;
use headwater_queue::{
    EntryFormat, Policies, PolicyChanges, QueueError, TopicDescription, TopicView, read_each,
};
use headwater_stream::Retention;
use headwater_stream::clock::{Clock, SystemClock};
use serde::{Deserialize, Deserializer, Serialize};
use tracing::warn;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{UNREAD, id, milliseconds, time};
use crate::api::names::{self, wire_topic};
use crate::api::{Operations, run_to_completion};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::audit::DryRun;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::text::counted;
use crate::tickets::TICKET_EVENTS;
use crate::tickets::desk_events::DESK_EVENTS;

/// Default and maximum topics of a page, and how many are read at a time; each costs a query.
const PAGE_DEFAULT: usize = 100;
const PAGE_MAX: usize = 500;
const TOPICS_AT_ONCE: usize = 8;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(describe, delete))
        .routes(routes!(alter))
        .routes(routes!(grow))
}

/// A new topic.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateTopicRequest {
    name: String,
    /// Number of partitions, 1 to 1024; can grow later but not shrink.
    partitions: u16,
    /// Retention: messages per partition, kept after all groups have processed them.
    retention_count: Option<u64>,
    /// Retention: age in milliseconds, after all groups have processed them.
    retention_age_ms: Option<u64>,
    /// Retention: bytes per partition, kept after all groups have processed them.
    retention_bytes: Option<u64>,
    /// Byte budget of the topic; sends above it are rejected.
    byte_budget: Option<u64>,
    /// Maximum bytes of a payload.
    payload_bytes_max: Option<usize>,
    /// Maximum retries of a failed message.
    max_retries: Option<u32>,
    /// The fields of its entries. Default: `compact`; `full` if other programs read the topic.
    entry_format: Option<EntryFormatDto>,
}

/// The fields of the entries of a topic.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EntryFormatDto {
    Compact,
    Full,
}

impl From<EntryFormatDto> for EntryFormat {
    fn from(format: EntryFormatDto) -> Self {
        match format {
            EntryFormatDto::Compact => Self::Compact,
            EntryFormatDto::Full => Self::Full,
        }
    }
}

impl From<EntryFormat> for EntryFormatDto {
    fn from(format: EntryFormat) -> Self {
        match format {
            EntryFormat::Compact => Self::Compact,
            EntryFormat::Full => Self::Full,
        }
    }
}

/// Result of a creation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicCreatedResponse {
    name: String,
    /// `false`: the topic already existed with the same settings.
    created: bool,
}

/// Create a topic.
#[utoipa::path(post, path = "/topics", tag = "topics", request_body = CreateTopicRequest,
    responses((status = 201, body = TopicCreatedResponse), (status = 200, body = TopicCreatedResponse, description = "The topic exists with the same settings."),
        (status = 409, description = "The topic exists with other settings.")))]
async fn create(
    State(operations): State<Operations>,
    principal: Principal,
    JsonBody(new): JsonBody<CreateTopicRequest>,
) -> Result<(StatusCode, Json<TopicCreatedResponse>), ApiError> {
    principal.require_role(Role::Admin)?;
    reject_reserved(&new.name)?;
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
        entry_format: new.entry_format.map_or(defaults.entry_format, Into::into),
    };
    let created = operations.queue.topics().create(&new.name, new.partitions, policies).await?;
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(TopicCreatedResponse { name: new.name, created })))
}

/// A page of topics.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicPage {
    topics: Vec<TopicDto>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
}

/// Page of topics.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TopicListQuery {
    /// Only those whose name contains this text, in upper or lower case.
    name: Option<String>,
    /// Maximum number: 100 by default, 500 at most.
    limit: Option<usize>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
    /// Whether to list the streams of the server itself, too. Default: no.
    #[serde(default)]
    all: bool,
    /// Whether to read the lag of the groups, too; it costs a query for each topic. Default: no.
    #[serde(default)]
    lag: bool,
    /// Whether to add how busy the topics were, as this process measured it. Default: no.
    #[serde(default)]
    rates: bool,
}

/// A topic in a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicDto {
    name: String,
    /// `created` with settings, `plain`: created by its first message, `system`: a stream of the server, or `unknown` with a
    /// `problem`.
    kind: &'static str,
    /// This and the other numbers are `null` with a `problem`.
    partitions: Option<usize>,
    length: Option<u64>,
    first_id: Option<String>,
    last_id: Option<String>,
    /// Approximate size; `null` if the backend does not report it.
    bytes: Option<u64>,
    delayed: Option<u64>,
    dead_letters: Option<u64>,
    groups: Vec<String>,
    /// Why the topic could not be read: a server of the stream backend does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<&'static str>,
    /// With `lag`: messages that the group with the most has not been given or not settled.
    #[serde(skip_serializing_if = "Option::is_none")]
    worst_lag: Option<u64>,
    /// With `rates`: how busy the topic was. Only for the 50 busiest topics, and not without a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<TopicRatesDto>,
    #[serde(skip_serializing_if = "Option::is_none")]
    created_at: Option<String>,
    /// When its deletion started; if it was interrupted, delete the topic again.
    #[serde(skip_serializing_if = "Option::is_none")]
    deleting_since: Option<String>,
}

/// How busy a topic was.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicRatesDto {
    /// Messages added per second in the last minute; `null` if that is unknown.
    added_per_second: Option<f64>,
    /// Messages settled per second by all groups in the last minute; `null` if that is unknown.
    settled_per_second: Option<f64>,
    /// Messages added in each two minutes of the last hour, oldest first.
    added: Vec<u64>,
}

/// List topics by name: created ones, those created by their first message, and with `all` the server's own streams. A topic whose server does not answer is listed with a `problem`.
#[utoipa::path(get, path = "/topics", tag = "topics", params(TopicListQuery), responses((status = 200, body = TopicPage)))]
async fn list(
    State(operations): State<Operations>,
    QueryParams(query): QueryParams<TopicListQuery>,
) -> JsonResult<TopicPage> {
    let limit = query.limit.unwrap_or(PAGE_DEFAULT);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(ApiError::invalid(format!(
            "invalid `limit` = {limit}; allowed: 1 to {PAGE_MAX}"
        )));
    }
    let mut names = operations.queue.topics().list().await?;
    let is_system = |name: &str| names::SYSTEM_TOPICS.contains(&name);
    names.retain(|name| !is_system(name));
    names.extend(names::SYSTEM_TOPICS.iter().filter(|_| query.all).map(|&name| name.to_owned()));
    if let Some(part) = query.name.as_ref().map(|part| part.to_lowercase()) {
        names.retain(|name| names::shown_topic(name).to_lowercase().contains(&part));
    }
    names.sort();
    let after = query.cursor.clone().map(wire_topic).unwrap_or_default();
    let mut names = names.into_iter().filter(|name| *name > after).peekable();
    let (operations, query) = (&operations, &query);
    let (mut topics, mut last) = (Vec::new(), None);
    // More than once if topics were deleted in the meantime.
    while topics.len() < limit && names.peek().is_some() {
        let page: Vec<String> = names.by_ref().take(limit - topics.len()).collect();
        last = page.last().cloned();
        let read = |name: String| async move { read_topic(operations, &name, query).await };
        for topic in read_each(TOPICS_AT_ONCE, page.into_iter().map(read).collect()).await {
            topics.extend(topic?);
        }
    }
    let next = last.filter(|_| names.peek().is_some());
    let next_cursor = next.map(|name| names::shown_topic(&name).into_owned());
    Ok(Json(TopicPage { topics, next_cursor }))
}

/// A topic of a list; `None` if it was deleted in the meantime. Its server may not answer while others do.
async fn read_topic(
    operations: &Operations,
    name: &str,
    query: &TopicListQuery,
) -> Result<Option<TopicDto>, ApiError> {
    let lag = async {
        match query.lag {
            true => worst_lag(operations, name).await,
            false => Ok(None),
        }
    };
    let inspect = operations.queue.inspect();
    let rates = query.rates.then(|| rates(operations, name)).flatten();
    match tokio::try_join!(inspect.topic(name), lag) {
        Ok((view, worst_lag)) => Ok(Some(TopicDto { worst_lag, rates, ..to_dto(view) })),
        Err(QueueError::NoTopic { .. }) => Ok(None),
        Err(error) if error.is_transient() => {
            warn!(topic = name, %error, "topic cannot be read, the others are listed");
            Ok(Some(TopicDto { rates, ..unread_topic(name) }))
        }
        Err(error) => Err(error.into()),
    }
}

/// What the group that is behind the most has not been given or not settled; `None` without a group, or if it is unknown.
async fn worst_lag(operations: &Operations, topic: &str) -> Result<Option<u64>, QueueError> {
    let groups = operations.queue.inspect().groups(topic).await?;
    Ok(groups.iter().filter_map(|group| Some(group.lag? + group.pending)).max())
}

/// How busy a topic was, to hundredths.
fn rates(operations: &Operations, topic: &str) -> Option<TopicRatesDto> {
    let rates = operations.topic_history().rates(topic, SystemClock.now())?;
    let hundredths = |rate: f64| (rate * 100.0).round() / 100.0;
    Some(TopicRatesDto {
        added_per_second: rates.added_per_second.map(hundredths),
        settled_per_second: rates.settled_per_second.map(hundredths),
        added: rates.curve,
    })
}

/// A topic of which only the name is known.
fn unread_topic(name: &str) -> TopicDto {
    TopicDto {
        name: names::shown_topic(name).into_owned(),
        kind: if names::SYSTEM_TOPICS.contains(&name) { "system" } else { "unknown" },
        partitions: None,
        length: None,
        first_id: None,
        last_id: None,
        bytes: None,
        delayed: None,
        dead_letters: None,
        groups: Vec::new(),
        problem: Some(UNREAD),
        worst_lag: None,
        rates: None,
        created_at: None,
        deleting_since: None,
    }
}

fn to_dto(view: TopicView) -> TopicDto {
    let kind = match view.layout.is_plain() {
        _ if names::SYSTEM_TOPICS.contains(&view.name.as_str()) => "system",
        true => "plain",
        false => "created",
    };
    TopicDto {
        kind,
        name: names::shown_topic(&view.name).into_owned(),
        partitions: Some(view.partitions.len()),
        length: Some(view.length),
        first_id: id(view.first_id),
        last_id: id(view.last_id),
        bytes: view.bytes,
        delayed: Some(view.delayed),
        dead_letters: Some(view.dead_letters),
        groups: shown_groups(&view.name, view.groups),
        problem: None,
        worst_lag: None,
        rates: None,
        created_at: view.created_at.map(time),
        deleting_since: view.deleting_since.map(time),
    }
}

fn shown_groups(topic: &str, groups: Vec<String>) -> Vec<String> {
    groups.iter().map(|group| names::shown_group(topic, group).into_owned()).collect()
}

/// A topic with all details.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicResponse {
    name: String,
    /// The layout of its keys: `plain`, `plainclustered`, `partitioned`, `partitionedclustered` or `clustered`.
    layout: String,
    created_at: Option<String>,
    updated_at: Option<String>,
    length: u64,
    first_id: Option<String>,
    last_id: Option<String>,
    bytes: Option<u64>,
    /// Messages waiting for their delivery time.
    delayed: u64,
    next_due: Option<String>,
    dead_letters: u64,
    dead_letters_key: String,
    dead_letters_slot: Option<u16>,
    /// Whether keys are being moved to new partitions.
    is_growing: bool,
    /// When its deletion started; if it was interrupted, delete the topic again.
    #[serde(skip_serializing_if = "Option::is_none")]
    deleting_since: Option<String>,
    policies: TopicPoliciesDto,
    groups: Vec<String>,
    partitions: Vec<TopicPartitionDto>,
}

/// Policies of a topic.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicPoliciesDto {
    retention_count: Option<u64>,
    retention_age_ms: Option<u64>,
    retention_bytes: Option<u64>,
    byte_budget: Option<u64>,
    payload_bytes_max: usize,
    max_retries: u32,
    entry_format: EntryFormatDto,
}

/// A partition with its keys.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicPartitionDto {
    partition: u16,
    length: u64,
    first_id: Option<String>,
    last_id: Option<String>,
    bytes: Option<u64>,
    stream_key: String,
    delays_key: String,
    slot: Option<u16>,
}

/// Describe a topic, with its keys and slots.
#[utoipa::path(get, path = "/topics/{topic}", tag = "topics", params(("topic" = String, Path)),
    responses((status = 200, body = TopicResponse), (status = 404)))]
async fn describe(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
) -> JsonResult<TopicResponse> {
    let topic = wire_topic(topic);
    let view = operations.queue.inspect().topic(&topic).await?;
    let described = operations.queue.topics().describe(&topic).await?;
    Ok(Json(to_response(view, described)))
}

fn to_response(view: TopicView, described: TopicDescription) -> TopicResponse {
    let policies = &view.policies;
    let retention = policies.retention;
    // A topic may grow between the two queries; extra partitions are dropped.
    let partitions =
        view.partitions.iter().zip(described.partitions).map(|(seen, keys)| TopicPartitionDto {
            partition: seen.partition,
            length: seen.length,
            first_id: id(seen.first_id),
            last_id: id(seen.last_id),
            bytes: seen.bytes,
            stream_key: keys.stream_key,
            delays_key: keys.delays_key,
            slot: keys.slot,
        });
    TopicResponse {
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
        policies: TopicPoliciesDto {
            retention_count: retention.max_len,
            retention_age_ms: retention.max_age.map(milliseconds),
            retention_bytes: retention.max_bytes,
            byte_budget: policies.byte_budget,
            payload_bytes_max: policies.payload_bytes_max,
            max_retries: policies.max_retries,
            entry_format: policies.entry_format.into(),
        },
        partitions: partitions.collect(),
        groups: shown_groups(&view.name, view.groups),
        name: names::shown_topic(&view.name).into_owned(),
    }
}

/// New limits. A field that is left out keeps its value, `null` removes the limit.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AlterTopicRequest {
    /// Retention: messages per partition.
    #[serde(default, deserialize_with = "given")]
    retention_count: Option<Option<u64>>,
    /// Retention: age in milliseconds.
    #[serde(default, deserialize_with = "given")]
    retention_age_ms: Option<Option<u64>>,
    /// Retention: bytes per partition.
    #[serde(default, deserialize_with = "given")]
    retention_bytes: Option<Option<u64>>,
    /// Byte budget of the topic; sends above it are rejected.
    #[serde(default, deserialize_with = "given")]
    byte_budget: Option<Option<u64>>,
    /// Maximum retries of a failed message.
    max_retries: Option<u32>,
    /// The fields of new entries.
    entry_format: Option<EntryFormatDto>,
}

/// Distinguishes `null` from a field that is left out.
fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// Change retention, budget, retries and entry format of a topic. Producers and consumers follow within seconds.
#[utoipa::path(post, path = "/topics/{topic}/alter", tag = "topics", params(("topic" = String, Path)), request_body = AlterTopicRequest,
    responses((status = 200, body = TopicResponse), (status = 404, description = "The topic was not created.")))]
async fn alter(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    principal: Principal,
    JsonBody(request): JsonBody<AlterTopicRequest>,
) -> JsonResult<TopicResponse> {
    principal.require_role(Role::Admin)?;
    reject_reserved(&topic)?;
    let age = request.retention_age_ms.map(|age| age.map(Duration::from_millis));
    let changes = PolicyChanges {
        retention_count: request.retention_count,
        retention_age: age,
        retention_bytes: request.retention_bytes,
        byte_budget: request.byte_budget,
        max_retries: request.max_retries,
        entry_format: request.entry_format.map(Into::into),
    };
    operations.queue.topics().alter(&topic, &changes).await?;
    describe(State(operations), PathParams(topic)).await
}

/// New number of partitions.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GrowTopicRequest {
    partitions: u16,
    /// Only check whether the topic can grow to this number.
    #[serde(default)]
    dry_run: bool,
}

/// Add partitions; keys that move keep their order.
#[utoipa::path(post, path = "/topics/{topic}/grow", tag = "topics", params(("topic" = String, Path)), request_body = GrowTopicRequest,
    responses((status = 200, body = TopicResponse), (status = 404), (status = 409)))]
async fn grow(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    principal: Principal,
    JsonBody(request): JsonBody<GrowTopicRequest>,
) -> Result<(Option<Extension<DryRun>>, Json<TopicResponse>), ApiError> {
    principal.require_role(Role::Admin)?;
    reject_reserved(&topic)?;
    let GrowTopicRequest { partitions, dry_run } = request;
    let queue = operations.queue.clone();
    if dry_run {
        let view = queue.inspect().topic(&topic).await?;
        if view.layout.is_plain() {
            return Err(ApiError::from(QueueError::NoTopic { topic }));
        }
        let now = view.partitions.len();
        if !(now..=usize::from(PARTITIONS_MAX)).contains(&usize::from(partitions)) {
            return Err(ApiError::invalid(format!(
                "topic `{topic}` has {}; `partitions` = {partitions} must be {now} to {PARTITIONS_MAX}",
                counted(now as u64, "partition", "partitions"),
            )));
        }
    } else {
        let grown = topic.clone();
        run_to_completion(async move { Ok(queue.topics().grow(&grown, partitions).await?) })
            .await?;
    }
    let described = describe(State(operations), PathParams(topic)).await?;
    Ok((DryRun::mark(dry_run), described))
}

/// Rejects the names of the server's own streams. A topic with partitions would hide their entries.
fn reject_reserved(topic: &str) -> Result<(), ApiError> {
    // A name that stands for another stream could not be addressed.
    let is_alias = wire_topic(topic.to_owned()) != topic;
    if ![TICKET_EVENTS, DESK_EVENTS, STREAM].contains(&topic) && !is_alias {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::CONFLICT,
        "reserved",
        format!("topic `{topic}` is reserved for the server; choose another name"),
    ))
}

/// Result of a deletion.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TopicDeletedResponse {
    deleted: bool,
}

/// Delete a topic with its messages, delayed messages and dead letters. An interrupted deletion leaves
/// `deleting_since`; repeat it to finish.
#[utoipa::path(delete, path = "/topics/{topic}", tag = "topics", params(("topic" = String, Path)),
    responses((status = 200, body = TopicDeletedResponse),
        (status = 503, description = "`interrupted`: some partitions are deleted; the message names them and what to repeat.")))]
async fn delete(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    principal: Principal,
) -> JsonResult<TopicDeletedResponse> {
    principal.require_role(Role::Admin)?;
    let topic = wire_topic(topic);
    // A partitioned topic with a reserved name may be deleted, because it hides the server's stream.
    let described = operations.queue.topics().describe(&topic).await;
    if !described.is_ok_and(|described| !described.topic.layout.is_plain()) {
        reject_reserved(&topic)?;
    }
    let deleting = async move { Ok(operations.queue.topics().delete(&topic).await?) };
    Ok(Json(TopicDeletedResponse { deleted: run_to_completion(deleting).await? }))
}

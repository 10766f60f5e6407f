//! Messages: produce, list, show, tail.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use futures_util::{Stream, StreamExt, stream};
use headwater_queue::limits::PAGE_MAX;
use headwater_queue::{
    Bound, Message, MessageHeaders, MessageQuery, NewMessage, Producer, Queue, QueueError,
    TailConfig, TailStart,
};
use headwater_stream::{Direction, Range, StreamName};
use serde::{Deserialize, Serialize};
use tracing::debug;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{EntryPosition, MessageDto, PayloadDto, parse_entry_id, parse_position};
use crate::api::message_filter::{self, MessageFilter};
use crate::api::message_why;
use crate::api::names::{shown_topic, wire_topic};
use crate::api::partitioners::PartitionerName;
use crate::api::{BUSY_RETRY_AFTER, Operations, is_internal_stream};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;
use crate::text::shell_word;
use crate::tickets::TICKET_EVENTS;

/// How long a tail waits before it checks for shutdown.
const TAIL_WAIT: Duration = Duration::from_secs(1);

/// Maximum concurrent tails in one process; each has its own connections.
pub(super) const TAILS_MAX: usize = 200;

/// Maximum delayed messages in one call, and how many are sent concurrently. Each is a round trip.
const DELAYED_MAX: usize = 10_000;
const DELAYED_CONCURRENCY: usize = 64;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(list, produce)).routes(routes!(show)).routes(routes!(tail))
}

/// Messages to send, in order.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProduceRequest {
    messages: Vec<NewMessageDto>,
    /// Whether a topic that does not exist is created, with one partition and no settings. Default: no.
    #[serde(default)]
    create: bool,
    /// How partitions are chosen: `hash` (default), `round-robin`, `random` or `consistent`. Use the same for all
    /// messages of a topic: the order per key depends on it.
    #[serde(default)]
    partitioner: PartitionerName,
}

/// A message to send.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewMessageDto {
    /// Key that determines partition and order.
    key: Option<String>,
    #[serde(flatten)]
    payload: PayloadDto,
    #[serde(default)]
    headers: MessageHeaders,
    /// Target partition; by default the key determines it.
    partition: Option<u16>,
    /// Idempotency id: sent again within ten minutes, the message is stored once.
    id: Option<String>,
    /// Delay in milliseconds until delivery.
    delay_ms: Option<u64>,
}

/// Results in the order of the messages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProduceResponse {
    messages: Vec<ProduceResult>,
}

/// Result of one message.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ProduceResult {
    /// Stored in its partition.
    Sent { id: String, partition: u16, duplicate: bool },
    /// Scheduled for later delivery.
    Delayed { delayed_id: String, partition: u16 },
    /// Not sent, or unconfirmed.
    Failed { error: String },
}

/// Remembered topics, and for how long; beyond it, they are checked again.
const KNOWN_TOPICS_MAX: usize = 10_000;
const KNOWN_TOPIC_TTL: Duration = Duration::from_secs(5);

/// Topics that were not created, exist and are not streams of other programs, and when that was seen.
pub(super) type KnownTopics = Arc<Mutex<HashMap<String, Instant>>>;

/// What is stored under the name of a topic.
enum StoredTopic {
    Created,
    /// Created by its first message.
    Plain,
    /// The newest entry is not one of ours.
    Foreign,
    Missing,
}

/// Rejects a topic that does not exist, unless it is to be created: a misspelt name would swallow messages. Requires the
/// role `admin` for the streams that the server itself reads, and for streams of other programs: the key exists, it is
/// no created topic, and its newest entry is not one of ours. While the stream backend does not answer, a topic that this
/// process has seen before is accepted: its partitions may be on servers that do.
async fn require_known_topic(
    operations: &Operations,
    topic: &str,
    is_created: bool,
    principal: &Principal,
) -> Result<(), ApiError> {
    let required = principal.require_role(Role::Admin);
    if is_internal_stream(topic) || topic == TICKET_EVENTS {
        return required;
    }
    let known_topics = || operations.known_topics.lock().unwrap_or_else(PoisonError::into_inner);
    let was_known = match known_topics().get_mut(topic) {
        Some(seen) if seen.elapsed() < KNOWN_TOPIC_TTL => return Ok(()),
        Some(seen) => {
            // Before the check: requests that arrive during it do not wait for it.
            *seen = Instant::now();
            true
        }
        None => false,
    };
    let topics = operations.queue.topics();
    match stored_topic(&operations.queue, topic).await {
        Ok(StoredTopic::Created) => Ok(()),
        Ok(StoredTopic::Plain) => {
            // Created by a library, or before this list existed.
            match topics.register_plain(topic).await {
                Err(error) if was_known && error.is_transient() => {}
                registered => registered?,
            }
            let mut known_topics = known_topics();
            if known_topics.len() >= KNOWN_TOPICS_MAX {
                known_topics.clear();
            }
            known_topics.insert(topic.to_owned(), Instant::now());
            Ok(())
        }
        Ok(StoredTopic::Foreign) => {
            // Another caller may not be allowed to send to it.
            known_topics().remove(topic);
            required.map_err(|_| {
                ApiError::new(
                    StatusCode::FORBIDDEN,
                    "forbidden",
                    format!(
                        "`{topic}` is a stream of another program; sending to it requires the role `admin`"
                    ),
                )
            })
        }
        Ok(StoredTopic::Missing) => {
            known_topics().remove(topic);
            if !is_created {
                return Err(unknown_topic(operations, topic).await);
            }
            // Before the first message, so that no stream of ours is unlisted.
            Ok(topics.register_plain(topic).await?)
        }
        Err(error) if was_known && error.is_transient() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Costs no call of the backend for a created topic whose metadata was read recently.
async fn stored_topic(queue: &Queue, topic: &str) -> Result<StoredTopic, QueueError> {
    if queue.topics().is_created(topic).await? {
        return Ok(StoredTopic::Created);
    }
    let stream = StreamName::new(topic)?;
    if queue.backend().stats(&stream).await?.is_none() {
        return Ok(StoredTopic::Missing);
    }
    let newest = queue.backend().range(&stream, Range::last(1)).await?;
    let is_foreign = newest.first().is_some_and(|entry| !Message::is_stored_as(&entry.fields));
    Ok(if is_foreign { StoredTopic::Foreign } else { StoredTopic::Plain })
}

/// The error for a topic that does not exist; names a similar one.
async fn unknown_topic(operations: &Operations, topic: &str) -> ApiError {
    let names = operations.queue.topics().list().await.unwrap_or_default();
    let distances = names.iter().map(|name| (strsim::levenshtein(name, topic), name));
    let hint = match distances.min().filter(|(distance, _)| *distance <= 2) {
        Some((_, similar)) => format!("did you mean `{similar}`? Otherwise "),
        None => String::new(),
    };
    ApiError::not_found(format!(
        "topic `{topic}` does not exist; {hint}create it with `headwater topic create {}`, or with this message: \
         `--create`, over HTTP `\"create\": true`",
        shell_word(topic)
    ))
}

/// Send messages; to the server's own streams and to streams of other programs this requires the role `admin`. With one message, a failure is the response status; with several, each has its own result.
#[utoipa::path(post, path = "/topics/{topic}/messages", tag = "messages", params(("topic" = String, Path)), request_body = ProduceRequest,
    responses((status = 201, body = ProduceResponse), (status = 403), (status = 404, description = "The topic does not exist."), (status = 429, description = "The topic exceeds its byte budget.")))]
async fn produce(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    principal: Principal,
    JsonBody(produce): JsonBody<ProduceRequest>,
) -> Result<(StatusCode, Json<ProduceResponse>), ApiError> {
    let topic = wire_topic(topic);
    require_known_topic(&operations, &topic, produce.create, &principal).await?;
    let is_one = produce.messages.len() == 1;
    let producer = operations.producers.get(produce.partitioner);
    let mut now = Vec::new();
    let mut delayed_messages = Vec::new();
    for (index, message) in produce.messages.into_iter().enumerate() {
        let new = NewMessage {
            key: message.key,
            payload: message.payload.into_bytes()?.into(),
            headers: message.headers,
            partition: message.partition,
            id: message.id,
            max_retries: None,
        };
        match message.delay_ms {
            None => now.push((index, new)),
            Some(delay) => delayed_messages.push((index, Duration::from_millis(delay), new)),
        }
    }
    if delayed_messages.len() > DELAYED_MAX {
        let count = delayed_messages.len();
        return Err(ApiError::invalid(format!(
            "{count} messages have a `delay_ms`; at most {DELAYED_MAX} are allowed in one call"
        )));
    }
    let mut results = Vec::new();
    let (places, messages): (Vec<_>, Vec<_>) = now.into_iter().unzip();
    if !messages.is_empty() {
        let sent = producer.send_batch(&topic, messages).await?;
        for (index, result) in places.into_iter().zip(sent) {
            results.push((index, to_result(result)));
        }
    }
    let sending = group_by_key(delayed_messages)
        .into_iter()
        .map(|batch| send_delayed(producer, &topic, batch));
    let sent: Vec<_> = stream::iter(sending).buffer_unordered(DELAYED_CONCURRENCY).collect().await;
    results.extend(sent.into_iter().flatten());
    results.sort_by_key(|(index, _)| *index);
    let mut messages = Vec::new();
    for (_, result) in results {
        match result {
            Ok(one) => messages.push(one),
            Err(error) if is_one => return Err(error.into()),
            Err(error) => messages.push(ProduceResult::Failed { error: error.to_string() }),
        }
    }
    Ok((StatusCode::CREATED, Json(ProduceResponse { messages })))
}

/// A delayed message with its index in the call.
type IndexedDelayed = (usize, Duration, NewMessage);

/// Groups messages of the same key, which must keep their order; a message without a key is its own group.
fn group_by_key(messages: Vec<IndexedDelayed>) -> Vec<Vec<IndexedDelayed>> {
    let (mut batches, mut batch_of_key) = (Vec::<Vec<IndexedDelayed>>::new(), HashMap::new());
    for message in messages {
        match message.2.key.clone() {
            None => batches.push(vec![message]),
            Some(key) => {
                let batch = *batch_of_key.entry(key).or_insert(batches.len());
                if batch == batches.len() {
                    batches.push(Vec::new());
                }
                batches[batch].push(message);
            }
        }
    }
    batches
}

async fn send_delayed(
    producer: &Producer,
    topic: &str,
    batch: Vec<IndexedDelayed>,
) -> Vec<(usize, Result<ProduceResult, QueueError>)> {
    let mut results = Vec::with_capacity(batch.len());
    for (index, delay, message) in batch {
        let delayed = producer.send_after(topic, message, delay).await;
        let one = delayed.map(|delayed| ProduceResult::Delayed {
            delayed_id: delayed.id.to_string(),
            partition: delayed.partition,
        });
        results.push((index, one));
    }
    results
}

fn to_result(
    result: Result<headwater_queue::Sent, QueueError>,
) -> Result<ProduceResult, QueueError> {
    result.map(|sent| ProduceResult::Sent {
        id: sent.id.to_string(),
        partition: sent.partition,
        duplicate: sent.duplicate,
    })
}

/// A page of messages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessagePage {
    messages: Vec<MessageDto>,
    /// Cursor of the next page, or `null`. A page of a search may be empty although there is a next one.
    next_cursor: Option<String>,
    /// With `key`, `header` or `text`: how far this page has looked.
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<MessageSearchDto>,
}

/// How far a page has looked for messages.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageSearchDto {
    /// Messages read for this page.
    scanned: u64,
    /// Messages stored in the topic, or in the partition.
    total: u64,
}

/// Filter of messages.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MessageListQuery {
    /// Oldest position: an entry id or a time.
    from: Option<String>,
    /// Newest position: an entry id or a time.
    to: Option<String>,
    /// Newest first.
    #[serde(default)]
    newest_first: bool,
    partition: Option<u16>,
    /// Only those with this key.
    key: Option<String>,
    /// Only those with this header, `NAME` or `NAME=VALUE`.
    header: Option<String>,
    /// Only those whose payload contains this text, in upper or lower case.
    text: Option<String>,
    /// Maximum number: 100 by default, 1000 at most.
    limit: Option<usize>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// List stored messages of all partitions, handled or not, oldest first. With `key`, `header` or `text`, a page looks at 10,000
/// messages at most; repeat with `next_cursor` to look further.
#[utoipa::path(get, path = "/topics/{topic}/messages", tag = "messages", params(("topic" = String, Path), MessageListQuery),
    responses((status = 200, body = MessagePage), (status = 404)))]
async fn list(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    QueryParams(query): QueryParams<MessageListQuery>,
) -> JsonResult<MessagePage> {
    let topic = wire_topic(topic);
    let bound = |what, text: Option<String>| {
        let point = text.map(|text| parse_position(what, &text)).transpose()?;
        Ok::<_, ApiError>(point.map(|point| match point {
            EntryPosition::Id(id) => Bound::Id(id),
            EntryPosition::Time(at) => Bound::Time(at),
        }))
    };
    let defaults = MessageQuery::default();
    let message_query = MessageQuery {
        from: bound("from", query.from)?,
        to: bound("to", query.to)?,
        direction: if query.newest_first { Direction::Backward } else { Direction::Forward },
        partition: query.partition,
        limit: query.limit.unwrap_or(defaults.limit),
        cursor: query.cursor,
    };
    let filter = MessageFilter::new(query.key, query.header, query.text)?;
    let inspect = operations.queue.inspect();
    let (page, search) = match filter {
        None => (inspect.messages(&topic, &message_query).await?, None),
        Some(filter) => {
            paging::limit(Some(message_query.limit), defaults.limit, PAGE_MAX)?;
            let (found, view) = tokio::try_join!(
                filter.search(&inspect, &topic, &message_query),
                inspect.topic(&topic)
            )?;
            let of_page = |number: u16| query.partition.is_none_or(|only| only == number);
            let partitions = view.partitions.iter().filter(|one| of_page(one.partition));
            let total = partitions.map(|one| one.length).sum();
            (found.page, Some(MessageSearchDto { scanned: found.scanned, total }))
        }
    };
    let items = page
        .items
        .into_iter()
        .map(|stored| MessageDto::new(&shown_topic(&topic), stored))
        .collect();
    Ok(Json(MessagePage { messages: items, next_cursor: page.next, search }))
}

/// Which message.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MessageShowQuery {
    /// Its partition; needed only if several partitions have a message with this id.
    partition: Option<u16>,
}

/// A message, and its neighbours of the same key.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageResponse {
    #[serde(flatten)]
    message: MessageDto,
    /// Entry id of the message with the same key before it, among the 200 before it in its partition.
    previous_of_key: Option<String>,
    /// Entry id of the message with the same key after it, among the 200 after it in its partition.
    next_of_key: Option<String>,
}

/// Show a stored message.
#[utoipa::path(get, path = "/topics/{topic}/messages/{id}", tag = "messages",
    params(("topic" = String, Path), ("id" = String, Path), MessageShowQuery),
    responses((status = 200, body = MessageResponse), (status = 404)))]
async fn show(
    State(operations): State<Operations>,
    PathParams((topic, id)): PathParams<(String, String)>,
    QueryParams(query): QueryParams<MessageShowQuery>,
) -> JsonResult<MessageResponse> {
    let topic = wire_topic(topic);
    let id = parse_entry_id("id", &id)?;
    let found = message_why::find(&operations, &topic, id, query.partition).await?;
    let key = found.message.as_ref().ok().and_then(|message| message.key.clone());
    let (previous_of_key, next_of_key) = match key {
        None => (None, None),
        Some(key) => {
            let inspect = operations.queue.inspect();
            message_filter::neighbours(&inspect, &topic, &found, key).await?
        }
    };
    let message = MessageDto::new(&shown_topic(&topic), found);
    Ok(Json(MessageResponse { message, previous_of_key, next_of_key }))
}

/// Start of a tail.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TailQuery {
    /// `beginning`, an entry id, or a time. By default only new messages.
    from: Option<String>,
    partition: Option<u16>,
}

/// Follow a topic: one server-sent event `message` for each message.
#[utoipa::path(get, path = "/topics/{topic}/tail", tag = "messages", params(("topic" = String, Path), TailQuery),
    responses((status = 200, content_type = "text/event-stream", body = MessageDto),
        (status = 429, description = "Too many open tails.")))]
async fn tail(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    QueryParams(query): QueryParams<TailQuery>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let topic = wire_topic(topic);
    let start = match query.from.as_deref() {
        None => TailStart::End,
        Some("beginning") => TailStart::Beginning,
        Some(text) => match parse_position("from", text)? {
            // A tail covers several partitions, so it starts at the time of the entry id.
            EntryPosition::Id(id) => {
                TailStart::Time(headwater_stream::clock::Timestamp::from_millis(id.ms))
            }
            EntryPosition::Time(at) => TailStart::Time(at),
        },
    };
    let permit = Arc::clone(&operations.tails).try_acquire_owned().map_err(|_| {
        let message = format!("{TAILS_MAX} tails are open; end one, or try again later");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "busy", message).retry_after(BUSY_RETRY_AFTER)
    })?;
    let config = TailConfig { start, partition: query.partition, ..TailConfig::default() };
    let tail = operations.queue.tail(&topic, config).await?;
    let shutdown = operations.shutdown.clone();
    // The permit is held until the response body ends.
    let state = (tail, topic, shutdown, permit);
    let batches = stream::unfold(state, |(mut tail, topic, shutdown, permit)| async move {
        let read = loop {
            if shutdown.is_triggered() {
                return None;
            }
            match tail.next(TAIL_WAIT).await {
                Ok(messages) if messages.is_empty() => {}
                other => break other,
            }
        };
        match read {
            Ok(messages) => {
                let events: Vec<_> = messages
                    .into_iter()
                    .map(|stored| event("message", &MessageDto::new(&shown_topic(&topic), stored)))
                    .collect();
                Some((events, (tail, topic, shutdown, permit)))
            }
            Err(error) => {
                debug!(%topic, %error, "tail ended with an error");
                None
            }
        }
    });
    let events = batches.flat_map(stream::iter);
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

pub(super) fn event<T: Serialize>(name: &str, data: &T) -> Result<Event, Infallible> {
    let event = Event::default().event(name);
    Ok(event
        .json_data(data)
        .unwrap_or_else(|_| Event::default().comment("event could not be serialized")))
}

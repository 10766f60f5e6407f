//! Messages: produce, list, tail.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use futures_util::{Stream, StreamExt, stream};
use headwater_queue::{
    Bound, MessageHeaders, MessageQuery, NewMessage, QueueError, TailConfig, TailStart,
};
use headwater_stream::Direction;
use serde::{Deserialize, Serialize};
use tracing::debug;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{EntryPosition, MessageDto, PayloadDto, parse_position};
use crate::api::{BUSY_RETRY_AFTER, Operations};
use crate::http::ApiError;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::{PathParams, QueryParams};

/// How long a tail waits before it checks for shutdown.
const TAIL_WAIT: Duration = Duration::from_secs(1);

/// Maximum concurrent tails in one process; each has its own connections.
pub(super) const TAILS_MAX: usize = 200;

/// Maximum delayed messages in one call, and how many are sent concurrently. Each is a round trip.
const DELAYED_MAX: usize = 10_000;
const DELAYED_CONCURRENCY: usize = 64;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(list, produce)).routes(routes!(tail))
}

/// Messages to send, in order.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProduceRequest {
    messages: Vec<NewMessageDto>,
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

/// Send messages. With one message, a failure is the response status; with several, each has its own result.
#[utoipa::path(post, path = "/topics/{topic}/messages", tag = "messages", params(("topic" = String, Path)), request_body = ProduceRequest,
    responses((status = 201, body = ProduceResponse), (status = 429, description = "The topic exceeds its byte budget.")))]
async fn produce(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    JsonBody(produce): JsonBody<ProduceRequest>,
) -> Result<(StatusCode, Json<ProduceResponse>), ApiError> {
    let is_one = produce.messages.len() == 1;
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
        let sent = operations.producer.send_batch(&topic, messages).await?;
        for (index, result) in places.into_iter().zip(sent) {
            results.push((index, to_result(result)));
        }
    }
    let sending = group_by_key(delayed_messages)
        .into_iter()
        .map(|batch| send_delayed(&operations, &topic, batch));
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
    operations: &Operations,
    topic: &str,
    batch: Vec<IndexedDelayed>,
) -> Vec<(usize, Result<ProduceResult, QueueError>)> {
    let mut results = Vec::with_capacity(batch.len());
    for (index, delay, message) in batch {
        let delayed = operations.producer.send_after(topic, message, delay).await;
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
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
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
    /// Maximum number: 100 by default, 1000 at most.
    limit: Option<usize>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// List stored messages of all partitions, handled or not, oldest first.
#[utoipa::path(get, path = "/topics/{topic}/messages", tag = "messages", params(("topic" = String, Path), MessageListQuery),
    responses((status = 200, body = MessagePage), (status = 404)))]
async fn list(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    QueryParams(query): QueryParams<MessageListQuery>,
) -> JsonResult<MessagePage> {
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
    let page = operations.queue.inspect().messages(&topic, &message_query).await?;
    let items = page.items.into_iter().map(|stored| MessageDto::new(&topic, stored)).collect();
    Ok(Json(MessagePage { messages: items, next_cursor: page.next }))
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
                    .map(|stored| event("message", &MessageDto::new(&topic, stored)))
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

//! Messages: produce, list, follow.

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
    Bound, Headers, MessageQuery, NewMessage, QueueError, TailConfig, TailStart,
};
use headwater_stream::Direction;
use serde::{Deserialize, Serialize};
use tracing::debug;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{MessageView, Payload, Point, point};
use crate::api::{BUSY_FOR, Operations};
use crate::http::ApiError;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::{PathOf, QueryOf};

/// How long a tail waits for messages before it looks whether it should end.
const TAIL_WAIT: Duration = Duration::from_secs(1);

/// Tails at once in one process: each has connections of its own.
pub(super) const TAILS_MAX: usize = 200;

/// Delayed messages of one call, and those that are sent at once. Each is a round trip.
const DELAYED_MAX: usize = 10_000;
const DELAYED_AT_ONCE: usize = 64;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(list, produce)).routes(routes!(tail))
}

/// Messages to send, in order.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Produce {
    messages: Vec<ProducedMessage>,
}

/// A message to send.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ProducedMessage {
    /// What decides its partition and its order.
    key: Option<String>,
    #[serde(flatten)]
    payload: Payload,
    #[serde(default)]
    headers: Headers,
    /// The partition, if it is not to be chosen by the key.
    partition: Option<u16>,
    /// Counts once however often it is sent within ten minutes.
    id: Option<String>,
    /// Stored now, delivered after this time.
    delay_ms: Option<u64>,
}

/// What became of each message, in order.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Produced {
    messages: Vec<ProducedOne>,
}

/// What became of a message.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ProducedOne {
    /// It is in its partition.
    Sent { id: String, partition: u16, duplicate: bool },
    /// It waits for its time.
    Delayed { delayed_id: String, partition: u16 },
    /// It was not sent, or may not have been.
    Failed { error: String },
}

/// Sends messages. With one message, a failure is the status of the answer; with several, each has its own result.
#[utoipa::path(post, path = "/topics/{topic}/messages", tag = "messages", params(("topic" = String, Path)), request_body = Produce,
    responses((status = 201, body = Produced), (status = 429, description = "The topic is over its byte budget.")))]
async fn produce(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    JsonBody(produce): JsonBody<Produce>,
) -> Result<(StatusCode, Json<Produced>), ApiError> {
    let is_one = produce.messages.len() == 1;
    let mut now = Vec::new();
    let mut later = Vec::new();
    for (place, message) in produce.messages.into_iter().enumerate() {
        let new = NewMessage {
            key: message.key,
            payload: message.payload.into_bytes()?.into(),
            headers: message.headers,
            partition: message.partition,
            id: message.id,
            max_retries: None,
        };
        match message.delay_ms {
            None => now.push((place, new)),
            Some(delay) => later.push((place, Duration::from_millis(delay), new)),
        }
    }
    if later.len() > DELAYED_MAX {
        let count = later.len();
        return Err(ApiError::invalid(format!(
            "{count} messages have a `delay_ms`; at most {DELAYED_MAX} in one call"
        )));
    }
    let mut results = Vec::new();
    let (places, messages): (Vec<_>, Vec<_>) = now.into_iter().unzip();
    if !messages.is_empty() {
        let sent = operations.producer.send_batch(&topic, messages).await?;
        for (place, result) in places.into_iter().zip(sent) {
            results.push((place, sent_one(result)));
        }
    }
    let sending = in_lanes(later).into_iter().map(|lane| send_later(&operations, &topic, lane));
    let sent: Vec<_> = stream::iter(sending).buffer_unordered(DELAYED_AT_ONCE).collect().await;
    results.extend(sent.into_iter().flatten());
    results.sort_by_key(|(place, _)| *place);
    let mut messages = Vec::new();
    for (_, result) in results {
        match result {
            Ok(one) => messages.push(one),
            Err(error) if is_one => return Err(error.into()),
            Err(error) => messages.push(ProducedOne::Failed { error: error.to_string() }),
        }
    }
    Ok((StatusCode::CREATED, Json(Produced { messages })))
}

/// A delayed message with its place in the call.
type Later = (usize, Duration, NewMessage);

/// Messages that keep their order, those of one key; each of the others alone.
fn in_lanes(messages: Vec<Later>) -> Vec<Vec<Later>> {
    let (mut lanes, mut lane_of) = (Vec::<Vec<Later>>::new(), HashMap::new());
    for message in messages {
        match message.2.key.clone() {
            None => lanes.push(vec![message]),
            Some(key) => {
                let lane = *lane_of.entry(key).or_insert(lanes.len());
                if lane == lanes.len() {
                    lanes.push(Vec::new());
                }
                lanes[lane].push(message);
            }
        }
    }
    lanes
}

async fn send_later(
    operations: &Operations,
    topic: &str,
    lane: Vec<Later>,
) -> Vec<(usize, Result<ProducedOne, QueueError>)> {
    let mut results = Vec::with_capacity(lane.len());
    for (place, delay, message) in lane {
        let delayed = operations.producer.send_after(topic, message, delay).await;
        let one = delayed.map(|delayed| ProducedOne::Delayed {
            delayed_id: delayed.id.to_string(),
            partition: delayed.partition,
        });
        results.push((place, one));
    }
    results
}

fn sent_one(result: Result<headwater_queue::Sent, QueueError>) -> Result<ProducedOne, QueueError> {
    result.map(|sent| ProducedOne::Sent {
        id: sent.id.to_string(),
        partition: sent.partition,
        duplicate: sent.duplicate,
    })
}

/// A part of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessagePage {
    messages: Vec<MessageView>,
    /// Where the next part begins: pass it as `cursor`. `null` after the last one.
    next_cursor: Option<String>,
}

/// Which messages.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// The oldest: an entry id or a time.
    from: Option<String>,
    /// The newest: an entry id or a time.
    to: Option<String>,
    /// The newest first.
    #[serde(default)]
    newest_first: bool,
    partition: Option<u16>,
    /// At most this many; 100 by default, 1000 at most.
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// Messages of all partitions in the order they were stored, handled or not.
#[utoipa::path(get, path = "/topics/{topic}/messages", tag = "messages", params(("topic" = String, Path), ListQuery),
    responses((status = 200, body = MessagePage), (status = 404)))]
async fn list(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    QueryOf(query): QueryOf<ListQuery>,
) -> Answer<MessagePage> {
    let bound = |what, text: Option<String>| {
        let point = text.map(|text| point(what, &text)).transpose()?;
        Ok::<_, ApiError>(point.map(|point| match point {
            Point::Id(id) => Bound::Id(id),
            Point::Time(at) => Bound::Time(at),
        }))
    };
    let defaults = MessageQuery::default();
    let asked = MessageQuery {
        from: bound("from", query.from)?,
        to: bound("to", query.to)?,
        direction: if query.newest_first { Direction::Backward } else { Direction::Forward },
        partition: query.partition,
        limit: query.limit.unwrap_or(defaults.limit),
        cursor: query.cursor,
    };
    let page = operations.queue.inspect().messages(&topic, &asked).await?;
    let items = page.items.into_iter().map(|stored| MessageView::new(&topic, stored)).collect();
    Ok(Json(MessagePage { messages: items, next_cursor: page.next }))
}

/// Where to begin.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TailQuery {
    /// `beginning`, an entry id, or a time. By default: what comes after now.
    from: Option<String>,
    partition: Option<u16>,
}

/// Follows a topic: one server-sent event `message` for each message as it arrives.
#[utoipa::path(get, path = "/topics/{topic}/tail", tag = "messages", params(("topic" = String, Path), TailQuery),
    responses((status = 200, content_type = "text/event-stream", body = MessageView),
        (status = 429, description = "Too many tails are open.")))]
async fn tail(
    State(operations): State<Operations>,
    PathOf(topic): PathOf<String>,
    QueryOf(query): QueryOf<TailQuery>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let start = match query.from.as_deref() {
        None => TailStart::End,
        Some("beginning") => TailStart::Beginning,
        Some(text) => match point("from", text)? {
            // A tail goes over partitions, whose ids are times.
            Point::Id(id) => {
                TailStart::Time(headwater_stream::clock::Timestamp::from_millis(id.ms))
            }
            Point::Time(at) => TailStart::Time(at),
        },
    };
    let place = Arc::clone(&operations.tails).try_acquire_owned().map_err(|_| {
        let message = format!("{TAILS_MAX} tails are open here already; end one, or try again");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "busy", message).retry_after(BUSY_FOR)
    })?;
    let config = TailConfig { start, partition: query.partition, ..TailConfig::default() };
    let tail = operations.queue.tail(&topic, config).await?;
    let stopping = operations.stopping.clone();
    // The place goes with the body of the answer.
    let state = (tail, topic, stopping, place);
    let batches = stream::unfold(state, |(mut tail, topic, stopping, place)| async move {
        let read = loop {
            if stopping.has_begun() {
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
                    .map(|stored| event("message", &MessageView::new(&topic, stored)))
                    .collect();
                Some((events, (tail, topic, stopping, place)))
            }
            Err(error) => {
                debug!(%topic, %error, "a tail ended");
                None
            }
        }
    });
    let events = batches.flat_map(stream::iter);
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

pub(super) fn event<T: Serialize>(name: &str, data: &T) -> Result<Event, Infallible> {
    let event = Event::default().event(name);
    Ok(event.json_data(data).unwrap_or_else(|_| Event::default().comment("not shown")))
}

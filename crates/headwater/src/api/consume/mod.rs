//! Consume: messages handed out to a caller one by one, and taken back with what became of them.
//!
//! Upstream: the verb `consume` and other programs over HTTP. Downstream: a subscription of `headwater-queue`, whose
//! handler waits for the caller's word; `attendance` keeps who has what in hand.
//! Promises: a message is done when the caller says so and not before. A caller that ends well gives back what it has
//! without counting an attempt; one that vanishes, or is not heard of for [`LEASE`], has failed with what it was handed.
//! Not here: order and retries, which are those of every consumer.

pub(crate) mod session;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use futures_util::Stream;
use headwater_issue::STREAM;
use headwater_queue::{
    ConsumerConfig, Headers, Message, Mode, Outcome, Policies, Queue, QueueError,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::Operations;
use crate::api::consume::session::{Attendance, CONSUMERS_MAX, Consumers, End};
use crate::api::dto::{Payload, all, milliseconds};
use crate::api::messages::event;
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Caller;
use crate::http::body::{Answer, JsonBody};
use crate::http::extract::PathOf;
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::server::shutdown::Stopping;
use crate::tickets::TICKET_EVENTS;

/// A caller that is not heard of for so long has vanished.
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// How long a stop waits for what was said last to be acknowledged.
const DRAIN: Duration = Duration::from_secs(5);
/// Messages that one caller has in hand, at most.
const IN_FLIGHT_MAX: usize = 1000;
/// How the names of streams begin that lie under a key of the bus or of a topic with partitions.
const KEYS: [&str; 3] = ["stream:topic:", "streaming:mq:", "wink:"];
/// The groups of `ticket_events` that the desk and analytics are.
const DESK_GROUPS: [&str; 2] = [AI_PROCESSOR_GROUP, "analytics_group"];
/// Characters of a reason.
const REASON_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(consume)).routes(routes!(settle)).routes(routes!(leave))
}

/// How to consume.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConsumeWish {
    /// `owned` (default): partitions have one reader each, in order. `shared`: readers compete.
    #[serde(default)]
    mode: ModeName,
    /// Messages of one partition that are handled at once; 1 by default, 1000 at most.
    #[serde(default = "one")]
    concurrency: usize,
    /// Messages in hand at once, read ahead included; 1000 by default and at most.
    #[serde(default = "in_flight_max")]
    in_flight: usize,
}

/// How a group shares partitions.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModeName {
    /// Partitions have one reader each, in order.
    #[default]
    Owned,
    /// Readers compete.
    Shared,
}

fn one() -> usize {
    1
}

fn in_flight_max() -> usize {
    IN_FLIGHT_MAX
}

/// The first event, `consumer`: what to name when settling.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Admitted {
    consumer: String,
    /// Settle something, or nothing, at least this often.
    lease_ms: u64,
}

/// A message in hand.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeliveredMessage {
    /// What to name when settling.
    delivery: u64,
    id: String,
    topic: String,
    partition: u16,
    key: Option<String>,
    #[serde(flatten)]
    payload: Payload,
    headers: Headers,
    /// Which try this is, from 1.
    attempt: u32,
    /// How many there are; when the last fails, it is a dead letter.
    attempts_max: u32,
    /// All fields of an entry that another program wrote.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fields: BTreeMap<String, String>,
}

impl DeliveredMessage {
    fn new(delivery: u64, message: &Message, max_retries: u32) -> Self {
        let is_ours = message.fields.get("payload").is_some();
        Self {
            delivery,
            id: message.id.to_string(),
            topic: message.topic.as_str().to_owned(),
            partition: message.partition,
            key: message.key.clone(),
            payload: Payload::of(&message.payload),
            headers: message.headers.clone(),
            attempt: message.attempt,
            attempts_max: message.max_retries.unwrap_or(max_retries).saturating_add(1),
            fields: if is_ours { BTreeMap::new() } else { all(&message.fields) },
        }
    }
}

/// Whether this program's own parts live of these messages: whoever takes one instead of them has changed what it does.
fn is_of_the_system(topic: &str, group: &str) -> bool {
    let is_key = KEYS.iter().any(|key| topic.starts_with(key));
    let is_of_the_desk = topic == TICKET_EVENTS && DESK_GROUPS.contains(&group);
    topic == STREAM || is_key || is_of_the_desk
}

/// Takes part in a group; for the system's own messages that takes the role `admin`. One server-sent event `consumer`, then one
/// `message` for each message. Settle each.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/consume", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path)), request_body = ConsumeWish,
    responses((status = 200, content_type = "text/event-stream", body = DeliveredMessage), (status = 403),
        (status = 503, description = "Too many consume already.")))]
async fn consume(
    State(operations): State<Operations>,
    PathOf((topic, group)): PathOf<(String, String)>,
    caller: Caller,
    JsonBody(wish): JsonBody<ConsumeWish>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    if is_of_the_system(&topic, &group) {
        caller.must_be(Role::Admin)?;
    }
    for (name, count) in [("concurrency", wish.concurrency), ("in_flight", wish.in_flight)] {
        if !(1..=IN_FLIGHT_MAX).contains(&count) {
            return Err(ApiError::invalid(format!("`{name}` is {count}; 1 to {IN_FLIGHT_MAX}")));
        }
    }
    let attendance = Arc::new(Attendance::new(&topic, &group));
    let consumer = Uuid::new_v4().to_string();
    // The caller may go away at any await: its place goes with this.
    let place =
        Consumers::admit(&operations.consumers, &consumer, &attendance).ok_or_else(|| {
            let message = format!("more than {CONSUMERS_MAX} consume already; try again later");
            let refusal =
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_consumers", message);
            refusal.retry_after(LEASE)
        })?;
    // One message waits to be sent while others are in hand; more are no use.
    let (outlet, outgoing) = mpsc::channel(1);
    let config = ConsumerConfig {
        mode: match wish.mode {
            ModeName::Owned => Mode::Owned,
            ModeName::Shared => Mode::Shared,
        },
        concurrency: wish.concurrency,
        in_flight_max: wish.in_flight.max(wish.concurrency),
        drain: DRAIN,
        ..ConsumerConfig::default()
    };
    let waiting = Arc::clone(&attendance);
    let max_retries = max_retries(&operations.queue, &topic).await?;
    let handler = move |message: Message| {
        let (attendance, outlet) = (Arc::clone(&waiting), outlet.clone());
        async move { hand_out(&attendance, &outlet, &message, max_retries).await }
    };
    // Each caller is a member of its own, and a queue takes part in a group once.
    let queue = Queue::new(Arc::clone(operations.queue.backend()));
    let subscription = queue.subscribe(&topic, &group, handler, config).await?;
    attendance.heard();
    let (gone, stopping) = (Stopping::default(), operations.stopping.clone());
    let (attending, vanished) = (Arc::clone(&attendance), gone.clone());
    operations.consumers.spawn(async move {
        let end = tokio::select! {
            () = vanished.begun() => End::Vanished,
            () = attending.lease_over(LEASE) => End::Vanished,
            () = attending.leaving() => End::Left,
            () = stopping.begun() => End::Left,
        };
        attending.end(end);
        subscription.stop().await;
        drop((queue, place));
        attending.ended();
    });
    let admitted = Admitted { consumer, lease_ms: milliseconds(LEASE) };
    let line = HandingOut { attendance, outgoing, gone, admitted: Some(admitted) };
    let events = futures_util::stream::unfold(line, |mut line| async move {
        let event = line.next().await?;
        Some((event, line))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// How often a message is tried again that does not say so itself.
async fn max_retries(queue: &Queue, topic: &str) -> Result<u32, QueueError> {
    match queue.inspect().topic(topic).await {
        Ok(topic) => Ok(topic.policies.max_retries),
        // A plain one that will be there with its first message.
        Err(QueueError::NoTopic { .. }) => Ok(Policies::default().max_retries),
        Err(error) => Err(error),
    }
}

/// Waits for the caller's word on a message.
async fn hand_out(
    attendance: &Attendance,
    outlet: &mpsc::Sender<DeliveredMessage>,
    message: &Message,
    max_retries: u32,
) -> Outcome {
    let Some((delivery, word)) = attendance.expect() else { return Outcome::Release };
    if outlet.send(DeliveredMessage::new(delivery, message, max_retries)).await.is_err() {
        attendance.forget(delivery);
        return Outcome::Release;
    }
    // Whoever drops the other side has no word to give.
    word.await.unwrap_or(Outcome::Release)
}

/// The body of the answer. When it is dropped before its end, the caller has vanished.
struct HandingOut {
    attendance: Arc<Attendance>,
    outgoing: mpsc::Receiver<DeliveredMessage>,
    gone: Stopping,
    admitted: Option<Admitted>,
}

impl HandingOut {
    async fn next(&mut self) -> Option<Result<Event, Infallible>> {
        if let Some(admitted) = self.admitted.take() {
            return Some(event("consumer", &admitted));
        }
        let message = tokio::select! {
            message = self.outgoing.recv() => message?,
            () = self.attendance.ending() => return None,
        };
        self.attendance.sent(message.delivery);
        Some(event("message", &message))
    }
}

impl Drop for HandingOut {
    fn drop(&mut self) {
        self.gone.begin();
    }
}

/// What became of messages. None is a sign of life.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SettleWish {
    settlements: Vec<Settlement>,
}

/// What became of a message.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settlement {
    delivery: u64,
    outcome: OutcomeName,
    /// Why, for `retry` and `dead_letter`.
    reason: Option<String>,
}

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OutcomeName {
    /// It is done.
    Done,
    /// It failed and is tried again, until it runs out of attempts.
    Retry,
    /// It is given back unhandled; this delivery does not count.
    Release,
    /// It can never succeed.
    DeadLetter,
}

/// Which of them counted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SettleAnswer {
    settled: u64,
    /// Deliveries that are not in hand: settled before, or never handed out.
    unknown: Vec<u64>,
}

/// Says what became of messages; also a sign of life.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/consumers/{consumer}/settle", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path), ("consumer" = String, Path)), request_body = SettleWish,
    responses((status = 200, body = SettleAnswer), (status = 404, description = "It is gone: its lease ran out, or it left.")))]
async fn settle(
    State(operations): State<Operations>,
    PathOf((topic, group, consumer)): PathOf<(String, String, String)>,
    JsonBody(wish): JsonBody<SettleWish>,
) -> Answer<SettleAnswer> {
    let attendance = find(&operations, &topic, &group, &consumer)?;
    attendance.heard();
    let mut answer = SettleAnswer { settled: 0, unknown: Vec::new() };
    for Settlement { delivery, outcome, reason } in wish.settlements {
        let reason: String = reason.unwrap_or_default().chars().take(REASON_MAX).collect();
        let outcome = match outcome {
            OutcomeName::Done => Outcome::Done,
            OutcomeName::Retry => Outcome::retry(reason),
            OutcomeName::Release => Outcome::Release,
            OutcomeName::DeadLetter => Outcome::dead_letter(reason),
        };
        match attendance.settle(delivery, outcome) {
            true => answer.settled += 1,
            false => answer.unknown.push(delivery),
        }
    }
    Ok(Json(answer))
}

/// That it is over.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Left {
    left: bool,
}

/// Leaves the group: what is in hand is given back and counts no attempt; what was settled is acknowledged when this returns.
#[utoipa::path(delete, path = "/topics/{topic}/groups/{group}/consumers/{consumer}", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path), ("consumer" = String, Path)),
    responses((status = 200, body = Left), (status = 404, description = "It is gone already.")))]
async fn leave(
    State(operations): State<Operations>,
    PathOf((topic, group, consumer)): PathOf<(String, String, String)>,
) -> Answer<Left> {
    find(&operations, &topic, &group, &consumer)?.leave().await;
    Ok(Json(Left { left: true }))
}

fn find(
    operations: &Operations,
    topic: &str,
    group: &str,
    consumer: &str,
) -> Result<Arc<Attendance>, ApiError> {
    let found = operations.consumers.find(consumer).filter(|found| found.is_of(topic, group));
    found.ok_or_else(|| {
        let problem = "its lease ran out, or it left; what it had in hand is tried again";
        ApiError::not_found(format!("there is no consumer `{consumer}` here: {problem}"))
    })
}

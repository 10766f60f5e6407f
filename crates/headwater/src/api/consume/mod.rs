//! Consuming over HTTP: delivers messages to a client and takes their outcomes.
//!
//! Upstream: `cli/verbs/consume.rs` and other HTTP clients. Downstream: a subscription of `headwater-queue` whose
//! handler waits for the client's outcome; `session.rs` tracks deliveries in flight.
//! Guarantees: a message is acknowledged only after the client settles it. When a client leaves, its deliveries are
//! released without counting an attempt; when it disconnects or sends nothing for [`LEASE`], its deliveries count as
//! failed attempts. Order and retries are those of every consumer.

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
    ConsumerConfig, Message, MessageHeaders, Mode, Outcome, Policies, Queue, QueueError,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use crate::api::Operations;
use crate::api::consume::session::{CONSUMERS_MAX, ConsumerSession, ConsumerSessions, SessionEnd};
use crate::api::dto::{PayloadDto, all_fields, milliseconds};
use crate::api::messages::event;
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::PathParams;
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::tickets::TICKET_EVENTS;

/// A client that sends nothing for this long is considered lost.
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// How long stopping waits for the last acknowledgements.
const DRAIN: Duration = Duration::from_secs(5);
/// Maximum deliveries in flight of one client.
const IN_FLIGHT_MAX: usize = 1000;
/// Prefixes of stream names that belong to the bus or to topics with partitions.
const RESERVED_PREFIXES: [&str; 3] = ["stream:topic:", "streaming:mq:", "wink:"];
/// Groups of `ticket_events` used by the desk and analytics.
const DESK_GROUPS: [&str; 2] = [AI_PROCESSOR_GROUP, "analytics_group"];
/// Maximum characters of a reason.
const REASON_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(consume)).routes(routes!(settle)).routes(routes!(leave))
}

/// Options of a consumer.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConsumeRequest {
    /// `owned` (default): each partition has one consumer and is processed in order. `shared`: consumers compete.
    #[serde(default)]
    mode: ConsumeMode,
    /// Messages of one partition handled concurrently: 1 by default, 1000 at most.
    #[serde(default = "one")]
    concurrency: usize,
    /// Maximum messages in flight, prefetched ones included: 1000 by default and at most.
    #[serde(default = "in_flight_max")]
    in_flight: usize,
}

/// How a group shares partitions.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ConsumeMode {
    /// Each partition has one consumer and is processed in order.
    #[default]
    Owned,
    /// Consumers compete for messages.
    Shared,
}

fn one() -> usize {
    1
}

fn in_flight_max() -> usize {
    IN_FLIGHT_MAX
}

/// The first event, `consumer`: the id for settling.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ConsumerAdmitted {
    consumer: String,
    /// Settle at least this often, with an empty list if necessary.
    lease_ms: u64,
}

/// A delivered message.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeliveryDto {
    /// Delivery number for settling.
    delivery: u64,
    id: String,
    topic: String,
    partition: u16,
    key: Option<String>,
    #[serde(flatten)]
    payload: PayloadDto,
    headers: MessageHeaders,
    /// Attempt number, starting at 1.
    attempt: u32,
    /// Maximum attempts; after the last failure it becomes a dead letter.
    attempts_max: u32,
    /// All fields of an entry written by another program.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fields: BTreeMap<String, String>,
}

impl DeliveryDto {
    fn new(delivery: u64, message: &Message, max_retries: u32) -> Self {
        let is_ours = message.fields.get("payload").is_some();
        Self {
            delivery,
            id: message.id.to_string(),
            topic: message.topic.as_str().to_owned(),
            partition: message.partition,
            key: message.key.clone(),
            payload: PayloadDto::from_bytes(&message.payload),
            headers: message.headers.clone(),
            attempt: message.attempt,
            attempts_max: message.max_retries.unwrap_or(max_retries).saturating_add(1),
            fields: if is_ours { BTreeMap::new() } else { all_fields(&message.fields) },
        }
    }
}

/// Whether the server itself consumes these messages.
fn is_system_stream(topic: &str, group: &str) -> bool {
    let is_key = RESERVED_PREFIXES.iter().any(|key| topic.starts_with(key));
    let is_of_the_desk = topic == TICKET_EVENTS && DESK_GROUPS.contains(&group);
    topic == STREAM || is_key || is_of_the_desk
}

/// Join a group; for the server's own streams this requires the role `admin`. Sends one server-sent event `consumer`,
/// then one `message` for each delivery. Settle each delivery.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/consume", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path)), request_body = ConsumeRequest,
    responses((status = 200, content_type = "text/event-stream", body = DeliveryDto), (status = 403),
        (status = 503, description = "Too many HTTP consumers.")))]
async fn consume(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
    principal: Principal,
    JsonBody(request): JsonBody<ConsumeRequest>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    if is_system_stream(&topic, &group) {
        principal.require_role(Role::Admin)?;
    }
    for (name, count) in [("concurrency", request.concurrency), ("in_flight", request.in_flight)] {
        if !(1..=IN_FLIGHT_MAX).contains(&count) {
            return Err(ApiError::invalid(format!(
                "invalid `{name}` = {count}; allowed: 1 to {IN_FLIGHT_MAX}"
            )));
        }
    }
    let session = Arc::new(ConsumerSession::new(&topic, &group));
    let consumer = Uuid::new_v4().to_string();
    // The client may disconnect at any await; dropping the permit frees its slot.
    let permit =
        ConsumerSessions::admit(&operations.consumers, &consumer, &session).ok_or_else(|| {
            let message = format!("{CONSUMERS_MAX} HTTP consumers are active; try again later");
            let refusal =
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_consumers", message);
            refusal.retry_after(LEASE)
        })?;
    // Capacity 1: further messages wait in the subscription.
    let (sender, outgoing) = mpsc::channel(1);
    let config = ConsumerConfig {
        mode: match request.mode {
            ConsumeMode::Owned => Mode::Owned,
            ConsumeMode::Shared => Mode::Shared,
        },
        concurrency: request.concurrency,
        in_flight_max: request.in_flight.max(request.concurrency),
        drain: DRAIN,
        ..ConsumerConfig::default()
    };
    let waiting = Arc::clone(&session);
    let max_retries = max_retries(&operations.queue, &topic).await?;
    let handler = move |message: Message| {
        let (session, sender) = (Arc::clone(&waiting), sender.clone());
        async move { deliver(&session, &sender, &message, max_retries).await }
    };
    // Each client is a separate member, and a queue joins a group once.
    let queue = Queue::new(Arc::clone(operations.queue.backend()));
    let subscription = queue.subscribe(&topic, &group, handler, config).await?;
    session.touch();
    let (connection_dropped, shutdown) = (ShutdownSignal::default(), operations.shutdown.clone());
    let (ending, connection_lost) = (Arc::clone(&session), connection_dropped.clone());
    operations.consumers.spawn(async move {
        let end = tokio::select! {
            () = connection_lost.wait() => SessionEnd::Lost,
            () = ending.lease_expired(LEASE) => SessionEnd::Lost,
            () = ending.wait_leave_requested() => SessionEnd::Left,
            () = shutdown.wait() => SessionEnd::Left,
        };
        ending.end(end);
        subscription.stop().await;
        drop((queue, permit));
        ending.ended();
    });
    let admitted = ConsumerAdmitted { consumer, lease_ms: milliseconds(LEASE) };
    let line = DeliveryStream { session, outgoing, connection_dropped, admitted: Some(admitted) };
    let events = futures_util::stream::unfold(line, |mut line| async move {
        let event = line.next().await?;
        Some((event, line))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// Maximum retries of a message that does not specify its own.
async fn max_retries(queue: &Queue, topic: &str) -> Result<u32, QueueError> {
    match queue.inspect().topic(topic).await {
        Ok(topic) => Ok(topic.policies.max_retries),
        // A plain topic that will exist with its first message.
        Err(QueueError::NoTopic { .. }) => Ok(Policies::default().max_retries),
        Err(error) => Err(error),
    }
}

/// Sends a message to the client and waits for its outcome.
async fn deliver(
    session: &ConsumerSession,
    sender: &mpsc::Sender<DeliveryDto>,
    message: &Message,
    max_retries: u32,
) -> Outcome {
    let Some((delivery, outcome)) = session.begin_delivery() else { return Outcome::Release };
    if sender.send(DeliveryDto::new(delivery, message, max_retries)).await.is_err() {
        session.cancel_delivery(delivery);
        return Outcome::Release;
    }
    // The sender is dropped without an outcome when the session ends.
    outcome.await.unwrap_or(Outcome::Release)
}

/// The response body. If it is dropped before its end, the client has disconnected.
struct DeliveryStream {
    session: Arc<ConsumerSession>,
    outgoing: mpsc::Receiver<DeliveryDto>,
    connection_dropped: ShutdownSignal,
    admitted: Option<ConsumerAdmitted>,
}

impl DeliveryStream {
    async fn next(&mut self) -> Option<Result<Event, Infallible>> {
        if let Some(admitted) = self.admitted.take() {
            return Some(event("consumer", &admitted));
        }
        let message = tokio::select! {
            message = self.outgoing.recv() => message?,
            () = self.session.closing() => return None,
        };
        self.session.mark_sent(message.delivery);
        Some(event("message", &message))
    }
}

impl Drop for DeliveryStream {
    fn drop(&mut self) {
        self.connection_dropped.trigger();
    }
}

/// Outcomes of deliveries. An empty list renews the lease.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SettleRequest {
    settlements: Vec<SettlementDto>,
}

/// Outcome of one delivery.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SettlementDto {
    delivery: u64,
    outcome: SettlementOutcome,
    /// Reason for `retry` and `dead_letter`.
    reason: Option<String>,
}

/// Outcome of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SettlementOutcome {
    /// Processed; acknowledge it.
    Done,
    /// Failed; retry until its attempts are exhausted.
    Retry,
    /// Return it unprocessed; the attempt does not count.
    Release,
    /// Move it to the dead letters.
    DeadLetter,
}

/// Result of settling.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SettleResponse {
    settled: u64,
    /// Deliveries not in flight: already settled, or unknown.
    unknown: Vec<u64>,
}

/// Settle deliveries; also renews the lease.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/consumers/{consumer}/settle", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path), ("consumer" = String, Path)), request_body = SettleRequest,
    responses((status = 200, body = SettleResponse), (status = 404, description = "Unknown consumer: its lease expired, or it left.")))]
async fn settle(
    State(operations): State<Operations>,
    PathParams((topic, group, consumer)): PathParams<(String, String, String)>,
    JsonBody(request): JsonBody<SettleRequest>,
) -> JsonResult<SettleResponse> {
    let session = find(&operations, &topic, &group, &consumer)?;
    session.touch();
    let mut answer = SettleResponse { settled: 0, unknown: Vec::new() };
    for SettlementDto { delivery, outcome, reason } in request.settlements {
        let reason: String = reason.unwrap_or_default().chars().take(REASON_MAX).collect();
        let outcome = match outcome {
            SettlementOutcome::Done => Outcome::Done,
            SettlementOutcome::Retry => Outcome::retry(reason),
            SettlementOutcome::Release => Outcome::Release,
            SettlementOutcome::DeadLetter => Outcome::dead_letter(reason),
        };
        match session.settle(delivery, outcome) {
            true => answer.settled += 1,
            false => answer.unknown.push(delivery),
        }
    }
    Ok(Json(answer))
}

/// Result of leaving.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LeaveResponse {
    left: bool,
}

/// Leave the group: deliveries in flight are released without counting an attempt; settled ones are acknowledged when
/// this returns.
#[utoipa::path(delete, path = "/topics/{topic}/groups/{group}/consumers/{consumer}", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path), ("consumer" = String, Path)),
    responses((status = 200, body = LeaveResponse), (status = 404, description = "Unknown consumer: its lease expired, or it left.")))]
async fn leave(
    State(operations): State<Operations>,
    PathParams((topic, group, consumer)): PathParams<(String, String, String)>,
) -> JsonResult<LeaveResponse> {
    find(&operations, &topic, &group, &consumer)?.leave().await;
    Ok(Json(LeaveResponse { left: true }))
}

fn find(
    operations: &Operations,
    topic: &str,
    group: &str,
    consumer: &str,
) -> Result<Arc<ConsumerSession>, ApiError> {
    let found = operations.consumers.find(consumer).filter(|found| found.belongs_to(topic, group));
    found.ok_or_else(|| {
        let problem = "its lease expired, or it left; its deliveries are retried";
        ApiError::not_found(format!("unknown consumer `{consumer}`: {problem}"))
    })
}

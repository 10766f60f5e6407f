//! Consuming over HTTP: pull messages under leases, settle them, extend leases.
//!
//! Upstream: clients in any language; `cli/verbs/consume.rs` is one. Downstream: the `Puller` of `headwater-queue`.
//! Guarantees: a client needs no session. A lease is valid at every server of the same streams and survives their
//! restarts. A message whose lease runs out is given to another client. The number of waiting pulls is limited, in
//! total and per caller; so are the messages of a pull, their bytes, and the leases of a group.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use headwater_queue::limits::{PULL_MAX, PULL_WAIT_MAX};
use headwater_queue::{
    LeaseResult, Message, MessageHeaders, MessageLease, Outcome, PullRequest, PulledMessage,
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{PayloadDto, all_fields, milliseconds};
use crate::api::names::{shown_topic, wire_group};
use crate::api::{BUSY_RETRY_AFTER, Operations, is_internal_stream};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::auth::Principal;
use crate::http::body::{JsonBody, JsonResult};
use crate::http::extract::PathParams;
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::outbound::notifications::NOTIFICATION_GROUP_PREFIX;
use crate::tickets::TICKET_EVENTS;

/// Lease of a pull that does not choose one.
pub(crate) const LEASE_DEFAULT: Duration = Duration::from_secs(30);
/// Maximum waiting pulls in one process, and of one caller.
const PULLS_MAX: usize = 400;
const PULLS_PER_CALLER_MAX: usize = 200;
/// Groups of `ticket_events` used by the desk and analytics.
const DESK_GROUPS: [&str; 2] = [AI_PROCESSOR_GROUP, "analytics_group"];
/// Maximum characters of a reason.
const REASON_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(pull)).routes(routes!(settle)).routes(routes!(extend))
}

/// What to pull.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PullBody {
    /// Maximum messages: 1 by default, 1000 at most.
    #[serde(default = "one")]
    max: usize,
    /// How long to wait for the first message: 20000 by default, 60000 at most, and less than `http.request_timeout`.
    #[serde(default = "long_poll")]
    wait_ms: u64,
    /// How long the messages are leased: 30000 by default, 1000 to 300000.
    #[serde(default = "default_lease")]
    lease_ms: u64,
}

fn one() -> usize {
    1
}

fn long_poll() -> u64 {
    20_000
}

fn default_lease() -> u64 {
    milliseconds(LEASE_DEFAULT)
}

/// Pulled messages; empty if none arrived in time.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PullResponse {
    messages: Vec<PulledMessageDto>,
}

/// A pulled message.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PulledMessageDto {
    /// To settle the message, and to extend its lease.
    lease: String,
    /// Time until the lease runs out.
    lease_ms: u64,
    /// Maximum attempts; after the last failure it becomes a dead letter.
    attempts_max: u32,
    #[serde(flatten)]
    message: ReceivedMessage,
}

/// A message as a consumer gets it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReceivedMessage {
    id: String,
    topic: String,
    partition: u16,
    key: Option<String>,
    #[serde(flatten)]
    payload: PayloadDto,
    headers: MessageHeaders,
    /// Attempt number, starting at 1. Deliveries without an outcome do not count.
    attempt: u32,
    /// How often it was delivered, including to clients whose lease ran out.
    deliveries: u64,
    /// All fields of an entry written by another program.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fields: BTreeMap<String, String>,
}

impl PulledMessageDto {
    fn new(pulled: PulledMessage, now: Instant) -> Self {
        let PulledMessage { lease, message, attempts_max, expires_at } = pulled;
        Self {
            lease: URL_SAFE_NO_PAD.encode(lease.to_string()),
            lease_ms: milliseconds(expires_at.saturating_duration_since(now)),
            attempts_max,
            message: message.into(),
        }
    }
}

impl From<Message> for ReceivedMessage {
    fn from(message: Message) -> Self {
        let is_ours = message.fields.get("payload").is_some();
        Self {
            id: message.id.to_string(),
            topic: shown_topic(message.topic.as_str()).into_owned(),
            partition: message.partition,
            key: message.key,
            payload: PayloadDto::from_bytes(&message.payload),
            headers: message.headers,
            attempt: message.attempt,
            deliveries: message.deliveries,
            fields: if is_ours { BTreeMap::new() } else { all_fields(&message.fields) },
        }
    }
}

/// Fails without the role `admin` if the server itself consumes these messages.
fn guard(principal: &Principal, topic: &str, group: &str) -> Result<(), ApiError> {
    let is_of_the_desk = topic == TICKET_EVENTS
        && (DESK_GROUPS.contains(&group) || group.starts_with(NOTIFICATION_GROUP_PREFIX));
    if is_internal_stream(topic) || is_of_the_desk {
        principal.require_role(Role::Admin)?;
    }
    Ok(())
}

/// Take messages of a group under leases; waits for the first one. The server's own streams require the role `admin`.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/pull", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path)), request_body = PullBody,
    responses((status = 200, body = PullResponse), (status = 403),
        (status = 429, description = "Too many messages of the group are leased, or too many pulls wait.")))]
async fn pull(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
    principal: Principal,
    JsonBody(body): JsonBody<PullBody>,
) -> JsonResult<PullResponse> {
    let (topic, group) = wire_group((topic, group));
    guard(&principal, &topic, &group)?;
    let _slot = operations.pulls.enter(&principal.name)?;
    let wait = Duration::from_millis(body.wait_ms);
    if wait > PULL_WAIT_MAX {
        let most = milliseconds(PULL_WAIT_MAX);
        let message = format!("invalid `wait_ms` = {}; allowed: 0 to {most}", body.wait_ms);
        return Err(ApiError::invalid(message));
    }
    // The response must begin before the request times out.
    let wait = wait.min(operations.http.request_timeout * 2 / 3);
    let lease = Duration::from_millis(body.lease_ms);
    let request = PullRequest { max: body.max, wait, lease };
    let pulled = tokio::select! {
        pulled = operations.puller.pull(&topic, &group, request) => pulled?,
        () = operations.shutdown.wait() => Vec::new(),
    };
    let now = Instant::now();
    let messages = pulled.into_iter().map(|pulled| PulledMessageDto::new(pulled, now)).collect();
    Ok(Json(PullResponse { messages }))
}

/// Outcomes of messages.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SettleRequest {
    /// At most 1000.
    settlements: Vec<SettlementDto>,
}

/// Outcome of one message.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SettlementDto {
    lease: String,
    outcome: SettlementOutcome,
    /// Delay of a `retry`; by default the backoff of the topic's policy.
    after_ms: Option<u64>,
    /// Reason for `retry` and `dead_letter`.
    reason: Option<String>,
}

/// Outcome of a message.
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

impl SettlementDto {
    fn parse(self) -> Result<(MessageLease, Outcome), ApiError> {
        let reason: String = self.reason.unwrap_or_default().chars().take(REASON_MAX).collect();
        let outcome = match self.outcome {
            SettlementOutcome::Done => Outcome::Done,
            SettlementOutcome::Retry => {
                Outcome::Retry { after: self.after_ms.map(Duration::from_millis), reason }
            }
            SettlementOutcome::Release => Outcome::Release,
            SettlementOutcome::DeadLetter => Outcome::DeadLetter { reason },
        };
        Ok((parse_lease(&self.lease)?, outcome))
    }
}

fn parse_lease(text: &str) -> Result<MessageLease, ApiError> {
    let decoded = URL_SAFE_NO_PAD.decode(text).ok().and_then(|text| String::from_utf8(text).ok());
    Ok(decoded.unwrap_or_default().parse()?)
}

/// Results in the order of the request.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SettleResponse {
    results: Vec<SettleOutcome>,
}

/// Result of one settlement.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SettleOutcome {
    /// It took effect.
    Settled,
    /// The message was settled before, or its lease ran out and another client has the message.
    Expired,
}

/// Settle messages, at any server. After an error the call may be repeated.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/settle", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path)), request_body = SettleRequest,
    responses((status = 200, body = SettleResponse), (status = 403)))]
async fn settle(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
    principal: Principal,
    JsonBody(body): JsonBody<SettleRequest>,
) -> JsonResult<SettleResponse> {
    let (topic, group) = wire_group((topic, group));
    guard(&principal, &topic, &group)?;
    limit(body.settlements.len())?;
    let parsed = body.settlements.into_iter().map(SettlementDto::parse);
    let outcomes = parsed.collect::<Result<Vec<_>, _>>()?;
    let results = operations.puller.settle(&topic, &group, outcomes).await?;
    let results = results.into_iter().map(|result| match result {
        LeaseResult::Applied => SettleOutcome::Settled,
        LeaseResult::Expired => SettleOutcome::Expired,
    });
    Ok(Json(SettleResponse { results: results.collect() }))
}

/// Leases to extend.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExtendRequest {
    /// At most 1000.
    leases: Vec<String>,
}

/// Results in the order of the request.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ExtendResponse {
    results: Vec<ExtendOutcome>,
}

/// Result of extending one lease.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ExtendOutcome {
    /// The lease lasts as long as when the message was pulled, from now on.
    Extended,
    /// The message was settled, or its lease ran out and another client has the message.
    Expired,
}

/// Extend leases, at any server: each lasts as long as when its message was pulled, from now on.
#[utoipa::path(post, path = "/topics/{topic}/groups/{group}/extend", tag = "messages",
    params(("topic" = String, Path), ("group" = String, Path)), request_body = ExtendRequest,
    responses((status = 200, body = ExtendResponse), (status = 403)))]
async fn extend(
    State(operations): State<Operations>,
    PathParams((topic, group)): PathParams<(String, String)>,
    principal: Principal,
    JsonBody(body): JsonBody<ExtendRequest>,
) -> JsonResult<ExtendResponse> {
    let (topic, group) = wire_group((topic, group));
    guard(&principal, &topic, &group)?;
    limit(body.leases.len())?;
    let leases: Vec<_> =
        body.leases.iter().map(|lease| parse_lease(lease)).collect::<Result<_, _>>()?;
    let results = operations.puller.extend(&topic, &group, &leases).await?;
    let results = results.into_iter().map(|result| match result {
        LeaseResult::Applied => ExtendOutcome::Extended,
        LeaseResult::Expired => ExtendOutcome::Expired,
    });
    Ok(Json(ExtendResponse { results: results.collect() }))
}

fn limit(leases: usize) -> Result<(), ApiError> {
    if leases <= PULL_MAX {
        return Ok(());
    }
    Err(ApiError::invalid(format!("{leases} leases; at most {PULL_MAX} are allowed in one call")))
}

/// The pulls that wait in this process, by caller.
#[derive(Default)]
pub(super) struct OpenPulls(Mutex<HashMap<String, usize>>);

/// The slot of a waiting pull; freed on drop.
struct PullSlot<'a> {
    pulls: &'a OpenPulls,
    caller: String,
}

impl OpenPulls {
    fn enter(self: &Arc<Self>, caller: &str) -> Result<PullSlot<'_>, ApiError> {
        let mut pulls = self.lock();
        let own = pulls.get(caller).copied().unwrap_or(0);
        if own >= PULLS_PER_CALLER_MAX || pulls.values().sum::<usize>() >= PULLS_MAX {
            let message =
                "too many pulls are waiting; pull more messages at once, or try again later";
            let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_pulls", message);
            return Err(error.retry_after(BUSY_RETRY_AFTER));
        }
        pulls.insert(caller.to_owned(), own + 1);
        Ok(PullSlot { pulls: self, caller: caller.to_owned() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PullSlot<'_> {
    fn drop(&mut self) {
        let mut pulls = self.pulls.lock();
        if let Some(count) = pulls.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                pulls.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pulls_are_limited_per_caller_and_in_total_and_a_dropped_slot_is_free() {
        let pulls = Arc::new(OpenPulls::default());
        let enter = |caller: &str| pulls.enter(caller);
        let mut slots: Vec<_> = (0..PULLS_PER_CALLER_MAX).map(|_| enter("ada").unwrap()).collect();
        assert_eq!(enter("ada").err().unwrap().code(), "too_many_pulls");
        slots.extend((PULLS_PER_CALLER_MAX..PULLS_MAX).map(|_| enter("ben").unwrap()));
        assert_eq!(enter("eve").err().unwrap().code(), "too_many_pulls");
        slots.pop();
        assert!(enter("eve").is_ok());
        slots.clear();
        assert!(pulls.lock().is_empty());
    }
}

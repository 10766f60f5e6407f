//! Messages that wait for their time: retries after a failure and messages that were sent with a delay, each with why it waits.
//!
//! Upstream: the console and `headwater message delayed`. Downstream: the queue, which is only read. Guarantees: at most [`LIMIT_MAX`] of them,
//! those that are due first.

use axum::Json;
use axum::extract::State;
use headwater_queue::DelayedView;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::{PayloadDto, time};
use crate::api::names::{shown_group, wire_topic};
use crate::http::body::JsonResult;
use crate::http::extract::{PathParams, QueryParams};
use crate::http::paging;

/// Default and maximum messages of a response.
const LIMIT_DEFAULT: usize = 50;
const LIMIT_MAX: usize = 500;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(delayed))
}

/// How many.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DelayedListQuery {
    /// Maximum number: 50 by default, 500 at most.
    limit: Option<usize>,
}

/// Messages that wait for their time.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DelayedPage {
    /// Those that are due first.
    delayed: Vec<DelayedMessageDto>,
}

/// A message that waits for its time.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DelayedMessageDto {
    due_at: String,
    partition: Option<u16>,
    key: Option<String>,
    #[serde(flatten)]
    payload: PayloadDto,
    /// Attempt number of its next delivery, starting at 1.
    attempt: u32,
    /// The group that it is retried for; `null` if it was sent with a delay.
    group: Option<String>,
    /// Why it waits.
    sentence: String,
}

/// List the messages of a topic that wait for their time, earliest first, each with why it waits.
#[utoipa::path(get, path = "/topics/{topic}/delayed", tag = "messages", params(("topic" = String, Path), DelayedListQuery),
    responses((status = 200, body = DelayedPage), (status = 404)))]
async fn delayed(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    QueryParams(query): QueryParams<DelayedListQuery>,
) -> JsonResult<DelayedPage> {
    let limit = paging::limit(query.limit, LIMIT_DEFAULT, LIMIT_MAX)?;
    let topic = wire_topic(topic);
    let now = SystemClock.now();
    let found = operations.queue().inspect().delayed(&topic, limit).await?;
    let found = found.into_iter().map(|one| to_dto(&topic, one, now)).collect();
    Ok(Json(DelayedPage { delayed: found }))
}

fn to_dto(topic: &str, one: DelayedView, now: Timestamp) -> DelayedMessageDto {
    let message = one.message.as_ref().ok();
    let attempt = message.map_or(1, |message| message.attempt);
    let group = one.group.map(|group| shown_group(topic, &group).into_owned());
    let cause = match (&one.message, &group) {
        (Err(malformed), _) => format!("It is malformed ({malformed}) and becomes a dead letter"),
        (_, None) => "It was sent with a delay".to_owned(),
        (_, Some(group)) if attempt > 1 => {
            let before = attempt - 1;
            format!(
                "Attempt {before} of group {group} failed, and it waits before attempt {attempt}"
            )
        }
        (_, Some(group)) => format!("It was sent again for group {group}"),
    };
    let due = match one.due_at.as_millis().checked_sub(now.as_millis()) {
        Some(ms @ 1..) => format!("due in {} s", ms.div_ceil(1000)),
        _ => "due now: a consumer of the topic moves it to its partition".to_owned(),
    };
    DelayedMessageDto {
        due_at: time(one.due_at),
        partition: one.partition,
        key: message.and_then(|message| message.key.clone()),
        payload: PayloadDto::from_bytes(message.map_or(b"", |message| &message.payload)),
        attempt,
        group,
        sentence: format!("{cause}; {due}."),
    }
}

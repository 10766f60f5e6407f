//! Which partitions had a new owner in the last hour: who took over what, and when.
//!
//! Upstream: the console and `headwater group moves`. Downstream: the history of topics in the memory of this process. Guarantees:
//! read-only, no call of a backend, bounded by the history.

use axum::Json;
use axum::extract::State;
use headwater_stream::clock::{Clock, SystemClock};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::time;
use crate::api::names::{shown_group, shown_topic, wire_group, wire_topic};
use crate::http::body::JsonResult;
use crate::http::extract::QueryParams;
use crate::http::paging;
use crate::telemetry::history::topics::PartitionMove;

/// Default and maximum moves of a response.
const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(moves))
}

/// Which moves.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PartitionMovesQuery {
    /// Only those of this topic.
    topic: Option<String>,
    /// Only those of this group.
    group: Option<String>,
    /// Maximum number: 100 by default, 1000 at most.
    limit: Option<usize>,
}

/// Partitions that had a new owner.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PartitionMovesResponse {
    /// Newest first.
    moves: Vec<PartitionMoveDto>,
    /// Since when this process has looked, at most an hour ago; `null` if it has not looked yet.
    since: Option<String>,
    /// Whether all groups of all topics are looked at, and all moves since then are in this response.
    complete: bool,
}

/// A partition that had a new owner.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PartitionMoveDto {
    /// When it was noticed, up to ten seconds later.
    at: String,
    topic: String,
    group: String,
    partition: u16,
    /// The owner before; `null` if there was none.
    from: Option<String>,
    /// The owner since then.
    to: String,
    /// Epoch of the new owner: it grows with each move of the partition.
    epoch: u64,
}

/// List the partitions that had a new owner in the last hour, as the answering process noticed them.
#[utoipa::path(get, path = "/assignment/moves", tag = "groups", params(PartitionMovesQuery),
    responses((status = 200, body = PartitionMovesResponse)))]
async fn moves(
    State(operations): State<Operations>,
    QueryParams(query): QueryParams<PartitionMovesQuery>,
) -> JsonResult<PartitionMovesResponse> {
    let limit = paging::limit(query.limit, LIMIT_DEFAULT, LIMIT_MAX)?;
    let topic = query.topic.map(wire_topic);
    let wire_group = |topic: &str| {
        let group = query.group.clone()?;
        Some(wire_group((topic.to_owned(), group)).1)
    };
    let (mut moves, since, has_all) = operations.topic_history().moves(SystemClock.now());
    moves.retain(|one| {
        topic.as_ref().is_none_or(|topic| *topic == one.topic)
            && wire_group(&one.topic).is_none_or(|group| group == one.group)
    });
    let complete = has_all && moves.len() <= limit;
    moves.truncate(limit);
    let moves = moves.into_iter().map(to_dto).collect();
    Ok(Json(PartitionMovesResponse { moves, since: since.map(time), complete }))
}

fn to_dto(one: PartitionMove) -> PartitionMoveDto {
    PartitionMoveDto {
        at: time(one.at),
        group: shown_group(&one.topic, &one.group).into_owned(),
        topic: shown_topic(&one.topic).into_owned(),
        partition: one.partition,
        from: one.from,
        to: one.to,
        epoch: one.epoch,
    }
}

//! Who owns which partition: the partitions of all groups of topics, with owner, lease and lag.
//!
//! Upstream: the console and `headwater group owners`. Downstream: the queue, which is only read. Guarantees: read-only; at most [`TOPICS_MAX`]
//! topics of a page, read [`TOPICS_AT_ONCE`] at a time; a topic or partition whose server does not answer does not hide the others.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use headwater_queue::{GroupPartitionView, GroupView, Mode, QueueError, read_each};
use serde::{Deserialize, Serialize};
use tracing::warn;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::Operations;
use crate::api::dto::{UNREAD, milliseconds};
use crate::api::names::{shown_group, shown_topic, wire_topic};
use crate::http::body::JsonResult;
use crate::http::extract::QueryParams;

/// Maximum topics of a page, and how many are read at a time.
const TOPICS_MAX: usize = 50;
const TOPICS_AT_ONCE: usize = 8;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(owners))
}

/// Which topics.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PartitionOwnersQuery {
    /// Only the groups of this topic.
    topic: Option<String>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// The groups of a page of topics with the owners of their partitions.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PartitionOwnersResponse {
    groups: Vec<GroupOwnersDto>,
    /// Topics whose groups are not listed, because a server of the stream backend does not answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unread_topics: Vec<String>,
    /// Cursor of the next page, or `null`.
    next_cursor: Option<String>,
}

/// A group of a topic.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GroupOwnersDto {
    topic: String,
    group: String,
    /// `owned`, `shared`: every member reads every partition, or `none`: no member is alive.
    mode: &'static str,
    /// Members that are alive, with the number of partitions that they own.
    members: Vec<OwnerShareDto>,
    /// Partitions without an owner that have messages left.
    orphans: u64,
    /// Difference between the most and the fewest partitions of a member; at most 1 if they are shared evenly. 0 while the owner
    /// of a partition is unknown.
    skew: u64,
    partitions: Vec<OwnedPartitionDto>,
}

/// How many partitions a member owns.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct OwnerShareDto {
    member: String,
    partitions: u64,
}

/// A partition of a group.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OwnedPartitionDto {
    partition: u16,
    owner: Option<String>,
    /// Epoch of the owner: it grows with each move of the partition.
    epoch: Option<u64>,
    /// Remaining time of the lease, unless the owner renews it.
    remaining_ms: Option<u64>,
    /// Messages not delivered yet; `null` if the server does not report it, or does not answer.
    lag: Option<u64>,
    /// `null` if the server does not answer.
    pending: Option<u64>,
    /// Why something of the partition is unknown, its owner as well: its server does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<&'static str>,
}

/// List who owns which partition, for all groups of all topics.
#[utoipa::path(get, path = "/assignment", tag = "groups", params(PartitionOwnersQuery),
    responses((status = 200, body = PartitionOwnersResponse), (status = 404)))]
async fn owners(
    State(operations): State<Operations>,
    QueryParams(query): QueryParams<PartitionOwnersQuery>,
) -> JsonResult<PartitionOwnersResponse> {
    let queue = operations.queue();
    if let Some(topic) = query.topic {
        let groups = queue.inspect().groups(&wire_topic(topic)).await?;
        let (groups, unread_topics) = (groups.iter().map(to_dto).collect(), Vec::new());
        return Ok(Json(PartitionOwnersResponse { groups, unread_topics, next_cursor: None }));
    }
    let mut names = queue.topics().list().await?;
    names.sort();
    let after = query.cursor.map(wire_topic).unwrap_or_default();
    names.retain(|name| *name > after);
    let has_more = names.len() > TOPICS_MAX;
    names.truncate(TOPICS_MAX);
    let next = names.last().filter(|_| has_more).map(|name| shown_topic(name).into_owned());
    let read = |name: String| async move {
        let groups = queue.inspect().groups(&name).await;
        (name, groups)
    };
    let reads = names.into_iter().map(read).collect();
    let (mut groups, mut unread_topics) = (Vec::new(), Vec::new());
    for (name, read) in read_each(TOPICS_AT_ONCE, reads).await {
        match read {
            Ok(views) => groups.extend(views.iter().map(to_dto)),
            // Deleted in the meantime.
            Err(QueueError::NoTopic { .. }) => {}
            Err(error) if error.is_transient() => {
                warn!(topic = name, %error, "groups of the topic cannot be read, the others are listed");
                unread_topics.push(shown_topic(&name).into_owned());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(PartitionOwnersResponse { groups, unread_topics, next_cursor: next }))
}

fn to_dto(view: &GroupView) -> GroupOwnersDto {
    let alive = || view.members.iter().filter(|member| member.heartbeat_age.is_some());
    let mode = match alive().next() {
        None => "none",
        Some(_) if alive().any(|member| member.mode == Mode::Shared) => "shared",
        Some(_) => "owned",
    };
    let mut shares: BTreeMap<&str, u64> =
        alive().filter_map(|member| Some((member.consumer.as_deref()?, 0))).collect();
    for owner in view.partitions.iter().filter_map(|partition| partition.owner.as_ref()) {
        *shares.entry(&owner.holder).or_default() += 1;
    }
    let is_orphan = |partition: &&GroupPartitionView| {
        let waits = partition.lag.is_none_or(|lag| lag > 0) || partition.pending > Some(0);
        mode != "shared" && partition.owner.is_none() && partition.problem.is_none() && waits
    };
    let most = shares.values().max().copied().unwrap_or(0);
    let fewest = shares.values().min().copied().unwrap_or(0);
    let partition = |partition: &GroupPartitionView| OwnedPartitionDto {
        partition: partition.partition,
        owner: partition.owner.as_ref().map(|owner| owner.holder.clone()),
        epoch: partition.owner.as_ref().map(|owner| owner.epoch),
        remaining_ms: partition.owner.as_ref().map(|owner| milliseconds(owner.remaining)),
        lag: partition.lag,
        pending: partition.pending,
        problem: partition.problem.as_ref().map(|_| UNREAD),
    };
    let is_complete = view.unread_partitions().is_empty();
    GroupOwnersDto {
        topic: shown_topic(&view.topic).into_owned(),
        group: shown_group(&view.topic, &view.group).into_owned(),
        mode,
        orphans: view.partitions.iter().filter(is_orphan).count() as u64,
        skew: if mode == "owned" && is_complete { most - fewest } else { 0 },
        members: shares
            .iter()
            .map(|(member, partitions)| OwnerShareDto {
                member: (*member).to_owned(),
                partitions: *partitions,
            })
            .collect(),
        partitions: view.partitions.iter().map(partition).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use headwater_queue::{MemberView, OwnerView};

    use super::*;

    #[test]
    fn orphans_and_skew_are_counted() {
        let member = |name: &str| MemberView {
            member: name.to_owned(),
            consumer: Some(name.to_owned()),
            mode: Mode::Owned,
            reserved: Vec::new(),
            heartbeat_age: Some(Duration::ZERO),
        };
        let partition = |partition: u16, owner: Option<&str>, lag: u64| GroupPartitionView {
            partition,
            pending: Some(0),
            lag: Some(lag),
            last_delivered: None,
            last_id: None,
            problem: None,
            owner: owner.map(|holder| OwnerView {
                holder: holder.to_owned(),
                epoch: 7,
                heartbeat_age: Duration::ZERO,
                remaining: Duration::from_secs(2),
            }),
        };
        let view = GroupView {
            topic: "orders".to_owned(),
            group: "g".to_owned(),
            pending: 0,
            lag: Some(5),
            consumers: Vec::new(),
            members: vec![member("a"), member("b")],
            partitions: vec![
                partition(0, Some("a"), 0),
                partition(1, Some("a"), 0),
                partition(2, None, 5),
                partition(3, None, 0),
            ],
        };
        let found = to_dto(&view);
        assert_eq!((found.mode, found.orphans, found.skew), ("owned", 1, 2));
        let share =
            |member: &str, partitions| OwnerShareDto { member: member.to_owned(), partitions };
        assert_eq!(found.members, [share("a", 2), share("b", 0)]);
        assert_eq!(found.partitions[0].remaining_ms, Some(2000));

        // The server of the partition without an owner does not answer.
        let mut unread = view;
        unread.partitions[2].problem = Some("connection refused".to_owned());
        let found = to_dto(&unread);
        assert_eq!((found.mode, found.orphans, found.skew), ("owned", 0, 0));
        assert_eq!(found.partitions[2].problem, Some(UNREAD));
    }
}

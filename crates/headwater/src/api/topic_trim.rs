//! Trims a topic: removes its oldest messages, after a dry run that counts them.
//!
//! Upstream: the console and `headwater topic trim`. Downstream: the queue. Guarantees: only the role `admin` trims; a dry run changes
//! nothing and reads at most [`PAGES_MAX`] pages of messages.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use headwater_queue::{Bound, GroupView, MessageQuery, PartitionView, Queue, QueueError, Trim};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use headwater_stream::{Retention, TrimGuard};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::names::wire_topic;
use crate::api::{Operations, run_to_completion};
use crate::config::Role;
use crate::http::ApiError;
use crate::http::audit::DryRun;
use crate::http::auth::Principal;
use crate::http::body::JsonBody;
use crate::http::extract::PathParams;

/// Messages of a page that counts those beyond an age, and pages of a dry run.
const PAGE: usize = 1000;
const PAGES_MAX: usize = 10;

pub(super) fn routes() -> OpenApiRouter<Operations> {
    OpenApiRouter::new().routes(routes!(trim))
}

/// What to keep; at least one of the first three fields.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrimRequest {
    /// Newest messages of each partition.
    count: Option<u64>,
    /// Messages up to this age in milliseconds.
    age_ms: Option<u64>,
    /// About this many bytes of each partition.
    bytes: Option<u64>,
    /// Only this partition.
    partition: Option<u16>,
    /// Also remove messages that a group has not read or acknowledged; they are lost.
    #[serde(default)]
    force: bool,
    /// Only count what would be removed.
    #[serde(default)]
    dry_run: bool,
}

/// Result of a trim or its dry run.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct TrimResponse {
    /// Messages removed; in a dry run, how many it would be at most.
    removed: u64,
    /// Whether messages are kept because a group still needs them.
    held_back: bool,
    /// `false` for a dry run.
    is_done: bool,
    /// Whether a dry run stopped counting, so that more may be removed.
    or_more: bool,
}

/// Remove the oldest messages.
#[utoipa::path(post, path = "/topics/{topic}/trim", tag = "topics", params(("topic" = String, Path)), request_body = TrimRequest,
    responses((status = 200, body = TrimResponse), (status = 404)))]
async fn trim(
    State(operations): State<Operations>,
    PathParams(topic): PathParams<String>,
    principal: Principal,
    JsonBody(request): JsonBody<TrimRequest>,
) -> Result<(Option<Extension<DryRun>>, Json<TrimResponse>), ApiError> {
    principal.require_role(Role::Admin)?;
    let topic = wire_topic(topic);
    let trim = Trim {
        keep: Retention {
            max_len: request.count,
            max_age: request.age_ms.map(Duration::from_millis),
            max_bytes: request.bytes,
        },
        guard: if request.force { TrimGuard::Force } else { TrimGuard::Safe },
        partition: request.partition,
    };
    let queue = operations.queue.clone();
    if request.dry_run {
        trim.check()?;
        let tried = preview(&queue, &topic, &trim).await?;
        return Ok((DryRun::mark(request.dry_run), Json(tried)));
    }
    let trimming = async move { Ok(queue.trim(&topic, &trim).await?) };
    let report = run_to_completion(trimming).await?;
    let (removed, held_back) = (report.removed, report.held_back);
    Ok((None, Json(TrimResponse { removed, held_back, is_done: true, or_more: false })))
}

/// What a trim would remove.
async fn preview(queue: &Queue, topic: &str, trim: &Trim) -> Result<TrimResponse, ApiError> {
    let view = queue.inspect().topic(topic).await?;
    let last = view.partitions.len().saturating_sub(1);
    if let Some(number) = trim.partition.filter(|number| usize::from(*number) > last) {
        return Err(ApiError::invalid(format!(
            "invalid `partition` = {number}; topic `{topic}` has partitions 0 to {last}"
        )));
    }
    let groups = match trim.guard {
        TrimGuard::Force => Vec::new(),
        _ => queue.inspect().groups(topic).await?,
    };
    let (old, or_more) = match trim.keep.max_age {
        None => (BTreeMap::new(), false),
        Some(age) => count_older(queue, topic, trim.partition, age).await?,
    };
    let mut total = TrimResponse { removed: 0, held_back: false, is_done: false, or_more };
    let is_selected = |number: u16| trim.partition.is_none_or(|only| only == number);
    for partition in view.partitions.iter().filter(|one| is_selected(one.partition)) {
        let old = old.get(&partition.partition).copied().unwrap_or(0);
        let (removed, held_back) = preview_partition(partition, &trim.keep, old, &groups);
        total.removed += removed;
        total.held_back |= held_back;
    }
    Ok(total)
}

/// Messages that are older than an age, by partition, and whether there may be more.
async fn count_older(
    queue: &Queue,
    topic: &str,
    partition: Option<u16>,
    age: Duration,
) -> Result<(BTreeMap<u16, u64>, bool), QueueError> {
    let mut counts = BTreeMap::new();
    let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
    let Some(before) = SystemClock.now().as_millis().saturating_sub(age).checked_sub(1) else {
        return Ok((counts, false));
    };
    let to = Some(Bound::Time(Timestamp::from_millis(before)));
    let mut query = MessageQuery { to, partition, limit: PAGE, ..MessageQuery::default() };
    for _ in 0..PAGES_MAX {
        let page = queue.inspect().messages(topic, &query).await?;
        for message in &page.items {
            *counts.entry(message.partition).or_default() += 1;
        }
        query.cursor = page.next;
        if query.cursor.is_none() {
            return Ok((counts, false));
        }
    }
    Ok((counts, true))
}

/// How many messages of a partition a trim removes at most, and whether a group holds others back. `old` are beyond the age.
fn preview_partition(
    partition: &PartitionView,
    keep: &Retention,
    old: u64,
    groups: &[GroupView],
) -> (u64, bool) {
    let length = partition.length;
    let too_many = keep.max_len.map_or(0, |count| length.saturating_sub(count));
    // Messages of one partition are taken to be of equal size.
    let too_large = match (keep.max_bytes, partition.bytes) {
        (Some(kept), Some(bytes)) if bytes > kept => {
            let share = u128::from(length) * u128::from(bytes - kept) / u128::from(bytes);
            u64::try_from(share).unwrap_or(length)
        }
        _ => 0,
    };
    let wanted = too_many.max(too_large).max(old).min(length);
    let needed = |group: &GroupView| {
        let of_group = group.partitions.iter().find(|one| one.partition == partition.partition);
        of_group.map_or(0, |one| one.lag.unwrap_or(length) + one.pending.unwrap_or(0))
    };
    let needed = groups.iter().map(needed).max().unwrap_or(0);
    let free = length.saturating_sub(needed);
    (wanted.min(free), wanted > free)
}

#[cfg(test)]
mod tests {
    use headwater_queue::GroupPartitionView;

    use super::*;

    fn partition(length: u64, bytes: Option<u64>) -> PartitionView {
        PartitionView { partition: 0, length, first_id: None, last_id: None, bytes }
    }

    fn group(lag: Option<u64>, pending: u64) -> GroupView {
        let partition = GroupPartitionView {
            partition: 0,
            pending: Some(pending),
            lag,
            last_delivered: None,
            last_id: None,
            owner: None,
            problem: None,
        };
        GroupView {
            topic: "orders".to_owned(),
            group: "g".to_owned(),
            pending,
            lag,
            members: Vec::new(),
            consumers: Vec::new(),
            partitions: vec![partition],
        }
    }

    #[test]
    fn the_strictest_limit_counts_and_what_a_group_needs_stays() {
        let by_count = Retention { max_len: Some(4), ..Retention::KEEP_ALL };
        assert_eq!(preview_partition(&partition(10, None), &by_count, 0, &[]), (6, false));
        assert_eq!(preview_partition(&partition(3, None), &by_count, 0, &[]), (0, false));
        assert_eq!(preview_partition(&partition(10, None), &by_count, 8, &[]), (8, false));
        let by_size = Retention { max_bytes: Some(250), ..Retention::KEEP_ALL };
        assert_eq!(preview_partition(&partition(10, Some(1000)), &by_size, 0, &[]), (7, false));
        let reading = [group(Some(3), 2)];
        assert_eq!(preview_partition(&partition(10, None), &by_count, 0, &reading), (5, true));
        let unknown = [group(None, 0)];
        assert_eq!(preview_partition(&partition(10, None), &by_count, 0, &unknown), (0, true));
    }
}

//! Finds abandoned consumer groups that block retention, so that their streams grow without limit.
//!
//! Upstream: `topics.rs`. Downstream: the inspector of `headwater-queue`. Guarantees: read-only.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use headwater_issue::STREAM;
use headwater_queue::{GroupPartitionView, GroupView, Inspector, QueueError, TopicView};

use crate::api::doctor::Finding;
use crate::api::names::{shown_group, shown_topic};
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::outbound::notifications::NOTIFICATION_GROUP_PREFIX;
use crate::text::shell_word;
use crate::tickets::TICKET_EVENTS;
use crate::tickets::desk_events::DESK_EVENTS;

/// The groups of a topic without active members that block its retention. `kept` are the messages that the server keeps of one of
/// its own streams.
pub(super) async fn check(
    inspector: &Inspector,
    topic: &TopicView,
    kept: Option<u64>,
) -> Result<Vec<Finding>, QueueError> {
    let groups = inspector.groups(&topic.name).await?;
    let is_blocking =
        |group: &&GroupView| is_abandoned(group) && blocks_retention(topic, kept, group);
    Ok(groups.iter().filter(is_blocking).map(warning).collect())
}

fn warning(view: &GroupView) -> Finding {
    let GroupView { topic, group, pending, lag, .. } = view;
    let needed_messages =
        lag.map_or_else(|| "messages".to_owned(), |lag| format!("{} messages", lag + pending));
    let found = format!(
        "group `{}` of topic `{}` has no active members and blocks retention: {needed_messages} are kept for it",
        shown_group(topic, group),
        shown_topic(topic)
    );
    let is_of_the_desk = [TICKET_EVENTS, DESK_EVENTS].contains(&topic.as_str());
    let advice = if topic == STREAM || group == AI_PROCESSOR_GROUP {
        "start `headwater serve` or `headwater worker`, which consume it".to_owned()
    } else if let Some(id) =
        group.strip_prefix(NOTIFICATION_GROUP_PREFIX).filter(|_| is_of_the_desk)
    {
        format!(
            "start a server whose settings have the [[notification]] `{id}`, or delete the group: `headwater group delete {topic} {group}`"
        )
    } else {
        let group = shell_word(&shown_group(topic, group));
        let topic = shell_word(&shown_topic(topic));
        format!("start its consumer, or delete the group: `headwater group delete {topic} {group}`")
    };
    Finding::warning("groups", found, &advice)
}

fn is_abandoned(group: &GroupView) -> bool {
    if !group.unread_partitions().is_empty() {
        // An owner may be unknown.
        return false;
    }
    let has_owner = group.partitions.iter().any(|partition| partition.owner.is_some());
    !has_owner && group.members.iter().all(|member| member.heartbeat_age.is_none())
}

fn blocks_retention(topic: &TopicView, kept: Option<u64>, group: &GroupView) -> bool {
    let retention = &topic.policies.retention;
    let is_full = |bytes: Option<u64>, max: Option<u64>| {
        bytes.zip(max).is_some_and(|(bytes, max)| bytes > max)
    };
    let is_over_budget = is_full(topic.bytes, topic.policies.byte_budget);
    group.partitions.iter().zip(&topic.partitions).any(|(group, partition)| {
        let kept = retention.max_len.or(kept);
        let is_long = kept.is_some_and(|kept| needed_messages(group) > kept);
        let is_old = retention
            .max_age
            .is_some_and(|max| partition.first_id.is_some_and(|first| age(first.ms) > max));
        let is_large = is_over_budget || is_full(partition.bytes, retention.max_bytes);
        is_long || (needed_messages(group) > 0 && (is_old || is_large))
    })
}

/// Messages that a group still needs; a lower bound if the server does not report the lag.
fn needed_messages(group: &GroupPartitionView) -> u64 {
    let is_behind = group.last_id > group.last_delivered;
    group.pending.unwrap_or(0) + group.lag.unwrap_or(u64::from(is_behind))
}

fn age(since_ms: u64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_millis(since_ms))
}

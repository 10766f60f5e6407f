//! Finds abandoned consumer groups that block retention, so that their streams grow without limit.
//!
//! Upstream: `streams.rs`. Downstream: the inspector of `headwater-queue`. Guarantees: read-only; checks at most
//! [`TOPICS_MAX`] topics, and says so if there are more.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use headwater_issue::STREAM;
use headwater_queue::{GroupPartitionView, GroupView, Inspector, Queue, QueueError, TopicView};

use crate::api::doctor::Finding;
use crate::api::names::{shown_group, shown_topic};
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::limits::TICKET_EVENTS_KEPT;
use crate::outbound::notifications::NOTIFICATION_GROUP_PREFIX;
use crate::text::shell_word;
use crate::tickets::TICKET_EVENTS;
use crate::tickets::desk_events::DESK_EVENTS;

/// Maximum number of checked topics.
const TOPICS_MAX: usize = 200;
/// Maximum number of groups named individually.
const NAMED_MAX: usize = 20;
/// Retention of the plain streams of the server, which have no policies.
const PLAIN: [(&str, u64); 3] = [
    (STREAM, TICKET_EVENTS_KEPT),
    (TICKET_EVENTS, TICKET_EVENTS_KEPT),
    (DESK_EVENTS, TICKET_EVENTS_KEPT),
];

/// Checks all groups of all topics.
pub(super) async fn check(queue: &Queue) -> Vec<Finding> {
    let mut topics = match queue.topics().list().await {
        Ok(topics) => topics,
        Err(error) => return vec![Finding::warning("groups", error.to_string(), "")],
    };
    let listed = topics_finding(&topics);
    let skipped = topics.len().saturating_sub(TOPICS_MAX);
    topics.truncate(TOPICS_MAX);
    topics.extend(PLAIN.map(|(name, _)| name.to_owned()));
    let mut findings = Vec::new();
    for topic in topics {
        match blocking_groups(&queue.inspect(), &topic).await {
            Ok(found) => findings.extend(found.iter().map(warning)),
            Err(QueueError::NoTopic { .. }) => {}
            Err(error) => findings.push(Finding::warning("groups", error.to_string(), "")),
        }
    }
    let more = findings.len().saturating_sub(NAMED_MAX);
    findings.truncate(NAMED_MAX);
    if more > 0 {
        findings.push(Finding::warning("groups", format!("and {more} more groups"), ""));
    }
    if findings.is_empty() {
        let found = "no abandoned consumer group blocks retention";
        findings.push(Finding::ok("groups", found));
    }
    if skipped > 0 {
        findings.push(Finding::ok("groups", format!("{skipped} topics were not checked")));
    }
    findings.extend(listed);
    findings
}

/// The topics, so that one with a misspelt name is noticed; `None` without topics.
fn topics_finding(topics: &[String]) -> Option<Finding> {
    let named: Vec<_> =
        topics.iter().take(NAMED_MAX).map(|name| format!("`{}`", shown_topic(name))).collect();
    let more = topics.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let found = format!("{} topics: {}{more}", topics.len(), named.join(", "));
    (!topics.is_empty()).then(|| Finding::ok("topics", found))
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

/// The abandoned groups of a topic that block its retention.
async fn blocking_groups(inspector: &Inspector, topic: &str) -> Result<Vec<GroupView>, QueueError> {
    let view = inspector.topic(topic).await?;
    let groups = inspector.groups(topic).await?.into_iter();
    Ok(groups.filter(|group| is_abandoned(group) && blocks_retention(&view, group)).collect())
}

fn is_abandoned(group: &GroupView) -> bool {
    let has_owner = group.partitions.iter().any(|partition| partition.owner.is_some());
    !has_owner && group.members.iter().all(|member| member.heartbeat_age.is_none())
}

fn blocks_retention(topic: &TopicView, group: &GroupView) -> bool {
    let retention = &topic.policies.retention;
    let plain = PLAIN.iter().find(|(name, _)| *name == topic.name).map(|(_, kept)| *kept);
    let is_full = |bytes: Option<u64>, max: Option<u64>| {
        bytes.zip(max).is_some_and(|(bytes, max)| bytes > max)
    };
    let is_over_budget = is_full(topic.bytes, topic.policies.byte_budget);
    group.partitions.iter().zip(&topic.partitions).any(|(group, partition)| {
        let kept = retention.max_len.or(plain);
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
    group.pending + group.lag.unwrap_or(u64::from(is_behind))
}

fn age(since_ms: u64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_millis(since_ms))
}

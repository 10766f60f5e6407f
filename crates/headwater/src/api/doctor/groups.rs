//! Groups that nobody reads for and that more is kept for than their topic keeps: they grow without end.
//!
//! Upstream: `checks`. Downstream: the inspection of `headwater-queue`. Promises: it only looks, at [`TOPICS_MAX`] topics at
//! most, and says so if there are more.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use headwater_issue::STREAM;
use headwater_queue::{GroupPartitionView, GroupView, Inspector, Queue, QueueError, TopicView};

use crate::api::doctor::Finding;
use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::limits::TICKET_EVENTS_KEPT;
use crate::tickets::TICKET_EVENTS;

/// Topics that are looked at.
const TOPICS_MAX: usize = 200;
/// Groups that are named one by one.
const NAMED_MAX: usize = 20;
/// What is kept of topics that nobody created, once everybody has read it.
const PLAIN: [(&str, u64); 2] = [(STREAM, TICKET_EVENTS_KEPT), (TICKET_EVENTS, TICKET_EVENTS_KEPT)];

/// Looks at all groups of all topics.
pub(super) async fn look(queue: &Queue) -> Vec<Finding> {
    let mut topics = match queue.topics().list().await {
        Ok(topics) => topics,
        Err(error) => return vec![Finding::warning("groups", error.to_string(), "")],
    };
    let unseen = topics.len().saturating_sub(TOPICS_MAX);
    topics.truncate(TOPICS_MAX);
    topics.extend(PLAIN.map(|(name, _)| name.to_owned()));
    let mut findings = Vec::new();
    for topic in topics {
        match holding_back(&queue.inspect(), &topic).await {
            Ok(found) => findings.extend(found.iter().map(warning)),
            Err(QueueError::NoTopic { .. }) => {}
            Err(error) => findings.push(Finding::warning("groups", error.to_string(), "")),
        }
    }
    let more = findings.len().saturating_sub(NAMED_MAX);
    findings.truncate(NAMED_MAX);
    if more > 0 {
        findings.push(Finding::warning("groups", format!("and {more} more like these"), ""));
    }
    if findings.is_empty() {
        let found = "none without members holds back a trim";
        findings.push(Finding::fine("groups", found));
    }
    if unseen > 0 {
        findings.push(Finding::fine("groups", format!("{unseen} topics were not looked at")));
    }
    findings
}

fn warning(view: &GroupView) -> Finding {
    let GroupView { topic, group, pending, lag, .. } = view;
    let waiting =
        lag.map_or_else(|| "messages".to_owned(), |lag| format!("{} messages", lag + pending));
    let found = format!(
        "`{group}` of `{topic}` has no member that lives, and {waiting} are kept for it beyond what the topic keeps"
    );
    let advice = if topic == STREAM || group == AI_PROCESSOR_GROUP {
        "start `headwater serve` or `headwater worker`, which read for it".to_owned()
    } else {
        format!("start what reads for it, or remove it: `headwater group delete {topic} {group}`")
    };
    Finding::warning("groups", found, &advice)
}

/// The groups of a topic without members for which more is kept than the topic keeps.
async fn holding_back(inspector: &Inspector, topic: &str) -> Result<Vec<GroupView>, QueueError> {
    let view = inspector.topic(topic).await?;
    let groups = inspector.groups(topic).await?.into_iter();
    Ok(groups.filter(|group| is_left_alone(group) && holds_back(&view, group)).collect())
}

fn is_left_alone(group: &GroupView) -> bool {
    let has_owner = group.partitions.iter().any(|partition| partition.owner.is_some());
    !has_owner && group.members.iter().all(|member| member.heartbeat_age.is_none())
}

fn holds_back(topic: &TopicView, group: &GroupView) -> bool {
    let retention = &topic.policies.retention;
    let plain = PLAIN.iter().find(|(name, _)| *name == topic.name).map(|(_, kept)| *kept);
    let is_full = |bytes: Option<u64>, max: Option<u64>| {
        bytes.zip(max).is_some_and(|(bytes, max)| bytes > max)
    };
    let is_over_budget = is_full(topic.bytes, topic.policies.byte_budget);
    group.partitions.iter().zip(&topic.partitions).any(|(group, partition)| {
        let kept = retention.max_len.or(plain);
        let is_long = kept.is_some_and(|kept| waiting(group) > kept);
        let is_old = retention
            .max_age
            .is_some_and(|max| partition.first_id.is_some_and(|first| age(first.ms) > max));
        let is_large = is_over_budget || is_full(partition.bytes, retention.max_bytes);
        is_long || (waiting(group) > 0 && (is_old || is_large))
    })
}

/// Messages that a group still needs; where the server does not tell the lag, those it certainly does.
fn waiting(group: &GroupPartitionView) -> u64 {
    let is_behind = group.last_id > group.last_delivered;
    group.pending + group.lag.unwrap_or(u64::from(is_behind))
}

fn age(since_ms: u64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_millis(since_ms))
}

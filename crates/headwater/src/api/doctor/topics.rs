//! Checks topics: that they do not grow without a limit, dead letters, and consumer groups (`groups.rs`).
//!
//! Upstream: `streams.rs`. Downstream: the inspector of `headwater-queue`. Guarantees: read-only; checks at most
//! [`TOPICS_MAX`] topics, and says so if there are more.

use headwater_issue::STREAM;
use headwater_queue::{Inspector, Queue, QueueError, TopicView};
use headwater_stream::Retention;

use crate::api::doctor::{Finding, MIB, groups};
use crate::api::names::shown_topic;
use crate::limits::TICKET_EVENTS_KEPT;
use crate::text::shell_word;
use crate::tickets::TICKET_EVENTS;
use crate::tickets::desk_events::DESK_EVENTS;

/// Maximum number of checked topics.
const TOPICS_MAX: usize = 200;
/// Maximum number of findings of a kind, and of topics named in one.
const NAMED_MAX: usize = 20;
/// Messages and bytes above which a topic without a retention is a warning.
const UNLIMITED_LEN: u64 = 100_000;
const UNLIMITED_BYTES: u64 = 100 * MIB;
/// Dead letters of a topic above which they are a warning.
const DEAD_LETTERS_MANY: u64 = 10_000;
/// Plain streams of the server and their retention, because plain topics have no policies.
const PLAIN: [(&str, u64); 3] = [
    (STREAM, TICKET_EVENTS_KEPT),
    (TICKET_EVENTS, TICKET_EVENTS_KEPT),
    (DESK_EVENTS, TICKET_EVENTS_KEPT),
];

/// Messages that the server keeps of one of its plain streams.
fn retention_of_server(topic: &str) -> Option<u64> {
    PLAIN.iter().find(|(name, _)| *name == topic).map(|(_, kept)| *kept)
}

/// Checks all topics.
pub(super) async fn check(queue: &Queue) -> Vec<Finding> {
    let mut topics = match queue.topics().list().await {
        Ok(topics) => topics,
        Err(error) => return vec![Finding::warning("groups", error.to_string(), "")],
    };
    let listed = listed(&topics);
    let skipped = topics.len().saturating_sub(TOPICS_MAX);
    topics.truncate(TOPICS_MAX);
    topics.extend(PLAIN.map(|(name, _)| name.to_owned()));
    let (mut unlimited, mut dead_letters, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for topic in topics {
        match check_one(&queue.inspect(), &topic).await {
            Ok((view, blocking)) => {
                unlimited.extend(unlimited_growth(&view));
                dead_letters.extend(many_dead_letters(&view));
                groups.extend(blocking);
            }
            Err(QueueError::NoTopic { .. }) => {}
            Err(error) => groups.push(Finding::warning("groups", error.to_string(), "")),
        }
    }
    if groups.is_empty() {
        let found = "no abandoned consumer group blocks retention";
        groups.push(Finding::ok("groups", found));
    }
    let mut findings = Vec::new();
    for (subject, found) in
        [("groups", groups), ("dead letters", dead_letters), ("topics", unlimited)]
    {
        let more = found.len().saturating_sub(NAMED_MAX);
        findings.extend(found.into_iter().take(NAMED_MAX));
        if more > 0 {
            findings.push(Finding::warning(subject, format!("and {more} more"), ""));
        }
    }
    if skipped > 0 {
        findings.push(Finding::ok("topics", format!("{skipped} topics were not checked")));
    }
    findings.extend(listed);
    findings
}

/// A topic, and the findings about its groups.
async fn check_one(
    inspector: &Inspector,
    topic: &str,
) -> Result<(TopicView, Vec<Finding>), QueueError> {
    let view = inspector.topic(topic).await?;
    let blocking = groups::check(inspector, &view, retention_of_server(topic)).await?;
    Ok((view, blocking))
}

/// The topics, so that one with a misspelt name is noticed; `None` without topics.
fn listed(topics: &[String]) -> Option<Finding> {
    let named: Vec<_> =
        topics.iter().take(NAMED_MAX).map(|name| format!("`{}`", shown_topic(name))).collect();
    let more = topics.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let found = format!("{} topics: {}{more}", topics.len(), named.join(", "));
    (!topics.is_empty()).then(|| Finding::ok("topics", found))
}

/// A large topic that keeps everything.
fn unlimited_growth(topic: &TopicView) -> Option<Finding> {
    let policies = &topic.policies;
    let is_limited = policies.retention != Retention::KEEP_ALL
        || policies.byte_budget.is_some()
        || retention_of_server(&topic.name).is_some();
    let bytes = topic.bytes.unwrap_or(0);
    if is_limited || (topic.length <= UNLIMITED_LEN && bytes <= UNLIMITED_BYTES) {
        return None;
    }
    let shown = shown_topic(&topic.name);
    let size = if bytes < MIB { String::new() } else { format!(" ({} MiB)", bytes / MIB) };
    let found = format!("topic `{shown}` keeps everything: {} messages{size}", topic.length);
    let name = shell_word(&shown);
    let advice = if topic.layout.is_plain() {
        format!(
            "remove the oldest: `headwater topic trim {name} --count {UNLIMITED_LEN}`; only topics made by `headwater topic create` \
             can have a retention"
        )
    } else {
        format!(
            "set a retention: `headwater topic alter {name} --retention-age 7d`, or `--retention-count`, `--retention-bytes` or \
             `--byte-budget`"
        )
    };
    Some(Finding::warning("topics", found, &advice))
}

/// Dead letters are kept until a person replays or purges them.
fn many_dead_letters(topic: &TopicView) -> Option<Finding> {
    if topic.dead_letters <= DEAD_LETTERS_MANY {
        return None;
    }
    let shown = shown_topic(&topic.name);
    let name = shell_word(&shown);
    let advice = format!(
        "look at them: `headwater dlq list {name}`; then send them again: `headwater dlq replay {name} --all`, or delete them: \
         `headwater dlq purge {name} --all`"
    );
    let found = format!("topic `{shown}` has {} dead letters", topic.dead_letters);
    Some(Finding::warning("dead letters", found, &advice))
}

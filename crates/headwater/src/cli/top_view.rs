//! Computes what `top` shows from two snapshots of topics and groups.
//!
//! Guarantees: a rate is exact unless messages were trimmed between the snapshots; then it is marked as a lower bound.

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::cli::output;

/// Topics and groups at one moment, as returned by the API.
pub(super) struct TopSnapshot {
    pub(super) at: Instant,
    pub(super) topics: Vec<Value>,
    pub(super) groups: Vec<Value>,
}

/// Rates and states between two snapshots.
pub(super) struct Frame {
    topics: Vec<TopTopicRow>,
    groups: Vec<TopGroupRow>,
}

struct TopTopicRow {
    topic: String,
    partitions: u64,
    length: u64,
    delayed: u64,
    dead_letters: u64,
    in_per_second: Throughput,
}

struct TopGroupRow {
    topic: String,
    group: String,
    lag: Option<u64>,
    pending: u64,
    members: u64,
    /// Owners with their number of partitions.
    owners: Vec<(String, u64)>,
    done_per_second: Option<Throughput>,
}

#[derive(Clone, Copy, Default)]
struct Throughput {
    per_second: f64,
    is_at_least: bool,
}

impl Throughput {
    fn shown(self) -> String {
        let sign = if self.is_at_least { ">=" } else { "" };
        format!("{sign}{:.1}", self.per_second)
    }
}

impl Frame {
    pub(super) fn between(before: &TopSnapshot, now: &TopSnapshot) -> Self {
        let seconds = now.at.duration_since(before.at).as_secs_f64().max(0.001);
        let topics: Vec<_> =
            now.topics.iter().map(|topic| topic_row(topic, before, seconds)).collect();
        let groups = now.groups.iter().map(|group| {
            let arrived = topics.iter().find(|topic| topic.topic == group["topic"]);
            let arrived = arrived.map(|topic| topic.in_per_second).unwrap_or_default();
            group_row(group, before, arrived, seconds)
        });
        Self { groups: groups.collect(), topics }
    }

    /// One value for each topic, then one for each group.
    pub(super) fn lines(&self) -> Vec<Value> {
        let topics = self.topics.iter().map(|topic| {
            json!({
                "topic": topic.topic, "partitions": topic.partitions, "length": topic.length,
                "delayed": topic.delayed, "dead_letters": topic.dead_letters,
                "in_per_second": topic.in_per_second.per_second, "is_at_least": topic.in_per_second.is_at_least,
            })
        });
        let groups = self.groups.iter().map(|group| {
            let owners: serde_json::Map<_, _> =
                group.owners.iter().map(|(name, count)| (name.clone(), json!(count))).collect();
            json!({
                "topic": group.topic, "group": group.group, "lag": group.lag, "pending": group.pending,
                "members": group.members, "owners": owners,
                "done_per_second": group.done_per_second.map(|rate| rate.per_second),
                "is_at_least": group.done_per_second.is_some_and(|rate| rate.is_at_least),
            })
        });
        topics.chain(groups).collect()
    }

    pub(super) fn table(&self) -> String {
        let mut topics =
            vec![words(["TOPIC", "PARTITIONS", "LENGTH", "DELAYED", "DEAD LETTERS", "IN/S"])];
        topics.extend(self.topics.iter().map(|topic| {
            let numbers = [topic.partitions, topic.length, topic.delayed, topic.dead_letters];
            let numbers = numbers.map(|number| number.to_string());
            let mut row = vec![output::plain(&topic.topic)];
            row.extend(numbers);
            row.push(topic.in_per_second.shown());
            row
        }));
        let mut groups =
            vec![words(["TOPIC", "GROUP", "LAG", "PENDING", "DONE/S", "MEMBERS", "OWNERS"])];
        groups.extend(self.groups.iter().map(|group| {
            let owners =
                group.owners.iter().map(|(name, count)| format!("{}:{count}", output::plain(name)));
            vec![
                output::plain(&group.topic),
                output::plain(&group.group),
                group.lag.map_or_else(|| "?".to_owned(), |lag| lag.to_string()),
                group.pending.to_string(),
                group.done_per_second.map_or_else(|| "?".to_owned(), Throughput::shown),
                group.members.to_string(),
                owners.collect::<Vec<_>>().join(" "),
            ]
        }));
        [output::columns(&topics), output::columns(&groups)]
            .map(|lines| lines.join("\n"))
            .join("\n\n")
    }
}

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

/// The number of partitions, given as a number or a list.
fn partitions(topic: &Value) -> u64 {
    let list = topic["partitions"].as_array().map(|list| list.len() as u64);
    list.unwrap_or_else(|| number(topic, "partitions"))
}

fn topic_row(topic: &Value, before: &TopSnapshot, seconds: f64) -> TopTopicRow {
    let earlier = before.topics.iter().find(|earlier| earlier["name"] == topic["name"]);
    let rate = earlier.map_or_else(Throughput::default, |earlier| {
        let grown = number(topic, "length").saturating_sub(number(earlier, "length"));
        // A different first entry means that messages were trimmed, so more may have arrived.
        let was_empty = earlier["first_id"].is_null();
        let is_at_least = !was_empty && earlier["first_id"] != topic["first_id"];
        Throughput { per_second: grown as f64 / seconds, is_at_least }
    });
    TopTopicRow {
        topic: topic["name"].as_str().unwrap_or_default().to_owned(),
        partitions: partitions(topic),
        length: number(topic, "length"),
        delayed: number(topic, "delayed"),
        dead_letters: number(topic, "dead_letters"),
        in_per_second: rate,
    }
}

fn group_row(
    group: &Value,
    before: &TopSnapshot,
    arrived: Throughput,
    seconds: f64,
) -> TopGroupRow {
    let earlier = before
        .groups
        .iter()
        .find(|earlier| earlier["topic"] == group["topic"] && earlier["group"] == group["group"]);
    let open = |group: &Value| Some(group["lag"].as_u64()? + number(group, "pending"));
    // Messages that arrived and are neither waiting nor pending are done.
    let done = earlier.and_then(|earlier| {
        let less = open(earlier)? as f64 - open(group)? as f64;
        let per_second = (arrived.per_second + less / seconds).max(0.0);
        Some(Throughput { per_second, is_at_least: arrived.is_at_least })
    });
    let mut owners: Vec<(String, u64)> = Vec::new();
    for partition in group["partitions"].as_array().into_iter().flatten() {
        let Some(holder) = partition["owner"]["holder"].as_str() else { continue };
        match owners.iter_mut().find(|(name, _)| name == holder) {
            Some((_, count)) => *count += 1,
            None => owners.push((holder.to_owned(), 1)),
        }
    }
    TopGroupRow {
        topic: group["topic"].as_str().unwrap_or_default().to_owned(),
        group: group["group"].as_str().unwrap_or_default().to_owned(),
        lag: group["lag"].as_u64(),
        pending: number(group, "pending"),
        members: group["members"].as_array().map_or(0, |members| members.len() as u64),
        owners,
        done_per_second: done,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn snapshot(at: Instant, length: u64, first: &str, lag: u64, pending: u64) -> TopSnapshot {
        let topic = json!({"name": "t", "partitions": 2, "length": length, "delayed": 0, "dead_letters": 3, "first_id": first});
        let owned =
            |partition, holder| json!({"partition": partition, "owner": {"holder": holder}});
        let group = json!({
            "topic": "t", "group": "g", "lag": lag, "pending": pending, "members": [{}],
            "partitions": [owned(0, "a"), owned(1, "a")],
        });
        TopSnapshot { at, topics: vec![topic], groups: vec![group] }
    }

    #[test]
    fn rates_follow_arrivals_and_open_messages() {
        let began = Instant::now();
        let later = began + Duration::from_secs(2);
        let frame =
            Frame::between(&snapshot(began, 10, "1-0", 5, 1), &snapshot(later, 30, "1-0", 9, 3));
        let lines = frame.lines();
        assert_eq!(lines[0]["in_per_second"], 10.0);
        assert_eq!(
            (&lines[0]["is_at_least"], &lines[0]["dead_letters"]),
            (&json!(false), &json!(3))
        );
        // 20 arrived, 6 more are open: 14 are done.
        assert_eq!(lines[1]["done_per_second"], 7.0);
        assert_eq!(lines[1]["owners"], json!({"a": 2}));
        let table = frame.table();
        assert!(table.contains("a:2"), "{table}");
    }

    #[test]
    fn trimming_makes_a_rate_a_lower_bound() {
        let began = Instant::now();
        let later = began + Duration::from_secs(1);
        let frame =
            Frame::between(&snapshot(began, 10, "1-0", 0, 0), &snapshot(later, 15, "2-0", 0, 0));
        assert_eq!(frame.lines()[0]["is_at_least"], true);
        assert!(frame.table().contains(">=5.0"));
    }
}

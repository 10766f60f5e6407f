//! Computes what `top` shows from two snapshots of topics and groups, below the head of `status_view.rs`.
//!
//! Guarantees: the lines are escaped for the terminal; a rate is exact unless messages were trimmed between the snapshots; then it is marked as a lower bound.

use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::cli::output::{self, cell};
use crate::cli::status_view;

/// Topics and groups at one moment, as returned by the API.
pub(super) struct TopSnapshot {
    pub(super) at: Instant,
    pub(super) topics: Vec<Value>,
    pub(super) groups: Vec<Value>,
    /// Whether there are more topics.
    pub(super) left_out: bool,
    /// Issues, workers and the model, if there is a database.
    pub(super) status: Option<Value>,
}

impl TopSnapshot {
    /// A snapshot without topics.
    pub(super) fn empty() -> Self {
        let (topics, groups) = (Vec::new(), Vec::new());
        Self { at: Instant::now(), topics, groups, left_out: false, status: None }
    }
}

/// Rates and states between two snapshots, as `--json` prints them.
pub(super) struct Frame {
    topics: Vec<Value>,
    groups: Vec<Value>,
    status: Option<Value>,
}

impl Frame {
    pub(super) fn between(before: &TopSnapshot, now: &TopSnapshot) -> Self {
        let seconds = now.at.duration_since(before.at).as_secs_f64().max(0.001);
        let topics: Vec<_> =
            now.topics.iter().map(|topic| topic_row(topic, before, seconds)).collect();
        let groups = now.groups.iter().map(|group| {
            let arrived = topics.iter().find(|topic| topic["topic"] == group["topic"]);
            group_row(group, before, arrived.unwrap_or(&Value::Null), seconds)
        });
        let status = now.status.as_ref().map(|status| json!({"status": status}));
        Self { groups: groups.collect(), topics, status }
    }

    /// One value for each topic, then one for each group, then one for issues, workers and the model.
    pub(super) fn lines(&self) -> impl Iterator<Item = &Value> {
        self.topics.iter().chain(&self.groups).chain(&self.status)
    }

    /// Topics and groups, and above them issues, workers and the model.
    pub(super) fn screen(&self) -> Vec<String> {
        let mut lines = match &self.status {
            Some(status) => status_view::lines(&status["status"]),
            None => Vec::new(),
        };
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.extend(self.table());
        lines
    }

    fn table(&self) -> Vec<String> {
        let headings = ["TOPIC", "PARTITIONS", "LENGTH", "DELAYED", "DEAD LETTERS", "IN/S"];
        let topics = self.topics.iter().map(|topic| {
            let names = ["topic", "partitions", "length", "delayed", "dead_letters"];
            let mut row = names.map(|name| cell(name, &topic[name])).to_vec();
            row.push(rate(topic, "in_per_second"));
            row
        });
        let mut lines = table(&headings, topics);
        let headings = ["TOPIC", "GROUP", "LAG", "PENDING", "DONE/S", "MEMBERS", "OWNERS"];
        let groups = self.groups.iter().map(|group| {
            let lag = group["lag"].as_u64().map_or_else(|| "?".to_owned(), |lag| lag.to_string());
            let owners = group["owners"].as_object().into_iter().flatten();
            let owners = owners.map(|(name, count)| format!("{}:{count}", output::plain(name)));
            vec![
                cell("topic", &group["topic"]),
                cell("group", &group["group"]),
                lag,
                cell("pending", &group["pending"]),
                rate(group, "done_per_second"),
                cell("members", &group["members"]),
                owners.collect::<Vec<_>>().join(" "),
            ]
        });
        lines.push(String::new());
        lines.extend(table(&headings, groups));
        lines
    }
}

fn table(headings: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Vec<String> {
    let headings = headings.iter().map(|heading| (*heading).to_owned()).collect();
    let mut lines =
        output::columns(&std::iter::once(headings).chain(rows).collect::<Vec<_>>(), None);
    if let Some(heading) = lines.first_mut() {
        *heading = output::heading(heading);
    }
    lines
}

/// A rate, marked if it is a lower bound; `?` if it is unknown.
fn rate(row: &Value, name: &str) -> String {
    let sign = if row["is_at_least"] == true { ">=" } else { "" };
    row[name].as_f64().map_or_else(|| "?".to_owned(), |rate| format!("{sign}{rate:.1}"))
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

/// The number of partitions, given as a number or a list.
fn partitions(topic: &Value) -> u64 {
    let list = topic["partitions"].as_array().map(|list| list.len() as u64);
    list.unwrap_or_else(|| number(topic, "partitions"))
}

/// Whether the server of a topic answered.
pub(super) fn is_read(topic: &Value) -> bool {
    topic["problem"].is_null()
}

fn topic_row(topic: &Value, before: &TopSnapshot, seconds: f64) -> Value {
    if !is_read(topic) {
        return json!({"topic": topic["name"], "problem": topic["problem"]});
    }
    let mut earlier = before.topics.iter().filter(|earlier| is_read(earlier));
    let earlier = earlier.find(|earlier| earlier["name"] == topic["name"]);
    let (in_per_second, is_at_least) = earlier.map_or((0.0, false), |earlier| {
        let grown = number(topic, "length").saturating_sub(number(earlier, "length"));
        // A different first entry means that messages were trimmed, so more may have arrived.
        let was_empty = earlier["first_id"].is_null();
        (grown as f64 / seconds, !was_empty && earlier["first_id"] != topic["first_id"])
    });
    json!({
        "topic": topic["name"], "partitions": partitions(topic), "length": number(topic, "length"),
        "delayed": number(topic, "delayed"), "dead_letters": number(topic, "dead_letters"),
        "in_per_second": in_per_second, "is_at_least": is_at_least,
    })
}

/// `arrived` is the row of its topic.
fn group_row(group: &Value, before: &TopSnapshot, arrived: &Value, seconds: f64) -> Value {
    let earlier = before
        .groups
        .iter()
        .find(|earlier| earlier["topic"] == group["topic"] && earlier["group"] == group["group"]);
    let open = |group: &Value| Some(group["lag"].as_u64()? + number(group, "pending"));
    // Messages that arrived and are neither waiting nor pending are done.
    let done = earlier.and_then(|earlier| {
        let less = open(earlier)? as f64 - open(group)? as f64;
        Some((arrived["in_per_second"].as_f64().unwrap_or(0.0) + less / seconds).max(0.0))
    });
    let mut owners = Map::new();
    for partition in group["partitions"].as_array().into_iter().flatten() {
        if let Some(holder) = partition["owner"]["holder"].as_str() {
            let count = owners.get(holder).and_then(Value::as_u64).unwrap_or(0);
            owners.insert(holder.to_owned(), json!(count + 1));
        }
    }
    json!({
        "topic": group["topic"], "group": group["group"], "lag": group["lag"].as_u64(),
        "pending": number(group, "pending"), "members": group["members"].as_array().map_or(0, Vec::len),
        "owners": owners, "done_per_second": done,
        "is_at_least": done.is_some() && arrived["is_at_least"] == true,
    })
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
        TopSnapshot { at, topics: vec![topic], groups: vec![group], ..TopSnapshot::empty() }
    }

    #[test]
    fn rates_follow_arrivals_and_open_messages() {
        let began = Instant::now();
        let later = began + Duration::from_secs(2);
        let frame =
            Frame::between(&snapshot(began, 10, "1-0", 5, 1), &snapshot(later, 30, "1-0", 9, 3));
        let lines: Vec<_> = frame.lines().collect();
        assert_eq!(lines[0]["in_per_second"], 10.0);
        assert_eq!(
            (&lines[0]["is_at_least"], &lines[0]["dead_letters"]),
            (&json!(false), &json!(3))
        );
        // 20 arrived, 6 more are open: 14 are done.
        assert_eq!(lines[1]["done_per_second"], 7.0);
        assert_eq!(lines[1]["owners"], json!({"a": 2}));
        let table = frame.table();
        assert!(table.last().unwrap().ends_with("a:2"), "{table:?}");
    }

    #[test]
    fn a_topic_whose_server_does_not_answer_has_no_numbers_and_no_rate_afterwards() {
        let began = Instant::now();
        let later = began + Duration::from_secs(1);
        let mut unread = snapshot(began, 0, "1-0", 0, 0);
        unread.topics = vec![json!({"name": "t", "length": null, "problem": "no answer"})];
        unread.groups.clear();
        let frame = Frame::between(&snapshot(began, 10, "1-0", 0, 0), &unread);
        assert_eq!(*frame.lines().next().unwrap(), json!({"topic": "t", "problem": "no answer"}));
        let row = frame.table()[1].clone();
        assert!(row.starts_with('t') && row.ends_with('?') && !row.contains("10"), "{row:?}");

        let frame = Frame::between(&unread, &snapshot(later, 30, "1-0", 0, 0));
        assert_eq!(frame.lines().next().unwrap()["in_per_second"], 0.0);
    }

    #[test]
    fn trimming_makes_a_rate_a_lower_bound() {
        let began = Instant::now();
        let later = began + Duration::from_secs(1);
        let frame =
            Frame::between(&snapshot(began, 10, "1-0", 0, 0), &snapshot(later, 15, "2-0", 0, 0));
        assert_eq!(frame.lines().next().unwrap()["is_at_least"], true);
        assert!(frame.table()[1].ends_with(">=5.0"));
    }
}

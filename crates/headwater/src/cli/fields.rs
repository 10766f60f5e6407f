//! Fields of API responses: their order, and their labels and values for people.
//!
//! Upstream: `output.rs`. Guarantees: the order depends only on the names, so that the same command always prints the same
//! order, as JSON and for people; JSON keeps every name and value.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use serde_json::{Map, Value};

use crate::cli::units::{show_milliseconds, show_size};
use crate::text::printable;

/// What an object is, its state, its numbers, its times. Other fields follow by name, then those of [`LAST`].
const FIRST: &[&str] = &[
    "subject",
    "severity",
    "id",
    "ticket_id",
    "issue_id",
    "message_id",
    "session",
    "member",
    "name",
    "topic",
    "group",
    "partition",
    "consumer",
    "holder",
    "key",
    "title",
    "author",
    "user_id",
    "integration",
    "provider",
    "external_project_id",
    "external_issue_id",
    "source",
    "event_type",
    "type",
    "kind",
    "target",
    "workload",
    "backend",
    "layout",
    "mode",
    "status",
    "state",
    "processing_status",
    "stage",
    "result",
    "handed_over",
    "handed_over_at",
    "hand_over_reason",
    "assignee",
    "quarantined_at",
    "created",
    "deleted",
    "changed",
    "duplicate",
    "partitions",
    "length",
    "lag",
    "pending",
    "pending_events",
    "delayed",
    "dead_letters",
    "bytes",
    "attempt",
    "attempts",
    "deliveries",
    "failures",
    "last_error",
    "error",
    "reason",
    "sentence",
    "found",
    "advice",
    "total",
    "sent",
    "settled",
    "failed",
    "failed_same_cause",
    "awaited",
    "left",
    "skipped",
    "first_id",
    "last_id",
    "last_delivered",
    "created_at",
    "sent_at",
    "stored_at",
    "failed_at",
    "started_at",
    "updated_at",
    "processed_at",
];
/// Long values.
const LAST: &[&str] = &[
    "headers",
    "content",
    "payload",
    "payload_base64",
    "fields",
    "discussions",
    "events",
    "messages",
];

/// The fields of an object, in order.
pub(super) fn ordered(fields: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut fields: Vec<_> = fields.iter().collect();
    fields.sort_by_key(|(name, _)| (rank(name), *name));
    fields
}

/// The position of a field; those with equal rank follow by name.
pub(super) fn rank(name: &str) -> usize {
    let place = |names: &[&str]| names.iter().position(|known| *known == name);
    let last = place(LAST).map(|place| FIRST.len() + 1 + place);
    place(FIRST).or(last).unwrap_or(FIRST.len())
}

/// JSON on one line with ordered fields.
pub(super) fn to_json(value: &Value) -> String {
    // Serializing JSON to text does not fail.
    serde_json::to_string(&OrderedValue(value)).unwrap_or_default()
}

struct OrderedValue<'a>(&'a Value);

impl Serialize for OrderedValue<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Object(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                for (name, value) in ordered(fields) {
                    map.serialize_entry(name, &OrderedValue(value))?;
                }
                map.end()
            }
            Value::Array(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for item in items {
                    list.serialize_element(&OrderedValue(item))?;
                }
                list.end()
            }
            other => other.serialize(serializer),
        }
    }
}

/// The name of a field for people: `retention_age_ms` is `retention age`.
pub(super) fn label(name: &str) -> String {
    printable(&name.strip_suffix("_ms").unwrap_or(name).replace(['_', '\n'], " "))
}

/// The value of the field `name` for people: `604800000` of `retention_age_ms` is `7 d`. Not escaped.
pub(super) fn text(name: &str, value: &Value) -> String {
    match (value, value.as_u64()) {
        (_, Some(ms)) if name.ends_with("_ms") => show_milliseconds(ms),
        (_, Some(bytes)) if name.split('_').any(|word| word == "bytes" || word == "byte") => {
            show_size(bytes)
        }
        (Value::Null, _) => String::new(),
        (Value::Bool(is), _) => if *is { "yes" } else { "no" }.to_owned(),
        (Value::String(text), _) => text.clone(),
        (Value::Array(items), _) => {
            items.iter().map(|item| text(name, item)).collect::<Vec<_>>().join(", ")
        }
        (Value::Object(fields), _) => match identity(fields) {
            Some(identity) => identity.to_owned(),
            None => to_json(value),
        },
        (other, _) => other.to_string(),
    }
}

/// What a nested object is, if it says so, such as the owner of a partition.
fn identity(fields: &Map<String, Value>) -> Option<&str> {
    ["holder", "session"].into_iter().find_map(|name| fields.get(name)?.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_ordered_from_identity_to_long_values() {
        let value = json!({"zeal": 1, "payload": {"b": 1, "id": 2}, "created_at": "t", "id": 7, "ant": [{"x": 1, "name": "n"}]});
        assert_eq!(
            to_json(&value),
            r#"{"id":7,"created_at":"t","ant":[{"name":"n","x":1}],"zeal":1,"payload":{"id":2,"b":1}}"#
        );
        let reread: Value = serde_json::from_str(&to_json(&value)).unwrap();
        assert_eq!(reread, value);
    }

    #[test]
    fn durations_and_sizes_are_for_people() {
        assert_eq!(
            (label("idle_ms").as_str(), text("idle_ms", &json!(200)).as_str()),
            ("idle", "200 ms")
        );
        assert_eq!(text("byte_budget", &json!(10_000_000)), "10 MB");
        assert_eq!(text("payload_bytes_max", &json!(1_048_576)), "1 MiB");
        assert_eq!(text("duplicate", &json!(false)), "no");
        assert_eq!(text("owner", &json!({"holder": "a-1", "epoch": 7})), "a-1");
    }
}

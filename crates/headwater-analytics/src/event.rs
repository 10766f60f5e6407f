//! A ticket event as a row, parsed from a stream entry.
//!
//! Upstream: entries of `ticket_events`. Downstream: `store` stores it.
//! Guarantees: the nested and the flat form of an event give the same row; a malformed entry is an error with the reason.
//! Not here: what the events mean for a ticket.

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Fields};
use serde::{Deserialize, Serialize};

/// The field that holds the JSON of an event.
const DATA: &str = "data";

/// A ticket event.
#[derive(Clone, Debug, PartialEq)]
pub struct TicketEventRow {
    /// The id of its first entry; `None` if it does not come from a stream.
    pub entry: Option<EntryId>,
    /// `TICKET_CREATED`, `MESSAGE_RECEIVED`, `AI_RESPONSE_GENERATED`, `TICKET_CLOSED`, or a type of another program.
    pub event_type: String,
    /// The ticket.
    pub ticket_id: String,
    /// The message; identifies the event together with type and ticket.
    pub message_id: Option<String>,
    /// The author.
    pub user_id: Option<String>,
    /// The text.
    pub content: Option<String>,
    /// When it happened.
    pub occurred_at: Timestamp,
    /// The metrics of the run, in an `AI_RESPONSE_GENERATED`.
    pub run: RunMetrics,
}

/// Metrics of one run of the model. Unknown values are omitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunMetrics {
    /// Events handled by the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<u32>,
    /// Tokens of the prompts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_in: Option<u32>,
    /// Tokens of the answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_out: Option<u32>,
    /// The cost, in the currency of the price list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// Why an entry is not a ticket event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a ticket event: {0}")]
pub struct MalformedEvent(String);

/// The JSON of the field `data`; `content` and `timestamp` are at its top level or in `payload`.
#[derive(Deserialize)]
struct TicketEventData {
    event_type: String,
    ticket_id: String,
    message_id: Option<String>,
    user_id: Option<String>,
    #[serde(default)]
    payload: TicketEventPayload,
    content: Option<String>,
    timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TicketEventPayload {
    content: Option<String>,
    timestamp: Option<String>,
    #[serde(flatten)]
    run: RunMetrics,
}

impl TicketEventRow {
    /// Parses an entry; `entry` is its original id.
    pub fn read(entry: EntryId, fields: &Fields) -> Result<Self, MalformedEvent> {
        let data =
            fields.get(DATA).ok_or_else(|| MalformedEvent("field `data` is missing".into()))?;
        let data: TicketEventData = serde_json::from_slice(data)
            .map_err(|error| MalformedEvent(format!("`data`: {error}")))?;
        for (name, value) in [("event_type", &data.event_type), ("ticket_id", &data.ticket_id)] {
            if value.is_empty() {
                return Err(MalformedEvent(format!("`{name}` is empty")));
            }
        }
        let TicketEventPayload { content, timestamp, run } = data.payload;
        // Falls back to the time of the entry.
        let occurred_at = timestamp
            .or(data.timestamp)
            .and_then(|time| Timestamp::from_rfc3339(&time))
            .unwrap_or(Timestamp::from_millis(entry.ms));
        Ok(Self {
            entry: Some(entry),
            event_type: data.event_type,
            ticket_id: data.ticket_id,
            message_id: data.message_id,
            user_id: data.user_id,
            content: content.or(data.content),
            occurred_at,
            run,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(data: &str) -> Result<TicketEventRow, MalformedEvent> {
        TicketEventRow::read(EntryId::new(5000, 1), &Fields::new([("data", data.to_owned())]))
    }

    #[test]
    fn the_nested_and_the_flat_form_give_the_same_row() {
        let nested = read(
            r#"{"event_type":"MESSAGE_RECEIVED","ticket_id":"t","message_id":"m","user_id":"u",
                "payload":{"content":"hi","timestamp":"2026-11-15T10:00:00Z"}}"#,
        );
        let flat = read(
            r#"{"event_type":"MESSAGE_RECEIVED","ticket_id":"t","message_id":"m","user_id":"u",
                "content":"hi","timestamp":"2026-11-15T10:00:00Z"}"#,
        );
        assert_eq!(nested, flat);
        assert_eq!(flat.unwrap().content.as_deref(), Some("hi"));
    }

    #[test]
    fn run_metrics_are_parsed() {
        let event = read(
            r#"{"event_type":"AI_RESPONSE_GENERATED","ticket_id":"t",
                "payload":{"events":3,"tokens_in":100,"tokens_out":20,"cost":0.5}}"#,
        );
        let run = event.unwrap().run;
        assert_eq!((run.events, run.tokens_in, run.tokens_out), (Some(3), Some(100), Some(20)));
        assert_eq!(run.cost, Some(0.5));
    }

    #[test]
    fn an_invalid_timestamp_falls_back_to_the_entry_time() {
        let event = read(r#"{"event_type":"X","ticket_id":"t","timestamp":"yesterday"}"#).unwrap();
        assert_eq!(event.occurred_at, Timestamp::from_millis(5000));
    }

    #[test]
    fn a_malformed_entry_fails_with_the_reason() {
        for data in ["", "[]", "{", r#"{"event_type":"X"}"#, r#"{"event_type":"","ticket_id":"t"}"#]
        {
            let error = read(data).unwrap_err().to_string();
            assert!(error.starts_with("not a ticket event: "), "{error}");
        }
        let fields = Fields::new([("payload", "x")]);
        let error = TicketEventRow::read(EntryId::MIN, &fields).unwrap_err().to_string();
        assert_eq!(error, "not a ticket event: field `data` is missing");
    }
}

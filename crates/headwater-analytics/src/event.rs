//! One event of a ticket as a row: what the stream says, made flat.
//!
//! Upstream: entries of `ticket_events`. Downstream: `warehouse` stores it.
//! Promises: the nested and the flat form of an event give the same row; an entry that is no event says why, and its
//! bytes go to the dead letters as they are. Not here: what the events mean for a ticket.

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Fields};
use serde::{Deserialize, Serialize};

/// The field that holds the JSON of an event.
const DATA: &str = "data";

/// An event of a ticket.
#[derive(Clone, Debug, PartialEq)]
pub struct TicketEvent {
    /// The entry it first was; `None` if it does not come from a stream.
    pub entry: Option<EntryId>,
    /// `TICKET_CREATED`, `MESSAGE_RECEIVED`, `AI_RESPONSE_GENERATED`, `TICKET_CLOSED`, or what others write.
    pub event_type: String,
    /// The ticket.
    pub ticket_id: String,
    /// The message; with type and ticket, what the event is known by.
    pub message_id: Option<String>,
    /// Who wrote.
    pub user_id: Option<String>,
    /// What was written.
    pub content: Option<String>,
    /// When.
    pub occurred_at: Timestamp,
    /// What the run that answered took, in an `AI_RESPONSE_GENERATED`.
    pub run: RunFigures,
}

/// What one run of the model took, as far as the event says. What is unknown is not written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunFigures {
    /// Event logs that were answered together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<u32>,
    /// Tokens of the prompts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_in: Option<u32>,
    /// Tokens of the answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_out: Option<u32>,
    /// What they cost, in the currency of the price list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// Why an entry is no event of a ticket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an event of a ticket: {0}")]
pub struct NotAnEvent(String);

/// The JSON under `data`; `content` and `timestamp` may lie at its top or in its `payload`.
#[derive(Deserialize)]
struct Data {
    event_type: String,
    ticket_id: String,
    message_id: Option<String>,
    user_id: Option<String>,
    #[serde(default)]
    payload: Payload,
    content: Option<String>,
    timestamp: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Payload {
    content: Option<String>,
    timestamp: Option<String>,
    #[serde(flatten)]
    run: RunFigures,
}

impl TicketEvent {
    /// Reads the entry that was first stored as `entry`.
    pub fn read(entry: EntryId, fields: &Fields) -> Result<Self, NotAnEvent> {
        let data = fields.get(DATA).ok_or_else(|| NotAnEvent("it has no field `data`".into()))?;
        let data: Data =
            serde_json::from_slice(data).map_err(|error| NotAnEvent(format!("`data`: {error}")))?;
        for (name, value) in [("event_type", &data.event_type), ("ticket_id", &data.ticket_id)] {
            if value.is_empty() {
                return Err(NotAnEvent(format!("`{name}` is empty")));
            }
        }
        let Payload { content, timestamp, run } = data.payload;
        // A time that cannot be read costs no event: the entry knows when it came.
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

    fn read(data: &str) -> Result<TicketEvent, NotAnEvent> {
        TicketEvent::read(EntryId::new(5000, 1), &Fields::new([("data", data.to_owned())]))
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
    fn the_figures_of_a_run_are_read() {
        let event = read(
            r#"{"event_type":"AI_RESPONSE_GENERATED","ticket_id":"t",
                "payload":{"events":3,"tokens_in":100,"tokens_out":20,"cost":0.5}}"#,
        );
        let run = event.unwrap().run;
        assert_eq!((run.events, run.tokens_in, run.tokens_out), (Some(3), Some(100), Some(20)));
        assert_eq!(run.cost, Some(0.5));
    }

    #[test]
    fn without_a_readable_time_the_entry_tells_it() {
        let event = read(r#"{"event_type":"X","ticket_id":"t","timestamp":"yesterday"}"#).unwrap();
        assert_eq!(event.occurred_at, Timestamp::from_millis(5000));
    }

    #[test]
    fn what_is_no_event_says_why() {
        for data in ["", "[]", "{", r#"{"event_type":"X"}"#, r#"{"event_type":"","ticket_id":"t"}"#]
        {
            let error = read(data).unwrap_err().to_string();
            assert!(error.starts_with("not an event of a ticket: "), "{error}");
        }
        let fields = Fields::new([("payload", "x")]);
        let error = TicketEvent::read(EntryId::MIN, &fields).unwrap_err().to_string();
        assert_eq!(error, "not an event of a ticket: it has no field `data`");
    }
}

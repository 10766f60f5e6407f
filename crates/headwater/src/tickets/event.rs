//! Ticket events in their wire format: JSON in the field `data` of an entry of `ticket_events`.
//!
//! Upstream: `tickets` and other programs write them. Downstream: `inbound::ticket_events_consumer` and `desk` read
//! them.
//! Guarantees: written events have every field of the format. Reading accepts missing optional fields and the flat
//! variant (`content` beside `event_type` instead of below `payload`). Rejects ids that are not UUIDs, unknown types,
//! and text over the limits.

use headwater_analytics::RunMetrics;
use headwater_issue::sanitize_json;
use headwater_stream::clock::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::limits::{CONTENT_BYTES_MAX, TITLE_BYTES_MAX, USER_ID_BYTES_MAX};
use crate::text;

/// The stream of ticket events, and the target of their outbox rows.
pub const TICKET_EVENTS: &str = "ticket_events";

/// What happened to a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TicketEventType {
    /// A new ticket was opened, with its first message.
    TicketCreated,
    /// A user, or an agent, sent a message.
    MessageReceived,
    /// The desk answered.
    AiResponseGenerated,
    /// The ticket was closed.
    TicketClosed,
    /// The ticket was reopened. Only in the event log; other programs do not know this type.
    TicketReopened,
}

impl TicketEventType {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TicketCreated => "TICKET_CREATED",
            Self::MessageReceived => "MESSAGE_RECEIVED",
            Self::AiResponseGenerated => "AI_RESPONSE_GENERATED",
            Self::TicketClosed => "TICKET_CLOSED",
            Self::TicketReopened => "TICKET_REOPENED",
        }
    }

    /// The types that are published to the stream.
    pub const PUBLIC: [Self; 4] =
        [Self::TicketCreated, Self::MessageReceived, Self::AiResponseGenerated, Self::TicketClosed];

    /// Parses the types that are published to the stream.
    pub fn parse_public(name: &str) -> Option<Self> {
        Self::PUBLIC.into_iter().find(|one| one.as_str() == name)
    }
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Author {
    /// A user of the desk.
    User,
    /// The model.
    Assistant,
    /// A person of the support team.
    Agent,
}

impl Author {
    /// The name in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Agent => "agent",
        }
    }

    /// Parses a name; `None` if it is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::User, Self::Assistant, Self::Agent].into_iter().find(|one| one.as_str() == name)
    }
}

/// A ticket event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TicketEvent {
    /// What happened.
    pub event_type: TicketEventType,
    /// The ticket.
    pub ticket_id: Uuid,
    /// The message. An event without a message has its own id here.
    pub message_id: Uuid,
    /// The user of the ticket, if known.
    pub user_id: Option<String>,
    /// Text and metadata.
    pub payload: TicketPayload,
}

/// Payload of a ticket event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TicketPayload {
    /// The text.
    pub content: String,
    /// Time in RFC 3339.
    pub timestamp: String,
    /// The title of a new ticket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// The author, if it differs from the default of the event type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub author: Option<Author>,
    /// The name of the agent who wrote the message. The user of the ticket is not the author then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Only in the event log: the event was imported after a later event of the stream that decides the status of the
    /// ticket. It changes no status and needs no answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
    /// Only in the event log: the entry of `ticket_events` that the event was imported from, in sortable form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
    /// Events, tokens and cost of an answer; empty in all other events.
    #[serde(flatten)]
    pub run: RunMetrics,
}

impl TicketPayload {
    /// A payload with only text and time.
    pub fn new(content: impl Into<String>, at: Timestamp) -> Self {
        Self {
            content: content.into(),
            timestamp: at.to_rfc3339(),
            title: None,
            author: None,
            agent: None,
            late: false,
            entry: None,
            run: RunMetrics::default(),
        }
    }
}

impl TicketEvent {
    /// JSON for the stream and the event log.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("names, texts and UUIDs are JSON")
    }

    /// The author of the text.
    pub fn author(&self) -> Author {
        let by_type = match self.event_type {
            TicketEventType::AiResponseGenerated => Author::Assistant,
            _ => Author::User,
        };
        self.payload.author.unwrap_or(by_type)
    }

    /// Parses an event of another program. `fallback_id` is used for an event type without a message id, `now` if the
    /// timestamp is missing.
    pub fn parse_external(data: &[u8], fallback_id: Uuid, now: Timestamp) -> Result<Self, String> {
        let not_an_event = |error: &dyn std::fmt::Display| format!("not a ticket event: {error}");
        let data = std::str::from_utf8(data).map_err(|error| not_an_event(&error))?;
        // Other programs write lone surrogates, which JSON allows and text does not.
        let raw: ExternalEvent = serde_json::from_str(data)
            .or_else(|_| serde_json::from_str(&sanitize_json(data)))
            .map_err(|error| not_an_event(&error))?;
        let event_type = TicketEventType::parse_public(&raw.event_type).ok_or_else(|| {
            format!("unknown event_type `{}`", text::one_line(&raw.event_type, 60))
        })?;
        let ticket_id = uuid("ticket_id", &raw.ticket_id)?;
        let message_id = match raw.message_id.as_deref() {
            Some(id) => uuid("message_id", id)?,
            None if event_type == TicketEventType::TicketClosed => fallback_id,
            None => return Err("`message_id` is missing".to_owned()),
        };
        let inner = raw.payload.unwrap_or_default();
        let content = text::cleaned(&inner.content.or(raw.content).unwrap_or_default());
        if content.len() > CONTENT_BYTES_MAX {
            return Err(format!("`content` is longer than {CONTENT_BYTES_MAX} bytes"));
        }
        let user_id = raw.user_id.map(|user| text::cleaned(&user)).filter(|user| !user.is_empty());
        if user_id.as_ref().is_some_and(|user| user.len() > USER_ID_BYTES_MAX) {
            return Err(format!("`user_id` is longer than {USER_ID_BYTES_MAX} bytes"));
        }
        let timestamp = inner.timestamp.or(raw.timestamp);
        let timestamp = timestamp.as_deref().and_then(Timestamp::from_rfc3339).unwrap_or(now);
        let title = inner.title.or(raw.title).map(|title| text::one_line(&title, TITLE_BYTES_MAX));
        let author = match (event_type, inner.author.as_deref().and_then(Author::parse)) {
            (TicketEventType::MessageReceived, Some(Author::Agent)) => Some(Author::Agent),
            _ => None,
        };
        let agent = inner.agent.filter(|_| author.is_some());
        let agent = agent.map(|agent| text::one_line(&agent, USER_ID_BYTES_MAX));
        let agent = agent.filter(|agent| !agent.is_empty());
        let payload =
            TicketPayload { title, author, agent, ..TicketPayload::new(content, timestamp) };
        Ok(Self { event_type, ticket_id, message_id, user_id, payload })
    }
}

fn uuid(name: &str, text: &str) -> Result<Uuid, String> {
    Uuid::parse_str(text)
        .map_err(|_| format!("`{name}` `{}` is not a UUID", text::one_line(text, 60)))
}

/// The accepted input, including the flat variant. Unknown fields are ignored.
#[derive(Deserialize)]
struct ExternalEvent {
    event_type: String,
    ticket_id: String,
    message_id: Option<String>,
    user_id: Option<String>,
    payload: Option<ExternalPayload>,
    content: Option<String>,
    timestamp: Option<String>,
    title: Option<String>,
}

#[derive(Default, Deserialize)]
struct ExternalPayload {
    content: Option<String>,
    timestamp: Option<String>,
    title: Option<String>,
    author: Option<String>,
    agent: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICKET: &str = "6c1f3a9e-30f6-4f6b-9a2f-2f1f8f6f0a01";
    const MESSAGE: &str = "6c1f3a9e-30f6-4f6b-9a2f-2f1f8f6f0a02";
    const NEW_YEAR: Timestamp = Timestamp::from_millis(1_767_225_600_000);

    fn read(json: &str) -> Result<TicketEvent, String> {
        TicketEvent::parse_external(json.as_bytes(), Uuid::nil(), Timestamp::from_millis(1000))
    }

    #[test]
    fn a_written_event_has_the_documented_json() {
        let event = TicketEvent {
            event_type: TicketEventType::MessageReceived,
            ticket_id: TICKET.parse().unwrap(),
            message_id: MESSAGE.parse().unwrap(),
            user_id: Some("u".into()),
            payload: TicketPayload::new("Hi <b>", NEW_YEAR),
        };
        let expected = format!(
            r#"{{"event_type":"MESSAGE_RECEIVED","ticket_id":"{TICKET}","message_id":"{MESSAGE}","user_id":"u","payload":{{"content":"Hi <b>","timestamp":"2026-01-01T00:00:00.000Z"}}}}"#
        );
        assert_eq!(event.to_json(), expected);
        assert_eq!(read(&expected), Ok(event));
    }

    #[test]
    fn an_answer_contains_its_run_metrics_beside_its_text() {
        let run = RunMetrics {
            events: Some(2),
            tokens_in: Some(300),
            tokens_out: Some(20),
            cost: Some(0.5),
        };
        let payload = TicketPayload { run, ..TicketPayload::new("Hi", NEW_YEAR) };
        let json = serde_json::to_value(&payload).unwrap();
        let expected = serde_json::json!({
            "content": "Hi", "timestamp": "2026-01-01T00:00:00.000Z",
            "events": 2, "tokens_in": 300, "tokens_out": 20, "cost": 0.5,
        });
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_value::<TicketPayload>(json).unwrap(), payload);
    }

    #[test]
    fn the_flat_and_the_minimal_variant_are_read() {
        let flat = format!(
            r#"{{"event_type":"TICKET_CREATED","ticket_id":"{TICKET}","message_id":"{MESSAGE}","content":"flat","extra":1}}"#
        );
        assert_eq!(read(&flat).unwrap().payload.content, "flat");
        let sample = format!(
            r#"{{"event_type": "MESSAGE_RECEIVED", "ticket_id": "{TICKET}", "message_id": "{MESSAGE}"}}"#
        );
        let event = read(&sample).unwrap();
        assert_eq!((event.payload.content.as_str(), event.user_id), ("", None));
        assert_eq!(event.payload.timestamp, "1970-01-01T00:00:01.000Z");
    }

    #[test]
    fn text_with_escapes_that_are_no_characters_is_read() {
        let json = format!(
            r#"{{"event_type":"MESSAGE_RECEIVED","ticket_id":"{TICKET}","message_id":"{MESSAGE}","content":"a\u0000b\ud83d c"}}"#
        );
        assert_eq!(read(&json).unwrap().payload.content, "a\u{fffd}b\u{fffd} c");
    }

    #[test]
    fn an_invalid_event_is_rejected_with_a_reason() {
        let long = "x".repeat(CONTENT_BYTES_MAX + 1);
        for (json, problem) in [
            ("no json".to_owned(), "not a ticket event"),
            (r#"{"event_type":"TICKET_CREATED"}"#.to_owned(), "ticket_id"),
            (format!(r#"{{"event_type":"X","ticket_id":"{TICKET}"}}"#), "unknown event_type"),
            (r#"{"event_type":"TICKET_CREATED","ticket_id":"..."}"#.to_owned(), "not a UUID"),
            (
                format!(r#"{{"event_type":"MESSAGE_RECEIVED","ticket_id":"{TICKET}"}}"#),
                "`message_id` is missing",
            ),
            (
                format!(r#"{{"event_type":"TICKET_REOPENED","ticket_id":"{TICKET}"}}"#),
                "unknown event_type",
            ),
            (
                format!(
                    r#"{{"event_type":"MESSAGE_RECEIVED","ticket_id":"{TICKET}","message_id":"{MESSAGE}","content":"{long}"}}"#
                ),
                "longer than",
            ),
        ] {
            let error = read(&json).unwrap_err();
            assert!(error.contains(problem), "{error} lacks {problem}");
        }
        let closed = format!(r#"{{"event_type":"TICKET_CLOSED","ticket_id":"{TICKET}"}}"#);
        assert_eq!(read(&closed).unwrap().message_id, Uuid::nil());
    }
}

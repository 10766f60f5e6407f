//! The events of tickets as every program sees them: JSON in the field `data` of an entry of `ticket_events`.
//!
//! Upstream: `tickets` writes them, other programs too. Downstream: `intake` and `desk` read them.
//! Promises: what we write has every field of the seed; what we read may lack what it can do without, and may be flat
//! (`content` beside `event_type` instead of below `payload`). Refuses: ids that are no UUIDs, unknown types, text beyond
//! the limits.

use headwater_analytics::RunFigures;
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
    /// The ticket was opened again. Only in our event log: other programs do not know this type.
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

    /// Those that stand in the stream.
    pub fn parse_public(name: &str) -> Option<Self> {
        [Self::TicketCreated, Self::MessageReceived, Self::AiResponseGenerated, Self::TicketClosed]
            .into_iter()
            .find(|one| one.as_str() == name)
    }
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Author {
    /// Somebody who asks.
    User,
    /// The model.
    Assistant,
    /// A person of ours.
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

    /// The author of this name, if there is one.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::User, Self::Assistant, Self::Agent].into_iter().find(|one| one.as_str() == name)
    }
}

/// An event of a ticket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TicketEvent {
    /// What happened.
    pub event_type: TicketEventType,
    /// To which ticket.
    pub ticket_id: Uuid,
    /// By which message. An event without a message has an id of its own here.
    pub message_id: Uuid,
    /// Whose ticket it is, if that is known.
    pub user_id: Option<String>,
    /// The rest.
    pub payload: TicketPayload,
}

/// What an event carries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TicketPayload {
    /// The text.
    pub content: String,
    /// When, as in RFC 3339.
    pub timestamp: String,
    /// The title of a new ticket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Who wrote the text, where it is not who the type says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub author: Option<Author>,
    /// What an answer took; empty in all other events.
    #[serde(flatten)]
    pub run: RunFigures,
}

impl TicketPayload {
    /// A text and nothing else.
    pub fn new(content: impl Into<String>, at: Timestamp) -> Self {
        Self {
            content: content.into(),
            timestamp: at.to_rfc3339(),
            title: None,
            author: None,
            run: RunFigures::default(),
        }
    }
}

impl TicketEvent {
    /// As it stands in a stream and in the event log.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("names, texts and UUIDs are JSON")
    }

    /// Who wrote its text.
    pub fn author(&self) -> Author {
        let by_type = match self.event_type {
            TicketEventType::AiResponseGenerated => Author::Assistant,
            _ => Author::User,
        };
        self.payload.author.unwrap_or(by_type)
    }

    /// Reads what another program wrote. `fallback_id` serves where an event needs no message, `now` where it has no time.
    pub fn read_foreign(data: &[u8], fallback_id: Uuid, now: Timestamp) -> Result<Self, String> {
        let raw: Foreign =
            serde_json::from_slice(data).map_err(|error| format!("no event: {error}"))?;
        let event_type = TicketEventType::parse_public(&raw.event_type).ok_or_else(|| {
            format!("unknown event_type `{}`", text::one_line(&raw.event_type, 60))
        })?;
        let ticket_id = uuid("ticket_id", &raw.ticket_id)?;
        let message_id = match raw.message_id.as_deref() {
            Some(id) => uuid("message_id", id)?,
            None if event_type == TicketEventType::TicketClosed => fallback_id,
            None => return Err("message_id is missing".to_owned()),
        };
        let inner = raw.payload.unwrap_or_default();
        let content = text::cleaned(&inner.content.or(raw.content).unwrap_or_default());
        if content.len() > CONTENT_BYTES_MAX {
            return Err(format!("content is longer than {CONTENT_BYTES_MAX} bytes"));
        }
        let user_id = raw.user_id.map(|user| text::cleaned(&user)).filter(|user| !user.is_empty());
        if user_id.as_ref().is_some_and(|user| user.len() > USER_ID_BYTES_MAX) {
            return Err(format!("user_id is longer than {USER_ID_BYTES_MAX} bytes"));
        }
        let timestamp = inner.timestamp.or(raw.timestamp);
        let timestamp = timestamp.as_deref().and_then(Timestamp::from_rfc3339).unwrap_or(now);
        let title = inner.title.or(raw.title).map(|title| text::one_line(&title, TITLE_BYTES_MAX));
        let author = match (event_type, inner.author.as_deref().and_then(Author::parse)) {
            (TicketEventType::MessageReceived, Some(Author::Agent)) => Some(Author::Agent),
            _ => None,
        };
        let payload = TicketPayload { title, author, ..TicketPayload::new(content, timestamp) };
        Ok(Self { event_type, ticket_id, message_id, user_id, payload })
    }
}

fn uuid(name: &str, text: &str) -> Result<Uuid, String> {
    Uuid::parse_str(text).map_err(|_| format!("{name} `{}` is no UUID", text::one_line(text, 60)))
}

/// What another program may write, the flat variant included. What it adds is ignored.
#[derive(Deserialize)]
struct Foreign {
    event_type: String,
    ticket_id: String,
    message_id: Option<String>,
    user_id: Option<String>,
    payload: Option<ForeignPayload>,
    content: Option<String>,
    timestamp: Option<String>,
    title: Option<String>,
}

#[derive(Default, Deserialize)]
struct ForeignPayload {
    content: Option<String>,
    timestamp: Option<String>,
    title: Option<String>,
    author: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICKET: &str = "6c1f3a9e-30f6-4f6b-9a2f-2f1f8f6f0a01";
    const MESSAGE: &str = "6c1f3a9e-30f6-4f6b-9a2f-2f1f8f6f0a02";
    const NEW_YEAR: Timestamp = Timestamp::from_millis(1_767_225_600_000);

    fn read(json: &str) -> Result<TicketEvent, String> {
        TicketEvent::read_foreign(json.as_bytes(), Uuid::nil(), Timestamp::from_millis(1000))
    }

    #[test]
    fn what_we_write_is_the_json_of_the_seed() {
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
    fn an_answer_carries_what_it_took_beside_its_text() {
        let run = RunFigures {
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
    fn the_flat_variant_and_the_shortest_one_are_read() {
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
    fn what_makes_no_sense_says_why() {
        let long = "x".repeat(CONTENT_BYTES_MAX + 1);
        for (json, problem) in [
            ("no json".to_owned(), "no event"),
            (r#"{"event_type":"TICKET_CREATED"}"#.to_owned(), "ticket_id"),
            (format!(r#"{{"event_type":"X","ticket_id":"{TICKET}"}}"#), "unknown event_type"),
            (r#"{"event_type":"TICKET_CREATED","ticket_id":"..."}"#.to_owned(), "no UUID"),
            (
                format!(r#"{{"event_type":"MESSAGE_RECEIVED","ticket_id":"{TICKET}"}}"#),
                "message_id is missing",
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

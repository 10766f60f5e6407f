//! The conversation of an issue: its history, and what the pending events add.
//!
//! Upstream: `handler`. Downstream: `prompt` renders it for a model.
//! Guarantees: a payload of any shape is read without an error; text is kept unchanged. A conversation over the limit
//! loses its oldest entries. The history is stored in the issue's `discussions`, so it is committed with each run.

use headwater_issue::{EventLog, EventLogId, Issue};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::limits::{CONTENT_BYTES_MAX, THREAD_BYTES_MAX, THREAD_ENTRIES_MAX, USER_ID_BYTES_MAX};
use crate::outbound::marker;
use crate::text;
use crate::tickets::{Author, TicketEvent, TicketEventType};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConversationEntry {
    /// Who wrote it.
    pub author: Author,
    /// The author's name, if the provider sends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The text.
    pub text: String,
    /// Time in RFC 3339.
    pub at: String,
    /// Only for an answer of the desk: it was not sent if newer events had arrived before it was committed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unless_stale: bool,
}

/// The conversation as a run sees it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Conversation {
    /// Messages of earlier runs.
    pub past: Vec<ConversationEntry>,
    /// Messages of the pending events.
    pub pending: Vec<ConversationEntry>,
    /// Whether the issue was handed over to a person.
    pub handed_over: bool,
    /// Whether a user message is unanswered.
    pub needs_answer: bool,
    /// The user of the ticket, if an event names one.
    pub user_id: Option<String>,
}

/// What one event means for the conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
enum EventMeaning {
    Message(ConversationEntry),
    Closed,
    Reopened,
    Irrelevant,
}

/// What the desk stores in the issue's `fields`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct IssueFields {
    handed_over: bool,
    user_id: Option<String>,
}

impl Conversation {
    /// Loads the history of an issue and applies its pending events. `completed` is the newest event log at the time
    /// of the last completed run.
    pub fn load(issue: &Issue, events: &[EventLog], completed: Option<EventLogId>) -> Self {
        // Only the desk writes these columns. If they are invalid, start with an empty history instead of failing
        // every run.
        let past = serde_json::from_str(&issue.discussions).unwrap_or_default();
        let fields: IssueFields = serde_json::from_str(&issue.fields).unwrap_or_default();
        let mut conversation = Self {
            past,
            handed_over: fields.handed_over,
            user_id: fields.user_id,
            ..Self::default()
        };
        // Same condition as `outbound::staleness`. It compares ids, because the clock may have been set back.
        if events.first().is_some_and(|event| completed.is_some_and(|last| event.id <= last)) {
            conversation.retract_stale_answer();
        }
        for event in events {
            conversation.apply(&issue.provider, event);
        }
        conversation.needs_answer &= !conversation.handed_over;
        conversation
    }

    /// The last answer was stale and not sent, so the messages it answered are pending again.
    fn retract_stale_answer(&mut self) {
        if self.past.pop_if(|last| last.unless_stale).is_none() {
            return;
        }
        let answered = self.past.iter().rposition(|entry| entry.author == Author::Assistant);
        self.pending = self.past.split_off(answered.map_or(0, |index| index + 1));
        self.needs_answer = self.pending.last().is_some_and(|entry| entry.author == Author::User);
    }

    fn apply(&mut self, provider: &str, event: &EventLog) {
        match interpret(provider, event, &mut self.user_id) {
            EventMeaning::Message(entry) => {
                // An answer by another author, model or person, counts as an answer.
                self.needs_answer = entry.author == Author::User;
                self.pending.push(entry);
            }
            EventMeaning::Closed => self.needs_answer = false,
            EventMeaning::Reopened => self.handed_over = false,
            EventMeaning::Irrelevant => {}
        }
    }

    /// The history after this run, as JSON for the issue's `discussions`. Drops the oldest entries over the limits.
    pub fn to_discussions(&self, answer: Option<&ConversationEntry>) -> String {
        let all: Vec<&ConversationEntry> =
            self.past.iter().chain(&self.pending).chain(answer).collect();
        let (mut bytes, mut kept) = (2, Vec::new());
        for entry in all.iter().rev().take(THREAD_ENTRIES_MAX) {
            let json = serde_json::to_string(entry).expect("texts are JSON");
            if bytes + json.len() + 1 > THREAD_BYTES_MAX {
                break;
            }
            bytes += json.len() + 1;
            kept.push(json);
        }
        kept.reverse();
        format!("[{}]", kept.join(","))
    }
}

fn interpret(provider: &str, event: &EventLog, user_id: &mut Option<String>) -> EventMeaning {
    let Ok(payload) = serde_json::from_str::<Json>(&event.payload) else {
        return EventMeaning::Irrelevant;
    };
    let at = event.created_at.to_rfc3339();
    let meaning = match provider {
        "desk" => ticket(payload, user_id),
        "github" => github(&payload),
        "gitlab" => gitlab(&payload),
        _ => generic(&payload),
    };
    match meaning {
        EventMeaning::Message(entry) if marker::contains_marker(&entry.text) => {
            EventMeaning::Irrelevant
        }
        EventMeaning::Message(entry) => EventMeaning::Message(ConversationEntry { at, ..entry }),
        other => other,
    }
}

fn user_message(name: Option<&str>, content: &str) -> EventMeaning {
    let content = text::cleaned(content);
    EventMeaning::Message(ConversationEntry {
        author: Author::User,
        name: name.map(|name| text::one_line(name, USER_ID_BYTES_MAX)),
        text: text::cut(&content, CONTENT_BYTES_MAX).to_owned(),
        at: String::new(),
        unless_stale: false,
    })
}

fn ticket(payload: Json, user_id: &mut Option<String>) -> EventMeaning {
    let Ok(event) = serde_json::from_value::<TicketEvent>(payload) else {
        return EventMeaning::Irrelevant;
    };
    if event.user_id.is_some() {
        user_id.clone_from(&event.user_id);
    }
    let author = event.author();
    match event.event_type {
        TicketEventType::TicketClosed => EventMeaning::Closed,
        TicketEventType::TicketReopened => EventMeaning::Reopened,
        _ => {
            let content = match event.payload.title {
                Some(title) => format!("{title}\n\n{}", event.payload.content),
                None => event.payload.content,
            };
            match user_message(event.user_id.as_deref(), &content) {
                EventMeaning::Message(entry) => {
                    EventMeaning::Message(ConversationEntry { author, ..entry })
                }
                other => other,
            }
        }
    }
}

fn text_at<'a>(payload: &'a Json, pointer: &str) -> Option<&'a str> {
    payload.pointer(pointer).and_then(Json::as_str)
}

fn title_and_body(title: Option<&str>, body: Option<&str>) -> String {
    [title, body].into_iter().flatten().collect::<Vec<_>>().join("\n\n")
}

fn github(payload: &Json) -> EventMeaning {
    if payload.get("comment").is_some() {
        return match text_at(payload, "/action") {
            Some("deleted") => EventMeaning::Irrelevant,
            _ => user_message(
                text_at(payload, "/comment/user/login"),
                text_at(payload, "/comment/body").unwrap_or(""),
            ),
        };
    }
    let issue = title_and_body(text_at(payload, "/issue/title"), text_at(payload, "/issue/body"));
    match text_at(payload, "/action") {
        Some("opened" | "edited") => user_message(text_at(payload, "/sender/login"), &issue),
        Some("closed") => EventMeaning::Closed,
        Some("reopened") => EventMeaning::Reopened,
        _ => EventMeaning::Irrelevant,
    }
}

fn gitlab(payload: &Json) -> EventMeaning {
    let name = text_at(payload, "/user/username").or_else(|| text_at(payload, "/user/name"));
    if text_at(payload, "/object_kind") == Some("note") {
        return user_message(name, text_at(payload, "/object_attributes/note").unwrap_or(""));
    }
    let attributes = ["/object_attributes/title", "/object_attributes/description"];
    let [title, body] = attributes.map(|pointer| text_at(payload, pointer));
    match text_at(payload, "/object_attributes/action") {
        // Updates of labels or assignees do not change the text.
        Some("update") if payload.pointer("/changes/description").is_none() => {
            EventMeaning::Irrelevant
        }
        Some("open" | "update") => user_message(name, &title_and_body(title, body)),
        Some("close") => EventMeaning::Closed,
        Some("reopen") => EventMeaning::Reopened,
        _ => EventMeaning::Irrelevant,
    }
}

/// Any other provider: the text from a common field, otherwise the whole payload.
fn generic(payload: &Json) -> EventMeaning {
    let name = ["/user", "/data/user", "/author", "/data/author"];
    let name = name.iter().find_map(|pointer| text_at(payload, pointer));
    let keys = ["content", "text", "message", "body"];
    let text = keys.iter().find_map(|key| {
        text_at(payload, &format!("/{key}")).or_else(|| text_at(payload, &format!("/data/{key}")))
    });
    match text {
        Some(text) => user_message(name, text),
        None => user_message(name, &payload.to_string()),
    }
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;

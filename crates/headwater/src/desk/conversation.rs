//! The thread of an issue: what was said so far, and what the pending events add to it.
//!
//! Upstream: `handler` has an issue and its events. Downstream: `prompt` shows it to a model.
//! Promises: whatever a payload looks like, it is read without an error; text stays what it was. A thread that grows too
//! long forgets its oldest entries. The old part is the issue's `discussions`, so it is committed with each run.

use headwater_issue::{EventLog, EventLogId, Issue};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::limits::{CONTENT_BYTES_MAX, THREAD_BYTES_MAX, THREAD_ENTRIES_MAX, USER_ID_BYTES_MAX};
use crate::outbound::marker;
use crate::text;
use crate::tickets::{Author, TicketEvent, TicketEventType};

/// Something that somebody said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Who.
    pub author: Author,
    /// Their name, where the provider tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What.
    pub text: String,
    /// When, as in RFC 3339.
    pub at: String,
    /// Of an answer of ours: it was not sent if newer events had come before it was committed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unless_stale: bool,
}

/// The thread as a run sees it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Thread {
    /// What earlier runs have seen or said.
    pub past: Vec<Entry>,
    /// What is new.
    pub pending: Vec<Entry>,
    /// Whether a person has taken over.
    pub handed_over: bool,
    /// Whether somebody waits for an answer.
    pub wants_answer: bool,
    /// Whose ticket it is, if an event tells.
    pub user_id: Option<String>,
}

/// What one event means for a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Heard {
    Said(Entry),
    Closed,
    Reopened,
    Nothing,
}

/// What is kept in the issue's fields.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    handed_over: bool,
    user_id: Option<String>,
}

impl Thread {
    /// Reads what is known of an issue and what its pending events add. `completed` is the newest event log that the issue
    /// had when its last run was completed.
    pub fn of(issue: &Issue, events: &[EventLog], completed: Option<EventLogId>) -> Self {
        // Only our own completions write these; if somebody else did, the thread begins anew rather than fail for good.
        let past = serde_json::from_str(&issue.discussions).unwrap_or_default();
        let fields: Fields = serde_json::from_str(&issue.fields).unwrap_or_default();
        let mut thread = Self {
            past,
            handed_over: fields.handed_over,
            user_id: fields.user_id,
            ..Self::default()
        };
        // The same question that the deliverer of the answer asks. By ids: the clock may have been set back since.
        if events.first().is_some_and(|event| completed.is_some_and(|last| event.id <= last)) {
            thread.take_back_answer();
        }
        for event in events {
            thread.hear(&issue.provider, event);
        }
        thread.wants_answer &= !thread.handed_over;
        thread
    }

    /// The last answer was stale and never sent, so what it answered is still to be answered.
    fn take_back_answer(&mut self) {
        if self.past.pop_if(|last| last.unless_stale).is_none() {
            return;
        }
        let answered = self.past.iter().rposition(|entry| entry.author == Author::Assistant);
        self.pending = self.past.split_off(answered.map_or(0, |place| place + 1));
        self.wants_answer = self.pending.last().is_some_and(|entry| entry.author == Author::User);
    }

    fn hear(&mut self, provider: &str, event: &EventLog) {
        match heard(provider, event, &mut self.user_id) {
            Heard::Said(entry) => {
                // An answer of somebody else, model or person, serves as well as ours.
                self.wants_answer = entry.author == Author::User;
                self.pending.push(entry);
            }
            Heard::Closed => self.wants_answer = false,
            Heard::Reopened => self.handed_over = false,
            Heard::Nothing => {}
        }
    }

    /// The thread after this run, as the issue's `discussions`.
    pub fn remembered(&self, answer: Option<&Entry>) -> String {
        let all: Vec<&Entry> = self.past.iter().chain(&self.pending).chain(answer).collect();
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

fn heard(provider: &str, event: &EventLog, user_id: &mut Option<String>) -> Heard {
    let Ok(payload) = serde_json::from_str::<Json>(&event.payload) else { return Heard::Nothing };
    let at = event.created_at.to_rfc3339();
    let heard = match provider {
        "desk" => ticket(payload, user_id),
        "github" => github(&payload),
        "gitlab" => gitlab(&payload),
        _ => plain(&payload),
    };
    match heard {
        Heard::Said(entry) if marker::is_ours(&entry.text) => Heard::Nothing,
        Heard::Said(entry) => Heard::Said(Entry { at, ..entry }),
        other => other,
    }
}

fn said(name: Option<&str>, said: &str) -> Heard {
    let said = text::cleaned(said);
    Heard::Said(Entry {
        author: Author::User,
        name: name.map(|name| text::one_line(name, USER_ID_BYTES_MAX)),
        text: text::cut(&said, CONTENT_BYTES_MAX).to_owned(),
        at: String::new(),
        unless_stale: false,
    })
}

fn ticket(payload: Json, user_id: &mut Option<String>) -> Heard {
    let Ok(event) = serde_json::from_value::<TicketEvent>(payload) else { return Heard::Nothing };
    if event.user_id.is_some() {
        user_id.clone_from(&event.user_id);
    }
    let author = event.author();
    match event.event_type {
        TicketEventType::TicketClosed => Heard::Closed,
        TicketEventType::TicketReopened => Heard::Reopened,
        _ => {
            let content = match event.payload.title {
                Some(title) => format!("{title}\n\n{}", event.payload.content),
                None => event.payload.content,
            };
            match said(event.user_id.as_deref(), &content) {
                Heard::Said(entry) => Heard::Said(Entry { author, ..entry }),
                other => other,
            }
        }
    }
}

fn at<'a>(payload: &'a Json, pointer: &str) -> Option<&'a str> {
    payload.pointer(pointer).and_then(Json::as_str)
}

fn titled(title: Option<&str>, body: Option<&str>) -> String {
    [title, body].into_iter().flatten().collect::<Vec<_>>().join("\n\n")
}

fn github(payload: &Json) -> Heard {
    if payload.get("comment").is_some() {
        return match at(payload, "/action") {
            Some("deleted") => Heard::Nothing,
            _ => {
                said(at(payload, "/comment/user/login"), at(payload, "/comment/body").unwrap_or(""))
            }
        };
    }
    let issue = titled(at(payload, "/issue/title"), at(payload, "/issue/body"));
    match at(payload, "/action") {
        Some("opened" | "edited") => said(at(payload, "/sender/login"), &issue),
        Some("closed") => Heard::Closed,
        Some("reopened") => Heard::Reopened,
        _ => Heard::Nothing,
    }
}

fn gitlab(payload: &Json) -> Heard {
    let name = at(payload, "/user/username").or_else(|| at(payload, "/user/name"));
    if at(payload, "/object_kind") == Some("note") {
        return said(name, at(payload, "/object_attributes/note").unwrap_or(""));
    }
    let attributes = ["/object_attributes/title", "/object_attributes/description"];
    let [title, body] = attributes.map(|pointer| at(payload, pointer));
    match at(payload, "/object_attributes/action") {
        // An update of labels or assignees changes no text.
        Some("update") if payload.pointer("/changes/description").is_none() => Heard::Nothing,
        Some("open" | "update") => said(name, &titled(title, body)),
        Some("close") => Heard::Closed,
        Some("reopen") => Heard::Reopened,
        _ => Heard::Nothing,
    }
}

/// Any other program: the text where one would put it, or else all of it.
fn plain(payload: &Json) -> Heard {
    let name = ["/user", "/data/user", "/author", "/data/author"];
    let name = name.iter().find_map(|pointer| at(payload, pointer));
    let places = ["content", "text", "message", "body"];
    let text = places.iter().find_map(|place| {
        at(payload, &format!("/{place}")).or_else(|| at(payload, &format!("/data/{place}")))
    });
    match text {
        Some(text) => said(name, text),
        None => said(name, &payload.to_string()),
    }
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;

//! The conversation of an issue: its history, and what the pending events add.
//!
//! Upstream: `handler`. Downstream: `prompt` renders it for a model.
//! Guarantees: a payload of any shape is read without an error; text is kept unchanged. A conversation over the limit
//! loses its oldest entries. The history is stored in the issue's `discussions`, so it is committed with each run.

use headwater_issue::{EventLog, EventLogId, Issue};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use uuid::Uuid;

use crate::desk::draft::{DECISION_SOURCE, DraftOutcome};
use crate::desk::effects::ToldEffect;
use crate::desk::policy::IntegrationPolicy;
use crate::limits::{CONTENT_BYTES_MAX, THREAD_BYTES_MAX, THREAD_ENTRIES_MAX, USER_ID_BYTES_MAX};
use crate::text;
use crate::tickets::{Author, TicketEvent, TicketEventType, sort_imported};

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
    /// The author's association with the repository, as GitHub names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub association: Option<String>,
    /// Only for an answer of the desk: the draft that a person decides about. The next run learns what became of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<Uuid>,
    /// Only for a draft: the issue is handed over when it is sent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hands_over: bool,
    /// Only for an answer of the desk: the user has never seen it (a note, or a draft that was rejected).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_not_sent: bool,
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
    /// Whether a person took the issue over with one of the pending messages.
    pub taken_over: bool,
    /// Whether a user message is unanswered.
    pub needs_answer: bool,
    /// The user of the ticket, if an event names one.
    pub user_id: Option<String>,
    /// The oldest event without an answer of the desk that was sent. It stays the same while runs for it are repeated or
    /// superseded, while their answers are stale or outdated, while their tool calls wait for an approval, and after runs
    /// that ended without an answer.
    pub request: EventLogId,
    /// The newest of the pending events with a message of a user.
    pub newest_message: Option<EventLogId>,
    /// Tool calls that a person was told about, because their outcome is unknown or they were not made in time.
    pub told_effects: Vec<ToldEffect>,
    /// The installation of a GitHub App that sends the webhooks of the issue.
    pub installation: Option<u64>,
}

/// What one event means for the conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
enum EventMeaning {
    Message(ConversationEntry),
    /// A message that was written before the ticket was closed, and imported after it: it needs no answer.
    LateMessage(ConversationEntry),
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
    request: Option<i64>,
    /// The last run ended without an answer, so that the request goes on.
    request_is_open: bool,
    told_effects: Vec<ToldEffect>,
    installation: Option<u64>,
}

/// The installation of a GitHub App that a webhook names.
fn installation_of(event: &EventLog) -> Option<u64> {
    let payload: Json = serde_json::from_str(&event.payload).ok()?;
    payload.pointer("/installation/id").and_then(Json::as_u64)
}

/// The installation of a GitHub App that a reply to an issue belongs to: that of the newest event, or else the last one that a
/// run has seen, because the newest event may be a decision of a person.
pub(crate) fn installation_for(newest: Option<&EventLog>, issue: Option<&Issue>) -> Option<u64> {
    newest.and_then(installation_of).or_else(|| {
        let fields =
            issue.and_then(|issue| serde_json::from_str::<IssueFields>(&issue.fields).ok());
        fields.and_then(|fields| fields.installation)
    })
}

impl Conversation {
    /// The draft of the last run, if that run ended with one.
    pub fn last_draft(issue: &Issue) -> Option<Uuid> {
        let past: Vec<ConversationEntry> = serde_json::from_str(&issue.discussions).ok()?;
        past.last()?.draft
    }

    /// Loads the history of an issue and applies its pending events. `completed` is the newest event log at the time
    /// of the last completed run, `draft` what became of the [last draft](Self::last_draft).
    pub fn load(
        issue: &Issue,
        events: &[EventLog],
        completed: Option<EventLogId>,
        policy: &IntegrationPolicy,
        draft: Option<&DraftOutcome>,
    ) -> Self {
        // Only the desk writes these columns. If they are invalid, start with an empty history instead of failing
        // every run.
        let past = serde_json::from_str(&issue.discussions).unwrap_or_default();
        let fields: IssueFields = serde_json::from_str(&issue.fields).unwrap_or_default();
        let mut conversation = Self {
            past,
            handed_over: fields.handed_over,
            user_id: fields.user_id,
            request: events.first().map(|event| event.id).unwrap_or_default(),
            told_effects: fields.told_effects,
            installation: fields.installation,
            ..Self::default()
        };
        let answered = conversation.past.len();
        // Same condition as `outbound::staleness`. It compares ids, because the clock may have been set back.
        if conversation.past.last().is_some_and(|last| last.draft.is_some()) {
            conversation.apply_draft_outcome(draft.unwrap_or(&DraftOutcome::Outdated));
        } else if events.first().is_some_and(|event| completed.is_some_and(|last| event.id <= last))
        {
            conversation.retract_stale_answer();
        }
        // The last answer was not sent, or there was none, so its request goes on.
        let goes_on = fields.request_is_open || conversation.past.len() < answered;
        if let Some(request) = fields.request.filter(|_| goes_on) {
            conversation.request = EventLogId(request);
        }
        if issue.provider == "github" {
            let newest = events.iter().rev().find_map(installation_of);
            conversation.installation = newest.or(conversation.installation);
        }
        let mut events: Vec<&EventLog> = events.iter().collect();
        if issue.provider == "desk" {
            sort_imported(&mut events, |event| entry_of(event));
        }
        for event in events {
            conversation.apply(&issue.provider, event, policy);
        }
        conversation.needs_answer &= !conversation.handed_over;
        conversation
    }

    /// The draft of the last run is an answer that was sent, one that was rejected, or none: then the messages it would
    /// have answered are pending again.
    fn apply_draft_outcome(&mut self, outcome: &DraftOutcome) {
        let Some(last) = self.past.last_mut() else { return };
        (last.draft, last.unless_stale) = (None, false);
        let hands_over = std::mem::take(&mut last.hands_over);
        match outcome {
            DraftOutcome::Sent(text) => {
                last.text.clone_from(text);
                self.handed_over |= hands_over;
            }
            DraftOutcome::Rejected(reason) => {
                last.was_not_sent = true;
                let reason =
                    reason.as_deref().map_or(String::new(), |reason| format!(": {reason}"));
                let name = format!("draft that was not sent, a person rejected it{reason}");
                last.name = Some(text::one_line(&name, USER_ID_BYTES_MAX));
            }
            DraftOutcome::Outdated | DraftOutcome::CallsDecided => {
                last.unless_stale = true;
                self.retract_stale_answer();
            }
        }
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

    fn apply(&mut self, provider: &str, event: &EventLog, policy: &IntegrationPolicy) {
        match interpret(provider, event, &mut self.user_id, policy) {
            EventMeaning::Message(entry) => {
                // An answer by another author, model or person, counts as an answer.
                self.needs_answer = entry.author == Author::User;
                if self.needs_answer {
                    self.newest_message = self.newest_message.max(Some(event.id));
                }
                self.add_pending(entry);
            }
            EventMeaning::LateMessage(entry) => self.add_pending(entry),
            EventMeaning::Closed => self.needs_answer = false,
            EventMeaning::Reopened => (self.handed_over, self.taken_over) = (false, false),
            EventMeaning::Irrelevant => {}
        }
    }

    /// A person who answers takes the issue over.
    fn add_pending(&mut self, entry: ConversationEntry) {
        let is_agent = entry.author == Author::Agent;
        self.taken_over |= is_agent && !self.handed_over;
        self.handed_over |= is_agent;
        self.pending.push(entry);
    }

    /// Whether the user has seen no answer of the desk yet.
    pub fn is_first_contact(&self) -> bool {
        let mut answers = self.past.iter().filter(|entry| entry.author == Author::Assistant);
        answers.all(|answer| answer.was_not_sent)
    }

    /// The newest message that wants an answer.
    pub fn newest_user_message(&self) -> Option<&ConversationEntry> {
        self.pending.iter().rev().find(|entry| entry.author == Author::User)
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

/// The entry of `ticket_events` that an event was imported from, in sortable form.
fn entry_of(event: &EventLog) -> Option<String> {
    #[derive(Deserialize)]
    struct ImportedEvent {
        payload: ImportedPayload,
    }
    #[derive(Deserialize)]
    struct ImportedPayload {
        entry: Option<String>,
    }
    serde_json::from_str::<ImportedEvent>(&event.payload).ok()?.payload.entry
}

fn interpret(
    provider: &str,
    event: &EventLog,
    user_id: &mut Option<String>,
    policy: &IntegrationPolicy,
) -> EventMeaning {
    // It only starts the run that learns what a person has decided.
    if event.source == DECISION_SOURCE {
        return EventMeaning::Irrelevant;
    }
    let Ok(payload) = serde_json::from_str::<Json>(&event.payload) else {
        return EventMeaning::Irrelevant;
    };
    let at = event.created_at.to_rfc3339();
    let meaning = match provider {
        "desk" => ticket(payload, user_id),
        "github" => github(&payload, policy),
        "gitlab" => gitlab(&payload, policy),
        _ => generic(&payload, policy),
    };
    match meaning {
        EventMeaning::Message(entry) => EventMeaning::Message(ConversationEntry { at, ..entry }),
        EventMeaning::LateMessage(entry) => {
            EventMeaning::LateMessage(ConversationEntry { at, ..entry })
        }
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
        association: None,
        draft: None,
        hands_over: false,
        was_not_sent: false,
    })
}

fn ticket(payload: Json, user_id: &mut Option<String>) -> EventMeaning {
    let Ok(event) = serde_json::from_value::<TicketEvent>(payload) else {
        return EventMeaning::Irrelevant;
    };
    // The first event names the user of the ticket. Another one must not give access to the tickets of another user.
    if user_id.is_none() {
        user_id.clone_from(&event.user_id);
    }
    let (author, is_late) = (event.author(), event.payload.late);
    match event.event_type {
        TicketEventType::TicketClosed if is_late => EventMeaning::Irrelevant,
        TicketEventType::TicketClosed => EventMeaning::Closed,
        TicketEventType::TicketReopened => EventMeaning::Reopened,
        _ => {
            let content = match event.payload.title {
                Some(title) => format!("{title}\n\n{}", event.payload.content),
                None => event.payload.content,
            };
            // The name of the author; a person of the support team is not the user of the ticket.
            let name = match author {
                Author::User => event.user_id.as_deref(),
                Author::Agent => event.payload.agent.as_deref(),
                Author::Assistant => None,
            };
            match user_message(name, &content) {
                EventMeaning::Message(entry) if is_late => {
                    EventMeaning::LateMessage(ConversationEntry { author, ..entry })
                }
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

/// A message with this author and association.
fn message_by(meaning: EventMeaning, author: Author, association: Option<&str>) -> EventMeaning {
    let association = association.map(|one| text::one_line(one, USER_ID_BYTES_MAX));
    match meaning {
        EventMeaning::Message(entry) => {
            EventMeaning::Message(ConversationEntry { author, association, ..entry })
        }
        other => other,
    }
}

fn github(payload: &Json, policy: &IntegrationPolicy) -> EventMeaning {
    if payload.get("comment").is_some() {
        if text_at(payload, "/action") == Some("deleted") {
            return EventMeaning::Irrelevant;
        }
        let login = text_at(payload, "/comment/user/login");
        let comment = user_message(login, text_at(payload, "/comment/body").unwrap_or(""));
        let author = github_author(payload, policy);
        return message_by(comment, author, text_at(payload, "/comment/author_association"));
    }
    let issue = title_and_body(text_at(payload, "/issue/title"), text_at(payload, "/issue/body"));
    match text_at(payload, "/action") {
        // A maintainer who edits the issue of a user does not ask anything.
        Some("edited") if is_by_another_user(payload) => EventMeaning::Irrelevant,
        Some("opened" | "edited") => {
            let message = user_message(text_at(payload, "/sender/login"), &issue);
            message_by(message, Author::User, text_at(payload, "/issue/author_association"))
        }
        Some("closed") => EventMeaning::Closed,
        Some("reopened") => EventMeaning::Reopened,
        _ => EventMeaning::Irrelevant,
    }
}

/// Whether the sender of an issue event did not open the issue.
fn is_by_another_user(payload: &Json) -> bool {
    let opened_by = text_at(payload, "/issue/user/login");
    opened_by.is_some() && opened_by != text_at(payload, "/sender/login")
}

/// Who wrote a comment: an agent is a member of the repository, or a person of the settings, who did not open the issue.
fn github_author(payload: &Json, policy: &IntegrationPolicy) -> Author {
    let login = text_at(payload, "/comment/user/login");
    if login == text_at(payload, "/issue/user/login") {
        return Author::User;
    }
    match text_at(payload, "/comment/author_association") {
        Some("OWNER" | "MEMBER" | "COLLABORATOR") => Author::Agent,
        _ => policy.author(login),
    }
}

fn gitlab(payload: &Json, policy: &IntegrationPolicy) -> EventMeaning {
    let username = text_at(payload, "/user/username");
    let name = username.or_else(|| text_at(payload, "/user/name"));
    if text_at(payload, "/object_kind") == Some("note") {
        let note = user_message(name, text_at(payload, "/object_attributes/note").unwrap_or(""));
        let opened_by = payload.pointer("/issue/author_id").and_then(Json::as_u64);
        let written_by = payload.pointer("/object_attributes/author_id").and_then(Json::as_u64);
        // Who opened the issue asks, also a person of the team.
        let is_own = opened_by.is_some() && opened_by == written_by;
        let author = if is_own { Author::User } else { policy.author(username) };
        return message_by(note, author, None);
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

/// Any other provider: the text from a common field, otherwise the whole payload. Without a text, a `type` that ends with
/// `closed` or `reopened` is a change of the status.
fn generic(payload: &Json, policy: &IntegrationPolicy) -> EventMeaning {
    let name = ["/user", "/data/user", "/author", "/data/author"];
    let name = name.iter().find_map(|pointer| text_at(payload, pointer));
    let keys = ["content", "text", "message", "body"];
    let text = keys.iter().find_map(|key| {
        text_at(payload, &format!("/{key}")).or_else(|| text_at(payload, &format!("/data/{key}")))
    });
    let kind = text_at(payload, "/type").unwrap_or_default();
    let message = match (text, kind.rsplit(['.', '_', '-', ':', '/']).next()) {
        (Some(text), _) => user_message(name, text),
        (None, Some("closed")) => return EventMeaning::Closed,
        (None, Some("reopened")) => return EventMeaning::Reopened,
        (None, _) => user_message(name, &payload.to_string()),
    };
    message_by(message, policy.author(name), None)
}

#[cfg(test)]
#[path = "conversation_tests.rs"]
mod tests;

//! What payloads of every provider mean for a thread.

use headwater_issue::{ClaimEpoch, EventLogId, IssueId};
use headwater_stream::clock::Timestamp;
use serde_json::json;

use super::*;

fn issue(provider: &str) -> Issue {
    Issue {
        id: IssueId(1),
        integration: provider.into(),
        provider: provider.into(),
        external_project_id: String::new(),
        external_issue_id: "1".into(),
        status: headwater_issue::ProcessingStatus::Processing,
        pending_events: 1,
        claim_epoch: ClaimEpoch(1),
        claim_owner: None,
        claim_expires_at: None,
        not_before: None,
        attempts: 0,
        crashes: 0,
        superseded: 0,
        quarantined_at: None,
        last_error: None,
        fields: "{}".into(),
        discussions: "[]".into(),
        processing_started_at: None,
        last_processed_at: None,
        nudged_at: None,
        created_at: Timestamp::from_millis(0),
        updated_at: Timestamp::from_millis(0),
    }
}

fn event(payload: Json) -> EventLog {
    EventLog {
        id: EventLogId(1),
        issue_id: IssueId(1),
        source: "s".into(),
        event_type: "e".into(),
        dedup_key: "k".into(),
        payload: payload.to_string(),
        created_at: Timestamp::from_millis(0),
        processed_at: None,
        processing_error: None,
    }
}

fn thread(provider: &str, payloads: &[Json]) -> Thread {
    let events: Vec<EventLog> = payloads.iter().cloned().map(event).collect();
    Thread::of(&issue(provider), &events, None)
}

fn desk(event_type: &str, content: &str) -> Json {
    json!({"event_type": event_type, "ticket_id": uuid::Uuid::nil(), "message_id": uuid::Uuid::nil(),
        "user_id": "ada", "payload": {"content": content, "timestamp": "2026-01-01T00:00:00Z"}})
}

#[test]
fn every_provider_says_who_said_what() {
    for (provider, payload, name, text) in [
        (
            "github",
            json!({"action": "created", "comment": {"body": "Help!", "user": {"login": "ada"}}}),
            "ada",
            "Help!",
        ),
        (
            "github",
            json!({"action": "opened", "issue": {"title": "T", "body": "B"}, "sender": {"login": "ada"}}),
            "ada",
            "T\n\nB",
        ),
        (
            "gitlab",
            json!({"object_kind": "note", "user": {"username": "ada"}, "object_attributes": {"note": "Help!"}}),
            "ada",
            "Help!",
        ),
        (
            "gitlab",
            json!({"object_kind": "issue", "user": {"username": "ada"},
                "object_attributes": {"action": "open", "title": "T", "description": null}}),
            "ada",
            "T",
        ),
        (
            "standard",
            json!({"type": "x", "data": {"text": "Help!", "user": "ada"}}),
            "ada",
            "Help!",
        ),
        ("desk", desk("MESSAGE_RECEIVED", "Help!"), "ada", "Help!"),
    ] {
        let thread = thread(provider, std::slice::from_ref(&payload));
        assert!(thread.wants_answer, "{payload}");
        let entry = &thread.pending[0];
        assert_eq!((entry.name.as_deref(), entry.text.as_str()), (Some(name), text), "{payload}");
    }
}

#[test]
fn nobody_waits_for_an_answer_after_the_end_or_after_somebody_else_answered() {
    let mut agent = desk("MESSAGE_RECEIVED", "I take care of it");
    agent["payload"]["author"] = "agent".into();
    for last in [desk("TICKET_CLOSED", ""), desk("AI_RESPONSE_GENERATED", "Done"), agent] {
        let both = [desk("MESSAGE_RECEIVED", "Help!"), last.clone()];
        assert!(!thread("desk", &both).wants_answer, "{last}");
        let again = [last.clone(), desk("MESSAGE_RECEIVED", "Help!")];
        assert!(thread("desk", &again).wants_answer, "{last}");
    }
}

#[test]
fn a_person_who_took_over_answers_until_the_ticket_is_opened_again() {
    let mut issue = issue("desk");
    issue.fields = r#"{"handed_over":true}"#.into();
    let asked = event(desk("MESSAGE_RECEIVED", "Help!"));
    assert!(!Thread::of(&issue, std::slice::from_ref(&asked), None).wants_answer);
    let reopened = event(desk("TICKET_REOPENED", ""));
    assert!(Thread::of(&issue, &[reopened, asked], None).wants_answer);
}

#[test]
fn comments_of_our_own_are_no_news() {
    let body = format!("Answer {}", marker::of("k", &"s".to_owned().into()));
    let ours = json!({"action": "created", "comment": {"body": body, "user": {"login": "bot"}}});
    let thread = thread("github", &[ours]);
    assert!(!thread.wants_answer && thread.pending.is_empty());
}

#[test]
fn payloads_of_any_shape_are_read() {
    for provider in ["desk", "github", "gitlab", "standard"] {
        for payload in
            [json!(null), json!([1]), json!("x"), json!({"action": 1, "comment": []}), json!({})]
        {
            thread(provider, &[payload]);
        }
    }
    let mut odd = issue("desk");
    (odd.fields, odd.discussions) = ("[]".into(), "{}".into());
    assert_eq!(Thread::of(&odd, &[], None), Thread::default());
}

#[test]
fn a_thread_comes_back_and_forgets_only_its_oldest_entries() {
    let mut first =
        thread("desk", &[desk("MESSAGE_RECEIVED", "one"), desk("MESSAGE_RECEIVED", "two")]);
    let mut issue = issue("desk");
    issue.discussions = first.remembered(None);
    assert_eq!(Thread::of(&issue, &[], None).past, first.pending);

    let long = Entry { text: "x".repeat(CONTENT_BYTES_MAX), ..first.pending[0].clone() };
    first.past = vec![long; 20];
    let kept = first.remembered(Some(&first.pending[1].clone()));
    assert!(kept.len() <= THREAD_BYTES_MAX);
    issue.discussions = kept;
    let kept = Thread::of(&issue, &[], None).past;
    let newest = &first.pending[1];
    assert_eq!((&kept[kept.len() - 2], &kept[kept.len() - 1]), (newest, newest));
    assert!(kept.len() > 3);
}

fn entry(author: Author, text: &str, unless_stale: bool) -> Entry {
    let (text, at) = (text.to_owned(), "then".to_owned());
    Entry { author, name: None, text, at, unless_stale }
}

/// An issue with this thread.
fn answered(past: &[Entry]) -> Issue {
    let mut issue = issue("desk");
    issue.discussions = serde_json::to_string(past).unwrap();
    issue
}

/// The newest event log when the last run was completed.
const COMPLETED: Option<EventLogId> = Some(EventLogId(10));

/// A message with this id. Its time is of no consequence: the clock may have been set.
fn said(id: i64, content: &str) -> EventLog {
    EventLog { id: EventLogId(id), ..event(desk("MESSAGE_RECEIVED", content)) }
}

fn texts(entries: &[Entry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.text.as_str()).collect()
}

#[test]
fn an_answer_that_was_stale_when_it_was_committed_is_taken_back_with_what_it_answered() {
    let past = [
        entry(Author::User, "one", false),
        entry(Author::Assistant, "to one", false),
        entry(Author::User, "two", false),
        entry(Author::User, "three", false),
        entry(Author::Assistant, "to two and three", true),
    ];
    // It came before the commit, so the answer was never sent.
    let thread = Thread::of(&answered(&past), &[said(10, "four")], COMPLETED);
    assert_eq!(texts(&thread.past), ["one", "to one"]);
    assert_eq!(texts(&thread.pending), ["two", "three", "four"]);
    assert!(thread.wants_answer);

    // It came after: the answer was sent, and stays.
    let thread = Thread::of(&answered(&past), &[said(11, "four")], COMPLETED);
    assert_eq!((thread.past.len(), texts(&thread.pending)), (5, vec!["four"]));
}

#[test]
fn an_answer_that_is_sent_in_any_case_is_not_taken_back() {
    let past = [entry(Author::User, "one", false), entry(Author::Assistant, "to one", false)];
    let thread = Thread::of(&answered(&past), &[said(9, "two")], COMPLETED);
    assert_eq!((texts(&thread.past), texts(&thread.pending)), (vec!["one", "to one"], vec!["two"]));
}

#[test]
fn what_was_stale_is_still_to_be_answered_when_its_news_say_nothing() {
    let past = [entry(Author::User, "one", false), entry(Author::Assistant, "to one", true)];
    let labelled = EventLog { id: EventLogId(9), ..event(json!({})) };
    let thread = Thread::of(&answered(&past), std::slice::from_ref(&labelled), COMPLETED);
    assert!(thread.wants_answer && thread.past.is_empty());
    assert_eq!(texts(&thread.pending), ["one"]);

    // A person who answered meanwhile has answered it.
    let mut agent = desk("MESSAGE_RECEIVED", "I take care of it");
    agent["payload"]["author"] = "agent".into();
    let agent = EventLog { id: EventLogId(9), ..event(agent) };
    assert!(!Thread::of(&answered(&past), &[agent], COMPLETED).wants_answer);
}

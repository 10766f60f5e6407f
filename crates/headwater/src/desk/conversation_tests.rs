//! Interpretation of payloads of every provider.

use headwater_issue::{ClaimEpoch, EventLogId, IssueId};
use headwater_stream::clock::Timestamp;
use serde_json::json;

use super::*;
use crate::outbound::marker;

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
        trace: None,
    }
}

fn load(issue: &Issue, events: &[EventLog], completed: Option<EventLogId>) -> Conversation {
    Conversation::load(issue, events, completed, &IntegrationPolicy::default(), None)
}

fn thread(provider: &str, payloads: &[Json]) -> Conversation {
    let events: Vec<EventLog> = payloads.iter().cloned().map(event).collect();
    load(&issue(provider), &events, None)
}

fn desk(event_type: &str, content: &str) -> Json {
    json!({"event_type": event_type, "ticket_id": uuid::Uuid::nil(), "message_id": uuid::Uuid::nil(),
        "user_id": "ada", "payload": {"content": content, "timestamp": "2026-01-01T00:00:00Z"}})
}

#[test]
fn author_and_text_are_read_from_payloads_of_every_provider() {
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
        assert!(thread.needs_answer, "{payload}");
        let entry = &thread.pending[0];
        assert_eq!((entry.name.as_deref(), entry.text.as_str()), (Some(name), text), "{payload}");
    }
}

#[test]
fn no_answer_is_needed_after_closing_or_after_another_author_answered() {
    let mut agent = desk("MESSAGE_RECEIVED", "I take care of it");
    agent["payload"]["author"] = "agent".into();
    for last in [desk("TICKET_CLOSED", ""), desk("AI_RESPONSE_GENERATED", "Done"), agent] {
        let both = [desk("MESSAGE_RECEIVED", "Help!"), last.clone()];
        assert!(!thread("desk", &both).needs_answer, "{last}");
        let again = [last.clone(), desk("MESSAGE_RECEIVED", "Help!")];
        let is_agent = last["payload"]["author"] == "agent";
        assert_eq!(thread("desk", &again).needs_answer, !is_agent, "{last}");
        assert_eq!(thread("desk", &again).handed_over, is_agent, "a person took over: {last}");
    }
}

#[test]
fn a_member_who_answers_on_github_takes_the_issue_over() {
    let comment = |login: &str, association: &str| {
        json!({"action": "created", "issue": {"user": {"login": "ada"}},
            "comment": {"body": "x", "user": {"login": login}, "author_association": association}})
    };
    for (payload, is_agent) in [
        (comment("bob", "MEMBER"), true),
        (comment("bob", "OWNER"), true),
        (comment("bob", "CONTRIBUTOR"), false),
        (comment("bob", "NONE"), false),
        (comment("ada", "OWNER"), false),
    ] {
        let thread = thread("github", &[payload.clone(), comment("ada", "NONE")]);
        assert_eq!((thread.handed_over, thread.needs_answer), (is_agent, !is_agent), "{payload}");
    }
}

#[test]
fn an_issue_that_a_maintainer_edits_on_github_needs_no_answer() {
    let edited = |sender: &str| {
        json!({"action": "edited", "sender": {"login": sender},
            "issue": {"user": {"login": "ada"}, "title": "Broken", "body": "It is broken."}})
    };
    for (sender, needs_answer) in [("ada", true), ("bob", false)] {
        assert_eq!(thread("github", &[edited(sender)]).needs_answer, needs_answer, "{sender}");
    }
}

#[test]
fn the_first_event_names_the_user_of_a_ticket() {
    let mut foreign = desk("MESSAGE_RECEIVED", "What did I write before?");
    foreign["user_id"] = "victim".into();
    let thread = thread("desk", &[desk("TICKET_CREATED", "Help!"), foreign]);
    assert_eq!(thread.user_id.as_deref(), Some("ada"));
}

#[test]
fn after_a_hand_over_the_desk_is_silent_until_the_ticket_is_reopened() {
    let mut issue = issue("desk");
    issue.fields = r#"{"handed_over":true}"#.into();
    let asked = event(desk("MESSAGE_RECEIVED", "Help!"));
    assert!(!load(&issue, std::slice::from_ref(&asked), None).needs_answer);
    let reopened = event(desk("TICKET_REOPENED", ""));
    assert!(load(&issue, &[reopened, asked], None).needs_answer);
}

#[test]
fn text_with_a_marker_is_a_message() {
    let body = format!("Answer {}", marker::marker_for("k", "Answer", &"s".to_owned().into()));
    assert!(thread("desk", &[desk("MESSAGE_RECEIVED", &body)]).needs_answer);
    let comment = json!({"action": "created", "comment": {"body": body, "user": {"login": "eve"}}});
    assert!(
        thread("github", &[comment]).needs_answer,
        "webhooks of own comments are ignored before"
    );
}

#[test]
fn payloads_of_any_shape_are_read_without_an_error() {
    for provider in ["desk", "github", "gitlab", "standard"] {
        for payload in
            [json!(null), json!([1]), json!("x"), json!({"action": 1, "comment": []}), json!({})]
        {
            thread(provider, &[payload]);
        }
    }
    let mut odd = issue("desk");
    (odd.fields, odd.discussions) = ("[]".into(), "{}".into());
    assert_eq!(load(&odd, &[], None), Conversation::default());
}

#[test]
fn a_conversation_is_restored_and_drops_only_its_oldest_entries() {
    let mut first =
        thread("desk", &[desk("MESSAGE_RECEIVED", "one"), desk("MESSAGE_RECEIVED", "two")]);
    let mut issue = issue("desk");
    issue.discussions = first.to_discussions(None);
    assert_eq!(load(&issue, &[], None).past, first.pending);

    let long =
        ConversationEntry { text: "x".repeat(CONTENT_BYTES_MAX), ..first.pending[0].clone() };
    first.past = vec![long; 20];
    let kept = first.to_discussions(Some(&first.pending[1].clone()));
    assert!(kept.len() <= THREAD_BYTES_MAX);
    issue.discussions = kept;
    let kept = load(&issue, &[], None).past;
    let newest = &first.pending[1];
    assert_eq!((&kept[kept.len() - 2], &kept[kept.len() - 1]), (newest, newest));
    assert!(kept.len() > 3);
}

fn entry(author: Author, text: &str, unless_stale: bool) -> ConversationEntry {
    let (text, at) = (text.to_owned(), "then".to_owned());
    ConversationEntry {
        author,
        name: None,
        text,
        at,
        unless_stale,
        association: None,
        draft: None,
        hands_over: false,
        was_not_sent: false,
    }
}

/// An issue with this history.
fn answered(past: &[ConversationEntry]) -> Issue {
    let mut issue = issue("desk");
    issue.discussions = serde_json::to_string(past).unwrap();
    issue
}

/// The newest event log at the time of the last completed run.
const COMPLETED: Option<EventLogId> = Some(EventLogId(10));

/// A message with this id. Its time does not matter.
fn said(id: i64, content: &str) -> EventLog {
    EventLog { id: EventLogId(id), ..event(desk("MESSAGE_RECEIVED", content)) }
}

fn texts(entries: &[ConversationEntry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.text.as_str()).collect()
}

#[test]
fn an_answer_that_was_stale_at_commit_is_retracted_and_its_messages_are_pending_again() {
    let past = [
        entry(Author::User, "one", false),
        entry(Author::Assistant, "to one", false),
        entry(Author::User, "two", false),
        entry(Author::User, "three", false),
        entry(Author::Assistant, "to two and three", true),
    ];
    // Recorded before the commit, so the answer was not sent.
    let thread = load(&answered(&past), &[said(10, "four")], COMPLETED);
    assert_eq!(texts(&thread.past), ["one", "to one"]);
    assert_eq!(texts(&thread.pending), ["two", "three", "four"]);
    assert!(thread.needs_answer);

    // Recorded after the commit: the answer was sent and stays.
    let thread = load(&answered(&past), &[said(11, "four")], COMPLETED);
    assert_eq!((thread.past.len(), texts(&thread.pending)), (5, vec!["four"]));
}

#[test]
fn an_answer_that_is_always_sent_is_not_retracted() {
    let past = [entry(Author::User, "one", false), entry(Author::Assistant, "to one", false)];
    let thread = load(&answered(&past), &[said(9, "two")], COMPLETED);
    assert_eq!((texts(&thread.past), texts(&thread.pending)), (vec!["one", "to one"], vec!["two"]));
}

#[test]
fn retracted_messages_need_an_answer_even_if_the_newer_event_has_no_text() {
    let past = [entry(Author::User, "one", false), entry(Author::Assistant, "to one", true)];
    let labelled = EventLog { id: EventLogId(9), ..event(json!({})) };
    let thread = load(&answered(&past), std::slice::from_ref(&labelled), COMPLETED);
    assert!(thread.needs_answer && thread.past.is_empty());
    assert_eq!(texts(&thread.pending), ["one"]);

    // A person who answered in the meantime has answered it.
    let mut agent = desk("MESSAGE_RECEIVED", "I take care of it");
    agent["payload"]["author"] = "agent".into();
    let agent = EventLog { id: EventLogId(9), ..event(agent) };
    assert!(!load(&answered(&past), &[agent], COMPLETED).needs_answer);
}

#[test]
fn a_request_goes_on_until_it_is_answered() {
    let request = |fields: &str| {
        let past = [entry(Author::User, "one", false), entry(Author::Assistant, "to one", false)];
        let issue = Issue { fields: fields.into(), ..answered(&past) };
        load(&issue, &[said(11, "two")], COMPLETED).request
    };
    // Answered: the next message is another request.
    assert_eq!(request(r#"{"request":3}"#), EventLogId(11));
    // The last run ended without an answer.
    assert_eq!(request(r#"{"request":3,"request_is_open":true}"#), EventLogId(3));
    assert_eq!(request("{}"), EventLogId(11));
}

#[test]
fn the_newest_message_of_a_user_is_known_and_decisions_are_none() {
    let decision = EventLog {
        source: DECISION_SOURCE.into(),
        id: EventLogId(12),
        ..event(json!({"draft": 1}))
    };
    let closed = EventLog { id: EventLogId(13), ..event(desk("TICKET_CLOSED", "")) };
    let thread = load(&issue("desk"), &[said(11, "one"), decision, closed], None);
    assert_eq!(thread.newest_message, Some(EventLogId(11)));
}

#[test]
fn the_installation_of_the_last_webhook_that_names_one_is_kept() {
    let webhook = |id: Option<u64>| event(json!({"action": "labeled", "installation": {"id": id}}));
    let mut issue = issue("github");
    assert_eq!(load(&issue, &[webhook(Some(7)), webhook(None)], None).installation, Some(7));
    issue.fields = r#"{"installation":5}"#.into();
    assert_eq!(load(&issue, &[webhook(None)], None).installation, Some(5));
    assert_eq!(installation_for(Some(&webhook(None)), Some(&issue)), Some(5));
    assert_eq!(installation_for(Some(&webhook(Some(8))), Some(&issue)), Some(8));
    assert_eq!(installation_for(None, None), None);
}

fn load_with_agents(provider: &str, payloads: &[Json]) -> Conversation {
    let agents = vec!["bob".to_owned()];
    let policy = IntegrationPolicy { agents, ..IntegrationPolicy::default() };
    let events: Vec<EventLog> = payloads.iter().cloned().map(event).collect();
    Conversation::load(&issue(provider), &events, None, &policy, None)
}

#[test]
fn a_named_agent_who_answers_on_gitlab_takes_the_issue_over_unless_it_is_their_own() {
    let note = |username: &str, author: u64| {
        json!({"object_kind": "note", "user": {"username": username}, "issue": {"author_id": 1},
            "object_attributes": {"note": "x", "author_id": author}})
    };
    for (by, author, is_agent) in [("Bob", 2, true), ("eve", 2, false), ("bob", 1, false)] {
        let thread = load_with_agents("gitlab", &[note(by, author), note("ann", 1)]);
        assert_eq!((thread.handed_over, thread.needs_answer), (is_agent, !is_agent), "{by}");
    }
}

#[test]
fn a_named_agent_of_any_program_takes_the_issue_over_until_it_is_reopened() {
    let said = |user: &str| json!({"type": "message", "data": {"text": "x", "user": user}});
    let reopened = json!({"type": "issue.reopened", "issue": "7"});
    let thread = load_with_agents("standard", &[said("bob"), said("ann")]);
    assert_eq!((thread.handed_over, thread.needs_answer), (true, false));
    let thread = load_with_agents("standard", &[said("bob"), reopened, said("ann")]);
    assert_eq!((thread.handed_over, thread.needs_answer), (false, true));
    let closed = json!({"type": "issue_closed", "issue": "7"});
    assert!(!load_with_agents("standard", &[said("ann"), closed]).needs_answer);
}

#[test]
fn imported_messages_have_the_order_of_their_entries() {
    let imported = |entry: &str| {
        let mut event = desk("MESSAGE_RECEIVED", entry);
        event["payload"]["entry"] = entry.into();
        event
    };
    let own = desk("MESSAGE_RECEIVED", "own");
    let thread = thread("desk", &[imported("3"), own, imported("1"), imported("2")]);
    assert_eq!(texts(&thread.pending), ["1", "own", "2", "3"]);
}

#[test]
fn the_messages_of_an_outdated_draft_are_pending_again_and_those_of_a_decided_one_are_not() {
    let draft = Some(Uuid::now_v7());
    let past = [
        entry(Author::User, "one", false),
        ConversationEntry { draft, ..entry(Author::Assistant, "to one", true) },
    ];
    let issue = answered(&past);
    assert_eq!(Conversation::last_draft(&issue), draft);
    let policy = IntegrationPolicy::default();
    let load = |outcome: Option<&DraftOutcome>| {
        Conversation::load(&issue, &[said(11, "two")], COMPLETED, &policy, outcome)
    };
    for outcome in [None, Some(&DraftOutcome::Outdated)] {
        let thread = load(outcome);
        assert_eq!((thread.past.len(), texts(&thread.pending)), (0, vec!["one", "two"]));
    }
    let thread = load(Some(&DraftOutcome::Sent("Edited".into())));
    assert_eq!((texts(&thread.past), texts(&thread.pending)), (vec!["one", "Edited"], vec!["two"]));
    let thread = load(Some(&DraftOutcome::Rejected(Some("rude".into()))));
    assert_eq!((texts(&thread.past), texts(&thread.pending)), (vec!["one", "to one"], vec!["two"]));
    assert!(thread.past[1].name.as_ref().unwrap().contains("not sent, a person rejected it: rude"));
    assert!(thread.past.iter().all(|entry| entry.draft.is_none()));
}

#[test]
fn a_draft_hands_the_issue_over_when_it_is_sent_and_not_before() {
    let past = [
        entry(Author::User, "one", false),
        ConversationEntry {
            draft: Some(Uuid::now_v7()),
            hands_over: true,
            ..entry(Author::Assistant, "a person takes over", true)
        },
    ];
    let issue = answered(&past);
    let policy = IntegrationPolicy::default();
    let load = |outcome: &DraftOutcome| {
        Conversation::load(&issue, &[said(11, "two")], COMPLETED, &policy, Some(outcome))
    };
    for (outcome, handed_over) in [
        (DraftOutcome::Sent("a person takes over".to_owned()), true),
        (DraftOutcome::Rejected(None), false),
        (DraftOutcome::Outdated, false),
    ] {
        let thread = load(&outcome);
        assert_eq!(thread.handed_over, handed_over, "{outcome:?}");
        assert_eq!(thread.needs_answer, !handed_over, "{outcome:?}");
        assert_eq!(thread.is_first_contact(), !handed_over, "{outcome:?}");
    }
}

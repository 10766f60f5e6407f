//! The ticket store on SQLite and PostgreSQL: one suite for both.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use headwater::desk::budget::{Ledger, ReserveDecision, TokenBudget, TokenReservation};
use headwater::desk::tools::{SearchQuery, TicketSearch};
use headwater::desk::{DeskReply, ReplyTarget};
use headwater::tickets::{Author, TicketEvent, TicketEventType, TicketPayload};
use headwater::tickets::{
    ImportOutcome, NewTicket, NewTicketMessage, PostedMessage, TicketError, TicketFilter,
    TicketStatus, Tickets,
};
use headwater_analytics::RunMetrics;
use headwater_issue::{
    DebounceWindow, DeliverError, IssueId, Nudger, OutboxId, OutboxKind, OutboxRow, Store,
    StoreConnection, StoreOptions, connect,
};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use headwater_testkit::Postgres;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

struct Fixture {
    store: Arc<dyn Store>,
    tickets: Tickets,
    _keep: Box<dyn Any>,
}

async fn fixture(url: &str, keep: Box<dyn Any>) -> Fixture {
    let store = connect(url, &StoreOptions::default()).await.unwrap();
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await.unwrap();
    let nudger = Nudger::new(streams);
    let tickets =
        Tickets::open(Arc::clone(&store), nudger.clone(), DebounceWindow::default()).await.unwrap();
    // Opening twice is idempotent.
    Tickets::open(Arc::clone(&store), nudger, DebounceWindow::default()).await.unwrap();
    Fixture { store, tickets, _keep: keep }
}

async fn sqlite() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/tickets.db", directory.path().display());
    fixture(&url, Box::new(directory)).await
}

async fn postgres() -> Fixture {
    let database = Postgres::shared().unwrap().database().unwrap();
    fixture(&database.url(), Box::new(database)).await
}

macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod on_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::sqlite().await).await; })*
        }
        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::postgres().await).await; })*
        }
    };
}

suite!(
    a_ticket_its_event_log_and_its_published_event_are_committed_together,
    a_repeated_call_changes_nothing_and_a_different_one_with_its_id_is_rejected,
    of_concurrent_calls_with_one_message_id_one_is_applied,
    a_message_of_a_user_reopens_a_closed_ticket,
    lists_are_filtered_and_paginated,
    any_text_is_stored_unchanged,
    input_over_a_limit_is_rejected_and_nothing_is_written,
    events_of_other_programs_are_imported_once,
    a_reply_delivered_twice_is_one_message,
    a_close_superseded_by_newer_events_is_discarded,
    concurrent_reservations_never_exceed_a_budget,
    a_reservation_is_settled_once_despite_repeated_or_late_calls,
    an_unsettled_reservation_expires_and_counts_as_its_prompt,
    a_search_finds_words_only_in_tickets_of_the_same_user,
);

fn ticket(title: &str, content: &str, user: &str) -> NewTicket {
    NewTicket {
        title: title.into(),
        content: content.into(),
        user_id: Some(user.into()),
        message_id: None,
    }
}

fn message(content: &str, author: Author) -> NewTicketMessage {
    NewTicketMessage { content: content.into(), author, message_id: None }
}

async fn open_ticket(fixture: &Fixture) -> PostedMessage {
    fixture.tickets.create(ticket("Parcel", "Where is it?", "ada")).await.unwrap()
}

fn row(posted: PostedMessage, key: &str) -> OutboxRow {
    OutboxRow {
        id: OutboxId(1),
        issue_id: posted.issue_id,
        integration: "desk".into(),
        provider: "desk".into(),
        external_project_id: String::new(),
        external_issue_id: posted.ticket_id.to_string(),
        kind: OutboxKind::Reply,
        target: String::new(),
        idempotency_key: key.into(),
        payload: "{}".into(),
        deliveries: 1,
        attempts: 0,
        crashes: 0,
        created_at: SystemClock.now(),
    }
}

fn reply(content: &str) -> DeskReply {
    let run = RunMetrics { events: Some(1), tokens_in: Some(20), ..RunMetrics::default() };
    DeskReply { content: content.into(), message_id: None, session_id: None, up_to: None, run }
}

fn external_event(event_type: TicketEventType, ticket_id: Uuid, content: &str) -> TicketEvent {
    // 2026-01-01.
    let payload = TicketPayload::new(content, Timestamp::from_millis(1_767_225_600_000));
    TicketEvent { event_type, ticket_id, message_id: Uuid::now_v7(), user_id: None, payload }
}

async fn contents(fixture: &Fixture, ticket_id: Uuid) -> Vec<(Author, String)> {
    let messages = fixture.tickets.messages(ticket_id, 0, 200).await.unwrap();
    messages.into_iter().map(|message| (message.author, message.content)).collect()
}

/// The types of the published events, in order.
async fn published(fixture: &Fixture) -> Vec<String> {
    let mut published = Vec::new();
    loop {
        let rows = fixture.store.take_outbox("t", 100, Duration::from_secs(60)).await.unwrap();
        if rows.is_empty() {
            return published;
        }
        for row in rows {
            assert_eq!(row.target, "ticket_events");
            let json: serde_json::Value = serde_json::from_str(&row.payload).unwrap();
            published.push(json["event_type"].as_str().unwrap().to_owned());
            // Only an answer has run metrics.
            let took = (published.last().unwrap() == "AI_RESPONSE_GENERATED").then_some(20);
            assert_eq!(json["payload"]["tokens_in"].as_u64(), took, "{json}");
            let delivery = headwater_issue::OutboxDelivery::Delivered;
            let settlement = headwater_issue::OutboxSettlement {
                id: row.id,
                deliveries: row.deliveries,
                delivery,
            };
            fixture.store.settle_outbox(&[settlement]).await.unwrap();
        }
    }
}

async fn a_ticket_its_event_log_and_its_published_event_are_committed_together(fixture: Fixture) {
    let posted = open_ticket(&fixture).await;
    let issue = fixture.store.issue(posted.issue_id).await.unwrap().unwrap();
    assert_eq!((issue.pending_events, issue.external_issue_id), (1, posted.ticket_id.to_string()));
    let ticket = fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    assert_eq!(
        (ticket.title.as_str(), ticket.status, ticket.issue_id),
        ("Parcel", TicketStatus::Open, posted.issue_id)
    );
    fixture.tickets.post(posted.ticket_id, message("Hello?", Author::User)).await.unwrap();
    fixture.tickets.post(posted.ticket_id, message("On its way", Author::Agent)).await.unwrap();
    let issue = fixture.store.issue(posted.issue_id).await.unwrap().unwrap();
    assert_eq!(issue.pending_events, 3);
    let expected =
        [(Author::User, "Where is it?"), (Author::User, "Hello?"), (Author::Agent, "On its way")];
    let expected = expected.map(|(author, text)| (author, text.to_owned()));
    assert_eq!(contents(&fixture, posted.ticket_id).await, expected);
    assert_eq!(
        published(&fixture).await,
        ["TICKET_CREATED", "MESSAGE_RECEIVED", "MESSAGE_RECEIVED"]
    );
}

async fn a_repeated_call_changes_nothing_and_a_different_one_with_its_id_is_rejected(
    fixture: Fixture,
) {
    let id = Uuid::now_v7();
    let new = |title: &str, content: &str| NewTicket {
        message_id: Some(id),
        ..ticket(title, content, "ada")
    };
    let first = fixture.tickets.create(new("A", "text")).await.unwrap();
    let again = fixture.tickets.create(new("A", "text")).await.unwrap();
    assert_eq!(again, PostedMessage { duplicate: true, ..first });
    for other in [new("B", "text"), new("A", "other")] {
        assert!(matches!(fixture.tickets.create(other).await, Err(TicketError::Conflict(_))));
    }
    let id = Uuid::now_v7();
    let new =
        |content: &str| NewTicketMessage { message_id: Some(id), ..message(content, Author::User) };
    let one = fixture.tickets.post(first.ticket_id, new("x")).await.unwrap();
    assert!(
        !one.duplicate && fixture.tickets.post(first.ticket_id, new("x")).await.unwrap().duplicate
    );
    assert!(matches!(
        fixture.tickets.post(first.ticket_id, new("y")).await,
        Err(TicketError::Conflict(_))
    ));
    // The id cannot be reused for another ticket either.
    let other = open_ticket(&fixture).await;
    assert!(matches!(
        fixture.tickets.post(other.ticket_id, new("x")).await,
        Err(TicketError::Conflict(_))
    ));
    assert_eq!(contents(&fixture, first.ticket_id).await.len(), 2);
    assert_eq!(fixture.store.issue(first.issue_id).await.unwrap().unwrap().pending_events, 2);
    let missing = Uuid::now_v7();
    let error = fixture.tickets.post(missing, new("x")).await.unwrap_err();
    assert!(matches!(error, TicketError::NotFound(id) if id == missing), "{error}");
}

async fn of_concurrent_calls_with_one_message_id_one_is_applied(fixture: Fixture) {
    let posted = open_ticket(&fixture).await;
    let (of_ticket, of_message) = (Uuid::now_v7(), Uuid::now_v7());
    let calls = (0..16).map(|_| {
        let tickets = fixture.tickets.clone();
        tokio::spawn(async move {
            let new = NewTicket { message_id: Some(of_ticket), ..ticket("A", "text", "ada") };
            let created = tickets.create(new).await.unwrap();
            let new =
                NewTicketMessage { message_id: Some(of_message), ..message("x", Author::User) };
            (created, tickets.post(posted.ticket_id, new).await.unwrap())
        })
    });
    let mut news = (0, 0);
    let mut ids = std::collections::HashSet::new();
    for call in calls.collect::<Vec<_>>() {
        let (created, added) = call.await.unwrap();
        news = (news.0 + u32::from(!created.duplicate), news.1 + u32::from(!added.duplicate));
        ids.insert(created.ticket_id);
    }
    assert_eq!((news, ids.len()), ((1, 1), 1));
    assert_eq!(contents(&fixture, posted.ticket_id).await.len(), 2);
    assert_eq!(published(&fixture).await.len(), 3);
}

async fn a_message_of_a_user_reopens_a_closed_ticket(fixture: Fixture) {
    let posted = open_ticket(&fixture).await;
    let id = posted.ticket_id;
    assert!(fixture.tickets.close(id).await.unwrap());
    assert!(!fixture.tickets.close(id).await.unwrap(), "it is already closed");
    let status = async || fixture.tickets.ticket(id).await.unwrap().unwrap().status;
    assert_eq!(status().await, TicketStatus::Closed);
    fixture.tickets.post(id, message("a note", Author::Agent)).await.unwrap();
    assert_eq!(status().await, TicketStatus::Closed);
    fixture.tickets.post(id, message("but", Author::User)).await.unwrap();
    assert_eq!(status().await, TicketStatus::Open);
    assert!(fixture.tickets.close(id).await.unwrap() && fixture.tickets.reopen(id).await.unwrap());
    assert!(!fixture.tickets.reopen(id).await.unwrap());
    assert_eq!(status().await, TicketStatus::Open);
    let published = published(&fixture).await;
    let expected = [
        "TICKET_CREATED",
        "TICKET_CLOSED",
        "MESSAGE_RECEIVED",
        "MESSAGE_RECEIVED",
        "TICKET_CLOSED",
    ];
    assert_eq!(published, expected);
    assert!(matches!(fixture.tickets.close(Uuid::now_v7()).await, Err(TicketError::NotFound(_))));
}

async fn lists_are_filtered_and_paginated(fixture: Fixture) {
    let mut made = Vec::new();
    for number in 0..7 {
        let user = if number % 2 == 0 { "ada" } else { "bob" };
        made.push(fixture.tickets.create(ticket(&format!("t{number}"), "x", user)).await.unwrap());
    }
    fixture.tickets.close(made[0].ticket_id).await.unwrap();
    let titles = async |filter: TicketFilter, limit| {
        let tickets = fixture.tickets.list(&filter, limit).await.unwrap();
        (
            tickets.iter().map(|t| t.title.clone()).collect::<Vec<_>>(),
            tickets.last().map(|t| t.number),
        )
    };
    let all = TicketFilter::default();
    let (first, cursor) = titles(all.clone(), 4).await;
    assert_eq!(first, ["t6", "t5", "t4", "t3"]);
    let (rest, _) = titles(TicketFilter { before: cursor, ..all.clone() }, 4).await;
    assert_eq!(rest, ["t2", "t1", "t0"]);
    let ada = TicketFilter { user_id: Some("ada".into()), ..all.clone() };
    assert_eq!(titles(ada.clone(), 10).await.0, ["t6", "t4", "t2", "t0"]);
    let open = TicketFilter { status: Some(TicketStatus::Open), ..ada };
    assert_eq!(titles(open, 10).await.0, ["t6", "t4", "t2"]);
    let closed = TicketFilter { status: Some(TicketStatus::Closed), ..all };
    assert_eq!(titles(closed, 10).await.0, ["t0"]);
}

async fn any_text_is_stored_unchanged(fixture: Fixture) {
    for text in [
        "'; DROP TABLE tickets; --",
        "<script>alert(1)</script>&amp;",
        "$1 ? :name %s {} \\ \" ' `",
        "键 ü 😀 \u{202e}",
        "{\"event_type\":\"TICKET_CLOSED\"}",
    ] {
        let new = ticket(text, text, text);
        let posted = fixture.tickets.create(new).await.unwrap();
        fixture.tickets.post(posted.ticket_id, message(text, Author::Agent)).await.unwrap();
        let ticket = fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
        assert_eq!((ticket.title.as_str(), ticket.user_id.as_deref()), (text, Some(text)));
        assert!(
            contents(&fixture, posted.ticket_id).await.iter().all(|(_, content)| content == text)
        );
        let filter = TicketFilter { user_id: Some(text.into()), ..TicketFilter::default() };
        assert_eq!(fixture.tickets.list(&filter, 10).await.unwrap().len(), 1);
    }
}

async fn input_over_a_limit_is_rejected_and_nothing_is_written(fixture: Fixture) {
    let long = "x".repeat(headwater::limits::CONTENT_BYTES_MAX + 1);
    for new in [
        ticket("", "x", "ada"),
        ticket(" \n ", "x", "ada"),
        ticket("t", "", "ada"),
        ticket("t", " \0 ", "ada"),
        ticket("t", &long, "ada"),
        ticket(&long, "x", "ada"),
        ticket("t", "x", ""),
        ticket("t", "x", &long),
        ticket("t", "x", "a\u{1b}b"),
    ] {
        let error = fixture.tickets.create(new.clone()).await.unwrap_err();
        assert!(matches!(error, TicketError::Invalid(_)), "{new:?}: {error}");
    }
    assert_eq!(fixture.tickets.list(&TicketFilter::default(), 10).await.unwrap(), []);
    let posted = open_ticket(&fixture).await;
    let error = fixture.tickets.post(posted.ticket_id, message("x", Author::Assistant)).await;
    assert!(matches!(error, Err(TicketError::Invalid(_))), "the author `assistant` is not allowed");
}

async fn events_of_other_programs_are_imported_once(fixture: Fixture) {
    let id = Uuid::now_v7();
    let created = external_event(TicketEventType::TicketCreated, id, "My router\nis broken");
    assert_eq!(fixture.tickets.import_event(&created).await.unwrap(), ImportOutcome::Imported);
    assert_eq!(fixture.tickets.import_event(&created).await.unwrap(), ImportOutcome::Duplicate);
    let changed = TicketEvent {
        payload: TicketPayload { content: "other".into(), ..created.payload.clone() },
        ..created.clone()
    };
    assert_eq!(
        fixture.tickets.import_event(&changed).await.unwrap(),
        ImportOutcome::Duplicate,
        "the message id decides"
    );
    let ticket = fixture.tickets.ticket(id).await.unwrap().unwrap();
    assert_eq!(ticket.title, "My router");

    let said = external_event(TicketEventType::MessageReceived, id, "Hello?");
    let answered = external_event(TicketEventType::AiResponseGenerated, id, "Turn it off");
    let closed = external_event(TicketEventType::TicketClosed, id, "");
    for event in [&said, &answered, &closed] {
        assert_eq!(
            fixture.tickets.import_event(event).await.unwrap(),
            ImportOutcome::Imported,
            "{event:?}"
        );
        assert_eq!(
            fixture.tickets.import_event(event).await.unwrap(),
            ImportOutcome::Duplicate,
            "{event:?}"
        );
    }
    assert_eq!(fixture.tickets.ticket(id).await.unwrap().unwrap().status, TicketStatus::Closed);
    // A repeated old entry does not close a reopened ticket.
    fixture.tickets.reopen(id).await.unwrap();
    assert_eq!(fixture.tickets.import_event(&closed).await.unwrap(), ImportOutcome::Duplicate);
    assert_eq!(fixture.tickets.ticket(id).await.unwrap().unwrap().status, TicketStatus::Open);

    // The minimal entry opens a ticket; an unknown ticket cannot be answered or closed.
    let sample = external_event(TicketEventType::MessageReceived, Uuid::now_v7(), "");
    assert_eq!(fixture.tickets.import_event(&sample).await.unwrap(), ImportOutcome::Imported);
    for event_type in [TicketEventType::AiResponseGenerated, TicketEventType::TicketClosed] {
        let event = external_event(event_type, Uuid::now_v7(), "x");
        assert!(matches!(
            fixture.tickets.import_event(&event).await.unwrap(),
            ImportOutcome::Rejected(_)
        ));
    }
    let stolen = TicketEvent { ticket_id: sample.ticket_id, ..said };
    assert!(matches!(
        fixture.tickets.import_event(&stolen).await.unwrap(),
        ImportOutcome::Rejected(_)
    ));
    // Nothing is published: the events came from the stream.
    assert_eq!(published(&fixture).await, Vec::<String>::new());
    let issue = fixture.store.find_issue("desk", "", &id.to_string()).await.unwrap().unwrap();
    assert_eq!(issue.pending_events, 5);
}

async fn a_reply_delivered_twice_is_one_message(fixture: Fixture) {
    let posted = open_ticket(&fixture).await;
    let row = row(posted, "key-1");
    let reply = reply("It is <b>here</b>");
    for _ in 0..2 {
        fixture.tickets.deliver(&row, ReplyTarget::Answer, &reply).await.unwrap();
        fixture.tickets.deliver(&row, ReplyTarget::HandOver, &reply).await.unwrap();
    }
    let contents = contents(&fixture, posted.ticket_id).await;
    assert_eq!(contents[1..], [(Author::Assistant, "It is <b>here</b>".to_owned())]);
    assert!(fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap().handed_over);
    assert_eq!(published(&fixture).await, ["TICKET_CREATED", "AI_RESPONSE_GENERATED"]);
    let issue = fixture.store.issue(posted.issue_id).await.unwrap().unwrap();
    assert_eq!(issue.pending_events, 1, "the desk's answer is not a pending event");
    let unknown = OutboxRow { external_issue_id: Uuid::now_v7().to_string(), ..row.clone() };
    let error = fixture.tickets.deliver(&unknown, ReplyTarget::Answer, &reply).await.unwrap_err();
    assert!(matches!(error, DeliverError::Dead(_)), "{error}");
}

async fn a_close_superseded_by_newer_events_is_discarded(fixture: Fixture) {
    let posted = open_ticket(&fixture).await;
    let first = fixture.store.event_logs(posted.issue_id, &Default::default(), 1).await.unwrap();
    let close = DeskReply { up_to: Some(first[0].id.0), ..reply("solved") };
    let status = async || fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap().status;
    fixture.tickets.deliver(&row(posted, "a"), ReplyTarget::Close, &close).await.unwrap();
    assert_eq!(status().await, TicketStatus::Closed);

    // Closed and reopened, then the row is repeated.
    fixture.tickets.reopen(posted.ticket_id).await.unwrap();
    fixture.tickets.deliver(&row(posted, "a"), ReplyTarget::Close, &close).await.unwrap();
    assert_eq!(status().await, TicketStatus::Open);
    // A user message arrived after the decision of the model.
    fixture.tickets.post(posted.ticket_id, message("but", Author::User)).await.unwrap();
    fixture.tickets.deliver(&row(posted, "b"), ReplyTarget::Close, &close).await.unwrap();
    fixture.tickets.deliver(&row(posted, "c"), ReplyTarget::HandOver, &close).await.unwrap();
    let ticket = fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    assert_eq!((ticket.status, ticket.handed_over), (TicketStatus::Open, false));
    assert_eq!(published(&fixture).await, ["TICKET_CREATED", "TICKET_CLOSED", "MESSAGE_RECEIVED"]);
}

fn reservation(issue: i64, day: u64, tokens: u64) -> TokenReservation {
    let (issue_id, prompt_tokens) = (IssueId(issue), tokens / 2);
    TokenReservation { id: Uuid::now_v7(), issue_id, day, tokens, prompt_tokens }
}

async fn concurrent_reservations_never_exceed_a_budget(fixture: Fixture) {
    let budget = TokenBudget { issue_tokens_max: 1000, day_tokens_max: 1550 };
    let calls = (0..40).map(|number| {
        let tickets = fixture.tickets.clone();
        tokio::spawn(async move {
            tickets.reserve(&reservation(number % 2, 7, 100), &budget).await.unwrap()
        })
    });
    let mut granted = 0;
    for call in calls.collect::<Vec<_>>() {
        match call.await.unwrap() {
            ReserveDecision::Granted => granted += 1,
            // Nothing is settled, so the budget is not definitely exceeded.
            other => assert_eq!(other, ReserveDecision::Pending),
        }
    }
    assert!(granted <= 15, "{granted}");
    // Rejected concurrent reservations left nothing behind: sequentially, all that fit are granted.
    for number in 0..40 {
        let wanted = reservation(number % 2, 7, 100);
        let reserved = fixture.tickets.reserve(&wanted, &budget).await.unwrap();
        granted += u32::from(reserved == ReserveDecision::Granted);
    }
    assert_eq!(granted, 15);
    assert_eq!(tokens_of_day(&fixture, 7).await, 1500);

    let reserve = async |issue, day, tokens| {
        fixture.tickets.reserve(&reservation(issue, day, tokens), &budget).await.unwrap()
    };
    assert_eq!(reserve(5, 7, 100).await, ReserveDecision::Pending);
    assert_eq!(reserve(5, 8, 1001).await, ReserveDecision::IssueBudgetExceeded);
    assert_eq!(reserve(5, 8, 1551).await, ReserveDecision::IssueBudgetExceeded);
    // Unused tokens are returned, and a rejection reserves nothing.
    let all = reservation(5, 8, 1000);
    assert_eq!(fixture.tickets.reserve(&all, &budget).await.unwrap(), ReserveDecision::Granted);
    assert_eq!(reserve(5, 8, 1).await, ReserveDecision::Pending);
    fixture.tickets.settle(&all, 10).await.unwrap();
    let rest = reservation(5, 8, 990);
    assert_eq!(fixture.tickets.reserve(&rest, &budget).await.unwrap(), ReserveDecision::Granted);
    fixture.tickets.settle(&rest, 990).await.unwrap();
    assert_eq!(reserve(5, 9, 1).await, ReserveDecision::IssueBudgetExceeded);
    assert_eq!(reserve(6, 8, 551).await, ReserveDecision::DayBudgetExceeded);
}

async fn a_reservation_is_settled_once_despite_repeated_or_late_calls(fixture: Fixture) {
    let budget = TokenBudget::default();
    let wanted = reservation(1, 7, 1000);
    assert_eq!(fixture.tickets.reserve(&wanted, &budget).await.unwrap(), ReserveDecision::Granted);
    for used in [300, 300, 5] {
        fixture.tickets.settle(&wanted, used).await.unwrap();
        assert_eq!(tokens_of_day(&fixture, 7).await, 300);
    }
    // Settled before the reservation arrived, with unknown outcome: no tokens used.
    let late = reservation(1, 7, 1000);
    fixture.tickets.settle(&late, 0).await.unwrap();
    fixture.tickets.reserve(&late, &budget).await.unwrap();
    assert_eq!(tokens_of_day(&fixture, 7).await, 300);

    // Aggregation does not change the sum, and the reservation stays settled.
    let open = reservation(1, 7, 1000);
    fixture.tickets.reserve(&open, &budget).await.unwrap();
    for _ in 0..2 {
        fixture.tickets.maintain().await.unwrap();
        fixture.tickets.settle(&wanted, 300).await.unwrap();
        assert_eq!(tokens_of_day(&fixture, 7).await, 1300);
    }
    fixture.tickets.settle(&open, 200).await.unwrap();
    fixture.tickets.maintain().await.unwrap();
    assert_eq!(
        (tokens_of_day(&fixture, 7).await, query_number(&fixture, AGGREGATED).await),
        (500, 500)
    );
}

async fn an_unsettled_reservation_expires_and_counts_as_its_prompt(fixture: Fixture) {
    let budget = TokenBudget { issue_tokens_max: 1000, day_tokens_max: 1000 };
    let lost = reservation(1, 7, 1000);
    assert_eq!(fixture.tickets.reserve(&lost, &budget).await.unwrap(), ReserveDecision::Granted);
    let wanted = reservation(1, 7, 500);
    assert_eq!(fixture.tickets.reserve(&wanted, &budget).await.unwrap(), ReserveDecision::Pending);
    execute(&fixture, "UPDATE desk_reservations SET expires_at = 1").await;
    assert_eq!(fixture.tickets.reserve(&wanted, &budget).await.unwrap(), ReserveDecision::Granted);
    fixture.tickets.settle(&wanted, 100).await.unwrap();
    fixture.tickets.maintain().await.unwrap();
    assert_eq!(
        (tokens_of_day(&fixture, 7).await, query_number(&fixture, AGGREGATED).await),
        (600, 600)
    );
    // Aggregated rows are deleted later.
    execute(&fixture, "UPDATE desk_reservations SET expires_at = 1").await;
    fixture.tickets.maintain().await.unwrap();
    assert_eq!(query_number(&fixture, "SELECT count(*) FROM desk_reservations").await, 0);
    assert_eq!(tokens_of_day(&fixture, 7).await, 600);
}

const AGGREGATED: &str = "SELECT tokens FROM desk_usage WHERE scope = 'day:7'";

/// Tokens counted against a day.
async fn tokens_of_day(fixture: &Fixture, day: u64) -> i64 {
    let usage =
        format!("SELECT coalesce(max(tokens), 0) FROM desk_usage WHERE scope = 'day:{day}'");
    let open = format!(
        "SELECT CAST(coalesce(sum(tokens), 0) AS bigint) FROM desk_reservations WHERE day = {day} AND NOT rolled_up"
    );
    query_number(fixture, &usage).await + query_number(fixture, &open).await
}

async fn query_number(fixture: &Fixture, sql: &str) -> i64 {
    let sql = AssertSqlSafe(sql.to_owned());
    let mut reading = fixture.store.read_connection().await.unwrap();
    let number = match reading.connection() {
        StoreConnection::Sqlite(sqlite) => sqlx::query_scalar(sql).fetch_one(sqlite).await.unwrap(),
        StoreConnection::Postgres(postgres) => {
            sqlx::query_scalar(sql).fetch_one(postgres).await.unwrap()
        }
        other => panic!("{other:?}"),
    };
    reading.release().await;
    number
}

async fn execute(fixture: &Fixture, sql: &str) {
    let mut transaction = fixture.store.begin().await.unwrap();
    let sql = AssertSqlSafe(sql.to_owned());
    match transaction.connection() {
        StoreConnection::Sqlite(sqlite) => {
            sqlx::query(sql).execute(sqlite).await.unwrap();
        }
        StoreConnection::Postgres(postgres) => {
            sqlx::query(sql).execute(postgres).await.unwrap();
        }
        other => panic!("{other:?}"),
    }
    transaction.commit().await.unwrap();
}

async fn a_search_finds_words_only_in_tickets_of_the_same_user(fixture: Fixture) {
    let mine =
        fixture.tickets.create(ticket("Router 100% broken", "no light", "ada")).await.unwrap();
    fixture
        .tickets
        .deliver(&row(mine, "k"), ReplyTarget::Answer, &reply("Turn it off"))
        .await
        .unwrap();
    fixture.tickets.create(ticket("Router secret of bob", "bobs password", "bob")).await.unwrap();
    let here = fixture.tickets.create(ticket("Router again", "router", "ada")).await.unwrap();
    let found = async |words: &str, user: Option<&str>| {
        let query = SearchQuery {
            words: words.into(),
            user_id: user.map(str::to_owned),
            except: here.ticket_id.to_string(),
        };
        let found = fixture.tickets.search(&query).await.unwrap();
        found.into_iter().map(|ticket| (ticket.title, ticket.answer)).collect::<Vec<_>>()
    };
    let expected = vec![("Router 100% broken".to_owned(), Some("Turn it off".to_owned()))];
    assert_eq!(found("my ROUTER please", Some("ada")).await, expected);
    assert_eq!(found("LIGHT", Some("ada")).await, expected);
    assert_eq!(found("100%", Some("ada")).await, expected);
    for nothing in ["%%%", "___", "a", "", "password"] {
        assert_eq!(found(nothing, Some("ada")).await, [], "{nothing}");
    }
    assert_eq!(found("router", None).await.len(), 2);
}

//! The tables of tickets, on SQLite and on Postgres: one suite for both.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use headwater::desk::budget::{Budget, Ledger, Reservation, Reserved};
use headwater::desk::tools::{SearchQuery, TicketSearch};
use headwater::desk::{Reply, ReplyTarget};
use headwater::tickets::{Author, TicketEvent, TicketEventType, TicketPayload};
use headwater::tickets::{
    NewTicket, NewTicketMessage, Posted, TakenIn, TicketError, TicketFilter, TicketStatus, Tickets,
};
use headwater_analytics::RunFigures;
use headwater_issue::{
    Connection, DeliverError, IssueId, Nudger, OutboxId, OutboxKind, OutboxRow, Quiet, Store,
    StoreOptions, connect,
};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use headwater_testkit::Postgres;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

struct Place {
    store: Arc<dyn Store>,
    tickets: Tickets,
    _keep: Box<dyn Any>,
}

async fn place(url: &str, keep: Box<dyn Any>) -> Place {
    let store = connect(url, &StoreOptions::default()).await.unwrap();
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await.unwrap();
    let nudger = Nudger::new(streams);
    let tickets =
        Tickets::open(Arc::clone(&store), nudger.clone(), Quiet::default()).await.unwrap();
    // Opening again finds everything there.
    Tickets::open(Arc::clone(&store), nudger, Quiet::default()).await.unwrap();
    Place { store, tickets, _keep: keep }
}

async fn sqlite() -> Place {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/tickets.db", directory.path().display());
    place(&url, Box::new(directory)).await
}

async fn postgres() -> Place {
    let database = Postgres::shared().unwrap().database().unwrap();
    place(&database.url(), Box::new(database)).await
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
    a_ticket_its_event_and_what_others_are_told_are_one,
    a_call_that_is_repeated_changes_nothing_and_another_under_its_id_is_refused,
    of_many_calls_with_one_message_id_one_counts,
    a_message_of_a_user_opens_a_closed_ticket_again,
    lists_are_filtered_and_come_in_pages,
    texts_come_back_as_they_were_whatever_they_look_like,
    what_breaks_a_limit_is_refused_and_nothing_is_written,
    what_other_programs_say_is_taken_in_once,
    a_reply_that_comes_twice_is_one_message,
    a_wish_to_close_that_was_overtaken_is_not_granted,
    however_many_ask_at_once_no_budget_is_exceeded,
    a_reservation_is_settled_once_whatever_is_repeated_or_late,
    a_reservation_whose_process_died_expires_and_counts_as_its_prompt,
    a_search_finds_words_in_tickets_of_the_same_user_only,
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

async fn opened(place: &Place) -> Posted {
    place.tickets.create(ticket("Parcel", "Where is it?", "ada")).await.unwrap()
}

fn row(posted: Posted, key: &str) -> OutboxRow {
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

fn reply(content: &str) -> Reply {
    let run = RunFigures { events: Some(1), tokens_in: Some(20), ..RunFigures::default() };
    Reply { content: content.into(), message_id: None, session_id: None, up_to: None, run }
}

fn foreign(event_type: TicketEventType, ticket_id: Uuid, content: &str) -> TicketEvent {
    // 2026-01-01.
    let payload = TicketPayload::new(content, Timestamp::from_millis(1_767_225_600_000));
    TicketEvent { event_type, ticket_id, message_id: Uuid::now_v7(), user_id: None, payload }
}

async fn contents(place: &Place, ticket_id: Uuid) -> Vec<(Author, String)> {
    let messages = place.tickets.messages(ticket_id, 0, 200).await.unwrap();
    messages.into_iter().map(|message| (message.author, message.content)).collect()
}

/// The types of events that others are told of, in order.
async fn told(place: &Place) -> Vec<String> {
    let mut told = Vec::new();
    loop {
        let rows = place.store.take_outbox("t", 100, Duration::from_secs(60)).await.unwrap();
        if rows.is_empty() {
            return told;
        }
        for row in rows {
            assert_eq!(row.target, "ticket_events");
            let json: serde_json::Value = serde_json::from_str(&row.payload).unwrap();
            told.push(json["event_type"].as_str().unwrap().to_owned());
            // Only an answer tells what it took.
            let took = (told.last().unwrap() == "AI_RESPONSE_GENERATED").then_some(20);
            assert_eq!(json["payload"]["tokens_in"].as_u64(), took, "{json}");
            let delivery = headwater_issue::Delivery::Delivered;
            let settlement = headwater_issue::OutboxSettlement {
                id: row.id,
                deliveries: row.deliveries,
                delivery,
            };
            place.store.settle_outbox(&[settlement]).await.unwrap();
        }
    }
}

async fn a_ticket_its_event_and_what_others_are_told_are_one(place: Place) {
    let posted = opened(&place).await;
    let issue = place.store.issue(posted.issue_id).await.unwrap().unwrap();
    assert_eq!((issue.pending_events, issue.external_issue_id), (1, posted.ticket_id.to_string()));
    let ticket = place.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    assert_eq!(
        (ticket.title.as_str(), ticket.status, ticket.issue_id),
        ("Parcel", TicketStatus::Open, posted.issue_id)
    );
    place.tickets.post(posted.ticket_id, message("Hello?", Author::User)).await.unwrap();
    place.tickets.post(posted.ticket_id, message("On its way", Author::Agent)).await.unwrap();
    let issue = place.store.issue(posted.issue_id).await.unwrap().unwrap();
    assert_eq!(issue.pending_events, 3);
    let expected =
        [(Author::User, "Where is it?"), (Author::User, "Hello?"), (Author::Agent, "On its way")];
    let expected = expected.map(|(author, text)| (author, text.to_owned()));
    assert_eq!(contents(&place, posted.ticket_id).await, expected);
    assert_eq!(told(&place).await, ["TICKET_CREATED", "MESSAGE_RECEIVED", "MESSAGE_RECEIVED"]);
}

async fn a_call_that_is_repeated_changes_nothing_and_another_under_its_id_is_refused(place: Place) {
    let id = Uuid::now_v7();
    let new = |title: &str, content: &str| NewTicket {
        message_id: Some(id),
        ..ticket(title, content, "ada")
    };
    let first = place.tickets.create(new("A", "text")).await.unwrap();
    let again = place.tickets.create(new("A", "text")).await.unwrap();
    assert_eq!(again, Posted { duplicate: true, ..first });
    for other in [new("B", "text"), new("A", "other")] {
        assert!(matches!(place.tickets.create(other).await, Err(TicketError::Conflict(_))));
    }
    let id = Uuid::now_v7();
    let new =
        |content: &str| NewTicketMessage { message_id: Some(id), ..message(content, Author::User) };
    let one = place.tickets.post(first.ticket_id, new("x")).await.unwrap();
    assert!(
        !one.duplicate && place.tickets.post(first.ticket_id, new("x")).await.unwrap().duplicate
    );
    assert!(matches!(
        place.tickets.post(first.ticket_id, new("y")).await,
        Err(TicketError::Conflict(_))
    ));
    // Nor can it be taken for a message of another ticket.
    let other = opened(&place).await;
    assert!(matches!(
        place.tickets.post(other.ticket_id, new("x")).await,
        Err(TicketError::Conflict(_))
    ));
    assert_eq!(contents(&place, first.ticket_id).await.len(), 2);
    assert_eq!(place.store.issue(first.issue_id).await.unwrap().unwrap().pending_events, 2);
    let missing = Uuid::now_v7();
    let error = place.tickets.post(missing, new("x")).await.unwrap_err();
    assert!(matches!(error, TicketError::NotFound(id) if id == missing), "{error}");
}

async fn of_many_calls_with_one_message_id_one_counts(place: Place) {
    let posted = opened(&place).await;
    let (of_ticket, of_message) = (Uuid::now_v7(), Uuid::now_v7());
    let calls = (0..16).map(|_| {
        let tickets = place.tickets.clone();
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
    assert_eq!(contents(&place, posted.ticket_id).await.len(), 2);
    assert_eq!(told(&place).await.len(), 3);
}

async fn a_message_of_a_user_opens_a_closed_ticket_again(place: Place) {
    let posted = opened(&place).await;
    let id = posted.ticket_id;
    assert!(place.tickets.close(id).await.unwrap());
    assert!(!place.tickets.close(id).await.unwrap(), "it is closed");
    let status = async || place.tickets.ticket(id).await.unwrap().unwrap().status;
    assert_eq!(status().await, TicketStatus::Closed);
    place.tickets.post(id, message("a note", Author::Agent)).await.unwrap();
    assert_eq!(status().await, TicketStatus::Closed);
    place.tickets.post(id, message("but", Author::User)).await.unwrap();
    assert_eq!(status().await, TicketStatus::Open);
    assert!(place.tickets.close(id).await.unwrap() && place.tickets.reopen(id).await.unwrap());
    assert!(!place.tickets.reopen(id).await.unwrap());
    assert_eq!(status().await, TicketStatus::Open);
    let told = told(&place).await;
    let expected = [
        "TICKET_CREATED",
        "TICKET_CLOSED",
        "MESSAGE_RECEIVED",
        "MESSAGE_RECEIVED",
        "TICKET_CLOSED",
    ];
    assert_eq!(told, expected);
    assert!(matches!(place.tickets.close(Uuid::now_v7()).await, Err(TicketError::NotFound(_))));
}

async fn lists_are_filtered_and_come_in_pages(place: Place) {
    let mut made = Vec::new();
    for number in 0..7 {
        let user = if number % 2 == 0 { "ada" } else { "bob" };
        made.push(place.tickets.create(ticket(&format!("t{number}"), "x", user)).await.unwrap());
    }
    place.tickets.close(made[0].ticket_id).await.unwrap();
    let titles = async |filter: TicketFilter, limit| {
        let tickets = place.tickets.list(&filter, limit).await.unwrap();
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

async fn texts_come_back_as_they_were_whatever_they_look_like(place: Place) {
    for text in [
        "'; DROP TABLE tickets; --",
        "<script>alert(1)</script>&amp;",
        "$1 ? :name %s {} \\ \" ' `",
        "键 ü 😀 \u{202e}",
        "{\"event_type\":\"TICKET_CLOSED\"}",
    ] {
        let new = ticket(text, text, text);
        let posted = place.tickets.create(new).await.unwrap();
        place.tickets.post(posted.ticket_id, message(text, Author::Agent)).await.unwrap();
        let ticket = place.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
        assert_eq!((ticket.title.as_str(), ticket.user_id.as_deref()), (text, Some(text)));
        assert!(
            contents(&place, posted.ticket_id).await.iter().all(|(_, content)| content == text)
        );
        let filter = TicketFilter { user_id: Some(text.into()), ..TicketFilter::default() };
        assert_eq!(place.tickets.list(&filter, 10).await.unwrap().len(), 1);
    }
}

async fn what_breaks_a_limit_is_refused_and_nothing_is_written(place: Place) {
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
        let error = place.tickets.create(new.clone()).await.unwrap_err();
        assert!(matches!(error, TicketError::Invalid(_)), "{new:?}: {error}");
    }
    assert_eq!(place.tickets.list(&TicketFilter::default(), 10).await.unwrap(), []);
    let posted = opened(&place).await;
    let error = place.tickets.post(posted.ticket_id, message("x", Author::Assistant)).await;
    assert!(matches!(error, Err(TicketError::Invalid(_))), "nobody speaks for the model");
}

async fn what_other_programs_say_is_taken_in_once(place: Place) {
    let id = Uuid::now_v7();
    let created = foreign(TicketEventType::TicketCreated, id, "My router\nis broken");
    assert_eq!(place.tickets.take_in(&created).await.unwrap(), TakenIn::New);
    assert_eq!(place.tickets.take_in(&created).await.unwrap(), TakenIn::Known);
    let changed = TicketEvent {
        payload: TicketPayload { content: "other".into(), ..created.payload.clone() },
        ..created.clone()
    };
    assert_eq!(place.tickets.take_in(&changed).await.unwrap(), TakenIn::Known, "the id counts");
    let ticket = place.tickets.ticket(id).await.unwrap().unwrap();
    assert_eq!(ticket.title, "My router");

    let said = foreign(TicketEventType::MessageReceived, id, "Hello?");
    let answered = foreign(TicketEventType::AiResponseGenerated, id, "Turn it off");
    let closed = foreign(TicketEventType::TicketClosed, id, "");
    for event in [&said, &answered, &closed] {
        assert_eq!(place.tickets.take_in(event).await.unwrap(), TakenIn::New, "{event:?}");
        assert_eq!(place.tickets.take_in(event).await.unwrap(), TakenIn::Known, "{event:?}");
    }
    assert_eq!(place.tickets.ticket(id).await.unwrap().unwrap().status, TicketStatus::Closed);
    // An old entry that comes again does not close a ticket that was opened since.
    place.tickets.reopen(id).await.unwrap();
    assert_eq!(place.tickets.take_in(&closed).await.unwrap(), TakenIn::Known);
    assert_eq!(place.tickets.ticket(id).await.unwrap().unwrap().status, TicketStatus::Open);

    // The seed's shortest entry opens a ticket; what no ticket has cannot be answered or closed.
    let sample = foreign(TicketEventType::MessageReceived, Uuid::now_v7(), "");
    assert_eq!(place.tickets.take_in(&sample).await.unwrap(), TakenIn::New);
    for event_type in [TicketEventType::AiResponseGenerated, TicketEventType::TicketClosed] {
        let event = foreign(event_type, Uuid::now_v7(), "x");
        assert!(matches!(place.tickets.take_in(&event).await.unwrap(), TakenIn::Refused(_)));
    }
    let stolen = TicketEvent { ticket_id: sample.ticket_id, ..said };
    assert!(matches!(place.tickets.take_in(&stolen).await.unwrap(), TakenIn::Refused(_)));
    // Others know it already: they said it.
    assert_eq!(told(&place).await, Vec::<String>::new());
    let issue = place.store.find_issue("desk", "", &id.to_string()).await.unwrap().unwrap();
    assert_eq!(issue.pending_events, 5);
}

async fn a_reply_that_comes_twice_is_one_message(place: Place) {
    let posted = opened(&place).await;
    let row = row(posted, "key-1");
    let reply = reply("It is <b>here</b>");
    for _ in 0..2 {
        place.tickets.deliver(&row, ReplyTarget::Answer, &reply).await.unwrap();
        place.tickets.deliver(&row, ReplyTarget::HandOver, &reply).await.unwrap();
    }
    let contents = contents(&place, posted.ticket_id).await;
    assert_eq!(contents[1..], [(Author::Assistant, "It is <b>here</b>".to_owned())]);
    assert!(place.tickets.ticket(posted.ticket_id).await.unwrap().unwrap().handed_over);
    assert_eq!(told(&place).await, ["TICKET_CREATED", "AI_RESPONSE_GENERATED"]);
    let issue = place.store.issue(posted.issue_id).await.unwrap().unwrap();
    assert_eq!(issue.pending_events, 1, "our own answer is no event");
    let nobody = OutboxRow { external_issue_id: Uuid::now_v7().to_string(), ..row.clone() };
    let error = place.tickets.deliver(&nobody, ReplyTarget::Answer, &reply).await.unwrap_err();
    assert!(matches!(error, DeliverError::Dead(_)), "{error}");
}

async fn a_wish_to_close_that_was_overtaken_is_not_granted(place: Place) {
    let posted = opened(&place).await;
    let first = place.store.event_logs(posted.issue_id, &Default::default(), 1).await.unwrap();
    let wish = Reply { up_to: Some(first[0].id.0), ..reply("solved") };
    let status = async || place.tickets.ticket(posted.ticket_id).await.unwrap().unwrap().status;
    place.tickets.deliver(&row(posted, "a"), ReplyTarget::Close, &wish).await.unwrap();
    assert_eq!(status().await, TicketStatus::Closed);

    // It was closed, opened again, and the row comes once more.
    place.tickets.reopen(posted.ticket_id).await.unwrap();
    place.tickets.deliver(&row(posted, "a"), ReplyTarget::Close, &wish).await.unwrap();
    assert_eq!(status().await, TicketStatus::Open);
    // Somebody wrote after the model had decided.
    place.tickets.post(posted.ticket_id, message("but", Author::User)).await.unwrap();
    place.tickets.deliver(&row(posted, "b"), ReplyTarget::Close, &wish).await.unwrap();
    place.tickets.deliver(&row(posted, "c"), ReplyTarget::HandOver, &wish).await.unwrap();
    let ticket = place.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    assert_eq!((ticket.status, ticket.handed_over), (TicketStatus::Open, false));
    assert_eq!(told(&place).await, ["TICKET_CREATED", "TICKET_CLOSED", "MESSAGE_RECEIVED"]);
}

fn reservation(issue: i64, day: u64, tokens: u64) -> Reservation {
    let (issue_id, prompt_tokens) = (IssueId(issue), tokens / 2);
    Reservation { id: Uuid::now_v7(), issue_id, day, tokens, prompt_tokens }
}

async fn however_many_ask_at_once_no_budget_is_exceeded(place: Place) {
    let budget = Budget { issue_tokens_max: 1000, day_tokens_max: 1550 };
    let calls = (0..40).map(|number| {
        let tickets = place.tickets.clone();
        tokio::spawn(async move {
            tickets.reserve(&reservation(number % 2, 7, 100), &budget).await.unwrap()
        })
    });
    let mut granted = 0;
    for call in calls.collect::<Vec<_>>() {
        match call.await.unwrap() {
            Reserved::Granted => granted += 1,
            // Nothing is settled, so nothing is spent for good.
            refused => assert_eq!(refused, Reserved::Pending),
        }
    }
    assert!(granted <= 15, "{granted}");
    // Those that were in each other's way have left nothing behind: one after another, all that fit are granted.
    for number in 0..40 {
        let asked = reservation(number % 2, 7, 100);
        let reserved = place.tickets.reserve(&asked, &budget).await.unwrap();
        granted += u32::from(reserved == Reserved::Granted);
    }
    assert_eq!(granted, 15);
    assert_eq!(spent(&place, 7).await, 1500);

    let ask = async |issue, day, tokens| {
        place.tickets.reserve(&reservation(issue, day, tokens), &budget).await.unwrap()
    };
    assert_eq!(ask(5, 7, 100).await, Reserved::Pending);
    assert_eq!(ask(5, 8, 1001).await, Reserved::IssueSpent);
    assert_eq!(ask(5, 8, 1551).await, Reserved::IssueSpent);
    // What was not used is free again, and a refusal has reserved nothing.
    let all = reservation(5, 8, 1000);
    assert_eq!(place.tickets.reserve(&all, &budget).await.unwrap(), Reserved::Granted);
    assert_eq!(ask(5, 8, 1).await, Reserved::Pending);
    place.tickets.settle(&all, 10).await.unwrap();
    let rest = reservation(5, 8, 990);
    assert_eq!(place.tickets.reserve(&rest, &budget).await.unwrap(), Reserved::Granted);
    place.tickets.settle(&rest, 990).await.unwrap();
    assert_eq!(ask(5, 9, 1).await, Reserved::IssueSpent);
    assert_eq!(ask(6, 8, 551).await, Reserved::DaySpent);
}

async fn a_reservation_is_settled_once_whatever_is_repeated_or_late(place: Place) {
    let budget = Budget::default();
    let asked = reservation(1, 7, 1000);
    assert_eq!(place.tickets.reserve(&asked, &budget).await.unwrap(), Reserved::Granted);
    for used in [300, 300, 5] {
        place.tickets.settle(&asked, used).await.unwrap();
        assert_eq!(spent(&place, 7).await, 300);
    }
    // Settled before it arrived: its outcome was unknown, and nothing was used.
    let late = reservation(1, 7, 1000);
    place.tickets.settle(&late, 0).await.unwrap();
    place.tickets.reserve(&late, &budget).await.unwrap();
    assert_eq!(spent(&place, 7).await, 300);

    // Summed up, it counts the same, and stays settled.
    let open = reservation(1, 7, 1000);
    place.tickets.reserve(&open, &budget).await.unwrap();
    for _ in 0..2 {
        place.tickets.maintain().await.unwrap();
        place.tickets.settle(&asked, 300).await.unwrap();
        assert_eq!(spent(&place, 7).await, 1300);
    }
    place.tickets.settle(&open, 200).await.unwrap();
    place.tickets.maintain().await.unwrap();
    assert_eq!((spent(&place, 7).await, number(&place, SUMMED_UP).await), (500, 500));
}

async fn a_reservation_whose_process_died_expires_and_counts_as_its_prompt(place: Place) {
    let budget = Budget { issue_tokens_max: 1000, day_tokens_max: 1000 };
    let lost = reservation(1, 7, 1000);
    assert_eq!(place.tickets.reserve(&lost, &budget).await.unwrap(), Reserved::Granted);
    let asked = reservation(1, 7, 500);
    assert_eq!(place.tickets.reserve(&asked, &budget).await.unwrap(), Reserved::Pending);
    run(&place, "UPDATE desk_reservations SET expires_at = 1").await;
    assert_eq!(place.tickets.reserve(&asked, &budget).await.unwrap(), Reserved::Granted);
    place.tickets.settle(&asked, 100).await.unwrap();
    place.tickets.maintain().await.unwrap();
    assert_eq!((spent(&place, 7).await, number(&place, SUMMED_UP).await), (600, 600));
    // Rows that were summed up long ago are removed.
    run(&place, "UPDATE desk_reservations SET expires_at = 1").await;
    place.tickets.maintain().await.unwrap();
    assert_eq!(number(&place, "SELECT count(*) FROM desk_reservations").await, 0);
    assert_eq!(spent(&place, 7).await, 600);
}

const SUMMED_UP: &str = "SELECT tokens FROM desk_usage WHERE scope = 'day:7'";

/// What counts against a day.
async fn spent(place: &Place, day: u64) -> i64 {
    let usage =
        format!("SELECT coalesce(max(tokens), 0) FROM desk_usage WHERE scope = 'day:{day}'");
    let open = format!(
        "SELECT CAST(coalesce(sum(tokens), 0) AS bigint) FROM desk_reservations WHERE day = {day} AND NOT rolled_up"
    );
    number(place, &usage).await + number(place, &open).await
}

async fn number(place: &Place, sql: &str) -> i64 {
    let sql = AssertSqlSafe(sql.to_owned());
    let mut reading = place.store.read_connection().await.unwrap();
    let number = match reading.connection() {
        Connection::Sqlite(sqlite) => sqlx::query_scalar(sql).fetch_one(sqlite).await.unwrap(),
        Connection::Postgres(postgres) => {
            sqlx::query_scalar(sql).fetch_one(postgres).await.unwrap()
        }
        other => panic!("{other:?}"),
    };
    reading.release().await;
    number
}

async fn run(place: &Place, sql: &str) {
    let mut transaction = place.store.begin().await.unwrap();
    let sql = AssertSqlSafe(sql.to_owned());
    match transaction.connection() {
        Connection::Sqlite(sqlite) => drop(sqlx::query(sql).execute(sqlite).await.unwrap()),
        Connection::Postgres(postgres) => drop(sqlx::query(sql).execute(postgres).await.unwrap()),
        other => panic!("{other:?}"),
    }
    transaction.commit().await.unwrap();
}

async fn a_search_finds_words_in_tickets_of_the_same_user_only(place: Place) {
    let mine = place.tickets.create(ticket("Router 100% broken", "no light", "ada")).await.unwrap();
    place
        .tickets
        .deliver(&row(mine, "k"), ReplyTarget::Answer, &reply("Turn it off"))
        .await
        .unwrap();
    place.tickets.create(ticket("Router secret of bob", "bobs password", "bob")).await.unwrap();
    let here = place.tickets.create(ticket("Router again", "router", "ada")).await.unwrap();
    let found = async |words: &str, user: Option<&str>| {
        let query = SearchQuery {
            words: words.into(),
            user_id: user.map(str::to_owned),
            except: here.ticket_id.to_string(),
        };
        let found = place.tickets.search(&query).await.unwrap();
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

//! The ticket store on SQLite and PostgreSQL: one suite for both.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod effects;
mod ledger;
mod search;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater::desk::{DeskReply, ReplyTarget};
use headwater::tickets::{Author, TicketEvent, TicketEventType, TicketPayload};
use headwater::tickets::{
    ImportOutcome, NewTicket, NewTicketMessage, PostedMessage, TicketError, TicketFilter,
    TicketStatus, Tickets,
};
use headwater_analytics::RunMetrics;
use headwater_issue::{
    DebounceWindow, DeliverError, Nudger, OutboxId, OutboxKind, OutboxRow, Store, StoreOptions,
    connect,
};
use headwater_stream::EntryId;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use headwater_testkit::Postgres;
use uuid::Uuid;

use crate::effects::{
    a_call_has_one_row_one_key_and_one_outcome, a_run_that_has_lost_its_claim_begins_no_effect,
};
use crate::ledger::{
    a_reservation_is_settled_once_despite_repeated_or_late_calls,
    a_spent_budget_of_an_integration_or_an_author_stops_no_other,
    an_unsettled_reservation_expires_and_counts_as_its_prompt,
    concurrent_reservations_never_exceed_a_budget,
    the_next_run_of_an_issue_lets_what_a_dead_one_has_reserved_expire_soon,
};
use crate::search::{
    a_list_is_searched_within_its_filter, a_search_finds_words_only_in_tickets_of_the_same_user,
    a_search_of_a_list_continues_where_its_page_ended,
};

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tickets_and_event_logs_have_the_time_of_the_database() {
    let fixture = postgres().await;
    let mut transaction = fixture.store.begin().await.unwrap();
    let later =
        "CREATE OR REPLACE FUNCTION headwater_now() RETURNS timestamptz LANGUAGE sql VOLATILE
        AS $$ SELECT date_trunc('milliseconds', clock_timestamp() + interval '1 hour') $$";
    transaction.connection().execute(later, &[]).await.unwrap();
    transaction.commit().await.unwrap();
    let posted = open_ticket(&fixture).await;
    let ticket = fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    let message = fixture.tickets.messages(posted.ticket_id, 0, 1).await.unwrap().remove(0);
    let log = fixture.store.event_logs(posted.issue_id, &Default::default(), 1).await.unwrap();
    for at in [ticket.created_at, ticket.updated_at, message.created_at] {
        let difference = at.since(log[0].created_at).max(log[0].created_at.since(at));
        assert!(difference < Duration::from_secs(60), "{difference:?}");
    }
    assert!(ticket.created_at.since(SystemClock.now()) > Duration::from_secs(50 * 60));
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
    entries_of_a_ticket_have_one_result_in_any_order,
    a_change_over_http_has_the_place_of_its_entry_in_the_stream,
    imported_messages_know_their_entries,
    a_ticket_has_the_title_and_user_of_its_first_event_in_any_order,
    an_event_of_another_user_does_not_change_the_user_of_a_ticket,
    a_reply_delivered_twice_is_one_message,
    a_close_superseded_by_newer_events_is_discarded,
    a_hand_over_is_applied_despite_newer_messages_and_ended_only_by_reopening,
    concurrent_reservations_never_exceed_a_budget,
    a_spent_budget_of_an_integration_or_an_author_stops_no_other,
    a_reservation_is_settled_once_despite_repeated_or_late_calls,
    an_unsettled_reservation_expires_and_counts_as_its_prompt,
    the_next_run_of_an_issue_lets_what_a_dead_one_has_reserved_expire_soon,
    a_search_finds_words_only_in_tickets_of_the_same_user,
    a_list_is_searched_within_its_filter,
    a_search_of_a_list_continues_where_its_page_ended,
    a_run_that_has_lost_its_claim_begins_no_effect,
    a_call_has_one_row_one_key_and_one_outcome,
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
    NewTicketMessage { content: content.into(), author, agent: None, message_id: None }
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
            let json: serde_json::Value = serde_json::from_str(&row.payload).unwrap();
            let event_type = json["event_type"].as_str().unwrap();
            // Hand-overs are reported in another stream, which other programs do not read.
            let is_of_the_desk = event_type == "ISSUE_HANDED_OVER";
            let target = if is_of_the_desk { "desk_events" } else { "ticket_events" };
            assert_eq!(row.target, target, "{json}");
            if !is_of_the_desk {
                published.push(event_type.to_owned());
                // Only an answer has run metrics.
                let took = (event_type == "AI_RESPONSE_GENERATED").then_some(20);
                assert_eq!(json["payload"]["tokens_in"].as_u64(), took, "{json}");
            }
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
    let (rest, _) = titles(TicketFilter { after: cursor, ..all.clone() }, 4).await;
    assert_eq!(rest, ["t2", "t1", "t0"]);
    let ada = TicketFilter { user_id: Some("ada".into()), ..all.clone() };
    assert_eq!(titles(ada.clone(), 10).await.0, ["t6", "t4", "t2", "t0"]);
    let open = TicketFilter { status: Some(TicketStatus::Open), ..ada.clone() };
    assert_eq!(titles(open.clone(), 10).await.0, ["t6", "t4", "t2"]);
    let closed = TicketFilter { status: Some(TicketStatus::Closed), ..all };
    assert_eq!(titles(closed.clone(), 10).await.0, ["t0"]);
    let oldest_first =
        |filter: &TicketFilter| TicketFilter { oldest_first: true, ..filter.clone() };
    let all = TicketFilter::default();
    let (first, cursor) = titles(oldest_first(&all), 4).await;
    assert_eq!(first, ["t0", "t1", "t2", "t3"]);
    let rest = TicketFilter { after: cursor, ..oldest_first(&all) };
    assert_eq!(titles(rest, 4).await.0, ["t4", "t5", "t6"]);
    assert_eq!(titles(oldest_first(&ada), 10).await.0, ["t0", "t2", "t4", "t6"]);
    assert_eq!(titles(oldest_first(&open), 10).await.0, ["t2", "t4", "t6"]);
    assert_eq!(titles(oldest_first(&closed), 10).await.0, ["t0"]);
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

/// Imports an event from the next entry of the stream.
async fn import(fixture: &Fixture, event: &TicketEvent) -> Result<ImportOutcome, TicketError> {
    static ENTRIES: AtomicU64 = AtomicU64::new(1);
    let entry_id = EntryId { ms: ENTRIES.fetch_add(1, Ordering::SeqCst), seq: 0 };
    fixture.tickets.import_event(event, entry_id).await
}

async fn entries_of_a_ticket_have_one_result_in_any_order(fixture: Fixture) {
    let kinds = [
        (TicketEventType::TicketCreated, "It is broken"),
        (TicketEventType::MessageReceived, "Hello?"),
        (TicketEventType::TicketClosed, ""),
        (TicketEventType::MessageReceived, "Again"),
    ];
    // The order of the imports, and the event that needs no answer any more.
    for (order, late) in [
        (&[0, 1, 2][..], None),
        (&[1, 0, 2], None),
        (&[0, 2, 1], Some("MESSAGE_RECEIVED")),
        (&[1, 2, 0], Some("TICKET_CREATED")),
        (&[0, 1, 3, 2], Some("TICKET_CLOSED")),
        (&[3, 1, 0, 2], Some("TICKET_CLOSED")),
        (&[0, 2, 3, 1], None),
        (&[1, 2, 3, 0], None),
    ] {
        let id = Uuid::now_v7();
        for number in order {
            let mut event = external_event(kinds[*number].0, id, kinds[*number].1);
            event.payload.title = (*number == 0).then(|| "My router".into());
            let entry_id = EntryId { ms: 1_700_000_000_000, seq: *number as u64 };
            let imported = fixture.tickets.import_event(&event, entry_id).await.unwrap();
            assert_eq!(imported, ImportOutcome::Imported, "{order:?}");
        }
        let ticket = fixture.tickets.ticket(id).await.unwrap().unwrap();
        let status = if order.contains(&3) { TicketStatus::Open } else { TicketStatus::Closed };
        assert_eq!((ticket.title.as_str(), ticket.status), ("My router", status), "{order:?}");
        let logs = fixture.store.event_logs(ticket.issue_id, &Default::default(), 9).await.unwrap();
        let found = logs.iter().find(|log| log.payload.contains("late"));
        assert_eq!(found.map(|log| log.event_type.as_str()), late, "{order:?}");
    }
}

async fn a_change_over_http_has_the_place_of_its_entry_in_the_stream(fixture: Fixture) {
    let Fixture { tickets, .. } = &fixture;
    let entry = |seq| EntryId { ms: 1_700_000_000_000, seq };
    let status = async |id| tickets.ticket(id).await.unwrap().unwrap().status;
    // The event of the newest change, as it is read from the stream.
    let published = async |issue_id| {
        let logs = fixture.store.event_logs(issue_id, &Default::default(), 99).await.unwrap();
        serde_json::from_str::<TicketEvent>(&logs.last().unwrap().payload).unwrap()
    };
    // A message before the closing is imported before its entry is read, or after.
    for is_read_first in [false, true] {
        let posted = open_ticket(&fixture).await;
        let id = posted.ticket_id;
        tickets.close(id).await.unwrap();
        let closed = published(posted.issue_id).await;
        let earlier = external_event(TicketEventType::MessageReceived, id, "Earlier");
        let mut both = [(&earlier, 1), (&closed, 2)];
        if is_read_first {
            both.reverse();
        }
        for (event, place) in both {
            tickets.import_event(event, entry(place)).await.unwrap();
        }
        assert_eq!(status(id).await, TicketStatus::Closed, "{is_read_first}");
        let later = external_event(TicketEventType::MessageReceived, id, "Later");
        tickets.import_event(&later, entry(3)).await.unwrap();
        assert_eq!(status(id).await, TicketStatus::Open);
        // Repeated.
        tickets.import_event(&closed, entry(2)).await.unwrap();
        assert_eq!(status(id).await, TicketStatus::Open);
    }
    // Reopened over HTTP before the entry of the closing is read.
    let posted = open_ticket(&fixture).await;
    tickets.close(posted.ticket_id).await.unwrap();
    let closed = published(posted.issue_id).await;
    tickets.reopen(posted.ticket_id).await.unwrap();
    tickets.import_event(&closed, entry(4)).await.unwrap();
    assert_eq!(status(posted.ticket_id).await, TicketStatus::Open);
    // A message over HTTP, and an earlier closing by another program.
    let said = message("Over HTTP", Author::User);
    tickets.post(posted.ticket_id, said).await.unwrap();
    let said = published(posted.issue_id).await;
    let closing = external_event(TicketEventType::TicketClosed, posted.ticket_id, "");
    tickets.import_event(&closing, entry(5)).await.unwrap();
    tickets.import_event(&said, entry(6)).await.unwrap();
    assert_eq!(status(posted.ticket_id).await, TicketStatus::Open);
}

async fn imported_messages_know_their_entries(fixture: Fixture) {
    let id = Uuid::now_v7();
    for seq in [2, 1] {
        let event = external_event(TicketEventType::MessageReceived, id, &seq.to_string());
        let entry_id = EntryId { ms: 1_700_000_000_000, seq };
        fixture.tickets.import_event(&event, entry_id).await.unwrap();
    }
    let messages = fixture.tickets.messages(id, 0, 9).await.unwrap();
    assert_eq!(messages.len(), 2);
    assert!(messages[0].entry > messages[1].entry, "{messages:?}");
}

async fn a_ticket_has_the_title_and_user_of_its_first_event_in_any_order(fixture: Fixture) {
    // With and without a title of its own; with the id of the message, or with another one.
    for (title, expected) in [(Some("My router"), "My router"), (None, "It is broken")] {
        for same_id in [false, true] {
            for created_first in [true, false] {
                let id = Uuid::now_v7();
                let mut created =
                    external_event(TicketEventType::TicketCreated, id, "It is broken\nsince May");
                created.payload.title = title.map(Into::into);
                created.user_id = Some("ada".into());
                let mut said = external_event(TicketEventType::MessageReceived, id, "Hello?");
                said.user_id = None;
                if same_id {
                    said.message_id = created.message_id;
                }
                let order = if created_first { [&created, &said] } else { [&said, &created] };
                for event in order {
                    import(&fixture, event).await.unwrap();
                }
                // An entry may be delivered again.
                assert_eq!(import(&fixture, &created).await.unwrap(), ImportOutcome::Duplicate);
                let ticket = fixture.tickets.ticket(id).await.unwrap().unwrap();
                assert_eq!(
                    (ticket.title.as_str(), ticket.user_id.as_deref()),
                    (expected, Some("ada")),
                    "same id: {same_id}, created first: {created_first}"
                );
            }
        }
    }
    // Without any text the message keeps its title.
    let id = Uuid::now_v7();
    let said = external_event(TicketEventType::MessageReceived, id, "Hello?");
    let created = external_event(TicketEventType::TicketCreated, id, "");
    for event in [&said, &created] {
        import(&fixture, event).await.unwrap();
    }
    assert_eq!(fixture.tickets.ticket(id).await.unwrap().unwrap().title, "Hello?");
    // A ticket that was opened over HTTP keeps its title and user.
    let posted = open_ticket(&fixture).await;
    let before = fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    let mut created = external_event(TicketEventType::TicketCreated, posted.ticket_id, "Other");
    created.user_id = Some("eve".into());
    import(&fixture, &created).await.unwrap();
    let after = fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    assert_eq!((after.title, after.user_id), (before.title, before.user_id));
}

async fn an_event_of_another_user_does_not_change_the_user_of_a_ticket(fixture: Fixture) {
    let posted = open_ticket(&fixture).await;
    let mut event = external_event(TicketEventType::MessageReceived, posted.ticket_id, "Hello");
    event.user_id = Some("eve".into());
    import(&fixture, &event).await.unwrap();
    let logs = fixture.store.event_logs(posted.issue_id, &Default::default(), 9).await.unwrap();
    assert!(logs.iter().all(|log| log.payload.contains("\"ada\"")), "{logs:?}");
}

async fn events_of_other_programs_are_imported_once(fixture: Fixture) {
    let id = Uuid::now_v7();
    let created = external_event(TicketEventType::TicketCreated, id, "My router\nis broken");
    assert_eq!(import(&fixture, &created).await.unwrap(), ImportOutcome::Imported);
    assert_eq!(import(&fixture, &created).await.unwrap(), ImportOutcome::Duplicate);
    let changed = TicketEvent {
        payload: TicketPayload { content: "other".into(), ..created.payload.clone() },
        ..created.clone()
    };
    assert_eq!(
        import(&fixture, &changed).await.unwrap(),
        ImportOutcome::Duplicate,
        "the message id decides"
    );
    let ticket = fixture.tickets.ticket(id).await.unwrap().unwrap();
    assert_eq!(ticket.title, "My router");

    let said = external_event(TicketEventType::MessageReceived, id, "Hello?");
    let answered = external_event(TicketEventType::AiResponseGenerated, id, "Turn it off");
    let closed = external_event(TicketEventType::TicketClosed, id, "");
    for event in [&said, &answered, &closed] {
        assert_eq!(import(&fixture, event).await.unwrap(), ImportOutcome::Imported, "{event:?}");
        assert_eq!(import(&fixture, event).await.unwrap(), ImportOutcome::Duplicate, "{event:?}");
    }
    assert_eq!(fixture.tickets.ticket(id).await.unwrap().unwrap().status, TicketStatus::Closed);
    // A repeated old entry does not close a reopened ticket.
    fixture.tickets.reopen(id).await.unwrap();
    assert_eq!(import(&fixture, &closed).await.unwrap(), ImportOutcome::Duplicate);
    assert_eq!(fixture.tickets.ticket(id).await.unwrap().unwrap().status, TicketStatus::Open);

    // The minimal entry opens a ticket; an unknown ticket cannot be answered or closed.
    let sample = external_event(TicketEventType::MessageReceived, Uuid::now_v7(), "");
    assert_eq!(import(&fixture, &sample).await.unwrap(), ImportOutcome::Imported);
    for event_type in [TicketEventType::AiResponseGenerated, TicketEventType::TicketClosed] {
        let event = external_event(event_type, Uuid::now_v7(), "x");
        assert!(matches!(import(&fixture, &event).await.unwrap(), ImportOutcome::NoTicket));
    }
    let stolen = TicketEvent { ticket_id: sample.ticket_id, ..said };
    assert!(matches!(import(&fixture, &stolen).await.unwrap(), ImportOutcome::Rejected(_)));
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
    assert_eq!(status().await, TicketStatus::Open);
    assert_eq!(published(&fixture).await, ["TICKET_CREATED", "TICKET_CLOSED", "MESSAGE_RECEIVED"]);
}

async fn a_hand_over_is_applied_despite_newer_messages_and_ended_only_by_reopening(
    fixture: Fixture,
) {
    let posted = open_ticket(&fixture).await;
    let first = fixture.store.event_logs(posted.issue_id, &Default::default(), 1).await.unwrap();
    let hand_over = DeskReply { up_to: Some(first[0].id.0), ..reply("wants a person") };
    let deliver = async || {
        let row = row(posted, "a");
        fixture.tickets.deliver(&row, ReplyTarget::HandOver, &hand_over).await.unwrap();
        fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap().handed_over
    };
    // The user writes once more before the row is delivered.
    fixture.tickets.post(posted.ticket_id, message("Hello?", Author::User)).await.unwrap();
    assert!(deliver().await);
    fixture.tickets.close(posted.ticket_id).await.unwrap();
    fixture.tickets.post(posted.ticket_id, message("Anyone?", Author::User)).await.unwrap();
    assert!(deliver().await, "a message reopens the ticket and does not end the hand-over");
    assert!(fixture.tickets.reopen(posted.ticket_id).await.unwrap());
    assert!(!deliver().await, "the row is older than the reopening");

    // Facts about tool calls, which the person who reopened the ticket did not know.
    let mut payload = serde_json::to_value(&hand_over).unwrap();
    payload["internal"] = serde_json::json!("it is unknown whether `refund` was carried out");
    let with_facts = OutboxRow { payload: payload.to_string(), ..row(posted, "b") };
    fixture.tickets.deliver(&with_facts, ReplyTarget::HandOver, &hand_over).await.unwrap();
    let ticket = fixture.tickets.ticket(posted.ticket_id).await.unwrap().unwrap();
    assert!(ticket.handed_over && ticket.hand_over_reason.unwrap().contains("`refund`"));
}

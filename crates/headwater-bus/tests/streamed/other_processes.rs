//! Events of other processes.

use std::sync::Arc;

use headwater_bus::{
    EventBus, EventBusExt, EventId, OutgoingEvent, ReceivedEvent, StoreOutcome, SubscribeOptions,
};
use headwater_conformance::bus::{Announced, HandlerLog, Noted};
use tokio::sync::Semaphore;

use crate::fixture::{Fixture, entries, numbers, stored, watch, writes};

on_streams!(
    every_bus_receives_events_of_another_once_and_in_order,
    a_live_subscription_starts_at_the_end_of_the_stream,
    an_entry_of_another_program_is_handled_and_a_copy_for_a_group_is_not,
    a_namespace_handler_receives_events_whatever_the_session,
    no_events_are_received_after_unsubscribe,
    an_entry_has_the_fields_of_the_wire_format,
    publishing_under_the_same_id_from_another_process_is_idempotent,
);

async fn every_bus_receives_events_of_another_once_and_in_order(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (seen_by_ada, seen_by_bob) = (watch(&ada).await, watch(&bob).await);
    for number in 0..50 {
        let result = ada.publish(fixture.noted(number)).await.unwrap();
        assert!(matches!(result.stored, StoreOutcome::Entry(_)));
        assert_eq!(result.handlers_invoked, 1);
    }
    assert_eq!(seen_by_bob.settles_at(50).await, numbers(0..50));
    assert_eq!(seen_by_ada.settles_at(50).await, numbers(0..50));

    bob.publish(fixture.noted(50)).await.unwrap().into_result().unwrap();
    assert_eq!(seen_by_ada.settles_at(51).await, numbers(0..51));
    assert_eq!(seen_by_bob.settles_at(51).await, numbers(0..51));
    ada.close().await.unwrap();
    bob.close().await.unwrap();
}

async fn a_live_subscription_starts_at_the_end_of_the_stream(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    for number in 0..3 {
        ada.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    // The first handler blocks at its first event, so the bus has yet to read the following ones ...
    let (first, gate) = (HandlerLog::default(), Arc::new(Semaphore::new(0)));
    let (seen, opened) = (first.clone(), gate.clone());
    let slow = move |event: ReceivedEvent<Noted>| {
        let (seen, opened) = (seen.clone(), opened.clone());
        async move {
            seen.add(event.number);
            opened.acquire().await.unwrap().forget();
        }
    };
    bob.subscribe::<Noted>(SubscribeOptions::live(), slow).await.unwrap();
    for number in 3..5 {
        ada.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    first.wait_for(1).await;
    // ... when the second subscription starts.
    let second = watch(&bob).await;
    ada.publish(fixture.noted(5)).await.unwrap().into_result().unwrap();
    gate.add_permits(3);
    assert_eq!(first.settles_at(3).await, numbers(3..6));
    assert_eq!(second.settles_at(1).await, numbers(5..6));
}

async fn an_entry_of_another_program_is_handled_and_a_copy_for_a_group_is_not(fixture: Fixture) {
    let bus = fixture.bus().await;
    let log = watch(&bus).await;
    let payload = |number: u64| format!("{{\"number\":{number},\"text\":\"\",\"more\":[]}}");
    let event_type = "conformance.Noted";
    fixture.append(&[("type", event_type), ("payload", &payload(1))]).await;
    let copy = [("type", event_type), ("payload", &payload(1)), ("originalMessageId", "1-1")];
    fixture.append(&copy).await;
    fixture.append(&[("type", event_type), ("payload", &payload(2)), ("timestamp", "?")]).await;
    assert_eq!(log.settles_at(2).await, ["1", "2"]);
}

async fn a_namespace_handler_receives_events_whatever_the_session(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let log = HandlerLog::default();
    let seen = log.clone();
    let note = move |event: ReceivedEvent<Announced>| {
        seen.add(event.number);
        async {}
    };
    bob.subscribe::<Announced>(SubscribeOptions::live(), note).await.unwrap();
    ada.publish(Announced { number: 7 }).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(1).await, ["7"]);
}

async fn no_events_are_received_after_unsubscribe(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (gone, stays) = (HandlerLog::default(), watch(&bob).await);
    let id = bob.subscribe::<Noted>(SubscribeOptions::live(), writes(&gone)).await.unwrap();
    ada.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();
    gone.wait_for(1).await;
    stays.wait_for(1).await;
    assert!(bob.unsubscribe(id).await.unwrap());
    ada.publish(fixture.noted(1)).await.unwrap().into_result().unwrap();
    assert_eq!(stays.settles_at(2).await, ["0", "1"]);
    assert_eq!(gone.lines(), ["0"]);
}

async fn an_entry_has_the_fields_of_the_wire_format(fixture: Fixture) {
    let bus = fixture.bus().await;
    bus.publish(fixture.noted(1)).await.unwrap().into_result().unwrap();
    let entries = entries(&*fixture.connect().await, &fixture.stream()).await;
    let names: Vec<String> = entries[0]
        .fields
        .iter()
        .map(|(name, _)| String::from_utf8(name.to_vec()).unwrap())
        .collect();
    let expected =
        ["type", "payload", "timestamp", "event_id", "version", "origin", "trace_id", "span_id"];
    assert_eq!(names, expected);
    let value =
        |name: &str| String::from_utf8(entries[0].fields.get(name).unwrap().to_vec()).unwrap();
    assert_eq!((value("type").as_str(), value("version").as_str()), ("conformance.Noted", "1"));
    assert_eq!((value("trace_id").len(), value("span_id").len()), (32, 16));
    assert_eq!(value("origin"), bus.origin());
}

async fn publishing_under_the_same_id_from_another_process_is_idempotent(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (seen_by_ada, seen_by_bob) = (watch(&ada).await, watch(&bob).await);
    let event =
        || OutgoingEvent::new(fixture.noted(1)).unwrap().with_id(EventId::new("one").unwrap());
    let first = ada.publish_outgoing(event()).await.unwrap();
    let StoreOutcome::Entry(entry_id) = first.stored else { panic!("{first:?}") };
    for bus in [&ada, &bob, &ada] {
        let again = bus.publish_outgoing(event()).await.unwrap();
        assert_eq!((again.stored, again.handlers_invoked), (StoreOutcome::Duplicate(entry_id), 0));
    }
    assert_eq!(seen_by_ada.settles_at(1).await, ["1"]);
    assert_eq!(seen_by_bob.settles_at(1).await, ["1"]);
    assert_eq!(stored(&*fixture.connect().await, &fixture.stream()).await, [1]);
}

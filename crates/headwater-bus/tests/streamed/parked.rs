//! Undecodable entries.

use headwater_bus::{
    Event, EventBus, EventBusExt, ParkedEntry, ReceivedEvent, RetryParkedOutcome, Scope,
    SubscribeOptions,
};
use headwater_conformance::bus::{HandlerLog, Noted, registry};
use headwater_stream::EntryId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fixture::{Fixture, entries, watch, writes};

on_streams!(
    undecodable_entries_are_parked_once_and_block_no_other,
    a_parked_entry_is_handled_once_its_type_is_registered,
    an_entry_that_panics_the_decoder_is_parked_and_readers_continue,
    an_entry_too_large_to_be_parked_is_parked_without_its_fields,
);

#[derive(Serialize, Deserialize, JsonSchema)]
struct Novel {
    title: String,
}

impl Event for Novel {
    const TYPE: &'static str = "tests.Novel";
    const SCOPE: Scope = Scope::Session;
}

async fn wait_for_parked(bus: &headwater_bus::StreamedBus, count: usize) -> Vec<ParkedEntry> {
    for _ in 0..9000 {
        if bus.parked(EntryId::MIN, 100).await.unwrap().len() >= count {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    bus.parked(EntryId::MIN, 100).await.unwrap()
}

async fn undecodable_entries_are_parked_once_and_block_no_other(fixture: Fixture) {
    // Given two live readers and a group that all read the same entries.
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (first, second, durable) = (watch(&ada).await, watch(&bob).await, HandlerLog::default());
    ada.subscribe::<Noted>(SubscribeOptions::durable("all"), writes(&durable)).await.unwrap();
    let noted = Noted::TYPE;
    let unreadable: [(&[(&str, &str)], &str); 6] = [
        (&[("type", "tests.Novel"), ("payload", "{\"title\":\"x\"}")], "is not registered"),
        (&[("type", noted), ("payload", "{}"), ("version", "9")], "version 9"),
        (&[("type", noted), ("payload", "{\"number\":\"one\"}")], "invalid payload"),
        (&[("type", noted), ("payload", "not json")], "invalid payload"),
        (&[("type", noted)], "`payload` is missing"),
        (&[("something", "else")], "`type` is missing"),
    ];
    let mut ids = Vec::new();
    for (fields, _) in unreadable {
        ids.push(fixture.append(fields).await);
    }
    ada.publish(fixture.noted(7)).await.unwrap().into_result().unwrap();

    // Then the event behind them is handled by all, and each entry is parked once, unchanged.
    for log in [&first, &second, &durable] {
        assert_eq!(log.settles_at(1).await, ["7"]);
    }
    let mut parked = wait_for_parked(&bob, 6).await;
    parked.sort_by_key(|entry| entry.entry_id);
    assert_eq!(parked.iter().map(|entry| entry.entry_id).collect::<Vec<_>>(), ids);
    let originals = entries(&*fixture.connect().await, &fixture.stream()).await;
    for ((entry, (_, reason)), original) in parked.iter().zip(unreadable).zip(originals) {
        assert!(entry.reason.contains(reason), "{}", entry.reason);
        assert_eq!((&entry.stream, &entry.fields), (&fixture.stream(), &original.fields));
        assert!(entry.parked_at.is_some());
    }
    assert_eq!(ada.health().await.parked, 6);
    assert!(bob.delete_parked(parked[0].id).await.unwrap());
    assert!(!bob.delete_parked(parked[0].id).await.unwrap());
    assert_eq!(ada.health().await.parked, 5);
    // None of them is pending in the group.
    ada.close().await.unwrap();
    let stats = fixture.connect().await.stats(&fixture.stream()).await.unwrap().unwrap();
    assert_eq!(stats.groups[0].pending, 0);
}

async fn a_parked_entry_is_handled_once_its_type_is_registered(fixture: Fixture) {
    let old = fixture.bus().await;
    let _watching = watch(&old).await;
    fixture.append(&[("type", Novel::TYPE), ("payload", "{\"title\":\"Emma\"}")]).await;
    let parked = wait_for_parked(&old, 1).await.remove(0);
    assert!(matches!(
        old.retry_parked(parked.id).await.unwrap(),
        RetryParkedOutcome::Unreadable(_)
    ));

    let new = fixture.bus_with(registry().with::<Novel>().unwrap(), fixture.config()).await;
    assert_eq!(new.retry_parked(parked.id).await.unwrap(), RetryParkedOutcome::NoHandler);
    let log = HandlerLog::default();
    let (live, durable) = (log.clone(), log.clone());
    let write = move |event: ReceivedEvent<Novel>| {
        live.add(format_args!("live {}", event.title));
        async {}
    };
    new.subscribe::<Novel>(SubscribeOptions::live(), write).await.unwrap();
    let write = move |event: ReceivedEvent<Novel>| {
        durable.add(format_args!("durable {}", event.title));
        async {}
    };
    new.subscribe::<Novel>(SubscribeOptions::durable("readers"), write).await.unwrap();
    // The new group starts at the beginning and reads the entry, too.
    assert_eq!(log.settles_at(1).await, ["durable Emma"]);
    assert_eq!(new.retry_parked(parked.id).await.unwrap(), RetryParkedOutcome::Handled(2));
    assert_eq!(log.settles_at(3).await, ["durable Emma", "live Emma", "durable Emma"]);
    assert_eq!(new.retry_parked(parked.id).await.unwrap(), RetryParkedOutcome::NotParked);
    assert_eq!(entries(&*fixture.connect().await, &fixture.stream()).await.len(), 1);
    new.close().await.unwrap();
}

/// `Noted` in a later version of the application.
#[derive(Serialize, Deserialize, JsonSchema)]
struct NotedLater {
    number: u64,
}

impl Event for NotedLater {
    const TYPE: &'static str = Noted::TYPE;
    const VERSION: u32 = 2;
    const SCOPE: Scope = Scope::Session;
}

async fn an_entry_that_panics_the_decoder_is_parked_and_readers_continue(fixture: Fixture) {
    // Given an upcaster that panics on unexpected payloads, a live reader and a group.
    let careless = |old: serde_json::Value| {
        Ok(serde_json::json!({ "number": old["number"].as_u64().unwrap() }))
    };
    let registry = headwater_bus::EventRegistry::empty();
    let registry = registry.with_upcaster::<NotedLater>(1, careless).unwrap();
    let bus = fixture.bus_with(registry, fixture.config()).await;
    let (live, durable) = (HandlerLog::default(), HandlerLog::default());
    for (log, subscribe) in
        [(&live, SubscribeOptions::live()), (&durable, SubscribeOptions::durable("all"))]
    {
        let log = log.clone();
        let write = move |event: ReceivedEvent<NotedLater>| {
            log.add(event.number);
            async {}
        };
        bus.subscribe::<NotedLater>(subscribe, write).await.unwrap();
    }
    // When an entry arrives that it panics on, and one that it can convert.
    let bad = fixture.append(&[("type", Noted::TYPE), ("payload", "{}")]).await;
    fixture.append(&[("type", Noted::TYPE), ("payload", "{\"number\":7}")]).await;
    // Then the second is handled by both, and the first is parked.
    for log in [&live, &durable] {
        assert_eq!(log.settles_at(1).await, ["7"]);
    }
    let parked = wait_for_parked(&bus, 1).await;
    assert_eq!(parked.iter().map(|entry| entry.entry_id).collect::<Vec<_>>(), [bad]);
    assert!(parked[0].reason.contains("panicked"), "{}", parked[0].reason);
    bus.close().await.unwrap();
}

async fn an_entry_too_large_to_be_parked_is_parked_without_its_fields(fixture: Fixture) {
    let bus = fixture.bus().await;
    let log = watch(&bus).await;
    let largest = "x".repeat(headwater_stream::limits::ENTRY_BYTES_MAX - 10);
    let id = fixture.append(&[("type", &largest)]).await;
    bus.publish(fixture.noted(1)).await.unwrap().into_result().unwrap();
    let parked = wait_for_parked(&bus, 1).await.remove(0);
    assert_eq!((parked.entry_id, parked.fields.len()), (id, 0));
    assert!(parked.reason.contains("`payload` is missing"), "{}", parked.reason);
    assert_eq!(log.settles_at(1).await, ["1"]);
}

//! Publishing.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::env::{Announced, BusTestEnv, HandlerLog, Noted};
use headwater_bus::BreakerState;
use headwater_bus::EventRegistry;
use headwater_bus::{EventBusExt, StoreOutcome, SubscribeOptions};
use headwater_bus::{EventId, SessionId};
use headwater_bus::{OutgoingEvent, ReceivedEvent};

pub async fn a_batch_keeps_its_order(env: BusTestEnv) {
    let log = HandlerLog::default();
    let seen = log.clone();
    let note = move |event: ReceivedEvent<Noted>| {
        seen.add(event.number);
        async {}
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), note).await.unwrap();
    let results = env.bus.publish_batch((0..100).map(|n| env.noted(n)).collect()).await.unwrap();
    let ids: Vec<_> = results.iter().map(|result| result.as_ref().unwrap().entry_id()).collect();
    assert_eq!(ids.len(), 100);
    assert!(ids.is_sorted(), "{ids:?}");
    let expected: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    assert_eq!(log.lines(), expected);
}

pub async fn an_empty_batch_has_no_results(env: BusTestEnv) {
    assert!(env.bus.publish_all(Vec::new()).await.unwrap().is_empty());
}

pub async fn an_event_has_a_complete_envelope(env: BusTestEnv) {
    let log = HandlerLog::default();
    let seen = log.clone();
    let note = move |event: ReceivedEvent<Noted>| {
        let envelope = &event.envelope;
        seen.add(envelope.event_id.clone());
        seen.add(&envelope.event_type);
        seen.add(envelope.version);
        seen.add(envelope.origin.is_some() && envelope.timestamp.is_some());
        seen.add(envelope.trace().is_some());
        async {}
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), note).await.unwrap();
    let event = OutgoingEvent::new(env.noted(1)).unwrap().with_id(EventId::new("my id").unwrap());
    let result = env.bus.publish_outgoing(event).await.unwrap();
    assert_eq!(result.event_id.as_str(), "my id");
    assert_eq!(log.lines(), ["my id", "conformance.Noted", "1", "true", "true"]);
}

pub async fn a_dropped_publish_is_completed(env: BusTestEnv) {
    let (begun, go_on, log) =
        (Arc::new(Notify::new()), Arc::new(Notify::new()), HandlerLog::default());
    let (started, waits, seen) = (begun.clone(), go_on.clone(), log.clone());
    let slow = move |event: ReceivedEvent<Noted>| {
        let (started, waits, seen) = (started.clone(), waits.clone(), seen.clone());
        async move {
            started.notify_one();
            waits.notified().await;
            seen.add(event.number);
        }
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), slow).await.unwrap();
    tokio::select! {
        _ = env.bus.publish(env.noted(1)) => panic!("the handler has not ended"),
        () = begun.notified() => {}
    }
    go_on.notify_one();
    assert_eq!(log.wait_for(1).await, ["1"]);
}

pub async fn a_healthy_bus_reports_its_health(env: BusTestEnv) {
    let durable = SubscribeOptions::durable("watchers");
    env.bus.subscribe::<Announced>(durable, |_: ReceivedEvent<Announced>| async {}).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    let health = env.bus.health().await;
    assert!(health.connected, "{health:?}");
    assert_eq!((health.breaker, health.problem.as_deref()), (BreakerState::Closed, None));
    assert!(health.latency.unwrap() < Duration::from_secs(30));
    let groups: Vec<&String> =
        health.streams.values().flat_map(|stream| stream.groups.keys()).collect();
    assert!(groups.iter().any(|group| group.ends_with("watchers")), "{health:?}");
    let registry: &EventRegistry = env.bus.registry();
    assert!(registry.schema("conformance.Noted").is_some());
}

pub async fn publishing_under_the_same_id_is_idempotent(env: BusTestEnv) {
    let log = HandlerLog::default();
    for (subscribe, name) in [
        (SubscribeOptions::live(), "live"),
        (SubscribeOptions::durable("ids").session(env.session.clone()), "durable"),
    ] {
        let seen = log.clone();
        let note = move |event: ReceivedEvent<Noted>| {
            seen.add(format_args!("{name} {}", event.number));
            async {}
        };
        env.bus.subscribe::<Noted>(subscribe, note).await.unwrap();
    }
    let event = |number, id: &str| {
        OutgoingEvent::new(env.noted(number)).unwrap().with_id(EventId::new(id).unwrap())
    };
    let first = env.bus.publish_outgoing(event(1, "one")).await.unwrap();
    assert!(!matches!(first.stored, StoreOutcome::Duplicate(_)), "{first:?}");
    for _ in 0..3 {
        let again = env.bus.publish_outgoing(event(1, "one")).await.unwrap();
        assert!(matches!(again.stored, StoreOutcome::Duplicate(_)), "{again:?}");
        assert_eq!((again.handlers_invoked, again.entry_id()), (0, first.entry_id()));
    }
    // In a batch, beside others and beside itself.
    let batch = vec![event(1, "one"), event(2, "two"), event(2, "two"), event(3, "three")];
    let results = env.bus.publish_all(batch).await.unwrap();
    let is_new = |result: &headwater_bus::Result<headwater_bus::PublishResult>| {
        !matches!(result.as_ref().unwrap().stored, StoreOutcome::Duplicate(_))
    };
    assert_eq!(results.iter().map(is_new).collect::<Vec<_>>(), [false, true, false, true]);
    let mut lines = log.settles_at(6).await;
    lines.sort();
    let expected = ["durable 1", "durable 2", "durable 3", "live 1", "live 2", "live 3"];
    assert_eq!(lines, expected);
}

pub async fn event_ids_are_scoped_to_their_session(env: BusTestEnv) {
    let id = || EventId::new("the same").unwrap();
    for _ in 0..2 {
        let session_id = Some(SessionId::random().to_string());
        let event = OutgoingEvent::new(Noted { session_id, ..Default::default() }).unwrap();
        let result = env.bus.publish_outgoing(event.with_id(id())).await.unwrap();
        assert!(!matches!(result.stored, StoreOutcome::Duplicate(_)), "{result:?}");
    }
}

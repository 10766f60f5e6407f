//! Publishing.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use super::env::{Announced, Env, Log, Noted};
use crate::breaker::BreakerState;
use crate::bus::{EventBusExt, Stored, Subscribe};
use crate::event::{Outgoing, Received};
use crate::name::{EventId, SessionId};
use crate::registry::Registry;

pub async fn a_batch_keeps_its_order(env: Env) {
    let log = Log::default();
    let seen = log.clone();
    let note = move |event: Received<Noted>| {
        seen.add(event.number);
        async {}
    };
    env.bus.subscribe::<Noted>(Subscribe::live(), note).await.unwrap();
    let results = env.bus.publish_batch((0..100).map(|n| env.noted(n)).collect()).await.unwrap();
    let ids: Vec<_> = results.iter().map(|result| result.as_ref().unwrap().entry_id()).collect();
    assert_eq!(ids.len(), 100);
    assert!(ids.is_sorted(), "{ids:?}");
    let expected: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    assert_eq!(log.lines(), expected);
}

pub async fn an_empty_batch_is_nothing(env: Env) {
    assert!(env.bus.publish_all(Vec::new()).await.unwrap().is_empty());
}

pub async fn an_event_carries_what_surrounds_it(env: Env) {
    let log = Log::default();
    let seen = log.clone();
    let note = move |event: Received<Noted>| {
        let envelope = &event.envelope;
        seen.add(envelope.event_id.clone());
        seen.add(&envelope.event_type);
        seen.add(envelope.version);
        seen.add(envelope.origin.is_some() && envelope.timestamp.is_some());
        seen.add(envelope.trace().is_some());
        async {}
    };
    env.bus.subscribe::<Noted>(Subscribe::live(), note).await.unwrap();
    let event = Outgoing::new(env.noted(1)).unwrap().with_id(EventId::new("my id").unwrap());
    let result = env.bus.publish_outgoing(event).await.unwrap();
    assert_eq!(result.event_id.as_str(), "my id");
    assert_eq!(log.lines(), ["my id", "conformance.Noted", "1", "true", "true"]);
}

pub async fn a_publish_that_is_dropped_is_carried_out_to_its_end(env: Env) {
    let (begun, go_on, log) = (Arc::new(Notify::new()), Arc::new(Notify::new()), Log::default());
    let (told, waits, seen) = (begun.clone(), go_on.clone(), log.clone());
    let slow = move |event: Received<Noted>| {
        let (told, waits, seen) = (told.clone(), waits.clone(), seen.clone());
        async move {
            told.notify_one();
            waits.notified().await;
            seen.add(event.number);
        }
    };
    env.bus.subscribe::<Noted>(Subscribe::live(), slow).await.unwrap();
    tokio::select! {
        _ = env.bus.publish(env.noted(1)) => panic!("the handler has not ended"),
        () = begun.notified() => {}
    }
    go_on.notify_one();
    assert_eq!(log.wait_for(1).await, ["1"]);
}

pub async fn a_healthy_bus_says_so(env: Env) {
    let durable = Subscribe::durable("watchers");
    env.bus.subscribe::<Announced>(durable, |_: Received<Announced>| async {}).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().raise().unwrap();
    let health = env.bus.health().await;
    assert!(health.connected, "{health:?}");
    assert_eq!((health.breaker, health.problem.as_deref()), (BreakerState::Closed, None));
    assert!(health.latency.unwrap() < Duration::from_secs(30));
    let groups: Vec<&String> =
        health.streams.values().flat_map(|stream| stream.groups.keys()).collect();
    assert!(groups.iter().any(|group| group.ends_with("watchers")), "{health:?}");
    let registry: &Registry = env.bus.registry();
    assert!(registry.schema("conformance.Noted").is_some());
}

pub async fn an_event_with_an_id_counts_once(env: Env) {
    let log = Log::default();
    for (subscribe, name) in [
        (Subscribe::live(), "live"),
        (Subscribe::durable("ids").session(env.session.clone()), "durable"),
    ] {
        let seen = log.clone();
        let note = move |event: Received<Noted>| {
            seen.add(format_args!("{name} {}", event.number));
            async {}
        };
        env.bus.subscribe::<Noted>(subscribe, note).await.unwrap();
    }
    let event = |number, id: &str| {
        Outgoing::new(env.noted(number)).unwrap().with_id(EventId::new(id).unwrap())
    };
    let first = env.bus.publish_outgoing(event(1, "one")).await.unwrap();
    assert!(!matches!(first.stored, Stored::Duplicate(_)), "{first:?}");
    for _ in 0..3 {
        let again = env.bus.publish_outgoing(event(1, "one")).await.unwrap();
        assert!(matches!(again.stored, Stored::Duplicate(_)), "{again:?}");
        assert_eq!((again.handlers_invoked, again.entry_id()), (0, first.entry_id()));
    }
    // In a batch, beside others and beside itself.
    let batch = vec![event(1, "one"), event(2, "two"), event(2, "two"), event(3, "three")];
    let results = env.bus.publish_all(batch).await.unwrap();
    let is_new = |result: &crate::Result<crate::bus::PublishResult>| {
        !matches!(result.as_ref().unwrap().stored, Stored::Duplicate(_))
    };
    assert_eq!(results.iter().map(is_new).collect::<Vec<_>>(), [false, true, false, true]);
    let mut lines = log.settles_at(6).await;
    lines.sort();
    let expected = ["durable 1", "durable 2", "durable 3", "live 1", "live 2", "live 3"];
    assert_eq!(lines, expected);
}

pub async fn an_id_counts_in_its_own_session_only(env: Env) {
    let id = || EventId::new("the same").unwrap();
    for _ in 0..2 {
        let session_id = Some(SessionId::random().to_string());
        let event = Outgoing::new(Noted { session_id, ..Default::default() }).unwrap();
        let result = env.bus.publish_outgoing(event.with_id(id())).await.unwrap();
        assert!(!matches!(result.stored, Stored::Duplicate(_)), "{result:?}");
    }
}

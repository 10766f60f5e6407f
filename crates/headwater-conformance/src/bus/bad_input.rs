//! Invalid input is rejected and has no effect.

use std::time::Duration;

use super::env::{Announced, BusTestEnv, HandlerLog, Noted, Unregistered};
use headwater_bus::BusError;
use headwater_bus::Handlers;
use headwater_bus::SessionId;
use headwater_bus::limits::PAYLOAD_BYTES_MAX;
use headwater_bus::{EventBusExt, SubscribeOptions};
use headwater_bus::{OutgoingEvent, ReceivedEvent};

/// Logs all session events.
async fn watch(env: &BusTestEnv) -> HandlerLog {
    let log = HandlerLog::default();
    let seen = log.clone();
    let note = move |event: ReceivedEvent<Noted>| {
        seen.add(event.number);
        async {}
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), note).await.unwrap();
    log
}

pub async fn an_unregistered_type_is_rejected(env: BusTestEnv) {
    let refused = env.bus.publish(Unregistered {}).await;
    assert!(matches!(refused, Err(BusError::NotRegistered { .. })), "{refused:?}");
    let handler = |_: ReceivedEvent<Unregistered>| async {};
    let refused = env.bus.subscribe::<Unregistered>(SubscribeOptions::live(), handler).await;
    assert!(matches!(refused, Err(BusError::NotRegistered { .. })), "{refused:?}");
}

pub async fn a_payload_of_one_mebibyte_is_accepted_and_a_larger_one_rejected(env: BusTestEnv) {
    let log = watch(&env).await;
    let around = serde_json::to_vec(&env.noted(1)).unwrap().len();
    let text = "x".repeat(PAYLOAD_BYTES_MAX - around);
    let largest = Noted { text: text.clone(), ..env.noted(1) };
    assert_eq!(env.bus.publish(largest).await.unwrap().handlers_invoked, 1);

    let refused = env.bus.publish(Noted { text: text + "x", ..env.noted(2) }).await;
    let too_large = |bytes: usize| bytes == PAYLOAD_BYTES_MAX + 1;
    assert!(matches!(refused, Err(BusError::TooLarge { bytes, .. }) if too_large(bytes)));
    assert_eq!(env.bus.publish(env.noted(3)).await.unwrap().handlers_invoked, 1);
    assert_eq!(log.settles_at(2).await, ["1", "3"]);
}

pub async fn an_invalid_session_id_is_rejected(env: BusTestEnv) {
    let log = watch(&env).await;
    for invalid in ["", "a b", "a\nb", "a:b", "{a}", "unknown", &"x".repeat(65)] {
        let event = Noted { session_id: Some(invalid.to_owned()), ..Default::default() };
        let refused = env.bus.publish(event).await;
        assert!(matches!(refused, Err(BusError::Invalid { .. })), "{invalid:?}: {refused:?}");
    }
    for unusual in ["键", "a/b", "a*?[b]", "a@b.example"] {
        let session = format!("{unusual}-{}", &SessionId::random().as_str()[..8]);
        let event = Noted { session_id: Some(session), ..Default::default() };
        assert_eq!(env.bus.publish(event).await.unwrap().handlers_invoked, 1, "{unusual:?}");
    }
    assert_eq!(log.lines().len(), 4);
}

pub async fn a_session_event_without_a_session_is_rejected(env: BusTestEnv) {
    let refused = env.bus.publish(Noted::default()).await;
    assert!(matches!(refused, Err(BusError::Invalid { .. })), "{refused:?}");
}

pub async fn one_invalid_event_rejects_the_whole_batch(env: BusTestEnv) {
    let log = watch(&env).await;
    let good = OutgoingEvent::new(env.noted(1)).unwrap();
    for bad in [
        OutgoingEvent::new(Unregistered {}).unwrap(),
        OutgoingEvent::new(Noted::default()).unwrap(),
    ] {
        let refused = env.bus.publish_all(vec![good.clone(), bad]).await;
        assert!(refused.is_err());
    }
    env.bus.publish(env.noted(2)).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(1).await, ["2"]);
}

pub async fn invalid_subscriptions_are_rejected(env: BusTestEnv) {
    let nothing = |_: ReceivedEvent<Noted>| async {};
    let no_timeout =
        SubscribeOptions { handler_timeout: Duration::ZERO, ..SubscribeOptions::live() };
    let no_concurrency = SubscribeOptions { concurrency: 0, ..SubscribeOptions::durable("a") };
    let no_session = SubscribeOptions::durable("a");
    let no_idle_time =
        SubscribeOptions { reclaim_idle: Duration::ZERO, ..SubscribeOptions::live() };
    for subscribe in [no_timeout, no_concurrency, no_session, no_idle_time] {
        let refused = env.bus.subscribe::<Noted>(subscribe.clone(), nothing).await;
        assert!(matches!(refused, Err(BusError::Invalid { .. })), "{subscribe:?}: {refused:?}");
    }
    let refused = env.bus.subscribe_handlers(SubscribeOptions::live(), Handlers::new()).await;
    assert!(matches!(refused, Err(BusError::Invalid { .. })), "{refused:?}");
    let mixed = Handlers::new()
        .on::<Noted>(nothing)
        .on::<Announced>(|_: ReceivedEvent<Announced>| async {});
    let of_session = SubscribeOptions::durable("a").session(env.session.clone());
    let refused = env.bus.subscribe_handlers(of_session, mixed).await;
    assert!(matches!(refused, Err(BusError::Invalid { .. })), "{refused:?}");
}

//! Closing a bus.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{Backoff, RetryPolicy};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::env::{Announced, BusTestEnv, HandlerLog, Noted};
use headwater_bus::BusError;
use headwater_bus::ReceivedEvent;
use headwater_bus::{EventBusExt, SubscribeOptions};

pub async fn a_closed_bus_rejects_calls(env: BusTestEnv) {
    env.bus.close().await.unwrap();
    let refused = env.bus.publish(env.noted(1)).await;
    assert!(matches!(refused, Err(BusError::Closed)), "{refused:?}");
    for subscribe in [SubscribeOptions::live(), SubscribeOptions::durable("a")] {
        let refused =
            env.bus.subscribe::<Announced>(subscribe, |_: ReceivedEvent<Announced>| async {}).await;
        assert!(matches!(refused, Err(BusError::Closed)), "{refused:?}");
    }
}

pub async fn closing_waits_for_handlers(env: BusTestEnv) {
    let (begun, log) = (Arc::new(Notify::new()), HandlerLog::default());
    let (started, seen) = (begun.clone(), log.clone());
    let slow = move |event: ReceivedEvent<Noted>| {
        let (started, seen) = (started.clone(), seen.clone());
        async move {
            started.notify_one();
            tokio::time::sleep(Duration::from_millis(200)).await;
            seen.add(event.number);
        }
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), slow).await.unwrap();
    let (bus, event) = (env.bus.clone(), env.noted(1));
    let publishing = tokio::spawn(async move { bus.publish(event).await });
    begun.notified().await;
    env.bus.close().await.unwrap();
    assert_eq!(log.lines(), ["1"]);
    assert!(publishing.await.unwrap().unwrap().ok());
}

pub async fn closing_is_idempotent(env: BusTestEnv) {
    let (first, second) = tokio::join!(env.bus.close(), env.bus.close());
    first.unwrap();
    second.unwrap();
    env.bus.close().await.unwrap();
    assert!(!env.bus.unsubscribe(headwater_bus::SubscriptionId(1)).await.unwrap());
}

pub async fn an_event_waiting_for_its_retry_does_not_delay_closing(env: BusTestEnv) {
    let log = HandlerLog::default();
    let seen = log.clone();
    let fail = move |event: ReceivedEvent<Announced>| {
        seen.add(event.number);
        async { Err::<(), _>("not now") }
    };
    let retry = RetryPolicy {
        max_attempts: Some(5),
        backoff: Backoff::Fixed(Duration::from_secs(3600)),
        ..Default::default()
    };
    let slow_retry = SubscribeOptions { retry, ..SubscribeOptions::durable("slow-retry") };
    env.bus.subscribe::<Announced>(slow_retry, fail).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    log.wait_for(1).await;
    timeout(Duration::from_secs(20), env.bus.close()).await.unwrap().unwrap();
    assert_eq!(log.lines(), ["1"]);
}

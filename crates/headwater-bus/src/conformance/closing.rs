//! How a bus ends.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::{Backoff, RetryPolicy};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::env::{Announced, Env, Log, Noted};
use crate::bus::{EventBusExt, Subscribe};
use crate::error::BusError;
use crate::event::Received;

pub async fn a_closed_bus_refuses_everything(env: Env) {
    env.bus.close().await.unwrap();
    let refused = env.bus.publish(env.noted(1)).await;
    assert!(matches!(refused, Err(BusError::Closed)), "{refused:?}");
    for subscribe in [Subscribe::live(), Subscribe::durable("a")] {
        let refused =
            env.bus.subscribe::<Announced>(subscribe, |_: Received<Announced>| async {}).await;
        assert!(matches!(refused, Err(BusError::Closed)), "{refused:?}");
    }
}

pub async fn closing_waits_for_handlers(env: Env) {
    let (begun, log) = (Arc::new(Notify::new()), Log::default());
    let (told, seen) = (begun.clone(), log.clone());
    let slow = move |event: Received<Noted>| {
        let (told, seen) = (told.clone(), seen.clone());
        async move {
            told.notify_one();
            tokio::time::sleep(Duration::from_millis(200)).await;
            seen.add(event.number);
        }
    };
    env.bus.subscribe::<Noted>(Subscribe::live(), slow).await.unwrap();
    let (bus, event) = (env.bus.clone(), env.noted(1));
    let publishing = tokio::spawn(async move { bus.publish(event).await });
    begun.notified().await;
    env.bus.close().await.unwrap();
    assert_eq!(log.lines(), ["1"]);
    assert!(publishing.await.unwrap().unwrap().ok());
}

pub async fn closing_twice_is_fine(env: Env) {
    let (first, second) = tokio::join!(env.bus.close(), env.bus.close());
    first.unwrap();
    second.unwrap();
    env.bus.close().await.unwrap();
    assert!(!env.bus.unsubscribe(crate::name::SubscriptionId(1)).await.unwrap());
}

pub async fn an_event_that_waits_for_its_next_try_does_not_hold_up_closing(env: Env) {
    let log = Log::default();
    let seen = log.clone();
    let fail = move |event: Received<Announced>| {
        seen.add(event.number);
        async { Err::<(), _>("not now") }
    };
    let retry = RetryPolicy {
        max_attempts: Some(5),
        backoff: Backoff::Fixed(Duration::from_secs(3600)),
        ..Default::default()
    };
    let patient = Subscribe { retry, ..Subscribe::durable("patient") };
    env.bus.subscribe::<Announced>(patient, fail).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().raise().unwrap();
    log.wait_for(1).await;
    timeout(Duration::from_secs(20), env.bus.close()).await.unwrap().unwrap();
    assert_eq!(log.lines(), ["1"]);
}

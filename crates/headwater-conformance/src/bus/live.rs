//! Live subscriptions.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Barrier;

use super::env::{Announced, BusTestEnv, HandlerLog, Noted};
use headwater_bus::Handlers;
use headwater_bus::ReceivedEvent;
use headwater_bus::SessionId;
use headwater_bus::current_trace;
use headwater_bus::{BusError, FailureKind};
use headwater_bus::{EventBusExt, SubscribeOptions};

/// A handler that logs a word and the event's number.
fn writes(
    log: &HandlerLog,
    word: &'static str,
) -> impl Fn(ReceivedEvent<Noted>) -> std::future::Ready<()> + use<> {
    let log = log.clone();
    move |event| {
        log.add(format_args!("{word} {}", event.number));
        std::future::ready(())
    }
}

pub async fn a_handler_receives_each_event_once(env: BusTestEnv) {
    let log = HandlerLog::default();
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "got")).await.unwrap();
    let to_session = SubscribeOptions::live().session(env.session.clone());
    env.bus.subscribe::<Noted>(to_session, writes(&log, "of the session")).await.unwrap();
    let result = env.bus.publish(env.noted(7)).await.unwrap();
    assert_eq!((result.handlers_invoked, result.ok()), (2, true));
    assert!(result.into_result().is_ok());
    assert_eq!(log.settles_at(2).await, ["got 7", "of the session 7"]);
}

pub async fn handlers_run_in_the_order_of_their_subscriptions(env: BusTestEnv) {
    let log = HandlerLog::default();
    for word in ["first", "second", "third", "fourth"] {
        env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, word)).await.unwrap();
    }
    for number in 0..3 {
        let result = env.bus.publish(env.noted(number)).await.unwrap();
        assert_eq!(result.handlers_invoked, 4);
    }
    let words: Vec<String> = log.lines();
    let expected: Vec<String> = (0..3)
        .flat_map(|number| {
            ["first", "second", "third", "fourth"].map(|word| format!("{word} {number}"))
        })
        .collect();
    assert_eq!(words, expected);
}

pub async fn handlers_of_one_subscription_run_in_order(env: BusTestEnv) {
    let log = HandlerLog::default();
    let handlers =
        Handlers::new().on::<Noted>(writes(&log, "first")).on::<Noted>(writes(&log, "second"));
    env.bus.subscribe_handlers(SubscribeOptions::live(), handlers).await.unwrap();
    let result = env.bus.publish(env.noted(1)).await.unwrap();
    assert_eq!(result.handlers_invoked, 2);
    assert_eq!(log.lines(), ["first 1", "second 1"]);
}

pub async fn a_handler_receives_only_events_of_its_type(env: BusTestEnv) {
    let log = HandlerLog::default();
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "noted")).await.unwrap();
    let result = env.bus.publish(Announced { number: 1 }).await.unwrap();
    assert_eq!(result.handlers_invoked, 0);
    assert_eq!(env.bus.publish(env.noted(2)).await.unwrap().handlers_invoked, 1);
    assert_eq!(log.settles_at(1).await, ["noted 2"]);
}

pub async fn a_subscription_to_a_session_receives_only_its_events(env: BusTestEnv) {
    let log = HandlerLog::default();
    let mine = SubscribeOptions::live().session(env.session.clone());
    env.bus.subscribe::<Noted>(mine, writes(&log, "mine")).await.unwrap();
    let other = SubscribeOptions::live().session(SessionId::random());
    env.bus.subscribe::<Noted>(other, writes(&log, "other")).await.unwrap();
    assert_eq!(env.bus.publish(env.noted(1)).await.unwrap().handlers_invoked, 1);
    assert_eq!(log.settles_at(1).await, ["mine 1"]);
}

pub async fn a_failed_handler_does_not_stop_the_others(env: BusTestEnv) {
    let log = HandlerLog::default();
    let refuse = |_: ReceivedEvent<Noted>| async { Err::<(), _>("rejected") };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "before")).await.unwrap();
    let failing = env.bus.subscribe::<Noted>(SubscribeOptions::live(), refuse).await.unwrap();
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "after")).await.unwrap();
    let result = env.bus.publish(env.noted(1)).await.unwrap();
    assert_eq!(log.lines(), ["before 1", "after 1"]);
    assert_eq!((result.handlers_invoked, result.ok()), (3, false));
    let [failure] = result.failures.as_slice() else { panic!("{result:?}") };
    assert_eq!((failure.subscription, failure.kind), (failing, FailureKind::Failed));
    assert_eq!(failure.reason, "rejected");
    assert!(
        matches!(result.into_result(), Err(BusError::Handlers { failures, .. }) if failures.len() == 1)
    );
}

pub async fn a_panicking_handler_does_not_stop_the_others(env: BusTestEnv) {
    let log = HandlerLog::default();
    // One panics before it returns a future, the other while the future is polled.
    let early =
        |event: ReceivedEvent<Noted>| -> std::future::Ready<()> { panic!("at {}", event.number) };
    let late = |_: ReceivedEvent<Noted>| async {
        tokio::task::yield_now().await;
        if true {
            panic!("while polled");
        }
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), early).await.unwrap();
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), late).await.unwrap();
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "after")).await.unwrap();
    for number in 1..3 {
        let result = env.bus.publish(env.noted(number)).await.unwrap();
        let reasons: Vec<&str> = result.failures.iter().map(|f| f.reason.as_str()).collect();
        assert!(reasons[0].contains(&format!("at {number}")), "{reasons:?}");
        assert!(reasons[1].contains("while polled"), "{reasons:?}");
        assert!(result.failures.iter().all(|failure| failure.kind == FailureKind::Panicked));
    }
    assert_eq!(log.lines(), ["after 1", "after 2"]);
}

pub async fn a_handler_that_exceeds_its_timeout_has_failed(env: BusTestEnv) {
    let log = HandlerLog::default();
    let never = |_: ReceivedEvent<Noted>| std::future::pending::<()>();
    let impatient =
        SubscribeOptions { handler_timeout: Duration::from_millis(50), ..SubscribeOptions::live() };
    env.bus.subscribe::<Noted>(impatient, never).await.unwrap();
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "after")).await.unwrap();
    let result = env.bus.publish(env.noted(1)).await.unwrap();
    assert_eq!(result.failures[0].kind, FailureKind::TimedOut);
    assert_eq!(log.lines(), ["after 1"]);
}

pub async fn unsubscribe_returns_whether_the_subscription_existed(env: BusTestEnv) {
    let log = HandlerLog::default();
    let first =
        env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "a")).await.unwrap();
    let second =
        env.bus.subscribe::<Noted>(SubscribeOptions::live(), writes(&log, "b")).await.unwrap();
    assert!(env.bus.unsubscribe(first).await.unwrap());
    assert!(!env.bus.unsubscribe(first).await.unwrap());
    assert_eq!(env.bus.publish(env.noted(1)).await.unwrap().handlers_invoked, 1);
    assert!(env.bus.unsubscribe(second).await.unwrap());
    assert_eq!(env.bus.publish(env.noted(2)).await.unwrap().handlers_invoked, 0);
    assert_eq!(log.settles_at(1).await, ["b 1"]);
}

pub async fn an_event_published_by_a_handler_joins_the_trace(env: BusTestEnv) {
    let log = HandlerLog::default();
    let seen = log.clone();
    let note = move |event: ReceivedEvent<Announced>| {
        let trace = current_trace().unwrap();
        seen.add(format_args!("{} {:032x}", event.number, trace.trace_id()));
        async {}
    };
    env.bus.subscribe::<Announced>(SubscribeOptions::live(), note).await.unwrap();
    let (bus, seen) = (env.bus.clone(), log.clone());
    let announce = move |event: ReceivedEvent<Noted>| {
        let bus = bus.clone();
        seen.add(format_args!("noted {}", event.envelope.trace_id.clone().unwrap()));
        async move { bus.publish(Announced { number: 2 }).await.map(drop) }
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), announce).await.unwrap();
    let result = env.bus.publish(env.noted(1)).await.unwrap();
    assert!(result.ok(), "{result:?}");
    let lines = log.lines();
    let traces: Vec<&str> = lines.iter().filter_map(|line| line.split(' ').nth(1)).collect();
    assert_eq!(traces.len(), 2, "{lines:?}");
    assert_eq!(traces[0], traces[1]);
    // The handler holds a reference to the bus.
    env.bus.close().await.unwrap();
}

pub async fn many_handlers_that_publish_do_not_deadlock(env: BusTestEnv) {
    // All are in flight before the first of them publishes.
    let (bus, all) = (env.bus.clone(), Arc::new(Barrier::new(CROWD)));
    let announce = move |_: ReceivedEvent<Noted>| {
        let (bus, all) = (bus.clone(), all.clone());
        async move {
            all.wait().await;
            bus.publish(Announced { number: 2 }).await.map(drop)
        }
    };
    env.bus.subscribe::<Noted>(SubscribeOptions::live(), announce).await.unwrap();
    let publishing: Vec<_> = (0..CROWD as u64)
        .map(|number| {
            let (bus, event) = (env.bus.clone(), env.noted(number));
            tokio::spawn(async move { bus.publish(event).await.unwrap() })
        })
        .collect();
    for publish in publishing {
        let result = publish.await.unwrap();
        assert!(result.ok(), "{result:?}");
    }
    // The handler holds a reference to the bus.
    env.bus.close().await.unwrap();
}

/// Default limit of publishes in flight.
const CROWD: usize = 1000;

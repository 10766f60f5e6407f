//! Durable subscriptions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use headwater_queue::{Backoff, Outcome, RetryPolicy};
use tokio::sync::Semaphore;

use super::env::{Announced, BusTestEnv, HandlerLog, Noted, wait_until};
use headwater_bus::BusError;
use headwater_bus::Handlers;
use headwater_bus::ReceivedEvent;
use headwater_bus::{EventBusExt, SubscribeOptions};

/// A group with short backoff and this many attempts.
fn group(label: &str, attempts: u32) -> SubscribeOptions {
    let retry = RetryPolicy {
        max_attempts: Some(attempts),
        backoff: Backoff::Fixed(Duration::from_millis(20)),
        ..Default::default()
    };
    SubscribeOptions { retry, ..SubscribeOptions::durable(label) }
}

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

/// The lines, sorted.
fn sorted(mut lines: Vec<String>) -> Vec<String> {
    lines.sort();
    lines
}

pub async fn a_group_receives_each_event_of_its_own_process_once(env: BusTestEnv) {
    let log = HandlerLog::default();
    let to_session = group("once", 5).session(env.session.clone());
    env.bus.subscribe::<Noted>(to_session, writes(&log, "got")).await.unwrap();
    for number in 0..5 {
        let result = env.bus.publish(env.noted(number)).await.unwrap();
        assert_eq!(result.handlers_invoked, 0, "durable handlers run from the stream");
    }
    let expected: Vec<String> = (0..5).map(|number| format!("got {number}")).collect();
    assert_eq!(sorted(log.settles_at(5).await), expected);
}

pub async fn live_and_durable_subscriptions_receive_each_event_once(env: BusTestEnv) {
    let log = HandlerLog::default();
    let to_session = group("both", 5).session(env.session.clone());
    env.bus.subscribe::<Noted>(to_session, writes(&log, "durable")).await.unwrap();
    let to_session = SubscribeOptions::live().session(env.session.clone());
    env.bus.subscribe::<Noted>(to_session, writes(&log, "live")).await.unwrap();
    assert_eq!(env.bus.publish(env.noted(1)).await.unwrap().handlers_invoked, 1);
    assert_eq!(sorted(log.settles_at(2).await), ["durable 1", "live 1"]);
}

pub async fn every_group_receives_every_event(env: BusTestEnv) {
    let log = HandlerLog::default();
    for (label, word) in [("one", "one"), ("two", "two")] {
        let to_session = group(label, 5).session(env.session.clone());
        env.bus.subscribe::<Noted>(to_session, writes(&log, word)).await.unwrap();
    }
    env.bus.publish(env.noted(1)).await.unwrap().into_result().unwrap();
    assert_eq!(sorted(log.settles_at(2).await), ["one 1", "two 1"]);
}

pub async fn a_failed_event_is_retried(env: BusTestEnv) {
    let (log, attempts) = (HandlerLog::default(), Arc::new(AtomicUsize::new(0)));
    let seen = log.clone();
    let third_time = move |event: ReceivedEvent<Announced>| {
        let attempt = attempts.fetch_add(1, Ordering::SeqCst) + 1;
        seen.add(format_args!("{} at {attempt}", event.number));
        async move { if attempt < 3 { Err("not yet") } else { Ok(()) } }
    };
    env.bus.subscribe::<Announced>(group("retries", 5), third_time).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(3).await, ["1 at 1", "1 at 2", "1 at 3"]);
}

pub async fn a_panicked_event_is_retried(env: BusTestEnv) {
    let (log, attempts) = (HandlerLog::default(), Arc::new(AtomicUsize::new(0)));
    let seen = log.clone();
    let second_time = move |event: ReceivedEvent<Announced>| {
        if attempts.fetch_add(1, Ordering::SeqCst) == 0 {
            panic!("the first time");
        }
        seen.add(event.number);
        async {}
    };
    env.bus.subscribe::<Announced>(group("panics", 5), second_time).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(1).await, ["1"]);
}

pub async fn only_the_failed_handlers_of_an_event_are_retried(env: BusTestEnv) {
    let (log, attempts) = (HandlerLog::default(), Arc::new(AtomicUsize::new(0)));
    let seen = log.clone();
    let second_time = move |_: ReceivedEvent<Noted>| {
        let attempt = attempts.fetch_add(1, Ordering::SeqCst) + 1;
        seen.add(format_args!("flaky {attempt}"));
        async move { if attempt < 2 { Err("not yet") } else { Ok(()) } }
    };
    let handlers = Handlers::new()
        .on::<Noted>(writes(&log, "first"))
        .on::<Noted>(second_time)
        .on::<Noted>(writes(&log, "last"));
    let to_session = group("several", 5).session(env.session.clone());
    env.bus.subscribe_handlers(to_session, handlers).await.unwrap();
    env.bus.publish(env.noted(1)).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(4).await, ["first 1", "flaky 1", "last 1", "flaky 2"]);
}

pub async fn an_event_that_runs_out_of_attempts_does_not_block_others(env: BusTestEnv) {
    let log = HandlerLog::default();
    let seen = log.clone();
    let odd_ones = move |event: ReceivedEvent<Noted>| {
        let number = event.number;
        seen.add(number);
        async move { if number.is_multiple_of(2) { Err("even") } else { Ok(()) } }
    };
    let one_at_a_time = SubscribeOptions { concurrency: 1, ..group("odd", 2) };
    let to_session = one_at_a_time.session(env.session.clone());
    env.bus.subscribe::<Noted>(to_session, odd_ones).await.unwrap();
    for number in 0..4 {
        env.bus.publish(env.noted(number)).await.unwrap().into_result().unwrap();
    }
    assert_eq!(sorted(log.settles_at(6).await), ["0", "0", "1", "2", "2", "3"]);
}

pub async fn a_permanent_failure_is_not_retried(env: BusTestEnv) {
    let log = HandlerLog::default();
    let seen = log.clone();
    let give_up = move |event: ReceivedEvent<Announced>| {
        seen.add(event.number);
        async { Outcome::dead_letter("permanent") }
    };
    env.bus.subscribe::<Announced>(group("short", 5), give_up).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(1).await, ["1"]);
}

pub async fn events_without_a_handler_do_not_block_others(env: BusTestEnv) {
    let log = HandlerLog::default();
    let to_session =
        SubscribeOptions { concurrency: 1, ..group("selective", 5) }.session(env.session.clone());
    env.bus.subscribe::<Noted>(to_session, writes(&log, "got")).await.unwrap();
    env.bus.publish(Announced { number: 1 }).await.unwrap().into_result().unwrap();
    env.bus.publish(env.noted(2)).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(1).await, ["got 2"]);
}

pub async fn a_group_is_subscribed_once_and_free_after_unsubscribe(env: BusTestEnv) {
    let nothing = |_: ReceivedEvent<Announced>| async {};
    let first = env.bus.subscribe::<Announced>(group("one", 5), nothing).await.unwrap();
    let second = env.bus.subscribe::<Announced>(group("one", 5), nothing).await;
    assert!(matches!(second, Err(BusError::Invalid { .. })), "{second:?}");
    env.bus.subscribe::<Announced>(group("other", 5), nothing).await.unwrap();
    assert!(env.bus.unsubscribe(first).await.unwrap());
    assert!(!env.bus.unsubscribe(first).await.unwrap());
    env.bus.subscribe::<Announced>(group("one", 5), nothing).await.unwrap();
}

pub async fn at_most_concurrency_events_are_handled_at_once(env: BusTestEnv) {
    let (log, now, most) =
        (HandlerLog::default(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (seen, peak) = (log.clone(), most.clone());
    let slow = move |event: ReceivedEvent<Noted>| {
        let (seen, now, peak) = (seen.clone(), now.clone(), peak.clone());
        async move {
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(20)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            seen.add(event.number);
        }
    };
    let three = SubscribeOptions { concurrency: 3, ..group("three", 5) };
    env.bus.subscribe::<Noted>(three.session(env.session.clone()), slow).await.unwrap();
    let results = env.bus.publish_batch((0..20).map(|n| env.noted(n)).collect()).await.unwrap();
    assert!(results.into_iter().all(|result| result.is_ok()));
    log.settles_at(20).await;
    assert!(most.load(Ordering::SeqCst) <= 3, "{most:?}");
}

pub async fn health_reports_pending_and_lag(env: BusTestEnv) {
    let (gate, log) = (Arc::new(Semaphore::new(0)), HandlerLog::default());
    let (opened, seen) = (gate.clone(), log.clone());
    let hold = move |event: ReceivedEvent<Noted>| {
        let (opened, seen) = (opened.clone(), seen.clone());
        async move {
            seen.add(event.number);
            opened.acquire().await.unwrap().forget();
        }
    };
    let two = SubscribeOptions { concurrency: 2, read_ahead: Some(0), ..group("held", 5) };
    env.bus.subscribe::<Noted>(two.session(env.session.clone()), hold).await.unwrap();
    let results = env.bus.publish_batch((0..5).map(|n| env.noted(n)).collect()).await.unwrap();
    assert!(results.into_iter().all(|result| result.is_ok()));

    let health = async || {
        let health = env.bus.health().await;
        let mut groups = health.streams.values().flat_map(|stream| &stream.groups);
        let (_, found) = groups.find(|(name, _)| name.ends_with("held")).unwrap();
        (found.pending, found.lag)
    };
    log.wait_for(2).await;
    wait_until(async || health().await == (2, Some(3))).await;
    gate.add_permits(2);
    log.wait_for(4).await;
    wait_until(async || health().await == (2, Some(1))).await;
    gate.add_permits(3);
    wait_until(async || health().await == (0, Some(0))).await;
}

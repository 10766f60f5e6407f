//! Durable subscriptions across processes and restarts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use headwater_bus::{
    Backoff, EventBus, EventBusExt, ReceivedEvent, RetryPolicy, StreamedBusConfig, SubscribeOptions,
};
use headwater_conformance::bus::{HandlerLog, Noted, registry};
use headwater_stream::{ConsumerName, GroupName, GroupStart, StreamName};

use crate::backends::{quick_lease, quick_queue};
use crate::fixture::{Fixture, entries, numbers, stored, writes};
use crate::outage_fixture::until;

on_streams!(
    two_members_of_a_group_share_the_events,
    after_a_restart_only_new_events_are_handled,
    events_published_without_a_subscriber_are_handled_later,
    a_failed_event_becomes_a_dead_letter_without_a_copy_in_the_stream,
    an_event_released_at_closing_is_handled_by_another_bus,
    a_dropped_subscribe_call_leaves_its_group_free,
    pending_events_of_a_foreign_consumer_are_reclaimed,
    pending_events_of_a_dropped_bus_are_reclaimed,
);

fn group(label: &str) -> SubscribeOptions {
    let retry = RetryPolicy {
        max_attempts: Some(3),
        backoff: Backoff::Fixed(Duration::from_millis(10)),
        ..Default::default()
    };
    SubscribeOptions { retry, ..SubscribeOptions::durable(label) }
}

fn sorted(lines: Vec<String>) -> Vec<String> {
    let mut numbers: Vec<u64> = lines.iter().map(|line| line.parse().unwrap()).collect();
    numbers.sort_unstable();
    numbers.iter().map(u64::to_string).collect()
}

async fn two_members_of_a_group_share_the_events(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let log = HandlerLog::default();
    for bus in [&ada, &bob] {
        bus.subscribe::<Noted>(group("shared"), writes(&log)).await.unwrap();
    }
    let results = ada.publish_batch((0..200).map(|n| fixture.noted(n)).collect()).await.unwrap();
    assert!(results.iter().all(|result| result.is_ok()));
    assert_eq!(sorted(log.settles_at(200).await), numbers(0..200));
    ada.close().await.unwrap();
    bob.close().await.unwrap();
}

async fn after_a_restart_only_new_events_are_handled(fixture: Fixture) {
    let log = HandlerLog::default();
    for start in 0..3 {
        let bus = fixture.bus().await;
        bus.subscribe::<Noted>(group("lasting"), writes(&log)).await.unwrap();
        for number in start * 2..start * 2 + 2 {
            bus.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
        }
        log.wait_for(start as usize * 2 + 2).await;
        bus.close().await.unwrap();
    }
    let bus = fixture.bus().await;
    bus.subscribe::<Noted>(group("lasting"), writes(&log)).await.unwrap();
    assert_eq!(sorted(log.settles_at(6).await), numbers(0..6));
    bus.close().await.unwrap();
}

async fn events_published_without_a_subscriber_are_handled_later(fixture: Fixture) {
    let bus = fixture.bus().await;
    bus.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();
    let log = HandlerLog::default();
    let id = bus.subscribe::<Noted>(group("late"), writes(&log)).await.unwrap();
    log.wait_for(1).await;
    assert!(bus.unsubscribe(id).await.unwrap());
    bus.publish(fixture.noted(1)).await.unwrap().into_result().unwrap();
    assert_eq!(log.lines(), ["0"]);
    bus.subscribe::<Noted>(group("late"), writes(&log)).await.unwrap();
    assert_eq!(log.settles_at(2).await, ["0", "1"]);
    bus.close().await.unwrap();
}

async fn a_failed_event_becomes_a_dead_letter_without_a_copy_in_the_stream(fixture: Fixture) {
    let bus = fixture.bus().await;
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = tries.clone();
    let refuse = move |event: ReceivedEvent<Noted>| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move { Err::<(), _>(format!("no use for {}", event.number)) }
    };
    bus.subscribe::<Noted>(group("hopeless"), refuse).await.unwrap();
    bus.publish(fixture.noted(9)).await.unwrap().into_result().unwrap();

    let backend = fixture.connect().await;
    let dead_letters = StreamName::new(format!("{}:dlq", fixture.stream())).unwrap();
    let mut letters = Vec::new();
    for _ in 0..9000 {
        letters = entries(&*backend, &dead_letters).await;
        if !letters.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(letters.len(), 1);
    let original = &entries(&*backend, &fixture.stream()).await[0];
    for (name, value) in &original.fields {
        assert_eq!(letters[0].fields.get(name), Some(value), "{name:?}");
    }
    let reason = letters[0].fields.get("reason").unwrap();
    let reason = String::from_utf8(reason.to_vec()).unwrap();
    assert!(reason.contains("no use for 9 (attempt 3)"), "{reason}");
    assert_eq!(tries.load(Ordering::SeqCst), 3);
    assert_eq!(stored(&*backend, &fixture.stream()).await, [9]);
    bus.close().await.unwrap();
}

async fn an_event_released_at_closing_is_handled_by_another_bus(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let log = HandlerLog::default();
    let seen = log.clone();
    let fail = move |event: ReceivedEvent<Noted>| {
        seen.add(event.number);
        async { Err::<(), _>("not me") }
    };
    let retry = RetryPolicy {
        max_attempts: Some(3),
        backoff: Backoff::Fixed(Duration::from_secs(3600)),
        ..Default::default()
    };
    let patient = SubscribeOptions { retry, ..SubscribeOptions::durable("relay") };
    ada.subscribe::<Noted>(patient, fail).await.unwrap();
    bob.publish(fixture.noted(1)).await.unwrap().into_result().unwrap();
    log.wait_for(1).await;
    ada.close().await.unwrap();
    bob.subscribe::<Noted>(group("relay"), writes(&log)).await.unwrap();
    assert_eq!(log.settles_at(2).await, ["1", "1"]);
    bob.close().await.unwrap();
}

async fn a_dropped_subscribe_call_leaves_its_group_free(fixture: Fixture) {
    let bus = fixture.bus().await;
    let log = HandlerLog::default();
    // Dropped after its first poll, and after later ones.
    for steps in 0..20 {
        let mut subscribing = Box::pin(bus.subscribe::<Noted>(group("fickle"), writes(&log)));
        let mut step = futures_util::poll!(&mut subscribing);
        for _ in 0..steps {
            if step.is_ready() {
                break;
            }
            tokio::task::yield_now().await;
            step = futures_util::poll!(&mut subscribing);
        }
        drop(subscribing);
        if let Poll::Ready(Ok(id)) = step {
            bus.unsubscribe(id).await.unwrap();
        }
    }
    // The queue may take a moment to notice that the last one was dropped.
    let mut subscribed = bus.subscribe::<Noted>(group("fickle"), writes(&log)).await;
    for _ in 0..9000 {
        if subscribed.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        subscribed = bus.subscribe::<Noted>(group("fickle"), writes(&log)).await;
    }
    subscribed.unwrap();
    bus.publish(fixture.noted(1)).await.unwrap().into_result().unwrap();
    assert_eq!(log.settles_at(1).await, ["1"]);
    bus.close().await.unwrap();
}

async fn pending_events_of_a_foreign_consumer_are_reclaimed(fixture: Fixture) {
    let bus = fixture.bus_with(registry(), with_short_timeouts(&fixture)).await;
    for number in 0..3 {
        bus.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    // Given a consumer without heartbeats that has two of three events pending.
    let backend = fixture.connect().await;
    let name =
        GroupName::new(format!("{}:cg:{}:workers", fixture.prefix, fixture.session)).unwrap();
    backend.ensure_group(&fixture.stream(), &name, GroupStart::Beginning).await.unwrap();
    let stranger = ConsumerName::new("stranger").unwrap();
    let mut reader = backend.reader(&name, &stranger).await.unwrap();
    let taken = reader.read(&[fixture.stream()], 2, Duration::from_secs(1)).await.unwrap();
    assert_eq!(taken[0].entries.len(), 2);
    // Then the group of a bus gets all of them, and nothing is left.
    let log = HandlerLog::default();
    let reclaim_idle = Duration::from_millis(200);
    let patient = SubscribeOptions { reclaim_idle, ..group("workers") };
    bus.subscribe::<Noted>(patient, writes(&log)).await.unwrap();
    until(|| async { distinct(&log) == numbers(0..3) }).await;
    bus.close().await.unwrap();
    let stats = backend.stats(&fixture.stream()).await.unwrap().unwrap();
    assert_eq!((stats.groups[0].pending, stats.groups[0].lag), (0, Some(0)));
}

async fn pending_events_of_a_dropped_bus_are_reclaimed(fixture: Fixture) {
    let gone = fixture.bus_with(registry(), with_short_timeouts(&fixture)).await;
    let stays = fixture.bus_with(registry(), with_short_timeouts(&fixture)).await;
    let (held, log) = (HandlerLog::default(), HandlerLog::default());
    let seen = held.clone();
    let hold = move |event: ReceivedEvent<Noted>| {
        seen.add(event.number);
        std::future::pending::<()>()
    };
    gone.subscribe::<Noted>(group("workers"), hold).await.unwrap();
    for number in 0..3 {
        stays.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    held.wait_for(3).await;
    stays.subscribe::<Noted>(group("workers"), writes(&log)).await.unwrap();
    drop(gone);
    until(|| async { distinct(&log) == numbers(0..3) }).await;
    stays.close().await.unwrap();
}

/// Events handled at least once: with short leases, a slow member may be considered dead.
fn distinct(log: &HandlerLog) -> Vec<String> {
    let mut lines = sorted(log.lines());
    lines.dedup();
    lines
}

/// Settings of a bus that detects crashed members soon.
fn with_short_timeouts(fixture: &Fixture) -> StreamedBusConfig {
    StreamedBusConfig { queue: quick_queue(quick_lease()), ..fixture.config() }
}

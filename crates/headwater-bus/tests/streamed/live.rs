//! Live subscriptions with slow handlers.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{
    EventBus, EventBusExt, ReceivedEvent, SessionId, StreamedBus, SubscribeOptions,
};
use headwater_conformance::bus::{HandlerLog, Noted};
use headwater_stream::{Retention, TrimGuard};
use tokio::sync::Semaphore;

use crate::fixture::{Fixture, noted, numbers, writes};

on_streams!(
    a_hanging_handler_blocks_only_its_own_session,
    a_reader_too_late_for_an_entry_reports_it,
    a_late_reader_that_finds_all_entries_reports_nothing,
);

/// A live subscription that logs each event and waits for a permit.
async fn slow(bus: &StreamedBus, session: &SessionId) -> (HandlerLog, Arc<Semaphore>) {
    let (log, gate) = (HandlerLog::default(), Arc::new(Semaphore::new(0)));
    let (seen, opened) = (log.clone(), gate.clone());
    let wait = move |event: ReceivedEvent<Noted>| {
        let (seen, opened) = (seen.clone(), opened.clone());
        async move {
            seen.add(event.number);
            opened.acquire().await.unwrap().forget();
        }
    };
    let patient =
        SubscribeOptions { handler_timeout: Duration::from_secs(3600), ..SubscribeOptions::live() };
    bus.subscribe::<Noted>(patient.session(session.clone()), wait).await.unwrap();
    (log, gate)
}

async fn a_hanging_handler_blocks_only_its_own_session(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (held, free) = (SessionId::random(), SessionId::random());
    let (hanging, gate) = slow(&bob, &held).await;
    let going_on = HandlerLog::default();
    let to_free = SubscribeOptions::live().session(free.clone());
    bob.subscribe::<Noted>(to_free, writes(&going_on)).await.unwrap();
    ada.publish(noted(&held, 0)).await.unwrap().into_result().unwrap();
    hanging.wait_for(1).await;
    for number in 0..5 {
        ada.publish(noted(&free, number)).await.unwrap().into_result().unwrap();
        ada.publish(noted(&held, number + 1)).await.unwrap().into_result().unwrap();
    }
    assert_eq!(going_on.settles_at(5).await, numbers(0..5));
    // Its own events wait and keep their order.
    assert_eq!(hanging.lines(), ["0"]);
    gate.add_permits(6);
    assert_eq!(hanging.settles_at(6).await, numbers(0..6));
    assert_eq!(bob.health().await.missed, 0);
    ada.close().await.unwrap();
    bob.close().await.unwrap();
}

pub(crate) async fn a_reader_too_late_for_an_entry_reports_it(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (log, gate) = slow(&bob, &fixture.session).await;
    ada.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();
    log.wait_for(1).await;
    // While bob is busy, events of others are handled.
    tokio::time::sleep(Duration::from_millis(100)).await;
    for number in 1..20 {
        ada.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    let (backend, last) = (fixture.connect().await, Retention::max_len(5));
    let trimmed = backend.trim(&fixture.stream(), &last, TrimGuard::Safe).await.unwrap();
    assert_eq!(trimmed.removed, 15);
    assert_eq!(bob.health().await.missed, 0);
    gate.add_permits(100);
    let expected: Vec<String> = std::iter::once(0).chain(15..20).map(|n| n.to_string()).collect();
    assert_eq!(log.settles_at(6).await, expected);
    assert_eq!(bob.health().await.missed, 1);
    ada.publish(fixture.noted(20)).await.unwrap().into_result().unwrap();
    log.settles_at(7).await;
    assert_eq!(bob.health().await.missed, 1);
    bob.close().await.unwrap();
}

async fn a_late_reader_that_finds_all_entries_reports_nothing(fixture: Fixture) {
    let (ada, bob) = (fixture.bus().await, fixture.bus().await);
    let (log, gate) = slow(&bob, &fixture.session).await;
    ada.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();
    log.wait_for(1).await;
    for number in 1..600 {
        ada.publish(fixture.noted(number)).await.unwrap().into_result().unwrap();
    }
    gate.add_permits(1000);
    assert_eq!(log.settles_at(600).await, numbers(0..600));
    assert_eq!(bob.health().await.missed, 0);
    bob.close().await.unwrap();
}

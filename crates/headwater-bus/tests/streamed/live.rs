//! Live subscriptions whose handlers are slow.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::conformance::{HandlerLog, Noted};
use headwater_bus::{
    EventBus, EventBusExt, ReceivedEvent, SessionId, StreamedBus, SubscribeOptions,
};
use headwater_stream::{Retention, TrimGuard};
use tokio::sync::Semaphore;

use crate::place::{Place, noted, numbers, writes};

on_streams!(
    a_handler_that_hangs_holds_up_its_own_session_only,
    who_comes_too_late_for_an_entry_is_told,
    who_comes_late_and_finds_everything_is_told_nothing,
);

/// A live subscription that writes down what it gets and waits for a permit each time.
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

async fn a_handler_that_hangs_holds_up_its_own_session_only(place: Place) {
    let (ada, bob) = (place.bus().await, place.bus().await);
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
    // Its own events wait for it, and keep their order.
    assert_eq!(hanging.lines(), ["0"]);
    gate.add_permits(6);
    assert_eq!(hanging.settles_at(6).await, numbers(0..6));
    assert_eq!(bob.health().await.missed, 0);
    ada.close().await.unwrap();
    bob.close().await.unwrap();
}

pub(crate) async fn who_comes_too_late_for_an_entry_is_told(place: Place) {
    let (ada, bob) = (place.bus().await, place.bus().await);
    let (log, gate) = slow(&bob, &place.session).await;
    ada.publish(place.noted(0)).await.unwrap().into_result().unwrap();
    log.wait_for(1).await;
    // While bob is busy, and for longer than a moment, others come and go.
    tokio::time::sleep(Duration::from_millis(100)).await;
    for number in 1..20 {
        ada.publish(place.noted(number)).await.unwrap().into_result().unwrap();
    }
    let (backend, last) = (place.connect().await, Retention::max_len(5));
    let trimmed = backend.trim(&place.stream(), &last, TrimGuard::Safe).await.unwrap();
    assert_eq!(trimmed.removed, 15);
    assert_eq!(bob.health().await.missed, 0);
    gate.add_permits(100);
    let expected: Vec<String> = std::iter::once(0).chain(15..20).map(|n| n.to_string()).collect();
    assert_eq!(log.settles_at(6).await, expected);
    assert_eq!(bob.health().await.missed, 1);
    ada.publish(place.noted(20)).await.unwrap().into_result().unwrap();
    log.settles_at(7).await;
    assert_eq!(bob.health().await.missed, 1);
    bob.close().await.unwrap();
}

async fn who_comes_late_and_finds_everything_is_told_nothing(place: Place) {
    let (ada, bob) = (place.bus().await, place.bus().await);
    let (log, gate) = slow(&bob, &place.session).await;
    ada.publish(place.noted(0)).await.unwrap().into_result().unwrap();
    log.wait_for(1).await;
    for number in 1..600 {
        ada.publish(place.noted(number)).await.unwrap().into_result().unwrap();
    }
    gate.add_permits(1000);
    assert_eq!(log.settles_at(600).await, numbers(0..600));
    assert_eq!(bob.health().await.missed, 0);
    bob.close().await.unwrap();
}

//! Expiry of sessions.

use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use headwater_bus::{
    EventBus, EventBusExt, ReceivedEvent, SessionError, SessionId, SessionStage, Sessions,
    SessionsConfig, SubscribeOptions,
};
use headwater_conformance::bus::{HandlerLog, Noted};
use headwater_stream::{EntryId, Retention};

use crate::fixture::{Fixture, Sum, by_hand, folds, noted, publish, sum};

on_every_bus!(
    an_expired_session_is_distinguished_from_a_missing_one,
    a_session_in_use_does_not_expire,
    an_event_confirmed_during_expiry_is_not_lost,
    events_pending_for_a_group_prevent_expiry,
    retention_never_removes_entries_that_no_snapshot_includes,
);

fn short_lived() -> SessionsConfig {
    SessionsConfig { ttl: Some(Duration::from_millis(50)), ..by_hand() }
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(120)).await;
}

async fn an_expired_session_is_distinguished_from_a_missing_one(fixture: Fixture) {
    let sessions = fixture.sessions_with(folds(), short_lived()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    session.compact().await.unwrap();
    publish(&session, 10..15).await;
    let for_ever = fixture.sessions().await.create(&SessionId::random()).await.unwrap();
    publish(&for_ever, 0..1).await;
    pause().await;
    let swept = fixture.sessions().await.sweep().await.unwrap();
    assert_eq!((swept.checked, swept.expired, swept.held_back, swept.failed), (2, 1, 0, 0));
    assert_eq!(fixture.entries(&fixture.session).await, []);

    let expired = |error: SessionError| match error {
        SessionError::Expired { entries, through, .. } => {
            assert_eq!((entries, through), (15, session.position()));
        }
        other => panic!("{other}"),
    };
    expired(sessions.recover(&fixture.session).await.unwrap_err());
    expired(sessions.recover_incomplete(&fixture.session).await.unwrap_err());
    expired(session.refresh().await.unwrap_err());
    expired(sessions.export(&fixture.session).await.unwrap_err());
    let taken = sessions.create(&fixture.session).await.unwrap_err();
    assert!(matches!(taken, SessionError::Exists { .. }), "{taken}");
    let info = sessions.info(&fixture.session).await.unwrap().unwrap();
    assert_eq!((info.stage, info.length, info.removed), (SessionStage::Expired, 0, 15));
    // Expiry happens once, and a late event does not revert it.
    expired(session.publish(noted(15)).await.unwrap_err());
    assert_eq!(sessions.sweep().await.unwrap().expired, 0);
    expired(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!(fixture.entries(&fixture.session).await.len(), 1);
    // The snapshot is deleted, too, and no new one can be taken.
    assert!(session.snapshot().await.is_err());

    assert!(sessions.delete(&fixture.session).await.unwrap());
    let error = sessions.recover(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
    assert_eq!(sum(&sessions.recover(for_ever.id()).await.unwrap()), Sum::of([0]));
    // A handle of it does not create a session by publishing.
    let error = session.publish(noted(16)).await.unwrap_err();
    assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
    assert_eq!(sessions.info(&fixture.session).await.unwrap(), None);
}

async fn a_session_in_use_does_not_expire(fixture: Fixture) {
    let ttl = Some(Duration::from_secs(3600));
    let sessions = fixture.sessions_with(folds(), SessionsConfig { ttl, ..by_hand() }).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    assert_eq!(sessions.sweep().await.unwrap().expired, 0);
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..3));
}

/// Publishes between any two steps of the expiry, which then continues or crashes.
async fn an_event_confirmed_during_expiry_is_not_lost(fixture: Fixture) {
    let fixture = fixture.on_disk().await;
    let moment = Duration::from_millis(1);
    let (ttl, abandoned_after) = (Some(moment), moment);
    let config = SessionsConfig { ttl, abandoned_after, ..by_hand() };
    let (mut ends, mut polls) = (0, 0);
    while ends < 3 {
        for dies in [false, true] {
            let fixture = fixture.another();
            let sessions = fixture.sessions_with(folds(), config).await;
            let session = sessions.create(&fixture.session).await.unwrap();
            publish(&session, 0..10).await;
            session.snapshot().await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
            let mut sweep = Box::pin(sessions.sweep());
            let is_over = poll_times(polls, &mut sweep).await;
            let published = session.publish(noted(10)).await;
            match dies || is_over {
                true => drop(sweep),
                false => drop(sweep.await.unwrap()),
            }
            ends += usize::from(is_over && dies);
            // It may expire again, now with the event.
            tokio::time::sleep(Duration::from_millis(5)).await;
            for _ in 0..2 {
                sessions.sweep().await.unwrap();
            }
            let error = sessions.recover(&fixture.session).await.unwrap_err();
            let SessionError::Expired { entries, .. } = error else { panic!("{error}") };
            match published {
                Ok(_) => assert_eq!(entries, 11, "after {polls} polls, dies: {dies}"),
                Err(SessionError::Expired { .. }) => assert!((10..=11).contains(&entries)),
                Err(other) => panic!("after {polls} polls: {other}"),
            }
        }
        polls += 1;
    }
    assert!(polls > 3, "no event was published in between");
}

/// Polls the work this many times; returns whether it completed.
async fn poll_times<F: Future + Unpin>(mut times: usize, work: &mut F) -> bool {
    std::future::poll_fn(|context| {
        if times == 0 {
            return Poll::Ready(false);
        }
        times -= 1;
        Pin::new(&mut *work).poll(context).map(|_| true)
    })
    .await
}

async fn events_pending_for_a_group_prevent_expiry(fixture: Fixture) {
    let bus = fixture.bus().await;
    let sessions = Sessions::new(bus.clone(), folds(), short_lived()).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    // A group without members.
    let subscribe = || SubscribeOptions::durable("workers").session(fixture.session.clone());
    let gone = bus.subscribe::<Noted>(subscribe(), |_| async {}).await.unwrap();
    assert!(bus.unsubscribe(gone).await.unwrap());
    publish(&session, 0..3).await;
    pause().await;
    let swept = sessions.sweep().await.unwrap();
    assert_eq!((swept.expired, swept.held_back), (0, 1));
    let log = HandlerLog::default();
    let handler = {
        let log = log.clone();
        move |event: ReceivedEvent<Noted>| {
            log.add(event.number);
            std::future::ready(())
        }
    };
    bus.subscribe::<Noted>(subscribe(), handler).await.unwrap();
    log.wait_for(3).await;
    // Acknowledgements follow soon after.
    while sessions.sweep().await.unwrap().expired == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(sessions.recover(&fixture.session).await.is_err());
    bus.close().await.unwrap();
}

async fn retention_never_removes_entries_that_no_snapshot_includes(fixture: Fixture) {
    let config = headwater_bus::StreamedBusConfig {
        prefix: fixture.prefix.clone(),
        session_retention: Retention::max_len(5),
        ..Default::default()
    };
    let registry = headwater_conformance::bus::registry();
    let bus = headwater_bus::StreamedBus::open(fixture.backend().await, registry, config);
    let bus = std::sync::Arc::new(bus.await.unwrap());
    let sessions = Sessions::new(bus, folds(), by_hand()).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3000).await;
    assert_eq!(fixture.entries(&fixture.session).await.len(), 3000);
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..3000));
    session.compact().await.unwrap();
    publish(&session, 3000..4000).await;
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..4000));
    assert_ne!(session.position(), EntryId::MIN);
}

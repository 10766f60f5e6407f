//! What was stored and confirmed is gone from the backend: whoever holds or recovers the session is told.

use headwater_bus::conformance::Noted;
use headwater_bus::{EventBusExt, MissingReason, Session, SessionError, Stored, Until};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, MapName, Retention, StreamName, TrimGuard};

use crate::away::Away;
use crate::place::{Place, Sum, noted, publish, sum};

everywhere!(
    a_session_that_is_held_outlives_a_backend_that_came_back_empty,
    a_session_that_is_held_is_not_replaced_by_another_one_of_its_name,
    entries_that_were_lost_before_a_snapshot_are_missed,
    entries_that_were_lost_under_a_session_that_is_held_are_missed,
    a_session_of_another_program_that_is_trimmed_past_its_snapshot_is_incomplete,
    a_snapshot_of_a_session_that_was_removed_stands_for_nothing,
);

fn is_lost(error: SessionError) {
    match error {
        SessionError::Incomplete { missing, .. } => assert_eq!(missing.why, MissingReason::Lost),
        other => panic!("{other}"),
    }
}

/// What a server that lost its data leaves of a session: nothing.
async fn lose_all(place: &Place) {
    let backend = place.backend().await;
    let list = StreamName::new(format!("{}:sessions", place.prefix)).unwrap();
    let meta = MapName::new(format!("{}:session:{}:meta", place.prefix, place.session)).unwrap();
    assert!(backend.delete_stream(&place.stream()).await.unwrap());
    assert!(backend.delete_stream(&list).await.unwrap());
    assert!(backend.map_delete(&meta).await.unwrap());
    // What comes next does not get the ids that were lost, as it may within the same millisecond.
    let now = backend.now().await.unwrap();
    while backend.now().await.unwrap() <= now {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

/// Publishes into what is left, and finds that what it knew is still known and never hidden.
async fn goes_on_knowing(session: &Session, numbers: std::ops::Range<u64>) {
    let (known, position) = (sum(session), session.position());
    is_lost(session.refresh().await.unwrap_err());
    for number in numbers {
        // It is stored all the same.
        assert!(matches!(session.publish(noted(number)).await.unwrap().stored, Stored::Entry(_)));
        is_lost(session.refresh().await.unwrap_err());
    }
    assert_eq!((sum(session), session.position()), (known, position));
    assert!(session.compact().await.is_err());
}

async fn a_session_that_is_held_outlives_a_backend_that_came_back_empty(place: Place) {
    let sessions = place.sessions().await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..5).await;
    let recovered = place.sessions().await.recover(&place.session).await.unwrap();
    lose_all(&place).await;
    goes_on_knowing(&session, 5..12).await;
    goes_on_knowing(&recovered, 12..13).await;
    assert!(session.snapshot().await.is_err());
    // Whoever recovers it takes over a stream of which nobody knows how it began.
    let anew = place.sessions().await.recover(&place.session).await.unwrap();
    assert_eq!(anew.recovery().missing.unwrap().why, MissingReason::Unknown);
    assert_eq!(sum(&anew), Sum::of(5..13));
    // That is another session, also for those who held the old one.
    goes_on_knowing(&session, 13..14).await;
    assert!(session.snapshot().await.is_err());
    let again = place.sessions().await.recover(&place.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of(5..14));
}

async fn a_session_that_is_held_is_not_replaced_by_another_one_of_its_name(place: Place) {
    let sessions = place.sessions().await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..5).await;
    lose_all(&place).await;
    // Somebody else makes it again, with more events than it had, a snapshot and all.
    let other = place.sessions().await.ensure(&place.session).await.unwrap();
    publish(&other, 100..120).await;
    assert!(other.snapshot().await.unwrap());
    goes_on_knowing(&session, 120..121).await;
    assert!(session.snapshot().await.is_err());
    let again = place.sessions().await.recover(&place.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of(100..121));
}

mod flushed {
    use super::a_session_that_is_held_outlives_a_flush_of_its_server;

    servers!(a_session_that_is_held_outlives_a_flush_of_its_server);
}

async fn a_session_that_is_held_outlives_a_flush_of_its_server(away: Away) {
    let place = &away.place;
    let session = place.sessions().await.create(&place.session).await.unwrap();
    publish(&session, 0..500).await;
    session.snapshot().await.unwrap();
    away.flush();
    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    goes_on_knowing(&session, 500..501).await;
    assert_eq!(sum(&session), Sum::of(0..500));
}

async fn entries_that_were_lost_before_a_snapshot_are_missed(place: Place) {
    let sessions = place.sessions().await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..20).await;
    assert!(session.snapshot().await.unwrap());
    let ids: Vec<EntryId> = place.entries(&place.session).await.iter().map(|e| e.id).collect();
    // A failover to a server that did not have the last ones yet; the snapshot lay elsewhere.
    let backend = place.backend().await;
    assert_eq!(backend.delete_entries(&place.stream(), &ids[15..]).await.unwrap(), 5);
    let missing = |error: SessionError| match error {
        SessionError::Incomplete { missing, .. } => missing,
        other => panic!("{other}"),
    };
    let lost = missing(sessions.recover(&place.session).await.unwrap_err());
    assert_eq!((lost.after, lost.before), (ids[14], EntryId::MAX));
    assert_eq!((lost.count, lost.why), (Some(5), MissingReason::Lost));
    // Also when others have gone on, with more events than were lost.
    for number in 20..30 {
        let session_id = Some(place.session.to_string());
        let event = Noted { session_id, ..noted(number) };
        sessions.bus().publish(event).await.unwrap();
    }
    let next = place.entries(&place.session).await[15].id;
    let lost = missing(sessions.recover(&place.session).await.unwrap_err());
    assert_eq!((lost.after, lost.before), (ids[14], next));
    // Whoever can do without them gets what is left, each once.
    let rest = sessions.recover_incomplete(&place.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of((0..15).chain(20..30)));
    assert_eq!(rest.recovery().missing, Some(lost));
    assert_eq!(rest.recovery().replayed, 25);
    assert!(rest.snapshot().await.is_err());
    // What was before them is as it was.
    let until = Until::Entry(ids[9]);
    let state = sessions.state_at(&place.session, until).await.unwrap();
    assert_eq!(*state.get::<Sum>().unwrap(), Sum::of(0..10));
    let time = Timestamp::from_millis(ids[0].ms - 1);
    let until = Until::Time(time);
    let state = sessions.state_at(&place.session, until).await.unwrap();
    assert_eq!(*state.get::<Sum>().unwrap(), Sum::default());
}

async fn entries_that_were_lost_under_a_session_that_is_held_are_missed(place: Place) {
    let sessions = place.sessions().await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..10).await;
    session.snapshot().await.unwrap();
    publish(&session, 10..20).await;
    let ids: Vec<EntryId> = place.entries(&place.session).await.iter().map(|e| e.id).collect();
    let backend = place.backend().await;
    assert_eq!(backend.delete_entries(&place.stream(), &ids[15..]).await.unwrap(), 5);
    // With fewer new events than were lost, and with more.
    goes_on_knowing(&session, 20..30).await;
    assert_eq!(sum(&session), Sum::of(0..20));
}

async fn a_session_of_another_program_that_is_trimmed_past_its_snapshot_is_incomplete(
    place: Place,
) {
    let append = async |numbers: std::ops::Range<u64>| {
        for number in numbers {
            let payload = format!("{{\"session_id\":null,\"number\":{number},\"text\":\"\"}}");
            place.append(&[("type", "conformance.Noted"), ("payload", &payload)]).await;
        }
    };
    append(0..5).await;
    let sessions = place.sessions().await;
    let session = sessions.recover(&place.session).await.unwrap();
    assert!(session.snapshot().await.unwrap());
    let position = session.position();
    append(5..15).await;
    let backend = place.backend().await;
    let kept = Retention::max_len(3);
    backend.trim(&place.stream(), &kept, TrimGuard::Force).await.unwrap();
    let error = sessions.recover(&place.session).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!((missing.after, missing.why), (position, MissingReason::Trimmed));
    assert!(session.refresh().await.is_err());
    assert_eq!(sum(&session), Sum::of(0..5));
    let rest = sessions.recover_incomplete(&place.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of((0..5).chain(12..15)));
}

async fn a_snapshot_of_a_session_that_was_removed_stands_for_nothing(place: Place) {
    let sessions = place.sessions().await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..5).await;
    assert!(session.snapshot().await.unwrap());
    // Whoever took it did not notice that the session was removed.
    lose_all(&place).await;
    let anew = sessions.create(&place.session).await.unwrap();
    assert_eq!(sum(&sessions.recover(&place.session).await.unwrap()), Sum::default());
    publish(&anew, 10..12).await;
    let again = sessions.recover(&place.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().missing), (Sum::of(10..12), None));
    assert!(again.snapshot().await.unwrap());
    let again = sessions.recover(&place.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().replayed), (Sum::of(10..12), 0));
}

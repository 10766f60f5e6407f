//! Stored and confirmed events that the backend lost are reported to open and recovered sessions.

use headwater_bus::{
    EventBusExt, MissingEntries, MissingReason, ReplayUntil, Session, SessionError, SessionId,
    StoreOutcome,
};
use headwater_conformance::bus::Noted;
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, MapName, Retention, StreamName, TrimGuard};

use crate::fixture::{Fixture, Sum, noted, publish, sum};
use crate::outage_fixture::OutageFixture;

on_every_bus!(
    an_open_session_survives_a_backend_that_lost_its_data,
    an_open_session_is_not_replaced_by_another_of_the_same_name,
    entries_lost_before_a_snapshot_are_reported,
    entries_lost_under_an_open_session_are_reported,
    a_foreign_session_trimmed_past_its_snapshot_is_incomplete,
    a_snapshot_of_a_deleted_session_is_ignored,
    a_session_whose_newest_entries_were_deleted_is_incomplete,
    a_compacted_session_whose_newest_entries_were_deleted_is_incomplete,
    a_foreign_session_whose_newest_entries_were_deleted_is_incomplete,
    a_session_emptied_before_it_was_first_read_is_incomplete,
    a_session_created_on_an_emptied_stream_is_complete,
);

fn is_lost(error: SessionError) {
    match error {
        SessionError::Incomplete { missing, .. } => assert_eq!(missing.reason, MissingReason::Lost),
        other => panic!("{other}"),
    }
}

/// Deletes everything of a session, like a server that lost its data.
async fn lose_all(fixture: &Fixture) {
    let backend = fixture.backend().await;
    let list = StreamName::new(format!("{}:sessions", fixture.prefix)).unwrap();
    let meta =
        MapName::new(format!("{}:session:{}:meta", fixture.prefix, fixture.session)).unwrap();
    assert!(backend.delete_stream(&fixture.stream()).await.unwrap());
    assert!(backend.delete_stream(&list).await.unwrap());
    assert!(backend.map_delete(&meta).await.unwrap());
    // New entries must not get the lost ids, which is possible within the same millisecond.
    let now = backend.now().await.unwrap();
    while backend.now().await.unwrap() <= now {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

/// Publishes to what remains, and asserts that the known state is kept.
async fn assert_state_is_kept(session: &Session, numbers: std::ops::Range<u64>) {
    let (known, position) = (sum(session), session.position());
    is_lost(session.refresh().await.unwrap_err());
    for number in numbers {
        // It is stored anyway.
        assert!(matches!(
            session.publish(noted(number)).await.unwrap().stored,
            StoreOutcome::Entry(_)
        ));
        is_lost(session.refresh().await.unwrap_err());
    }
    assert_eq!((sum(session), session.position()), (known, position));
    assert!(session.compact().await.is_err());
}

async fn an_open_session_survives_a_backend_that_lost_its_data(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    let recovered = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    lose_all(&fixture).await;
    assert_state_is_kept(&session, 5..12).await;
    assert_state_is_kept(&recovered, 12..13).await;
    assert!(session.snapshot().await.is_err());
    // A recovery takes over the stream, whose beginning is unknown.
    let anew = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(anew.recovery().missing.unwrap().reason, MissingReason::Unknown);
    assert_eq!(sum(&anew), Sum::of(5..13));
    // That is another session, also for handles of the old one.
    assert_state_is_kept(&session, 13..14).await;
    assert!(session.snapshot().await.is_err());
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of(5..14));
}

async fn an_open_session_is_not_replaced_by_another_of_the_same_name(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    lose_all(&fixture).await;
    // Another process creates it again, with more events and a snapshot.
    let other = fixture.sessions().await.ensure(&fixture.session).await.unwrap();
    publish(&other, 100..120).await;
    assert!(other.snapshot().await.unwrap());
    assert_state_is_kept(&session, 120..121).await;
    assert!(session.snapshot().await.is_err());
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of(100..121));
}

mod flushed {
    use super::an_open_session_survives_a_flush_of_its_server;

    with_server_outage!(an_open_session_survives_a_flush_of_its_server);
}

async fn an_open_session_survives_a_flush_of_its_server(outage: OutageFixture) {
    let fixture = &outage.fixture;
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..500).await;
    session.snapshot().await.unwrap();
    outage.flush();
    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    assert_state_is_kept(&session, 500..501).await;
    assert_eq!(sum(&session), Sum::of(0..500));
}

async fn entries_lost_before_a_snapshot_are_reported(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..20).await;
    assert!(session.snapshot().await.unwrap());
    let ids: Vec<EntryId> = fixture.entries(&fixture.session).await.iter().map(|e| e.id).collect();
    // As after a failover to a lagging replica; the snapshot was on another server.
    let backend = fixture.backend().await;
    assert_eq!(backend.delete_entries(&fixture.stream(), &ids[15..]).await.unwrap(), 5);
    let missing = |error: SessionError| match error {
        SessionError::Incomplete { missing, .. } => missing,
        other => panic!("{other}"),
    };
    let lost = missing(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!((lost.after, lost.before), (ids[14], EntryId::MAX));
    assert_eq!((lost.count, lost.reason), (Some(5), MissingReason::Lost));
    // Also if other processes continued, with more events than were lost.
    for number in 20..30 {
        let session_id = Some(fixture.session.to_string());
        let event = Noted { session_id, ..noted(number) };
        sessions.bus().publish(event).await.unwrap();
    }
    let next = fixture.entries(&fixture.session).await[15].id;
    let lost = missing(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!((lost.after, lost.before), (ids[14], next));
    // An incomplete recovery yields what remains, each event once.
    let rest = sessions.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of((0..15).chain(20..30)));
    assert_eq!(rest.recovery().missing, Some(lost));
    assert_eq!(rest.recovery().replayed, 25);
    assert!(rest.snapshot().await.is_err());
    // Earlier states are unchanged.
    let until = ReplayUntil::Entry(ids[9]);
    let state = sessions.state_at(&fixture.session, until).await.unwrap();
    assert_eq!(*state.get::<Sum>().unwrap(), Sum::of(0..10));
    let time = Timestamp::from_millis(ids[0].ms - 1);
    let until = ReplayUntil::Time(time);
    let state = sessions.state_at(&fixture.session, until).await.unwrap();
    assert_eq!(*state.get::<Sum>().unwrap(), Sum::default());
}

async fn entries_lost_under_an_open_session_are_reported(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    session.snapshot().await.unwrap();
    publish(&session, 10..20).await;
    let ids: Vec<EntryId> = fixture.entries(&fixture.session).await.iter().map(|e| e.id).collect();
    let backend = fixture.backend().await;
    assert_eq!(backend.delete_entries(&fixture.stream(), &ids[15..]).await.unwrap(), 5);
    // With fewer new events than were lost, and with more.
    assert_state_is_kept(&session, 20..30).await;
    assert_eq!(sum(&session), Sum::of(0..20));
}

async fn a_foreign_session_trimmed_past_its_snapshot_is_incomplete(fixture: Fixture) {
    let append = async |numbers: std::ops::Range<u64>| {
        for number in numbers {
            let payload = format!("{{\"session_id\":null,\"number\":{number},\"text\":\"\"}}");
            fixture.append(&[("type", "conformance.Noted"), ("payload", &payload)]).await;
        }
    };
    append(0..5).await;
    let sessions = fixture.sessions().await;
    let session = sessions.recover(&fixture.session).await.unwrap();
    assert!(session.snapshot().await.unwrap());
    let position = session.position();
    append(5..15).await;
    let backend = fixture.backend().await;
    let kept = Retention::max_len(3);
    backend.trim(&fixture.stream(), &kept, TrimGuard::Force).await.unwrap();
    let error = sessions.recover(&fixture.session).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!((missing.after, missing.reason), (position, MissingReason::Trimmed));
    assert!(session.refresh().await.is_err());
    assert_eq!(sum(&session), Sum::of(0..5));
    let rest = sessions.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of((0..5).chain(12..15)));
}

async fn a_snapshot_of_a_deleted_session_is_ignored(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    assert!(session.snapshot().await.unwrap());
    // The process that took it did not notice that the session was deleted.
    lose_all(&fixture).await;
    let anew = sessions.create(&fixture.session).await.unwrap();
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::default());
    publish(&anew, 10..12).await;
    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().missing), (Sum::of(10..12), None));
    assert!(again.snapshot().await.unwrap());
    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().replayed), (Sum::of(10..12), 0));
}

fn incomplete(error: SessionError) -> MissingEntries {
    match error {
        SessionError::Incomplete { missing, .. } => missing,
        other => panic!("{other}"),
    }
}

/// Publishes events of a session without opening it.
async fn publish_without_session(fixture: &Fixture, numbers: std::ops::Range<u64>) {
    let bus = fixture.bus().await;
    for number in numbers {
        let session_id = Some(fixture.session.to_string());
        bus.publish(Noted { session_id, ..noted(number) }).await.unwrap();
    }
}

async fn ids_of(fixture: &Fixture) -> Vec<EntryId> {
    fixture.entries(&fixture.session).await.iter().map(|entry| entry.id).collect()
}

async fn delete(fixture: &Fixture, ids: &[EntryId]) {
    let deleted = fixture.backend().await.delete_entries(&fixture.stream(), ids).await.unwrap();
    assert_eq!(deleted, ids.len());
}

/// Number of missing entries, if the backend can tell: only Redis counts added entries.
async fn counted(fixture: &Fixture, count: u64) -> Option<u64> {
    let stats = fixture.backend().await.stats(&fixture.stream()).await.unwrap().unwrap();
    stats.entries_added.map(|_| count)
}

async fn a_session_whose_newest_entries_were_deleted_is_incomplete(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..8).await;
    let ids = ids_of(&fixture).await;
    delete(&fixture, &ids[5..]).await;

    let missing = incomplete(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!((missing.after, missing.before), (ids[4], ids[7].next()));
    assert_eq!(missing.reason, MissingReason::Deleted);
    assert_eq!(missing.count, counted(&fixture, 3).await);

    // No copy of it can be created that would look complete.
    let copy = SessionId::random();
    let error = sessions.fork(&fixture.session, ReplayUntil::End, &copy).await.unwrap_err();
    assert_eq!(incomplete(error), missing);
    assert_eq!(sessions.info(&copy).await.unwrap(), None);
    let mut export = sessions.export(&fixture.session).await.unwrap();
    let error = loop {
        match export.next_line().await {
            Ok(line) => assert!(line.is_some(), "it was exported to its end"),
            Err(error) => break error,
        }
    };
    assert_eq!(incomplete(error), missing);
    let error = sessions.state_at(&fixture.session, ReplayUntil::Entry(ids[7])).await.unwrap_err();
    assert_eq!(incomplete(error), missing);

    // What remains can be read, and earlier states are unchanged.
    let rest = sessions.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of(0..5));
    assert_eq!(rest.recovery().missing, Some(missing));
    assert!(rest.snapshot().await.is_err());
    let state = sessions.state_at(&fixture.session, ReplayUntil::Entry(ids[3])).await.unwrap();
    assert_eq!(state.get::<Sum>(), Some(&Sum::of(0..4)));
    let before = sessions.fork(&fixture.session, ReplayUntil::Entry(ids[3]), &copy).await.unwrap();
    assert_eq!(sum(&before), Sum::of(0..4));
}

async fn a_compacted_session_whose_newest_entries_were_deleted_is_incomplete(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    assert_eq!(session.compact().await.unwrap().removed, 9);
    publish(&session, 10..18).await;
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..18));
    let ids = ids_of(&fixture).await;
    delete(&fixture, &ids[ids.len() - 2..]).await;
    let missing = incomplete(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!(
        (missing.reason, missing.count),
        (MissingReason::Deleted, counted(&fixture, 2).await)
    );
    let rest = sessions.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of(0..16));
}

async fn a_foreign_session_whose_newest_entries_were_deleted_is_incomplete(fixture: Fixture) {
    publish_without_session(&fixture, 0..6).await;
    let ids = ids_of(&fixture).await;
    delete(&fixture, &ids[4..]).await;
    let sessions = fixture.sessions().await;
    let missing = incomplete(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!((missing.after, missing.before), (ids[3], ids[5].next()));
    assert_eq!((missing.reason, missing.count), (MissingReason::Deleted, None));
}

async fn a_session_emptied_before_it_was_first_read_is_incomplete(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    sessions.create(&fixture.session).await.unwrap();
    publish_without_session(&fixture, 0..6).await;
    let backend = fixture.backend().await;
    backend.trim(&fixture.stream(), &Retention::max_len(0), TrimGuard::Force).await.unwrap();
    let missing = incomplete(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!((missing.after, missing.reason), (EntryId::MIN, MissingReason::Deleted));
    assert_eq!(missing.count, counted(&fixture, 6).await);
}

async fn a_session_created_on_an_emptied_stream_is_complete(fixture: Fixture) {
    for number in 0..4 {
        fixture.append(&[("other", &format!("{number}"))]).await;
    }
    delete(&fixture, &ids_of(&fixture).await).await;
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    assert_eq!(sessions.recover(&fixture.session).await.unwrap().recovery().missing, None);
    publish(&session, 0..5).await;
    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().missing), (Sum::of(0..5), None));
    let copy = SessionId::random();
    let fork = sessions.fork(&fixture.session, ReplayUntil::End, &copy).await.unwrap();
    assert_eq!((sum(&fork), fork.recovery().missing), (Sum::of(0..5), None));
}

/// Redis counts added entries, so deletions are detected anywhere.
mod counted_by_redis {
    use crate::fixture::Fixture;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn entries_deleted_before_later_ones_are_reported() {
        super::entries_deleted_before_later_ones_are_reported(Fixture::redis()).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn entries_deleted_before_later_ones_are_reported_on_a_cluster() {
        super::entries_deleted_before_later_ones_are_reported(Fixture::cluster()).await;
    }
}

async fn entries_deleted_before_later_ones_are_reported(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..8).await;
    let ids = ids_of(&fixture).await;
    // The newest three are deleted, and another process continues.
    delete(&fixture, &ids[5..]).await;
    publish_without_session(&fixture, 8..10).await;
    let missing = incomplete(sessions.recover(&fixture.session).await.unwrap_err());
    assert_eq!((missing.after, missing.before), (EntryId::MIN, ids[7].next()));
    assert_eq!((missing.reason, missing.count), (MissingReason::Deleted, Some(3)));
    let rest = sessions.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of((0..5).chain(8..10)));

    // An entry that a snapshot includes may be deleted; only a full copy reports it.
    let other = fixture.another();
    let session = other.sessions().await.create(&other.session).await.unwrap();
    publish(&session, 0..8).await;
    assert!(session.snapshot().await.unwrap());
    delete(&other, &ids_of(&other).await[2..3]).await;
    let again = other.sessions().await.recover(&other.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().missing), (Sum::of(0..8), None));
    let copy = SessionId::random();
    let fork = other.sessions().await.fork(&other.session, ReplayUntil::End, &copy).await;
    assert_eq!(incomplete(fork.unwrap_err()).count, Some(1));
}

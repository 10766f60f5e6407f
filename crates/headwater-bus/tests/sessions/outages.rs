//! Sessions while the backend is unavailable.

use std::time::Duration;

use headwater_bus::{
    EventId, FailurePolicy, OutgoingEvent, Session, SessionId, SpoolConfig, StoreOutcome,
};
use headwater_stream::{EntryId, StreamName};
use tokio::time::{Instant, sleep};

use crate::copies::import_all;
use crate::fixture::{Fixture, LIMIT, Sum, lines_of, noted, publish, sum};
use crate::outage_fixture::OutageFixture;

with_outage!(spooled_events_are_part_of_the_state_once_they_are_in_the_stream);

// A full embedded backend can still be read, and does not count its reads.
mod server {
    use super::*;

    with_server_outage!(
        an_outage_is_an_error_and_the_session_continues_afterwards,
        a_read_ends_at_the_end_of_the_stream_although_others_keep_writing,
        an_import_interrupted_by_an_outage_can_be_repeated,
    );
}

/// Publishes an event under one id until it is confirmed.
async fn publish_until_stored(session: &Session, number: u64) {
    let (id, deadline) = (EventId::random(), Instant::now() + LIMIT);
    loop {
        let event = OutgoingEvent::new(noted(number)).unwrap().with_id(id.clone());
        match session.publish_all(vec![event]).await {
            Ok(results) if results[0].is_ok() => return,
            _ => assert!(Instant::now() < deadline),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn an_outage_is_an_error_and_the_session_continues_afterwards(mut outage: OutageFixture) {
    // The node of the session's stream must also have the list of sessions and the metadata.
    let is_whole = |outage: &OutageFixture| {
        let Fixture { prefix, session, .. } = &outage.fixture;
        let others = [format!("{prefix}:sessions"), format!("{prefix}:session:{session}:meta")];
        let port = outage.node_of(&outage.fixture.stream()).port();
        others.iter().all(|key| outage.node_of(&StreamName::new(key).unwrap()).port() == port)
    };
    while !is_whole(&outage) {
        outage.fixture.session = SessionId::random();
    }
    let fixture = &outage.fixture;
    let sessions = outage.sessions(FailurePolicy::Fail).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    outage.begin().await;
    for error in [
        session.publish(noted(5)).await.unwrap_err(),
        session.refresh().await.unwrap_err(),
        session.snapshot().await.unwrap_err(),
        sessions.recover(&fixture.session).await.unwrap_err(),
        sessions.list(EntryId::MIN, 5).await.unwrap_err(),
    ] {
        assert!(error.is_transient(), "{error}");
    }
    // The state is kept.
    assert_eq!(sum(&session), Sum::of(0..5));
    outage.end().await;
    publish_until_stored(&session, 6).await;
    session.refresh().await.unwrap();
    let expected = [Sum::of([0, 1, 2, 3, 4, 6]), Sum::of(0..7)];
    assert!(expected.contains(&sum(&session)), "{:?}", sum(&session));
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), sum(&session));
}

async fn spooled_events_are_part_of_the_state_once_they_are_in_the_stream(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let spool = FailurePolicy::Spool(SpoolConfig::new(directory.path().join("spool")));
    let sessions = outage.sessions(spool).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    outage.begin().await;
    for number in 5..20 {
        assert_eq!(session.publish(noted(number)).await.unwrap().stored, StoreOutcome::Spooled);
    }
    assert_eq!(sum(&session), Sum::of(0..5));
    outage.end().await;
    let deadline = Instant::now() + LIMIT;
    while session.refresh().await.is_err() || sum(&session).count < 20 {
        assert!(Instant::now() < deadline);
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(sum(&session), Sum::of(0..20));
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..20));
}

async fn a_read_ends_at_the_end_of_the_stream_although_others_keep_writing(outage: OutageFixture) {
    let fixture = &outage.fixture;
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    let reads = || outage.ranges_read();
    // A page that is not full is the last one: reading on might never end while others publish.
    let before = reads();
    session.publish(noted(10)).await.unwrap();
    assert_eq!(reads() - before, 1);
    let before = reads();
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..11));
    assert_eq!(reads() - before, 1);
    let before = reads();
    let mut export = sessions.export(&fixture.session).await.unwrap();
    while export.next_line().await.unwrap().is_some() {}
    assert_eq!(reads() - before, 1);
}

async fn an_import_interrupted_by_an_outage_can_be_repeated(outage: OutageFixture) {
    let fixture = &outage.fixture;
    let sessions = outage.sessions(FailurePolicy::Fail).await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..1200).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    // On the server that will be unavailable, with all its metadata.
    let node = |key: String| outage.node_of(&StreamName::new(key).unwrap()).port();
    let port = outage.node_of(&fixture.stream()).port();
    let is_there = |id: &SessionId| {
        node(format!("{}:session:{id}:meta", fixture.prefix)) == port
            && outage.node_of(&fixture.stream_of(id)).port() == port
    };
    let mut id = SessionId::random();
    while !is_there(&id) {
        id = SessionId::random();
    }
    let mut import = sessions.import(&id);
    for line in &lines[..700] {
        import.line(line).await.unwrap();
    }
    outage.begin().await;
    let mut went_on = Ok(());
    for line in &lines[700..] {
        went_on = import.line(line).await;
        if went_on.is_err() {
            break;
        }
    }
    assert!(went_on.unwrap_err().is_transient());
    // Its entries cannot be removed now, but it cannot become a session any more.
    assert!(!import.abandon().await.unwrap());
    outage.end().await;
    let deadline = Instant::now() + LIMIT;
    let imported = loop {
        match import_all(sessions.import(&id), &lines).await {
            Ok(imported) => break imported,
            Err(error) => assert!(error.is_transient() && Instant::now() < deadline, "{error}"),
        }
        sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(sum(&imported), Sum::of(0..1200));
    assert!(!import.abandon().await.unwrap());
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..1200));
}

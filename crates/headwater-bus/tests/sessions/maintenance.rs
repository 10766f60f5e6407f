//! Periodic maintenance of sessions.

use std::time::Duration;

use headwater_bus::{EventBus, EventBusExt, Sessions};
use headwater_bus::{SessionError, SessionId, SessionStage, SessionsConfig, SubscribeOptions};
use headwater_conformance::bus::Noted;
use headwater_stream::{EntryId, Fields, GroupStart, MapName, Retention, StreamName};
use tokio::sync::oneshot;

use crate::fixture::{Fixture, LIMIT, Sum, by_hand, folds, noted, publish, sum};

on_every_bus!(
    maintenance_expires_and_deletes_sessions_until_shutdown,
    a_long_session_is_compacted_and_a_short_one_is_not,
    a_session_that_cannot_be_compacted_blocks_no_other,
    a_tombstone_is_kept_for_its_ttl_and_while_a_group_needs_later_events,
    a_crash_during_deletion_is_swept_later,
    a_session_whose_stream_is_deleted_expires_once,
    concurrent_maintenance_expires_each_of_many_sessions_once,
    the_ttl_counts_from_the_last_event_even_if_only_a_snapshot_has_it,
    a_recent_expiry_is_left_to_the_process_that_started_it,
    a_list_entry_is_kept_while_its_session_may_be_being_created,
);

const MOMENT: Duration = Duration::from_millis(1);

/// Considers copies abandoned at once, and deletes tombstones at once.
fn expire_at_once() -> SessionsConfig {
    SessionsConfig { tombstone_ttl: MOMENT, abandoned_after: MOMENT, ..by_hand() }
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, waiting).await.unwrap();
}

async fn maintenance_expires_and_deletes_sessions_until_shutdown(fixture: Fixture) {
    let config =
        SessionsConfig { ttl: Some(MOMENT), compact_min_entries: Some(20), ..expire_at_once() };
    let sessions = fixture.sessions_with(folds(), config).await;
    let for_ever = fixture.sessions().await.create(&SessionId::random()).await.unwrap();
    publish(&for_ever, 0..30).await;
    assert!(for_ever.snapshot().await.unwrap());
    // Created before maintenance starts, which would consider a session being created abandoned.
    let ids = [SessionId::random(), SessionId::random()];
    for id in &ids {
        sessions.create(id).await.unwrap();
    }
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn({
        let sessions = sessions.clone();
        async move {
            let shutdown = async { drop(stopped.await) };
            sessions.run(Duration::from_millis(5), shutdown).await
        }
    });
    // One run expires them, and a later one deletes them: maintenance continues.
    for id in &ids {
        until(async || sessions.info(id).await.unwrap().is_none()).await;
        let error = sessions.recover(id).await.unwrap_err();
        assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
        let stream = fixture.stream_of(id);
        assert!(fixture.backend().await.stats(&stream).await.unwrap().is_none());
    }
    // The list entry is removed last.
    let is_listed = async || {
        let listed = sessions.list(EntryId::MIN, 10).await.unwrap();
        listed.iter().map(|info| &info.session).collect::<Vec<_>>() == [for_ever.id()]
    };
    until(is_listed).await;
    until(async || fixture.entries(for_ever.id()).await.len() == 1).await;
    assert_eq!(sum(&sessions.recover(for_ever.id()).await.unwrap()), Sum::of(0..30));
    stop.send(()).unwrap();
    tokio::time::timeout(LIMIT, running).await.unwrap().unwrap().unwrap();

    let error = sessions.run(Duration::ZERO, std::future::pending()).await.unwrap_err();
    assert!(error.to_string().contains("every"), "{error}");
}

async fn a_long_session_is_compacted_and_a_short_one_is_not(fixture: Fixture) {
    let config = SessionsConfig { compact_min_entries: Some(20), ..by_hand() };
    let sessions = fixture.sessions_with(folds(), config).await;
    let long = sessions.create(&fixture.session).await.unwrap();
    let short = sessions.create(&SessionId::random()).await.unwrap();
    let unknown = sessions.create(&SessionId::random()).await.unwrap();
    publish(&long, 0..21).await;
    publish(&short, 0..20).await;
    publish(&unknown, 0..50).await;
    assert!(long.snapshot().await.unwrap() && short.snapshot().await.unwrap());
    publish(&long, 21..30).await;

    assert_eq!(sessions.sweep().await.unwrap().checked, 3);
    assert_eq!(fixture.entries(long.id()).await.len(), 30, "a sweep compacts nothing");
    let done = sessions.run_once().await.unwrap();
    assert_eq!((done.compacted, done.removed, done.uncompactable), (1, 20, 0));
    assert_eq!((done.swept.checked, done.swept.failed), (3, 0));
    assert_eq!(fixture.entries(long.id()).await.len(), 10);
    assert_eq!(fixture.entries(short.id()).await.len(), 20);
    assert_eq!(fixture.entries(unknown.id()).await.len(), 50);
    assert_eq!(sum(&sessions.recover(long.id()).await.unwrap()), Sum::of(0..30));

    // Only entries since the last compaction count.
    assert_eq!(sessions.run_once().await.unwrap().compacted, 0);
    publish(&long, 30..41).await;
    assert!(long.snapshot().await.unwrap());
    let done = sessions.run_once().await.unwrap();
    assert_eq!((done.compacted, done.removed), (1, 20));
    assert_eq!(sum(&sessions.recover(long.id()).await.unwrap()), Sum::of(0..41));

    let never = SessionsConfig { compact_min_entries: None, ..by_hand() };
    publish(&long, 41..90).await;
    assert!(long.snapshot().await.unwrap());
    let never = fixture.sessions_with(folds(), never).await;
    assert_eq!(never.run_once().await.unwrap().compacted, 0);
    let zero = SessionsConfig { compact_min_entries: Some(0), ..by_hand() };
    assert!(Sessions::new(fixture.bus().await, folds(), zero).await.is_err());
}

async fn a_session_that_cannot_be_compacted_blocks_no_other(fixture: Fixture) {
    let config = SessionsConfig { compact_min_entries: Some(1), ..by_hand() };
    let sessions = fixture.sessions_with(folds(), config).await;
    let invalid = sessions.create(&fixture.session).await.unwrap();
    publish(&invalid, 0..5).await;
    fixture.append(&[("type", "tests.Unheard"), ("payload", "{}")]).await;
    invalid.refresh().await.unwrap();
    let fine = sessions.create(&SessionId::random()).await.unwrap();
    publish(&fine, 0..5).await;
    assert!(invalid.snapshot().await.unwrap() && fine.snapshot().await.unwrap());
    let done = sessions.run_once().await.unwrap();
    assert_eq!((done.compacted, done.uncompactable, done.swept.failed), (1, 1, 0));
    assert_eq!(fixture.entries(invalid.id()).await.len(), 6);
    assert_eq!(fixture.entries(fine.id()).await.len(), 1);
}

async fn a_tombstone_is_kept_for_its_ttl_and_while_a_group_needs_later_events(fixture: Fixture) {
    let config = SessionsConfig { ttl: Some(MOMENT), ..by_hand() };
    let patient = fixture.sessions_with(folds(), config).await;
    let expire_at_once = fixture.sessions_with(folds(), expire_at_once()).await;
    let session = patient.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    pause().await;
    assert_eq!(patient.sweep().await.unwrap().expired, 1);
    pause().await;
    assert_eq!(patient.sweep().await.unwrap().deleted, 0);
    let error = patient.recover(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::Expired { entries: 3, .. }), "{error}");

    // A late event, and a group that has not read it.
    let bus = fixture.bus().await;
    let subscribe = SubscribeOptions::durable("workers").session(fixture.session.clone());
    let workers = bus.subscribe::<Noted>(subscribe, |_| async {}).await.unwrap();
    assert!(bus.unsubscribe(workers).await.unwrap());
    bus.publish(Noted { session_id: Some(fixture.session.to_string()), ..noted(3) }).await.unwrap();
    assert_eq!(expire_at_once.sweep().await.unwrap().deleted, 0);
    assert_eq!(fixture.entries(&fixture.session).await.len(), 1);

    let backend = fixture.backend().await;
    let group = headwater_stream::GroupName::new(format!(
        "{}:cg:{}:workers",
        fixture.prefix, fixture.session
    ));
    assert!(backend.remove_group(&fixture.stream(), &group.unwrap()).await.unwrap());
    assert_eq!(expire_at_once.sweep().await.unwrap().deleted, 1);
    assert_eq!(expire_at_once.sweep().await.unwrap(), Default::default());
    // The name is free again, and nothing of the old session remains.
    let anew = patient.create(&fixture.session).await.unwrap();
    publish(&anew, 7..8).await;
    assert_eq!(sum(&anew), Sum::of([7]));
}

async fn a_crash_during_deletion_is_swept_later(fixture: Fixture) {
    let config = SessionsConfig { ttl: Some(MOMENT), ..by_hand() };
    let sessions = fixture.sessions_with(folds(), config).await;
    sessions.create(&fixture.session).await.unwrap();
    pause().await;
    assert_eq!(sessions.sweep().await.unwrap().expired, 1);
    // The state after the first steps: the session cannot be opened, and its name is not free.
    let backend = fixture.backend().await;
    change_meta(&fixture, &[("expired_at", backend.now().await.unwrap().to_rfc3339())]).await;
    backend.delete_stream(&fixture.stream()).await.unwrap();
    let error = sessions.recover(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::Expired { .. }), "{error}");
    let error = sessions.create(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    assert_eq!(sessions.sweep().await.unwrap().deleted, 0, "its process may still be working");

    let impatient = fixture.sessions_with(folds(), expire_at_once()).await;
    pause().await;
    assert_eq!(impatient.sweep().await.unwrap().deleted, 1);
    assert_eq!(sessions.info(&fixture.session).await.unwrap(), None);
    sessions.create(&fixture.session).await.unwrap();
}

async fn a_session_whose_stream_is_deleted_expires_once(fixture: Fixture) {
    let config = SessionsConfig { ttl: Some(MOMENT), ..by_hand() };
    let sessions = fixture.sessions_with(folds(), config).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    assert!(fixture.backend().await.delete_stream(&fixture.stream()).await.unwrap());
    pause().await;
    assert_eq!(sessions.sweep().await.unwrap().expired, 1);
    assert_eq!(sessions.sweep().await.unwrap().expired, 0);
    let info = sessions.info(&fixture.session).await.unwrap().unwrap();
    assert_eq!(info.stage, SessionStage::Expired);
}

/// Changes the metadata of the fixture's session.
async fn change_meta(fixture: &Fixture, fields: &[(&str, String)]) {
    let meta = format!("{}:session:{}:meta", fixture.prefix, fixture.session);
    let fields = fields.iter().map(|(name, value)| (name.to_string(), value.clone().into()));
    let meta = MapName::new(meta).unwrap();
    let backend = fixture.backend().await;
    assert!(backend.map_update(&meta, None, &fields.collect()).await.unwrap());
}

async fn the_ttl_counts_from_the_last_event_even_if_only_a_snapshot_has_it(fixture: Fixture) {
    let config = SessionsConfig { ttl: Some(LIMIT * 60), ..by_hand() };
    let sessions = fixture.sessions_with(folds(), config).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    // Created long ago, and used just now.
    change_meta(&fixture, &[("created_at", "2020-01-01T00:00:00Z".to_owned())]).await;
    assert_eq!(sessions.sweep().await.unwrap().expired, 0);
    assert!(session.snapshot().await.unwrap());
    // Its stream is lost; the snapshot has the time of its last use.
    assert!(fixture.backend().await.delete_stream(&fixture.stream()).await.unwrap());
    assert_eq!(sessions.sweep().await.unwrap().expired, 0);
    assert_eq!(sessions.info(&fixture.session).await.unwrap().unwrap().stage, SessionStage::Open);
    // That was long ago, too.
    let meta = format!("{}:session:{}:meta", fixture.prefix, fixture.session);
    let meta =
        fixture.backend().await.map_get(&MapName::new(meta).unwrap()).await.unwrap().unwrap();
    let snapshot = meta.keys().find(|name| name.starts_with("snapshot:")).unwrap();
    change_meta(&fixture, &[(snapshot, "1577836800000-0 3".to_owned())]).await;
    assert_eq!(sessions.sweep().await.unwrap().expired, 1);
}

async fn a_recent_expiry_is_left_to_the_process_that_started_it(fixture: Fixture) {
    let config = SessionsConfig { ttl: Some(MOMENT), tombstone_ttl: MOMENT, ..by_hand() };
    let patient = fixture.sessions_with(folds(), config).await;
    let impatient = fixture.sessions_with(folds(), expire_at_once()).await;
    let session = patient.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    // It was marked as expired, an event arrived, and the process has yet to reopen it.
    let backend = fixture.backend().await;
    let ended = [
        ("stage", "expired".to_owned()),
        ("expired_through", session.position().to_string()),
        ("expired_entries", "3".to_owned()),
        ("expired_at", backend.now().await.unwrap().to_rfc3339()),
    ];
    change_meta(&fixture, &ended).await;
    let event = Noted { session_id: Some(fixture.session.to_string()), ..noted(3) };
    patient.bus().publish(event).await.unwrap();
    pause().await;
    let stage = async || patient.info(&fixture.session).await.unwrap().map(|info| info.stage);
    patient.sweep().await.unwrap();
    assert_eq!(
        (stage().await, fixture.entries(&fixture.session).await.len()),
        (Some(SessionStage::Expired), 4)
    );
    // The process that marked it is dead.
    impatient.sweep().await.unwrap();
    assert_eq!(stage().await, Some(SessionStage::Open));
    assert_eq!(sum(&patient.recover(&fixture.session).await.unwrap()), Sum::of(0..4));
    // It expires, and is not deleted while a process may be about to remove its events, however short the tombstone
    // TTL.
    pause().await;
    assert_eq!(patient.sweep().await.unwrap().expired, 1);
    pause().await;
    assert_eq!(patient.sweep().await.unwrap().deleted, 0);
    assert_eq!(stage().await, Some(SessionStage::Expired));
    assert_eq!(impatient.sweep().await.unwrap().deleted, 1);
    assert_eq!(stage().await, None);
}

async fn a_list_entry_is_kept_while_its_session_may_be_being_created(fixture: Fixture) {
    let patient = fixture.sessions().await;
    let impatient = fixture.sessions_with(folds(), expire_at_once()).await;
    let backend = fixture.backend().await;
    let list = StreamName::new(format!("{}:sessions", fixture.prefix)).unwrap();
    let entry = [Fields::new([("session", fixture.session.to_string())])];
    backend.append(&list, &entry, &Retention::KEEP_ALL).await.unwrap();
    pause().await;
    let length = async || backend.stats(&list).await.unwrap().map_or(0, |stats| stats.length);
    patient.sweep().await.unwrap();
    assert_eq!(length().await, 1);
    impatient.sweep().await.unwrap();
    assert_eq!(length().await, 0);
}

async fn concurrent_maintenance_expires_each_of_many_sessions_once(fixture: Fixture) {
    const MANY: u64 = 150;
    let config = SessionsConfig { ttl: Some(MOMENT), ..by_hand() };
    let sessions = fixture.sessions_with(folds(), config).await;
    for _ in 0..MANY {
        sessions.create(&SessionId::random()).await.unwrap();
    }
    // A damaged session, and a foreign entry in the list.
    sessions.create(&fixture.session).await.unwrap();
    change_meta(&fixture, &[("stage", "{odd}".to_owned())]).await;
    let backend = fixture.backend().await;
    let list = StreamName::new(format!("{}:sessions", fixture.prefix)).unwrap();
    let group = headwater_stream::GroupName::new("watchers").unwrap();
    backend.ensure_group(&list, &group, GroupStart::Beginning).await.unwrap();
    pause().await;
    let (one, other) = tokio::join!(sessions.sweep(), sessions.sweep());
    let (one, other) = (one.unwrap(), other.unwrap());
    assert_eq!((one.checked, other.checked), (MANY, MANY));
    assert_eq!((one.failed, other.failed), (1, 1));
    assert_eq!(one.expired + other.expired, MANY, "{one:?} {other:?}");
    assert_eq!(sessions.list(EntryId::MIN, 1000).await.unwrap().len(), MANY as usize);
}

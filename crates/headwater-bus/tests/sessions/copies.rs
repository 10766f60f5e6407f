//! Forks, exports and imports.

use std::sync::atomic::{AtomicBool, Ordering};

use headwater_bus::{
    BusError, Import, MissingReason, ReplayUntil, Session, SessionError, SessionId, SessionStage,
    Sessions, SessionsConfig,
};
use headwater_conformance::bus::Noted;
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Fields, MapName, RegistryMap, Retention};

use crate::fixture::{Fixture, Sum, by_hand, folds, in_memory, lines_of, noted, publish, sum};

on_every_bus!(
    a_fork_has_the_events_of_its_parent_and_continues_independently,
    a_fork_of_a_compacted_session_is_complete,
    a_fork_before_the_compacted_entries_is_rejected,
    a_fork_never_overwrites_a_session,
    a_fork_at_a_missing_entry_leaves_nothing,
    an_unfinished_session_is_not_a_session_and_is_swept,
    an_evicted_copier_does_not_affect_a_new_session,
    entries_of_an_evicted_copier_do_not_count,
    the_state_of_a_fork_refers_to_its_own_entries,
    a_compacted_foreign_stream_is_not_considered_complete,
    an_export_ends_at_the_last_entry_of_its_start,
    the_remains_of_a_copy_are_not_a_session,
    an_imported_export_is_identical,
    an_imported_session_can_be_continued,
    a_compacted_session_is_exported_with_its_snapshots,
    an_invalid_import_file_leaves_nothing,
    an_import_over_a_session_is_rejected,
    a_fork_during_compactions_is_complete,
    an_interrupted_import_can_be_repeated_at_once,
);

/// On disk: each step of a fork takes a while, so that it can be interrupted in the middle.
mod on_a_server {
    tests_in!(
        redis,
        crate::fixture::Fixture::redis(),
        (flavor = "multi_thread", worker_threads = 2),
        an_interrupted_fork_can_be_repeated_at_once,
    );

    use super::an_interrupted_fork_can_be_repeated_at_once;
}

async fn numbered(session: &Session, numbers: std::ops::Range<u64>) -> Vec<EntryId> {
    let mut ids = Vec::new();
    for number in numbers {
        ids.push(session.publish(noted(number)).await.unwrap().entry_id().unwrap());
    }
    ids
}

async fn a_fork_has_the_events_of_its_parent_and_continues_independently(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    let ids = numbered(&parent, 0..20).await;
    parent.snapshot().await.unwrap();
    let before = fixture.entries(&fixture.session).await;

    let fork = SessionId::random();
    let child = sessions.fork(&fixture.session, ReplayUntil::Entry(ids[9]), &fork).await.unwrap();
    assert_eq!(sum(&child), Sum::of(0..10));
    child.publish(noted(100)).await.unwrap();
    parent.publish(noted(20)).await.unwrap();
    assert_eq!(sum(&sessions.recover(&fork).await.unwrap()), Sum::of((0..10).chain([100])));
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..21));
    assert_eq!(fixture.entries(&fixture.session).await[..20], before);

    let info = sessions.info(&fork).await.unwrap().unwrap();
    let origin = info.parent.unwrap();
    assert_eq!((origin.session, origin.entry_id), (fixture.session.clone(), ids[9]));
    assert_eq!(info.stage, SessionStage::Open);
    // Entries keep the times of the parent, also in a fork of the fork.
    let again = SessionId::random();
    sessions.fork(&fork, ReplayUntil::End, &again).await.unwrap();
    let time = Timestamp::from_millis(ids[4].ms);
    let expected = ids[..10].iter().filter(|id| id.ms <= ids[4].ms).count() as u64;
    let state = sessions.state_at(&again, ReplayUntil::Time(time)).await.unwrap();
    assert_eq!(*state.get::<Sum>().unwrap(), Sum::of(0..expected));

    // The fork is independent of the parent.
    sessions.delete(&fixture.session).await.unwrap();
    assert_eq!(sum(&sessions.recover(&fork).await.unwrap()).count, 11);
    // A fork at the end copies the snapshot, too; an empty session has an empty fork.
    let empty = sessions.create(&SessionId::random()).await.unwrap();
    let fork = sessions.fork(empty.id(), ReplayUntil::End, &SessionId::random()).await.unwrap();
    assert_eq!(sum(&fork), Sum::default());
    fork.publish(noted(1)).await.unwrap();
    assert_eq!(sum(&sessions.recover(fork.id()).await.unwrap()), Sum::of([1]));
}

async fn a_fork_of_a_compacted_session_is_complete(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    numbered(&parent, 0..20).await;
    parent.compact().await.unwrap();
    let ids = numbered(&parent, 20..30).await;
    let fork = SessionId::random();
    let child = sessions.fork(&fixture.session, ReplayUntil::Entry(ids[4]), &fork).await.unwrap();
    assert_eq!(sum(&child), Sum::of(0..25));
    assert_eq!(child.recovery().replayed, 5);
    child.publish(noted(25)).await.unwrap();
    child.compact().await.unwrap();
    assert_eq!(sum(&sessions.recover(&fork).await.unwrap()), Sum::of(0..26));
    // Other folds report that the beginning is missing.
    let other = fixture.sessions_with(headwater_bus::Folds::none().latest::<Noted>(), by_hand());
    let error = other.await.recover(&fork).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!(missing.reason, MissingReason::Compacted);
}

async fn a_fork_before_the_compacted_entries_is_rejected(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    let ids = numbered(&parent, 0..20).await;
    parent.compact().await.unwrap();
    let fork = SessionId::random();
    for until in
        [ReplayUntil::Entry(ids[5]), ReplayUntil::Time(Timestamp::from_millis(ids[0].ms - 1))]
    {
        let error = sessions.fork(&fixture.session, until, &fork).await.unwrap_err();
        println!("{error}");
        assert_eq!(sessions.info(&fork).await.unwrap(), None);
    }
    assert_eq!(fixture.entries(&fork).await, []);
}

async fn a_fork_never_overwrites_a_session(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    numbered(&parent, 0..3).await;
    let other = sessions.create(&SessionId::random()).await.unwrap();
    numbered(&other, 5..6).await;
    for taken in [other.id(), parent.id()] {
        let error = sessions.fork(&fixture.session, ReplayUntil::End, taken).await.unwrap_err();
        assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    }
    assert_eq!(sum(&sessions.recover(other.id()).await.unwrap()), Sum::of([5]));
}

async fn a_fork_at_a_missing_entry_leaves_nothing(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    let ids = numbered(&parent, 0..3).await;
    let fork = SessionId::random();
    for id in [EntryId::new(ids[2].ms + 1, 0), EntryId::new(ids[0].ms - 1, 0)] {
        let error =
            sessions.fork(&fixture.session, ReplayUntil::Entry(id), &fork).await.unwrap_err();
        assert!(matches!(error, SessionError::Bus(BusError::Invalid { .. })), "{error}");
        assert_eq!(sessions.info(&fork).await.unwrap(), None);
        assert_eq!(fixture.entries(&fork).await, []);
    }
    let error = sessions.fork(&SessionId::random(), ReplayUntil::End, &fork).await.unwrap_err();
    assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
}

async fn an_unfinished_session_is_not_a_session_and_is_swept(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..1200).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let id = SessionId::random();
    let mut import = sessions.import(&id);
    for line in &lines[..900] {
        import.line(line).await.unwrap();
    }
    let error = sessions.recover(&id).await.unwrap_err();
    assert!(matches!(error, SessionError::Unfinished { .. }), "{error}");
    assert_eq!(sessions.info(&id).await.unwrap().unwrap().stage, SessionStage::Copying);
    let error = sessions.fork(&fixture.session, ReplayUntil::End, &id).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    // Its copier may still be working on it.
    assert_eq!(sessions.sweep().await.unwrap().abandoned, 0);

    let abandoned_after = std::time::Duration::from_millis(1);
    let impatient = SessionsConfig { abandoned_after, ..by_hand() };
    let impatient = fixture.sessions_with(folds(), impatient).await;
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    assert_eq!(impatient.sweep().await.unwrap().abandoned, 1);
    assert_eq!(sessions.info(&id).await.unwrap(), None);
    // An evicted copier cannot finish it.
    let mut went_on = Ok(());
    for line in &lines[900..] {
        went_on = import.line(line).await;
        if went_on.is_err() {
            break;
        }
    }
    let error = went_on.unwrap_err();
    assert!(matches!(error, SessionError::Unfinished { .. }), "{error}");
    assert_eq!(sessions.info(&id).await.unwrap(), None);
}

async fn an_evicted_copier_does_not_affect_a_new_session(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..1200).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let id = SessionId::random();
    let mut import = sessions.import(&id);
    for line in &lines[..900] {
        import.line(line).await.unwrap();
    }
    // It is removed, and a session of this name is created.
    assert!(sessions.delete(&id).await.unwrap());
    let other = sessions.create(&id).await.unwrap();
    publish(&other, 0..5).await;
    let mut went_on = Ok(());
    for line in &lines[900..] {
        went_on = import.line(line).await;
        if went_on.is_err() {
            break;
        }
    }
    let error = went_on.unwrap_err();
    assert!(matches!(error, SessionError::Unfinished { .. }), "{error}");
    assert!(import.finish().await.is_err());
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..5));
    assert_eq!(fixture.entries(&id).await.len(), 5);
}

async fn entries_of_an_evicted_copier_do_not_count(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..700).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let id = SessionId::random();
    let mut import = sessions.import(&id);
    for line in &lines[..600] {
        import.line(line).await.unwrap();
    }
    let copies: Vec<Fields> =
        fixture.entries(&id).await.into_iter().map(|entry| entry.fields).collect();
    assert!(!copies.is_empty());
    // It is removed, and a session of this name is created. Only then the last append of the import arrives: it was
    // delayed after its check.
    assert!(sessions.delete(&id).await.unwrap());
    let other = sessions.create(&id).await.unwrap();
    publish(&other, 0..5).await;
    let backend = fixture.backend().await;
    backend.append(&fixture.stream_of(&id), &copies, &Retention::KEEP_ALL).await.unwrap();
    publish(&other, 5..8).await;
    assert_eq!(sum(&other), Sum::of(0..8));
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..8));
    let state = sessions.state_at(&id, ReplayUntil::Entry(other.position())).await.unwrap();
    assert_eq!(*state.get::<Sum>().unwrap(), Sum::of(0..8));
    // Nor in copies of it.
    let fork = sessions.fork(&id, ReplayUntil::End, &SessionId::random()).await.unwrap();
    assert_eq!(sum(&fork), Sum::of(0..8));
    assert_eq!(fixture.entries(fork.id()).await.len(), 8);
    let exported = lines_of(sessions.export(&id).await.unwrap()).await;
    assert_eq!(exported.len(), 10);
    let imported = import_all(sessions.import(&SessionId::random()), &exported).await.unwrap();
    assert_eq!(sum(&imported), Sum::of(0..8));
    // These entries do not count in a fork, either, although a fork consists of copies.
    let stream = fixture.stream_of(fork.id());
    backend.append(&stream, &copies, &Retention::KEEP_ALL).await.unwrap();
    fork.publish(noted(8)).await.unwrap();
    assert_eq!(sum(&sessions.recover(fork.id()).await.unwrap()), Sum::of(0..9));
}

async fn the_state_of_a_fork_refers_to_its_own_entries(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    numbered(&parent, 0..20).await;
    parent.snapshot().await.unwrap();
    let last = numbered(&parent, 20..25).await[4];
    let id = SessionId::random();
    let fork = sessions.fork(&fixture.session, ReplayUntil::Entry(last), &id).await.unwrap();
    let ids: Vec<EntryId> = fixture.entries(&id).await.iter().map(|entry| entry.id).collect();
    let again = sessions.recover(&id).await.unwrap();
    // It has the snapshot of its parent, and can take its own.
    assert_eq!(again.recovery().from_snapshot, Some(ids[24]));
    for session in [&fork, &again] {
        let latest = session.latest::<Noted>().unwrap().envelope.entry_id.unwrap();
        assert_eq!(latest, ids[24]);
        let all = session.all::<Noted>().unwrap().events;
        let named: Vec<_> = all.iter().map(|event| event.envelope.entry_id.unwrap()).collect();
        assert_eq!(named, ids[15..]);
        let stream = fixture.stream_of(&id);
        assert!(all.iter().all(|event| event.envelope.stream.as_ref() == Some(&stream)));
        let state = sessions.state_at(&id, ReplayUntil::Entry(named[0])).await.unwrap();
        assert_eq!(*state.get::<Sum>().unwrap(), Sum::of(0..16));
    }
}

async fn a_compacted_foreign_stream_is_not_considered_complete(fixture: Fixture) {
    let payload = |number: u64| format!(r#"{{"session_id":null,"number":{number},"text":""}}"#);
    for number in 0..10 {
        fixture.append(&[("type", "conformance.Noted"), ("payload", &payload(number))]).await;
    }
    let sessions = fixture.sessions().await;
    let session = sessions.recover(&fixture.session).await.unwrap();
    session.compact().await.unwrap();
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..10));
    let other = headwater_bus::Folds::none().latest::<Noted>();
    let other = fixture.sessions_with(other, by_hand()).await;
    let error = other.recover(&fixture.session).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!((missing.reason, missing.count), (MissingReason::Compacted, Some(9)));
    let fork =
        sessions.fork(&fixture.session, ReplayUntil::End, &SessionId::random()).await.unwrap();
    assert_eq!(sum(&fork), Sum::of(0..10));
}

async fn an_export_ends_at_the_last_entry_of_its_start(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..600).await;
    let mut export = sessions.export(&fixture.session).await.unwrap();
    // The header, and one of the entries read with it.
    export.next_line().await.unwrap().unwrap();
    export.next_line().await.unwrap().unwrap();
    // Events published meanwhile are not exported, or the export might never end.
    publish(&session, 600..5000).await;
    assert_eq!(lines_of(export).await.len(), 600);
}

async fn the_remains_of_a_copy_are_not_a_session(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    // The last append of a copier that was delayed while the session was swept.
    let payload = r#"{"session_id":null,"number":7,"text":""}"#;
    let copy = [
        ("type", "conformance.Noted"),
        ("payload", payload),
        ("original_entry_id", "1767225600000-0"),
    ];
    fixture.append(&copy).await;
    let error = sessions.recover(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::Unfinished { .. }), "{error}");
    let error = sessions.create(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    assert!(sessions.delete(&fixture.session).await.unwrap());
    assert_eq!(sum(&sessions.ensure(&fixture.session).await.unwrap()), Sum::default());
}

pub(crate) async fn import_all(
    mut import: Import,
    lines: &[String],
) -> Result<Session, SessionError> {
    for line in lines {
        import.line(line).await?;
    }
    import.finish().await
}

/// The fields of all entries, without those added by the copy.
async fn fields_of(fixture: &Fixture, session: &SessionId) -> Vec<Fields> {
    let plain = |fields: &Fields| {
        let ours = |name: &[u8]| name == b"original_entry_id" || name == b"copied_by";
        Fields::new(fields.iter().filter(|(name, _)| !ours(name)).cloned())
    };
    fixture.entries(session).await.iter().map(|entry| plain(&entry.fields)).collect()
}

async fn an_imported_export_is_identical(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..700).await;
    // Including bytes that are not UTF-8, line breaks in a payload, and foreign fields.
    let invalid = Fields::new([
        (&b"type"[..], &b"conformance.Noted"[..]),
        (b"payload", b"{\n \"number\": 700,\n \"text\": \"a\\nb\" }"),
        (b"\xff\x00", b"\x01\xfe\n"),
    ]);
    let backend = fixture.backend().await;
    backend.append(&fixture.stream(), &[invalid], &Retention::KEEP_ALL).await.unwrap();
    publish(&session, 701..705).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    assert_eq!(lines.len(), 707);

    let id = SessionId::random();
    let imported = import_all(sessions.import(&id), &lines).await.unwrap();
    assert_eq!(sum(&imported), Sum::of(0..705));
    assert_eq!(fields_of(&fixture, &id).await, fields_of(&fixture, &fixture.session).await);
    imported.publish(noted(705)).await.unwrap();
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..706));
    // Import on another bus.
    let elsewhere = in_memory().await;
    let imported = import_all(elsewhere.import(&fixture.session), &lines).await.unwrap();
    assert_eq!(sum(&imported), Sum::of(0..705));
    let back = lines_of(elsewhere.export(&fixture.session).await.unwrap()).await;
    assert_eq!(back.len(), lines.len());
}

async fn an_imported_session_can_be_continued(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..700).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let id = SessionId::random();
    let imported = import_all(sessions.import(&id), &lines).await.unwrap();
    assert_eq!(sum(&imported), Sum::of(0..700));
    publish(&imported, 700..710).await;
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..710));
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..700));
    // Again, now with copied entries.
    let lines = lines_of(sessions.export(&id).await.unwrap()).await;
    let again = import_all(sessions.import(&SessionId::random()), &lines).await.unwrap();
    assert_eq!(sum(&again), Sum::of(0..710));
    // An import over a session is rejected.
    let error = import_all(sessions.import(&fixture.session), &lines).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
}

async fn a_compacted_session_is_exported_with_its_snapshots(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..50).await;
    session.compact().await.unwrap();
    publish(&session, 50..60).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let id = SessionId::random();
    let imported = import_all(sessions.import(&id), &lines).await.unwrap();
    assert_eq!((sum(&imported), imported.recovery().replayed), (Sum::of(0..60), 10));
    // Without its snapshot it is incomplete.
    let without: Vec<String> =
        lines.iter().filter(|line| !line.starts_with("{\"snapshot\"")).cloned().collect();
    assert_eq!(without.len(), lines.len() - 1);
    let id = SessionId::random();
    let error = import_all(sessions.import(&id), &without).await.unwrap_err();
    assert!(matches!(error, SessionError::Import { .. }), "{error}");
    assert_eq!(sessions.info(&id).await.unwrap(), None);
}

async fn an_invalid_import_file_leaves_nothing(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..1100).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let last = lines.len() - 1;
    let changed = |change: &dyn Fn(&mut Vec<String>)| {
        let mut lines = lines.clone();
        change(&mut lines);
        lines
    };
    let wrong = [
        ("torn at a line", changed(&|lines| lines.truncate(800))),
        (
            "torn in a line",
            changed(&|lines| {
                lines.truncate(800);
                let line = lines.pop().unwrap();
                lines.push(line[..line.len() / 2].to_owned());
            }),
        ),
        ("without its end", changed(&|lines| lines.truncate(last))),
        ("without its head", changed(&|lines| drop(lines.remove(0)))),
        ("an entry less", changed(&|lines| drop(lines.remove(600)))),
        ("an entry twice", changed(&|lines| lines.insert(600, lines[600].clone()))),
        ("out of order", changed(&|lines| lines.swap(600, 601))),
        ("changed", changed(&|lines| lines[600] = lines[600].replace("note", "nose"))),
        ("out of order, with a checksum that fits", {
            let mut lines = lines.clone();
            lines.swap(600, 601);
            let entries = lines[1..last].concat();
            lines[last] = format!(
                "{{\"end\":{{\"entries\":1100,\"crc32\":{}}}}}",
                crc32fast::hash(entries.as_bytes())
            );
            lines
        }),
        (
            "from the future",
            changed(&|lines| {
                lines[0] = lines[0].replace("\"format\":1", "\"format\":2");
            }),
        ),
        ("foreign", vec!["{\"some\":\"thing\"}".to_owned(), "else".to_owned()]),
        ("no JSON", vec!["session".to_owned()]),
        ("empty", vec![]),
        ("more after the end", changed(&|lines| lines.push(lines[5].clone()))),
        ("two heads", changed(&|lines| lines.insert(1, lines[0].clone()))),
    ];
    for (what, lines) in wrong {
        let id = SessionId::random();
        let error = import_all(sessions.import(&id), &lines).await.unwrap_err();
        println!("{what}: {error}");
        assert!(matches!(error, SessionError::Import { .. }), "{what}: {error}");
        assert_eq!(sessions.info(&id).await.unwrap(), None, "{what}");
        assert_eq!(fixture.entries(&id).await, [], "{what}");
    }
    let listed = sessions.list(EntryId::MIN, 100).await.unwrap();
    assert_eq!(listed.len(), 1);
    let huge = "x".repeat(headwater_bus::limits::IMPORT_LINE_BYTES_MAX + 1);
    assert!(sessions.import(&SessionId::random()).line(&huge).await.is_err());
}

async fn an_import_over_a_session_is_rejected(fixture: Fixture) {
    let sessions: Sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let error = import_all(sessions.import(&fixture.session), &lines).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..3));
    // Nor over a stream of another program.
    let id = SessionId::random();
    let map = MapName::new(format!("{}:session:{id}:meta", fixture.prefix)).unwrap();
    let theirs = RegistryMap::from([("theirs".to_owned(), "1".into())]);
    let backend = fixture.backend().await;
    backend.map_create(&map, &theirs).await.unwrap();
    import_all(sessions.import(&id), &lines).await.unwrap();
    assert_eq!(backend.map_get(&map).await.unwrap().unwrap()["theirs"], "1");
}

async fn a_fork_during_compactions_is_complete(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..1500).await;
    let is_over = AtomicBool::new(false);
    // More than a page between two compactions, so that they happen while a fork reads.
    let compacting = async {
        let (mut number, mut compactions) = (1500, 0);
        while !is_over.load(Ordering::Relaxed) {
            publish(&session, number..number + 600).await;
            number += 600;
            session.compact().await.unwrap();
            compactions += 1;
        }
        compactions
    };
    let forking = async {
        for _ in 0..30 {
            let id = SessionId::random();
            let fork = sessions.fork(&fixture.session, ReplayUntil::End, &id).await;
            let fork = fork.inspect_err(|_| is_over.store(true, Ordering::Relaxed)).unwrap();
            let count = sum(&fork).count;
            assert_eq!(sum(&fork), Sum::of(0..count));
            let again = fixture.sessions().await.recover(&id).await.unwrap();
            assert_eq!((sum(&again).count, again.recovery().missing), (count, None));
            sessions.delete(&id).await.unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    };
    let (compactions, ()) = tokio::join!(compacting, forking);
    println!("{compactions} compactions");
    assert!(compactions > 0);
}

/// The lines of a session of 1200 events, and an import that has stored most of them.
async fn half_imported(fixture: &Fixture, id: &SessionId) -> (Vec<String>, Import) {
    let sessions = fixture.sessions().await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..1200).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let mut import = sessions.import(id);
    for line in &lines[..900] {
        import.line(line).await.unwrap();
    }
    (lines, import)
}

async fn an_interrupted_import_can_be_repeated_at_once(fixture: Fixture) {
    let id = SessionId::random();
    // As after `kill -9`: the remains are not removed.
    let (lines, mut cancel_after) = half_imported(&fixture, &id).await;
    let sessions = fixture.sessions().await;
    let error = sessions.create(&id).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    let imported = import_all(sessions.import(&id), &lines).await.unwrap();
    assert_eq!(sum(&imported), Sum::of(0..1200));
    let again = fixture.sessions().await.recover(&id).await.unwrap();
    assert_eq!((sum(&again), again.recovery().missing), (Sum::of(0..1200), None));

    // The first import is still running. It can neither continue nor remove what the second created.
    let mut went_on = Ok(());
    for line in &lines[900..] {
        went_on = cancel_after.line(line).await;
        if went_on.is_err() {
            break;
        }
    }
    assert!(matches!(went_on, Err(SessionError::Unfinished { .. })), "{went_on:?}");
    assert!(!cancel_after.abandon().await.unwrap());
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..1200));

    // A complete session is not replaced.
    let error = import_all(sessions.import(&id), &lines).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
}

async fn an_interrupted_fork_can_be_repeated_at_once(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3000).await;
    let id = SessionId::random();
    {
        let forking = sessions.fork(&fixture.session, ReplayUntil::End, &id);
        tokio::pin!(forking);
        // Until it has started.
        loop {
            tokio::select! {
                forked = &mut forking => panic!("it was too quick: {forked:?}"),
                info = sessions.info(&id) => if info.unwrap().is_some() { break },
            }
        }
    }
    let error = sessions.recover(&id).await.unwrap_err();
    assert!(matches!(error, SessionError::Unfinished { .. }), "{error}");
    let fork = sessions.fork(&fixture.session, ReplayUntil::End, &id).await.unwrap();
    assert_eq!(sum(&fork), Sum::of(0..3000));
    assert_eq!(sum(&fixture.sessions().await.recover(&id).await.unwrap()), Sum::of(0..3000));
}

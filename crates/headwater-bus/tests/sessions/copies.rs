//! Forks, exports and imports.

use std::sync::atomic::{AtomicBool, Ordering};

use headwater_bus::{
    BusError, EventBusExt, Import, MissingReason, ReplayUntil, Session, SessionError, SessionId,
    SessionStage, Sessions, SessionsConfig,
};
use headwater_conformance::bus::Noted;
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Entry, EntryId, Fields, GroupName, GroupStart, MapName, Range, RegistryMap, Retention,
    StreamName,
};

use crate::fixture::{Fixture, Sum, by_hand, folds, in_memory, lines_of, noted, publish, sum};

on_every_bus!(
    a_fork_has_the_events_of_its_parent_and_continues_independently,
    a_fork_of_a_compacted_session_is_complete,
    a_fork_before_the_compacted_entries_is_rejected,
    a_fork_never_overwrites_a_session,
    a_fork_at_a_missing_entry_leaves_nothing,
    a_copy_in_progress_is_invisible_and_is_swept_when_it_is_abandoned,
    a_session_created_meanwhile_wins_over_a_copy,
    events_published_meanwhile_win_over_a_copy,
    of_concurrent_copies_to_one_id_one_becomes_the_session,
    the_state_of_a_fork_refers_to_its_own_entries,
    a_compacted_foreign_stream_is_not_considered_complete,
    an_export_ends_at_the_last_entry_of_its_start,
    a_copy_whose_process_died_before_the_rename_is_renamed_by_the_next_reader,
    an_empty_stream_left_by_a_crashed_creation_is_replaced_by_a_copy,
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

/// The rest of an import.
async fn go_on(mut import: Import, lines: &[String]) -> Result<Session, SessionError> {
    for line in lines {
        import.line(line).await?;
    }
    import.finish().await
}

async fn a_copy_in_progress_is_invisible_and_is_swept_when_it_is_abandoned(fixture: Fixture) {
    let id = SessionId::random();
    let (lines, import) = half_imported(&fixture, &id).await;
    let sessions = fixture.sessions().await;
    let error = sessions.recover(&id).await.unwrap_err();
    assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
    assert_eq!(sessions.info(&id).await.unwrap(), None);
    assert_eq!(sessions.list(EntryId::MIN, 10).await.unwrap().len(), 1);
    assert!(!sessions.delete(&id).await.unwrap());
    // Its process may still be working on it.
    assert_eq!(sessions.sweep().await.unwrap().abandoned, 0);

    let abandoned_after = std::time::Duration::from_millis(1);
    let impatient = SessionsConfig { abandoned_after, ..by_hand() };
    let impatient = fixture.sessions_with(folds(), impatient).await;
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    assert_eq!(impatient.sweep().await.unwrap().abandoned, 1);
    assert_eq!(impatient.sweep().await.unwrap().abandoned, 0);
    // What was removed cannot become a session any more.
    let error = go_on(import, &lines[900..]).await.unwrap_err();
    assert!(matches!(error, SessionError::CopyRemoved { .. }), "{error}");
    assert_eq!(sessions.info(&id).await.unwrap(), None);
    sessions.create(&id).await.unwrap();
}

async fn a_session_created_meanwhile_wins_over_a_copy(fixture: Fixture) {
    let id = SessionId::random();
    let (lines, import) = half_imported(&fixture, &id).await;
    let sessions = fixture.sessions().await;
    let other = sessions.create(&id).await.unwrap();
    publish(&other, 0..5).await;
    let error = go_on(import, &lines[900..]).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..5));
    assert_eq!(fixture.entries(&id).await.len(), 5);
}

async fn events_published_meanwhile_win_over_a_copy(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..30).await;
    original.compact().await.unwrap();
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let id = SessionId::random();
    let mut import = sessions.import(&id);
    for line in &lines[..lines.len() - 1] {
        import.line(line).await.unwrap();
    }
    let event = Noted { session_id: Some(id.to_string()), ..noted(7) };
    sessions.bus().publish(event).await.unwrap();
    let error = go_on(import, &lines[lines.len() - 1..]).await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    // Nothing of the copy remains, and the event is a session of its own.
    assert_eq!(sessions.info(&id).await.unwrap(), None);
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of([7]));
    assert!(copy_keys(&fixture).await.is_empty());
}

/// The sessions of copies that are in the list and not sessions.
async fn copy_keys(fixture: &Fixture) -> Vec<String> {
    let list = StreamName::new(format!("{}:sessions", fixture.prefix)).unwrap();
    let listed = fixture.backend().await.range(&list, Range::first(1000)).await.unwrap();
    let text = |entry: &Entry, name: &str| {
        let value = entry.fields.get(name)?;
        Some(String::from_utf8(value.to_vec()).unwrap())
    };
    let mut copies = Vec::new();
    for entry in listed.iter().filter(|entry| entry.fields.get("copy").is_some()) {
        let session = SessionId::new(text(entry, "session").unwrap()).unwrap();
        if fixture.sessions().await.info(&session).await.unwrap().is_none() {
            copies.push(session.to_string());
        }
    }
    copies
}

async fn of_concurrent_copies_to_one_id_one_becomes_the_session(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let mut parents = Vec::new();
    for number in 1..=6 {
        let parent = sessions.create(&SessionId::random()).await.unwrap();
        publish(&parent, 0..number * 10).await;
        // Every other one is copied with its snapshot.
        if number % 2 == 0 {
            parent.compact().await.unwrap();
        }
        parents.push(parent);
    }
    let id = SessionId::random();
    let forks = parents.iter().map(|parent| sessions.fork(parent.id(), ReplayUntil::End, &id));
    let forks = futures_util::future::join_all(forks).await;
    let won: Vec<&Session> = forks.iter().filter_map(|fork| fork.as_ref().ok()).collect();
    let [won] = won[..] else { panic!("{forks:?}") };
    for error in forks.iter().filter_map(|fork| fork.as_ref().err()) {
        assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    }
    let count = sum(won).count;
    assert!(count >= 10 && count.is_multiple_of(10), "{count}");
    let info = sessions.info(&id).await.unwrap().unwrap();
    let parent =
        parents.iter().find(|parent| *parent.id() == info.parent.as_ref().unwrap().session);
    assert_eq!(sum(parent.unwrap()), sum(won));
    assert_eq!(sum(&fixture.sessions().await.recover(&id).await.unwrap()), Sum::of(0..count));
    let expected = parents.len() + 1;
    assert_eq!(sessions.list(EntryId::MIN, 100).await.unwrap().len(), expected);
    assert!(copy_keys(&fixture).await.is_empty());
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

async fn a_copy_whose_process_died_before_the_rename_is_renamed_by_the_next_reader(
    fixture: Fixture,
) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    publish(&parent, 0..30).await;
    parent.compact().await.unwrap();
    publish(&parent, 30..40).await;
    let backend = fixture.backend().await;
    let map = |name: String| MapName::new(name).unwrap();
    for reader in 0..6 {
        let id = SessionId::random();
        sessions.fork(&fixture.session, ReplayUntil::End, &id).await.unwrap();
        // Back to the moment of the commit.
        let meta = map(format!("{}:session:{id}:meta", fixture.prefix));
        let fields = backend.map_get(&meta).await.unwrap().unwrap();
        let copy = String::from_utf8(fields["copied_by"].to_vec()).unwrap();
        let from = StreamName::new(format!("{{{}}}:copy:{copy}", fixture.stream_of(&id))).unwrap();
        assert!(backend.rename_stream(&fixture.stream_of(&id), &from).await.unwrap());
        let set = fields.keys().find_map(|name| name.strip_prefix("snapshot:")).unwrap();
        let snapshot = format!("{}:session:{id}:snapshot:{set}", fixture.prefix);
        let copied = map(format!("{snapshot}:copy:{copy}"));
        let snapshot = map(snapshot);
        let saved = backend.map_get(&snapshot).await.unwrap().unwrap();
        backend.map_create(&copied, &saved).await.unwrap();
        backend.map_delete(&snapshot).await.unwrap();
        let renaming = RegistryMap::from([("filler".to_owned(), copy.into())]);
        assert!(backend.map_update(&meta, None, &renaming).await.unwrap());

        match reader {
            0 => drop(sessions.recover(&id).await.unwrap()),
            1 => assert_eq!(sessions.info(&id).await.unwrap().unwrap().length, 11),
            2 => {
                let listed = sessions.list(EntryId::MIN, 100).await.unwrap();
                assert!(listed.iter().any(|info| info.session == id && info.length == 11));
            }
            3 => drop(sessions.export(&id).await.unwrap()),
            4 => {
                let error = sessions.create(&id).await.unwrap_err();
                assert!(matches!(error, SessionError::Exists { .. }), "{error}");
            }
            // Several at once.
            _ => {
                let all = (0..8).map(|_| sessions.recover(&id));
                futures_util::future::try_join_all(all).await.unwrap();
            }
        }
        assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..40), "{reader}");
        assert_eq!(backend.stats(&from).await.unwrap(), None);
        assert_eq!(backend.map_get(&copied).await.unwrap(), None);
        assert!(sessions.delete(&id).await.unwrap());
        assert_eq!(sessions.info(&id).await.unwrap(), None);
    }
}

async fn an_empty_stream_left_by_a_crashed_creation_is_replaced_by_a_copy(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    publish(&parent, 0..5).await;
    let id = SessionId::random();
    let guard = GroupName::new(format!("{}:session:{id}:guard", fixture.prefix)).unwrap();
    let backend = fixture.backend().await;
    let stream = fixture.stream_of(&id);
    backend.ensure_group(&stream, &guard, GroupStart::Beginning).await.unwrap();
    let fork = sessions.fork(&fixture.session, ReplayUntil::End, &id).await.unwrap();
    assert_eq!(sum(&fork), Sum::of(0..5));
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
        Fields::new(fields.iter().filter(|(name, _)| *name != b"original_entry_id"[..]).cloned())
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
    // As after `kill -9`: its entries are not removed.
    let (lines, mut first) = half_imported(&fixture, &id).await;
    let sessions = fixture.sessions().await;
    let imported = import_all(sessions.import(&id), &lines).await.unwrap();
    assert_eq!(sum(&imported), Sum::of(0..1200));
    let again = fixture.sessions().await.recover(&id).await.unwrap();
    assert_eq!((sum(&again), again.recovery().missing), (Sum::of(0..1200), None));

    // The first import is still running. It neither replaces nor removes what the second created.
    for line in &lines[900..] {
        first.line(line).await.unwrap();
    }
    let error = first.complete().await.unwrap_err();
    assert!(matches!(error, SessionError::Exists { .. }), "{error}");
    assert!(!first.abandon().await.unwrap());
    assert_eq!(sum(&sessions.recover(&id).await.unwrap()), Sum::of(0..1200));
    assert_eq!(fixture.entries(&id).await.len(), 1200);

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
                copies = copy_keys(&fixture) => if !copies.is_empty() { break },
            }
        }
    }
    let error = sessions.recover(&id).await.unwrap_err();
    assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
    let fork = sessions.fork(&fixture.session, ReplayUntil::End, &id).await.unwrap();
    assert_eq!(sum(&fork), Sum::of(0..3000));
    assert_eq!(sum(&fixture.sessions().await.recover(&id).await.unwrap()), Sum::of(0..3000));
}

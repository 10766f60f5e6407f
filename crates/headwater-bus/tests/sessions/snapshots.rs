//! Snapshots and compaction.

use std::sync::Arc;

use headwater_bus::{
    Event, EventBus, EventBusExt, Fold, Folds, MissingReason, ReceivedEvent, Scope, SessionError,
    SessionEvent, Sessions, SessionsConfig, SubscribeOptions, UnreadableEntries,
};
use headwater_conformance::bus::{HandlerLog, Noted, registry};
use headwater_stream::{EntryId, MapName, RegistryMap};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fixture::{Fixture, Sum, by_hand, folds, noted, publish, sum};

on_every_bus!(
    a_snapshot_and_later_events_yield_the_same_state_as_all_events,
    snapshots_are_taken_automatically,
    an_older_snapshot_never_replaces_a_newer_one,
    concurrent_snapshots_leave_a_complete_one,
    a_snapshot_of_other_folds_is_not_used,
    an_unusable_snapshot_is_an_error_only_if_events_are_missing,
    a_compacted_session_is_recovered_completely,
    compaction_keeps_entries_that_groups_have_not_handled,
    compaction_keeps_entries_needed_by_snapshots_of_other_folds,
    a_process_behind_a_compaction_catches_up,
    nothing_is_compacted_without_a_snapshot,
    nothing_is_compacted_while_entries_are_undecodable,
    undecodable_entries_count_once_they_can_be_decoded,
    a_too_large_snapshot_fails_and_the_session_continues,
    retained_events_fit_into_a_snapshot,
);

/// Another set of folds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Longest(usize);

impl Fold for Longest {
    const NAME: &'static str = "tests.Longest";

    fn apply(&mut self, event: &SessionEvent) {
        if let Some(noted) = event.get::<Noted>() {
            self.0 = self.0.max(noted.text.len());
        }
    }
}

fn others() -> Folds {
    Folds::none().with::<Longest>()
}

async fn a_snapshot_and_later_events_yield_the_same_state_as_all_events(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    assert!(matches!(session.snapshot().await, Err(SessionError::Snapshot { .. })), "it is empty");
    publish(&session, 0..200).await;
    assert!(session.snapshot().await.unwrap());
    publish(&session, 200..230).await;

    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(again.recovery().replayed, 30);
    assert!(again.recovery().from_snapshot.is_some());
    assert_eq!(sum(&again), Sum::of(0..230));
    let (one, two) = (again.all::<Noted>().unwrap(), session.all::<Noted>().unwrap());
    assert_eq!((one.dropped, one.events.len()), (two.dropped, two.events.len()));
    for (one, two) in one.events.iter().zip(&two.events) {
        assert_eq!((&one.event, &one.envelope), (&two.event, &two.envelope));
    }
    // Event ids in the snapshot are known: the first of these was seen before it.
    let first = fixture.entries(&fixture.session).await.remove(199);
    let backend = fixture.backend().await;
    let keep = headwater_stream::Retention::KEEP_ALL;
    backend.append(&fixture.stream(), &[first.fields], &keep).await.unwrap();
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of(0..230));
}

async fn snapshots_are_taken_automatically(fixture: Fixture) {
    let config = SessionsConfig { snapshot_every: Some(50), ..Default::default() };
    let sessions = fixture.sessions_with(folds(), config).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    for number in 0..120 {
        session.publish(noted(number)).await.unwrap();
    }
    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().replayed), (Sum::of(0..120), 20));
}

async fn an_older_snapshot_never_replaces_a_newer_one(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    let stale = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    publish(&session, 10..20).await;
    assert!(session.snapshot().await.unwrap());
    assert!(!session.snapshot().await.unwrap());
    assert!(!stale.snapshot().await.unwrap());
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().replayed), (Sum::of(0..20), 0));
}

async fn concurrent_snapshots_leave_a_complete_one(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..20).await;
    let mut processes = Vec::new();
    for _ in 0..6 {
        processes.push(Arc::new(fixture.sessions().await.recover(&fixture.session).await.unwrap()));
    }
    for round in 1..6 {
        let taking = processes.iter().enumerate().map(|(index, process)| {
            let process = Arc::clone(process);
            tokio::spawn(async move {
                process.publish(noted(round * 100 + index as u64)).await.unwrap();
                process.snapshot().await.unwrap();
            })
        });
        for taken in futures_util::future::join_all(taking).await {
            taken.unwrap();
        }
        let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
        assert_eq!(again.recovery().snapshot_problem, None);
        assert!(again.recovery().from_snapshot.is_some());
        assert_eq!(sum(&again).count, 20 + 6 * round);
    }
}

async fn a_snapshot_of_other_folds_is_not_used(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..20).await;
    session.snapshot().await.unwrap();
    let other = fixture.sessions_with(others(), by_hand()).await;
    let again = other.recover(&fixture.session).await.unwrap();
    assert_eq!((again.get::<Longest>().unwrap().0, again.recovery().replayed), (7, 20));
    assert!(again.recovery().snapshot_problem.is_some());
    assert!(again.get::<Sum>().is_none());
    assert!(again.all::<Noted>().is_none());
}

/// The map of the existing snapshot.
async fn snapshot_of(fixture: &Fixture) -> MapName {
    let meta =
        MapName::new(format!("{}:session:{}:meta", fixture.prefix, fixture.session)).unwrap();
    let meta = fixture.backend().await.map_get(&meta).await.unwrap().unwrap();
    let set = meta.keys().find_map(|name| name.strip_prefix("snapshot:")).unwrap();
    let name = format!("{}:session:{}:snapshot:{set}", fixture.prefix, fixture.session);
    MapName::new(name).unwrap()
}

async fn an_unusable_snapshot_is_an_error_only_if_events_are_missing(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..30).await;
    session.snapshot().await.unwrap();
    let (backend, map) = (fixture.backend().await, snapshot_of(&fixture).await);
    let whole = backend.map_get(&map).await.unwrap().unwrap();
    let spoilt =
        |name: &str, value: &str| RegistryMap::from([(name.to_owned(), value.to_owned().into())]);
    let ways = [
        ("format", "2"),
        ("crc32", "1"),
        ("chunk:000", "{}"),
        ("bytes", "99999999"),
        ("events", "x"),
    ];
    for (name, value) in ways {
        backend.map_update(&map, None, &spoilt(name, value)).await.unwrap();
        let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
        assert_eq!((sum(&again), again.recovery().replayed), (Sum::of(0..30), 30), "{name}");
        let problem = again.recovery().snapshot_problem.unwrap();
        println!("{name}: {problem}");
        backend.map_update(&map, None, &whole).await.unwrap();
    }

    // No compaction with an invalid snapshot, either.
    backend.map_update(&map, None, &spoilt("format", "2")).await.unwrap();
    let refused = fixture.sessions().await.compact(&fixture.session, UnreadableEntries::Keep).await;
    assert!(matches!(refused, Err(SessionError::Compaction { .. })), "{refused:?}");
    backend.map_update(&map, None, &whole).await.unwrap();
    session.compact().await.unwrap();
    backend.map_update(&map, None, &spoilt("format", "2")).await.unwrap();
    let error = fixture.sessions().await.recover(&fixture.session).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!((missing.count, missing.reason), (Some(29), MissingReason::Compacted));
}

async fn a_compacted_session_is_recovered_completely(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..300).await;
    let compacted = session.compact().await.unwrap();
    assert_eq!((compacted.removed, compacted.held_back), (299, false));
    assert_eq!(compacted.before, session.position());
    // The entry of the snapshot is kept.
    assert_eq!(fixture.entries(&fixture.session).await.len(), 1);
    publish(&session, 300..310).await;
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.recovery().replayed), (Sum::of(0..310), 10));
    let info = sessions.info(&fixture.session).await.unwrap().unwrap();
    assert_eq!((info.length, info.removed), (11, 299));

    // Folds without a snapshot report what is missing.
    let other = fixture.sessions_with(others(), by_hand()).await;
    let error = other.recover(&fixture.session).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!(missing.before, compacted.before);
    assert_eq!((missing.count, missing.reason), (Some(299), MissingReason::Compacted));
    let rest = other.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(rest.state().events(), 11);
    assert!(again.compact().await.unwrap().removed == 10);
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..310));
}

async fn compaction_keeps_entries_that_groups_have_not_handled(fixture: Fixture) {
    let bus = fixture.bus().await;
    let sessions = Sessions::new(bus.clone(), folds(), by_hand()).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..40).await;
    // The first 10 are handled, the next one is in flight, the others are not read.
    let (log, gate) = (HandlerLog::default(), Arc::new(tokio::sync::Semaphore::new(10)));
    let handler = {
        let (log, gate) = (log.clone(), Arc::clone(&gate));
        move |event: ReceivedEvent<Noted>| {
            let (log, gate) = (log.clone(), Arc::clone(&gate));
            async move {
                gate.acquire().await.unwrap().forget();
                log.add(event.number);
            }
        }
    };
    let mut subscribe = SubscribeOptions::durable("slow").session(fixture.session.clone());
    subscribe.concurrency = 1;
    bus.subscribe::<Noted>(subscribe, handler).await.unwrap();
    log.wait_for(10).await;
    let mut removed = 0;
    // Acknowledgements follow soon after.
    while removed < 10 {
        let compacted = session.compact().await.unwrap();
        assert!(compacted.held_back);
        removed += compacted.removed;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(removed, 10);
    assert_eq!(fixture.entries(&fixture.session).await.len(), 30);
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..40));
    gate.add_permits(30);
    assert_eq!(log.settles_at(40).await.len(), 40);
    while removed < 39 {
        removed += session.compact().await.unwrap().removed;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..40));
    bus.close().await.unwrap();
}

async fn compaction_keeps_entries_needed_by_snapshots_of_other_folds(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    let other = fixture.sessions_with(others(), by_hand()).await;
    let another = other.recover(&fixture.session).await.unwrap();
    another.snapshot().await.unwrap();
    publish(&session, 10..20).await;
    assert_eq!(session.compact().await.unwrap().removed, 9);
    assert_eq!(other.recover(&fixture.session).await.unwrap().recovery().replayed, 10);

    // These folds are no longer used.
    let map = MapName::new(format!("{}:session:{}:meta", fixture.prefix, fixture.session)).unwrap();
    let meta = fixture.backend().await.map_get(&map).await.unwrap().unwrap();
    let set = meta
        .iter()
        .find(|(name, value)| name.starts_with("snapshot:") && value.ends_with(b" 10"))
        .map(|(name, _)| name.strip_prefix("snapshot:").unwrap().to_owned())
        .unwrap();
    assert!(other.delete_snapshots(&fixture.session, &set).await.unwrap());
    assert!(!other.delete_snapshots(&fixture.session, &set).await.unwrap());
    assert_eq!(session.compact().await.unwrap().removed, 10);
    assert!(other.recover(&fixture.session).await.is_err());
}

async fn a_process_behind_a_compaction_catches_up(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    let stale = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    let empty = fixture.sessions().await;
    publish(&session, 10..30).await;
    session.compact().await.unwrap();
    publish(&session, 30..35).await;
    stale.refresh().await.unwrap();
    assert_eq!(sum(&stale), Sum::of(0..35));
    stale.publish(noted(35)).await.unwrap();
    assert_eq!(sum(&stale), Sum::of(0..36));
    assert_eq!(sum(&empty.recover(&fixture.session).await.unwrap()), Sum::of(0..36));
}

async fn nothing_is_compacted_without_a_snapshot(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    let refused = sessions.compact(&fixture.session, UnreadableEntries::Trim).await;
    assert!(matches!(refused, Err(SessionError::Compaction { .. })), "{refused:?}");
    assert_eq!(fixture.entries(&fixture.session).await.len(), 10);
}

async fn nothing_is_compacted_while_entries_are_undecodable(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    fixture.append(&[("type", "tests.Later"), ("payload", "{}")]).await;
    publish(&session, 10..20).await;
    let refused = session.compact().await;
    assert!(matches!(refused, Err(SessionError::Compaction { .. })), "{refused:?}");
    assert_eq!(fixture.entries(&fixture.session).await.len(), 21);
    let compacted = sessions.compact(&fixture.session, UnreadableEntries::Trim).await.unwrap();
    assert_eq!(compacted.removed, 20);
    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.state().unreadable()), (Sum::of(0..20), 1));
}

/// An event type of a later version of the application.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
struct Later {}

impl Event for Later {
    const TYPE: &'static str = "tests.Later";
    const SCOPE: Scope = Scope::Session;
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Count(u64);

impl Fold for Count {
    const NAME: &'static str = "tests.Count";

    fn apply(&mut self, _: &SessionEvent) {
        self.0 += 1;
    }
}

async fn undecodable_entries_count_once_they_can_be_decoded(fixture: Fixture) {
    let counting = || Folds::none().with::<Count>();
    let sessions = fixture.sessions_with(counting(), by_hand()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    fixture.append(&[("type", "tests.Later"), ("payload", "{}")]).await;
    session.refresh().await.unwrap();
    session.snapshot().await.unwrap();
    let same = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((same.get::<Count>().unwrap().0, same.recovery().replayed), (10, 0));

    let bus = fixture.bus_for(registry().with::<Later>().unwrap()).await;
    let newer = Sessions::new(bus, counting(), by_hand()).await.unwrap();
    let all = newer.recover(&fixture.session).await.unwrap();
    assert_eq!((all.get::<Count>().unwrap().0, all.recovery().replayed), (11, 11));
}

async fn a_too_large_snapshot_fails_and_the_session_continues(fixture: Fixture) {
    let sessions = fixture.sessions_with(Folds::none().with::<Texts>(), by_hand()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    for number in 0..10 {
        let text = "x".repeat(1_000_000);
        session.publish(Noted { session_id: None, number, text }).await.unwrap();
    }
    let refused = session.snapshot().await;
    assert!(matches!(refused, Err(SessionError::Snapshot { .. })), "{refused:?}");
    assert_eq!(session.get::<Texts>().unwrap().0.len(), 10);
    assert_ne!(session.position(), EntryId::MIN);
}

/// Keeps too much.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Texts(Vec<String>);

impl Fold for Texts {
    const NAME: &'static str = "tests.Texts";

    fn apply(&mut self, event: &SessionEvent) {
        self.0.extend(event.get::<Noted>().map(|noted| noted.text.clone()));
    }
}

async fn retained_events_fit_into_a_snapshot(fixture: Fixture) {
    let many = headwater_bus::limits::RETAINED_EVENTS_MAX;
    let folds = Folds::none().all::<Noted>(many).latest::<Noted>();
    let sessions = fixture.sessions_with(folds, by_hand()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    // Quotes take twice their size in a snapshot; and one event is larger than the limit of all.
    let texts = (0..200).map(|_| "\"".repeat(40_000)).chain(["\"".repeat(500_000)]);
    for (number, text) in (0..).zip(texts) {
        session.publish(Noted { session_id: None, number, text }).await.unwrap();
        if number == 100 {
            assert!(session.snapshot().await.unwrap());
        }
    }
    assert!(session.snapshot().await.unwrap());
    let again = sessions.recover(session.id()).await.unwrap();
    assert_eq!(again.recovery().replayed, 0);
    for session in [&session, &again] {
        assert_eq!(session.latest::<Noted>().unwrap().number, 200);
        let all = session.all::<Noted>().unwrap();
        assert_eq!(all.dropped + all.events.len() as u64, 201);
        assert!(!all.events.is_empty() && all.events.len() < 100, "{}", all.events.len());
        let newest = all.events.iter().map(|event| event.number).rev();
        assert!(newest.eq((0..=200).rev().take(all.events.len())));
    }
    assert_eq!(
        session.all::<Noted>().unwrap().events.len(),
        again.all::<Noted>().unwrap().events.len()
    );
}

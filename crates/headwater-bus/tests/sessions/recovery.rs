//! Creating, publishing to and recovering sessions; missing events are reported.

use headwater_bus::{
    BusError, Event, EventBusExt, EventId, EventRegistry, Fold, Folds, MissingReason,
    OutgoingEvent, ReplayUntil, Scope, SessionError, SessionEvent, SessionId, SessionStage,
    Sessions, StoreOutcome,
};
use headwater_conformance::bus::{Announced, Noted, registry};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, MapName, RegistryMap, Retention, TrimGuard};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fixture::{Fixture, Sum, by_hand, folds, in_memory, noted, publish, sum};

on_every_bus!(
    a_session_is_recovered_with_the_same_state,
    a_session_of_any_length_is_recovered_page_by_page,
    each_process_sees_events_of_other_processes,
    a_session_is_created_once,
    a_missing_session_is_not_found,
    the_stream_of_another_program_is_taken_over,
    events_of_other_sessions_and_namespaces_are_rejected,
    an_event_that_is_stored_twice_counts_once,
    entries_that_repeat_others_for_a_group_do_not_count,
    undecodable_entries_are_counted_and_parked,
    a_session_full_of_undecodable_entries_parks_the_first_ones,
    a_trimmed_session_reports_what_is_missing,
    a_lost_stream_is_detected_even_if_it_is_created_again,
    missing_events_published_without_the_session_are_reported,
    damaged_metadata_is_reported,
    an_older_version_in_a_snapshot_is_upcast,
    an_entry_that_panics_the_decoder_is_only_undecodable,
    a_snapshot_that_panics_the_decoder_is_skipped,
    a_fold_of_another_version_starts_from_scratch,
    a_state_can_be_read_at_an_entry_or_time,
    sessions_are_listed_page_by_page_in_creation_order,
    a_deleted_session_leaves_nothing,
    a_panicking_fold_is_an_error_of_its_session_only,
);

async fn a_session_is_recovered_with_the_same_state(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    assert!(session.latest::<Noted>().is_none());
    for number in 0..25 {
        let result = session.publish(noted(number)).await.unwrap();
        assert_eq!(result.entry_id(), Some(session.position()));
    }

    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(again.latest::<Noted>().unwrap().number, 24);
    assert_eq!(again.position(), session.position());
    let all = again.all::<Noted>().unwrap();
    assert_eq!(all.dropped, 15);
    assert_eq!(
        all.events.iter().map(|event| event.number).collect::<Vec<_>>(),
        (15..25).collect::<Vec<_>>()
    );
    assert_eq!(sum(&again), Sum::of(0..25));
    assert_eq!(sum(&session), Sum::of(0..25));
    let recovery = again.recovery();
    assert_eq!((recovery.replayed, recovery.from_snapshot, recovery.missing), (25, None, None));
    assert_eq!(again.state().events(), 25);
}

async fn a_session_of_any_length_is_recovered_page_by_page(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    publish(&session, 0..5500).await;
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of(0..5500));
}

async fn each_process_sees_events_of_other_processes(fixture: Fixture) {
    let one = fixture.sessions().await.create(&fixture.session).await.unwrap();
    let other = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    one.publish(noted(1)).await.unwrap();
    other.publish(noted(2)).await.unwrap();
    assert_eq!(sum(&other), Sum::of([1, 2]));
    assert_eq!(sum(&one), Sum::of([1]));
    one.refresh().await.unwrap();
    assert_eq!(sum(&one), sum(&other));

    // Concurrently, through the same handle and another one.
    let publishes = (3..40).map(|number| {
        let session = if number % 3 == 0 { &other } else { &one };
        async move { session.publish(noted(number)).await.unwrap() }
    });
    futures_util::future::join_all(publishes).await;
    one.refresh().await.unwrap();
    other.refresh().await.unwrap();
    assert_eq!(sum(&one).count, 39);
    assert_eq!(sum(&one), sum(&other));
}

async fn a_session_is_created_once(fixture: Fixture) {
    let (one, two) = (fixture.sessions().await, fixture.sessions().await);
    let (first, second) = tokio::join!(one.create(&fixture.session), two.create(&fixture.session));
    let won = usize::from(first.is_ok()) + usize::from(second.is_ok());
    assert_eq!(won, 1);
    let lost = first.err().or(second.err()).unwrap();
    assert!(matches!(lost, SessionError::Exists { .. }), "{lost}");
    assert_eq!(one.list(EntryId::MIN, 10).await.unwrap().len(), 1);

    let ensured = one.ensure(&fixture.session).await.unwrap();
    ensured.publish(noted(1)).await.unwrap();
    let fresh = SessionId::random();
    one.ensure(&fresh).await.unwrap().publish(noted(2)).await.unwrap();
    assert_eq!(sum(&one.ensure(&fresh).await.unwrap()), Sum::of([2]));
}

async fn a_missing_session_is_not_found(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let error = sessions.recover(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
    assert_eq!(sessions.info(&fixture.session).await.unwrap(), None);
    assert!(!sessions.delete(&fixture.session).await.unwrap());
}

async fn the_stream_of_another_program_is_taken_over(fixture: Fixture) {
    let payload = r#"{"session_id":null,"number":7,"text":""}"#;
    fixture.append(&[("type", "conformance.Noted"), ("payload", payload)]).await;
    let sessions = fixture.sessions().await;
    let refused = sessions.create(&fixture.session).await.unwrap_err();
    assert!(matches!(refused, SessionError::Exists { .. }), "{refused}");
    let session = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&session), Sum::of([7]));
    assert_eq!(session.recovery().missing.unwrap().reason, MissingReason::Unknown);
    session.publish(noted(8)).await.unwrap();
    assert!(session.snapshot().await.unwrap());
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of([7, 8]));
    assert!(again.recovery().from_snapshot.is_some());
    assert_eq!(again.recovery().missing.unwrap().reason, MissingReason::Unknown);
}

async fn events_of_other_sessions_and_namespaces_are_rejected(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    let other = Noted { session_id: Some("other".to_owned()), ..noted(1) };
    let error = session.publish(other).await.unwrap_err();
    assert!(matches!(error, SessionError::Bus(BusError::Invalid { .. })), "{error}");
    let error = session.publish(Announced { number: 1 }).await.unwrap_err();
    assert!(matches!(error, SessionError::Bus(BusError::Invalid { .. })), "{error}");
    assert_eq!(fixture.entries(&fixture.session).await.len(), 0);
}

async fn an_event_that_is_stored_twice_counts_once(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    let outgoing = OutgoingEvent::new(noted(5)).unwrap().with_id(EventId::random());
    session.publish_all(vec![outgoing.clone()]).await.unwrap();
    // It is stored again after its dedup window.
    let entry = fixture.entries(&fixture.session).await.remove(0);
    let backend = fixture.backend().await;
    backend.append(&fixture.stream(), &[entry.fields], &Retention::KEEP_ALL).await.unwrap();
    session.refresh().await.unwrap();
    assert_eq!(sum(&session), Sum::of([5]));
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of([5]));
    assert_eq!((again.state().events(), again.recovery().replayed), (1, 2));
}

async fn entries_that_repeat_others_for_a_group_do_not_count(fixture: Fixture) {
    let session = fixture.sessions().await.create(&fixture.session).await.unwrap();
    let first = session.publish(noted(5)).await.unwrap().entry_id().unwrap().to_string();
    let payload = r#"{"session_id":null,"number":5,"text":""}"#;
    let copy = [
        ("type", "conformance.Noted"),
        ("payload", payload),
        ("event_id", "another"),
        ("originalMessageId", first.as_str()),
    ];
    fixture.append(&copy).await;
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&again), Sum::of([5]));
}

async fn undecodable_entries_are_counted_and_parked(fixture: Fixture) {
    let bus = fixture.bus().await;
    let sessions = Sessions::new(bus.clone(), folds(), by_hand()).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    session.publish(noted(1)).await.unwrap();
    fixture.append(&[("type", "nobody.Knows"), ("payload", "{}")]).await;
    fixture.append(&[("type", "conformance.Noted"), ("payload", "nonsense")]).await;
    fixture.append(&[("odd", "entry")]).await;
    session.publish(noted(2)).await.unwrap();
    assert_eq!((sum(&session), session.state().unreadable()), (Sum::of([1, 2]), 3));
    let again = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!((sum(&again), again.state().unreadable()), (Sum::of([1, 2]), 3));
    assert_eq!(bus.parked(EntryId::MIN, 100).await.unwrap().len(), 3);
}

async fn a_session_full_of_undecodable_entries_parks_the_first_ones(fixture: Fixture) {
    let max = headwater_bus::limits::UNREADABLE_MAX;
    let bus = fixture.bus().await;
    let sessions = Sessions::new(bus.clone(), folds(), by_hand()).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    let foreign = headwater_stream::Fields::new([("type", "nobody.Knows"), ("payload", "{}")]);
    let backend = fixture.backend().await;
    let many = vec![foreign; max + 50];
    backend.append(&fixture.stream(), &many, &Retention::KEEP_ALL).await.unwrap();
    session.publish(noted(1)).await.unwrap();
    for session in [session, sessions.recover(&fixture.session).await.unwrap()] {
        assert_eq!(sum(&session), Sum::of([1]));
        assert_eq!(session.state().unreadable(), max as u64 + 50);
        assert_eq!(bus.parked(EntryId::MIN, 1000).await.unwrap().len(), max);
    }
}

async fn a_trimmed_session_reports_what_is_missing(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..20).await;
    let backend = fixture.backend().await;
    // This library never does so: no retention setting removes entries that no snapshot includes.
    let kept = Retention::max_len(5);
    let safe = backend.trim(&fixture.stream(), &kept, TrimGuard::Safe).await.unwrap();
    assert_eq!((safe.removed, safe.held_back), (0, true));
    backend.trim(&fixture.stream(), &kept, TrimGuard::Force).await.unwrap();
    let first = fixture.entries(&fixture.session).await[0].id;

    let error = sessions.recover(&fixture.session).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = &error else { panic!("{error}") };
    assert_eq!((missing.after, missing.before), (EntryId::MIN, first));
    assert_eq!((missing.count, missing.reason.clone()), (None, MissingReason::Trimmed));
    let rest = sessions.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of(15..20));
    assert_eq!(rest.recovery().missing.as_ref(), Some(missing));
    // It would hide what is missing.
    assert!(matches!(rest.snapshot().await, Err(SessionError::Snapshot { .. })));
    // A handle that had read all of it does not need what is gone.
    session.publish(noted(20)).await.unwrap();
    assert_eq!(sum(&session), Sum::of(0..21));
}

async fn a_lost_stream_is_detected_even_if_it_is_created_again(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    let backend = fixture.backend().await;
    backend.delete_stream(&fixture.stream()).await.unwrap();
    let lost = |error: SessionError| match error {
        SessionError::Incomplete { missing, .. } => assert_eq!(missing.reason, MissingReason::Lost),
        other => panic!("{other}"),
    };
    lost(sessions.recover(&fixture.session).await.unwrap_err());
    lost(session.refresh().await.unwrap_err());
    // An event is stored anyway, in a new stream.
    assert!(matches!(session.publish(noted(3)).await.unwrap().stored, StoreOutcome::Entry(_)));
    lost(sessions.recover(&fixture.session).await.unwrap_err());
    lost(session.refresh().await.unwrap_err());
    let rest = sessions.recover_incomplete(&fixture.session).await.unwrap();
    assert_eq!(sum(&rest), Sum::of([3]));
}

async fn missing_events_published_without_the_session_are_reported(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    sessions.create(&fixture.session).await.unwrap();
    for number in 0..5 {
        let session_id = Some(fixture.session.to_string());
        sessions.bus().publish(Noted { session_id, ..noted(number) }).await.unwrap();
    }
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..5));
    let backend = fixture.backend().await;
    backend.trim(&fixture.stream(), &Retention::max_len(3), TrimGuard::Force).await.unwrap();
    let error = sessions.recover(&fixture.session).await.unwrap_err();
    let SessionError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!(missing.reason, MissingReason::Trimmed);
}

async fn damaged_metadata_is_reported(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    sessions.create(&fixture.session).await.unwrap();
    let fine = sessions.create(&SessionId::random()).await.unwrap();
    let meta = format!("{}:session:{}:meta", fixture.prefix, fixture.session);
    let meta = MapName::new(meta).unwrap();
    let backend = fixture.backend().await;
    let whole = backend.map_get(&meta).await.unwrap().unwrap();
    for field in ["stage", "index", "created_at", "first_entry", "expired_at", "ttl_ms", "parent"] {
        let invalid = RegistryMap::from([(field.to_owned(), "{odd}".into())]);
        backend.map_update(&meta, None, &invalid).await.unwrap();
        let error = sessions.recover(&fixture.session).await.unwrap_err();
        assert!(matches!(error, SessionError::Damaged { .. }), "{field}: {error}");
        // Other sessions are not affected.
        let listed = sessions.list(EntryId::MIN, 10).await.unwrap();
        assert_eq!(listed.len(), 1, "{field}");
        assert_eq!(listed[0].session, *fine.id());
        sessions.sweep().await.unwrap();
        let mut before = whole.clone();
        before.entry(field.to_owned()).or_default();
        backend.map_update(&meta, None, &before).await.unwrap();
    }
    sessions.recover(&fixture.session).await.unwrap();

    // A key of another type in its place, if types share names.
    backend.map_delete(&meta).await.unwrap();
    let taken = headwater_stream::StreamName::new(meta.as_str()).unwrap();
    let invalid = headwater_stream::Fields::new([("odd", "entry")]);
    backend.append(&taken, &[invalid], &Retention::KEEP_ALL).await.unwrap();
    let listed = sessions.list(EntryId::MIN, 10).await.unwrap();
    assert_eq!(listed.iter().map(|info| &info.session).collect::<Vec<_>>(), [fine.id()]);
    let swept = sessions.sweep().await.unwrap();
    let share_names = backend.map_get(&meta).await.is_err();
    assert_eq!((swept.checked, swept.failed), (1, u64::from(share_names)));
}

/// `Noted` in a later version of the application.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
struct NotedLater {
    number: u64,
    importance: u64,
}

impl Event for NotedLater {
    const TYPE: &'static str = Noted::TYPE;
    const VERSION: u32 = 2;
    const SCOPE: Scope = Scope::Session;
}

async fn an_older_version_in_a_snapshot_is_upcast(fixture: Fixture) {
    let old = fixture.sessions_with(Folds::none().latest::<Noted>(), by_hand()).await;
    let session = old.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    session.snapshot().await.unwrap();

    let lift = |mut payload: serde_json::Value| {
        payload["importance"] = 3.into();
        Ok(payload)
    };
    let later = EventRegistry::empty().with_upcaster::<NotedLater>(1, lift).unwrap();
    let folds = Folds::none().latest::<NotedLater>();
    let new = Sessions::new(fixture.bus_for(later).await, folds, by_hand()).await.unwrap();
    let session = new.recover(&fixture.session).await.unwrap();
    let latest = session.latest::<NotedLater>().unwrap();
    assert_eq!((latest.number, latest.importance), (4, 3));
    assert!(session.recovery().from_snapshot.is_some());

    // The older version cannot decode a snapshot with a newer event. It replays all events.
    session.publish(NotedLater { number: 5, importance: 9 }).await.unwrap();
    session.snapshot().await.unwrap();
    let stale = old.recover(&fixture.session).await.unwrap();
    assert_eq!((stale.latest::<Noted>().unwrap().number, stale.state().unreadable()), (4, 1));
    assert!(stale.recovery().snapshot_problem.is_some());
}

/// `Sum` with another version.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Doubled(u64);

impl Fold for Doubled {
    const NAME: &'static str = Sum::NAME;
    const VERSION: u32 = 2;

    fn apply(&mut self, event: &SessionEvent) {
        self.0 += event.get::<Noted>().map_or(0, |noted| noted.number * 2);
    }
}

async fn an_entry_that_panics_the_decoder_is_only_undecodable(fixture: Fixture) {
    let careless = |mut payload: serde_json::Value| {
        payload["importance"] = payload["weight"].as_u64().unwrap().into();
        Ok(payload)
    };
    let later = EventRegistry::empty().with_upcaster::<NotedLater>(1, careless).unwrap();
    let folds = Folds::none().latest::<NotedLater>();
    let sessions = Sessions::new(fixture.bus_for(later).await, folds, by_hand()).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    fixture.append(&[("type", Noted::TYPE), ("payload", "{\"number\":1}")]).await;
    session.publish(NotedLater { number: 2, importance: 9 }).await.unwrap();
    for session in [session, sessions.recover(&fixture.session).await.unwrap()] {
        assert_eq!(session.latest::<NotedLater>().unwrap().number, 2);
        assert_eq!((session.state().events(), session.state().unreadable()), (1, 1));
    }
}

/// A fold whose state cannot be decoded.
#[derive(Clone, Debug, Default, Serialize)]
struct Forgetful(u64);

impl<'de> Deserialize<'de> for Forgetful {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        panic!("forgotten")
    }
}

impl Fold for Forgetful {
    const NAME: &'static str = "tests.Forgetful";

    fn apply(&mut self, _: &SessionEvent) {
        self.0 += 1;
    }
}

async fn a_snapshot_that_panics_the_decoder_is_skipped(fixture: Fixture) {
    let sessions = fixture.sessions_with(Folds::none().with::<Forgetful>(), by_hand()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    session.snapshot().await.unwrap();
    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((again.get::<Forgetful>().unwrap().0, again.recovery().replayed), (5, 5));
    let problem = again.recovery().snapshot_problem.unwrap();
    assert!(problem.contains("forgotten"), "{problem}");
}

async fn a_fold_of_another_version_starts_from_scratch(fixture: Fixture) {
    let one = fixture.sessions_with(Folds::none().with::<Sum>(), by_hand()).await;
    let session = one.create(&fixture.session).await.unwrap();
    publish(&session, 0..5).await;
    session.snapshot().await.unwrap();
    let two = fixture.sessions_with(Folds::none().with::<Doubled>(), by_hand()).await;
    let again = two.recover(&fixture.session).await.unwrap();
    assert_eq!((again.get::<Doubled>().unwrap().0, again.recovery().replayed), (20, 5));
    again.snapshot().await.unwrap();
    // Each has its own snapshot.
    assert_eq!(one.recover(&fixture.session).await.unwrap().recovery().replayed, 0);
    assert_eq!(two.recover(&fixture.session).await.unwrap().recovery().replayed, 0);
}

async fn a_state_can_be_read_at_an_entry_or_time(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    let mut ids = Vec::new();
    for number in 0..10 {
        ids.push(session.publish(noted(number)).await.unwrap().entry_id().unwrap());
    }
    let at = |until| sessions.state_at(&fixture.session, until);
    let sum_of = |state: headwater_bus::SessionState| state.get::<Sum>().unwrap().clone();
    assert_eq!(sum_of(at(ReplayUntil::Entry(ids[3])).await.unwrap()), Sum::of(0..4));
    assert_eq!(sum_of(at(ReplayUntil::Entry(ids[9])).await.unwrap()), Sum::of(0..10));
    assert_eq!(sum_of(at(ReplayUntil::End).await.unwrap()), Sum::of(0..10));
    let unknown = at(ReplayUntil::Entry(EntryId::new(ids[9].ms + 1000, 0))).await.unwrap_err();
    assert!(matches!(unknown, SessionError::Bus(BusError::Invalid { .. })), "{unknown}");

    let long_ago = Timestamp::from_millis(ids[0].ms - 1);
    assert_eq!(sum_of(at(ReplayUntil::Time(long_ago)).await.unwrap()), Sum::default());
    let time = Timestamp::from_millis(ids[5].ms);
    let expected = ids.iter().filter(|id| id.ms <= ids[5].ms).count() as u64;
    assert_eq!(sum_of(at(ReplayUntil::Time(time)).await.unwrap()), Sum::of(0..expected));

    // A snapshot of a later entry does not interfere.
    assert!(session.snapshot().await.unwrap());
    assert_eq!(sum_of(at(ReplayUntil::Entry(ids[3])).await.unwrap()), Sum::of(0..4));
    assert_eq!(sum_of(at(ReplayUntil::Time(long_ago)).await.unwrap()), Sum::default());
}

async fn sessions_are_listed_page_by_page_in_creation_order(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let mut made = Vec::new();
    for _ in 0..7 {
        let session = sessions.create(&SessionId::random()).await.unwrap();
        session.publish(noted(1)).await.unwrap();
        made.push(session.id().clone());
    }
    let (mut listed, mut after) = (Vec::new(), EntryId::MIN);
    loop {
        let page = sessions.list(after, 3).await.unwrap();
        let Some(last) = page.last() else { break };
        assert!(page.len() <= 3);
        after = last.index;
        listed.extend(page);
    }
    assert_eq!(listed.iter().map(|info| info.session.clone()).collect::<Vec<_>>(), made);
    assert!(listed.iter().all(|info| info.stage == SessionStage::Open && info.length == 1));
    assert!(sessions.list(EntryId::MIN, 0).await.is_err());
}

async fn a_deleted_session_leaves_nothing(fixture: Fixture) {
    let sessions = fixture.sessions().await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..3).await;
    session.snapshot().await.unwrap();
    assert!(sessions.delete(&fixture.session).await.unwrap());
    assert!(!sessions.delete(&fixture.session).await.unwrap());
    let error = sessions.recover(&fixture.session).await.unwrap_err();
    assert!(matches!(error, SessionError::NotFound { .. }), "{error}");
    assert_eq!(sessions.list(EntryId::MIN, 10).await.unwrap(), []);
    let anew = sessions.create(&fixture.session).await.unwrap();
    anew.publish(noted(9)).await.unwrap();
    assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of([9]));
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Touchy(u64);

impl Fold for Touchy {
    const NAME: &'static str = "tests.Touchy";

    fn apply(&mut self, event: &SessionEvent) {
        assert!(event.get::<Noted>().is_none_or(|noted| noted.number != 13), "unlucky");
        self.0 += 1;
    }
}

async fn a_panicking_fold_is_an_error_of_its_session_only(fixture: Fixture) {
    let touchy = fixture.sessions_with(Folds::none().with::<Touchy>(), by_hand()).await;
    let session = touchy.create(&fixture.session).await.unwrap();
    session.publish(noted(1)).await.unwrap();
    // It is stored anyway.
    assert!(matches!(session.publish(noted(13)).await.unwrap().stored, StoreOutcome::Entry(_)));
    let is_fold = |error: SessionError| match error {
        SessionError::Fold { fold, reason, .. } => {
            assert_eq!((fold.as_str(), reason.as_str()), ("tests.Touchy", "unlucky"));
        }
        other => panic!("{other}"),
    };
    is_fold(session.refresh().await.unwrap_err());
    is_fold(session.snapshot().await.unwrap_err());
    is_fold(touchy.recover(&fixture.session).await.unwrap_err());
    let calm = fixture.sessions().await.recover(&fixture.session).await.unwrap();
    assert_eq!(sum(&calm), Sum::of([1, 13]));

    // The state is that before the event, for all folds, and the error can be read.
    let both = Folds::none().latest::<Noted>().with::<Sum>().with::<Touchy>();
    let other = fixture.sessions_with(both, by_hand()).await;
    for numbers in [&[13][..], &[1, 2, 13, 4]] {
        let session = other.create(&SessionId::random()).await.unwrap();
        assert!(session.problem().is_none());
        for number in numbers {
            session.publish(noted(*number)).await.unwrap();
        }
        let before = numbers.iter().copied().take_while(|number| *number != 13);
        let latest = before.clone().last();
        assert_eq!(session.latest::<Noted>().map(|noted| noted.number), latest);
        assert_eq!(sum(&session), Sum::of(before.clone()));
        assert_eq!(session.get::<Touchy>().unwrap().0, before.count() as u64);
        is_fold(session.problem().unwrap());
    }
}

#[tokio::test]
async fn sessions_work_on_a_local_bus() {
    let sessions = in_memory().await;
    let session = sessions.create(&SessionId::new("s").unwrap()).await.unwrap();
    publish(&session, 0..3000).await;
    // Including events published without the session handle.
    let direct = Noted { session_id: Some("s".to_owned()), ..noted(3000) };
    let bus = sessions.bus();
    assert!(matches!(bus.publish(direct).await.unwrap().stored, StoreOutcome::Entry(_)));
    assert!(session.snapshot().await.unwrap());
    session.publish(noted(3001)).await.unwrap();
    let again = sessions.recover(session.id()).await.unwrap();
    assert_eq!(sum(&again), Sum::of(0..3002));
    assert_eq!(again.recovery().replayed, 2);
}

#[tokio::test]
async fn invalid_folds_are_rejected() {
    #[derive(Clone, Debug, Default, Serialize, Deserialize)]
    struct Impostor;
    impl Fold for Impostor {
        const NAME: &'static str = "latest:conformance.Noted";
        fn apply(&mut self, _: &SessionEvent) {}
    }
    let refused = [
        Folds::none().latest::<Noted>().latest::<Noted>(),
        Folds::none().with::<Sum>().with::<Sum>(),
        Folds::none().all::<Noted>(0),
        Folds::none().all::<Noted>(1_000_000),
        Folds::none().latest::<headwater_bus::ToolInvoked>(),
        Folds::none().with::<Impostor>(),
    ];
    for folds in refused {
        let bus =
            std::sync::Arc::new(headwater_bus::StreamedBus::in_memory(registry()).await.unwrap());
        let described = format!("{folds:?}");
        assert!(Sessions::new(bus, folds, by_hand()).await.is_err(), "{described}");
    }
    let _: EventRegistry = registry();
}

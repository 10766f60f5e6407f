//! Undecodable entries, some of which can be decoded later.

use headwater_bus::limits::UNREADABLE_MAX;
use headwater_bus::{
    Event, EventBusExt, Fold, Folds, ReplayUntil, Scope, SessionError, SessionEvent, Sessions,
    UnreadableEntries,
};
use headwater_conformance::bus::{Noted, registry};
use headwater_stream::{EntryId, Fields, MapName, RegistryMap, Retention, StreamName};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::fixture::{Fixture, Sum, by_hand, folds, noted, publish, sum};
use crate::outage_fixture::OutageFixture;

on_every_bus!(
    a_late_unknown_type_counts_once_it_is_registered,
    invalid_payloads_are_retried_and_above_a_limit_all_events_are_replayed,
    trimmed_undecodable_entries_do_not_invalidate_a_snapshot,
    a_read_only_access_parks_nothing_and_adopts_nothing,
    entries_that_cannot_be_parked_are_not_skipped,
);

/// An event type of a later version of the application.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
struct Later {}

impl Event for Later {
    const TYPE: &'static str = "tests.Later";
    const SCOPE: Scope = Scope::Session;
}

/// `Noted` with a more permissive decoder.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
struct Lenient {
    #[serde(default)]
    number: serde_json::Value,
}

impl Event for Lenient {
    const TYPE: &'static str = "conformance.Noted";
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

fn counting() -> Folds {
    Folds::none().with::<Count>()
}

/// The stream of parked entries.
fn unknown(fixture: &Fixture) -> StreamName {
    StreamName::new(format!("{}:events:unknown", fixture.prefix)).unwrap()
}

async fn append_many(fixture: &Fixture, event_type: &str, payload: &str, count: usize) {
    let fields = Fields::new([("type", event_type.to_owned()), ("payload", payload.to_owned())]);
    let many = vec![fields; count];
    fixture.backend().await.append(&fixture.stream(), &many, &Retention::KEEP_ALL).await.unwrap();
}

async fn a_late_unknown_type_counts_once_it_is_registered(fixture: Fixture) {
    let sessions = fixture.sessions_with(counting(), by_hand()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    append_many(&fixture, "tests.Never", "{}", UNREADABLE_MAX).await;
    append_many(&fixture, Later::TYPE, "{}", 44).await;
    session.refresh().await.unwrap();
    assert!(session.snapshot().await.unwrap());
    let same = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((same.get::<Count>().unwrap().0, same.recovery().replayed), (10, 0));

    let bus = fixture.bus_for(registry().with::<Later>().unwrap()).await;
    let newer = Sessions::new(bus, counting(), by_hand()).await.unwrap();
    let all = newer.recover(&fixture.session).await.unwrap();
    assert_eq!((all.get::<Count>().unwrap().0, all.recovery().from_snapshot), (54, None));
    assert_eq!(all.state().unreadable(), UNREADABLE_MAX as u64);
}

async fn invalid_payloads_are_retried_and_above_a_limit_all_events_are_replayed(fixture: Fixture) {
    let sessions = fixture.sessions_with(counting(), by_hand()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    append_many(&fixture, Noted::TYPE, r#"{"number":"odd"}"#, 3).await;
    session.refresh().await.unwrap();
    assert!(session.snapshot().await.unwrap());
    let same = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((same.get::<Count>().unwrap().0, same.recovery().replayed), (10, 0));
    let lenient = headwater_bus::EventRegistry::empty().with::<Lenient>().unwrap();
    let lenient = Sessions::new(fixture.bus_for(lenient).await, counting(), by_hand());
    let lenient = lenient.await.unwrap();
    let all = lenient.recover(&fixture.session).await.unwrap();
    assert_eq!(all.get::<Count>().unwrap().0, 13);

    // More than are remembered: it is unknown whether they can be decoded now.
    append_many(&fixture, Noted::TYPE, "nonsense", UNREADABLE_MAX).await;
    session.refresh().await.unwrap();
    assert!(session.snapshot().await.unwrap());
    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!((again.get::<Count>().unwrap().0, again.recovery().from_snapshot), (10, None));
    assert_eq!(again.state().unreadable(), UNREADABLE_MAX as u64 + 3);
}

async fn trimmed_undecodable_entries_do_not_invalidate_a_snapshot(fixture: Fixture) {
    let sessions = fixture.sessions_with(counting(), by_hand()).await;
    let session = sessions.create(&fixture.session).await.unwrap();
    publish(&session, 0..10).await;
    append_many(&fixture, Later::TYPE, "{}", 2).await;
    append_many(&fixture, Noted::TYPE, "nonsense", 2).await;
    publish(&session, 10..11).await;
    assert!(session.snapshot().await.unwrap());
    let compacted = sessions.compact(&fixture.session, UnreadableEntries::Trim).await.unwrap();
    assert_eq!(compacted.removed, 14);
    // Its type is registered now, but its events are gone: only the snapshot remains.
    let bus = fixture.bus_for(registry().with::<Later>().unwrap()).await;
    let newer = Sessions::new(bus, counting(), by_hand()).await.unwrap();
    let again = newer.recover(&fixture.session).await.unwrap();
    assert_eq!(again.get::<Count>().unwrap().0, 11);
    // It can be forked, without the missing entries.
    let fork = headwater_bus::SessionId::random();
    let fork = newer.fork(&fixture.session, ReplayUntil::End, &fork).await.unwrap();
    assert_eq!(fork.get::<Count>().unwrap().0, 11);
}

async fn a_read_only_access_parks_nothing_and_adopts_nothing(fixture: Fixture) {
    let bus = fixture.bus().await;
    let sessions = Sessions::new(bus.clone(), folds(), by_hand()).await.unwrap();
    // A stream of another program that is not a session yet.
    bus.publish(Noted { session_id: Some(fixture.session.to_string()), ..noted(1) }).await.unwrap();
    append_many(&fixture, "tests.Never", "{}", 3).await;
    let state = sessions.state_at(&fixture.session, ReplayUntil::End).await.unwrap();
    assert_eq!((state.get::<Sum>().unwrap(), state.unreadable()), (&Sum::of([1]), 3));
    assert_eq!(sessions.info(&fixture.session).await.unwrap(), None);
    assert_eq!(sessions.list(EntryId::MIN, 10).await.unwrap(), []);
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap(), []);
    let stats = fixture.backend().await.stats(&fixture.stream()).await.unwrap().unwrap();
    assert_eq!(stats.groups.len(), 0);
    // The same for a session.
    let session = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap().len(), 3);
    append_many(&fixture, "tests.Never", "{}", 1).await;
    let state = sessions.state_at(&fixture.session, ReplayUntil::End).await.unwrap();
    assert_eq!(state.unreadable(), 4);
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap().len(), 3);
    session.refresh().await.unwrap();
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap().len(), 4);
}

// An embedded backend does not lose its dedup marks early.
mod forgotten {
    use super::parked_entries_are_not_parked_again_by_every_recovery;

    with_server_outage!(parked_entries_are_not_parked_again_by_every_recovery);
}

/// The dedup marks of parked entries expire after an hour; here they are deleted.
async fn parked_entries_are_not_parked_again_by_every_recovery(outage: OutageFixture) {
    let fixture = &outage.fixture;
    let bus = fixture.bus().await;
    let sessions = Sessions::new(bus.clone(), folds(), by_hand()).await.unwrap();
    sessions.create(&fixture.session).await.unwrap();
    append_many(fixture, "tests.Never", "{}", 3).await;
    sessions.recover(&fixture.session).await.unwrap();
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap().len(), 3);
    // The stream and its dedup marks.
    let node = outage.node_of(&unknown(fixture));
    let keys = node.command(&["KEYS", &format!("*{}*", unknown(fixture))]).unwrap();
    assert!(keys.items().len() > 1, "{keys:?}");
    for key in keys.items() {
        node.command(&["DEL", &key.text()]).unwrap().ok().unwrap();
    }
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap(), []);

    let again = sessions.recover(&fixture.session).await.unwrap();
    assert_eq!(again.state().unreadable(), 3);
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap(), []);
    append_many(fixture, "tests.Never", "{}", 1).await;
    sessions.recover(&fixture.session).await.unwrap();
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap().len(), 1);
}

async fn entries_that_cannot_be_parked_are_not_skipped(fixture: Fixture) {
    let bus = fixture.bus().await;
    let sessions = Sessions::new(bus.clone(), folds(), by_hand()).await.unwrap();
    let session = sessions.create(&fixture.session).await.unwrap();
    session.publish(noted(1)).await.unwrap();
    let position = session.position();
    // A key of another type in place of the stream of parked entries, if types share names.
    let backend = fixture.backend().await;
    let taken = MapName::new(format!("{}:events:unknown", fixture.prefix)).unwrap();
    let invalid = RegistryMap::from([("odd".to_owned(), "map".into())]);
    assert!(backend.map_create(&taken, &invalid).await.unwrap());
    append_many(&fixture, "tests.Never", "{}", 1).await;
    let share_names = backend.stats(&unknown(&fixture)).await.is_err();
    assert_eq!(session.refresh().await.is_err(), share_names);
    if share_names {
        assert_eq!((session.position(), session.state().unreadable()), (position, 0));
        let error = sessions.recover(&fixture.session).await.unwrap_err();
        assert!(matches!(error, SessionError::Bus(_)), "{error}");
    }
    assert!(backend.map_delete(&taken).await.unwrap());
    session.refresh().await.unwrap();
    assert_eq!(session.state().unreadable(), 1);
    assert_eq!(sum(&session), Sum::of([1]));
    assert_eq!(bus.parked(EntryId::MIN, 10).await.unwrap().len(), 1);
}

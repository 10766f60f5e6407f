//! A large session, recovered from its snapshot and from all of its events.

use std::time::{Duration, Instant};

use headwater_bus::Sessions;

use crate::place::{Place, Sum, publish, sum};

const EVENTS: u64 = 100_000;

/// How much of the time of a full replay a recovery from a snapshot may take.
const SHARE: f64 = 0.05;

everywhere!(a_session_of_100_000_events_is_recovered_from_its_snapshot_in_a_fraction_of_the_time);

async fn recover(sessions: &Sessions, place: &Place) -> (Duration, bool) {
    let began = Instant::now();
    let session = sessions.recover(&place.session).await.unwrap();
    let took = began.elapsed();
    assert_eq!(sum(&session), Sum::of(0..EVENTS));
    (took, session.recovery().from_snapshot.is_some())
}

async fn a_session_of_100_000_events_is_recovered_from_its_snapshot_in_a_fraction_of_the_time(
    place: Place,
) {
    let sessions = place.sessions().await;
    let session = sessions.create(&place.session).await.unwrap();
    publish(&session, 0..EVENTS - 100).await;
    let (replay, is_from_snapshot) = {
        // The last hundred come after the snapshot.
        let all = place.sessions().await;
        publish(&session, EVENTS - 100..EVENTS).await;
        recover(&all, &place).await
    };
    assert!(!is_from_snapshot);
    assert!(session.snapshot().await.unwrap());
    // Both on this machine in this run; the quickest of some, for others work on it, too.
    let mut quickest = Duration::MAX;
    for _ in 0..5 {
        let (took, is_from_snapshot) = recover(&sessions, &place).await;
        assert!(is_from_snapshot);
        quickest = quickest.min(took);
    }
    let share = quickest.as_secs_f64() / replay.as_secs_f64();
    println!("{EVENTS} events: replay {replay:?}, from its snapshot {quickest:?}: {share:.4}");
    assert!(share < SHARE, "replay {replay:?}, from its snapshot {quickest:?}");
}

//! The spool of a bus: order, limits, and rejected events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use headwater_bus::{
    EventBus, EventBusExt, FailurePolicy, SessionId, SpoolConfig, StoreOutcome, StreamedBus,
    StreamedBusConfig,
};
use headwater_conformance::bus::{Noted, registry};
use headwater_testkit::{Persistence, Proxy, Redis};
use tempfile::TempDir;

use crate::fixture::{Fixture, OUTAGE_CALL_DEADLINE, noted, numbers, open, stored, watch};
use crate::outage_fixture::{LIMIT, OutageFixture, until};

with_outage!(
    a_10_s_outage_under_1000_events_per_second_loses_and_duplicates_nothing_and_keeps_order,
    spooled_events_are_stored_after_restart_before_new_ones,
    continuous_publishing_does_not_keep_the_spool_in_use,
);

// An embedded backend separates the names of different types: its streams never permanently reject an event.
mod refused {
    use super::permanently_rejected_events_are_set_aside_and_block_no_other;

    with_server_outage!(permanently_rejected_events_are_set_aside_and_block_no_other);
}

pub(crate) fn spooling(fixture: &Fixture, directory: &TempDir) -> StreamedBusConfig {
    let spool = SpoolConfig::new(directory.path().join("spool"));
    StreamedBusConfig { on_failure: FailurePolicy::Spool(spool), ..fixture.config() }
}

pub(crate) async fn wait_until_empty(bus: &StreamedBus, limit: Duration) {
    let deadline = Instant::now() + limit;
    while bus.health().await.spool.unwrap().events > 0 {
        assert!(Instant::now() < deadline, "{:?}", bus.health().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

const SESSIONS: u64 = 10;
const EVENTS_PER_SECOND: u64 = 1000;

/// Load on one session: number of events, number of spooled ones, and the end.
struct Offered {
    events: u64,
    spooled: u64,
    until: Duration,
}

/// Publishes at the target rate, catching up if late, for 15 s and until events go directly to their stream again
/// without a pause in publishing.
async fn offer(bus: Arc<StreamedBus>, session: SessionId, began: Instant) -> Offered {
    let mut ticks = tokio::time::interval(Duration::from_millis(10));
    let mut offered = Offered { events: 0, spooled: 0, until: Duration::ZERO };
    let mut is_direct = false;
    while offered.until < Duration::from_secs(15) || !is_direct {
        assert!(offered.until < Duration::from_secs(120), "events still go through the spool");
        ticks.tick().await;
        offered.until = began.elapsed();
        let due = offered.until.as_millis() as u64 * EVENTS_PER_SECOND / SESSIONS / 1000;
        let event = |number| Noted { text: "x".repeat(100), ..noted(&session, number) };
        let events: Vec<Noted> = (offered.events..due).take(1000).map(event).collect();
        for result in bus.publish_batch(events).await.unwrap() {
            is_direct = matches!(result.unwrap().stored, StoreOutcome::Entry(_));
            offered.spooled += u64::from(!is_direct);
            offered.events += 1;
        }
    }
    offered
}

/// 1,000 events per second in ten sessions; the backend of one or all of them is unavailable for ten seconds after two.
async fn a_10_s_outage_under_1000_events_per_second_loses_and_duplicates_nothing_and_keeps_order(
    outage: OutageFixture,
) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = Arc::new(fixture.bus_with(registry(), spooling(fixture, &directory)).await);
    let log = watch(&bus).await;
    let others = std::iter::repeat_with(SessionId::random);
    let sessions: Vec<SessionId> =
        std::iter::once(fixture.session.clone()).chain(others).take(SESSIONS as usize).collect();

    let began = Instant::now();
    let offering: Vec<_> = sessions
        .iter()
        .map(|session| tokio::spawn(offer(Arc::clone(&bus), session.clone(), began)))
        .collect();
    tokio::time::sleep(Duration::from_secs(2)).await;
    outage.begin().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    outage.end().await;

    let (mut published, mut spooled) = (Vec::new(), 0);
    for offering in offering {
        let offered = offering.await.unwrap();
        let rate = offered.events as f64 * SESSIONS as f64 / offered.until.as_secs_f64();
        assert!(rate >= 0.9 * EVENTS_PER_SECOND as f64, "{rate} events a second were offered");
        published.push(offered.events);
        spooled += offered.spooled;
    }
    let total: u64 = published.iter().sum();
    println!("published {total}, of these {spooled} by way of the spool");
    assert!(spooled >= EVENTS_PER_SECOND, "the outage was felt: {spooled} of {total}");
    wait_until_empty(&bus, LIMIT).await;
    println!("all stored {:?} after the beginning", began.elapsed());

    let backend = fixture.connect().await;
    for (session, count) in sessions.iter().zip(&published) {
        let numbers = stored(&*backend, &fixture.stream_of(session.as_str())).await;
        assert_eq!(numbers, (0..*count).collect::<Vec<u64>>(), "session {session}");
    }
    // Handlers here ran at once, and not again when the events were moved to their streams.
    let handled = log.settles_at(total as usize).await;
    assert_eq!(handled.len() as u64, total);
    let health = bus.health().await;
    assert!(health.connected && health.spool.unwrap().rejected == 0, "{health:?}");
    bus.close().await.unwrap();
}

async fn spooled_events_are_stored_after_restart_before_new_ones(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    outage.begin().await;
    for number in 0..20 {
        let result = bus.publish(fixture.noted(number)).await.unwrap();
        assert_eq!(result.stored, StoreOutcome::Spooled);
    }
    assert_eq!(bus.health().await.spool.unwrap().events, 20);
    bus.close().await.unwrap();
    drop(bus);

    // Subscribe before the next start can store anything.
    outage.end().await;
    let other = fixture.bus().await;
    let there = watch(&other).await;
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    let here = watch(&bus).await;
    let result = bus.publish(fixture.noted(20)).await.unwrap();
    assert_eq!(result.handlers_invoked, 1);
    wait_until_empty(&bus, LIMIT).await;
    bus.publish(fixture.noted(21)).await.unwrap().into_result().unwrap();
    let all = stored(&*fixture.connect().await, &fixture.stream()).await;
    assert_eq!(all, (0..22).collect::<Vec<u64>>());
    // Another process receives each event once and in order, and so does this start: to it, events of the previous
    // start are those of another process. Events stored before it subscribed are not delivered.
    assert_eq!(there.settles_at(22).await, numbers(0..22));
    let seen: Vec<u64> = here.lines().iter().map(|line| line.parse().unwrap()).collect();
    let (mine, before): (Vec<u64>, Vec<u64>) = seen.iter().partition(|number| **number >= 20);
    assert_eq!(mine, [20, 21]);
    assert!(before.is_sorted_by(|a, b| a < b), "{before:?}");
    bus.close().await.unwrap();
    other.close().await.unwrap();
}

async fn permanently_rejected_events_are_set_aside_and_block_no_other(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    let (bad, good) = (fixture.stream(), SessionId::random());
    outage.command_at(&fixture.session, &["SET", bad.as_str(), "no stream"]);
    outage.begin().await;
    for number in 0..2 {
        for session in [&fixture.session, &good] {
            let result = bus.publish(noted(session, number)).await.unwrap();
            assert_eq!(result.stored, StoreOutcome::Spooled);
        }
    }
    outage.end().await;
    wait_until_empty(&bus, LIMIT).await;
    let backend = fixture.connect().await;
    assert_eq!(stored(&*backend, &fixture.stream_of(good.as_str())).await, [0, 1]);
    assert_eq!(bus.health().await.spool.unwrap().rejected, 2);
    let listed = bus.rejected(10).await.unwrap();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|event| event.stream == bad));
    assert_eq!(bus.rejected(1).await.unwrap(), listed[..1]);
    let holds = |number: u64| {
        let payload = listed[number as usize].fields.get("payload").unwrap();
        String::from_utf8_lossy(payload).contains(&format!("\"number\":{number}"))
    };
    assert!(holds(0) && holds(1));
    bus.close().await.unwrap();
    drop(bus);
    // They are kept when the bus is opened again.
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    assert_eq!(bus.health().await.spool.unwrap().rejected, 2);
    assert_eq!(bus.rejected(10).await.unwrap(), listed);
    assert!(bus.delete_rejected(listed[0].id).await.unwrap());
    assert_eq!(bus.rejected(10).await.unwrap(), listed[1..]);
    assert_eq!(bus.health().await.spool.unwrap().rejected, 1);
    bus.close().await.unwrap();
}

/// The dedup window is over when the event is sent again, so the stream is searched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_longer_than_the_dedup_window_duplicates_nothing() {
    let redis = Redis::builder().persistence(Persistence::Always).start().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(redis.addr()).unwrap();
    let fixture = Fixture::at(redis.url_at(proxy.addr()));
    // Three times the call deadline: retries happen within that time.
    let dedup_window = Some(3 * OUTAGE_CALL_DEADLINE);
    let config = StreamedBusConfig { dedup_window, ..spooling(&fixture, &directory) };
    let bus = fixture.bus_with(registry(), config).await;
    bus.publish(fixture.noted(0)).await.unwrap().into_result().unwrap();

    // The event is stored, but not confirmed: the server stops after it has read the request, and its reply is lost.
    redis.pause().unwrap();
    let result = bus.publish(fixture.noted(1)).await.unwrap();
    assert_eq!(result.stored, StoreOutcome::Spooled);
    proxy.cut().unwrap();
    redis.resume().unwrap();
    for number in 2..5 {
        let result = bus.publish(fixture.noted(number)).await.unwrap();
        assert_eq!(result.stored, StoreOutcome::Spooled);
    }
    let backend = open(&redis.url()).await;
    until(|| async { stored(&*backend, &fixture.stream()).await == [0, 1] }).await;
    // Only the stream has it.
    until(|| async { redis.command(&["DBSIZE"]).unwrap().int() == Some(1) }).await;
    assert_eq!(stored(&*backend, &fixture.stream()).await, [0, 1]);
    proxy.heal().unwrap();
    wait_until_empty(&bus, LIMIT).await;
    assert_eq!(stored(&*backend, &fixture.stream()).await, [0, 1, 2, 3, 4]);
    bus.close().await.unwrap();
}

async fn continuous_publishing_does_not_keep_the_spool_in_use(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = Arc::new(fixture.bus_with(registry(), spooling(fixture, &directory)).await);
    outage.begin().await;
    // From now on all events are spooled behind this one, also those for available nodes.
    assert_eq!(bus.publish(fixture.noted(0)).await.unwrap().stored, StoreOutcome::Spooled);
    let deadline = Instant::now() + 2 * LIMIT;
    let is_back = Arc::new(AtomicBool::new(false));
    let publishers: Vec<_> = (0..32)
        .map(|session| {
            let (bus, is_back) = (Arc::clone(&bus), Arc::clone(&is_back));
            tokio::spawn(async move {
                // At every moment some of them are about to be added to the spool.
                for number in 0.. {
                    // A cluster takes a while to recover; the spool must have enough space until then.
                    if !is_back.load(Ordering::Relaxed) {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    let session_id = Some(format!("s{session}"));
                    let event = Noted { session_id, number, text: String::new() };
                    let result = bus.publish(event).await.unwrap();
                    if matches!(result.stored, StoreOutcome::Entry(_)) || Instant::now() > deadline
                    {
                        return (number + 1, result.stored);
                    }
                }
                unreachable!("the numbers do not end")
            })
        })
        .collect();
    while bus.health().await.spool.unwrap().events < 100 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    outage.end().await;
    is_back.store(true, Ordering::Relaxed);
    let mut published = Vec::new();
    for publisher in publishers {
        let (count, last) = publisher.await.unwrap();
        assert!(matches!(last, StoreOutcome::Entry(_)), "events still go through the spool");
        published.push(count);
    }
    let backend = fixture.connect().await;
    for (session, count) in published.iter().enumerate() {
        let numbers = stored(&*backend, &fixture.stream_of(&format!("s{session}"))).await;
        assert_eq!(numbers, (0..*count).collect::<Vec<u64>>(), "session {session}");
    }
    bus.close().await.unwrap();
}

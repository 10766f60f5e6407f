//! Crashes in the middle of a snapshot, a compaction, a fork, an import or an expiry.
//!
//! First step by step: the future is dropped at each of its await points in turn, which looks to a backend like a
//! process that crashes there. Then with real processes, killed at random.

use std::env;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use headwater_bus::{
    ReplayUntil, SessionError, SessionId, Sessions, SessionsConfig, StreamedBus, StreamedBusConfig,
};
use headwater_conformance::bus::registry;
use headwater_stream::{Backend, EntryId, Options, StreamName, connect};
use headwater_testkit::{Child, Cluster, Redis};

use crate::fixture::{Fixture, LIMIT, Sum, by_hand, folds, lines_of, noted, publish, sum};

on_every_bus!(
    a_snapshot_cancelled_at_any_poll_leaves_the_session_complete,
    a_compaction_cancelled_at_any_poll_leaves_the_session_complete,
    a_fork_cancelled_at_any_poll_is_complete_or_not_a_session,
    an_import_cancelled_at_any_poll_is_complete_or_not_a_session,
    an_import_with_a_cancelled_call_has_failed,
    an_expiry_cancelled_at_any_poll_is_still_reported,
);

/// How often the work must complete before the loop ends: a reply that is ready at once saves a poll, and so a point of
/// cancellation.
const ENDS: usize = 3;

/// Polls the work this many times. Returns its output if it completed.
async fn cancel_after<F: Future>(polls: usize, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    let mut left = polls;
    poll_fn(move |context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        work.as_mut().poll(context).map(Some)
    })
    .await
}

/// Cancels the work one poll later each time, until it has completed often enough.
async fn cancel_at_every_poll(mut is_done_after: impl AsyncFnMut(usize) -> bool) {
    let mut ends = 0;
    for polls in 0.. {
        ends += usize::from(is_done_after(polls).await);
        if ends == ENDS {
            println!("{polls} polls");
            assert!(polls > ENDS, "it was not cut off anywhere");
            return;
        }
    }
}

/// Calls in flight may still take effect.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(2)).await;
}

async fn a_snapshot_cancelled_at_any_poll_leaves_the_session_complete(fixture: Fixture) {
    let fixture = fixture.on_disk().await;
    let sessions = fixture.sessions().await;
    cancel_at_every_poll(async |polls| {
        let session = sessions.create(&SessionId::random()).await.unwrap();
        publish(&session, 0..30).await;
        session.snapshot().await.unwrap();
        publish(&session, 30..40).await;
        let taken = cancel_after(polls, session.snapshot()).await;
        settle().await;
        let again = sessions.recover(session.id()).await.unwrap();
        assert_eq!(again.recovery().snapshot_problem, None, "after {polls} polls");
        assert!(matches!(again.recovery().replayed, 0 | 10), "after {polls} polls");
        assert_eq!(sum(&again), Sum::of(0..40), "after {polls} polls");
        // It can be compacted, whatever the metadata says about the snapshot.
        again.compact().await.unwrap();
        assert_eq!(sum(&sessions.recover(session.id()).await.unwrap()), Sum::of(0..40));
        taken.is_some()
    })
    .await;
}

async fn a_compaction_cancelled_at_any_poll_leaves_the_session_complete(fixture: Fixture) {
    let fixture = fixture.on_disk().await;
    let sessions = fixture.sessions().await;
    cancel_at_every_poll(async |polls| {
        let session = sessions.create(&SessionId::random()).await.unwrap();
        publish(&session, 0..30).await;
        let compacted = cancel_after(polls, session.compact()).await;
        settle().await;
        assert_eq!(sum(&sessions.recover(session.id()).await.unwrap()), Sum::of(0..30));
        publish(&session, 30..33).await;
        assert_eq!(sum(&session), Sum::of(0..33), "after {polls} polls");
        session.compact().await.unwrap();
        assert_eq!(fixture.entries(session.id()).await.len(), 1, "after {polls} polls");
        assert_eq!(sum(&sessions.recover(session.id()).await.unwrap()), Sum::of(0..33));
        compacted.is_some()
    })
    .await;
}

/// The copy is a complete session, or its id is free.
async fn assert_complete_or_missing(sessions: &Sessions, id: &SessionId, expected: &Sum) {
    match sessions.recover(id).await {
        Ok(session) => assert_eq!(sum(&session), *expected),
        Err(SessionError::NotFound { .. }) => match sessions.create(id).await {
            Ok(session) => assert_eq!(sum(&session), Sum::default()),
            // A call in flight has committed it after all.
            Err(SessionError::Exists { .. }) => {
                assert_eq!(sum(&sessions.recover(id).await.unwrap()), *expected);
            }
            Err(other) => panic!("{other}"),
        },
        Err(other) => panic!("{other}"),
    }
}

async fn a_fork_cancelled_at_any_poll_is_complete_or_not_a_session(fixture: Fixture) {
    let fixture = fixture.on_disk().await;
    let sessions = fixture.sessions().await;
    let parent = sessions.create(&fixture.session).await.unwrap();
    publish(&parent, 0..30).await;
    parent.compact().await.unwrap();
    publish(&parent, 30..700).await;
    cancel_at_every_poll(async |polls| {
        let id = SessionId::random();
        let forked =
            cancel_after(polls, sessions.fork(&fixture.session, ReplayUntil::End, &id)).await;
        settle().await;
        assert_complete_or_missing(&sessions, &id, &Sum::of(0..700)).await;
        assert_eq!(sum(&sessions.recover(&fixture.session).await.unwrap()), Sum::of(0..700));
        forked.is_some()
    })
    .await;
}

async fn an_import_cancelled_at_any_poll_is_complete_or_not_a_session(fixture: Fixture) {
    let fixture = fixture.on_disk().await;
    let sessions = fixture.sessions().await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..1200).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    cancel_at_every_poll(async |polls| {
        let id = SessionId::random();
        let mut import = sessions.import(&id);
        let imported = cancel_after(polls, async {
            for line in &lines {
                import.line(line).await.unwrap();
            }
            import.finish().await.unwrap();
        });
        let is_done = imported.await.is_some();
        settle().await;
        assert_complete_or_missing(&sessions, &id, &Sum::of(0..1200)).await;
        is_done
    })
    .await;
}

async fn an_import_with_a_cancelled_call_has_failed(fixture: Fixture) {
    let fixture = fixture.on_disk().await;
    let sessions = fixture.sessions().await;
    let original = sessions.create(&fixture.session).await.unwrap();
    publish(&original, 0..600).await;
    let lines = lines_of(sessions.export(&fixture.session).await.unwrap()).await;
    let last = lines.len() - 1;
    // The calls that write: the first entry, a full batch, the end.
    for cut in [1, 500, last] {
        let (mut ends, mut cuts) = (0, 0);
        for round in 0.. {
            // On a busy machine replies may be ready at once: some rounds are not cancelled.
            assert!(round < 1000, "line {cut} was not cut off anywhere");
            let polls = 1 + round % 12;
            let id = SessionId::random();
            let mut import = sessions.import(&id);
            let mut failed = None;
            let mut was_cut = false;
            for (index, line) in lines.iter().enumerate() {
                let polls = if index == cut { polls } else { usize::MAX };
                match cancel_after(polls, import.line(line)).await {
                    // The caller continues as if nothing had happened.
                    None => was_cut = true,
                    Some(Ok(())) => {}
                    Some(Err(error)) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            let finished = import.finish().await;
            settle().await;
            if was_cut {
                cuts += 1;
                assert_eq!(failed.is_some(), cut != last, "line {cut} after {polls} polls");
                assert!(finished.is_err(), "line {cut} after {polls} polls");
                let recovered = sessions.recover(&id).await;
                assert!(recovered.is_err(), "line {cut} after {polls} polls");
            } else {
                assert_eq!(sum(&finished.unwrap()), Sum::of(0..600));
                ends += 1;
            }
            if ends >= ENDS && cuts > 0 {
                println!("line {cut}: cut off {cuts} times");
                break;
            }
        }
    }
}

async fn an_expiry_cancelled_at_any_poll_is_still_reported(fixture: Fixture) {
    let fixture = fixture.on_disk().await;
    let moment = Duration::from_millis(1);
    let (ttl, abandoned_after) = (Some(moment), moment);
    let config = headwater_bus::SessionsConfig { ttl, abandoned_after, ..by_hand() };
    cancel_at_every_poll(async |polls| {
        // Each has its own list, so that a sweep finds one session.
        let fixture = fixture.another();
        let sessions = fixture.sessions_with(folds(), config).await;
        let session = sessions.create(&fixture.session).await.unwrap();
        publish(&session, 0..10).await;
        session.snapshot().await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
        let swept = cancel_after(polls, sessions.sweep()).await;
        settle().await;
        match sessions.recover(&fixture.session).await {
            Ok(again) => assert_eq!(sum(&again), Sum::of(0..10)),
            Err(SessionError::Expired { entries: 10, .. }) => {}
            Err(other) => panic!("after {polls} polls: {other}"),
        }
        sessions.sweep().await.unwrap();
        let ended = sessions.recover(&fixture.session).await.unwrap_err();
        assert!(matches!(ended, SessionError::Expired { entries: 10, .. }), "{ended}");
        assert_eq!(fixture.entries(&fixture.session).await, []);
        swept.is_some()
    })
    .await;
}

/// Seeded random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

async fn sessions_at(backend: Arc<dyn Backend>, prefix: &str) -> Sessions {
    let config = StreamedBusConfig { prefix: prefix.to_owned(), ..Default::default() };
    let bus = StreamedBus::open(backend, registry(), config).await.unwrap();
    Sessions::new(Arc::new(bus), folds(), by_hand()).await.unwrap()
}

/// Publishes, takes snapshots, compacts, forks and imports until it is killed.
#[test]
#[ignore = "a role that other tests of this file start as a process of its own"]
fn churner() {
    let Ok(url) = env::var("URL") else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let backend = connect(&url, &Options::default()).await.unwrap();
        let sessions = sessions_at(backend, &env::var("PREFIX").unwrap()).await;
        let id = SessionId::new(env::var("SESSION").unwrap()).unwrap();
        let mut dice = Dice(env::var("SEED").unwrap().parse().unwrap());
        let session = sessions.ensure(&id).await.unwrap();
        loop {
            let count = sum(&session).count;
            publish(&session, count..count + 50).await;
            println!("PUBLISHED {}", count + 50);
            match dice.below(4) {
                0 => drop(session.snapshot().await.unwrap()),
                1 => drop(session.compact().await.unwrap()),
                2 => {
                    drop(sessions.fork(&id, ReplayUntil::End, &SessionId::random()).await.unwrap());
                }
                _ => {
                    let mut export = sessions.export(&id).await.unwrap();
                    let mut import = sessions.import(&SessionId::random());
                    while let Some(line) = export.next_line().await.unwrap() {
                        import.line(&line).await.unwrap();
                    }
                    import.finish().await.unwrap();
                }
            }
        }
    });
}

async fn killed_processes_leave_only_complete_sessions(url: String, rounds: u64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed =
        env::var("HEADWATER_SEED").map_or(now.as_nanos() as u64 | 1, |seed| seed.parse().unwrap());
    println!("HEADWATER_SEED={seed}");
    let mut dice = Dice(seed);
    let fixture = Fixture::at(url.clone());
    let mut abandoned = 0;
    for _ in 0..rounds {
        let seed = (dice.below(u64::MAX) | 1).to_string();
        let environment = [
            ("URL", url.as_str()),
            ("PREFIX", &fixture.prefix),
            ("SESSION", fixture.session.as_str()),
            ("SEED", &seed),
        ];
        let child = Child::spawn_self("crashes::churner", &environment).unwrap();
        let mut published = 0;
        for _ in 0..=dice.below(5) {
            let line = child.line_after("PUBLISHED ", LIMIT).unwrap();
            published = line.trim().parse().unwrap();
        }
        tokio::time::sleep(Duration::from_millis(dice.below(25))).await;
        child.kill9().unwrap();

        let backend = connect(&url, &Options::default()).await.unwrap();
        let sessions = sessions_at(Arc::clone(&backend), &fixture.prefix).await;
        let session = sessions.recover(&fixture.session).await.unwrap();
        let count = sum(&session).count;
        assert!(count >= published, "{count} of {published}");
        assert_eq!(sum(&session), Sum::of(0..count));
        let listed = sessions.list(EntryId::MIN, 1000).await.unwrap();
        for info in &listed {
            let session = sessions.recover(&info.session).await.unwrap();
            let count = sum(&session).count;
            assert_eq!(sum(&session), Sum::of(0..count));
            // A copy has all events of its source, a multiple of 50.
            assert!(info.session == fixture.session || count.is_multiple_of(50), "{count}");
        }
        // Of a copy that was cut off, maintenance finds everything.
        let impatient = SessionsConfig { abandoned_after: Duration::from_millis(1), ..by_hand() };
        let impatient =
            Sessions::new(Arc::clone(sessions.bus()), folds(), impatient).await.unwrap();
        settle().await;
        abandoned += impatient.sweep().await.unwrap().abandoned;
        let list = StreamName::new(format!("{}:sessions", fixture.prefix)).unwrap();
        let entries = backend.stats(&list).await.unwrap().unwrap().length;
        assert_eq!(entries, listed.len() as u64);
        for info in listed.iter().filter(|info| info.session != fixture.session) {
            sessions.delete(&info.session).await.unwrap();
        }
        session.publish(noted(count)).await.unwrap();
        assert_eq!(sum(&session), Sum::of(0..=count));
        // The next process continues at a multiple of 50.
        publish(&session, count + 1..(count + 1).next_multiple_of(50)).await;
        // One process at a time can open an embedded backend.
        sessions.bus().close().await.unwrap();
        backend.close().await.unwrap();
    }
    println!("{abandoned} copies were cut off in the middle");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_processes_leave_only_complete_sessions_on_redis() {
    let redis = Redis::shared().unwrap();
    killed_processes_leave_only_complete_sessions(redis.url(), 15).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_processes_leave_only_complete_sessions_on_a_cluster() {
    let cluster = Cluster::shared().unwrap();
    killed_processes_leave_only_complete_sessions(cluster.url(), 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_processes_leave_only_complete_sessions_embedded() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("embedded:{}", directory.path().join("streams").display());
    killed_processes_leave_only_complete_sessions(url, 10).await;
}

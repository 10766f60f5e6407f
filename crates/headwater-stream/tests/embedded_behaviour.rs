//! Guarantees of the embedded backend beyond the conformance suite: injected clock, bounded memory, shared
//! syncs, readers that wake at once and lose nothing.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use headwater_stream::clock::{Clock, TestClock, Timestamp};
use headwater_stream::*;
use tokio::time::timeout;

/// Timeout for a slow machine; only reached on failure.
const LIMIT: Duration = Duration::from_secs(60);

fn stream(name: &str) -> StreamName {
    StreamName::new(name).unwrap()
}

fn group() -> GroupName {
    GroupName::new("g").unwrap()
}

fn consumer(name: &str) -> ConsumerName {
    ConsumerName::new(name).unwrap()
}

fn fields(number: usize) -> Fields {
    Fields::new([("n", number.to_string())])
}

fn large() -> Fields {
    Fields::new([("data", vec![0; 10_000])])
}

/// A clock that panics on demand, and with it the call that reads it.
#[derive(Debug, Default)]
struct PanickingClock {
    is_broken: AtomicBool,
}

#[async_trait::async_trait]
impl Clock for PanickingClock {
    fn now(&self) -> Timestamp {
        assert!(!self.is_broken.load(Ordering::SeqCst), "the clock is broken");
        clock::SystemClock.now()
    }

    fn monotonic(&self) -> Duration {
        assert!(!self.is_broken.load(Ordering::SeqCst), "the clock is broken");
        clock::SystemClock.monotonic()
    }

    async fn sleep(&self, duration: Duration) {
        clock::SystemClock.sleep(duration).await;
    }
}

#[tokio::test]
async fn a_backend_whose_state_is_unknown_fails_permanently_until_it_is_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    for url in [format!("embedded:{}", directory.path().display()), "embedded:memory".to_owned()] {
        let clock = Arc::new(PanickingClock::default());
        let options = Options { clock: Arc::clone(&clock) as _, ..Options::default() };
        let backend = connect(&url, &options).await.unwrap();
        let append = |backend: Arc<dyn Backend>| async move {
            backend.append(&stream("s"), &[fields(1)], &Retention::KEEP_ALL).await
        };
        append(Arc::clone(&backend)).await.unwrap();
        clock.is_broken.store(true, Ordering::SeqCst);
        tokio::spawn(append(Arc::clone(&backend))).await.unwrap_err();
        clock.is_broken.store(false, Ordering::SeqCst);
        for _ in 0..2 {
            let error = append(Arc::clone(&backend)).await.unwrap_err();
            assert!(matches!(error, StreamError::Stopped { .. }), "{error:?}");
            assert!(!error.is_transient());
        }
        drop(backend);
        append(connect(&url, &options).await.unwrap()).await.unwrap();
    }
}

async fn open(url: &str) -> Arc<dyn Backend> {
    connect(url, &Options::default()).await.unwrap()
}

async fn open_at(url: &str, clock: &TestClock) -> Arc<dyn Backend> {
    connect(url, &Options { clock: Arc::new(clock.clone()), ..Options::default() }).await.unwrap()
}

fn url(directory: &Path, parameters: &str) -> String {
    format!("embedded:{}?{parameters}", directory.display())
}

async fn append(backend: &dyn Backend, entries: &[Fields]) -> Result<Vec<EntryId>> {
    backend.append(&stream("s"), entries, &Retention::KEEP_ALL).await
}

async fn length(backend: &dyn Backend, name: &str) -> u64 {
    backend.stats(&stream(name)).await.unwrap().map_or(0, |stats| stats.length)
}

fn fact(backend: &dyn Backend, name: &str) -> u64 {
    let facts = backend.describe().facts;
    facts.iter().find(|(fact, _)| *fact == name).unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn many_callers_share_syncs() {
    let directory = tempfile::tempdir().unwrap();
    let backend = open(&url(directory.path(), "sync=always")).await;
    let callers = (0..64).map(|caller| {
        let backend = Arc::clone(&backend);
        tokio::spawn(async move {
            for number in 0..20 {
                append(&*backend, &[fields(caller * 100 + number)]).await.unwrap();
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    assert_eq!(length(&*backend, "s").await, 64 * 20);
    let syncs = fact(&*backend, "syncs");
    assert!((1..64 * 20 / 4).contains(&syncs), "{syncs} syncs for {} appends", 64 * 20);
}

#[tokio::test]
async fn with_sync_interval_calls_do_not_wait_for_syncs_and_the_log_is_still_synced() {
    let directory = tempfile::tempdir().unwrap();
    let backend = open(&url(directory.path(), "sync=interval")).await;
    for number in 0..200 {
        append(&*backend, &[fields(number)]).await.unwrap();
    }
    assert!(fact(&*backend, "syncs") < 100, "calls wait for syncs");
    // Also under load.
    let synced = async {
        while fact(&*backend, "syncs") == 0 {
            append(&*backend, &[fields(0)]).await.unwrap();
        }
    };
    timeout(LIMIT, synced).await.expect("the log is synced without a waiting call");
}

#[tokio::test]
async fn ids_stay_ascending_when_the_clock_is_set_back_across_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let late = TestClock::at(Timestamp::from_millis(2_000_000));
    let backend = open_at(&url(directory.path(), ""), &late).await;
    let before = append(&*backend, &[fields(1), fields(2)]).await.unwrap();
    assert_eq!(before, [EntryId::new(2_000_000, 0), EntryId::new(2_000_000, 1)]);
    backend.delete_entries(&stream("s"), &before).await.unwrap();
    backend.close().await.unwrap();

    let early = TestClock::at(Timestamp::from_millis(1_000_000));
    let backend = open_at(&url(directory.path(), ""), &early).await;
    assert_eq!(append(&*backend, &[fields(3)]).await.unwrap(), [EntryId::new(2_000_000, 2)]);
    // Time continues from where it was, at 19/20 of its speed until the clock has caught up.
    early.advance(Duration::from_secs(20));
    assert_eq!(append(&*backend, &[fields(4)]).await.unwrap(), [EntryId::new(2_019_000, 0)]);
}

const HOUR: Duration = Duration::from_secs(3600);
const TTL: Duration = Duration::from_secs(15);

/// A lease, a delayed entry and an id in progress, each for `TTL`.
async fn begin_waits(backend: &dyn Backend) {
    let (lease, holder) = (LeaseName::new("lease").unwrap(), HolderName::new("first").unwrap());
    assert!(matches!(backend.acquire(&lease, &holder, TTL).await.unwrap(), AcquireResult::Won(_)));
    let later = ScheduleRequest { to: stream("s"), due: DueTime::After(TTL), fields: fields(1) };
    backend.schedule(&DelayName::new("delays").unwrap(), &[later]).await.unwrap();
    let scope = DedupScope::new("scope").unwrap();
    assert_eq!(backend.dedup_begin(&scope, &["id"], TTL).await.unwrap(), [DedupStatus::New]);
}

/// How many of the three have expired or are due.
async fn waits_over(backend: &dyn Backend) -> usize {
    let lease = backend.leases(&[LeaseName::new("lease").unwrap()]).await.unwrap().remove(0);
    let delays = DelayName::new("delays").unwrap();
    let is_due = backend.wait_until_due(&delays, Duration::ZERO).await.unwrap();
    // Begins a free id and abandons it.
    let scope = DedupScope::new("scope").unwrap();
    let begun = backend.dedup_begin(&scope, &["id"], TTL).await.unwrap().remove(0);
    if begun == DedupStatus::New {
        backend.dedup_abandon(&scope, &["id"]).await.unwrap();
    }
    [lease.is_none(), is_due, begun == DedupStatus::New].into_iter().filter(|over| *over).count()
}

fn step(clock: &TestClock, is_back: bool) {
    if is_back { clock.step_back(HOUR) } else { clock.step_forward(HOUR) }
}

#[tokio::test]
async fn leases_delays_and_deduplication_keep_their_durations_when_the_clock_is_set() {
    for is_back in [true, false] {
        let clock = TestClock::default();
        let backend = open_at("embedded:memory", &clock).await;
        begin_waits(&*backend).await;
        clock.advance(TTL / 3);
        step(&clock, is_back);
        assert_eq!(waits_over(&*backend).await, 0, "nothing expires early; back: {is_back}");
        clock.advance(TTL / 3);
        assert_eq!(waits_over(&*backend).await, 0, "nothing expires early; back: {is_back}");
        // A twentieth for slewing towards the wall clock.
        clock.advance(TTL / 3 + TTL / 10);
        assert_eq!(waits_over(&*backend).await, 3, "nothing lasts longer; back: {is_back}");
    }
}

#[tokio::test]
async fn leases_delays_and_deduplication_expire_in_time_when_the_clock_was_set_back_before_a_restart()
 {
    // With and without a snapshot.
    for parameters in ["", "compact_bytes=1"] {
        let directory = tempfile::tempdir().unwrap();
        let clock = TestClock::default();
        let backend = open_at(&url(directory.path(), parameters), &clock).await;
        append(&*backend, &[fields(0)]).await.unwrap();
        // Long after the last entry: only the lease and the deduplication record contain the time.
        clock.advance(HOUR * 2);
        begin_waits(&*backend).await;
        backend.close().await.unwrap();
        clock.step_back(HOUR);
        let backend = open_at(&url(directory.path(), parameters), &clock).await;
        assert_eq!(waits_over(&*backend).await, 0);
        clock.advance(TTL + TTL / 10);
        assert_eq!(waits_over(&*backend).await, 3, "{parameters}");
    }
}

#[tokio::test]
async fn retention_by_age_keeps_fresh_entries_when_the_clock_is_set_forward() {
    let clock = TestClock::default();
    let backend = open_at("embedded:memory", &clock).await;
    append(&*backend, &[fields(0)]).await.unwrap();
    clock.step_forward(HOUR);
    let retention = Retention { max_age: Some(HOUR / 2), ..Retention::KEEP_ALL };
    let kept = backend.append(&stream("s"), &[fields(1)], &retention).await.unwrap();
    assert_eq!((kept.len(), length(&*backend, "s").await), (1, 2));
}

#[tokio::test]
async fn a_blocked_read_returns_only_on_an_append_or_by_the_injected_clock() {
    let clock = TestClock::default();
    let backend = open_at("embedded:memory", &clock).await;
    let mut reader = backend.reader(&group(), &consumer("c")).await.unwrap();
    let mut tail = backend.tail().await.unwrap();
    let wait = Duration::from_secs(30);
    let streams = [stream("other"), stream("s")];

    // By an append, while the clock stands still.
    let read = async { reader.read(&streams, 10, wait).await.unwrap() };
    let positions = [(stream("s"), EntryId::MIN)];
    let tailed = async { tail.read(&positions, 10, wait).await.unwrap() };
    let late = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        append(&*backend, &[fields(1)]).await.unwrap()
    };
    let (batches, tailed, ids) =
        timeout(LIMIT, async { tokio::join!(read, tailed, late) }).await.unwrap();
    assert_eq!((&batches[0].stream, batches[0].entries[0].id), (&streams[1], ids[0]));
    assert_eq!(tailed[0].entries[0].id, ids[0]);

    // By the clock.
    let read = async { reader.read(&streams, 10, wait).await.unwrap() };
    let positions = [(stream("s"), ids[0])];
    let tailed = async { tail.read(&positions, 10, wait).await.unwrap() };
    let later = async {
        clock.advance(wait - Duration::from_millis(1));
        tokio::time::sleep(Duration::from_millis(30)).await;
        clock.advance(Duration::from_millis(1));
    };
    let (batches, tailed, ()) =
        timeout(LIMIT, async { tokio::join!(read, tailed, later) }).await.unwrap();
    assert_eq!((batches.len(), tailed.len()), (0, 0));
}

#[tokio::test]
async fn a_group_removed_during_a_blocked_read_is_recreated_from_the_beginning() {
    let clock = TestClock::default();
    let backend = open_at("embedded:memory", &clock).await;
    let ids = append(&*backend, &[fields(1)]).await.unwrap();
    backend.ensure_group(&stream("s"), &group(), GroupStart::End).await.unwrap();
    let mut reader = backend.reader(&group(), &consumer("c")).await.unwrap();
    let streams = [stream("s")];
    let read = async { reader.read(&streams, 10, LIMIT).await.unwrap() };
    let remove = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(backend.remove_group(&stream("s"), &group()).await.unwrap());
    };
    let (batches, ()) = timeout(LIMIT, async { tokio::join!(read, remove) }).await.unwrap();
    assert_eq!(batches[0].entries[0].id, ids[0]);
}

/// Readers of one group block without a timeout during appends: each entry reaches exactly one of them.
async fn race(backend: Arc<dyn Backend>, rounds: usize) {
    const READERS: usize = 4;
    const WRITERS: usize = 3;
    backend.ensure_group(&stream("s"), &group(), GroupStart::Beginning).await.unwrap();
    let (sender, mut numbers) = tokio::sync::mpsc::unbounded_channel();
    let mut readers = Vec::new();
    for number in 0..READERS {
        let (backend, sender) = (Arc::clone(&backend), sender.clone());
        readers.push(tokio::spawn(async move {
            let mut reader =
                backend.reader(&group(), &consumer(&number.to_string())).await.unwrap();
            loop {
                let batches = reader.read(&[stream("s")], 1 + number, LIMIT).await.unwrap();
                for entry in batches.into_iter().flat_map(|batch| batch.entries) {
                    sender.send(entry.fields).unwrap();
                }
            }
        }));
    }
    for writer in 0..WRITERS {
        let backend = Arc::clone(&backend);
        tokio::spawn(async move {
            for round in 0..rounds {
                append(&*backend, &[fields(writer * rounds + round)]).await.unwrap();
                if round % 3 == 0 {
                    tokio::task::yield_now().await;
                }
            }
        });
    }
    let mut seen = BTreeSet::new();
    for _ in 0..WRITERS * rounds {
        let fields = timeout(LIMIT, numbers.recv())
            .await
            .expect("a blocked reader missed an entry")
            .unwrap();
        let number = fields.get("n").unwrap().clone();
        assert!(seen.insert(number), "an entry was delivered twice");
    }
    readers.iter().for_each(|reader| reader.abort());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_blocked_reader_misses_an_entry() {
    let clock = TestClock::default();
    for _ in 0..20 {
        race(open_at("embedded:memory", &clock).await, 50).await;
    }
    let directory = tempfile::tempdir().unwrap();
    for (round, sync) in ["always", "interval", "always", "interval"].into_iter().enumerate() {
        let url = url(&directory.path().join(round.to_string()), &format!("sync={sync}"));
        race(open_at(&url, &clock).await, 50).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn reads_dropped_at_any_moment_lose_and_duplicate_nothing() {
    const ENTRIES: usize = 400;
    let directory = tempfile::tempdir().unwrap();
    for (round, sync) in ["always", "interval"].into_iter().enumerate() {
        let url = url(&directory.path().join(round.to_string()), &format!("sync={sync}"));
        let backend = open(&url).await;
        backend.ensure_group(&stream("s"), &group(), GroupStart::Beginning).await.unwrap();
        let writer = Arc::clone(&backend);
        let appends = tokio::spawn(async move {
            for number in 0..ENTRIES {
                append(&*writer, &[fields(number)]).await.unwrap();
            }
        });
        let mut reader = backend.reader(&group(), &consumer("c")).await.unwrap();
        let streams = [stream("s")];
        let mut returned = Vec::new();
        let mut dropped = 0;
        while dropped < 100 || !appends.is_finished() {
            let drop_after = async {
                for _ in 0..(returned.len() + dropped) % 9 {
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                biased;
                batches = reader.read(&streams, 7, LIMIT) => returned.extend(batches.unwrap()),
                () = drop_after => dropped += 1,
            }
        }
        appends.await.unwrap();
        returned.extend(reader.close().await.unwrap());
        let mut reader = backend.reader(&group(), &consumer("c")).await.unwrap();
        returned.extend(reader.read(&[stream("s")], ENTRIES, Duration::ZERO).await.unwrap());

        let ids: Vec<EntryId> =
            returned.into_iter().flat_map(|batch| batch.entries).map(|entry| entry.id).collect();
        let all = backend.range(&stream("s"), Range::first(ENTRIES)).await.unwrap();
        assert_eq!(
            ids,
            all.iter().map(|entry| entry.id).collect::<Vec<_>>(),
            "{dropped} reads dropped"
        );
    }
}

#[tokio::test]
async fn an_append_over_the_memory_limit_fails_without_effect_and_retention_frees_memory() {
    let backend = open("embedded:memory?max_bytes=100000").await;
    let ten = vec![large(); 9];
    append(&*backend, &ten).await.unwrap();

    let error = append(&*backend, &ten).await.err().unwrap();
    assert!(
        matches!(&error, StreamError::Full { problem } if problem.contains("max_bytes")),
        "{error}"
    );
    assert_eq!(length(&*backend, "s").await, 9, "nothing was appended");

    // The retention of the call itself frees memory, unless a group needs the entries.
    let retention = Retention::max_len(9);
    backend.append(&stream("s"), &ten, &retention).await.unwrap();
    assert_eq!(length(&*backend, "s").await, 9);
    backend.ensure_group(&stream("s"), &group(), GroupStart::Beginning).await.unwrap();
    let error = backend.append(&stream("s"), &ten, &retention).await.err().unwrap();
    assert!(matches!(error, StreamError::Full { .. }), "{error}");

    // A trim does too.
    backend.trim(&stream("s"), &Retention::max_len(0), TrimGuard::Force).await.unwrap();
    append(&*backend, &ten).await.unwrap();
}

#[tokio::test]
async fn a_settle_whose_follow_up_exceeds_the_memory_limit_has_no_effect_and_one_without_succeeds()
{
    let backend = open("embedded:memory?max_bytes=100000").await;
    let ids = append(&*backend, &vec![large(); 9]).await.unwrap();
    let (s, group, c) = (stream("s"), group(), consumer("c"));
    let mut reader = backend.reader(&group, &c).await.unwrap();
    reader.read(std::slice::from_ref(&s), 100, Duration::ZERO).await.unwrap();
    let settle = async |entries: Vec<Settlement>| {
        let settle =
            SettleBatch { stream: &s, group: &group, consumer: &c, fence: None, entries: &entries };
        backend.settle(settle).await
    };
    let follow_up = SettleAction::Append { to: stream("dead"), fields: large() };
    let reschedule = SettleAction::Reschedule {
        delays: DelayName::new("d").unwrap(),
        to: stream("s"),
        due: DueTime::After(LIMIT),
        fields: large(),
    };

    for then in [follow_up.clone(), reschedule] {
        let entries = vec![Settlement::ack(ids[0]), Settlement { id: ids[1], action: then }];
        let error = settle(entries).await.err().unwrap();
        assert!(matches!(error, StreamError::Full { .. }), "{error}");
    }
    let pending = backend.stats(&s).await.unwrap().unwrap().groups[0].pending;
    assert_eq!((pending, length(&*backend, "dead").await), (9, 0), "nothing happened");

    // A settlement that frees memory applies together with one that needs it.
    let entries = vec![
        Settlement { id: ids[0], action: SettleAction::Delete },
        Settlement { id: ids[1], action: follow_up },
    ];
    assert_eq!(settle(entries).await.unwrap(), SettleResult { applied: 2, stale: 0 });
    assert_eq!(settle(vec![Settlement::ack(ids[2])]).await.unwrap().applied, 1);
}

#[tokio::test]
async fn expired_deduplication_records_and_sets_free_their_memory() {
    let clock = TestClock::default();
    let backend = open_at("embedded:memory?max_bytes=200000", &clock).await;
    let scope = DedupScope::new("scope").unwrap();
    for round in 0..400 {
        let ids: Vec<String> = (0..50).map(|number| format!("{round}-{number}")).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let answers = backend.dedup_begin(&scope, &ids, Duration::from_secs(1)).await.unwrap();
        assert!(answers.iter().all(|answer| *answer == DedupStatus::New));
        let set = SetName::new(format!("set {round}")).unwrap();
        backend.set_add(&set, &ids, Some(Duration::from_secs(1))).await.unwrap();
        clock.advance(Duration::from_millis(500));
    }
}

#[tokio::test]
async fn a_wait_for_due_entries_wakes_by_the_clock_and_by_an_earlier_entry() {
    let clock = TestClock::default();
    let backend = open_at("embedded:memory", &clock).await;
    let delays = DelayName::new("d").unwrap();
    let put = async |after: u64| {
        let due = DueTime::After(Duration::from_secs(after));
        let item = ScheduleRequest { to: stream("s"), due, fields: fields(after as usize) };
        backend.schedule(&delays, &[item]).await.unwrap()
    };
    put(50).await;

    // By an entry scheduled meanwhile that is due at once.
    let wait = async { backend.wait_until_due(&delays, LIMIT).await.unwrap() };
    let earlier = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        put(0).await;
    };
    let (due, ()) = timeout(LIMIT, async { tokio::join!(wait, earlier) }).await.unwrap();
    assert!(due);
    assert_eq!(backend.promote_due(&delays, 10).await.unwrap().len(), 1);

    // By the clock, exactly when it is due.
    let wait = async { backend.wait_until_due(&delays, LIMIT).await.unwrap() };
    let later = async {
        clock.advance(Duration::from_millis(49_999));
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(backend.promote_due(&delays, 10).await.unwrap().is_empty());
        clock.advance(Duration::from_millis(1));
    };
    let (due, ()) = timeout(LIMIT, async { tokio::join!(wait, later) }).await.unwrap();
    assert!(due);
    let returned = backend.promote_due(&delays, 10).await.unwrap();
    assert_eq!(returned[0].id.ms, clock.now().as_millis());

    // By nothing: the wait times out.
    let wait = async { backend.wait_until_due(&delays, Duration::from_secs(9)).await.unwrap() };
    let later = async { clock.advance(Duration::from_secs(9)) };
    let (due, ()) = timeout(LIMIT, async { tokio::join!(wait, later) }).await.unwrap();
    assert!(!due);
}

#[tokio::test]
async fn a_watch_reports_expiration_by_the_clock_and_release_at_once() {
    let clock = TestClock::default();
    let backend = open_at("embedded:memory", &clock).await;
    let mut watch = backend.watch("p:").await.unwrap();
    assert_eq!(watch.mode(), &WatchMode::All);
    let lease = |name: &str| LeaseName::new(name).unwrap();
    let holder = HolderName::new("me").unwrap();
    let acquire = async |name: &str, seconds: u64| match backend
        .acquire(&lease(name), &holder, Duration::from_secs(seconds))
        .await
        .unwrap()
    {
        AcquireResult::Won(epoch) => Fence { lease: lease(name), epoch },
        held => panic!("{held:?}"),
    };
    acquire("p:long", 60).await;
    acquire("other", 1).await;

    // A lease that expires earlier than all others is acquired while the watch waits.
    let next = async { watch.next().await };
    let work = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        acquire("p:short", 10).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        clock.advance(Duration::from_secs(10));
    };
    let (hint, ()) = timeout(LIMIT, async { tokio::join!(next, work) }).await.unwrap();
    assert_eq!(hint, LeaseEvent { lease: Some(lease("p:short")), kind: LeaseEventKind::Expired });

    let fence = acquire("p:given", 10).await;
    assert_eq!(backend.release(&holder, &[fence]).await.unwrap(), 1);
    let hint = timeout(LIMIT, watch.next()).await.unwrap();
    assert_eq!(hint, LeaseEvent { lease: Some(lease("p:given")), kind: LeaseEventKind::Released });

    // A subscriber that does not read gets `Lagged` instead of all events.
    for number in 0..3_000 {
        let fence = acquire(&format!("p:{number}"), 10).await;
        backend.release(&holder, &[fence]).await.unwrap();
    }
    let first = timeout(LIMIT, watch.next()).await.unwrap();
    assert_eq!(first, LeaseEvent { lease: None, kind: LeaseEventKind::Lagged });
    for _ in 0..1024 {
        let next = watch.next();
        if timeout(Duration::from_millis(50), next).await.is_err() {
            return;
        }
    }
    panic!("more hints are queued than the limit");
}

#[tokio::test]
async fn data_of_a_dropped_backend_is_restored() {
    let directory = tempfile::tempdir().unwrap();
    for sync in ["always", "interval"] {
        let url = url(&directory.path().join(sync), &format!("sync={sync}"));
        let backend = open(&url).await;
        append(&*backend, &[fields(1)]).await.unwrap();
        let mut reader = backend.reader(&group(), &consumer("c")).await.unwrap();
        reader.read(&[stream("s")], 1, Duration::ZERO).await.unwrap();
        // The reader keeps the backend open; dropping the reader closes it.
        drop(backend);
        drop(reader);
        let backend = open(&url).await;
        let stats = backend.stats(&stream("s")).await.unwrap().unwrap();
        assert_eq!((stats.length, stats.groups[0].pending), (1, 1));
    }
}

//! A process that works on an embedded directory is killed repeatedly: nothing that was acknowledged is lost
//! or undone.
//!
//! `HEADWATER_KILLS` sets the total number of kills (default 80), `HEADWATER_SEED` the seed of the times.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater_stream::*;
use headwater_testkit::{Child, chaos_is_over};

const KILLS_DEFAULT: u64 = 80;
const LOCATION: &str = "HEADWATER_TEST_LOCATION";
const LIFE: &str = "HEADWATER_TEST_LIFE";
const CHILD: &str = "child_that_works_until_it_is_killed";

/// Ends every line that the child prints, so that a line truncated by the kill is not mistaken for a
/// complete one.
const END: &str = " .";
const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn acknowledged_data_survives_every_kill_with_sync_always() {
    die_and_check("always", "sync=always", 45);
}

#[test]
fn acknowledged_data_survives_kills_during_snapshots() {
    die_and_check("compacting", "sync=always&compact_bytes=3000", 35);
}

#[test]
fn acknowledged_data_survives_every_kill_with_sync_interval() {
    die_and_check("interval", "sync=interval&compact_bytes=50000", 20);
}

fn stream(name: &str) -> StreamName {
    StreamName::new(name).unwrap()
}

fn group() -> GroupName {
    GroupName::new("g").unwrap()
}

fn delays() -> DelayName {
    DelayName::new("delays").unwrap()
}

fn number_of(fields: &Fields) -> u64 {
    std::str::from_utf8(fields.get("n").unwrap()).unwrap().parse().unwrap()
}

fn fields(number: u64) -> Fields {
    Fields::new([("n", number.to_string()), ("padding", "x".repeat((number % 60) as usize))])
}

/// The number of an entry decides how it is settled, so that the parent knows what the child intended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Delete,
    Done,
    Move,
    Keep,
}

fn outcome_of(number: u64) -> Outcome {
    match number % 10 {
        0..=5 => Outcome::Delete,
        6 | 7 => Outcome::Done,
        8 => Outcome::Move,
        _ => Outcome::Keep,
    }
}

fn report(line: &str) {
    println!("\n{line}{END}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run and killed by the other tests"]
async fn child_that_works_until_it_is_killed() {
    let (Ok(location), Ok(life)) = (env::var(LOCATION), env::var(LIFE)) else { return };
    let backend = connect(&format!("embedded:{location}"), &Options::default()).await.unwrap();
    report("ready");
    let life: u64 = life.parse().unwrap();
    let numbers = Arc::new(AtomicU64::new(life * 1_000_000));
    let mut tasks = Vec::new();
    for _ in 0..3 {
        tasks.push(tokio::spawn(appends(Arc::clone(&backend), Arc::clone(&numbers))));
    }
    tasks.push(tokio::spawn(appends_once(Arc::clone(&backend), Arc::clone(&numbers))));
    for consumer in ["c0", "c1"] {
        tasks.push(tokio::spawn(consumes(Arc::clone(&backend), consumer)));
    }
    tasks.push(tokio::spawn(puts_aside(Arc::clone(&backend), numbers)));
    tasks.push(tokio::spawn(returns(Arc::clone(&backend))));
    tasks.push(tokio::spawn(holds_a_lease(backend, life)));
    for task in tasks {
        task.await.unwrap();
    }
}

async fn appends(backend: Arc<dyn Backend>, numbers: Arc<AtomicU64>) {
    loop {
        let number = numbers.fetch_add(3, Ordering::Relaxed);
        let batch: Vec<Fields> = (number..=number + number % 3).map(fields).collect();
        let ids = backend.append(&stream("s"), &batch, &Retention::KEEP_ALL).await.unwrap();
        for (id, number) in ids.iter().zip(number..) {
            report(&format!("appended {number} {id}"));
        }
    }
}

fn once(number: u64) -> IdempotentEntry {
    IdempotentEntry { id: number.to_string(), fields: fields(number) }
}

async fn appends_once(backend: Arc<dyn Backend>, numbers: Arc<AtomicU64>) {
    loop {
        let number = numbers.fetch_add(3, Ordering::Relaxed);
        let batch: Vec<IdempotentEntry> = (number..=number + number % 3).map(once).collect();
        for number in number..=number + number % 3 {
            report(&format!("tries {number} 0-0"));
        }
        let (s, keep) = (stream("s"), &Retention::KEEP_ALL);
        let appended = backend.append_once(&s, &batch, HOUR, keep).await.unwrap();
        for (appended, number) in appended.iter().zip(number..) {
            assert!(!appended.duplicate);
            report(&format!("appended {number} {}", appended.id));
        }
    }
}

async fn consumes(backend: Arc<dyn Backend>, name: &str) {
    let (s, group, consumer) = (stream("s"), group(), ConsumerName::new(name).unwrap());
    let mut reader = backend.reader(&group, &consumer).await.unwrap();
    backend.ensure_group(&s, &group, GroupStart::Beginning).await.unwrap();
    let reclaim = ReclaimRequest {
        stream: &s,
        group: &group,
        consumer: &consumer,
        fence: None,
        from: ReclaimFrom::Consumer(&consumer),
        min_idle: Duration::ZERO,
        after: None,
        count: 10_000,
    };
    let mut in_hand = backend.reclaim(reclaim).await.unwrap().entries;
    loop {
        for entry in &in_hand {
            assert!(entry.deliveries > 0);
            settle(&*backend, &s, &consumer, entry).await;
        }
        let batches =
            reader.read(std::slice::from_ref(&s), 16, Duration::from_millis(20)).await.unwrap();
        in_hand = batches.into_iter().flat_map(|batch| batch.entries).collect();
    }
}

async fn settle(
    backend: &dyn Backend,
    s: &StreamName,
    consumer: &ConsumerName,
    entry: &DeliveredEntry,
) {
    let number = number_of(&entry.fields);
    let then = match outcome_of(number) {
        Outcome::Delete => SettleAction::Delete,
        Outcome::Done => SettleAction::Ack,
        Outcome::Move => SettleAction::Append { to: stream("t"), fields: entry.fields.clone() },
        Outcome::Keep => return,
    };
    report(&format!("intends {number} {}", entry.id));
    let entries = [Settlement { id: entry.id, action: then }];
    let settle =
        SettleBatch { stream: s, group: &group(), consumer, fence: None, entries: &entries };
    assert_eq!(backend.settle(settle).await.unwrap(), SettleResult { applied: 1, stale: 0 });
    report(&format!("settled {number} {}", entry.id));
}

async fn puts_aside(backend: Arc<dyn Backend>, numbers: Arc<AtomicU64>) {
    loop {
        let number = numbers.fetch_add(3, Ordering::Relaxed);
        let due = DueTime::After(Duration::from_millis(number % 30));
        let items = [ScheduleRequest { to: stream("s"), due, fields: fields(number) }];
        backend.schedule(&delays(), &items).await.unwrap();
        report(&format!("scheduled {number} 0-0"));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn returns(backend: Arc<dyn Backend>) {
    loop {
        if backend.wait_until_due(&delays(), Duration::from_millis(50)).await.unwrap() {
            backend.promote_due(&delays(), 16).await.unwrap();
        }
    }
}

async fn holds_a_lease(backend: Arc<dyn Backend>, life: u64) {
    let lease = LeaseName::new("lease").unwrap();
    for round in 0.. {
        let holder = HolderName::new(format!("{life}-{round}")).unwrap();
        if let AcquireResult::Won(epoch) =
            backend.acquire(&lease, &holder, Duration::from_millis(50)).await.unwrap()
        {
            report(&format!("epoch {} 0-0", epoch.0));
            backend.release(&holder, &[Fence { lease: lease.clone(), epoch }]).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What the children have reported so far.
#[derive(Default)]
struct Reported {
    appended: BTreeMap<EntryId, u64>,
    /// Numbers that a child tried to append once, successfully or not.
    tried: BTreeSet<u64>,
    scheduled: BTreeSet<u64>,
    intended: BTreeSet<u64>,
    settled: BTreeMap<EntryId, u64>,
    newest: EntryId,
    epoch: u64,
}

impl Reported {
    /// Processes one line of this run; ids and epochs must be greater than all before it.
    fn read_line(&mut self, line: &str, newest_before: EntryId) {
        let Some(line) = line.strip_suffix(END) else { return };
        let words: Vec<&str> = line.split(' ').collect();
        let [what, number, id] = words[..] else { return };
        let (number, id): (u64, EntryId) = (number.parse().unwrap(), id.parse().unwrap());
        match what {
            "appended" => {
                assert!(id > newest_before, "{id} was given out before {newest_before}");
                assert_eq!(self.appended.insert(id, number), None, "{id} was given out twice");
                self.newest = self.newest.max(id);
            }
            "tries" => assert!(self.tried.insert(number)),
            "scheduled" => assert!(self.scheduled.insert(number)),
            "intends" => {
                assert!(!self.settled.contains_key(&id), "{id} was delivered after it was settled");
                self.intended.insert(number);
            }
            "settled" => assert_eq!(self.settled.insert(id, number), None),
            "epoch" => {
                assert!(number > self.epoch, "epoch {number} follows {}", self.epoch);
                self.epoch = number;
            }
            _ => {}
        }
    }
}

/// A deterministic pseudorandom generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn from_environment(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

fn die_and_check(name: &str, parameters: &str, percent: u64) {
    let share = |kills: u64| (kills * percent).div_ceil(100);
    let kills = share(from_environment("HEADWATER_KILLS").unwrap_or(KILLS_DEFAULT));
    let seed = from_environment("HEADWATER_SEED")
        .unwrap_or_else(|| RandomState::new().hash_one("seed") >> 32);
    println!("{name}: {kills} kills, HEADWATER_SEED={seed}");
    let mut random = Random(seed.wrapping_add(percent));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_time()
        .build()
        .unwrap();
    let directory = tempfile::tempdir().unwrap();
    let location = format!("{}?{parameters}", directory.path().join("d").display());
    let mut reported = Reported::default();
    let (mut acknowledged, mut killed) = (0, 0);
    for life in 1..=kills {
        // A test that begins late does what it does in the ordinary suite.
        if life > share(KILLS_DEFAULT) && chaos_is_over() {
            break;
        }
        killed = life;
        let newest_before = reported.newest;
        let child =
            Child::spawn_self(CHILD, &[(LOCATION, &location), (LIFE, &life.to_string())]).unwrap();
        // Some are killed while they open the directory, most while they work.
        if random.below(8) == 0 {
            std::thread::sleep(Duration::from_millis(random.below(60)));
        } else {
            child.line_after("ready", Duration::from_secs(30)).unwrap();
            std::thread::sleep(Duration::from_micros(random.below(120_000)));
        }
        child.kill9().unwrap();
        while let Ok(line) = child.line(Duration::from_secs(10)) {
            reported.read_line(&line, newest_before);
        }
        acknowledged += reported.appended.len() + reported.scheduled.len() + reported.settled.len();
        runtime.block_on(check(&location, &mut reported, life));
    }
    println!("{name}: {acknowledged} acknowledgements checked after {killed} kills");
    assert!(acknowledged as u64 > killed, "the children made no progress");
    assert!(Path::new(location.split('?').next().unwrap()).exists());
}

/// Opens what the killed process left, compares it with what was reported, and deletes settled entries.
async fn check(location: &str, reported: &mut Reported, life: u64) {
    let backend = connect(&format!("embedded:{location}"), &Options::default()).await.unwrap();
    append_again(&*backend, reported, life).await;
    let found = all_of(&*backend, "s").await;
    let moved = all_of(&*backend, "t").await;
    let scheduled = backend.delayed(&delays(), 0, 10_000).await.unwrap();
    let stats = backend.stats(&stream("s")).await.unwrap();
    let last_delivered =
        stats.and_then(|stats| stats.groups.first().map(|group| group.last_delivered));
    let last_delivered = last_delivered.unwrap_or(EntryId::MIN);
    let pending = pending_of(&*backend).await;

    // Every number is in one place: none is duplicated, no acknowledged one is lost.
    let mut places: BTreeMap<u64, usize> = BTreeMap::new();
    let numbers = found.iter().map(|entry| number_of(&entry.fields));
    for number in numbers.chain(scheduled.iter().map(|delayed| number_of(&delayed.fields))) {
        *places.entry(number).or_default() += 1;
        assert_eq!(places[&number], 1, "life {life}: {number} is there twice");
    }
    let is_there: BTreeMap<EntryId, u64> =
        found.iter().map(|entry| (entry.id, number_of(&entry.fields))).collect();
    for (id, number) in &reported.appended {
        let may_be_gone =
            reported.intended.contains(number) && outcome_of(*number) == Outcome::Delete;
        match is_there.get(id) {
            Some(found) => assert_eq!(found, number, "life {life}: {id} has changed"),
            None => assert!(may_be_gone, "life {life}: {id} with {number} is lost"),
        }
    }
    for number in &reported.scheduled {
        let may_be_gone =
            reported.intended.contains(number) && outcome_of(*number) == Outcome::Delete;
        assert!(places.contains_key(number) || may_be_gone, "life {life}: {number} is lost");
    }

    // What was settled stays settled, with its follow-up.
    let mut moved_numbers: BTreeMap<u64, usize> = BTreeMap::new();
    moved.iter().for_each(|entry| *moved_numbers.entry(number_of(&entry.fields)).or_default() += 1);
    assert!(moved_numbers.values().all(|count| *count == 1), "life {life}: moved twice");
    for (id, number) in &reported.settled {
        assert!(!pending.contains(id), "life {life}: {id} is pending after it was settled");
        assert!(*id <= last_delivered, "life {life}: {id} will be delivered again");
        match outcome_of(*number) {
            Outcome::Delete => assert!(!is_there.contains_key(id), "life {life}: {id} is back"),
            Outcome::Done => assert!(is_there.contains_key(id), "life {life}: {id} is lost"),
            Outcome::Move => {
                assert!(moved_numbers.contains_key(number), "life {life}: {number} is lost");
            }
            Outcome::Keep => unreachable!("it is never settled"),
        }
    }
    // What is not settled is pending or unread, so it will be delivered.
    for (id, number) in is_there {
        let may_be_settled = reported.intended.contains(&number);
        let will_come = pending.contains(&id) || id > last_delivered;
        assert!(may_be_settled || will_come, "life {life}: {id} will never be delivered");
    }
    delete_settled(&*backend, reported, &found, &moved, &pending).await;
    if life.is_multiple_of(2) {
        backend.close().await.unwrap();
    }
}

/// Retries the appends that the killed process had started. Below, no number may occur twice.
async fn append_again(backend: &dyn Backend, reported: &mut Reported, life: u64) {
    let tried: Vec<u64> = std::mem::take(&mut reported.tried).into_iter().collect();
    let places: BTreeMap<u64, EntryId> =
        reported.appended.iter().map(|(id, number)| (*number, *id)).collect();
    for numbers in tried.chunks(1000) {
        let batch: Vec<IdempotentEntry> = numbers.iter().copied().map(once).collect();
        let (s, keep) = (stream("s"), &Retention::KEEP_ALL);
        let again = backend.append_once(&s, &batch, HOUR, keep).await.unwrap();
        for (number, again) in numbers.iter().zip(again) {
            if let Some(id) = places.get(number) {
                let known = AppendedEntry { id: *id, duplicate: true };
                assert_eq!(again, known, "life {life}: {number} was forgotten");
            }
        }
    }
}

/// Entries that a check leaves for the next run.
const LEFT_MAX: u64 = 400;

/// Deletes settled entries, so that the cost of a check depends on one run only.
async fn delete_settled(
    backend: &dyn Backend,
    reported: &mut Reported,
    found: &[Entry],
    moved: &[Entry],
    pending: &BTreeSet<EntryId>,
) {
    let is_done = |entry: &&Entry| {
        reported.intended.contains(&number_of(&entry.fields)) && !pending.contains(&entry.id)
    };
    let done: Vec<EntryId> = found.iter().filter(is_done).map(|entry| entry.id).collect();
    let moved: Vec<EntryId> = moved.iter().map(|entry| entry.id).collect();
    for (name, ids) in [("s", &done), ("t", &moved)] {
        for ids in ids.chunks(10_000) {
            assert_eq!(backend.delete_entries(&stream(name), ids).await.unwrap(), ids.len());
        }
    }
    // Producers are faster than consumers: trim what is far behind.
    backend.trim(&stream("s"), &Retention::max_len(LEFT_MAX), TrimGuard::Force).await.unwrap();
    let left: BTreeSet<EntryId> =
        all_of(backend, "s").await.into_iter().map(|entry| entry.id).collect();
    let waiting = backend.delayed(&delays(), 0, 10_000).await.unwrap();
    reported.appended.retain(|id, _| left.contains(id));
    reported.scheduled = waiting.iter().map(|delayed| number_of(&delayed.fields)).collect();
    reported.settled.clear();
    reported.intended.clear();
}

async fn all_of(backend: &dyn Backend, name: &str) -> Vec<Entry> {
    let mut all: Vec<Entry> = Vec::new();
    loop {
        let from = all.last().map_or(EntryId::MIN, |entry| entry.id.next());
        let page =
            backend.range(&stream(name), Range { from, ..Range::first(10_000) }).await.unwrap();
        if page.is_empty() {
            return all;
        }
        all.extend(page);
    }
}

async fn pending_of(backend: &dyn Backend) -> BTreeSet<EntryId> {
    let (s, group) = (stream("s"), group());
    let mut all = BTreeSet::new();
    loop {
        let query = PendingDeliveryQuery {
            stream: &s,
            group: &group,
            consumer: None,
            min_idle: Duration::ZERO,
            after: all.last().copied(),
            count: 10_000,
        };
        match backend.pending(query).await {
            Ok(page) if page.is_empty() => return all,
            Ok(page) => all.extend(page.into_iter().map(|pending| pending.id)),
            Err(StreamError::NoGroup { .. }) => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

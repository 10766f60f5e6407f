//! Ingestion from the stream into the analytics store, with failures.
//!
//! `HEADWATER_SEED` sets the seed of the random kills, `HEADWATER_EVENTS` the number of events (default 100,000).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_analytics::*;
use headwater_queue::{DeadLetterQuery, Queue, QueueConfig};
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Backend, EntryId, Fields, LeaseRenewerConfig, Options, Retention, StreamName, connect,
};
use headwater_testkit::{Child, Redis};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(220);

struct Env {
    backend: Arc<dyn Backend>,
    queue: Queue,
    file: PathBuf,
    _folder: tempfile::TempDir,
    _redis: Option<Redis>,
}

impl Env {
    async fn new(redis: Option<Redis>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = redis.as_ref().map_or("embedded:memory".to_owned(), Redis::url);
        let backend = connect(&url, &Options::default()).await.unwrap();
        let queue = queue(&backend);
        let file = folder.path().join("analytics.duckdb");
        Self { backend, queue, file, _folder: folder, _redis: redis }
    }

    fn store(&self) -> Arc<AnalyticsStore> {
        Arc::new(AnalyticsStore::open(&self.file).unwrap())
    }

    async fn append(&self, entries: &[Fields]) {
        for some in entries.chunks(1000) {
            self.backend.append(&stream(), some, &Retention::KEEP_ALL).await.unwrap();
        }
    }

    /// Waits until the group has acknowledged everything.
    async fn settled(&self) {
        let started = Instant::now();
        loop {
            let stats = self.backend.stats(&stream()).await.unwrap().unwrap();
            if stats.groups.iter().any(|group| group.pending == 0 && group.lag == Some(0)) {
                return;
            }
            assert!(started.elapsed() < LIMIT, "not settled: {stats:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Short leases, so that a killed process is replaced soon. The last process has a longer one.
fn queue(backend: &Arc<dyn Backend>) -> Queue {
    let seconds = env::var("LEASE").map_or(1, |seconds| seconds.parse().unwrap());
    let ttl = Duration::from_secs(seconds);
    let lease = LeaseRenewerConfig { ttl, renew_every: ttl / 5, safety_margin: ttl / 5 };
    let config = QueueConfig {
        lease,
        rebalance_every: Duration::from_millis(200),
        ..QueueConfig::default()
    };
    Queue::with_config(Arc::clone(backend), config).unwrap()
}

fn stream() -> StreamName {
    StreamName::new(STREAM).unwrap()
}

fn entry(data: &Value) -> Fields {
    Fields::new([("data", data.to_string())])
}

fn event(kind: &str, ticket: &str, message: &str, time: &str) -> Fields {
    entry(&json!({
        "event_type": kind, "ticket_id": ticket, "message_id": message, "user_id": "ada",
        "payload": {"content": "hello", "timestamp": time}
    }))
}

async fn ask(store: &AnalyticsStore, sql: &str) -> Vec<Vec<Value>> {
    store.reader().query(sql).await.unwrap().rows
}

async fn events_are_stored_and_malformed_entries_become_dead_letters(env: Env) {
    let store = env.store();
    let ingest =
        Ingest::start(&env.queue, Arc::clone(&store), IngestConfig::default()).await.unwrap();
    env.append(&[
        event("TICKET_CREATED", "t1", "m1", "2026-11-15T10:00:00Z"),
        entry(&json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": "t1", "message_id": "m2", "content": "flat"})),
        Fields::new([("data", "not json")]),
        // Text that other databases reject.
        event("MESSAGE_RECEIVED", "t\u{0}1", "m\u{1F600}", "2026-11-15T10:00:01Z"),
        // The outbox delivers at least once.
        event("TICKET_CREATED", "t1", "m1", "2026-11-15T10:00:00Z"),
    ])
    .await;
    env.settled().await;
    ingest.stop().await;

    assert_eq!(ask(&store, "SELECT count(*) AS n FROM events").await, [[json!(4)]]);
    let rows =
        ask(&store, "SELECT event_type, message_id FROM ticket_events ORDER BY message_id").await;
    let expected =
        [["TICKET_CREATED", "m1"], ["MESSAGE_RECEIVED", "m2"], ["MESSAGE_RECEIVED", "m\u{1F600}"]];
    assert_eq!(rows, expected.map(|row| row.map(|text| json!(text)).to_vec()));

    let letters = env.queue.dead_letters(STREAM).await.unwrap();
    let page = letters.browse(&DeadLetterQuery::default()).await.unwrap();
    assert_eq!(page.items.len(), 1);
    assert_eq!(page.items[0].fields.get("data").unwrap().as_ref(), b"not json");

    let mirror = DeadLetterMirror::new(
        env.queue.clone(),
        Arc::clone(&store),
        DeadLetterMirrorConfig::default(),
    );
    assert_eq!(mirror.run_once().await.unwrap(), 1);
    assert_eq!(mirror.run_once().await.unwrap(), 0, "each is copied once");
    let rows = ask(&store, report("dead-letters").unwrap().sql).await;
    assert_eq!((&rows[0][0], &rows[0][2]), (&json!(STREAM), &json!(1)));

    // A crash between writing a dead letter and acknowledging its message creates a copy, possibly much later.
    let dead = StreamName::new(format!("{STREAM}:dlq")).unwrap();
    let copy = page.items[0].fields.clone();
    for round in 0..2 {
        let copies = vec![copy.clone(); 2];
        env.backend.append(&dead, &copies, &Retention::KEEP_ALL).await.unwrap();
        assert_eq!(mirror.run_once().await.unwrap(), 0, "round {round}");
    }
    assert_eq!(ask(&store, report("dead-letters").unwrap().sql).await[0][2], json!(1));
    // Another message with the same reason is not a copy.
    env.append(&[Fields::new([("data", "not json")])]).await;
    let ingest =
        Ingest::start(&env.queue, Arc::clone(&store), IngestConfig::default()).await.unwrap();
    env.settled().await;
    ingest.stop().await;
    assert_eq!(mirror.run_once().await.unwrap(), 1);
    assert_eq!(ask(&store, report("dead-letters").unwrap().sql).await[0][2], json!(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_stored_and_malformed_entries_become_dead_letters_embedded() {
    events_are_stored_and_malformed_entries_become_dead_letters(Env::new(None).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_stored_and_malformed_entries_become_dead_letters_redis() {
    let redis = Redis::start().unwrap();
    events_are_stored_and_malformed_entries_become_dead_letters(Env::new(Some(redis)).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_the_process_while_it_ingests_neither_loses_nor_duplicates_a_row() {
    let seed: u64 =
        env::var("HEADWATER_SEED").map_or_else(|_| any_seed(), |seed| seed.parse().unwrap());
    let count: usize = env::var("HEADWATER_EVENTS").map_or(100_000, |count| count.parse().unwrap());
    println!("HEADWATER_SEED={seed}");
    let mut random = seed;

    let env = Env::new(Some(Redis::start().unwrap())).await;
    let entries: Vec<Fields> = (0..count)
        .map(|n| {
            event(
                "MESSAGE_RECEIVED",
                &format!("t{}", n % 1000),
                &format!("m{n}"),
                "2026-11-15T10:00:00Z",
            )
        })
        .collect();
    env.append(&entries).await;

    let url = env._redis.as_ref().unwrap().url();
    let file = env.file.to_str().unwrap();
    let mut kills = 0;
    loop {
        let lease = if kills == 8 { "10" } else { "1" };
        let settings = [("URL", url.as_str()), ("FILE", file), ("LEASE", lease)];
        let child = Child::spawn_self("role_ingest", &settings).unwrap();
        child.line_after("ingesting", LIMIT).unwrap();
        let life = Duration::from_millis(next(&mut random) % 700);
        // The child reports when everything is settled; until then it is killed at random times.
        if kills == 8 {
            child.line_after("settled", LIMIT).unwrap();
            break;
        }
        let _ = child.line_after("settled", life);
        child.kill9().unwrap();
        kills += 1;
    }

    let store = env.store();
    let rows =
        ask(&store, "SELECT count(*) AS n, count(DISTINCT message_id) AS m FROM events").await;
    // A message that was in flight at five kills in a row is a dead letter. It is a row, too, if a process was killed between
    // storing and acknowledging it.
    let letters = env.queue.dead_letters(STREAM).await.unwrap();
    let page = letters.browse(&DeadLetterQuery::default()).await.unwrap();
    assert!(page.items.len() <= kills / 5, "seed {seed}: {:?}", page.items);
    let mut dead = 0;
    for letter in &page.items {
        let data = letter.fields.get("data").expect("it was not replayed");
        let data: Value = serde_json::from_slice(data).unwrap();
        let id = data["message_id"].as_str().unwrap();
        let find = format!("SELECT count(*) AS n FROM events WHERE message_id = '{id}'");
        dead += usize::from(ask(&store, &find).await == [[json!(0)]]);
    }
    let stored = json!(count - dead);
    assert_eq!(rows, [[stored.clone(), stored]], "seed {seed}: {dead} dead letters without a row");
}

fn any_seed() -> u64 {
    std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as u64
}

/// The next number of a small generator (splitmix64).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Ingests until it is killed or everything is settled.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by killing_the_process_while_it_ingests_neither_loses_nor_duplicates_a_row"]
async fn role_ingest() {
    let backend = connect(&env::var("URL").unwrap(), &Options::default()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = PathBuf::from(env::var("FILE").unwrap());
    let env = Env { queue: queue(&backend), backend, file, _folder: folder, _redis: None };
    // Small batches, so that kills hit many transactions.
    let config =
        IngestConfig { batch: 500, linger: Duration::from_millis(1), ..IngestConfig::default() };
    let ingest = Ingest::start(&env.queue, env.store(), config).await.unwrap();
    println!("ingesting");
    env.settled().await;
    println!("settled");
    ingest.stop().await;
}

#[test]
fn a_delayed_entry_is_stored_after_later_ones() {
    let folder = tempfile::tempdir().unwrap();
    let store = AnalyticsStore::open(&folder.path().join("w.duckdb")).unwrap();
    let at = |ms: u64| {
        let fields = event("MESSAGE_RECEIVED", "t", &format!("m{ms}"), "2026-11-15T10:00:00Z");
        TicketEventRow::read(EntryId::new(ms, 0), &fields).unwrap()
    };
    let stored = |rows, duplicates| StoredBatch { rows, duplicates };
    assert_eq!(store.store(&[at(1), at(3), at(3)]).unwrap(), stored(2, 1));
    // 2 is below the position and new; 1 is below it and already stored.
    assert_eq!(store.store(&[at(1), at(2), at(4)]).unwrap(), stored(2, 1));
    drop(store);
    let store = AnalyticsStore::open(&folder.path().join("w.duckdb")).unwrap();
    assert_eq!(store.store(&[at(1), at(2), at(3), at(4)]).unwrap(), stored(0, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rebuild_replaces_all_rows_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let store = AnalyticsStore::open(&folder.path().join("w.duckdb")).unwrap();
    let from_stream = |ms: u64| {
        let fields = event("MESSAGE_RECEIVED", "t", &format!("m{ms}"), "2026-11-15T10:00:00Z");
        TicketEventRow::read(EntryId::new(ms, 0), &fields).unwrap()
    };
    let from_sql = |ms: u64| TicketEventRow { entry: None, ..from_stream(ms) };
    store.store(&[from_stream(1), from_stream(2)]).unwrap();
    let count =
        "SELECT (SELECT count(*) FROM events) AS rows, count(*) AS shown FROM ticket_events";

    let broken = AnalyticsError::Query("the database is unavailable".to_owned());
    let keep_from = Timestamp::from_millis(100);
    store.rebuild(keep_from, [Ok(vec![from_sql(1)]), Err(broken)]).unwrap_err();
    assert_eq!(ask(&store, count).await, [[json!(2), json!(2)]], "unchanged");

    let batches = [Ok(vec![from_sql(1), from_sql(2)]), Ok(vec![from_sql(3)])];
    let rebuilt = store.rebuild(keep_from, batches).unwrap();
    assert_eq!(rebuilt, RebuildReport { removed: 2, stored: 3 });
    // The stream delivers an event that the rebuild read from SQL: it is shown once.
    store.store(&[from_stream(2), from_stream(3), from_stream(4)]).unwrap();
    assert_eq!(ask(&store, count).await, [[json!(6), json!(4)]]);

    // Recent rows are kept: another program wrote them, and SQL may not have them yet.
    store.store(&[from_stream(200)]).unwrap();
    let rebuilt = store.rebuild(keep_from, [Ok(vec![from_sql(1)])]).unwrap();
    assert_eq!(rebuilt, RebuildReport { removed: 6, stored: 1 });
    assert_eq!(ask(&store, count).await, [[json!(2), json!(2)]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_writes_go_on_between_the_batches_of_a_rebuild() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.duckdb");
    let store = AnalyticsStore::open(&path).unwrap();
    let row = |ms: u64, entry| {
        let fields = event("MESSAGE_RECEIVED", "t", &format!("m{ms}"), "2026-11-15T10:00:00Z");
        let row = TicketEventRow::read(EntryId::new(ms, 0), &fields).unwrap();
        if entry { row } else { TicketEventRow { entry: None, ..row } }
    };
    store.store(&[row(1, true)]).unwrap();
    let batches = (1..=3).map(|ms| {
        // The ingestion stores an event while the rebuild reads its next page.
        assert_eq!(store.store(&[row(100 + ms, true)]).unwrap().rows, 1);
        Ok(vec![row(ms, false)])
    });
    let rebuilt = store.rebuild(Timestamp::from_millis(100), batches).unwrap();
    assert_eq!(rebuilt, RebuildReport { removed: 1, stored: 3 });
    let shown =
        "SELECT (SELECT count(*) FROM events) AS rows, count(*) AS shown FROM ticket_events";
    assert_eq!(ask(&store, shown).await, [[json!(6), json!(6)]]);
    drop(store);
    let store = AnalyticsStore::open(&path).unwrap();
    assert_eq!(ask(&store, shown).await, [[json!(6), json!(6)]], "after a restart");
    assert_eq!(store.store(&[row(103, true), row(104, true)]).unwrap().rows, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_report_returns_correct_results() {
    let folder = tempfile::tempdir().unwrap();
    let store = AnalyticsStore::open(&folder.path().join("w.duckdb")).unwrap();
    for report in REPORTS.iter().filter(|report| !report.is_from_database()) {
        let empty = store.reader().query(report.sql).await.unwrap();
        assert!(empty.column(report.chart.label).is_some(), "{}", report.name);
        assert!(report.chart.bars.iter().all(|bar| empty.column(bar).is_some()), "{}", report.name);
    }

    let at = |second: u64| {
        Timestamp::from_rfc3339("2026-11-15T10:00:00Z").unwrap().after(Duration::from_secs(second))
    };
    let mut events = Vec::new();
    // The last two are opened by another program with only a message, and get a second message a day later.
    let (day_long, opened) = (24 * 60 * 60, ["TICKET_CREATED", "MESSAGE_RECEIVED"]);
    for ticket in 0..4_u64 {
        let event = |kind: &str, second, run| TicketEventRow {
            entry: None,
            event_type: kind.to_owned(),
            ticket_id: format!("t{ticket}"),
            message_id: Some(format!("{kind}{ticket}at{second}")),
            user_id: None,
            content: None,
            occurred_at: at(second),
            run,
        };
        let run = RunMetrics {
            events: Some(2),
            tokens_in: Some(100),
            tokens_out: Some(10),
            cost: Some(0.25),
        };
        events.push(event(opened[usize::from(ticket >= 2)], 0, RunMetrics::default()));
        events.push(event("MESSAGE_RECEIVED", day_long, RunMetrics::default()));
        events.push(event("AI_RESPONSE_GENERATED", 1 + ticket, run));
    }
    store.rebuild(Timestamp::from_millis(0), [Ok(events)]).unwrap();
    let day = json!("2026-11-15");
    let rows = |name| {
        let store = &store;
        async move { ask(store, report(name).unwrap().sql).await }
    };
    assert_eq!(rows("tickets-per-day").await, [[day.clone(), json!(4)]]);
    assert_eq!(rows("first-response").await, [[day, json!(4), json!(2.5), json!(3.85)]]);
    assert_eq!(rows("events-per-run").await, [[json!(2), json!(4)]]);
    let table = store.reader().query(report("first-response").unwrap().sql).await.unwrap();
    assert!(
        svg("First response", &report("first-response").unwrap().chart, &table).contains("3.85")
    );
}

#[test]
fn a_file_in_use_by_another_process_is_rejected_with_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("w.duckdb");
    let child = Child::spawn_self("role_hold_file", &[("FILE", file.to_str().unwrap())]).unwrap();
    child.line_after("open", LIMIT).unwrap();
    for error in
        [AnalyticsStore::open(&file).unwrap_err(), AnalyticsReader::open(&file).unwrap_err()]
    {
        assert!(matches!(error, AnalyticsError::InUse { .. }), "{error}");
        assert!(error.to_string().contains("or stop that process"), "{error}");
    }
    child.kill9().unwrap();
    AnalyticsStore::open(&file).unwrap();
    AnalyticsReader::open(&file).unwrap();
}

/// Keeps a file open until it is killed.
#[test]
#[ignore = "started by a_file_in_use_by_another_process_is_rejected_with_the_next_step"]
fn role_hold_file() {
    let _store = AnalyticsStore::open(Path::new(&env::var("FILE").unwrap())).unwrap();
    println!("open");
    std::thread::sleep(LIMIT);
}

#[test]
fn a_file_that_is_not_a_duckdb_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("w.duckdb");
    let error = AnalyticsReader::open(&file).unwrap_err();
    assert!(matches!(error, AnalyticsError::Missing { .. }), "{error}");
    std::fs::write(&file, "something else").unwrap();
    assert!(matches!(AnalyticsStore::open(&file), Err(AnalyticsError::Store { .. })));
    assert_eq!(std::fs::read(&file).unwrap(), b"something else");
}

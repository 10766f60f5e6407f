//! Measures reports, ingestion and rebuilds of a large file: `cargo bench -p headwater-analytics --all-features --bench reports`.
//!
//! `HEADWATER_ROWS` sets the number of events (default 1,000,000): three per ticket, and every tenth delivered twice.
//! `HEADWATER_REBUILD_ROWS` sets how many a rebuild stores in place of them (default 1,000,000).
//! Prints the size of the file, the time of every report, rows per second of ingestion and rebuild, and for each step the most
//! memory that the process had so far and the most bytes that DuckDB spilled to disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use duckdb::Connection;
use headwater_analytics::{AnalyticsStore, REPORTS, Result, RunMetrics, TicketEventRow};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;

/// Rows of a batch, as the server reads them from SQL.
const BATCH: u64 = 1000;
/// Rows that DuckDB inserts at once.
const INSERT: u64 = 10_000_000;
/// Batches that are ingested.
const INGESTED: u64 = 100;
/// Time between two events.
const INTERVAL: Duration = Duration::from_millis(500);

#[tokio::main]
async fn main() {
    let number = |name: &str| {
        env::var(name).map_or(1_000_000, |rows| rows.parse::<u64>().expect("a number"))
    };
    let (rows, rebuilt) = (number("HEADWATER_ROWS"), number("HEADWATER_REBUILD_ROWS"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("w.duckdb");
    drop(AnalyticsStore::open(&path).expect("creates the tables"));
    let started = Instant::now();
    fill(&path, rows);
    println!("filled with {rows} rows in {:.0} s", started.elapsed().as_secs_f64());
    let bytes = fs::metadata(&path).map_or(0, |file| file.len());
    println!("file: {} MiB", bytes / 1024 / 1024);

    let store = AnalyticsStore::open(&path).expect("opens");
    let usage = Usage::watch(&path);
    let view = "SELECT count(*) AS n, max(length(content)) AS longest FROM ticket_events";
    let last_day = "SELECT event_type, count(*) AS n FROM events
        WHERE occurred_at > (SELECT max(occurred_at) FROM events) - INTERVAL 1 DAY GROUP BY ALL";
    let reports = REPORTS.iter().filter(|report| !report.is_from_database());
    let reports = reports.map(|report| (report.name, report.sql));
    for (name, sql) in reports.chain([("last day", last_day), ("view", view)]) {
        let started = Instant::now();
        let answered = store.reader().query(sql).await;
        let answered = answered
            .map_or_else(|error| error.to_string(), |table| format!("{} rows", table.rows.len()));
        let seconds = started.elapsed().as_secs_f64();
        println!("{name}: {seconds:.2} s, {answered}, {}", usage.take());
    }

    let started = Instant::now();
    for batch in 0..INGESTED {
        let from = rows + batch * BATCH;
        let events: Vec<TicketEventRow> = (from..from + BATCH).map(event).collect();
        assert_eq!(store.store(&events).expect("stored").rows as u64, BATCH);
    }
    let seconds = started.elapsed().as_secs_f64();
    let per_second = (INGESTED * BATCH) as f64 / seconds;
    println!("ingestion: {per_second:.0} rows/s, {}", usage.take());

    let batches = (0..rebuilt / BATCH).map(|batch| -> Result<_> {
        Ok((batch * BATCH..(batch + 1) * BATCH).map(event).collect())
    });
    let started = Instant::now();
    store.rebuild(Timestamp::from_millis(u64::MAX), batches).expect("rebuilt");
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "rebuild: {rebuilt} rows in {seconds:.1} s, {:.0} rows/s, {}",
        rebuilt as f64 / seconds,
        usage.take()
    );
}

/// Stores events like those of [`event`], with random ids, faster than through the store.
fn fill(path: &Path, rows: u64) {
    let connection = Connection::open(path).expect("a file");
    connection.execute_batch("SET memory_limit = '2GiB'").expect("set");
    for from in (0..rows).step_by(INSERT as usize) {
        let to = rows.min(from + INSERT);
        let insert = format!(
            "INSERT INTO events SELECT n + 1, 0,
               ['TICKET_CREATED', 'MESSAGE_RECEIVED', 'AI_RESPONSE_GENERATED'][original % 3 + 1],
               CAST(md5(CAST(original // 3 AS VARCHAR)) AS UUID), CAST(md5(original || '-') AS UUID),
               'user-' || original % 5000, 'My parcel has not arrived, and nobody answers the telephone.',
               make_timestamp_ms(1700000000000 + {} * original), 2, 900, 80, 0.01
             FROM (SELECT range AS n, range - CAST(range % 10 = 9 AS BIGINT) AS original FROM range({from}, {to}))",
            INTERVAL.as_millis()
        );
        connection.execute_batch(&insert).expect("inserted");
    }
    connection.execute_batch("CHECKPOINT").expect("written");
}

/// The memory of this process, and the bytes in the spill directory.
struct Usage {
    spilled: Arc<AtomicU64>,
}

impl Usage {
    /// Looks at the spill directory of a file until the process ends.
    fn watch(file: &Path) -> Self {
        let spilled = Arc::<AtomicU64>::default();
        let (most, directory) =
            (Arc::clone(&spilled), PathBuf::from(format!("{}.tmp", file.display())));
        thread::spawn(move || {
            loop {
                let files = fs::read_dir(&directory).into_iter().flatten().flatten();
                let bytes = files.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
                most.fetch_max(bytes, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(20));
            }
        });
        Self { spilled }
    }

    /// The most memory so far, and the most bytes spilled since the last call.
    fn take(&self) -> String {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = kib.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let spilled = self.spilled.swap(0, Ordering::Relaxed);
        format!("memory {} MiB, spilled {} MiB", kib.unwrap_or(0) >> 10, spilled >> 20)
    }
}

fn event(number: u64) -> TicketEventRow {
    // Every tenth event is the second delivery of the one before.
    let original = if number % 10 == 9 { number - 1 } else { number };
    let kind =
        ["TICKET_CREATED", "MESSAGE_RECEIVED", "AI_RESPONSE_GENERATED"][(original % 3) as usize];
    let at = Timestamp::from_millis(1_700_000_000_000).after(INTERVAL * original as u32);
    TicketEventRow {
        entry: Some(EntryId::new(number + 1, 0)),
        event_type: kind.to_owned(),
        ticket_id: format!("0198c1f4-7a3e-7000-8000-{:012x}", original / 3),
        message_id: Some(format!("0198c1f4-7a3e-7000-9000-{original:012x}")),
        user_id: Some(format!("user-{}", original % 5000)),
        content: Some("My parcel has not arrived, and nobody answers the telephone.".to_owned()),
        occurred_at: at,
        run: RunMetrics {
            events: Some(2),
            tokens_in: Some(900),
            tokens_out: Some(80),
            cost: Some(0.01),
        },
    }
}

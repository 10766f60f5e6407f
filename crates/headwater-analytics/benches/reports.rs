//! Measures rebuilds and reports: `cargo bench -p headwater-analytics --all-features --bench reports`.
//!
//! `HEADWATER_ROWS` sets the number of events (default 1,000,000): three per ticket, and every tenth delivered twice.
//! Prints rows per second of a rebuild, the size of the file, the time of every report, and for each step the most memory
//! that the process had so far and the most bytes that DuckDB spilled to disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use headwater_analytics::{AnalyticsStore, REPORTS, Result, RunMetrics, TicketEventRow};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;

/// Rows of a batch, as the server reads them from SQL.
const BATCH: u64 = 1000;
/// Time between two events.
const INTERVAL: Duration = Duration::from_millis(500);

#[tokio::main]
async fn main() {
    let rows: u64 =
        env::var("HEADWATER_ROWS").map_or(1_000_000, |rows| rows.parse().expect("a number"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("w.duckdb");
    let store = AnalyticsStore::open(&path).expect("opens");
    let usage = Usage::watch(&path);
    for round in ["into an empty file", "of a full file"] {
        let batches = (0..rows / BATCH).map(|batch| -> Result<_> {
            Ok((batch * BATCH..(batch + 1) * BATCH).map(event).collect())
        });
        let started = Instant::now();
        store.rebuild(Timestamp::from_millis(u64::MAX), batches).expect("rebuilt");
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "rebuild {round}: {rows} rows in {seconds:.1} s, {:.0} rows/s, {}",
            rows as f64 / seconds,
            usage.take()
        );
    }
    let bytes = fs::metadata(&path).map_or(0, |file| file.len());
    println!("file: {} MiB", bytes / 1024 / 1024);
    let view = "SELECT count(*) AS n, max(length(content)) AS longest FROM ticket_events";
    let queries = REPORTS.iter().map(|report| (report.name, report.sql)).chain([("view", view)]);
    for (name, sql) in queries {
        let started = Instant::now();
        let answered = store.reader().query(sql).await;
        let answered = answered
            .map_or_else(|error| error.to_string(), |table| format!("{} rows", table.rows.len()));
        let seconds = started.elapsed().as_secs_f64();
        println!("{name}: {seconds:.2} s, {answered}, {}", usage.take());
    }
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

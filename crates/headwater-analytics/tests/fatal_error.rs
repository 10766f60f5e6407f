//! A fatal error of DuckDB: the disk is full while it writes its log. In a program of its own, because the limit of the
//! file size is one of the whole process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use headwater_analytics::{AnalyticsError, AnalyticsStore, RunMetrics, TicketEventRow};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// Signal of a write over the file size limit. Unhandled, it ends the process.
const SIGXFSZ: i32 = 25;

/// Limits the file size of this process, to simulate a full disk; `None` removes the limit.
fn limit_files(bytes: Option<u64>) {
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: bytes.or(maximum), maximum }).unwrap();
}

/// A row with text that does not compress well.
fn row(number: u64) -> TicketEventRow {
    let mut state = number;
    let mut text = String::new();
    while text.len() < 10_000 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(&format!("{state:016x}"));
    }
    TicketEventRow {
        entry: Some(EntryId::new(number, 0)),
        event_type: "MESSAGE_RECEIVED".to_owned(),
        ticket_id: "t".to_owned(),
        message_id: Some(format!("m{number}")),
        user_id: None,
        content: Some(text),
        occurred_at: Timestamp::from_millis(number),
        run: RunMetrics::default(),
    }
}

/// Rows of a batch: 4 MB.
const BATCH: u64 = 400;

#[tokio::test(flavor = "multi_thread")]
async fn the_file_is_opened_again_after_a_fatal_error() {
    let _ignored = signal(SignalKind::from_raw(SIGXFSZ)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = AnalyticsStore::open(&folder.path().join("w.duckdb")).unwrap();

    // Enough for the log, which DuckDB moves into its file from 16 MiB on, until the file becomes too large: that is fatal.
    limit_files(Some(32 * 1024 * 1024));
    let batch =
        |number: u64| (1 + number * BATCH..=(number + 1) * BATCH).map(row).collect::<Vec<_>>();
    let mut batches = 0;
    let mut stored = Ok(());
    while stored.is_ok() && batches < 60 {
        stored = store.store(&batch(batches)).map(drop);
        batches += 1;
    }
    let mut problems = Vec::new();
    for _ in 0..3 {
        let failed = store.store(&batch(batches)).unwrap_err();
        assert!(matches!(failed, AnalyticsError::Store { .. }), "{failed}");
        problems.push(failed.to_string());
        // A query may succeed or fail, but must not keep the failed instance for ever.
        let _ = store.reader().query("SELECT count(*) FROM events").await;
    }
    limit_files(None);
    let seen = format!("{stored:?} {problems:?}");
    assert!(seen.contains("FATAL Error"), "a fatal error after {batches} batches: {seen}");

    // Everything is stored once when it is delivered again.
    for number in 0..=batches {
        store.store(&batch(number)).unwrap();
    }
    let count = store.reader().query("SELECT count(*) AS n FROM events").await.unwrap();
    assert_eq!(count.rows, [[json!((batches + 1) * BATCH)]]);
}

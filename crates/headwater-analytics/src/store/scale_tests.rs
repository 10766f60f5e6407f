//! Reports on many events, with limits that are as small in proportion as those of 10^8 events.

use serde_json::json;

use super::AnalyticsStore;
use crate::report::REPORTS;

/// A hundredth of 10^8 events and of `SPILL_MAX`, and the least memory with which DuckDB works.
const EVENTS: u64 = 1_000_000;
const LIMITS: &str =
    "SET memory_limit = '24MiB'; SET max_temp_directory_size = '82MiB'; SET threads = 1";

#[tokio::test]
async fn reports_work_within_the_limits_of_memory_and_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = AnalyticsStore::open(&folder.path().join("analytics.duckdb")).unwrap();
    let connection = store.reader.file.connect().unwrap();
    // Three events per ticket, a minute per ticket; every tenth is delivered twice.
    let fill = format!(
        "INSERT INTO events SELECT n + 1, 0,
           ['TICKET_CREATED', 'MESSAGE_RECEIVED', 'AI_RESPONSE_GENERATED'][event % 3 + 1],
           lpad(CAST(hash(event // 3) AS VARCHAR), 36, '0'),
           lpad(CAST(hash(event) AS VARCHAR), 36, '0'), 'ada', NULL,
           make_timestamp_ms(20000 * event), 2, 900, 80, 0.01
         FROM (SELECT range AS n, range - CAST(range % 10 = 9 AS BIGINT) AS event FROM range({EVENTS}))"
    );
    connection.execute_batch(&fill).unwrap();
    connection.execute_batch("CHECKPOINT").unwrap();
    connection.execute_batch(LIMITS).unwrap();

    let mut tables = Vec::new();
    for report in REPORTS.iter().filter(|report| !report.is_from_database()) {
        let answered = store.reader().query(report.sql).await;
        tables.push(answered.unwrap_or_else(|error| panic!("{}: {error}", report.name)));
    }

    // The last event of every tenth is another delivery of the one before, so three of its ten tickets have one event less.
    let sum = |at: usize, column: usize| -> u64 {
        tables[at].rows.iter().map(|row| row[column].as_u64().unwrap()).sum()
    };
    let originals = |kind: u64| (0..EVENTS).filter(|n| n % 10 != 9 && n % 3 == kind).count() as u64;
    let opened = (0..EVENTS.div_ceil(3)).filter(|ticket| {
        let sent = |event: u64| event < EVENTS && event % 10 != 9;
        sent(ticket * 3) || sent(ticket * 3 + 1)
    });
    assert_eq!(sum(0, 1), opened.count() as u64, "tickets");
    assert_eq!(tables[2].rows, [[json!(2), json!(originals(2))]], "answers are counted once");
    // An answer is 40 s after its ticket, or 20 s if the event that opened it is missing.
    let full_days = &tables[1].rows[..tables[1].rows.len() - 1];
    assert!(full_days.iter().all(|row| row[2] == json!(40.0)), "{full_days:?}");
    assert_eq!(tables[0].rows.len(), 232, "days");
}

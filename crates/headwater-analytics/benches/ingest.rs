//! Compares the analytics store with DuckDB's plain appender: `cargo bench -p headwater-analytics --all-features`.
//!
//! Both store the same rows in batches of the same size; the store also saves the position and checks for
//! duplicates. Prints rows per second of both, and the ratio (target: 0.7).

use std::time::Instant;

use duckdb::types::{TimeUnit, Value};
use duckdb::{Connection, params};
use headwater_analytics::limits::BATCH_ROWS_MAX;
use headwater_analytics::{AnalyticsStore, RunMetrics, TicketEventRow};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;

const BATCHES: usize = 40;
const ROUNDS: usize = 5;

fn main() {
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let batches: Vec<Vec<TicketEventRow>> = (0..BATCHES).map(events).collect();
        let (raw, sink) = (raw(&batches), sink(&batches));
        let ratio = sink / raw;
        println!(
            "round {round}: appender {raw:.0} rows/s, sink {sink:.0} rows/s, ratio {ratio:.2}"
        );
        ratios.push(ratio);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.2} (target 0.70)", ratios[ROUNDS / 2]);
}

fn events(batch: usize) -> Vec<TicketEventRow> {
    let event = |number: usize| TicketEventRow {
        entry: Some(EntryId::new(1 + batch as u64, number as u64)),
        event_type: "MESSAGE_RECEIVED".to_owned(),
        ticket_id: format!("ticket-{}", number % 1000),
        message_id: Some(format!("message-{batch}-{number}")),
        user_id: Some("ada".to_owned()),
        content: Some("My parcel has not arrived, and nobody answers the telephone.".to_owned()),
        occurred_at: Timestamp::from_millis(1_700_000_000_000 + number as u64),
        run: RunMetrics::default(),
    };
    (0..BATCH_ROWS_MAX).map(event).collect()
}

fn sink(batches: &[Vec<TicketEventRow>]) -> f64 {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = AnalyticsStore::open(&folder.path().join("w.duckdb")).expect("opens");
    per_second(batches, |batch| {
        store.store(batch).expect("stored");
    })
}

fn raw(batches: &[Vec<TicketEventRow>]) -> f64 {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut connection = Connection::open(folder.path().join("raw.duckdb")).expect("a file");
    let table = "CREATE TABLE events (entry_ms UBIGINT, entry_seq UBIGINT, event_type VARCHAR, ticket_id VARCHAR, \
                 message_id VARCHAR, user_id VARCHAR, content VARCHAR, occurred_at TIMESTAMP, run_events UINTEGER, \
                 tokens_in UINTEGER, tokens_out UINTEGER, cost DOUBLE)";
    connection.execute_batch(table).expect("a table");
    per_second(batches, |batch| {
        let transaction = connection.transaction().expect("a transaction");
        let mut appender = transaction.appender("events").expect("an appender");
        for event in batch {
            let entry = event.entry.expect("from a stream");
            let at = Value::Timestamp(TimeUnit::Millisecond, event.occurred_at.as_millis() as i64);
            let row = params![
                entry.ms,
                entry.seq,
                event.event_type,
                event.ticket_id,
                event.message_id,
                event.user_id,
                event.content,
                at,
                event.run.events,
                event.run.tokens_in,
                event.run.tokens_out,
                event.run.cost,
            ];
            appender.append_row(row).expect("appended");
        }
        appender.flush().expect("flushed");
        drop(appender);
        transaction.commit().expect("committed");
    })
}

fn per_second(batches: &[Vec<TicketEventRow>], mut store: impl FnMut(&[TicketEventRow])) -> f64 {
    let started = Instant::now();
    for batch in batches {
        store(batch);
    }
    (batches.len() * BATCH_ROWS_MAX) as f64 / started.elapsed().as_secs_f64()
}

//! Names, labels and meanings of all metrics of this crate.

use std::time::Duration;

use metrics::{counter, histogram};

/// Rows stored. Labels: table.
pub const ROWS: &str = "headwater_analytics_rows_total";
/// Redelivered entries whose row was already stored. Labels: none.
pub const SEEN_BEFORE: &str = "headwater_analytics_seen_before_total";
/// Duration of a transaction in seconds. Labels: none.
pub const COMMIT_LATENCY: &str = "headwater_analytics_commit_latency_seconds";
/// Failed transactions. Labels: none.
pub const COMMIT_ERRORS: &str = "headwater_analytics_commit_errors_total";

pub(crate) fn stored(table: &'static str, rows: usize, duplicates: usize, took: Duration) {
    counter!(ROWS, "table" => table).increment(rows as u64);
    counter!(SEEN_BEFORE).increment(duplicates as u64);
    histogram!(COMMIT_LATENCY).record(took);
}

pub(crate) fn commit_failed() {
    counter!(COMMIT_ERRORS).increment(1);
}

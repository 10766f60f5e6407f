//! Every metric of this crate: its name, its labels, its meaning. All names are here and nowhere else.

use std::time::Duration;

use metrics::{counter, histogram};

/// Rows stored. Labels: table.
pub const ROWS: &str = "headwater_analytics_rows_total";
/// Entries that came again after their row was stored. Labels: none.
pub const SEEN_BEFORE: &str = "headwater_analytics_seen_before_total";
/// Seconds one transaction took. Labels: none.
pub const COMMIT_LATENCY: &str = "headwater_analytics_commit_latency_seconds";
/// Transactions that failed. Labels: none.
pub const COMMIT_ERRORS: &str = "headwater_analytics_commit_errors_total";

pub(crate) fn stored(table: &'static str, rows: usize, seen_before: usize, took: Duration) {
    counter!(ROWS, "table" => table).increment(rows as u64);
    counter!(SEEN_BEFORE).increment(seen_before as u64);
    histogram!(COMMIT_LATENCY).record(took);
}

pub(crate) fn commit_failed() {
    counter!(COMMIT_ERRORS).increment(1);
}

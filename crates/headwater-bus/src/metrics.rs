//! All metrics of this crate: name, labels and meaning.

use std::time::Duration;

use metrics::{counter, gauge, histogram};

/// Events published. Labels: type, result (`stored`, `duplicate`, `spooled`, `local`, `unconfirmed`).
pub const PUBLISHED: &str = "headwater_bus_publish_total";
/// Seconds from the call until the event is stored, without handlers. Labels: type.
pub const PUBLISH_LATENCY: &str = "headwater_bus_publish_latency_seconds";
/// Events that could not be published. Labels: type.
pub const PUBLISH_ERRORS: &str = "headwater_bus_publish_errors_total";
/// Events passed to a handler. Labels: type, kind (`live`, `durable`).
pub const CONSUMED: &str = "headwater_bus_consume_total";
/// Seconds spent in a handler. Labels: type, kind.
pub const CONSUME_LATENCY: &str = "headwater_bus_consume_latency_seconds";
/// Failed handler runs. Labels: type, kind.
pub const CONSUME_ERRORS: &str = "headwater_bus_consume_errors_total";
/// Entries of groups that are delivered and not acknowledged, at the last health check; 0 for groups that are no longer
/// used. Labels: stream (`control`, or `session` for all sessions together), group (its label).
pub const PENDING: &str = "headwater_bus_pending";
/// Parked entries (unknown type, unknown version or invalid payload). Labels: none.
pub const PARKED: &str = "headwater_bus_parked_total";
/// Times the circuit breaker opened. Labels: none.
pub const BREAKER_OPENED: &str = "headwater_bus_breaker_opened_total";
/// Events in the spool. Labels: none.
pub const SPOOLED: &str = "headwater_bus_spooled";
/// Events moved from the spool to their streams. Labels: none.
pub const REPLAYED: &str = "headwater_bus_replayed_total";
/// Times live subscriptions fell so far behind that entries may have been trimmed unread. Labels: none.
pub const LIVE_MISSED: &str = "headwater_bus_live_missed_total";

/// Sessions recovered. Labels: from (`snapshot`, `events`).
pub const RECOVERED: &str = "headwater_bus_sessions_recovered_total";
/// Seconds of a session recovery. Labels: from.
pub const RECOVERY_LATENCY: &str = "headwater_bus_session_recovery_seconds";
/// Snapshots of sessions. Labels: result (`kept`, `superseded`; `failed` for automatic snapshots).
pub const SNAPSHOTS: &str = "headwater_bus_session_snapshots_total";

/// Session entries removed by compaction. Labels: none.
pub const COMPACTED: &str = "headwater_bus_session_entries_compacted_total";
/// Expired sessions. Labels: none.
pub const EXPIRED: &str = "headwater_bus_sessions_expired_total";
/// Sessions created as copies. Labels: of (`fork`, `import`).
pub const COPIED: &str = "headwater_bus_sessions_filled_total";

/// Requests finished by the main loop. Labels: result (`completed`, or the failure category).
pub const REQUESTS: &str = "headwater_bus_main_loop_requests_total";
/// Seconds from the first delivery of a request in this process to its reply. Labels: result.
pub const REQUEST_LATENCY: &str = "headwater_bus_main_loop_request_seconds";
/// Requests running in this process. Labels: none.
pub const REQUESTS_RUNNING: &str = "headwater_bus_main_loop_running";
/// Failed attempts that are retried. Labels: none.
pub const REQUEST_RETRIES: &str = "headwater_bus_main_loop_retries_total";
/// Requests released unfinished. Labels: reason (`stopping`, `lock_lost`, `held`, `unavailable`).
pub const REQUESTS_RELEASED: &str = "headwater_bus_main_loop_given_back_total";
/// Deliveries of requests that already had a reply. Labels: none.
pub const REQUESTS_REPEATED: &str = "headwater_bus_main_loop_repeated_total";
/// Requests submitted. Labels: result (`completed`, `failed`, `timed_out`, `deadline_passed`, `error`).
pub const SUBMITTED: &str = "headwater_bus_main_loop_submitted_total";
/// Seconds from submitting a request to its reply. Labels: result.
pub const SUBMIT_LATENCY: &str = "headwater_bus_main_loop_submit_seconds";
/// Expired replies and reply streams that were removed. Labels: what (`reply`, `stream`).
pub const REPLIES_SWEPT: &str = "headwater_bus_main_loop_swept_total";

pub(crate) fn request_ended(result: &'static str, took: Duration) {
    counter!(REQUESTS, "result" => result).increment(1);
    histogram!(REQUEST_LATENCY, "result" => result).record(took);
}

pub(crate) fn requests_running(by: f64) {
    gauge!(REQUESTS_RUNNING).increment(by);
}

pub(crate) fn request_retried() {
    counter!(REQUEST_RETRIES).increment(1);
}

pub(crate) fn request_released(reason: &'static str) {
    counter!(REQUESTS_RELEASED, "reason" => reason).increment(1);
}

pub(crate) fn request_repeated() {
    counter!(REQUESTS_REPEATED).increment(1);
}

pub(crate) fn submitted(result: &'static str, took: Duration) {
    counter!(SUBMITTED, "result" => result).increment(1);
    histogram!(SUBMIT_LATENCY, "result" => result).record(took);
}

pub(crate) fn replies_swept(replies: u64, streams: u64) {
    counter!(REPLIES_SWEPT, "what" => "reply").increment(replies);
    counter!(REPLIES_SWEPT, "what" => "stream").increment(streams);
}

pub(crate) fn published(event_type: &str, result: &'static str, took: Duration) {
    counter!(PUBLISHED, "type" => event_type.to_owned(), "result" => result).increment(1);
    histogram!(PUBLISH_LATENCY, "type" => event_type.to_owned()).record(took);
}

pub(crate) fn publish_failed(event_type: &str) {
    counter!(PUBLISH_ERRORS, "type" => event_type.to_owned()).increment(1);
}

pub(crate) fn consumed(event_type: &str, kind: &'static str, took: Duration, failed: bool) {
    counter!(CONSUMED, "type" => event_type.to_owned(), "kind" => kind).increment(1);
    histogram!(CONSUME_LATENCY, "type" => event_type.to_owned(), "kind" => kind).record(took);
    if failed {
        counter!(CONSUME_ERRORS, "type" => event_type.to_owned(), "kind" => kind).increment(1);
    }
}

pub(crate) fn pending(kind: &'static str, group: &str, count: u64) {
    gauge!(PENDING, "stream" => kind, "group" => group.to_owned()).set(count as f64);
}

pub(crate) fn live_missed() {
    counter!(LIVE_MISSED).increment(1);
}

pub(crate) fn parked() {
    counter!(PARKED).increment(1);
}

pub(crate) fn breaker_opened() {
    counter!(BREAKER_OPENED).increment(1);
}

pub(crate) fn spooled(events: usize) {
    gauge!(SPOOLED).set(events as f64);
}

pub(crate) fn recovered(from_snapshot: bool, took: Duration) {
    let from = if from_snapshot { "snapshot" } else { "events" };
    counter!(RECOVERED, "from" => from).increment(1);
    histogram!(RECOVERY_LATENCY, "from" => from).record(took);
}

pub(crate) fn snapshot(is_kept: bool) {
    let result = if is_kept { "kept" } else { "superseded" };
    counter!(SNAPSHOTS, "result" => result).increment(1);
}

pub(crate) fn snapshot_failed() {
    counter!(SNAPSHOTS, "result" => "failed").increment(1);
}

pub(crate) fn compacted(entries: u64) {
    counter!(COMPACTED).increment(entries);
}

pub(crate) fn expired() {
    counter!(EXPIRED).increment(1);
}

pub(crate) fn copied(of: &'static str) {
    counter!(COPIED, "of" => of).increment(1);
}

pub(crate) fn replayed(events: usize) {
    counter!(REPLAYED).increment(events as u64);
}

//! Hard limits. A call over a limit fails with [`IssueError::Invalid`](crate::IssueError::Invalid) and has no effect.

use std::time::Duration;

/// Bytes of the payload of one event, of one outbox row, and of the changed fields of one completion.
pub const PAYLOAD_BYTES_MAX: usize = 1024 * 1024;

/// Total bytes of the fields of an issue. A completion that would exceed it is rejected.
pub const FIELDS_BYTES_MAX: usize = PAYLOAD_BYTES_MAX;

/// Nesting depth of JSON. Common JSON parsers stop at 128, and a payload may be wrapped.
pub const JSON_DEPTH_MAX: usize = 100;

/// Characters of one JSON number: enough for every `f64` without exponent.
pub const NUMBER_BYTES_MAX: usize = 400;

/// Exponents of JSON numbers: those of `f64`. PostgreSQL writes numbers out without exponent.
pub const NUMBER_EXPONENT_MIN: i32 = -324;
/// See [`NUMBER_EXPONENT_MIN`].
pub const NUMBER_EXPONENT_MAX: i32 = 308;

/// Bytes of a name: integration, provider, project, issue, event type, source, de-duplication key, worker.
pub const NAME_BYTES_MAX: usize = 512;

/// Bytes of a stored error text; longer texts are truncated.
pub const ERROR_BYTES_MAX: usize = 8 * 1024;

/// Records, claims, heartbeats, completions, failures or settlements in one call.
pub const BATCH_MAX: usize = 256;

/// After a failed batch, items are called one by one until this many calls in a row fail.
pub(crate) const CONSECUTIVE_FAILURES_MAX: usize = 8;

/// Bytes of all payloads in one call.
pub const BATCH_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Maximum number of event logs of one claim.
pub const RUN_EVENTS_MAX: usize = 1000;

/// Default number of event logs of one claim.
pub const RUN_EVENTS_DEFAULT: usize = 200;

/// Bytes of all payloads of one claim; the first event log is always included.
pub const RUN_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Bytes of payloads per claim of a batch, so that the batch stays within [`BATCH_BYTES_MAX`], apart from first event
/// logs.
pub(crate) fn claim_bytes_max(claims: usize) -> usize {
    RUN_BYTES_MAX.min(BATCH_BYTES_MAX / claims.max(1))
}

/// Replies and events that one completion writes to the outbox.
pub const OUTBOX_PER_RUN_MAX: usize = 100;

/// Rows of the outbox taken in one call.
pub const OUTBOX_TAKE_MAX: usize = 256;

/// Delivery targets whose state one call can pass, and that one deliverer tracks.
pub const OUTBOX_TARGETS_MAX: usize = 1000;

/// Maximum pause a receiver can request (`Retry-After`); longer values are cut to it.
pub const DELIVERY_PAUSE_MAX: Duration = Duration::from_secs(60 * 60);

/// Issues nudged, and issues requeued, in one sweep.
pub const SWEEP_MAX: usize = 1000;

/// Issues in one page of a whole consistency check: small enough that the page ends within the timeout of a call, also with
/// some ten thousand event logs per issue.
pub const CONSISTENCY_PAGE: usize = 200;

/// Issues in a page after a larger one took longer than a call may: it ends in time also with a million event logs per issue.
pub(crate) const CONSISTENCY_PAGE_IF_SLOW: usize = 10;

/// Undelivered outbox rows that a diagnosis of an issue reads.
pub const UNDELIVERED_MAX: usize = 100;

/// Event logs of an issue, counted from the newest one, among which those of its runs are looked for.
pub const RUN_EVENTS_SCANNED_MAX: usize = 10_000;

/// Rows in one page of a listing.
pub const PAGE_MAX: usize = 1000;

/// Minimum TTL of a claim: with less, one slow round trip loses the claim.
pub const CLAIM_TTL_MIN: Duration = Duration::from_millis(50);

/// Maximum TTL of a claim.
pub const CLAIM_TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Default TTL of a claim.
pub const CLAIM_TTL_DEFAULT: Duration = Duration::from_secs(60);

/// Maximum length of a debounce window or a backoff.
pub const DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Minimum time for which a run is deferred. No attempt is counted, so a shorter time could cause a busy loop.
pub const DEFER_MIN: Duration = Duration::from_secs(1);

/// Maximum duration of one wait for the outbox.
pub const WAIT_MAX: Duration = Duration::from_secs(60);

/// Nudges queued for sending; further ones are dropped, and the sweep sends them.
pub const NUDGE_QUEUE_MAX: usize = 10_000;

/// Unread nudges in the stream above which the sweep waits longer before it sends a nudge again.
pub const NUDGES_UNREAD_MAX: u64 = 1000;

/// Unread nudges in the stream from which no more are sent: the sweep passes the other issues to workers directly.
pub const NUDGES_STREAM_MAX: u64 = 100_000;

/// Minimum age of an overdue nudge: with zero, one sweep would never end.
pub const NUDGE_OVERDUE_MIN: Duration = Duration::from_millis(1);

/// Issues in the local queue of a worker; further ones are left to the sweep.
pub const LOCAL_QUEUE_MAX: usize = 100_000;

/// Queued issues that are looked at for the longest wait.
pub const OLDEST_WAIT_ISSUES: usize = 10_000;

/// Concurrent runs of one worker.
pub const CONCURRENT_RUNS_MAX: usize = 10_000;

/// Concurrent outbox deliveries of one deliverer.
pub const CONCURRENT_DELIVERIES_MAX: usize = 1000;

const _: () = assert!(NUDGES_UNREAD_MAX < NUDGES_STREAM_MAX);
const _: () = assert!(PAYLOAD_BYTES_MAX <= RUN_BYTES_MAX);
const _: () = assert!(RUN_BYTES_MAX <= BATCH_BYTES_MAX);
const _: () = assert!(RUN_EVENTS_DEFAULT <= RUN_EVENTS_MAX);
const _: () = assert!(JSON_DEPTH_MAX < 128);

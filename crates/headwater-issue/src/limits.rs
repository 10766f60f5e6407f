//! The maximum of everything.
//!
//! A call that breaks a limit is refused with [`IssueError::Invalid`](crate::IssueError::Invalid) before it has any
//! effect.

use std::time::Duration;

/// Bytes of the payload of one event, of one outbox row, and of the changed fields of one completion.
pub const PAYLOAD_BYTES_MAX: usize = 1024 * 1024;

/// Bytes of all fields of an issue together. A completion that would make them more is refused.
pub const FIELDS_BYTES_MAX: usize = PAYLOAD_BYTES_MAX;

/// Levels of arrays and objects in any JSON we take. Readers of JSON stop at 128, and a payload may be wrapped.
pub const JSON_DEPTH_MAX: usize = 100;

/// Characters of one number in any JSON we take: room for every number of a `f64`, written out.
pub const NUMBER_BYTES_MAX: usize = 400;

/// The exponents of numbers in any JSON we take: those of a `f64`. A store that keeps every digit writes them out.
pub const NUMBER_EXPONENT_MIN: i32 = -324;
/// See [`NUMBER_EXPONENT_MIN`].
pub const NUMBER_EXPONENT_MAX: i32 = 308;

/// Bytes of a name: integration, provider, project, issue, event type, source, de-duplication key, worker.
pub const NAME_BYTES_MAX: usize = 512;

/// Bytes of an error text that is kept; longer ones are cut.
pub const ERROR_BYTES_MAX: usize = 8 * 1024;

/// Records, claims, heartbeats, completions, failures or settlements in one call.
pub const BATCH_MAX: usize = 256;

/// Calls in a row that fail after a shared one did; then it was not the fault of one, and the rest are not tried.
pub(crate) const SINGLE_FAILURES_MAX: usize = 8;

/// Bytes of all payloads in one call.
pub const BATCH_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The most event logs one claim can ask for.
pub const RUN_EVENTS_MAX: usize = 1000;

/// Event logs of one claim if nobody says otherwise.
pub const RUN_EVENTS_DEFAULT: usize = 200;

/// Bytes of all payloads that one claim brings; the first event log comes however large it is.
pub const RUN_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Bytes of payloads that each claim of a batch brings, so that all of them together stay within [`BATCH_BYTES_MAX`], but
/// for first event logs.
pub(crate) fn claim_bytes_max(claims: usize) -> usize {
    RUN_BYTES_MAX.min(BATCH_BYTES_MAX / claims.max(1))
}

/// Replies and events that one completion writes to the outbox.
pub const OUTBOX_PER_RUN_MAX: usize = 100;

/// Rows of the outbox taken in one call.
pub const OUTBOX_TAKE_MAX: usize = 256;

/// Delivery targets whose state one call can name, and that one deliverer remembers.
pub const OUTBOX_TARGETS_MAX: usize = 1000;

/// The longest that a receiver can pause deliveries to it (`Retry-After`); longer values count as this.
pub const DELIVERY_PAUSE_MAX: Duration = Duration::from_secs(60 * 60);

/// Issues nudged, and issues requeued, in one sweep.
pub const SWEEP_MAX: usize = 1000;

/// How long an audit may take, which reads everything.
pub(crate) const AUDIT_DEADLINE: Duration = Duration::from_secs(600);

/// Rows in one page of a listing.
pub const PAGE_MAX: usize = 1000;

/// The shortest life of a claim: below it, one slow round trip loses it.
pub const CLAIM_TTL_MIN: Duration = Duration::from_millis(50);

/// The longest life of a claim without a heartbeat.
pub const CLAIM_TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The life of a claim if nobody says otherwise.
pub const CLAIM_TTL_DEFAULT: Duration = Duration::from_secs(60);

/// The farthest a quiet window or a backoff can put work off.
pub const DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The shortest time that a run is put off for: no attempt is counted, so without it such a run would go on and on at once.
pub const PUT_OFF_MIN: Duration = Duration::from_secs(1);

/// The longest one wait for the outbox lasts.
pub const WAIT_MAX: Duration = Duration::from_secs(60);

/// Nudges that wait to be sent; more are left to the sweep.
pub const NUDGES_WAITING_MAX: usize = 10_000;

/// Nudges in the stream that nobody has read yet; beyond it, the sweep adds none for issues that wait.
pub const NUDGES_UNREAD_MAX: u64 = 1000;

/// The shortest time after which a nudge is overdue: without any, one sweep would never end.
pub const NUDGE_OVERDUE_MIN: Duration = Duration::from_millis(1);

/// Issues that a worker remembers to look at by itself; more are left to the sweep.
pub const AGENDA_MAX: usize = 100_000;

/// Issues that one worker handles at once.
pub const RUNS_AT_ONCE_MAX: usize = 10_000;

/// Deliveries of the outbox under way at once.
pub const DELIVERIES_AT_ONCE_MAX: usize = 1000;

const _: () = assert!(PAYLOAD_BYTES_MAX <= RUN_BYTES_MAX);
const _: () = assert!(RUN_BYTES_MAX <= BATCH_BYTES_MAX);
const _: () = assert!(RUN_EVENTS_DEFAULT <= RUN_EVENTS_MAX);
const _: () = assert!(JSON_DEPTH_MAX < 128);

//! Hard limits. A call over a limit fails and has no effect.

use std::time::Duration;

use headwater_stream::limits as stream;

/// Bytes of an event's payload.
pub const PAYLOAD_BYTES_MAX: usize = stream::PAYLOAD_BYTES_MAX;

/// Bytes of the key prefix.
pub const PREFIX_BYTES_MAX: usize = 32;

/// Bytes of a session id and of a namespace.
pub const SESSION_BYTES_MAX: usize = 64;

/// Bytes of an event id.
pub const EVENT_ID_BYTES_MAX: usize = 256;

/// Bytes of a request id.
pub const REQUEST_ID_BYTES_MAX: usize = 128;

/// Bytes of an event type name.
pub const TYPE_BYTES_MAX: usize = 200;

/// Events in one batch.
pub const BATCH_MAX: usize = stream::BATCH_MAX;

/// Bytes of all payloads in one batch.
pub const BATCH_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Subscriptions of one bus.
pub const SUBSCRIPTIONS_MAX: usize = 10_000;

/// Streams followed by the live subscriptions of one bus; one read serves all of them.
pub const FOLLOWED_STREAMS_MAX: usize = stream::READ_STREAMS_MAX;

/// Publishes in flight on one bus.
pub const IN_FLIGHT_MAX: usize = 100_000;

/// Parked entries kept for an operator; older ones are trimmed. The original entries stay in their streams.
pub const PARKED_MAX: u64 = 100_000;

/// Unconfirmed events that are tracked, to run their handlers if they turn out to be stored.
pub const UNCONFIRMED_MAX: usize = 10_000;

/// Bytes of memory used by the streams of a bus in memory ([`StreamedBus::in_memory`](crate::StreamedBus::in_memory)).
pub const IN_MEMORY_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Bytes of the events in a spool, which are in memory, too.
pub const SPOOL_BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// Longest dedup window for event ids.
pub const DEDUP_WINDOW_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Folds of one application.
pub const FOLDS_MAX: usize = 100;

/// Bytes of the name of a fold.
pub const FOLD_NAME_BYTES_MAX: usize = 256;

/// Events kept by one fold ([`Folds::all`](crate::Folds::all)).
pub const RETAINED_EVENTS_MAX: usize = 100_000;

/// Approximate snapshot bytes of all events kept by the folds of an application, shared equally. The newest event of
/// each fold is always kept.
pub const RETAINED_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Newest event ids of a session that are tracked to detect duplicates.
pub const SEEN_EVENT_IDS_MAX: usize = 4096;

/// Undecodable entries of a session that are parked. Also the number of unknown types and of invalid payloads that are
/// remembered individually, to be decoded again later.
pub const UNREADABLE_MAX: usize = 256;

/// Entries in one page of a replay.
pub const REPLAY_PAGE_MAX: usize = 2000;
/// Approximate bytes in one page of a replay.
pub const REPLAY_PAGE_BYTES: usize = 8 * 1024 * 1024;

/// Bytes of a snapshot.
pub const SNAPSHOT_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Sets of folds with snapshots in one session.
pub const SNAPSHOT_SETS_MAX: usize = 16;

/// Bytes of one line of an import: fits the largest snapshot with every byte escaped.
pub const IMPORT_LINE_BYTES_MAX: usize = 4 * SNAPSHOT_BYTES_MAX;

/// Sessions in one page of [`Sessions::list`](crate::Sessions::list).
pub const LIST_PAGE_MAX: usize = 1000;

/// Requests executed at once by one process.
pub const CONCURRENT_REQUESTS_MAX: usize = 10_000;

/// Longest execution time of a request.
pub const RUN_TIMEOUT_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Replies awaited at once by one process.
pub const WAITERS_MAX: usize = 100_000;

/// Bytes of the error message of a failed request; longer messages are truncated.
pub const FAILURE_BYTES_MAX: usize = 8 * 1024;

/// Longest time that replies are kept.
pub const REPLY_TTL_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

// A snapshot with full retained events and event ids leaves room for custom folds.
const _: () = assert!(
    RETAINED_BYTES_MAX + SEEN_EVENT_IDS_MAX * (EVENT_ID_BYTES_MAX + 3) < SNAPSHOT_BYTES_MAX * 3 / 4
);

// Ids of request and reply events: a word, the requester, the request.
const _: () =
    assert!("request:".len() + SESSION_BYTES_MAX + 1 + REQUEST_ID_BYTES_MAX <= EVENT_ID_BYTES_MAX);

// A batch of the largest payloads with their other fields fits into one append.
const _: () = assert!(BATCH_BYTES_MAX + BATCH_MAX * 2048 <= stream::BATCH_BYTES_MAX);

//! The maximum of everything.

use std::time::Duration;

use headwater_stream::limits as stream;

/// Bytes of an event's payload.
pub const PAYLOAD_BYTES_MAX: usize = stream::PAYLOAD_BYTES_MAX;

/// Bytes of the prefix of all keys.
pub const PREFIX_BYTES_MAX: usize = 32;

/// Bytes of the id of a session and of the name of a namespace.
pub const SESSION_BYTES_MAX: usize = 64;

/// Bytes of an event's id.
pub const EVENT_ID_BYTES_MAX: usize = 256;

/// Bytes of the id of a request to a main loop.
pub const REQUEST_ID_BYTES_MAX: usize = 128;

/// Bytes of the name of an event type.
pub const TYPE_BYTES_MAX: usize = 200;

/// Events in one batch.
pub const BATCH_MAX: usize = stream::BATCH_MAX;

/// Bytes of all payloads in one batch.
pub const BATCH_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Subscriptions of one bus.
pub const SUBSCRIPTIONS_MAX: usize = 10_000;

/// Streams that the live subscriptions of one bus follow: one read serves them all.
pub const FOLLOWED_STREAMS_MAX: usize = stream::READ_STREAMS_MAX;

/// Publishes of one bus that are under way at once.
pub const IN_FLIGHT_MAX: usize = 100_000;

/// Entries that are kept for an operator because nobody knows their type; older ones go. The entries themselves stay
/// where they are.
pub const PARKED_MAX: u64 = 100_000;

/// Events without an answer from the backend that are remembered, to be handled here if they turn out to be stored.
pub const UNCONFIRMED_MAX: usize = 10_000;

/// Events that wait for one durable subscription of a local bus.
pub const LOCAL_QUEUE_MAX: usize = 10_000;

/// Dead letters that a local bus keeps.
pub const LOCAL_DEAD_LETTERS_MAX: usize = 1000;

/// Ids of published events that a local bus remembers.
pub const LOCAL_IDS_MAX: usize = 10_000;

/// Bytes of memory that the sessions of a local bus may take; more is refused.
pub const LOCAL_SESSION_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Bytes of a spool: it is read whole when it is opened.
pub const SPOOL_BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// The longest time ids of published events are remembered.
pub const DEDUP_WINDOW_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Folds of one application.
pub const FOLDS_MAX: usize = 100;

/// Bytes of the name of a fold.
pub const FOLD_NAME_BYTES_MAX: usize = 256;

/// Events that one fold keeps ([`Folds::all`](crate::Folds::all)).
pub const RETAINED_EVENTS_MAX: usize = 100_000;

/// Bytes of the events that all folds of an application keep as they are, each the same share, about as a snapshot writes
/// them. The newest event of each always stays.
pub const RETAINED_BYTES_MAX: usize = 4 * 1024 * 1024;

/// The newest events of a session by whose ids a second copy of an event is known.
pub const SEEN_EVENT_IDS_MAX: usize = 4096;

/// Unreadable entries of a session that are parked; types that were not registered, and payloads that did not fit, that
/// are remembered one by one, to be tried again.
pub const UNREADABLE_MAX: usize = 256;

/// Entries of a session in one step of a replay, and about how many bytes.
pub const REPLAY_PAGE_MAX: usize = 2000;
/// See [`REPLAY_PAGE_MAX`].
pub const REPLAY_PAGE_BYTES: usize = 8 * 1024 * 1024;

/// Bytes of a snapshot.
pub const SNAPSHOT_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Sets of folds of which a session keeps snapshots.
pub const SNAPSHOT_SETS_MAX: usize = 16;

/// Bytes of one line of an import: the largest snapshot fits, also if all of it has to be escaped.
pub const IMPORT_LINE_BYTES_MAX: usize = 4 * SNAPSHOT_BYTES_MAX;

/// Sessions in one page of a list.
pub const LIST_PAGE_MAX: usize = 1000;

/// Requests that one process carries out at once.
pub const CONCURRENT_REQUESTS_MAX: usize = 10_000;

/// The longest time one request may be carried out.
pub const RUN_TIMEOUT_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Replies that one process waits for at once.
pub const WAITERS_MAX: usize = 100_000;

/// Bytes of what a failed request says of its failure; more is cut off.
pub const FAILURE_BYTES_MAX: usize = 8 * 1024;

/// The longest time replies of main loops are kept.
pub const REPLY_TTL_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

// A snapshot of full folds, with the ids of events beside them, leaves room for folds of the application's own.
const _: () = assert!(
    RETAINED_BYTES_MAX + SEEN_EVENT_IDS_MAX * (EVENT_ID_BYTES_MAX + 3) < SNAPSHOT_BYTES_MAX * 3 / 4
);

// The ids of the events that ask and reply: a word, the requester, the request.
const _: () =
    assert!("request:".len() + SESSION_BYTES_MAX + 1 + REQUEST_ID_BYTES_MAX <= EVENT_ID_BYTES_MAX);

// A batch of the largest payloads, each with its fields around it, is one append.
const _: () = assert!(BATCH_BYTES_MAX + BATCH_MAX * 2048 <= stream::BATCH_BYTES_MAX);

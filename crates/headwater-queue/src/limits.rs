//! Hard limits. A call over a limit fails with [`QueueError::Invalid`](crate::QueueError::Invalid) and has no effect.

use std::time::Duration;

use headwater_stream::limits as stream;

/// Bytes of a topic's name, which is part of keys.
pub const TOPIC_BYTES_MAX: usize = 200;

/// Bytes of a group's name, or of a member's.
pub const GROUP_BYTES_MAX: usize = 100;

/// Bytes of a group's name after escaping: each `:` and `%` counts for three.
pub const GROUP_KEY_BYTES_MAX: usize = 200;

/// Partitions of a topic, so that one read can include all of them.
pub const PARTITIONS_MAX: u16 = 1024;

/// Bytes of a payload.
pub const PAYLOAD_BYTES_MAX: usize = stream::PAYLOAD_BYTES_MAX;

/// Bytes of a key.
pub const KEY_BYTES_MAX: usize = 4096;

/// Bytes of all headers of a message, written as JSON.
pub const HEADERS_BYTES_MAX: usize = 32 * 1024;

/// Bytes of the reason in a dead letter; a longer one is truncated.
pub const REASON_BYTES_MAX: usize = 4096;

/// Resizes of a topic.
pub const RESIZES_MAX: usize = 64;

/// Maximum `refresh` of a topic: how long a producer may use cached metadata.
pub const REFRESH_MAX: Duration = Duration::from_secs(60);
/// Minimum `refresh` of a topic.
pub const REFRESH_MIN: Duration = Duration::from_millis(20);

/// Maximum deadline of a send.
pub const DEADLINE_MAX: Duration = Duration::from_secs(60 * 60);

/// Messages in one batch of a producer.
pub const SEND_BATCH_MAX: usize = 100_000;

/// Bytes of the id of a message.
pub const MESSAGE_ID_BYTES_MAX: usize = stream::NAME_BYTES_MAX;

/// Topics that a producer caches.
pub const PRODUCER_TOPICS_MAX: usize = 10_000;

/// Attempts of a message.
pub const ATTEMPTS_MAX: u32 = 1000;

/// Messages in flight of one subscription.
pub const IN_FLIGHT_MAX: usize = 100_000;

/// Messages of one pull.
pub const PULL_MAX: usize = 1000;

/// Bytes of the payloads of one pull. A pull of large messages has fewer than requested, but at least one.
pub const PULL_BYTES_MAX: usize = 4 * 1024 * 1024;

/// The longest time a pull waits.
pub const PULL_WAIT_MAX: Duration = Duration::from_secs(60);

/// The shortest lease of a pulled message.
pub const LEASE_MIN: Duration = Duration::from_secs(1);

/// The longest lease of a pulled message. Subscriptions with [`Mode::Shared`](crate::Mode::Shared) reclaim what was
/// idle for longer.
pub const LEASE_MAX: Duration = Duration::from_secs(5 * 60);

/// Messages of a group that are delivered and not settled, beyond which nothing more can be pulled.
pub const LEASED_MAX: u64 = 50_000;

/// Blocked messages of one partition: messages that wait for older ones of their key while a topic is resized. Beyond
/// it, the partition is not read until messages are unblocked.
pub const BLOCKED_IDS_MAX: usize = 1_000_000;

/// Items of one page of a listing.
pub const PAGE_MAX: usize = 1000;

/// Bytes of one page. A page of large messages has fewer items than requested, but at least one.
pub const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Entries that a reset counts exactly for its report; beyond it, the count is a lower bound.
pub const COUNTED_MAX: u64 = 10_000;

/// Dead letters that one page of a filtered listing scans.
pub const SCANNED_MAX: usize = 10_000;

/// Dead letter ids in one call.
pub const LETTERS_MAX: usize = 100;

/// Maximum distance of two copies of one dead letter, in dead letters, for them to be listed as one.
pub const COPIES_WITHIN: usize = 256;

/// Topics that a sampler measures; further topics are ignored.
pub const SAMPLED_MAX: usize = 10_000;

// A payload with key, headers, a dead letter's reason and small fields fits into an entry.
const _: () = assert!(
    PAYLOAD_BYTES_MAX + KEY_BYTES_MAX + HEADERS_BYTES_MAX + REASON_BYTES_MAX + 8192
        <= stream::ENTRY_BYTES_MAX
);
const _: () = assert!(PARTITIONS_MAX as usize <= stream::READ_STREAMS_MAX);
// The longest keys contain a topic or member, a group and 64 more bytes; names derived from them fit, too.
const _: () = assert!(TOPIC_BYTES_MAX + GROUP_KEY_BYTES_MAX + 64 < stream::NAME_BYTES_MAX);

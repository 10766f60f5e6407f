//! The maximum of everything.
//!
//! A call that breaks a limit is refused with [`QueueError::Invalid`](crate::QueueError::Invalid) before it has any effect.

use std::time::Duration;

use headwater_stream::limits as stream;

/// Bytes of a topic's name: keys are made of it.
pub const TOPIC_BYTES_MAX: usize = 200;

/// Bytes of a group's name, or of a member's.
pub const GROUP_BYTES_MAX: usize = 100;

/// Bytes of a group's name where each `:` and `%` counts for three, which is what they take in keys.
pub const GROUP_KEY_BYTES_MAX: usize = 200;

/// Partitions of a topic: one read serves them all.
pub const PARTITIONS_MAX: u16 = 1024;

/// Bytes of a payload.
pub const PAYLOAD_BYTES_MAX: usize = stream::PAYLOAD_BYTES_MAX;

/// Bytes of a key.
pub const KEY_BYTES_MAX: usize = 4096;

/// Bytes of all headers of a message, written as JSON.
pub const HEADERS_BYTES_MAX: usize = 32 * 1024;

/// Bytes of the reason in a dead letter; longer ones are cut.
pub const REASON_BYTES_MAX: usize = 4096;

/// Growths of a topic that are remembered.
pub const GROWTHS_MAX: usize = 64;

/// The longest and shortest time a producer may rely on what it knows of a topic.
pub const REFRESH_MAX: Duration = Duration::from_secs(60);
/// See [`REFRESH_MAX`].
pub const REFRESH_MIN: Duration = Duration::from_millis(20);

/// The longest deadline of a send.
pub const DEADLINE_MAX: Duration = Duration::from_secs(60 * 60);

/// Messages in one batch of a producer.
pub const SEND_BATCH_MAX: usize = 100_000;

/// Bytes of the id of a message.
pub const MESSAGE_ID_BYTES_MAX: usize = stream::NAME_BYTES_MAX;

/// Topics whose partitions a producer remembers.
pub const PRODUCER_TOPICS_MAX: usize = 10_000;

/// Tries of a message.
pub const ATTEMPTS_MAX: u32 = 1000;

/// Messages in the hands of one subscription.
pub const IN_FLIGHT_MAX: usize = 100_000;

/// Messages of one partition that wait for older ones of their key while a topic grows: beyond it, no more are read.
/// It takes as many within the time in which a growth settles.
pub const HELD_IDS_MAX: usize = 1_000_000;

/// Items of one page of a listing.
pub const PAGE_MAX: usize = 1000;

/// Bytes of one page: a page of large messages has fewer of them than asked for, and always one.
pub const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Entries that a reset counts one by one to say what it would read again or skip; beyond it, the count is `at least`.
pub const COUNTED_MAX: u64 = 10_000;

/// Dead letters that one page of a filtered listing looks at.
pub const SCANNED_MAX: usize = 10_000;

/// Dead letters that are named in one call.
pub const LETTERS_MAX: usize = 100;

/// How far two copies of one dead letter may lie apart, in dead letters, to be shown as one.
pub const COPIES_WITHIN: usize = 256;

/// Topics that a sampler measures; further ones are not measured.
pub const SAMPLED_MAX: usize = 10_000;

// What surrounds a payload fits into an entry: key, headers, a dead letter's reason and some small fields.
const _: () = assert!(
    PAYLOAD_BYTES_MAX + KEY_BYTES_MAX + HEADERS_BYTES_MAX + REASON_BYTES_MAX + 8192
        <= stream::ENTRY_BYTES_MAX
);
const _: () = assert!(PARTITIONS_MAX as usize <= stream::READ_STREAMS_MAX);
// The longest keys have a topic or a member in them, a group and 64 bytes around them; what a backend derives from a name
// has room there, too.
const _: () = assert!(TOPIC_BYTES_MAX + GROUP_KEY_BYTES_MAX + 64 < stream::NAME_BYTES_MAX);

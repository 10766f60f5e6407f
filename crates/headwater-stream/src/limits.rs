//! Hard limits. A call over a limit fails with [`StreamError::Invalid`](crate::StreamError::Invalid) and has no effect.

use std::time::Duration;

/// Bytes of a name (stream, group, consumer, lease and so on), and of an idempotency id.
pub const NAME_BYTES_MAX: usize = 512;

/// Bytes of a payload that the queue and the bus accept.
pub const PAYLOAD_BYTES_MAX: usize = 1024 * 1024;

/// Bytes of one entry, all field names and values together: a payload and 64 KiB of other fields.
pub const ENTRY_BYTES_MAX: usize = PAYLOAD_BYTES_MAX + 64 * 1024;

/// Fields of one entry.
pub const FIELDS_MAX: usize = 256;

/// Bytes of a retry or a dead letter that is written when an entry is settled. Larger than an entry, so that large entries of
/// other programs can be settled.
pub const FOLLOW_UP_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Fields of a retry or a dead letter that is written when an entry is settled.
pub const FOLLOW_UP_FIELDS_MAX: usize = 3000;

/// Entries in one append, settle or schedule.
pub const BATCH_MAX: usize = 4096;

/// Bytes of all entries in one append, settle or schedule.
pub const BATCH_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The largest `count` a read, range, reclaim or listing accepts.
pub const COUNT_MAX: usize = 10_000;

/// Streams in one read.
pub const READ_STREAMS_MAX: usize = 1024;

/// The longest time a read blocks.
pub const WAIT_MAX: Duration = Duration::from_secs(60);

/// The longest TTL of a lease.
pub const LEASE_TTL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The shortest TTL of a lease: with less, one slow round trip would lose it.
pub const LEASE_TTL_MIN: Duration = Duration::from_millis(50);

/// Leases renewed, released or looked up in one call.
pub const LEASES_MAX: usize = 100_000;

/// The longest delay of a scheduled entry.
pub const DELAY_MAX: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// The longest time a de-duplication id or a set is kept.
pub const KEEP_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// Bytes of a registry value, a set member or a de-duplication id or value.
pub const VALUE_BYTES_MAX: usize = 64 * 1024;

const _: () = assert!(ENTRY_BYTES_MAX <= FOLLOW_UP_BYTES_MAX && FIELDS_MAX < FOLLOW_UP_FIELDS_MAX);
const _: () = assert!(FOLLOW_UP_BYTES_MAX <= BATCH_BYTES_MAX);
const _: () = assert!(LEASE_TTL_MIN.as_millis() < LEASE_TTL_MAX.as_millis());

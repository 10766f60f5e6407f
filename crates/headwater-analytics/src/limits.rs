//! The maximum of everything.

use std::time::Duration;

/// Rows that one transaction stores.
pub const BATCH_ROWS_MAX: usize = headwater_stream::limits::BATCH_MAX;

/// What DuckDB may take of the memory; a query that needs more uses the disk.
pub const MEMORY_MAX: &str = "1GiB";

/// Rows of a query's answer; what is more is cut off, and the answer says so.
pub const ANSWER_ROWS_MAX: usize = 100_000;

/// Bytes of a query's answer, as JSON; what is more is cut off, too.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Bytes of a query's text.
pub const SQL_BYTES_MAX: usize = 64 * 1024;

/// How long a query may take.
pub const QUERY_TIME_MAX: Duration = Duration::from_secs(20);

/// Dead letters that one look copies.
pub const LETTERS_PAGE: usize = 1000;

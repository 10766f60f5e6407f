//! Hard limits of this crate.

use std::time::Duration;

/// Rows per transaction.
pub const BATCH_ROWS_MAX: usize = headwater_stream::limits::BATCH_MAX;

/// Memory limit of DuckDB; a query that needs more spills to disk.
pub const MEMORY_MAX: &str = "1GiB";

/// Threads of DuckDB, fewer on a machine with fewer processors: a report takes no processor from the other services of a larger
/// machine.
pub const THREADS_MAX: usize = 4;

/// Bytes of temporary files of DuckDB, beside its file: a query that needs more fails.
pub const SPILL_MAX: &str = "8GiB";

/// Rows of a query result; a longer one is truncated and marked as such.
pub const ANSWER_ROWS_MAX: usize = 100_000;

/// Bytes of a query result as JSON; a larger one is truncated and marked as such.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Bytes of SQL text.
pub const SQL_BYTES_MAX: usize = 64 * 1024;

/// Time limit of a query, unless the caller sets another.
pub const QUERY_TIME: Duration = Duration::from_secs(20);

/// Dead letters copied per page.
pub const DEAD_LETTERS_PAGE: usize = 1000;

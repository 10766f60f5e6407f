//! The analytics store: a DuckDB file that is written in transactions and queried.
//!
//! Upstream: `ingest`, `dead_letter_mirror` and rebuilds write. Downstream: DuckDB.
//! Guarantees: a batch and its stream position are committed together, so a crash neither loses nor duplicates a row; a
//! query changes nothing and reads no other file. A file that another process has open, or that a newer version has
//! written, is rejected.
//!
//! Calls block; async code uses [`tokio::task::spawn_blocking`].

mod query;
mod schema;
mod write;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use duckdb::{AccessMode, Config, Connection};
use headwater_stream::EntryId;

use crate::error::{AnalyticsError, Result};
use crate::limits::MEMORY_MAX;

pub use write::{DeadLetterRow, RebuildReport, StoredBatch};

/// A DuckDB file opened for writing.
#[derive(Debug)]
pub struct AnalyticsStore {
    writer: Mutex<StoreWriter>,
    reader: AnalyticsReader,
}

/// A DuckDB file opened for queries.
#[derive(Clone, Debug)]
pub struct AnalyticsReader {
    /// Cloned for each query, because a connection runs one query at a time.
    connection: Arc<Mutex<Connection>>,
}

#[derive(Debug)]
struct StoreWriter {
    connection: Connection,
    /// The highest stored entry; every entry above it is new. `None` until it is read, and after a failure.
    position: Option<EntryId>,
}

impl AnalyticsStore {
    /// Opens or creates the file.
    pub fn open(path: &Path) -> Result<Self> {
        let connection = connect(path, AccessMode::ReadWrite)?;
        schema::prepare(&connection, path)?;
        let reader = AnalyticsReader::of(&connection)?;
        Ok(Self { writer: Mutex::new(StoreWriter { connection, position: None }), reader })
    }

    /// A reader for queries, concurrent with writes.
    pub fn reader(&self) -> &AnalyticsReader {
        &self.reader
    }

    fn writer(&self) -> MutexGuard<'_, StoreWriter> {
        // A panic while the lock was held has rolled back the transaction; read the position again.
        self.writer.lock().unwrap_or_else(|poisoned| {
            let mut writer = poisoned.into_inner();
            writer.position = None;
            writer
        })
    }
}

impl AnalyticsReader {
    /// Opens a file that no process has open for writing.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Err(AnalyticsError::Missing { path: path.display().to_string() });
        }
        let connection = connect(path, AccessMode::ReadOnly)?;
        schema::check(&connection, path)?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)) })
    }

    fn of(connection: &Connection) -> Result<Self> {
        let connection =
            connection.try_clone().map_err(|error| failed("open a connection", error))?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)) })
    }
}

fn connect(path: &Path, mode: AccessMode) -> Result<Connection> {
    // Queries are untrusted: no other files, no network, no extensions.
    let config = Config::default()
        .access_mode(mode)
        .and_then(|config| config.enable_external_access(false))
        .and_then(|config| config.enable_autoload_extension(false))
        .and_then(|config| config.max_memory(MEMORY_MAX))
        .map_err(|error| failed("be configured", error))?;
    Connection::open_with_flags(path, config).map_err(|error| {
        let problem = error.to_string();
        if problem.contains("Could not set lock on file") {
            return AnalyticsError::InUse { path: path.display().to_string() };
        }
        if problem.contains("not a valid DuckDB database file") {
            let advice = "remove it and run `headwater analytics rebuild`";
            return failed("open its file", format!("{problem} ({advice})"));
        }
        failed("open its file", problem)
    })
}

fn failed(what: &'static str, problem: impl ToString) -> AnalyticsError {
    AnalyticsError::Store { what, problem: problem.to_string() }
}

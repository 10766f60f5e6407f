//! The DuckDB file: rows go in with the position they came from, in one transaction; questions are answered from it.
//!
//! Upstream: `ingest`, `letters` and rebuilding store. Downstream: DuckDB.
//! Promises: a batch and its position are stored together or not at all, so a crash neither loses nor doubles a row; a
//! query changes nothing and reaches no other file. Refuses: a file that another process has open, or that a newer
//! version has written.
//!
//! Calls block; those of async code go through [`tokio::task::spawn_blocking`].

mod query;
mod schema;
mod store;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use duckdb::{AccessMode, Config, Connection};
use headwater_stream::EntryId;

use crate::error::{AnalyticsError, Result};
use crate::limits::MEMORY_MAX;

pub use store::{DeadLetterRow, Rebuild, Stored};

/// A DuckDB file that this process writes.
#[derive(Debug)]
pub struct Warehouse {
    writer: Mutex<Writer>,
    reader: WarehouseReader,
}

/// A DuckDB file that this process asks.
#[derive(Clone, Debug)]
pub struct WarehouseReader {
    /// Only cloned for each query: a connection serves one at a time.
    connection: Arc<Mutex<Connection>>,
}

#[derive(Debug)]
struct Writer {
    connection: Connection,
    /// The highest entry whose row is stored; every entry above it is new. `None` until it is read, and after a failure.
    position: Option<EntryId>,
}

impl Warehouse {
    /// Opens or creates the file.
    pub fn open(path: &Path) -> Result<Self> {
        let connection = connect(path, AccessMode::ReadWrite)?;
        schema::prepare(&connection, path)?;
        let reader = WarehouseReader::of(&connection)?;
        Ok(Self { writer: Mutex::new(Writer { connection, position: None }), reader })
    }

    /// For questions, beside the writing.
    pub fn reader(&self) -> &WarehouseReader {
        &self.reader
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        // A panic under the lock has rolled its transaction back; the position is read again.
        self.writer.lock().unwrap_or_else(|poisoned| {
            let mut writer = poisoned.into_inner();
            writer.position = None;
            writer
        })
    }
}

impl WarehouseReader {
    /// Opens a file that no process writes.
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
    // Queries are those of strangers: no other file, no network, no extension that was not built in.
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
            let advice = "remove it, and `headwater analytics rebuild` makes it anew";
            return failed("open its file", format!("{problem} ({advice})"));
        }
        failed("open its file", problem)
    })
}

fn failed(what: &'static str, problem: impl ToString) -> AnalyticsError {
    AnalyticsError::Warehouse { what, problem: problem.to_string() }
}

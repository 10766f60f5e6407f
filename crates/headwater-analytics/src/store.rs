//! The analytics store: a DuckDB file that is written in transactions and queried.
//!
//! Upstream: `ingest`, `dead_letter_mirror` and rebuilds write. Downstream: DuckDB.
//! Guarantees: a batch and its stream position are committed together, so a crash neither loses nor duplicates a row; a
//! query changes nothing and reads no other file. A file that another process has open, or that a newer version has
//! written, is rejected. After a fatal error of DuckDB the file is opened again.
//!
//! Calls block; async code uses [`tokio::task::spawn_blocking`].

mod file;
mod query;
#[cfg(test)]
mod scale_tests;
mod schema;
mod write;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::EntryId;

use crate::error::{AnalyticsError, Result};
use file::{FileAccess, FileConnection, ReopenableFile};

pub use write::{DeadLetterRow, RebuildReport, StoredBatch};

/// A DuckDB file opened for writing.
#[derive(Debug)]
pub struct AnalyticsStore {
    /// The highest stored entry; every entry above it is new. `None` until it is read, and after a failure. Locked
    /// during every write.
    position: Mutex<Option<EntryId>>,
    reader: AnalyticsReader,
}

/// A DuckDB file opened for queries.
#[derive(Clone, Debug)]
pub struct AnalyticsReader {
    file: Arc<ReopenableFile>,
}

/// The right to write: one writer at a time.
struct StoreWriter<'a> {
    position: MutexGuard<'a, Option<EntryId>>,
    connection: FileConnection,
}

impl AnalyticsStore {
    /// Opens or creates the file.
    pub fn open(path: &Path) -> Result<Self> {
        let reader = AnalyticsReader::open_as(path, FileAccess::ReadWrite)?;
        Ok(Self { position: Mutex::new(None), reader })
    }

    /// A reader for queries, concurrent with writes.
    pub fn reader(&self) -> &AnalyticsReader {
        &self.reader
    }

    /// Runs a write. If it fails, the position is read again before the next one.
    fn write<T>(&self, body: impl FnOnce(&mut StoreWriter<'_>) -> Result<T>) -> Result<T> {
        // A panic while the lock was held has rolled back the transaction.
        let mut position = self.position.lock().unwrap_or_else(|poisoned| {
            let mut position = poisoned.into_inner();
            *position = None;
            position
        });
        let connection = match self.reader.file.connect() {
            Ok(connection) => connection,
            Err(error) => {
                *position = None;
                return Err(error);
            }
        };
        let mut writer = StoreWriter { position, connection };
        let written = body(&mut writer);
        if let Err(error) = &written {
            *writer.position = None;
            self.reader.file.check_failure(&writer.connection, error);
        }
        written
    }
}

impl AnalyticsReader {
    /// Opens a file that no process has open for writing.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Err(AnalyticsError::Missing { path: path.display().to_string() });
        }
        Self::open_as(path, FileAccess::ReadOnly)
    }

    fn open_as(path: &Path, access: FileAccess) -> Result<Self> {
        Ok(Self { file: Arc::new(ReopenableFile::open(path, access)?) })
    }
}

fn failed(what: &'static str, problem: impl ToString) -> AnalyticsError {
    AnalyticsError::Store { what, problem: problem.to_string() }
}

//! An open DuckDB file, with limits on threads, memory and disk, that is opened again after a fatal error.
//!
//! Upstream: `store`, for every write and query. Downstream: DuckDB.
//! After a fatal error, for example a full disk while DuckDB writes its log, every call of that DuckDB instance fails until the
//! file is opened again. Guarantees: the file is never open twice, so a call fails until the last connection of the failed
//! instance is closed; queries end within their time limit.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;

use duckdb::{AccessMode, Config, Connection};
use tracing::warn;

use super::{failed, schema};
use crate::error::{AnalyticsError, Result};
use crate::limits::{MEMORY_MAX, SPILL_MAX, THREADS_MAX};

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileAccess {
    ReadOnly,
    ReadWrite,
}

/// A DuckDB file.
#[derive(Debug)]
pub(super) struct ReopenableFile {
    path: PathBuf,
    access: FileAccess,
    /// `None` after a failed attempt to open it again.
    instance: Mutex<Option<DatabaseInstance>>,
}

/// An instance of DuckDB. It ends with the last of its connections.
#[derive(Debug)]
struct DatabaseInstance {
    /// Cloned for each use, because a connection runs one query at a time.
    connection: Connection,
    /// Identifies the instance, and counts its connections.
    identity: Arc<()>,
    /// Whether a fatal error has ended it.
    is_invalid: bool,
}

/// A connection to the current instance.
#[derive(Debug)]
pub(super) struct FileConnection {
    // Closed before it is no longer counted.
    connection: Connection,
    identity: Arc<()>,
}

impl std::ops::Deref for FileConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl std::ops::DerefMut for FileConnection {
    fn deref_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }
}

impl ReopenableFile {
    pub(super) fn open(path: &Path, access: FileAccess) -> Result<Self> {
        let instance = Mutex::new(Some(DatabaseInstance::open(path, access)?));
        Ok(Self { path: path.to_owned(), access, instance })
    }

    /// A new connection. Opens the file again if a fatal error has ended the last instance.
    pub(super) fn connect(&self) -> Result<FileConnection> {
        let mut instance = self.instance();
        if let Some(invalid) = instance.as_ref().filter(|instance| instance.is_invalid) {
            if Arc::strong_count(&invalid.identity) > 1 {
                let problem = "calls from before a fatal error have not ended yet; retry later";
                return Err(failed("open its file again", problem));
            }
            // Closed before it is opened again: a failed attempt leaves it closed.
            *instance = None;
        }
        let open = match &mut *instance {
            Some(open) => open,
            none => {
                let opened = DatabaseInstance::open(&self.path, self.access)?;
                warn!(path = %self.path.display(), "DuckDB file opened again after a fatal error");
                none.insert(opened)
            }
        };
        let connection =
            open.connection.try_clone().map_err(|error| failed("open a connection", error))?;
        Ok(FileConnection { connection, identity: Arc::clone(&open.identity) })
    }

    /// Looks at the error of a call: after a fatal one, the next [`connect`](Self::connect) opens the file again.
    pub(super) fn check_failure(&self, connection: &FileConnection, error: &AnalyticsError) {
        if !is_fatal(error) {
            return;
        }
        let mut instance = self.instance();
        let is_same =
            |open: &&mut DatabaseInstance| Arc::ptr_eq(&open.identity, &connection.identity);
        if let Some(open) = instance.as_mut().filter(is_same).filter(|open| !open.is_invalid) {
            open.is_invalid = true;
            warn!(path = %self.path.display(), %error, "fatal error of DuckDB; its file will be opened again");
        }
    }

    fn instance(&self) -> MutexGuard<'_, Option<DatabaseInstance>> {
        self.instance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DatabaseInstance {
    fn open(path: &Path, access: FileAccess) -> Result<Self> {
        let connection = open(path, access)?;
        match access {
            FileAccess::ReadOnly => schema::check(&connection, path)?,
            FileAccess::ReadWrite => schema::prepare(&connection, path)?,
        }
        Ok(Self { connection, identity: Arc::new(()), is_invalid: false })
    }
}

/// Whether DuckDB refuses all further calls after this error.
fn is_fatal(error: &AnalyticsError) -> bool {
    let AnalyticsError::Store { problem, .. } = error else { return false };
    let of_kind = |kind: &str| problem.starts_with(kind);
    of_kind("FATAL Error") || of_kind("INTERNAL Error") || problem.contains("has been invalidated")
}

fn open(path: &Path, access: FileAccess) -> Result<Connection> {
    let mode = match access {
        FileAccess::ReadOnly => AccessMode::ReadOnly,
        FileAccess::ReadWrite => AccessMode::ReadWrite,
    };
    let threads = available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let spill_directory = format!("{}.tmp", path.display());
    // Queries are untrusted: no other files, no network, no extensions. Without external access the spill directory cannot be set
    // any more, so it comes first.
    let config = Config::default()
        .access_mode(mode)
        .and_then(|config| config.with("temp_directory", &spill_directory))
        .and_then(|config| config.enable_external_access(false))
        .and_then(|config| config.enable_autoload_extension(false))
        .and_then(|config| config.max_memory(MEMORY_MAX))
        .and_then(|config| config.with("threads", threads.to_string()))
        .and_then(|config| config.with("max_temp_directory_size", SPILL_MAX))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(connection: &Connection, name: &str) -> String {
        let sql = format!("SELECT current_setting('{name}')::VARCHAR");
        connection.query_row(&sql, [], |row| row.get(0)).unwrap()
    }

    #[test]
    fn threads_memory_and_spilled_bytes_are_limited() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("analytics.duckdb");
        for access in [FileAccess::ReadWrite, FileAccess::ReadOnly] {
            let file = ReopenableFile::open(&path, access).unwrap();
            let connection = file.connect().unwrap();
            let threads: usize = setting(&connection, "threads").parse().unwrap();
            assert!((1..=THREADS_MAX).contains(&threads), "{threads}");
            assert_eq!(setting(&connection, "temp_directory"), format!("{}.tmp", path.display()));
            assert_eq!(setting(&connection, "max_temp_directory_size"), "8.0 GiB");
            assert_eq!(setting(&connection, "memory_limit"), "1.0 GiB");
        }
    }

    /// A query that needs more memory than the limit writes to the spill directory; more than its limit is an error.
    #[test]
    fn a_large_query_spills_to_disk_up_to_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("analytics.duckdb");
        let file = ReopenableFile::open(&path, FileAccess::ReadWrite).unwrap();
        let connection = file.connect().unwrap();
        connection.execute_batch("SET memory_limit = '32MiB'; SET threads = 1").unwrap();
        let sql = "SELECT count(*) FROM (SELECT range AS n, repeat('x', 100) || range AS text FROM range(1000000)
                   ORDER BY hash(range), text)";
        let count = || connection.query_row(sql, [], |row| row.get::<_, i64>(0));
        assert_eq!(count().unwrap(), 1_000_000);
        connection.execute_batch("SET max_temp_directory_size = '1MiB'").unwrap();
        let error = count().unwrap_err().to_string();
        assert!(error.contains("max_temp_directory_size"), "{error}");
    }

    #[test]
    fn the_file_is_opened_again_when_the_calls_of_the_failed_instance_have_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("analytics.duckdb");
        let file = ReopenableFile::open(&path, FileAccess::ReadWrite).unwrap();
        let (failing, other) = (file.connect().unwrap(), file.connect().unwrap());
        file.check_failure(&failing, &failed("store events", "IO Error: not fatal"));
        drop(file.connect().expect("the instance is still good"));
        let fatal = failed("store events", "FATAL Error: the disk is full");
        file.check_failure(&failing, &fatal);
        drop(failing);
        let refused = file.connect().unwrap_err().to_string();
        assert!(refused.contains("retry later"), "{refused}");
        drop(other);
        let reopened = file.connect().unwrap();
        let count = "SELECT count(*) FROM events";
        assert_eq!(reopened.query_row(count, [], |row| row.get::<_, i64>(0)).unwrap(), 0);
        // A late error of the failed instance does not end the new one.
        file.check_failure(
            &FileConnection { connection: reopened.try_clone().unwrap(), identity: Arc::new(()) },
            &fatal,
        );
        drop(file.connect().expect("the new instance is good"));
    }

    #[test]
    fn only_errors_that_end_the_instance_are_fatal() {
        let store = |problem: &str| failed("store events", problem);
        assert!(is_fatal(&store("FATAL Error: Failed to write the log")));
        assert!(is_fatal(&store(
            "database has been invalidated because of a previous fatal error"
        )));
        assert!(!is_fatal(&store("IO Error: disk full")));
        assert!(!is_fatal(&AnalyticsError::Query("FATAL Error: made up".to_owned())));
    }
}

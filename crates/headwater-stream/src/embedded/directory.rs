//! The directory of a durable backend: its files and its lock.
//!
//! The process that has the directory open holds a lock on `lock`. `00000001.log` and so on are the log;
//! `snapshot-00000007` replaces all log files before `00000007.log`. Files with other names are ignored.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Result, StreamError};

/// A directory that this process has locked.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
}

/// The numbers of the files in the directory, sorted.
#[derive(Debug, Default)]
pub(super) struct DirectoryListing {
    pub(super) logs: Vec<u64>,
    pub(super) snapshots: Vec<u64>,
    /// Temporary snapshots and log copies left by a crash.
    pub(super) unfinished: Vec<PathBuf>,
}

impl Directory {
    /// Creates the directory if necessary and locks it.
    pub(super) fn open(path: &Path) -> Result<(Self, File)> {
        let directory = Self { path: path.to_owned() };
        let failed = |error| unavailable(path, "could not be opened", error);
        if !path.is_dir() {
            fs::create_dir_all(path).map_err(failed)?;
            if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                sync_directory(parent).map_err(failed)?;
            }
        }
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join("lock"))
            .map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => Ok((directory, lock)),
            Err(TryLockError::WouldBlock) => {
                Err(StreamError::Locked { directory: path.display().to_string() })
            }
            Err(TryLockError::Error(error)) => Err(unavailable(path, "could not be locked", error)),
        }
    }

    pub(super) fn log(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:08}.log"))
    }

    pub(super) fn snapshot(&self, number: u64) -> PathBuf {
        self.path.join(format!("snapshot-{number:08}"))
    }

    pub(super) fn unfinished_snapshot(&self, number: u64) -> PathBuf {
        self.path.join(format!("snapshot-{number:08}.tmp"))
    }

    pub(super) fn unfinished_log(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:08}.log.tmp"))
    }

    pub(super) fn list(&self) -> Result<DirectoryListing> {
        let mut listing = DirectoryListing::default();
        let failed = |error| unavailable(&self.path, "could not be listed", error);
        for file in fs::read_dir(&self.path).map_err(failed)? {
            let path = file.map_err(failed)?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if let Some(number) = name.strip_suffix(".log").and_then(number) {
                listing.logs.push(number);
            } else if name.strip_suffix(".log.tmp").and_then(number).is_some() {
                listing.unfinished.push(path);
            } else if let Some(rest) = name.strip_prefix("snapshot-") {
                if let Some(number) = number(rest) {
                    listing.snapshots.push(number);
                } else if rest.strip_suffix(".tmp").and_then(self::number).is_some() {
                    listing.unfinished.push(path);
                }
            }
        }
        listing.logs.sort_unstable();
        listing.snapshots.sort_unstable();
        Ok(listing)
    }

    /// Makes created, renamed and removed file names durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        sync_directory(&self.path)
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn number(digits: &str) -> Option<u64> {
    let is_numbered = digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_numbered.then(|| digits.parse().ok()).flatten()
}

/// An I/O error that names the file or directory.
pub(super) fn unavailable(path: &Path, problem: &str, error: io::Error) -> StreamError {
    StreamError::unavailable(format!("`{}` {problem}: {error}", path.display()), error)
}

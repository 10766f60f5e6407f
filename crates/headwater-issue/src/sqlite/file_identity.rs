//! Checks that the database file is still the one that was opened.
//!
//! Writes to a file that was deleted or replaced while open succeed, and are lost when the process ends.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sqlx::Error;

/// Path, device and inode of the opened file; `None` for a database in memory.
#[derive(Clone, Debug)]
pub(super) struct FileIdentity(Option<Arc<(PathBuf, (u64, u64))>>);

impl FileIdentity {
    /// Reads the identity of the file at `path`, which was just opened. `None`: the database is in memory.
    pub(super) fn of(path: Option<&Path>) -> Result<Self, Error> {
        let Some(path) = path else { return Ok(Self(None)) };
        let identity = identity(path).map_err(Error::Io)?;
        Ok(Self(Some(Arc::new((path.to_owned(), identity)))))
    }

    /// Fails if the path no longer leads to the opened file: its changes would be lost.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Some((path, opened)) = self.0.as_deref() else { return Ok(()) };
        let problem = match identity(path) {
            Ok(found) if found == *opened => return Ok(()),
            Ok(_) => "was replaced by another file".to_owned(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => "was deleted".to_owned(),
            Err(error) => format!("cannot be read ({error})"),
        };
        Err(Error::Io(std::io::Error::other(format!(
            "the database file `{}` {problem} while it was open; stop this process, restore the file, then start again",
            path.display()
        ))))
    }
}

/// Device and inode.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

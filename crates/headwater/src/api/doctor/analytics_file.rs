//! Checks the size of the DuckDB file of analytics, which has no retention.
//!
//! Upstream: `mod.rs`. Downstream: the file system. Guarantees: the file is not opened, because only one process can.

use std::fs;
use std::io::{Error, ErrorKind};
use std::path::Path;

use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::api::doctor::{Finding, MIB, check_timeout};
use crate::config::Settings;

/// Size above which the file is a warning: some 2.5 * 10^8 events (docs/analytics.md).
const LARGE_BYTES: u64 = 10 * 1024 * MIB;

/// Checks the file; `None` if there is none.
pub(super) async fn check(settings: &Settings) -> Option<Finding> {
    let path = settings.analytics.path.clone()?;
    let shown = path.display().to_string();
    let size = spawn_blocking(move || bytes_with_log(&path));
    let bytes = match timeout(check_timeout(settings), size).await {
        Ok(Ok(Ok(bytes))) => bytes,
        Ok(Ok(Err(error))) if error.kind() == ErrorKind::NotFound => return None,
        Ok(Ok(Err(error))) => {
            return Some(Finding::warning("analytics", format!("`{shown}`: {error}"), ""));
        }
        Ok(Err(_)) | Err(_) => {
            let found = format!("skipped: the disk of `{shown}` is too slow");
            return Some(Finding::warning("analytics", found, ""));
        }
    };
    let found = format!("`{shown}` has {} MiB", bytes / MIB);
    if bytes <= LARGE_BYTES {
        return Some(Finding::ok("analytics", found));
    }
    Some(Finding::warning(
        "analytics",
        format!("{found} and no retention: it grows with every event"),
        "stop the server, move the file away and run `headwater analytics rebuild`, which stores the events that are still in \
         the database (`retention.events`); or set `analytics.path` to an empty value",
    ))
}

/// Size of the file and of its write-ahead log.
fn bytes_with_log(path: &Path) -> Result<u64, Error> {
    let file = fs::metadata(path)?.len();
    let mut log = path.as_os_str().to_owned();
    log.push(".wal");
    match fs::metadata(log) {
        Ok(log) => Ok(file + log.len()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(file),
        Err(error) => Err(error),
    }
}

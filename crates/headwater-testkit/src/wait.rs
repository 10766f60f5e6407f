//! Polling with a deadline.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Timeout for a server to start, stop or answer.
pub(crate) const SERVER_LIMIT: Duration = Duration::from_secs(90);

const POLL_EVERY: Duration = Duration::from_millis(5);

/// Waits until `condition` holds; fails with `what` after `limit`.
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    poll(what, limit, || Ok(condition().then_some(())))
}

/// Calls `probe` until it returns a value. An error of `probe` ends the wait.
pub(crate) fn poll<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("timed out after {limit:?} waiting for {what}");
        }
        thread::sleep(POLL_EVERY);
    }
}

/// Ignores poisoning, so that cleanup works after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

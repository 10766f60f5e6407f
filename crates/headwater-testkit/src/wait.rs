//! Polling with a deadline, which is what tests do instead of sleeping.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How long a server may take to start, to stop or to answer before that is an error.
pub(crate) const SERVER_LIMIT: Duration = Duration::from_secs(90);

const POLL_EVERY: Duration = Duration::from_millis(5);

/// Waits until `condition` holds; an error that names `what` if it does not within `limit`.
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    poll(what, limit, || Ok(condition().then_some(())))
}

/// Asks `probe` until it gives a value. An error of `probe` ends the wait at once.
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
            bail!("waited {limit:?} in vain for: {what}");
        }
        thread::sleep(POLL_EVERY);
    }
}

/// Locks also after a panic elsewhere: cleaning up must work then, too.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

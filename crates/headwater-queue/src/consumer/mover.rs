//! The mover: brings delayed messages back to their partition when they are due.
//!
//! Upstream: every subscription names the delay sets of its topic. Downstream: the backend moves what is due in one
//! atomic step, so it does no harm that several processes do the same.
//! Promises: what is due is moved at once by somebody, as long as anybody subscribes to its topic, also while something
//! else is due whose stream takes nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use headwater_stream::{Backend, DelayName, StreamError};
use tokio::task::JoinHandle;
use tracing::{debug, warn};

/// How long one wait for something due lasts.
const WAIT: Duration = Duration::from_secs(30);
/// Entries moved in one call.
const AT_ONCE: usize = 500;
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest pause while something is due whose stream is broken: due times are kept within 250 ms.
const PAUSE_BROKEN: Duration = Duration::from_millis(100);

/// The movers of a process, one per delay set.
#[derive(Default)]
pub(super) struct Movers {
    running: Mutex<HashMap<DelayName, Weak<Mover>>>,
}

/// Moves the due entries of one set for as long as somebody holds it.
pub(super) struct Mover {
    task: JoinHandle<()>,
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Movers {
    /// The mover of a set, which begins if nobody had it yet.
    pub(super) fn of(&self, backend: &Arc<dyn Backend>, delays: &DelayName) -> Arc<Mover> {
        let mut running = self.running.lock().expect("no code panics while it holds the movers");
        running.retain(|_, mover| mover.strong_count() > 0);
        if let Some(mover) = running.get(delays).and_then(Weak::upgrade) {
            return mover;
        }
        let task = tokio::spawn(run(Arc::clone(backend), delays.clone()));
        let mover = Arc::new(Mover { task });
        running.insert(delays.clone(), Arc::downgrade(&mover));
        mover
    }
}

async fn run(backend: Arc<dyn Backend>, delays: DelayName) {
    let mut failures = 0_u32;
    loop {
        match run_once(backend.as_ref(), &delays).await {
            Ok(moved) => {
                failures = 0;
                if moved > 0 {
                    debug!(delays = %delays, moved, "delayed messages are due");
                }
            }
            Err(error) => {
                failures = failures.saturating_add(1);
                // Less and less often: it may stay so for long.
                if failures.is_power_of_two() {
                    warn!(delays = %delays, failures, %error, "delayed messages could not be moved, trying again");
                }
                tokio::time::sleep(pause_after(&error, failures)).await;
            }
        }
    }
}

/// How long to wait after so many failures.
fn pause_after(error: &StreamError, failures: u32) -> Duration {
    let longest = if error.is_transient() {
        PAUSE_MAX
    } else {
        // One of the streams takes nothing. The messages of the others are to be in time.
        PAUSE_BROKEN
    };
    (PAUSE_FIRST * 2_u32.saturating_pow(failures.saturating_sub(1).min(10))).min(longest)
}

/// Waits until something is due and moves it. Returns how much.
async fn run_once(backend: &dyn Backend, delays: &DelayName) -> headwater_stream::Result<usize> {
    if !backend.wait_due(delays, WAIT).await? {
        return Ok(0);
    }
    Ok(backend.take_due(delays, AT_ONCE).await?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_stream_makes_nobody_else_late_and_a_server_that_is_away_is_left_alone() {
        let broken = StreamError::WrongType { name: "orders".to_owned() };
        let away = StreamError::Unavailable { problem: "away".to_owned(), source: None };
        for failures in 1..100 {
            assert!(pause_after(&broken, failures) <= Duration::from_millis(100));
        }
        assert_eq!(pause_after(&away, 1), PAUSE_FIRST);
        assert_eq!(pause_after(&away, u32::MAX), PAUSE_MAX);
    }
}

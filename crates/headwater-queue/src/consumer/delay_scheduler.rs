//! The delay scheduler: appends delayed messages and retries to their partition when they are due.
//!
//! Upstream: every subscription names the delay sets of its topic. Downstream: the backend promotes due entries in one
//! atomic step, so several processes may do so concurrently.
//! Guarantees: while any process subscribes to a topic, its due messages are promoted on time, even if another due entry
//! cannot be appended because its stream has the wrong type.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use headwater_stream::{Backend, Backoff, DelayName, StreamError};
use tokio::task::JoinHandle;
use tracing::{debug, warn};

/// Maximum time of one wait for a due entry.
const WAIT: Duration = Duration::from_secs(30);
/// Entries promoted in one call.
const PROMOTE_BATCH: usize = 500;
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Maximum backoff while a due entry cannot be appended: messages of other streams must be on time within 250 ms.
const BACKOFF_MAX_WRONG_TYPE: Duration = Duration::from_millis(100);

/// The schedulers of a process, one per delay set.
#[derive(Default)]
pub(super) struct DelaySchedulers {
    running: Mutex<HashMap<DelayName, Weak<DelayScheduler>>>,
}

/// Promotes the due entries of one delay set until it is dropped.
pub(super) struct DelayScheduler {
    task: JoinHandle<()>,
}

impl Drop for DelayScheduler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl DelaySchedulers {
    /// The scheduler of a delay set, started if it is not running.
    pub(super) fn get_or_start(
        &self,
        backend: &Arc<dyn Backend>,
        delays: &DelayName,
    ) -> Arc<DelayScheduler> {
        let mut running =
            self.running.lock().expect("no code panics while it holds the schedulers");
        running.retain(|_, scheduler| scheduler.strong_count() > 0);
        if let Some(scheduler) = running.get(delays).and_then(Weak::upgrade) {
            return scheduler;
        }
        let task = tokio::spawn(run(Arc::clone(backend), delays.clone()));
        let scheduler = Arc::new(DelayScheduler { task });
        running.insert(delays.clone(), Arc::downgrade(&scheduler));
        scheduler
    }
}

async fn run(backend: Arc<dyn Backend>, delays: DelayName) {
    let mut failures = 0_u32;
    loop {
        match run_once(backend.as_ref(), &delays).await {
            Ok(promoted) => {
                failures = 0;
                if promoted > 0 {
                    debug!(delays = %delays, promoted, "promoted due messages");
                }
            }
            Err(error) => {
                failures = failures.saturating_add(1);
                // Logged at powers of two: it may fail for long.
                if failures.is_power_of_two() {
                    warn!(delays = %delays, failures, %error, "due messages could not be promoted, retrying");
                }
                let after = backoff_after(&error).delay(failures, fastrand::f64());
                tokio::time::sleep(after).await;
            }
        }
    }
}

/// The backoff after this error.
fn backoff_after(error: &StreamError) -> Backoff {
    let longest = if error.is_transient() {
        BACKOFF_MAX
    } else {
        // One stream has the wrong type. Messages of the other streams must be on time.
        BACKOFF_MAX_WRONG_TYPE
    };
    Backoff::doubling(BACKOFF_MIN, longest)
}

/// Waits until entries are due and promotes them. Returns how many.
async fn run_once(backend: &dyn Backend, delays: &DelayName) -> headwater_stream::Result<usize> {
    if !backend.wait_until_due(delays, WAIT).await? {
        return Ok(0);
    }
    Ok(backend.promote_due(delays, PROMOTE_BATCH).await?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_of_the_wrong_type_delays_no_other_and_an_unavailable_server_gets_the_full_backoff()
    {
        let wrong_type = StreamError::WrongType { name: "orders".to_owned() };
        let unavailable =
            StreamError::Unavailable { problem: "unavailable".to_owned(), source: None };
        for failures in 1..100 {
            let delay = backoff_after(&wrong_type).delay(failures, 0.0);
            assert!(delay <= Duration::from_millis(100));
        }
        assert_eq!(backoff_after(&unavailable).delay(1, 0.0), BACKOFF_MIN);
        assert_eq!(backoff_after(&unavailable).delay(u32::MAX, 0.0), BACKOFF_MAX);
    }
}

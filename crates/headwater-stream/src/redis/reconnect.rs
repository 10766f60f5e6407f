//! Paces attempts to connect to one server, for all callers together.
//!
//! Upstream: `node`. Guarantees: after a failure, one attempt runs at a time, after a delay with jitter that doubles from
//! 10 ms to 1 s; callers that waited for an attempt share its failure. Without a failure, attempts are not limited.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::connection::ConnectError;
use crate::backoff::{Backoff, RetryTimer};

/// Delays between attempts, and between retries of a call.
pub(super) const BACKOFF: Backoff =
    Backoff::doubling(Duration::from_millis(10), Duration::from_secs(1));

#[derive(Default)]
pub(super) struct ReconnectPacer {
    state: Mutex<PacerState>,
    /// Held by the attempt that runs after a failure.
    attempting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct PacerState {
    /// Number of failures so far.
    failures: u64,
    /// The last failure, unless an attempt succeeded after it.
    last: Option<ConnectFailure>,
}

struct ConnectFailure {
    error: ConnectError,
    retry_at: Instant,
    timer: RetryTimer,
}

impl ReconnectPacer {
    /// Runs an attempt when it is due. Fails with the last error if it is not due before the deadline. Cancel-safe.
    pub(super) async fn run<T>(
        &self,
        deadline: Instant,
        attempt: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        let (before, failure) = self.look();
        let mut turn = None;
        if let Some((error, _)) = failure {
            match timeout_at(deadline, self.attempting.lock()).await {
                Ok(guard) => turn = Some(guard),
                Err(_) => return Err(error),
            }
        }
        let (failures, failure) = self.look();
        match failure {
            // Another caller has connected: no attempt needs to wait.
            None => drop(turn.take()),
            Some((error, retry_at)) => {
                if failures > before || retry_at >= deadline {
                    return Err(error);
                }
                sleep_until(retry_at).await;
            }
        }
        let result = attempt.await;
        self.record(failures, result.as_ref().err());
        result
    }

    /// The number of failures so far.
    pub(super) fn failures(&self) -> u64 {
        self.lock().failures
    }

    /// The last error, if there were more failures than these and no success after them.
    pub(super) fn error_since(&self, failures: u64) -> Option<ConnectError> {
        let state = self.lock();
        let last = state.last.as_ref().filter(|_| state.failures > failures);
        last.map(|last| last.error.duplicate())
    }

    /// Records the result of an attempt that started after so many failures.
    fn record(&self, failures: u64, error: Option<&ConnectError>) {
        let mut state = self.lock();
        // A server that rejects this client has answered: the caller gets the error, and later calls do not wait.
        let Some(error) = error.filter(|error| !matches!(error, ConnectError::Fatal(_))) else {
            state.last = None;
            return;
        };
        // Concurrent first attempts fail together and count once.
        if state.failures > failures {
            return;
        }
        let mut timer = state.last.as_ref().map_or_else(|| BACKOFF.timer(), |last| last.timer);
        let retry_at = Instant::now() + timer.next_delay();
        state.failures += 1;
        state.last = Some(ConnectFailure { error: error.duplicate(), retry_at, timer });
    }

    /// The number of failures, and the last one with the time of the next attempt.
    fn look(&self) -> (u64, Option<(ConnectError, Instant)>) {
        let state = self.lock();
        (state.failures, state.last.as_ref().map(|last| (last.error.duplicate(), last.retry_at)))
    }

    fn lock(&self) -> MutexGuard<'_, PacerState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::redis::url::Address;

    fn refused() -> ConnectError {
        let address = Address { host: "a".to_owned(), port: 1 };
        ConnectError::Unreachable { address, error: io::ErrorKind::ConnectionRefused.into() }
    }

    /// Repeats attempts of 100 callers for this long.
    async fn hammer(pacer: &Arc<ReconnectPacer>, length: Duration, attempts: &Arc<AtomicU32>) {
        let until = Instant::now() + length;
        let callers = (0..100).map(|_| {
            let (pacer, attempts) = (Arc::clone(pacer), Arc::clone(attempts));
            tokio::spawn(async move {
                while Instant::now() < until {
                    let attempt = async {
                        attempts.fetch_add(1, Ordering::Relaxed);
                        Err::<(), _>(refused())
                    };
                    let failed = pacer.run(until, attempt).await.unwrap_err();
                    assert!(matches!(failed, ConnectError::Unreachable { .. }));
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
        });
        futures_util::future::join_all(callers).await;
    }

    #[tokio::test(start_paused = true)]
    async fn all_callers_share_the_attempts_and_their_backoff() {
        let (pacer, attempts) = (Arc::new(ReconnectPacer::default()), Arc::default());
        hammer(&pacer, Duration::from_secs(10), &attempts).await;
        let count = attempts.load(Ordering::Relaxed);
        // 10 ms doubled to 1 s, half of it random, in 10 s.
        assert!((8..=40).contains(&count), "{count} attempts");
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_not_limited_after_a_success() {
        let pacer = ReconnectPacer::default();
        let far = Instant::now() + Duration::from_secs(60);
        for _ in 0..20 {
            pacer.run(far, async { Err::<(), _>(refused()) }).await.unwrap_err();
        }
        pacer.run(far, async { Ok(()) }).await.unwrap();
        let start = Instant::now();
        for _ in 0..20 {
            pacer.run(far, async { Ok(()) }).await.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_whose_deadline_is_before_the_next_attempt_fails_at_once() {
        let pacer = ReconnectPacer::default();
        let far = Instant::now() + Duration::from_secs(60);
        for _ in 0..12 {
            pacer.run(far, async { Err::<(), _>(refused()) }).await.unwrap_err();
        }
        let (start, soon) = (Instant::now(), Instant::now() + Duration::from_millis(100));
        pacer.run(soon, async { Ok(()) }).await.unwrap_err();
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}

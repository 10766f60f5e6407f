//! Jobs that run to completion even if the client disconnects: imports and forks, which would otherwise leave half a
//! session.
//!
//! Upstream: routes that copy much. Guarantees: at most [`JOBS_MAX`] imports and forks at a time; jobs are joined at
//! shutdown, or aborted at its deadline.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use crate::http::ApiError;

/// Maximum concurrent imports and forks in one process; each needs some megabytes of memory.
pub(crate) const JOBS_MAX: usize = 8;

/// `Retry-After` of a rejected job.
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Background jobs of one process.
pub(crate) struct BackgroundJobs {
    permits: Arc<Semaphore>,
    tasks: Mutex<JoinSet<()>>,
}

impl Default for BackgroundJobs {
    fn default() -> Self {
        Self { permits: Arc::new(Semaphore::new(JOBS_MAX)), tasks: Mutex::default() }
    }
}

impl BackgroundJobs {
    /// Runs `work` to completion, even if this future is dropped. `work` must end by itself soon after shutdown is
    /// triggered.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| {
            let busy = format!("{JOBS_MAX} imports or forks are in progress; try again later");
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "busy", busy).retry_after(BUSY_RETRY_AFTER)
        })?;
        let (sender, ended) = oneshot::channel();
        self.spawn(async move {
            let result = work.await;
            drop(permit);
            // The client may have disconnected.
            let _ = sender.send(result);
        });
        // The sender is dropped only if the job panicked.
        ended.await.unwrap_or_else(|_| Err(ApiError::internal()))
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Waits for all jobs.
    pub(crate) async fn close(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks());
        while tasks.join_next().await.is_some() {}
    }

    fn tasks(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures_util::FutureExt;
    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn a_job_completes_after_its_caller_disconnects() {
        let work = BackgroundJobs::default();
        let (resume, is_done) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (signal, done) = (Arc::clone(&resume), Arc::clone(&is_done));
        let running = work.run(async move {
            signal.notified().await;
            done.store(true, Ordering::Release);
            Ok(())
        });
        assert!(running.now_or_never().is_none(), "the caller disconnects");
        resume.notify_one();
        work.close().await;
        assert!(is_done.load(Ordering::Acquire));
    }

    #[tokio::test]
    async fn the_job_limit_is_enforced_and_permits_are_returned() {
        let work = BackgroundJobs::default();
        let resume = Arc::new(Notify::new());
        for _ in 0..JOBS_MAX {
            let signal = Arc::clone(&resume);
            let running = work.run(async move {
                signal.notified().await;
                Ok(())
            });
            assert!(running.now_or_never().is_none());
        }
        let refused = work.run(async { Ok(()) }).await.unwrap_err();
        assert_eq!((refused.status(), refused.code()), (StatusCode::TOO_MANY_REQUESTS, "busy"));
        tokio::task::yield_now().await;
        resume.notify_waiters();
        work.close().await;
        assert_eq!(work.run(async { Ok(7) }).await, Ok(7));
    }
}

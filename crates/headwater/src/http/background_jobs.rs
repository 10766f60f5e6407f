//! Work that is carried to its end when its caller goes away: imports and forks, which would leave half a session behind;
//! and counting the books, which the database would go on with.
//!
//! Upstream: routes that copy or read much. Promises: at most [`LONG_WORK_MAX`] copies at once, and one count; what was begun
//! is joined when the process stops, or aborted when that takes too long; a count is ended then. Not here: telling the other
//! work to end early, which it does by itself when the process stops.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use crate::http::ApiError;
use crate::server::shutdown::Stopping;

/// Imports and forks at once in one process; each keeps some megabytes in memory.
pub(crate) const LONG_WORK_MAX: usize = 8;

/// How soon to come back when there is no room.
const BUSY_FOR: Duration = Duration::from_secs(1);

/// All of it.
pub(crate) struct LongWork {
    places: Arc<Semaphore>,
    counting: Arc<Semaphore>,
    tasks: Mutex<JoinSet<()>>,
}

impl Default for LongWork {
    fn default() -> Self {
        let semaphore = |places| Arc::new(Semaphore::new(places));
        Self { places: semaphore(LONG_WORK_MAX), counting: semaphore(1), tasks: Mutex::default() }
    }
}

impl LongWork {
    /// Does it, also if this future is dropped meanwhile. It must have an end of its own, and soon once the process stops.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let message = format!("{LONG_WORK_MAX} imports or forks are under way; try again");
        self.carry(&self.places, message, work).await
    }

    /// The same for counting, of which there is one at a time. It changes nothing, and is ended when the process stops.
    pub(crate) async fn count<T: Send + 'static>(
        &self,
        stopping: Stopping,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let message = "the books are being counted for somebody else; try again".to_owned();
        let until_stop = async move {
            tokio::select! {
                biased;
                () = stopping.begun() => Err(ApiError::unavailable("this process stops; try again")),
                counted = work => counted,
            }
        };
        self.carry(&self.counting, message, until_stop).await
    }

    async fn carry<T: Send + 'static>(
        &self,
        places: &Arc<Semaphore>,
        busy: String,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let place = Arc::clone(places).try_acquire_owned().map_err(|_| {
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "busy", busy).retry_after(BUSY_FOR)
        })?;
        let (sender, ended) = oneshot::channel();
        self.spawn(async move {
            let result = work.await;
            drop(place);
            // Nobody may be waiting any more.
            let _ = sender.send(result);
        });
        // Dropped without a word: it panicked.
        ended.await.unwrap_or_else(|_| Err(ApiError::internal()))
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Waits for all that was begun.
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
    async fn what_nobody_waits_for_any_more_is_carried_to_its_end() {
        let work = LongWork::default();
        let (go_on, is_done) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let (signal, done) = (Arc::clone(&go_on), Arc::clone(&is_done));
        let running = work.run(async move {
            signal.notified().await;
            done.store(true, Ordering::Release);
            Ok(())
        });
        assert!(running.now_or_never().is_none(), "its caller goes away");
        go_on.notify_one();
        work.close().await;
        assert!(is_done.load(Ordering::Acquire));
    }

    #[tokio::test]
    async fn one_counts_at_a_time_also_when_nobody_waits_for_it_any_more() {
        let work = LongWork::default();
        let go_on = Arc::new(Notify::new());
        let signal = Arc::clone(&go_on);
        let stopping = Stopping::default();
        let counting = work.count(stopping.clone(), async move {
            signal.notified().await;
            Ok(())
        });
        assert!(counting.now_or_never().is_none(), "its caller goes away");
        let refused = work.count(stopping.clone(), async { Ok(()) }).await.unwrap_err();
        assert_eq!((refused.status(), refused.code()), (StatusCode::TOO_MANY_REQUESTS, "busy"));
        assert_eq!(work.run(async { Ok(7) }).await, Ok(7), "copies have places of their own");
        go_on.notify_one();
        work.close().await;
        assert_eq!(work.count(stopping, async { Ok(7) }).await, Ok(7));
    }

    #[tokio::test]
    async fn a_count_ends_when_the_process_stops() {
        let (work, stopping) = (LongWork::default(), Stopping::default());
        let counting = work.count(stopping.clone(), std::future::pending::<Result<(), ApiError>>());
        stopping.begin();
        assert_eq!(counting.await.unwrap_err().status(), StatusCode::SERVICE_UNAVAILABLE);
        work.close().await;
    }

    #[tokio::test]
    async fn there_is_a_limit_and_a_place_is_free_again_when_the_work_is_done() {
        let work = LongWork::default();
        let go_on = Arc::new(Notify::new());
        for _ in 0..LONG_WORK_MAX {
            let signal = Arc::clone(&go_on);
            let running = work.run(async move {
                signal.notified().await;
                Ok(())
            });
            assert!(running.now_or_never().is_none());
        }
        let refused = work.run(async { Ok(()) }).await.unwrap_err();
        assert_eq!((refused.status(), refused.code()), (StatusCode::TOO_MANY_REQUESTS, "busy"));
        tokio::task::yield_now().await;
        go_on.notify_waiters();
        work.close().await;
        assert_eq!(work.run(async { Ok(7) }).await, Ok(7));
    }
}

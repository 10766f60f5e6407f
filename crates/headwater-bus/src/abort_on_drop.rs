//! A task handle that aborts its task when it is dropped.
//!
//! Used by `local` and `main_loop` so that no background task outlives its owner. For a graceful end, await the task
//! first.

use tokio::task::JoinHandle;

/// Aborts the task when dropped.
pub(crate) struct AbortOnDropTask<T>(pub(crate) JoinHandle<T>);

impl<T> Drop for AbortOnDropTask<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

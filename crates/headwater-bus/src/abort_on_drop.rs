//! Tasks that end with whoever started them.
//!
//! Upstream: `local` and `main_loop`. Promises: no task outlives the value that holds it, also if that is dropped half way.
//! Not here: tasks that end in good order; whoever wants that awaits them first.

use tokio::task::JoinHandle;

/// A task that is aborted when this is dropped.
pub(crate) struct AbortOnDropTask<T>(pub(crate) JoinHandle<T>);

impl<T> Drop for AbortOnDropTask<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

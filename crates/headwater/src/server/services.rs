//! Named background tasks of the process.
//!
//! Upstream: `run.rs` starts them, `shutdown.rs` joins them. Guarantee: a task that panics or ends before shutdown triggers
//! shutdown and is named.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, error, warn};

use crate::server::health::ProcessHealth;
use crate::server::shutdown_signal::ShutdownSignal;

/// How long an aborted service may take to end; one that blocks its thread does not end at all.
pub(super) const ABORT_MAX: Duration = Duration::from_millis(200);

/// Named background tasks. A task that ends before shutdown triggers it.
pub(super) struct Services {
    tasks: JoinSet<Option<&'static str>>,
    health: ProcessHealth,
    shutdown: ShutdownSignal,
}

impl Services {
    pub(super) fn new(health: ProcessHealth, shutdown: ShutdownSignal) -> Self {
        Self { tasks: JoinSet::new(), health, shutdown }
    }

    pub(super) fn start(
        &mut self,
        part: &'static str,
        running: impl Future<Output = ()> + Send + 'static,
    ) {
        let (health, shutdown) = (self.health.clone(), self.shutdown.clone());
        health.set_running(part, true);
        self.tasks.spawn(async move {
            // A panic counts as an unexpected end.
            let ended = AssertUnwindSafe(running).catch_unwind().await;
            health.set_running(part, false);
            debug!(part, "service ended");
            if ended.is_err() {
                error!(part, "service panicked, shutting down");
            } else if !shutdown.is_triggered() {
                error!(part, "service ended unexpectedly, shutting down");
            }
            let has_failed = ended.is_err() || !shutdown.is_triggered();
            shutdown.trigger();
            has_failed.then_some(part)
        });
    }

    /// Waits for all services and returns the name of the first that failed. Services that miss the deadline are
    /// aborted.
    pub(super) async fn join(&mut self, deadline: Instant) -> Option<&'static str> {
        let mut failed = None;
        let joining = async {
            while let Some(ended) = self.tasks.join_next().await {
                failed = failed.or(ended.ok().flatten());
            }
        };
        if timeout_at(deadline, joining).await.is_err() {
            warn!(
                count = self.tasks.len(),
                "services did not end before the deadline, aborting them"
            );
            let _ = timeout(ABORT_MAX, self.tasks.shutdown()).await;
        }
        failed
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicBool, Ordering};

    use std::sync::Arc;

    use super::*;

    fn services() -> (Services, ShutdownSignal) {
        let shutdown = ShutdownSignal::default();
        (Services::new(ProcessHealth::new("w", shutdown.clone()), shutdown.clone()), shutdown)
    }

    const DEADLINE: Duration = Duration::from_secs(5);

    /// Sets its flag when dropped.
    struct DropFlag(Arc<AtomicBool>);

    impl Drop for DropFlag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_misses_the_deadline_is_aborted_before_its_dependencies_close() {
        let (mut services, shutdown) = services();
        let is_over = Arc::new(AtomicBool::new(false));
        let flag = DropFlag(Arc::clone(&is_over));
        services.start("endless", async move {
            let _flag = flag;
            pending::<()>().await;
        });
        shutdown.trigger();
        let began = Instant::now();
        assert_eq!(services.join(began + DEADLINE).await, None);
        assert!(is_over.load(Ordering::SeqCst), "the task was dropped");
        assert!(began.elapsed() < DEADLINE + ABORT_MAX, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_service_that_panics_or_ends_early_is_named_and_triggers_shutdown() {
        for panics in [true, false] {
            let (mut services, shutdown) = services();
            services.start("odd", async move { assert!(!panics, "on purpose") });
            shutdown.wait().await;
            assert_eq!(services.join(Instant::now() + DEADLINE).await, Some("odd"));
        }
    }
}

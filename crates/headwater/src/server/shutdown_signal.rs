//! The shutdown signal of the process.
//!
//! Upstream: SIGTERM, SIGINT, or a service that ended unexpectedly. Downstream: every loop and every event stream.
//! Guarantees: once triggered it stays triggered, also for tasks that start to wait later.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Tells tasks to stop. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShutdownSignal(CancellationToken);

impl ShutdownSignal {
    /// Tells all waiting tasks to stop. Idempotent.
    pub(crate) fn trigger(&self) {
        self.0.cancel();
    }

    /// Whether shutdown was triggered.
    pub(crate) fn is_triggered(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Waits until shutdown is triggered. Cancel-safe.
    pub(crate) async fn wait(&self) {
        self.0.cancelled().await;
    }

    /// The signal for a crate that does not know this type.
    pub(crate) fn token(&self) -> CancellationToken {
        self.0.clone()
    }

    /// Triggers shutdown on SIGTERM or SIGINT. A second signal exits the process at once with code 1.
    pub(crate) fn on_signals(&self) -> std::io::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let shutdown = self.clone();
        // Runs until the process exits.
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                if shutdown.is_triggered() {
                    warn!(
                        "second signal received, exiting at once; open claims expire and are retried"
                    );
                    std::process::exit(1);
                }
                info!(
                    "shutdown signal received: draining work in progress; send it again to exit at once"
                );
                shutdown.trigger();
            }
        });
        Ok(())
    }
}

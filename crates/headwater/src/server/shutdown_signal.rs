//! The shutdown signal of the process.
//!
//! Upstream: SIGTERM, SIGINT, or a service that ended unexpectedly. Downstream: every loop and every event stream.
//! Guarantees: once triggered it stays triggered, also for tasks that start to wait later.

use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{info, warn};

/// Tells tasks to stop. Clones share one state.
#[derive(Clone, Debug)]
pub(crate) struct ShutdownSignal {
    sender: Arc<watch::Sender<bool>>,
    receiver: watch::Receiver<bool>,
}

impl Default for ShutdownSignal {
    fn default() -> Self {
        let (sender, receiver) = watch::channel(false);
        Self { sender: Arc::new(sender), receiver }
    }
}

impl ShutdownSignal {
    /// Tells all waiting tasks to stop. Idempotent.
    pub(crate) fn trigger(&self) {
        self.sender.send_replace(true);
    }

    /// Whether shutdown was triggered.
    pub(crate) fn is_triggered(&self) -> bool {
        *self.receiver.borrow()
    }

    /// Waits until shutdown is triggered. Cancel-safe.
    pub(crate) async fn wait(&self) {
        // `wait_for` fails only when all senders are dropped, and `self` holds one.
        let _ = self.receiver.clone().wait_for(|is_triggered| *is_triggered).await;
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

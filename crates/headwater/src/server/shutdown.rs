//! The wish to stop, told to everybody who waits for it.
//!
//! Upstream: SIGTERM, SIGINT, or a part that ended by mistake. Downstream: every loop and every stream of events.
//! Promises: once said, it holds; who asks later is told, too.

use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{info, warn};

/// Whether to stop. Clones are the same wish.
#[derive(Clone, Debug)]
pub(crate) struct Stopping {
    sender: Arc<watch::Sender<bool>>,
    receiver: watch::Receiver<bool>,
}

impl Default for Stopping {
    fn default() -> Self {
        let (sender, receiver) = watch::channel(false);
        Self { sender: Arc::new(sender), receiver }
    }
}

impl Stopping {
    /// Tells everybody to stop.
    pub(crate) fn begin(&self) {
        self.sender.send_replace(true);
    }

    /// Whether it was said.
    pub(crate) fn has_begun(&self) -> bool {
        *self.receiver.borrow()
    }

    /// Returns when it is said. Cancel-safe.
    pub(crate) async fn begun(&self) {
        // An error means that all senders are gone; we hold one.
        let _ = self.receiver.clone().wait_for(|begun| *begun).await;
    }

    /// Stops on SIGTERM or SIGINT. A second one ends the process at once: whoever sends it does not want to wait.
    pub(crate) fn on_signals(&self) -> std::io::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let stopping = self.clone();
        // Ends with the process.
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                if stopping.has_begun() {
                    warn!("stopped at once: claims will run out, nothing is lost");
                    std::process::exit(1);
                }
                info!("stopping: no new work, what is under way may end; once more stops at once");
                stopping.begin();
            }
        });
        Ok(())
    }
}

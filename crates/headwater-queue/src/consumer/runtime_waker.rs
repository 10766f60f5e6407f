//! Wakes the Tokio runtime periodically, so that a handler that blocks its thread does not stall the whole process.
//!
//! One thread of a Tokio runtime waits for the network and for timers, and the other threads wait for that one. If it
//! is woken by a message and runs the handler itself, no other thread takes over its role: while the handler blocks,
//! everything in the process stalls, lease renewal included, until an event outside of the runtime wakes another
//! thread. This thread produces such events.
//!
//! Upstream: `maintenance`, while there are subscriptions. Guarantees: as long as one thread of the runtime is free, the
//! runtime polls the network again within [`WAKE_EVERY`]. Not here: a runtime whose threads are all blocked.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tracing::warn;

/// Waking the runtime ten times a second costs less than a thousandth of a core.
const WAKE_EVERY: Duration = Duration::from_millis(100);

/// Wakes the runtime until it is dropped.
pub(super) struct RuntimeWaker {
    /// Nothing is sent: dropping it ends the thread.
    _end: Sender<()>,
}

impl RuntimeWaker {
    /// Starts a thread that wakes the runtime of the caller.
    pub(super) fn start() -> Option<Self> {
        let runtime = Handle::current();
        let (end, has_ended) = channel::<()>();
        let wake = move || {
            while has_ended.recv_timeout(WAKE_EVERY) == Err(RecvTimeoutError::Timeout) {
                // The thread that is woken for this task has nothing else to do and polls the network.
                drop(runtime.spawn(async {}));
            }
        };
        match thread::Builder::new().name("headwater-waker".to_owned()).spawn(wake) {
            Ok(_) => Some(Self { _end: end }),
            Err(error) => {
                warn!(%error, "cannot start the runtime waker thread; a handler that blocks its thread may stall the process");
                None
            }
        }
    }
}

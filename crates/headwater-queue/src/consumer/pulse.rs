//! A pulse for the runtime: while a handler blocks its thread, the others go on looking for work.
//!
//! Of the threads of a Tokio runtime one waits for the network and for time, and the others wait for that one. If it is woken
//! by a message and runs the handler itself, nobody takes its place: should the handler block, everything in the process
//! stands still, leases included, until something outside of the runtime wakes another thread. This does, all the time.
//!
//! Upstream: `upkeep`, while there are subscriptions. Promises: whatever handlers do, as long as one thread of the runtime
//! is free, the network is heard again within [`EVERY`]. Not here: a runtime whose threads are all blocked.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tracing::warn;

/// How often. Ten times a second cost a process less than a thousandth of a core.
const EVERY: Duration = Duration::from_millis(100);

/// Beats until it is dropped.
pub(super) struct Pulse {
    /// Nothing is ever sent: its end is the thread's.
    _end: Sender<()>,
}

impl Pulse {
    /// Begins to beat for the runtime of the caller.
    pub(super) fn start() -> Option<Self> {
        let runtime = Handle::current();
        let (end, has_ended) = channel::<()>();
        let beating = move || {
            while has_ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                // Whoever is woken for it finds nothing else to do, and waits for the network.
                drop(runtime.spawn(async {}));
            }
        };
        match thread::Builder::new().name("headwater-pulse".to_owned()).spawn(beating) {
            Ok(_) => Some(Self { _end: end }),
            Err(error) => {
                warn!(%error, "no thread for a pulse: a handler that blocks may hold up the whole process");
                None
            }
        }
    }
}

//! The step "handle": runs the handler of an issue, as long as its result can count.
//!
//! Upstream: a run that is claimed and loaded. Downstream: the handler, which is your code. Promises: whatever ends it first,
//! the handler is dropped when this step is over; a panic or a passed deadline is a failure like any other.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use tokio::time::sleep_until;

use super::{Inner, OnNewEvent};
use crate::handler::{HandlerError, Resolution, Run, panic_text};

/// How a handler ended.
pub(super) enum Ending {
    Resolved(Resolution),
    Failed(HandlerError),
    /// Newer events have arrived.
    Superseded,
    /// The worker stops.
    Stopped,
    /// The claim is somebody else's, or could be.
    Lost,
}

impl Inner {
    /// Runs the handler, as long as its result can count. Whatever ends it first, it is dropped when this returns.
    pub(super) async fn handle(&self, run: &Run) -> Ending {
        let mut stop = self.stop.subscribe();
        tokio::select! {
            biased;
            () = run.cancelled() => Ending::Lost,
            _ = stop.wait_for(|stop| *stop) => Ending::Stopped,
            () = self.superseded(run) => Ending::Superseded,
            () = sleep_until(run.deadline) => {
                let limit = self.config.deadline;
                Ending::Failed(HandlerError::retry(format!("the handler took longer than {limit:?}")))
            }
            // The handler may have left something of its own in disorder by a panic; we share nothing with it.
            result = AssertUnwindSafe(self.handler.handle(run.clone())).catch_unwind() => match result {
                Ok(Ok(resolution)) => Ending::Resolved(resolution),
                Ok(Err(error)) => Ending::Failed(error),
                Err(panic) => {
                    let text = panic_text(panic.as_ref());
                    Ending::Failed(HandlerError::retry(format!("the handler panicked: {text}")))
                }
            },
        }
    }

    /// Returns when a newer event ends this run; never, if the run goes on regardless.
    async fn superseded(&self, run: &Run) {
        match self.config.on_new_event {
            OnNewEvent::Supersede { times_max } if run.issue().superseded < times_max => {
                run.newer_events().await;
            }
            _ => std::future::pending().await,
        }
    }
}

//! Handles nudges: hands their issues to the worker of this process and waits for the outcome.
//!
//! Upstream: `headwater-queue`, which acknowledges or releases the entry of a nudge. Downstream: `worker`, whose task the run
//! is. Guarantees: when the queue aborts the handler of a nudge, the run continues.

use std::sync::Arc;

use async_trait::async_trait;
use headwater_queue::{Handler, Message, Outcome};
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use crate::issue::IssueId;
use crate::metrics::count_nudge_without_run;
use crate::nudge;
use crate::step_observer::{ProcessingStep, StepObserver};

/// An issue to process, and where the queue waits for the outcome.
pub(crate) type NudgedRun = (IssueId, oneshot::Sender<Outcome>);

/// Has the issues of nudges processed by the worker.
pub(crate) struct NudgeHandler {
    pub(crate) runs: mpsc::Sender<NudgedRun>,
    pub(crate) step_observer: Arc<dyn StepObserver>,
}

/// Handles one nudge. The returned outcome makes the queue acknowledge or release the entry.
#[async_trait]
impl Handler for NudgeHandler {
    async fn handle(&self, message: Message) -> Outcome {
        let issue_id = match nudge::read(&message.fields) {
            Ok(nudge) => nudge.issue_id,
            Err(reason) => {
                count_nudge_without_run("malformed");
                warn!(entry_id = %message.id, error = %reason, "malformed nudge moved to the dead letters");
                return Outcome::DeadLetter { reason };
            }
        };
        self.step_observer.on_step(ProcessingStep::Received, issue_id);
        let (reply, outcome) = oneshot::channel();
        if self.runs.send((issue_id, reply)).await.is_err() {
            // The worker has stopped.
            return Outcome::Release;
        }
        outcome.await.unwrap_or_else(|_| Outcome::retry("the run ended without an outcome"))
    }
}

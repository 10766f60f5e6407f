//! The worker: nudge -> claim -> load -> handle -> complete -> acknowledge. Each is a named step below, in this order.
//!
//! Upstream: nudges from `headwater-queue`, and the agenda of this process. Downstream: `store`; the outbox is written with
//! the end of a run and sent by `outbox`.
//!
//! Promises, whichever line the process dies at:
//! - No database transaction is open while a handler runs.
//! - One run of an issue at a time counts: every effect presents the epoch of its claim.
//! - The nudge is acknowledged last. Before that, SQL knows what is left to do: the issue is idle, queued, or claimed until
//!   a certain time, and the sweep finds the latter two.
//!
//! Not here: how each step deals with what goes wrong (see `claiming`, `handling` and `ending`), when the worker starts and
//! stops (see `life`), and how claims are kept alive (see `held`).

mod claiming;
mod config;
mod ending;
mod handling;
mod intake;
mod life;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_queue::{Handler, Message, Outcome, TRACEPARENT, TraceContext};
use metrics::{counter, histogram};
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::Instant;
use tracing::{debug, warn};

use self::claiming::Claiming;
pub(crate) use self::config::unique_name;
pub use self::config::{OnNewEvent, WorkerConfig};
use self::ending::Next;
use crate::agenda::Agenda;
use crate::batcher::Batcher;
use crate::claim::{ClaimedIssue, GiveBack, Nudge};
use crate::handler::{IssueHandler, Run};
use crate::held::{Claims, HeldClaim, Seat};
use crate::issue::{EventLogId, IssueId};
use crate::metrics::{
    EVENTS_PER_ISSUE_BATCH, ISSUES_PROCESSED, ISSUES_PROCESSING_DURATION, NUDGES_WITHOUT_RUN,
};
use crate::nudge::{self, Nudger};
use crate::steps::Step;
use crate::store::Store;

/// How long to wait before a database that did not answer is asked again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Works on issues. Clones are the same worker.
#[derive(Clone)]
pub struct Worker {
    inner: Arc<Inner>,
}

struct Inner {
    store: Arc<dyn Store>,
    nudger: Nudger,
    handler: Arc<dyn IssueHandler>,
    config: WorkerConfig,
    batcher: Batcher,
    claims: Arc<Claims>,
    agenda: Agenda,
    /// Claims to release when the database answers again; at most one per run that was under way when it stopped to.
    lapsed: Mutex<Vec<GiveBack>>,
    slots: Semaphore,
    /// Whether `run` was called.
    has_run: AtomicBool,
    /// Becomes true when handlers that still run are to be cancelled.
    stop: watch::Sender<bool>,
}

/// What became of the wish to look at an issue.
enum Looked {
    /// Somebody has looked, or has it in hand and will look once more.
    Done,
    /// The worker stops, and nobody has.
    Stopping,
}

/// From a nudge to its acknowledgement, which is what is returned here to the queue.
#[async_trait]
impl Handler for Worker {
    async fn handle(&self, message: Message) -> Outcome {
        let issue_id = match nudge::read(&message.fields) {
            Ok(nudge) => {
                let trace = message.headers.get(TRACEPARENT);
                if let Some(trace) = trace.and_then(|text| TraceContext::parse(text)) {
                    self.inner.nudger.origins().came_with(nudge.event_log_id, trace);
                }
                nudge.issue_id
            }
            Err(reason) => {
                no_run("malformed");
                warn!(entry_id = %message.id, error = %reason, "nudge makes no sense");
                return Outcome::DeadLetter { reason };
            }
        };
        self.inner.config.steps.taken(Step::Received, issue_id);
        match self.inner.look_at(issue_id).await {
            Looked::Done => Outcome::Done,
            Looked::Stopping => Outcome::Release,
        }
    }
}

impl Worker {
    /// Works on one issue until nothing is left to do for it now. A no-op if there is nothing to do, or if somebody else
    /// does it; a worker that has stopped leaves it to others. Never fails: what goes wrong is written to the issue, or
    /// found by the sweep.
    pub async fn look_at(&self, issue_id: IssueId) {
        if let Looked::Stopping = self.inner.look_at(issue_id).await {
            // There is no entry to give back, so others hear of it by a new one; if not, the sweep finds it.
            let nudge = Nudge { issue_id, event_log_id: EventLogId::default() };
            let _ = self.inner.nudger.send(&[nudge]).await;
        }
    }
}

impl Inner {
    /// Runs an issue, and once more if somebody asked for it meanwhile.
    async fn look_at(&self, issue_id: IssueId) -> Looked {
        let Some(_slot) = self.slot().await else { return Looked::Stopping };
        // In hand already: whoever has it looks once more, so this wake-up is not lost.
        let mut taken = self.claims.sit(issue_id);
        while let Some(seat) = taken {
            if let Looked::Stopping = self.run(&seat).await {
                return Looked::Stopping;
            }
            taken = seat.leave();
        }
        Looked::Done
    }

    /// One run: its steps.
    async fn run(&self, seat: &Seat) -> Looked {
        let (claimed, held) = match self.claim(seat).await {
            Claiming::Won(claimed, held) => (claimed, held),
            Claiming::Nothing => return Looked::Done,
            Claiming::Stopping => return Looked::Stopping,
        };
        let started = Instant::now();
        let run = self.load(*claimed, &held, started);

        let ending = self.handle(&run).await;
        self.config.steps.taken(Step::Handled, seat.issue_id);

        let (result, next) = self.complete(&run, &held, ending).await;
        self.config.steps.taken(Step::Completed, seat.issue_id);
        drop(held);
        counter!(ISSUES_PROCESSED, "result" => result).increment(1);
        histogram!(ISSUES_PROCESSING_DURATION, "result" => result).record(started.elapsed());
        let elapsed_ms = started.elapsed().as_millis() as u64;
        debug!(issue_id = %seat.issue_id, epoch = %run.epoch(), result, elapsed_ms, "run ended");

        self.follow_up(&run, next).await;
        Looked::Done
    }

    /// What a handler needs to know. The claim has brought the pending event logs along, in the same transaction.
    fn load(&self, claimed: ClaimedIssue, held: &HeldClaim, started: Instant) -> Run {
        histogram!(EVENTS_PER_ISSUE_BATCH).record(claimed.events.len() as f64);
        let deadline = started + self.config.deadline;
        Run { claimed: Arc::new(claimed), claim: held.watch().clone(), deadline }
    }

    /// Asks for what a run has left to do, before its nudge is acknowledged.
    async fn follow_up(&self, run: &Run, next: Next) {
        let issue_id = run.issue().id;
        match next {
            Next::Nothing => {}
            Next::Later(wait) => {
                self.agenda.add(issue_id, Instant::now() + wait);
            }
            Next::Nudge => {
                let event_log_id = run.events().last().map(|event| event.id).unwrap_or_default();
                let sent = self.nudger.send(&[Nudge { issue_id, event_log_id }]).await;
                if sent.is_err() && !self.is_stopping() {
                    self.agenda.add(issue_id, Instant::now());
                }
            }
        }
    }

    /// Room for one more run; none if the worker stops before there is any.
    async fn slot(&self) -> Option<SemaphorePermit<'_>> {
        let mut stop = self.stop.subscribe();
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => None,
            slot = self.slots.acquire() => slot.ok(),
        }
    }

    fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }
}

fn no_run(reason: &'static str) {
    counter!(NUDGES_WITHOUT_RUN, "result" => reason).increment(1);
}

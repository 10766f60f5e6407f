//! The inbox: where events come in, are stored once, and their issues are queued.
//!
//! Upstream: webhooks, the ticket API, readers of streams. Downstream: `store`, then `nudge`.
//! Promises: when `record` has returned, the event is committed; concurrent calls share one commit, and a bad event
//! among them fails alone. What is committed is nudged for, whether or not its caller is still there. Nobody waits for the
//! stream backend: a nudge is a hint.
//! Not here: signatures and formats of webhooks (see `headwater`).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use headwater_queue::TraceContext;
use headwater_stream::{Coalescer, CoalescerConfig};
use metrics::counter;

use crate::confirmations::Confirmations;
use crate::error::{IssueError, Result};
use crate::issue::{NewEvent, Quiet, Recorded};
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX};
use crate::metrics::EVENTS_RECORDED;
use crate::nudge::Nudger;
use crate::steps::{NoSteps, Step, Steps};
use crate::store::Store;

/// Settings of an inbox.
#[derive(Clone, Debug)]
pub struct InboxConfig {
    /// The quiet window: a burst of events becomes one run. Default: none.
    pub quiet: Quiet,
    /// Events in one commit. Default and limit: [`BATCH_MAX`].
    pub batch_max: usize,
    /// How long an event waits for company before its commit. Default: zero, since what arrives during one commit
    /// shares the next anyway. Design allows up to 2 ms.
    pub linger: Duration,
    /// Commits under way at once. Default: 1, so that events are stored in the order of calls.
    pub commits_max: usize,
    /// Notes what was confirmed, so that a sample is read back; see [`Confirmations::run`]. Default: nothing reads it.
    pub confirmations: Confirmations,
    /// Is told of every step. Default: nobody.
    pub steps: Arc<dyn Steps>,
}

impl Default for InboxConfig {
    fn default() -> Self {
        Self {
            quiet: Quiet::default(),
            batch_max: BATCH_MAX,
            linger: Duration::ZERO,
            commits_max: 1,
            confirmations: Confirmations::default(),
            steps: Arc::new(NoSteps),
        }
    }
}

/// An event, and the trace of whoever brings it.
type Coming = (NewEvent, Option<TraceContext>);

/// Takes events in.
#[derive(Debug)]
pub struct Inbox {
    records: Coalescer<Coming, Result<Recorded>>,
    nudger: Nudger,
    refused_at: RefusedAt,
}

/// When the database last refused a commit, if none has succeeded since.
type RefusedAt = Arc<Mutex<Option<Instant>>>;

impl Inbox {
    /// An inbox of a store. Its task ends when it is dropped, after the commits under way.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(store: Arc<dyn Store>, nudger: Nudger, config: InboxConfig) -> Result<Self> {
        config.quiet.check()?;
        if config.batch_max > BATCH_MAX {
            return Err(IssueError::invalid("batch_max", format!("it is above {BATCH_MAX}")));
        }
        let gathering = CoalescerConfig {
            max_items: config.batch_max,
            max_bytes: BATCH_BYTES_MAX,
            linger: config.linger,
            in_flight_max: config.commits_max,
        };
        let quiet = config.quiet;
        let (sender, told, confirmations) = (nudger.clone(), config.steps, config.confirmations);
        let refused_at = RefusedAt::default();
        let noted = Arc::clone(&refused_at);
        let records = Coalescer::new(gathering, move |coming: Vec<Coming>| {
            let (store, nudger, steps) = (Arc::clone(&store), sender.clone(), Arc::clone(&told));
            let (confirmations, noted) = (confirmations.clone(), Arc::clone(&noted));
            async move {
                let (events, traces): (Vec<_>, Vec<_>) = coming.into_iter().unzip();
                let answers = store.record(&events, &quiet).await;
                note(&noted, &answers);
                // Here and not in the caller: one that hung up meanwhile would nudge nobody.
                for (answer, trace) in answers.iter().zip(traces) {
                    count(answer);
                    if let Ok(recorded) = answer {
                        confirmations.note(recorded.event_log_id);
                        steps.taken(Step::Recorded, recorded.issue_id);
                        nudger.after_in(recorded, trace);
                    }
                }
                answers
            }
        });
        let records =
            records.map_err(|error| IssueError::invalid("the inbox", error.to_string()))?;
        Ok(Self { records, nudger, refused_at })
    }

    /// Whether the database refused events within this time and has stored none since.
    pub fn is_refused(&self, within: Duration) -> bool {
        let refused_at = *self.refused_at.lock().expect("no code panics while it holds this lock");
        refused_at.is_some_and(|at| at.elapsed() <= within)
    }

    /// Stores an event and queues its issue. A duplicate is no error: it says which event log it is a duplicate of.
    ///
    /// After `Unavailable` the event may be stored or not; recording it again is safe. Dropping the call does not undo
    /// it, and the nudge is sent all the same.
    pub async fn record(&self, event: NewEvent) -> Result<Recorded> {
        // Before it shares a commit: what no store can keep must not cost the neighbours a retry.
        event.check().inspect_err(|error| count(&Err(error.clone())))?;
        let bytes = event.payload.len();
        let coming = (event, self.nudger.origins().current());
        self.records.call_weighing(coming, bytes).await.unwrap_or_else(|gone| {
            let problem = "the commit ended without an answer".to_owned();
            let gone = Err(IssueError::Unavailable { problem, source: Some(Arc::new(gone)) });
            count(&gone);
            gone
        })
    }
}

/// Events that are at fault themselves, or whose issue is locked, say nothing of the database.
fn note(refused_at: &RefusedAt, answers: &[Result<Recorded>]) {
    let mut refused_at = refused_at.lock().expect("no code panics while it holds this lock");
    if answers.iter().any(Result::is_ok) {
        *refused_at = None;
    } else if answers.iter().any(|answer| answer.as_ref().is_err_and(is_of_the_database)) {
        *refused_at = Some(Instant::now());
    }
}

fn is_of_the_database(error: &IssueError) -> bool {
    error.is_transient() && !error.may_concern_one()
}

fn count(answer: &Result<Recorded>) {
    let result = match answer {
        Ok(recorded) if recorded.duplicate => "duplicate",
        Ok(_) => "recorded",
        Err(error) if error.is_transient() => "error",
        Err(_) => "refused",
    };
    counter!(EVENTS_RECORDED, "result" => result).increment(1);
}

//! The inbox: stores inbound events once and queues their issues.
//!
//! Upstream: webhooks, the ticket API, stream consumers. Downstream: `store`, then `nudge`. Guarantees: when `record`
//! has returned, the event is committed. Concurrent calls share one commit, and an invalid event fails alone. A
//! committed event is nudged for even if its caller was cancelled. Recording never waits for the streams. Not here:
//! signatures and formats of webhooks (see `headwater`).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use headwater_stream::{Coalescer, CoalescerConfig};
use metrics::counter;

use crate::commit_verifier::CommitVerifier;
use crate::error::{IssueError, Result};
use crate::issue::{DebounceWindow, NewEvent, Recorded};
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX};
use crate::metrics::EVENTS_RECORDED;
use crate::nudge::Nudger;
use crate::step_observer::{NoStepObserver, ProcessingStep, StepObserver};
use crate::store::Store;

/// Configuration of an inbox.
#[derive(Clone, Debug)]
pub struct InboxConfig {
    /// Debounce window: a burst of events becomes one run. Default: none.
    pub debounce: DebounceWindow,
    /// Maximum number of events in one commit. Default and limit: [`BATCH_MAX`].
    pub batch_max: usize,
    /// How long an event waits for other events before its commit. Default: zero; events that arrive during a commit
    /// share the next one anyway.
    pub linger: Duration,
    /// Concurrent commits. Default: 1, so that events are stored in the order of calls.
    pub commits_max: usize,
    /// Receives the ids of confirmed events, to read a sample back; see [`CommitVerifier::run`]. Default: not run.
    pub commit_verifier: CommitVerifier,
    /// Observer of processing steps, for tests. Default: none.
    pub step_observer: Arc<dyn StepObserver>,
}

impl Default for InboxConfig {
    fn default() -> Self {
        Self {
            debounce: DebounceWindow::default(),
            batch_max: BATCH_MAX,
            linger: Duration::ZERO,
            commits_max: 1,
            commit_verifier: CommitVerifier::default(),
            step_observer: Arc::new(NoStepObserver),
        }
    }
}

/// Records events.
#[derive(Debug)]
pub struct Inbox {
    records: Coalescer<NewEvent, Result<Recorded>>,
    failed_at: FailedAt,
}

/// Time of the last failed commit, if none has succeeded since.
type FailedAt = Arc<Mutex<Option<Instant>>>;

impl Inbox {
    /// Creates an inbox. When it is dropped, its task ends after the commits in flight.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(store: Arc<dyn Store>, nudger: Nudger, config: InboxConfig) -> Result<Self> {
        config.debounce.validate()?;
        if config.batch_max > BATCH_MAX {
            return Err(IssueError::invalid("batch_max", format!("must be at most {BATCH_MAX}")));
        }
        let coalescer_config = CoalescerConfig {
            max_items: config.batch_max,
            max_bytes: BATCH_BYTES_MAX,
            linger: config.linger,
            in_flight_max: config.commits_max,
        };
        let debounce = config.debounce;
        let failed_at = FailedAt::default();
        let last_failure = Arc::clone(&failed_at);
        let InboxConfig { commit_verifier, step_observer, .. } = config;
        let records = Coalescer::new(coalescer_config, move |events: Vec<NewEvent>| {
            let (store, nudger, last_failure) =
                (Arc::clone(&store), nudger.clone(), Arc::clone(&last_failure));
            let (commit_verifier, step_observer) =
                (commit_verifier.clone(), Arc::clone(&step_observer));
            async move {
                let results = store.record(&events, &debounce).await;
                update_last_failure(&last_failure, &results);
                // Here and not in the caller, which may have been cancelled meanwhile.
                for result in &results {
                    count(result);
                    if let Ok(recorded) = result {
                        commit_verifier.add(recorded.event_log_id);
                        step_observer.on_step(ProcessingStep::Recorded, recorded.issue_id);
                        nudger.nudge_recorded(recorded);
                    }
                }
                results
            }
        });
        let records =
            records.map_err(|error| IssueError::invalid("the inbox", error.to_string()))?;
        Ok(Self { records, failed_at })
    }

    /// Whether a commit failed within this time and none has succeeded since.
    pub fn has_failed_within(&self, within: Duration) -> bool {
        let failed_at = *self.failed_at.lock().expect("no code panics while it holds this lock");
        failed_at.is_some_and(|at| at.elapsed() <= within)
    }

    /// Stores an event and queues its issue. A duplicate is not an error: the result has the id of the first event log.
    ///
    /// After `Unavailable` the effect is unknown; recording the event again is idempotent. Dropping the future does not
    /// undo the commit or the nudge.
    pub async fn record(&self, event: NewEvent) -> Result<Recorded> {
        // Before batching: an invalid event must not cause a retry of the others.
        event.validate().inspect_err(|error| count(&Err(error.clone())))?;
        let bytes = event.payload.len();
        self.records.call_with_size(event, bytes).await.unwrap_or_else(|gone| {
            let problem = "the commit ended without a result".to_owned();
            let gone = Err(IssueError::Unavailable { problem, source: Some(Arc::new(gone)) });
            count(&gone);
            gone
        })
    }
}

/// Invalid events and locked issues are not failures of the database.
fn update_last_failure(failed_at: &FailedAt, results: &[Result<Recorded>]) {
    let mut failed_at = failed_at.lock().expect("no code panics while it holds this lock");
    if results.iter().any(Result::is_ok) {
        *failed_at = None;
    } else if results.iter().any(|result| result.as_ref().is_err_and(is_database_failure)) {
        *failed_at = Some(Instant::now());
    }
}

fn is_database_failure(error: &IssueError) -> bool {
    error.is_transient() && !error.is_item_error()
}

fn count(recorded: &Result<Recorded>) {
    let result = match recorded {
        Ok(recorded) if recorded.duplicate => "duplicate",
        Ok(_) => "recorded",
        Err(error) if error.is_transient() => "error",
        Err(_) => "refused",
    };
    counter!(EVENTS_RECORDED, "result" => result).increment(1);
}

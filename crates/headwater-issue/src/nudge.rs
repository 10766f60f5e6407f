//! Nudges: entries of the stream `issue_work` that say "look at issue N".
//!
//! Upstream: `inbox` after a commit, `worker` after a run that left events over, `sweeper`. Downstream: the stream backend.
//! Promises: nobody waits for a stream that is away unless he asks to; what cannot be sent is dropped and counted, and
//! the sweep finds it. A nudge carries no truth: it may be lost, doubled or late. It carries the trace of whoever caused it
//! (header `traceparent`), where traces are collected.

use std::sync::Arc;

use headwater_queue::{TRACEPARENT, TraceContext};
use headwater_stream::{Backend, Fields, Retention, StreamError, StreamName};
use metrics::counter;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::{debug, warn};

use crate::claim::Nudge;
use crate::error::{IssueError, Result};
use crate::issue::{EventLogId, IssueId, Recorded};
use crate::limits::{BATCH_MAX, NUDGES_WAITING_MAX};
use crate::metrics::{ISSUES_QUEUED, NUDGES};
use crate::origins::{NoOrigins, Origins};
use crate::steps::{NoSteps, Step, Steps};

/// The stream that nudges go to.
pub const STREAM: &str = "issue_work";
/// The group that shares them.
pub const GROUP: &str = "issue-workers";

/// Acknowledged nudges that are kept, for people who look.
const RETENTION: Retention = Retention::max_len(10_000);

const ISSUE_ID: &str = "issue_id";
const EVENT_LOG_ID: &str = "event_log_id";
/// A JSON object, as in every entry of the queue.
const HEADERS: &str = "headers";

/// A nudge, and the trace of whoever caused it.
type Traced = (Nudge, Option<TraceContext>);

/// Sends nudges. Clones share one queue; its task ends with the last of them.
#[derive(Clone, Debug)]
pub struct Nudger {
    sender: Arc<Sender>,
    waiting: mpsc::Sender<Traced>,
    _task: Arc<AbortOnDrop>,
}

struct Sender {
    streams: Arc<dyn Backend>,
    stream: StreamName,
    steps: Arc<dyn Steps>,
    origins: Arc<dyn Origins>,
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// Nothing is lost by it that the sweep would not find.
#[derive(Debug)]
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Nudger {
    /// Sends to `issue_work` of this backend.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(streams: Arc<dyn Backend>) -> Self {
        Self::with(streams, Arc::new(NoSteps), Arc::new(NoOrigins))
    }

    /// The same, telling of every step.
    pub fn observed(streams: Arc<dyn Backend>, steps: Arc<dyn Steps>) -> Self {
        Self::with(streams, steps, Arc::new(NoOrigins))
    }

    /// The same for a process that collects traces: what is nudged for now is handled in the trace of now.
    pub fn traced(streams: Arc<dyn Backend>, origins: Arc<dyn Origins>) -> Self {
        Self::with(streams, Arc::new(NoSteps), origins)
    }

    fn with(streams: Arc<dyn Backend>, steps: Arc<dyn Steps>, origins: Arc<dyn Origins>) -> Self {
        let stream = StreamName::new(STREAM).expect("the name is short and plain");
        let sender = Arc::new(Sender { streams, stream, steps, origins });
        let (waiting, queue) = mpsc::channel(NUDGES_WAITING_MAX);
        let task = tokio::spawn(send_all(Arc::clone(&sender), queue));
        Self { sender, waiting, _task: Arc::new(AbortOnDrop(task)) }
    }

    /// Sends in the background. If too many wait already, the nudge is dropped: the sweep will send it.
    pub fn send_soon(&self, nudge: Nudge) {
        self.send_soon_in(nudge, self.origins().current());
    }

    /// The same for somebody else, whose trace this is.
    pub(crate) fn send_soon_in(&self, nudge: Nudge, trace: Option<TraceContext>) {
        // Here as well: if the nudge is lost, the sweep of this process may bring the issue to its worker.
        if let Some(trace) = trace {
            self.origins().came_with(nudge.event_log_id, trace);
        }
        if self.waiting.try_send((nudge, trace)).is_err() {
            counter!(NUDGES, "result" => "lost").increment(1);
        }
    }

    /// Sends in the background what was recorded wants to be sent, if anything: after the commit of a transaction of your own.
    pub fn after(&self, recorded: &Recorded) {
        self.after_in(recorded, self.origins().current());
    }

    /// The same for somebody else, whose trace this is.
    pub(crate) fn after_in(&self, recorded: &Recorded, trace: Option<TraceContext>) {
        let Recorded { issue_id, event_log_id, duplicate, nudge, .. } = *recorded;
        if !nudge {
            return;
        }
        if !duplicate {
            counter!(ISSUES_QUEUED).increment(1);
        }
        self.send_soon_in(Nudge { issue_id, event_log_id }, trace);
    }

    /// Sends now and says whether it is done. At most [`BATCH_MAX`] at once reach the stream together. These nudges are of
    /// no trace: whoever sends them has not caused the events.
    pub async fn send(&self, nudges: &[Nudge]) -> Result<()> {
        for batch in nudges.chunks(BATCH_MAX) {
            let batch: Vec<Traced> = batch.iter().map(|nudge| (*nudge, None)).collect();
            self.sender.send(&batch).await.map_err(|error| IssueError::Unavailable {
                problem: format!("{} nudges were not sent", batch.len()),
                source: Some(Arc::new(error)),
            })?;
        }
        Ok(())
    }

    /// About how many nudges nobody has read yet.
    pub(crate) async fn unread(&self) -> Result<u64, StreamError> {
        let Some(stats) = self.sender.streams.stats(&self.sender.stream).await? else {
            return Ok(0);
        };
        let workers = stats.groups.iter().find(|group| group.name.as_str() == GROUP);
        Ok(workers.map_or(stats.length, |group| group.lag.unwrap_or_default()))
    }

    /// Who knows traces here.
    pub(crate) fn origins(&self) -> &dyn Origins {
        self.sender.origins.as_ref()
    }

    /// The backend that nudges go to.
    pub fn streams(&self) -> &Arc<dyn Backend> {
        &self.sender.streams
    }
}

async fn send_all(sender: Arc<Sender>, mut queue: mpsc::Receiver<Traced>) {
    let mut batch = Vec::with_capacity(BATCH_MAX);
    while queue.recv_many(&mut batch, BATCH_MAX).await > 0 {
        if let Err(error) = sender.send(&batch).await {
            warn!(%error, count = batch.len(), "nudges were not sent, the sweep will send them");
        }
        batch.clear();
    }
}

impl Sender {
    async fn send(&self, nudges: &[Traced]) -> Result<(), StreamError> {
        let entries: Vec<Fields> = nudges.iter().map(to_fields).collect();
        let sent = self.streams.append(&self.stream, &entries, &RETENTION).await;
        let result = if sent.is_ok() { "sent" } else { "lost" };
        counter!(NUDGES, "result" => result).increment(nudges.len() as u64);
        sent?;
        for (nudge, _) in nudges {
            debug!(issue_id = %nudge.issue_id, event_log_id = %nudge.event_log_id, "nudged");
            self.steps.taken(Step::Nudged, nudge.issue_id);
        }
        Ok(())
    }
}

fn to_fields((nudge, trace): &Traced) -> Fields {
    let issue = (ISSUE_ID, nudge.issue_id.to_string());
    let event = (EVENT_LOG_ID, nudge.event_log_id.to_string());
    match trace {
        None => Fields::new([issue, event]),
        Some(trace) => {
            let headers = format!(r#"{{"{TRACEPARENT}":"{trace}"}}"#);
            Fields::new([issue, event, (HEADERS, headers)])
        }
    }
}

/// Reads a nudge, also one of another program. The event log is of no consequence; without a valid issue it says why.
pub(crate) fn read(fields: &Fields) -> std::result::Result<Nudge, String> {
    let Some(value) = fields.get(ISSUE_ID) else {
        return Err(format!("the entry has no field `{ISSUE_ID}`"));
    };
    let number = |value: &[u8]| std::str::from_utf8(value).ok()?.parse::<i64>().ok();
    let Some(issue_id) = number(value).filter(|id| *id > 0) else {
        let shown: String = String::from_utf8_lossy(value).chars().take(40).collect();
        return Err(format!("`{ISSUE_ID}` is not the id of an issue: `{shown}`"));
    };
    let event_log_id = fields.get(EVENT_LOG_ID).and_then(|value| number(value));
    Ok(Nudge {
        issue_id: IssueId(issue_id),
        event_log_id: EventLogId(event_log_id.unwrap_or_default()),
    })
}

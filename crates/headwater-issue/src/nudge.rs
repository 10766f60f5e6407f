//! Nudges: entries of the stream `issue_work` that ask a worker to process an issue.
//!
//! Upstream: `inbox` after a commit, `worker` after a run that left pending events, `sweeper`. Downstream: the stream
//! backend. Guarantees: enqueueing never blocks on an unavailable stream; only [`send`](Nudger::send) awaits it. A
//! nudge that cannot be sent is dropped and counted, and the sweep sends it again. A nudge is a hint: it may be lost,
//! duplicated or late. The group of the workers exists before the first nudge, so that nudges are kept until the first worker
//! starts, up to [`NUDGES_STREAM_MAX`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use headwater_stream::{
    Backend, Fields, GroupName, GroupStart, Retention, StreamError, StreamName,
};
use metrics::counter;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use crate::claim::Nudge;
use crate::error::{IssueError, Result};
use crate::issue::{EventLogId, IssueId, Recorded};
use crate::limits::{BATCH_MAX, NUDGE_QUEUE_MAX, NUDGES_STREAM_MAX};
use crate::metrics::{ISSUES_QUEUED, NUDGES};
use crate::step_observer::{NoStepObserver, ProcessingStep, StepObserver};

/// Stream of the nudges.
pub const STREAM: &str = "issue_work";
/// Consumer group of the workers.
pub const GROUP: &str = "issue-workers";

/// Entries retained in the stream for inspection, in addition to those that the group has not read.
const RETENTION: Retention = Retention::max_len(10_000);

const ISSUE_ID: &str = "issue_id";
const EVENT_LOG_ID: &str = "event_log_id";

/// Sends nudges. Clones share one queue; its task ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Nudger {
    sender: Arc<Sender>,
    queue: mpsc::Sender<Nudge>,
    unsent: watch::Sender<Unsent>,
    /// The sweep sends the nudges that are still queued when it is aborted.
    _task: Arc<AbortOnDropHandle<()>>,
}

/// What was queued and not sent.
#[derive(Debug, Default)]
struct Unsent {
    waiting: usize,
    /// Why the last batch was lost.
    lost: Option<StreamError>,
}

struct Sender {
    streams: Arc<dyn Backend>,
    stream: StreamName,
    group: GroupName,
    /// Whether the group of the workers was created, or found. If it is deleted later, the next worker creates it.
    has_group: AtomicBool,
    /// Whether the stream had [`NUDGES_STREAM_MAX`] unread nudges when [`Nudger::unread`] was last called.
    is_full: AtomicBool,
    step_observer: Arc<dyn StepObserver>,
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Nudger {
    /// Creates a nudger for the stream `issue_work` of this backend.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(streams: Arc<dyn Backend>) -> Self {
        Self::with_observer(streams, Arc::new(NoStepObserver))
    }

    /// Like [`new`](Self::new), with an observer of processing steps.
    pub fn with_observer(streams: Arc<dyn Backend>, step_observer: Arc<dyn StepObserver>) -> Self {
        let stream = StreamName::new(STREAM).expect("the name is valid");
        let group = GroupName::new(GROUP).expect("the name is valid");
        let (has_group, is_full) = (AtomicBool::new(false), AtomicBool::new(false));
        let sender = Sender { streams, stream, group, has_group, is_full, step_observer };
        let sender = Arc::new(sender);
        let (queue, receiver) = mpsc::channel(NUDGE_QUEUE_MAX);
        let unsent = watch::Sender::default();
        let task = tokio::spawn(send_all(Arc::clone(&sender), receiver, unsent.clone()));
        Self { sender, queue, unsent, _task: Arc::new(AbortOnDropHandle::new(task)) }
    }

    /// Queues a nudge for sending in the background. Dropped if the queue is full: the sweep will send it.
    pub fn enqueue(&self, nudge: Nudge) {
        self.unsent.send_modify(|unsent| unsent.waiting += 1);
        if self.queue.try_send(nudge).is_err() {
            self.unsent.send_modify(|unsent| unsent.waiting -= 1);
            counter!(NUDGES, "result" => "lost").increment(1);
        }
    }

    /// Waits until nothing is queued, for at most this time. Fails if nudges were lost since the last call, or are queued still:
    /// the next sweep sends them.
    pub async fn flush(&self, limit: Duration) -> Result<(), StreamError> {
        let mut unsent = self.unsent.subscribe();
        let is_sent = timeout(limit, unsent.wait_for(|unsent| unsent.waiting == 0)).await.is_ok();
        let mut lost = None;
        self.unsent.send_if_modified(|unsent| {
            lost = unsent.lost.take();
            false
        });
        match lost {
            Some(error) => Err(error),
            None if is_sent => Ok(()),
            None => {
                let problem = format!("no reply within {limit:?}");
                Err(StreamError::Unavailable { problem, source: None })
            }
        }
    }

    /// Queues the nudge for a recorded event, if it needs one. Call it after the commit of a caller's transaction.
    pub fn nudge_recorded(&self, recorded: &Recorded) {
        let Recorded { issue_id, event_log_id, duplicate, nudge, .. } = *recorded;
        if !nudge {
            return;
        }
        if !duplicate {
            counter!(ISSUES_QUEUED).increment(1);
        }
        self.enqueue(Nudge { issue_id, event_log_id });
    }

    /// Sends nudges now, in batches of at most [`BATCH_MAX`].
    pub async fn send(&self, nudges: &[Nudge]) -> Result<()> {
        for batch in nudges.chunks(BATCH_MAX) {
            self.sender.send(batch).await.map_err(|error| IssueError::Unavailable {
                problem: format!("{} nudges were not sent", batch.len()),
                source: Some(Arc::new(error)),
            })?;
        }
        Ok(())
    }

    /// Approximate number of unread nudges. Also decides whether nudges for recorded events are sent.
    pub(crate) async fn unread(&self) -> Result<u64, StreamError> {
        let stats = self.sender.streams.stats(&self.sender.stream).await?;
        let unread = stats.map_or(0, |stats| {
            let workers = stats.groups.iter().find(|group| group.name == self.sender.group);
            workers.map_or(stats.length, |group| group.lag.unwrap_or_default())
        });
        self.sender.is_full.store(unread >= NUDGES_STREAM_MAX, Ordering::Relaxed);
        Ok(unread)
    }

    /// Whether the stream has as many unread nudges as it may have.
    pub(crate) fn is_full(&self) -> bool {
        self.sender.is_full.load(Ordering::Relaxed)
    }

    /// The stream backend.
    pub fn streams(&self) -> &Arc<dyn Backend> {
        &self.sender.streams
    }
}

async fn send_all(
    sender: Arc<Sender>,
    mut receiver: mpsc::Receiver<Nudge>,
    unsent: watch::Sender<Unsent>,
) {
    let mut batch = Vec::with_capacity(BATCH_MAX);
    while receiver.recv_many(&mut batch, BATCH_MAX).await > 0 {
        let mut lost = None;
        if sender.is_full.load(Ordering::Relaxed) {
            counter!(NUDGES, "result" => "lost").increment(batch.len() as u64);
        } else if let Err(error) = sender.send(&batch).await {
            warn!(%error, count = batch.len(), "nudges were not sent, the sweep will send them again");
            lost = Some(error);
        }
        unsent.send_modify(|unsent| {
            unsent.waiting -= batch.len();
            unsent.lost = lost.or(unsent.lost.take());
        });
        batch.clear();
    }
}

impl Sender {
    async fn send(&self, nudges: &[Nudge]) -> Result<(), StreamError> {
        let entries: Vec<Fields> = nudges.iter().map(to_fields).collect();
        let sent = match self.ensure_group().await {
            Ok(()) => self.streams.append(&self.stream, &entries, &RETENTION).await,
            Err(error) => Err(error),
        };
        let result = if sent.is_ok() { "sent" } else { "lost" };
        counter!(NUDGES, "result" => result).increment(nudges.len() as u64);
        sent?;
        for nudge in nudges {
            debug!(issue_id = %nudge.issue_id, event_log_id = %nudge.event_log_id, "nudged");
            self.step_observer.on_step(ProcessingStep::Nudged, nudge.issue_id);
        }
        Ok(())
    }

    /// Creates the group before the first nudge: without a group, the stream would be trimmed to its retention.
    async fn ensure_group(&self) -> Result<(), StreamError> {
        if !self.has_group.load(Ordering::Relaxed) {
            self.streams.ensure_group(&self.stream, &self.group, GroupStart::Beginning).await?;
            self.has_group.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn to_fields(nudge: &Nudge) -> Fields {
    Fields::new([
        (ISSUE_ID, nudge.issue_id.to_string()),
        (EVENT_LOG_ID, nudge.event_log_id.to_string()),
    ])
}

/// Decodes a nudge, including those of other programs. `event_log_id` is optional. The error says why the entry is
/// malformed.
pub(crate) fn read(fields: &Fields) -> std::result::Result<Nudge, String> {
    let Some(value) = fields.get(ISSUE_ID) else {
        return Err(format!("field `{ISSUE_ID}` is missing"));
    };
    let number = |value: &[u8]| std::str::from_utf8(value).ok()?.parse::<i64>().ok();
    let Some(issue_id) = number(value).filter(|id| *id > 0) else {
        let shown: String = String::from_utf8_lossy(value).chars().take(40).collect();
        return Err(format!("field `{ISSUE_ID}` is not a valid issue id: `{shown}`"));
    };
    let event_log_id = fields.get(EVENT_LOG_ID).and_then(|value| number(value));
    Ok(Nudge {
        issue_id: IssueId(issue_id),
        event_log_id: EventLogId(event_log_id.unwrap_or_default()),
    })
}

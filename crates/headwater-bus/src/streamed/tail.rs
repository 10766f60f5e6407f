//! Delivers events of other processes to the live subscriptions of this one.
//!
//! Upstream: the `followed_streams`. Downstream: `live`, and `unknown_events` for undecodable entries.
//! Guarantees: entries of one stream are handled in order and do not block other streams; entries of this bus are
//! skipped, because its handlers have run; an undecodable entry does not stop the reader; an outage only delays it.
//! Entries trimmed before they were read are lost to live handlers; this is counted and logged.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_stream::{
    Backoff, Direction, Entry, EntryId, Fields, Range, StreamBatch, StreamError, StreamName,
    TailReader,
};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, error, warn};

use super::Inner;
use crate::error::DecodeError;
use crate::event::Envelope;
use crate::handler::DeliveredEvent;
use crate::live::EventSource;
use crate::metrics;

/// Backoff between reads while the backend is unavailable.
const RETRY: Backoff = Backoff::doubling(Duration::from_millis(50), RETRY_MAX);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// How long the next read waits for the handlers of the last one. After that, the other streams are read without it,
/// and it counts as late.
const HANDLER_GRACE: Duration = Duration::from_millis(20);

/// When a key that is not a stream is checked again.
const FOREIGN_RETRY_AFTER: Duration = Duration::from_secs(10);

/// Follows streams until the bus closes, then waits for running handlers.
pub(super) async fn run(inner: Arc<Inner>) {
    let mut tasks = StreamTasks::default();
    follow(&inner, &mut tasks).await;
    while tasks.join_one(&inner).await {}
}

async fn follow(inner: &Arc<Inner>, tasks: &mut StreamTasks) {
    let mut retry = RETRY.timer();
    let mut reader = None;
    // Keys that are not streams, and when to check them again.
    let mut foreign: HashSet<StreamName> = HashSet::new();
    let mut retry_foreign_at = Instant::now();
    while !inner.closing.is_cancelled() {
        let mut positions = tasks.idle(inner.followed.positions());
        positions.retain(|(stream, _)| !foreign.contains(stream));
        // Only the read is cancelled by a change or by closing: reads are cancel-safe, handlers need not be.
        let read = tokio::select! {
            read = read(inner, &mut reader, &positions) => read,
            true = tasks.join_one(inner) => continue,
            () = inner.followed.changed.notified() => continue,
            () = sleep_until(retry_foreign_at), if !foreign.is_empty() => {
                foreign.clear();
                continue;
            }
            () = inner.closing.cancelled() => return,
        };
        match read {
            Ok(batches) => {
                retry.reset();
                let began = Instant::now();
                let streams: Vec<StreamName> =
                    batches.iter().map(|batch| batch.stream.clone()).collect();
                batches.into_iter().for_each(|batch| tasks.begin(inner, batch));
                let _ =
                    timeout(HANDLER_GRACE, async { while tasks.join_one(inner).await {} }).await;
                if began.elapsed() >= HANDLER_GRACE {
                    streams.iter().for_each(|stream| inner.followed.mark_late(stream));
                }
            }
            // An unreadable key must not block the other streams.
            Err(error) if exclude_foreign(&error, &positions, &mut foreign) => {
                retry_foreign_at = Instant::now() + FOREIGN_RETRY_AFTER;
            }
            Err(error) => {
                debug!(%error, "live subscriptions cannot read; retrying");
                reader = None;
                inner.followed.mark_all_late();
                if !inner.sleep_unless_closing(retry.next_delay()).await {
                    return;
                }
            }
        }
    }
}

/// Running handler tasks, at most one per stream. They are aborted on drop.
#[derive(Default)]
struct StreamTasks {
    tasks: JoinSet<()>,
    busy: HashMap<Id, StreamName>,
}

impl StreamTasks {
    /// The streams without a running task.
    fn idle(&self, positions: Vec<(StreamName, EntryId)>) -> Vec<(StreamName, EntryId)> {
        let is_free =
            |(stream, _): &(StreamName, EntryId)| self.busy.values().all(|busy| busy != stream);
        positions.into_iter().filter(is_free).collect()
    }

    fn begin(&mut self, inner: &Arc<Inner>, batch: StreamBatch<Entry>) {
        let (inner, stream) = (Arc::clone(inner), batch.stream.clone());
        let task = self.tasks.spawn(async move { inner.receive(batch).await });
        self.busy.insert(task.id(), stream);
    }

    /// Waits until a task ends. Returns `false` if there is none. Cancel-safe.
    async fn join_one(&mut self, inner: &Inner) -> bool {
        let Some(ended) = self.tasks.join_next_with_id().await else { return false };
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, ())| *id);
        let stream = self.busy.remove(&id);
        if let (Err(error), Some(stream)) = (ended, stream) {
            // A bug in this module. Its entries are read again.
            error!(%stream, %error, "live subscription task failed");
            inner.sleep_unless_closing(RETRY_MAX).await;
        }
        true
    }
}

/// Excludes the key that a read failed at because it is not a stream. Returns `false` for other errors.
fn exclude_foreign(
    error: &StreamError,
    positions: &[(StreamName, EntryId)],
    foreign: &mut HashSet<StreamName>,
) -> bool {
    let StreamError::WrongType { name } = error else { return false };
    let Some((stream, _)) = positions.iter().find(|(stream, _)| stream.as_str() == name) else {
        return false;
    };
    error!(%stream, "key is not a stream, live subscriptions skip it; remove the key");
    foreign.insert(stream.clone())
}

async fn read(
    inner: &Inner,
    reader: &mut Option<Box<dyn TailReader>>,
    positions: &[(StreamName, EntryId)],
) -> Result<Vec<StreamBatch<Entry>>, StreamError> {
    if positions.is_empty() {
        // Until there is a stream to follow.
        return std::future::pending().await;
    }
    if reader.is_none() {
        *reader = Some(inner.backend.tail().await?);
    }
    let reader = reader.as_mut().expect("it was opened above");
    reader.read(positions, inner.config.batch, inner.config.poll).await
}

impl Inner {
    async fn receive(&self, batch: StreamBatch<Entry>) {
        let StreamBatch { stream, entries } = batch;
        if let Some(last_read) = self.followed.last_read_if_late(&stream) {
            self.check_for_gap(&stream, last_read).await;
        }
        // There are probably more entries, and no read waits for them meanwhile.
        if entries.len() >= self.config.batch {
            self.followed.mark_late(&stream);
        }
        for entry in entries {
            if self.closing.is_cancelled() {
                return;
            }
            self.receive_one(&stream, &entry).await;
            self.followed.advance(&stream, entry.id);
        }
    }

    /// Reports if entries after `last_read` may have been trimmed unread.
    async fn check_for_gap(&self, stream: &StreamName, last_read: EntryId) {
        let range =
            Range { from: last_read, to: last_read, direction: Direction::Forward, count: 1 };
        // Unknown if the check fails.
        let Ok(found) = self.backend.range(stream, range).await else { return };
        if found.is_empty() {
            self.missed.fetch_add(1, Ordering::Relaxed);
            metrics::live_missed();
            warn!(
                %stream,
                entry_id = %last_read,
                "live subscriptions fell behind: entries after this one may have been trimmed unread"
            );
        }
    }

    async fn receive_one(&self, stream: &StreamName, entry: &Entry) {
        match self.decode_for_live(stream, entry) {
            Ok(None) => {}
            Ok(Some(delivered)) => {
                let session = self.session_of(stream);
                let source = EventSource::Stream { session: session.as_ref(), stream };
                self.live.dispatch(&delivered, source, self.config.session.as_ref()).await;
            }
            // If it cannot be parked, it is logged and stays in its stream.
            Err(decode_error) => {
                let _ =
                    self.park_with_retries(stream, entry.id, &entry.fields, &decode_error).await;
            }
        }
    }

    /// The event of an entry, if live handlers must run for it.
    fn decode_for_live(
        &self,
        stream: &StreamName,
        entry: &Entry,
    ) -> Result<Option<DeliveredEvent>, DecodeError> {
        let envelope = Envelope::from_entry(stream, entry.id, &entry.fields)?;
        let is_own = envelope.origin.as_deref() == Some(self.own_events.origin());
        if is_own && !self.own_events.observe(&envelope.event_id, entry.id)
            || envelope.copy_of.is_some()
        {
            return Ok(None);
        }
        let is_known = self.registry.scope(&envelope.event_type).is_some();
        if is_known && !self.live.handles(&envelope.event_type) {
            return Ok(None);
        }
        DeliveredEvent::decode(&self.registry, envelope).map(Some)
    }

    /// Parks an entry, retrying transient errors. An error means that the bus is closing, or that the backend
    /// permanently rejects the entry.
    pub(super) async fn park_with_retries(
        &self,
        stream: &StreamName,
        entry_id: EntryId,
        fields: &Fields,
        decode_error: &DecodeError,
    ) -> Result<(), StreamError> {
        let mut retry = RETRY.timer();
        loop {
            let now = self.config.clock.now();
            match self.parked.park(stream, entry_id, fields, decode_error, now).await {
                Ok(()) => return Ok(()),
                Err(error) if error.is_transient() => {
                    if !self.sleep_unless_closing(retry.next_delay()).await {
                        return Err(error);
                    }
                }
                Err(error) => {
                    error!(%stream, %entry_id, reason = %decode_error, %error, "entry could not be parked");
                    return Err(error);
                }
            }
        }
    }

    /// Sleeps; returns `false` if the bus closes.
    pub(super) async fn sleep_unless_closing(&self, wait: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(wait) => true,
            () = self.closing.cancelled() => false,
        }
    }
}

//! Moves events from the spool to their streams when the backend is available again.
//!
//! Upstream: the spool, oldest first. Downstream: the backend.
//! Guarantees: events are appended to each stream in publish order, each once. An event is acknowledged in the spool
//! after the backend confirmed it; after a crash in between it is sent again under the same id and deduplicated by
//! the backend. If the outage was longer than the dedup window, the stream itself is searched for events that were
//! sent before.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::clock::Timestamp;
use headwater_stream::{Direction, EntryId, IdempotentEntry, Range, StreamError, StreamName};
use tracing::{debug, error, info, warn};

use super::Inner;
use crate::error::Result;
use crate::event::Envelope;
use crate::limits::BATCH_MAX;
use crate::metrics;
use crate::spool::{Spool, SpooledEvent};

/// Events, and approximate bytes, of one step.
const BATCH: usize = 2048;
const BATCH_BYTES: u64 = 8 * 1024 * 1024;

// One append takes a whole step.
const _: () = assert!(BATCH <= BATCH_MAX);

/// Wait after a failure that did not open the breaker.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Wait for events that are being written to the spool.
const WRITE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Consecutive waits for events being written after which the drain counts as stalled.
const WRITE_POLLS_MAX: usize = 100;

/// Largest expected clock difference to the backend when a stream is searched.
const CLOCK_SKEW: Duration = Duration::from_secs(60 * 60);

/// Entries per page of a search.
const SEARCH_PAGE: usize = 1000;

/// Drains the spool until the bus closes; remaining events stay in the spool.
pub(super) async fn run(inner: Arc<Inner>) {
    let Some(spool) = &inner.spool else { return };
    // An earlier process may have sent all of them without recording it, if its disk failed.
    let mut possibly_sent = spool.health().events.max(BATCH);
    let mut polls = 0;
    let throttle = spool.drain_throttle();
    // At most this many events are added per step, so one more step empties the spool.
    let few = BATCH.max(inner.config.in_flight_max);
    while !inner.closing.is_cancelled() {
        // Also if the last events could not be written to the spool.
        if !spool.has_pending() {
            throttle.stalled();
        }
        tokio::select! {
            () = spool.wait_for_events() => {}
            () = inner.closing.cancelled() => return,
        }
        let wait = match run_once(&inner, spool, &mut possibly_sent).await {
            Ok(DrainStep::Drained) => {
                polls = 0;
                throttle.advanced(few);
                continue;
            }
            Ok(DrainStep::WriteInProgress) => {
                polls += 1;
                if polls >= WRITE_POLLS_MAX {
                    throttle.stalled();
                }
                WRITE_POLL_INTERVAL
            }
            Ok(DrainStep::RetryAfter(wait)) => {
                throttle.stalled();
                wait
            }
            Err(error) => {
                warn!(%error, "draining the spool failed; retrying");
                throttle.stalled();
                RETRY_INTERVAL
            }
        };
        if !inner.sleep_unless_closing(wait).await {
            return;
        }
    }
}

enum DrainStep {
    /// Events were moved to their streams.
    Drained,
    /// The next events are being written.
    WriteInProgress,
    /// The backend is unavailable; retry after this time.
    RetryAfter(Duration),
}

/// Events that a stream permanently rejects, and the first error.
struct RejectedBatch {
    events: Vec<SpooledEvent>,
    error: StreamError,
}

/// Moves one batch. `possibly_sent` counts the oldest events that may have been sent before.
async fn run_once(inner: &Inner, spool: &Spool, possibly_sent: &mut usize) -> Result<DrainStep> {
    let permit = match inner.breaker.admit() {
        Ok(permit) => permit,
        Err(retry_after) => return Ok(DrainStep::RetryAfter(retry_after)),
    };
    let events = spool.peek(BATCH, BATCH_BYTES).await?;
    if events.is_empty() {
        return Ok(DrainStep::WriteInProgress);
    }
    let count = events.len();
    let sent_before = std::mem::replace(possibly_sent, count.max(*possibly_sent));
    if let Err(error) = inner.drain_to_streams(spool, events, sent_before).await? {
        if permit.failed() {
            metrics::breaker_opened();
        }
        info!(%error, "spool cannot be drained yet");
        return Ok(DrainStep::RetryAfter(RETRY_INTERVAL));
    }
    permit.succeeded();
    spool.acknowledge(count).await?;
    *possibly_sent = possibly_sent.saturating_sub(count);
    metrics::replayed(count);
    debug!(
        events = count,
        left = spool.health().events,
        "events moved from the spool to their streams"
    );
    Ok(DrainStep::Drained)
}

impl Inner {
    /// Stores spooled events. The outer error is of the spool, the inner one of the backend.
    async fn drain_to_streams(
        &self,
        spool: &Spool,
        events: Vec<SpooledEvent>,
        sent_before: usize,
    ) -> Result<Result<(), StreamError>> {
        let now = self.config.clock.now();
        let mut streams: Vec<(StreamName, Vec<(SpooledEvent, bool)>)> = Vec::new();
        for (index, event) in events.into_iter().enumerate() {
            let is_past_dedup_window =
                is_past_dedup_window(event.spooled_at, now, self.dedup_window());
            let needs_search = is_past_dedup_window && (event.attempted || index < sent_before);
            match streams.iter_mut().find(|(stream, _)| *stream == event.stream) {
                Some((_, events)) => events.push((event, needs_search)),
                None => streams.push((event.stream.clone(), vec![(event, needs_search)])),
            }
        }
        let moving = streams.iter().map(|(stream, events)| self.drain_to_stream(stream, events));
        let moved = join_all(moving).await;
        // After an error the whole batch is retried. Rejecting events before would repeat on every retry.
        let moved = match moved.into_iter().collect::<Result<Vec<_>, StreamError>>() {
            Ok(moved) => moved,
            Err(error) => return Ok(Err(error)),
        };
        for ((stream, _), rejected) in streams.iter().zip(moved) {
            let Some(RejectedBatch { events, error }) = rejected else { continue };
            let count = events.len();
            error!(%stream, %error, events = count, "spooled events permanently rejected by their stream");
            spool.reject(events).await?;
        }
        Ok(Ok(()))
    }

    /// Stores the events of one stream. Returns those that it permanently rejects.
    async fn drain_to_stream(
        &self,
        stream: &StreamName,
        events: &[(SpooledEvent, bool)],
    ) -> Result<Option<RejectedBatch>, StreamError> {
        let moving = async {
            let found = self.find_stored(stream, events).await?;
            let is_missing = |event: &&SpooledEvent| !found.contains(event.event_id.as_str());
            let waiting = events.iter().map(|(event, _)| event);
            let waiting: Vec<&SpooledEvent> = waiting.filter(is_missing).collect();
            match self.append_spooled(stream, &waiting).await {
                Err(StreamError::Invalid { .. }) if waiting.len() > 1 => {
                    self.append_singly(stream, &waiting).await
                }
                answer => answer.map(|()| None),
            }
        };
        match moving.await {
            Err(error @ (StreamError::Invalid { .. } | StreamError::WrongType { .. })) => {
                let events = events.iter().map(|(event, _)| event.clone()).collect();
                Ok(Some(RejectedBatch { events, error }))
            }
            answer => answer,
        }
    }

    /// Appends events one by one, in order, so that one invalid event does not affect the others.
    async fn append_singly(
        &self,
        stream: &StreamName,
        waiting: &[&SpooledEvent],
    ) -> Result<Option<RejectedBatch>, StreamError> {
        let mut rejected: Option<RejectedBatch> = None;
        for event in waiting {
            match self.append_spooled(stream, &[event]).await {
                Ok(()) => {}
                Err(error @ StreamError::Invalid { .. }) => {
                    let rejected =
                        rejected.get_or_insert(RejectedBatch { events: Vec::new(), error });
                    rejected.events.push((*event).clone());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(rejected)
    }

    async fn append_spooled(
        &self,
        stream: &StreamName,
        waiting: &[&SpooledEvent],
    ) -> Result<(), StreamError> {
        let once = |event: &&SpooledEvent| IdempotentEntry {
            id: event.event_id.to_string(),
            fields: event.fields.clone(),
        };
        let once: Vec<IdempotentEntry> = waiting.iter().map(once).collect();
        self.backend
            .append_once(stream, &once, self.dedup_window(), self.retention(stream))
            .await?;
        Ok(())
    }

    /// The ids of possibly sent events that are in the stream. The backend no longer deduplicates them, or soon will
    /// not. Calls still in flight need not be considered: they would be too old.
    async fn find_stored(
        &self,
        stream: &StreamName,
        events: &[(SpooledEvent, bool)],
    ) -> Result<HashSet<String>, StreamError> {
        let suspects =
            || events.iter().filter(|(_, needs_search)| *needs_search).map(|(event, _)| event);
        let mut found = HashSet::new();
        let Some(oldest) = suspects().map(|event| event.spooled_at).min() else { return Ok(found) };
        let wanted: HashSet<&str> = suspects().map(|event| event.event_id.as_str()).collect();
        let since: Timestamp = oldest.before(CLOCK_SKEW);
        let mut from = EntryId::new(since.as_millis(), 0);
        loop {
            let range =
                Range { from, to: EntryId::MAX, direction: Direction::Forward, count: SEARCH_PAGE };
            let entries = self.backend.range(stream, range).await?;
            for entry in &entries {
                if let Ok(envelope) = Envelope::from_entry(stream, entry.id, &entry.fields)
                    && wanted.contains(envelope.event_id.as_str())
                {
                    found.insert(envelope.event_id.to_string());
                }
            }
            match entries.last() {
                Some(last) if entries.len() == SEARCH_PAGE => from = last.id.next(),
                _ => return Ok(found),
            }
        }
    }
}

/// Whether the dedup window of an event may be over. If the clock was set back, assume yes.
fn is_past_dedup_window(spooled_at: Timestamp, now: Timestamp, dedup_window: Duration) -> bool {
    spooled_at > now || now.since(spooled_at) > dedup_window / 2
}

#[cfg(test)]
mod tests;

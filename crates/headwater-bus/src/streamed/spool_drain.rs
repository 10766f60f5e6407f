//! The replay: moves events from the spool to their streams when the backend is back.
//!
//! Upstream: the spool, oldest first. Downstream: the backend.
//! Promises: the events of each stream enter it in the order they were published, each once. An event counts as done
//! after the backend confirmed it; a crash in between sends it again under the same id, which the backend knows. If
//! the outage was longer than ids are remembered, the stream itself is searched for events that were sent before.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::clock::Timestamp;
use headwater_stream::{Direction, EntryId, Once, Range, StreamError, StreamName};
use tracing::{debug, error, info, warn};

use super::Inner;
use crate::error::Result;
use crate::event::Envelope;
use crate::limits::BATCH_MAX;
use crate::metrics;
use crate::spool::{Spool, SpooledEvent};

/// Events of one step, and about how many bytes.
const BATCH: usize = 2048;
const BATCH_BYTES: u64 = 8 * 1024 * 1024;

// One append takes them all.
const _: () = assert!(BATCH <= BATCH_MAX);

/// The wait after a failure that did not open the breaker.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The wait for events that are being written to the spool.
const WRITE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// So many waits in a row are no wait for events that are being written: whoever gives way to them goes on.
const WRITE_POLLS_MAX: usize = 100;

/// How far the clocks of this machine and the backend's may be apart when a stream is searched.
const CLOCK_SKEW: Duration = Duration::from_secs(60 * 60);

/// Entries looked at in one step of a search.
const SEARCH_PAGE: usize = 1000;

/// Moves events until the bus closes; what is left stays in the spool.
pub(super) async fn run(inner: Arc<Inner>) {
    let Some(spool) = &inner.spool else { return };
    // A process before this one may have sent all of them without noting it, if its disk refused the notes.
    let mut possibly_sent = spool.health().events.max(BATCH);
    let mut polls = 0;
    let throttle = spool.drain_throttle();
    // At most so many are added for each step: from here on, one step more is the end.
    let few = BATCH.max(inner.config.in_flight_max);
    while !inner.closing.is_set() {
        // Also when the last ones went away without being moved, because they could not be written.
        if !spool.has_pending() {
            throttle.stalled();
        }
        tokio::select! {
            () = spool.wait_for_events() => {}
            () = inner.closing.wait() => return,
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
                warn!(%error, "replay of the spool failed, trying again");
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
    /// Events are in their streams.
    Drained,
    /// The next events are being written.
    WriteInProgress,
    /// The backend is away; it is worth trying again after this time.
    RetryAfter(Duration),
}

/// Events that a stream will never take, and why, as it said of the first of them.
struct RefusedEvents {
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
        info!(%error, "spool cannot be replayed yet");
        return Ok(DrainStep::RetryAfter(RETRY_INTERVAL));
    }
    permit.succeeded();
    spool.acknowledge(count).await?;
    *possibly_sent = possibly_sent.saturating_sub(count);
    metrics::replayed(count);
    debug!(
        events = count,
        left = spool.health().events,
        "events went from the spool to their streams"
    );
    Ok(DrainStep::Drained)
}

impl Inner {
    /// Stores events that waited. The outer error is one of the spool, the inner one of the backend.
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
        // All of them are tried again after an error. Setting some aside before would do so at every try.
        let moved = match moved.into_iter().collect::<Result<Vec<_>, StreamError>>() {
            Ok(moved) => moved,
            Err(error) => return Ok(Err(error)),
        };
        for ((stream, _), refused) in streams.iter().zip(moved) {
            let Some(RefusedEvents { events, error }) = refused else { continue };
            let count = events.len();
            error!(%stream, %error, events = count, "spooled events were refused for good");
            spool.reject(events).await?;
        }
        Ok(Ok(()))
    }

    /// Stores the events of one stream. Returns those that it refuses for good.
    async fn drain_to_stream(
        &self,
        stream: &StreamName,
        events: &[(SpooledEvent, bool)],
    ) -> Result<Option<RefusedEvents>, StreamError> {
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
                Ok(Some(RefusedEvents { events, error }))
            }
            answer => answer,
        }
    }

    /// One event is at fault, and need not cost the others their place: each goes by itself, in the same order.
    async fn append_singly(
        &self,
        stream: &StreamName,
        waiting: &[&SpooledEvent],
    ) -> Result<Option<RefusedEvents>, StreamError> {
        let mut refused: Option<RefusedEvents> = None;
        for event in waiting {
            match self.append_spooled(stream, &[event]).await {
                Ok(()) => {}
                Err(error @ StreamError::Invalid { .. }) => {
                    let refused =
                        refused.get_or_insert(RefusedEvents { events: Vec::new(), error });
                    refused.events.push((*event).clone());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(refused)
    }

    async fn append_spooled(
        &self,
        stream: &StreamName,
        waiting: &[&SpooledEvent],
    ) -> Result<(), StreamError> {
        let once = |event: &&SpooledEvent| Once {
            id: event.event_id.to_string(),
            fields: event.fields.clone(),
        };
        let once: Vec<Once> = waiting.iter().map(once).collect();
        self.backend
            .append_once(stream, &once, self.dedup_window(), self.retention(stream))
            .await?;
        Ok(())
    }

    /// The ids of suspect events that are in the stream. Their ids are no longer remembered by the backend, or soon
    /// will not be; a call that is still under way would be older than any network keeps it.
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

/// Whether the backend may have forgotten the id of an event. If the clock was set back meanwhile, nobody can tell.
fn is_past_dedup_window(spooled_at: Timestamp, now: Timestamp, dedup_window: Duration) -> bool {
    spooled_at > now || now.since(spooled_at) > dedup_window / 2
}

#[cfg(test)]
mod tests;

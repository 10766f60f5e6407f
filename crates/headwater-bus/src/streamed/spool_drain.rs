//! Moves events from the spool to their streams when the backend is available again.
//!
//! Upstream: the spool, oldest first. Downstream: the backend.
//! Guarantees: events are appended to each stream in publish order, each once. An event is removed from the spool
//! after the backend confirmed it; after a crash in between it is sent again under the same id and deduplicated by
//! the backend. If the outage was longer than the dedup window, the stream itself is searched for events that were
//! sent before.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Direction, Entry, EntryId, IdempotentEntry, Range, StreamError, StreamName,
};
use tracing::{debug, error, info, warn};

use super::Inner;
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

/// Largest expected clock difference to the backend when a stream is searched.
const CLOCK_SKEW: Duration = Duration::from_secs(60 * 60);

/// Entries per page of a search.
const SEARCH_PAGE: usize = 1000;

/// Drains the spool until the bus closes; remaining events stay in the spool.
pub(super) async fn run(inner: Arc<Inner>) {
    let Some(spool) = &inner.spool else { return };
    // An earlier process may have sent all of them and crashed before it removed them.
    let mut possibly_sent = spool.health().events.max(BATCH);
    let draining = async {
        loop {
            match run_once(&inner, spool, &mut possibly_sent).await {
                Ok(DrainStep::Drained) => spool.set_draining(spool.has_pending()),
                Ok(DrainStep::Empty) => {
                    spool.set_draining(false);
                    spool.wait_for_add().await;
                }
                Ok(DrainStep::RetryAfter(wait)) => {
                    spool.set_draining(false);
                    tokio::time::sleep(wait).await;
                }
                Err(error) => {
                    warn!(%error, "draining the spool failed; retrying");
                    spool.set_draining(false);
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
            }
        }
    };
    // A step may be dropped at any point: its events are sent again by the next process.
    tokio::select! {
        () = draining => {}
        () = inner.closing.cancelled() => spool.set_draining(false),
    }
}

enum DrainStep {
    /// Events were moved to their streams.
    Drained,
    /// There is nothing to move, or it is still being added.
    Empty,
    /// The backend is unavailable; retry after this time.
    RetryAfter(Duration),
}

/// Moves one batch. `possibly_sent` counts the oldest events that may have been sent before.
async fn run_once(
    inner: &Inner,
    spool: &Spool,
    possibly_sent: &mut usize,
) -> Result<DrainStep, StreamError> {
    if !spool.has_pending() {
        return Ok(DrainStep::Empty);
    }
    let permit = match inner.breaker.admit() {
        Ok(permit) => permit,
        Err(retry_after) => return Ok(DrainStep::RetryAfter(retry_after)),
    };
    let entries = spool.peek(BATCH, BATCH_BYTES).await?;
    if entries.is_empty() {
        return Ok(DrainStep::Empty);
    }
    let count = entries.len();
    let sent_before = std::mem::replace(possibly_sent, count.max(*possibly_sent));
    let rejected = match inner.store_spooled(&entries, sent_before).await {
        Ok(rejected) => rejected,
        Err(error) => {
            if permit.failed() {
                metrics::breaker_opened();
            }
            info!(%error, "spool cannot be drained yet");
            return Ok(DrainStep::RetryAfter(RETRY_INTERVAL));
        }
    };
    permit.succeeded();
    let is_rejected = |entry: &&Entry| rejected.contains(&entry.id);
    spool.reject(entries.iter().filter(is_rejected).cloned().collect()).await?;
    spool.remove(&entries).await;
    *possibly_sent = possibly_sent.saturating_sub(count);
    metrics::replayed(count);
    let left = spool.health().events;
    debug!(events = count, left, "events moved from the spool to their streams");
    Ok(DrainStep::Drained)
}

impl Inner {
    /// Stores spooled events. Returns those that are permanently rejected, once all others are stored: after an error
    /// the whole batch is retried.
    async fn store_spooled(
        &self,
        entries: &[Entry],
        sent_before: usize,
    ) -> Result<HashSet<EntryId>, StreamError> {
        let now = self.config.clock.now();
        let mut rejected = HashSet::new();
        let mut streams: Vec<(StreamName, Vec<(SpooledEvent, bool)>)> = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let Some(event) = SpooledEvent::read(entry) else {
                error!(entry_id = %entry.id, "entry of the spool cannot be decoded");
                rejected.insert(entry.id);
                continue;
            };
            let is_past_dedup_window =
                is_past_dedup_window(event.spooled_at(), now, self.dedup_window());
            let needs_search = is_past_dedup_window && (event.attempted || index < sent_before);
            match streams.iter_mut().find(|(stream, _)| *stream == event.stream) {
                Some((_, events)) => events.push((event, needs_search)),
                None => streams.push((event.stream.clone(), vec![(event, needs_search)])),
            }
        }
        let storing = streams.iter().map(|(stream, events)| self.store_in_stream(stream, events));
        for ids in join_all(storing).await {
            rejected.extend(ids?);
        }
        Ok(rejected)
    }

    /// Stores the events of one stream, those with `true` unless they are found in it. Returns those that it
    /// permanently rejects.
    async fn store_in_stream(
        &self,
        stream: &StreamName,
        events: &[(SpooledEvent, bool)],
    ) -> Result<Vec<EntryId>, StreamError> {
        let all = || events.iter().map(|(event, _)| event.id).collect();
        let found = match self.find_stored(stream, events).await {
            Err(error) if is_permanent(&error) => return Ok(rejected(stream, &error, all())),
            found => found?,
        };
        let is_missing = |event: &&SpooledEvent| !found.contains(event.event_id.as_str());
        let events: Vec<&SpooledEvent> =
            events.iter().map(|(event, _)| event).filter(is_missing).collect();
        match self.append_spooled(stream, &events).await {
            // One by one, so that one invalid event does not affect the others.
            Err(error) if is_permanent(&error) => {
                let mut ids = Vec::new();
                for event in events {
                    match self.append_spooled(stream, &[event]).await {
                        Err(error) if is_permanent(&error) => {
                            ids.extend(rejected(stream, &error, vec![event.id]));
                        }
                        stored => stored?,
                    }
                }
                Ok(ids)
            }
            stored => stored.map(|()| Vec::new()),
        }
    }

    async fn append_spooled(
        &self,
        stream: &StreamName,
        events: &[&SpooledEvent],
    ) -> Result<(), StreamError> {
        let once = |event: &&SpooledEvent| IdempotentEntry {
            id: event.event_id.to_string(),
            fields: event.fields.clone(),
        };
        let once: Vec<IdempotentEntry> = events.iter().map(once).collect();
        let retention = self.retention(stream);
        self.backend.append_once(stream, &once, self.dedup_window(), retention).await.map(drop)
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
        let Some(oldest) = suspects().map(SpooledEvent::spooled_at).min() else {
            return Ok(found);
        };
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

/// Whether a stream permanently rejects an event.
fn is_permanent(error: &StreamError) -> bool {
    matches!(error, StreamError::Invalid { .. } | StreamError::WrongType { .. })
}

fn rejected(stream: &StreamName, error: &StreamError, ids: Vec<EntryId>) -> Vec<EntryId> {
    error!(%stream, %error, events = ids.len(), "spooled events permanently rejected by their stream");
    ids
}

/// Whether the dedup window of an event may be over. If the clock was set back, assume yes.
fn is_past_dedup_window(spooled_at: Timestamp, now: Timestamp, dedup_window: Duration) -> bool {
    spooled_at > now || now.since(spooled_at) > dedup_window / 2
}

#[cfg(test)]
mod tests;

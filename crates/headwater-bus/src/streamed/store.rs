//! Stores events, and handles an unavailable backend.
//!
//! Upstream: `publish`, with the events of one stream. Downstream: the breaker, the backend, the spool.
//! Guarantees: an error tells whether the events may be stored; with a spool, an unconfirmed event is spooled and
//! stored once, deduplicated by its id; no event overtakes spooled ones.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    Direction, EntryId, Fields, IdempotentEntry, Range, Retention, StreamError, StreamName,
};
use tracing::{error, info, warn};

use super::Inner;
use super::config::{DEDUP_WINDOW_DEFAULT, FailurePolicy};
use crate::breaker::BreakerPermit;
use crate::bus::StoreOutcome;
use crate::error::{BusError, Result};
use crate::handler::DeliveredEvent;
use crate::metrics;
use crate::name::{EventId, SessionId};

/// A validated event with its stream.
pub(super) struct PreparedEvent {
    pub(super) stream: StreamName,
    pub(super) session: Option<SessionId>,
    pub(super) delivered: DeliveredEvent,
    /// It, as stored.
    pub(super) fields: Fields,
    /// Whether the id was set by the caller, so that it may have been published before.
    pub(super) has_caller_id: bool,
}

impl PreparedEvent {
    fn event_id(&self) -> &EventId {
        &self.delivered.envelope.event_id
    }
}

impl Inner {
    /// Stores the events of one stream in order. One result for each.
    pub(super) async fn store(
        &self,
        stream: &StreamName,
        events: &[&PreparedEvent],
    ) -> Vec<Result<StoreOutcome>> {
        let answer = match &self.config.on_failure {
            FailurePolicy::Fail => self.store_or_fail(stream, events).await,
            FailurePolicy::Spool(_) => self.store_or_spool(stream, events).await,
            FailurePolicy::LocalOnly => self.store_or_not(stream, events).await,
        };
        match answer {
            Ok(stored) => stored.into_iter().map(Ok).collect(),
            Err(BusError::Unconfirmed { source, .. }) => {
                let unconfirmed = |event: &&PreparedEvent| self.unconfirmed(event, &source);
                events.iter().map(unconfirmed).collect()
            }
            Err(error) => events.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn store_or_fail(
        &self,
        stream: &StreamName,
        events: &[&PreparedEvent],
    ) -> Result<Vec<StoreOutcome>> {
        let admitted = self.breaker.admit();
        let permit = admitted.map_err(|retry_after| BusError::BreakerOpen { retry_after })?;
        events.iter().for_each(|event| self.own_events.store_started(event.event_id()));
        let answer = self.try_append(stream, events, permit).await;
        match answer {
            Ok(stored) => Ok(self.settle(events, stored)),
            Err(error) if may_have_been_stored(&error) => {
                let event_id = events[0].event_id().clone();
                Err(BusError::Unconfirmed { event_id, source: Arc::new(error) })
            }
            Err(error) => {
                self.abandon(events);
                Err(error.into())
            }
        }
    }

    /// This attempt definitely did not store them. Returns one that an earlier attempt may have stored.
    fn abandon(&self, events: &[&PreparedEvent]) -> Option<EventId> {
        let ids = events.iter().map(|event| event.event_id());
        ids.filter(|event_id| self.own_events.not_stored(event_id)).last().cloned()
    }

    /// An event that was stored before under the same id, but not confirmed, is new to the handlers here.
    fn settle(&self, events: &[&PreparedEvent], stored: Vec<StoreOutcome>) -> Vec<StoreOutcome> {
        let settle = |(event, stored): (&&PreparedEvent, StoreOutcome)| {
            let was_unconfirmed = self.own_events.settle(event.event_id());
            match stored {
                StoreOutcome::Duplicate(id) if was_unconfirmed => StoreOutcome::Entry(id),
                stored => stored,
            }
        };
        events.iter().zip(stored).map(settle).collect()
    }

    fn unconfirmed(
        &self,
        event: &PreparedEvent,
        source: &Arc<StreamError>,
    ) -> Result<StoreOutcome> {
        let event_id = event.event_id().clone();
        match self.own_events.store_unconfirmed(&event_id) {
            Some(entry_id) => Ok(StoreOutcome::Entry(entry_id)),
            None => Err(BusError::Unconfirmed { event_id, source: Arc::clone(source) }),
        }
    }

    async fn store_or_spool(
        &self,
        stream: &StreamName,
        events: &[&PreparedEvent],
    ) -> Result<Vec<StoreOutcome>> {
        let spool = self.spool.as_ref().expect("a bus with this policy has a spool");
        // No event may overtake spooled ones. A caller that gets here before the first event is spooled is concurrent
        // with it.
        spool.throttle().await;
        events.iter().for_each(|event| self.own_events.store_started(event.event_id()));
        let mut failed = None;
        if !spool.has_pending()
            && let Ok(permit) = self.breaker.admit()
        {
            match self.try_append(stream, events, permit).await {
                Ok(stored) => return Ok(self.settle(events, stored)),
                Err(error) if !error.is_transient() => {
                    self.abandon(events);
                    return Err(error.into());
                }
                Err(error) => {
                    warn!(%stream, %error, "events could not be stored and are spooled");
                    failed = Some(error);
                }
            }
        }
        let fields = events.iter().map(|event| &event.fields);
        let Err(problem) = spool.add(stream, fields, failed.is_some()).await else {
            // They will be stored exactly once from the spool.
            for event in events {
                self.own_events.settle(event.event_id());
            }
            return Ok(vec![StoreOutcome::Spooled; events.len()]);
        };
        error!(%stream, error = %problem, "events could not be spooled");
        // Neither in the spool nor in their stream, unless an earlier attempt stored them.
        if matches!(problem, BusError::SpoolFull { .. })
            && !failed.as_ref().is_some_and(may_have_been_stored)
            && self.abandon(events).is_none()
        {
            return Err(problem);
        }
        // If they are in their stream, their handlers run when they are read from it.
        let source = failed.unwrap_or_else(|| StreamError::Unavailable {
            problem: problem.to_string(),
            source: None,
        });
        let event_id = events[0].event_id().clone();
        Err(BusError::Unconfirmed { event_id, source: Arc::new(source) })
    }

    /// Only an event that was never sent definitely stays in this process. One that was sent and not confirmed may be
    /// in its stream, where other processes see it.
    async fn store_or_not(
        &self,
        stream: &StreamName,
        events: &[&PreparedEvent],
    ) -> Result<Vec<StoreOutcome>> {
        let Ok(permit) = self.breaker.admit() else {
            return Ok(vec![StoreOutcome::LocalOnly; events.len()]);
        };
        match self.try_append(stream, events, permit).await {
            Ok(stored) => Ok(stored),
            Err(error) if !error.is_transient() => Err(error.into()),
            Err(error) => {
                let stored = match may_have_been_stored(&error) {
                    true => StoreOutcome::Unconfirmed,
                    false => StoreOutcome::LocalOnly,
                };
                warn!(
                    %stream,
                    %error,
                    result = stored.label(),
                    "events could not be stored; only handlers of this process run"
                );
                Ok(vec![stored; events.len()])
            }
        }
    }

    /// Tries to store events and reports the result to the breaker.
    async fn try_append(
        &self,
        stream: &StreamName,
        events: &[&PreparedEvent],
        permit: BreakerPermit,
    ) -> Result<Vec<StoreOutcome>, StreamError> {
        let answer = self.append(stream, events).await;
        match &answer {
            Err(error) if error.is_transient() => {
                if permit.failed() {
                    metrics::breaker_opened();
                    info!(%error, "circuit breaker opened; backend calls are suspended");
                }
            }
            _ => permit.succeeded(),
        }
        answer
    }

    async fn append(
        &self,
        stream: &StreamName,
        events: &[&PreparedEvent],
    ) -> Result<Vec<StoreOutcome>, StreamError> {
        let retention = self.retention(stream);
        if !self.dedups_all() && !events.iter().any(|event| event.has_caller_id) {
            let fields: Vec<Fields> = events.iter().map(|event| event.fields.clone()).collect();
            let ids = self.backend.append(stream, &fields, retention).await?;
            return Ok(ids.into_iter().map(StoreOutcome::Entry).collect());
        }
        let once: Vec<IdempotentEntry> = events
            .iter()
            .map(|event| IdempotentEntry {
                id: event.event_id().to_string(),
                fields: event.fields.clone(),
            })
            .collect();
        let keep = self.dedup_window();
        let appended = self.backend.append_once(stream, &once, keep, retention).await?;
        let mut stored = Vec::with_capacity(events.len());
        for (event, appended) in events.iter().zip(appended) {
            // A generated id is unique. One set by the caller may have been published before.
            let is_new = !appended.duplicate
                || !event.has_caller_id
                || self.is_own_write(stream, appended.id, &event.fields).await;
            stored.push(if is_new {
                StoreOutcome::Entry(appended.id)
            } else {
                StoreOutcome::Duplicate(appended.id)
            });
        }
        Ok(stored)
    }

    /// Whether an entry was written by this call: the backend retries a call whose reply was lost, and then finds its
    /// own entry. Every call has its own span, so the fields identify it.
    async fn is_own_write(&self, stream: &StreamName, entry_id: EntryId, fields: &Fields) -> bool {
        let range = Range { from: entry_id, to: entry_id, direction: Direction::Forward, count: 1 };
        match self.backend.range(stream, range).await {
            Ok(entries) => entries.first().is_some_and(|entry| entry.fields == *fields),
            Err(_) => false,
        }
    }

    /// Whether all events are deduplicated, not only those with an id set by the caller.
    fn dedups_all(&self) -> bool {
        self.config.dedup_window.is_some() || self.spool.is_some()
    }

    pub(super) fn dedup_window(&self) -> Duration {
        self.config.dedup_window.unwrap_or(DEDUP_WINDOW_DEFAULT)
    }

    pub(super) fn retention(&self, stream: &StreamName) -> &Retention {
        if *stream == self.control {
            &self.config.control_retention
        } else {
            &self.config.session_retention
        }
    }
}

/// Whether a call that failed with this error may have stored something.
fn may_have_been_stored(error: &StreamError) -> bool {
    matches!(
        error,
        StreamError::Unavailable { .. } | StreamError::Full { .. } | StreamError::Protocol { .. }
    )
}

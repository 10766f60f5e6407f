//! Publishing: validate, store, then run the live handlers of this process.
//!
//! Upstream: `EventBus::publish_all`, in its own task. Downstream: `store`, then `live`.
//! Guarantees: invalid input has no effect; handlers run in event order, and only for events that are stored or that the
//! failure policy accepts.

use std::sync::Arc;
use std::time::Instant;

use headwater_stream::StreamName;
use tracing::Instrument;

use super::Inner;
use super::store::PreparedEvent;
use crate::bus::{PublishResult, StoreOutcome};
use crate::error::{BusError, Result};
use crate::event::{Envelope, OutgoingEvent, Scope, publish_span};
use crate::handler::DeliveredEvent;
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX};
use crate::live::EventSource;
use crate::metrics;
use crate::name::{EventId, SessionId};
use crate::trace;

impl Inner {
    pub(super) async fn publish_all(
        &self,
        events: Vec<OutgoingEvent>,
    ) -> Result<Vec<Result<PublishResult>>> {
        let mut prepared = self.prepare(events)?;
        let began = Instant::now();
        let first = prepared.first().map(|event| &*event.delivered.envelope);
        let span = publish_span(first, prepared.len());
        let stored = self.store_all(&prepared).instrument(span).await;
        let took = began.elapsed();
        let mut results = Vec::with_capacity(stored.len());
        for (event, stored) in prepared.iter_mut().zip(stored) {
            let event_type = event.delivered.envelope.event_type.clone();
            results.push(match stored {
                Ok(stored) => {
                    metrics::published(&event_type, stored.label(), took);
                    Ok(self.dispatch(event, stored).await)
                }
                Err(error) => {
                    metrics::publish_failed(&event_type);
                    Err(error)
                }
            });
        }
        Ok(results)
    }

    /// Validates and prepares all events; an error has no effect.
    fn prepare(&self, events: Vec<OutgoingEvent>) -> Result<Vec<PreparedEvent>> {
        let bytes: usize = events.iter().map(|event| event.payload.len()).sum();
        if events.len() > BATCH_MAX || bytes > BATCH_BYTES_MAX {
            let problem = format!(
                "{} events, {bytes} bytes; the limits are {BATCH_MAX} and {BATCH_BYTES_MAX}",
                events.len()
            );
            return Err(BusError::invalid("batch", problem));
        }
        let now = self.config.clock.now();
        let mut prepared = Vec::with_capacity(events.len());
        for event in events {
            self.registry.check_outgoing(&event)?;
            let (stream, session) = self.place(&event)?;
            let event_id = event.event_id.clone().unwrap_or_else(EventId::random);
            let trace = event.trace.unwrap_or_else(trace::next_span);
            let mut envelope =
                Envelope::outgoing(&event, event_id, self.own_events.origin(), trace, now);
            envelope.stream = Some(stream.clone());
            let envelope = Arc::new(envelope);
            prepared.push(PreparedEvent {
                stream,
                session,
                fields: envelope.to_fields(),
                has_caller_id: event.event_id.is_some(),
                delivered: DeliveredEvent { value: event.value, envelope },
            });
        }
        Ok(prepared)
    }

    /// The stream of an event, and its session if it has one.
    fn place(&self, event: &OutgoingEvent) -> Result<(StreamName, Option<SessionId>)> {
        if event.scope == Scope::Namespace {
            return Ok((self.control.clone(), None));
        }
        let session = event.session.as_ref().or(self.config.session.as_ref());
        let session = session.ok_or_else(|| {
            let problem = "no session is set, and the bus has no default session";
            BusError::invalid(format!("event `{}`", event.event_type), problem)
        })?;
        Ok((self.keys.session(session), Some(session.clone())))
    }

    /// Stores all events, grouped by stream. One result for each, in order.
    async fn store_all(&self, events: &[PreparedEvent]) -> Vec<Result<StoreOutcome>> {
        let mut streams: Vec<(&StreamName, Vec<usize>)> = Vec::new();
        for (index, event) in events.iter().enumerate() {
            match streams.iter_mut().find(|(stream, _)| *stream == &event.stream) {
                Some((_, indexes)) => indexes.push(index),
                None => streams.push((&event.stream, vec![index])),
            }
        }
        let mut answers: Vec<Option<Result<StoreOutcome>>> = events.iter().map(|_| None).collect();
        for (stream, indexes) in streams {
            let batch: Vec<&PreparedEvent> = indexes.iter().map(|index| &events[*index]).collect();
            for (index, answer) in indexes.into_iter().zip(self.store(stream, &batch).await) {
                answers[index] = Some(answer);
            }
        }
        answers.into_iter().map(|answer| answer.unwrap_or(Err(BusError::Closed))).collect()
    }

    async fn dispatch(&self, event: &mut PreparedEvent, stored: StoreOutcome) -> PublishResult {
        let event_id = event.delivered.envelope.event_id.clone();
        let mut result =
            PublishResult { event_id, stored, handlers_invoked: 0, failures: Vec::new() };
        if !stored.is_new() {
            return result;
        }
        Arc::make_mut(&mut event.delivered.envelope).entry_id = result.entry_id();
        let source = EventSource::Here(event.session.as_ref());
        let own = self.config.session.as_ref();
        let dispatched = self.live.dispatch(&event.delivered, source, own).await;
        result.handlers_invoked = dispatched.invoked;
        result.failures = dispatched.failures;
        result
    }
}

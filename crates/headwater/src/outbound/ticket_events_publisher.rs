//! Publishes events from the outbox to streams: ticket events, events of the desk, events of handlers, and the steps of
//! model runs.
//!
//! Upstream: `outbound` passes rows of kind `event`. Downstream: the stream backend.
//! Guarantees: an event is appended once, even if its row is repeated within a day; a step that is repeated later counts
//! once in its session. A session is created before its first step, so it is listed. An unavailable backend counts no
//! attempt, and is probed by one event at a time, so that other rows do not wait for its timeout. `ticket_events` is
//! trimmed to about ten thousand entries, but never loses an entry that a group has not read.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use headwater_bus::{BusError, Envelope, EventId, SessionError, SessionId, Sessions};
use headwater_issue::{DeliverError, OutboxRow, TraceContext};
use headwater_stream::clock::Timestamp;
use headwater_stream::{Backend, Fields, IdempotentEntry, Retention, StreamError, StreamName};

use crate::desk::session::{SESSION_STEPS, SessionStep, SessionSteps};
use crate::limits::{APPENDED_KEPT, TICKET_EVENTS_KEPT};
use crate::tickets::desk_events::DESK_EVENTS;
use crate::tickets::{TICKET_EVENTS, TicketEvent};

/// Pause after a failed append.
const BACKOFF: Duration = Duration::from_secs(2);
/// How long a probe may take; longer than any backend call.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// Publishes events to streams.
#[derive(Clone)]
pub struct TicketEventsPublisher {
    streams: Arc<dyn Backend>,
    /// Target of handler events: the control stream of the bus.
    control: StreamName,
    /// Sessions of model runs.
    sessions: Arc<Sessions>,
    /// Until then, the backend is treated as unavailable.
    backoff_until: Arc<Mutex<Option<Instant>>>,
}

impl std::fmt::Debug for TicketEventsPublisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TicketEventsPublisher")
    }
}

impl TicketEventsPublisher {
    /// Publishes to this backend: ticket events to `ticket_events`, events of the desk to `desk_events`, steps of model runs to their sessions, all others to
    /// `control`.
    pub fn new(streams: Arc<dyn Backend>, control: StreamName, sessions: Arc<Sessions>) -> Self {
        Self { streams, control, sessions, backoff_until: Arc::default() }
    }

    /// Publishes the event of a row.
    pub async fn publish(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        if self.is_backing_off(Instant::now()) {
            return Err(DeliverError::Unavailable(
                "stream backend was unavailable a moment ago; backing off".into(),
            ));
        }
        let published = self.append(row).await;
        let is_unavailable = matches!(published, Err(DeliverError::Unavailable(_)));
        self.back_off_until(is_unavailable.then(|| Instant::now() + BACKOFF));
        published
    }

    async fn append(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        let (stream, fields) = match row.target.as_str() {
            SESSION_STEPS => return self.append_steps(row).await,
            TICKET_EVENTS => (
                StreamName::new(TICKET_EVENTS).expect("a short and plain name"),
                ticket_event(row)?,
            ),
            DESK_EVENTS => (
                StreamName::new(DESK_EVENTS).expect("a short and plain name"),
                Fields::new([("data", row.payload.clone())]),
            ),
            _ => (self.control.clone(), bus_event(row)),
        };
        let once = IdempotentEntry { id: row.idempotency_key.clone(), fields };
        let retention = Retention::max_len(TICKET_EVENTS_KEPT);
        let appended = self.streams.append_once(&stream, &[once], APPENDED_KEPT, &retention).await;
        let is_denied = |error: &StreamError| matches!(error, StreamError::Denied { .. });
        appended
            .map(drop)
            .map_err(|error| failure(&error, error.is_transient() || is_denied(&error)))
    }

    async fn append_steps(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        let dead = |error: &dyn std::fmt::Display| {
            DeliverError::Dead(format!("the payload is not a list of session steps: {error}"))
        };
        let SessionSteps { session_id, trace, steps } =
            serde_json::from_str(&row.payload).map_err(|error| dead(&error))?;
        let session = SessionId::new(session_id).map_err(|error| dead(&error))?;
        let trace = trace.as_deref().and_then(TraceContext::parse);
        let events = steps.into_iter().map(|step| envelope(step, trace));
        let events = events.collect::<Result<Vec<_>, BusError>>();
        let events = events.map_err(|error| dead(&error))?;
        let appended = self.sessions.append_once(&session, &events, APPENDED_KEPT).await;
        appended.map_err(|error: SessionError| {
            failure(&error, error.is_transient() || error.is_denied())
        })
    }

    /// Whether to skip the backend. When the backoff has elapsed, the first caller probes it.
    fn is_backing_off(&self, now: Instant) -> bool {
        let mut until = self.backoff_until.lock().expect("no code panics while it holds this lock");
        match *until {
            None => false,
            Some(until) if now < until => true,
            Some(_) => {
                *until = Some(now + PROBE_TIMEOUT);
                false
            }
        }
    }

    fn back_off_until(&self, until: Option<Instant>) {
        *self.backoff_until.lock().expect("no code panics while it holds this lock") = until;
    }
}

/// A rejected password is an outage, not a defect of the row: the row is delivered when it is corrected.
fn failure(error: &dyn std::fmt::Display, is_outage: bool) -> DeliverError {
    match is_outage {
        true => DeliverError::Unavailable(error.to_string()),
        false => DeliverError::Dead(error.to_string()),
    }
}

/// The event of a step; all steps of a run are in the trace of the run, each with a span of its own.
fn envelope(step: SessionStep, trace: Option<TraceContext>) -> Result<Envelope, BusError> {
    Ok(Envelope {
        event_id: EventId::new(step.event_id)?,
        event_type: step.event_type,
        version: step.version,
        timestamp: Timestamp::from_rfc3339(&step.timestamp),
        origin: None,
        trace_id: trace.map(|trace| format!("{:032x}", trace.trace_id())),
        span_id: trace.map(|trace| format!("{:016x}", trace.child().span_id())),
        payload: Bytes::from(step.payload),
        stream: None,
        entry_id: None,
        copy_of: None,
        deliveries: 1,
    })
}

/// One field, `data`. The event is encoded again, because a database may reorder JSON keys.
fn ticket_event(row: &OutboxRow) -> Result<Fields, DeliverError> {
    let event: TicketEvent = serde_json::from_str(&row.payload).map_err(|error| {
        DeliverError::Dead(format!("the payload is not a ticket event: {error}"))
    })?;
    Ok(Fields::new([("data", event.to_json())]))
}

/// The fields of a bus event. Its type does not have to be registered here.
fn bus_event(row: &OutboxRow) -> Fields {
    Fields::new([
        ("type", row.target.clone()),
        ("payload", row.payload.clone()),
        ("timestamp", row.created_at.to_rfc3339()),
        ("event_id", row.idempotency_key.clone()),
        ("version", "1".to_owned()),
    ])
}

#[cfg(test)]
mod tests {
    use headwater_bus::{EventRegistry, Folds, SessionsConfig, StreamedBus};

    use super::*;

    #[tokio::test]
    async fn an_unavailable_backend_is_probed_by_one_event_at_a_time() {
        let streams = headwater_stream::connect("embedded:memory", &Default::default()).await;
        let bus = Arc::new(StreamedBus::in_memory(EventRegistry::builtin()).await.unwrap());
        let sessions = Sessions::new(bus, Folds::none(), SessionsConfig::default()).await.unwrap();
        let (streams, control) = (streams.unwrap(), StreamName::new("control").unwrap());
        let publisher = TicketEventsPublisher::new(streams, control, Arc::new(sessions));
        let mut now = Instant::now();
        assert!(
            !publisher.is_backing_off(now) && !publisher.is_backing_off(now),
            "no backoff before a failure"
        );

        publisher.back_off_until(Some(now + BACKOFF));
        assert!(publisher.is_backing_off(now));
        now += BACKOFF;
        assert!(!publisher.is_backing_off(now), "one event probes");
        assert!(publisher.is_backing_off(now), "the others back off");
        // The probe may never return.
        now += PROBE_TIMEOUT;
        assert!(!publisher.is_backing_off(now) && publisher.is_backing_off(now));

        publisher.back_off_until(None);
        assert!(!publisher.is_backing_off(now) && !publisher.is_backing_off(now));
    }
}

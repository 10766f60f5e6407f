//! Publishes events from the outbox to streams.
//!
//! Upstream: `outbound` passes rows of kind `event`. Downstream: the stream backend.
//! Guarantees: an event is appended once, even if its row is repeated within a day. An unavailable backend counts no
//! attempt, and is probed by one event at a time, so that other rows do not wait for its timeout. `ticket_events` is
//! trimmed to about ten thousand entries, but never loses an entry that a group has not read.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use headwater_issue::{DeliverError, OutboxRow};
use headwater_stream::{Backend, Fields, IdempotentEntry, Retention, StreamName};

use crate::limits::{APPENDED_KEPT, TICKET_EVENTS_KEPT};
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
    /// Until then, the backend is treated as unavailable.
    backoff_until: Arc<Mutex<Option<Instant>>>,
}

impl std::fmt::Debug for TicketEventsPublisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TicketEventsPublisher")
    }
}

impl TicketEventsPublisher {
    /// Publishes to this backend: ticket events to `ticket_events`, all others to `control`.
    pub fn new(streams: Arc<dyn Backend>, control: StreamName) -> Self {
        Self { streams, control, backoff_until: Arc::default() }
    }

    /// Publishes the event of a row.
    pub async fn publish(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        let (stream, fields) = match row.target.as_str() {
            TICKET_EVENTS => (
                StreamName::new(TICKET_EVENTS).expect("a short and plain name"),
                ticket_event(row)?,
            ),
            _ => (self.control.clone(), bus_event(row)),
        };
        if self.is_backing_off(Instant::now()) {
            return Err(DeliverError::Unavailable(
                "stream backend was unavailable a moment ago; backing off".into(),
            ));
        }
        let once = IdempotentEntry { id: row.idempotency_key.clone(), fields };
        let retention = Retention::max_len(TICKET_EVENTS_KEPT);
        let appended = self.streams.append_once(&stream, &[once], APPENDED_KEPT, &retention).await;
        match appended {
            Err(error) if error.is_transient() => {
                self.back_off_until(Some(Instant::now() + BACKOFF));
                Err(DeliverError::Unavailable(error.to_string()))
            }
            result => {
                self.back_off_until(None);
                result.map(drop).map_err(|error| DeliverError::Dead(error.to_string()))
            }
        }
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
    use super::*;

    #[tokio::test]
    async fn an_unavailable_backend_is_probed_by_one_event_at_a_time() {
        let streams = headwater_stream::connect("embedded:memory", &Default::default()).await;
        let publisher =
            TicketEventsPublisher::new(streams.unwrap(), StreamName::new("control").unwrap());
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

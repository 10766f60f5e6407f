//! Events on their way from the outbox into streams.
//!
//! Upstream: `replies` brings rows of kind `event`. Downstream: the stream backend.
//! Promises: an event stands in its stream once, however often its row comes within a day; a stream backend that is away
//! costs it no attempt, and is asked by one event at a time until it is back, so that others, and replies, do not wait for
//! its answer. `ticket_events` is kept to about ten thousand entries, and never loses one that a group has not read.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use headwater_issue::{DeliverError, OutboxRow};
use headwater_stream::{Backend, Fields, Once, Retention, StreamName};

use crate::limits::{APPENDED_KEPT, TICKET_EVENTS_KEPT};
use crate::tickets::{TICKET_EVENTS, TicketEvent};

/// How long a backend that was away is left alone.
const LEFT_ALONE: Duration = Duration::from_secs(2);
/// How long one event may find out whether it is back; longer than any call takes.
const FINDING_OUT: Duration = Duration::from_secs(30);

/// Puts events into streams.
#[derive(Clone)]
pub struct Outlet {
    streams: Arc<dyn Backend>,
    /// Where events of handlers go: the control stream of the bus.
    control: StreamName,
    /// While it lasts, the backend counts as away without being asked.
    away_until: Arc<Mutex<Option<Instant>>>,
}

impl std::fmt::Debug for Outlet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Outlet")
    }
}

impl Outlet {
    /// Puts events into streams of this backend: those of tickets into their own, all others into `control`.
    pub fn new(streams: Arc<dyn Backend>, control: StreamName) -> Self {
        Self { streams, control, away_until: Arc::default() }
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
        if self.is_away(Instant::now()) {
            return Err(DeliverError::Away("the streams were away a moment ago".into()));
        }
        let once = Once { id: row.idempotency_key.clone(), fields };
        let retention = Retention::max_len(TICKET_EVENTS_KEPT);
        let appended = self.streams.append_once(&stream, &[once], APPENDED_KEPT, &retention).await;
        match appended {
            Err(error) if error.is_transient() => {
                self.leave_alone_until(Some(Instant::now() + LEFT_ALONE));
                Err(DeliverError::Away(error.to_string()))
            }
            answer => {
                self.leave_alone_until(None);
                answer.map(drop).map_err(|error| DeliverError::Dead(error.to_string()))
            }
        }
    }

    /// Whether the backend is known to be away. When it was left alone for long enough, the first to ask finds out.
    fn is_away(&self, now: Instant) -> bool {
        let mut until = self.away_until.lock().expect("nobody panics with it");
        match *until {
            None => false,
            Some(until) if now < until => true,
            Some(_) => {
                *until = Some(now + FINDING_OUT);
                false
            }
        }
    }

    fn leave_alone_until(&self, until: Option<Instant>) {
        *self.away_until.lock().expect("nobody panics with it") = until;
    }
}

/// One field, `data`. A database may have changed the order of keys, so it is written anew.
fn ticket_event(row: &OutboxRow) -> Result<Fields, DeliverError> {
    let event: TicketEvent = serde_json::from_str(&row.payload)
        .map_err(|error| DeliverError::Dead(format!("it is no event of a ticket: {error}")))?;
    Ok(Fields::new([("data", event.to_json())]))
}

/// As the bus writes events. Its type need not be known here.
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
    async fn a_backend_that_was_away_is_asked_by_one_at_a_time_until_it_is_back() {
        let streams = headwater_stream::connect("embedded:memory", &Default::default()).await;
        let outlet = Outlet::new(streams.unwrap(), StreamName::new("control").unwrap());
        let mut now = Instant::now();
        assert!(!outlet.is_away(now) && !outlet.is_away(now), "whoever likes may ask");

        outlet.leave_alone_until(Some(now + LEFT_ALONE));
        assert!(outlet.is_away(now));
        now += LEFT_ALONE;
        assert!(!outlet.is_away(now), "one finds out");
        assert!(outlet.is_away(now), "and the others wait for it");
        // It may never come back with an answer.
        now += FINDING_OUT;
        assert!(!outlet.is_away(now) && outlet.is_away(now));

        outlet.leave_alone_until(None);
        assert!(!outlet.is_away(now) && !outlet.is_away(now));
    }
}

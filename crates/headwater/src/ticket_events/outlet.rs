//! Events on their way from the outbox into streams.
//!
//! Upstream: `replies` brings rows of kind `event`. Downstream: the stream backend.
//! Promises: an event stands in its stream once, however often its row comes within a day; a stream backend that is away
//! costs it no attempt. `ticket_events` is kept to about ten thousand entries, and never loses one that a group has not read.

use std::sync::Arc;

use headwater_issue::{DeliverError, OutboxRow};
use headwater_stream::{Backend, Fields, Once, Retention, StreamName};

use super::event::TicketEvent;
use crate::limits::{APPENDED_KEPT, TICKET_EVENTS_KEPT};

/// The stream of ticket events, and the target of their outbox rows.
pub const TICKET_EVENTS: &str = "ticket_events";

/// Puts events into streams.
#[derive(Clone)]
pub struct Outlet {
    streams: Arc<dyn Backend>,
    /// Where events of handlers go: the control stream of the bus.
    control: StreamName,
}

impl std::fmt::Debug for Outlet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Outlet")
    }
}

impl Outlet {
    /// Puts events into streams of this backend: those of tickets into their own, all others into `control`.
    pub fn new(streams: Arc<dyn Backend>, control: StreamName) -> Self {
        Self { streams, control }
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
        let once = Once { id: row.idempotency_key.clone(), fields };
        let retention = Retention::max_len(TICKET_EVENTS_KEPT);
        let appended = self.streams.append_once(&stream, &[once], APPENDED_KEPT, &retention).await;
        match appended {
            Ok(_) => Ok(()),
            Err(error) if error.is_transient() => Err(DeliverError::Away(error.to_string())),
            Err(error) => Err(DeliverError::Dead(error.to_string())),
        }
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

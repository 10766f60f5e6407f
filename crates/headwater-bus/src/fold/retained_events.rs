//! Folds that keep whole events: the newest one, or the newest N.
//!
//! Upstream: `fold`. Guarantees: payloads are kept as written, so upcasters still apply when a snapshot is loaded. The
//! number and bytes of kept events are bounded; the newest event is always kept, and dropped events are counted.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, StreamName};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{AnyFold, SessionEvent};
use crate::error::{BusError, Result};
use crate::event::{Envelope, Event, ReceivedEvent};
use crate::limits::{RETAINED_BYTES_MAX, RETAINED_EVENTS_MAX};
use crate::name::EventId;
use crate::registry::EventRegistry;

/// The newest events of one type.
pub(super) struct RetainedEvents<E> {
    pub(super) name: String,
    max: usize,
    max_bytes: usize,
    bytes: usize,
    pub(super) events: VecDeque<ReceivedEvent<E>>,
    pub(super) dropped: u64,
}

impl<E> RetainedEvents<E> {
    pub(super) fn new(name: String, max: usize) -> Self {
        let (bytes, max_bytes) = (0, RETAINED_BYTES_MAX);
        Self { name, max, max_bytes, bytes, events: VecDeque::new(), dropped: 0 }
    }

    fn push(&mut self, received: ReceivedEvent<E>) {
        self.bytes += saved_bytes(&received.envelope);
        self.events.push_back(received);
        while self.events.len() > self.max || self.bytes > self.max_bytes && self.events.len() > 1 {
            let Some(oldest) = self.events.pop_front() else { break };
            self.bytes -= saved_bytes(&oldest.envelope);
            self.dropped += 1;
        }
    }
}

#[derive(Serialize, Deserialize)]
struct SavedEvents {
    dropped: u64,
    events: Vec<SavedEvent>,
}

/// An event with its payload as written, so that upcasters still apply when it is loaded.
#[derive(Serialize, Deserialize)]
struct SavedEvent {
    id: String,
    version: u32,
    at: Option<u64>,
    origin: Option<String>,
    trace_id: Option<String>,
    span_id: Option<String>,
    stream: Option<String>,
    entry_id: Option<String>,
    payload: String,
}

impl<E: Event> AnyFold for RetainedEvents<E> {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> u32 {
        1
    }

    fn check(&self) -> Result<()> {
        if !(1..=RETAINED_EVENTS_MAX).contains(&self.max) {
            let problem =
                format!("it keeps {} events; must be 1 to {RETAINED_EVENTS_MAX}", self.max);
            return Err(BusError::invalid(format!("fold `{}`", self.name), problem));
        }
        Ok(())
    }

    fn apply(&mut self, event: &SessionEvent) {
        if let Some(received) = event.get::<E>() {
            self.push(received);
        }
    }

    fn keeps_events(&self) -> bool {
        true
    }

    fn limit(&mut self, bytes: usize) {
        self.max_bytes = bytes;
    }

    fn save(&self) -> serde_json::Result<Box<RawValue>> {
        let events = self.events.iter().map(|event| SavedEvent::new(&event.envelope)).collect();
        serde_json::value::to_raw_value(&SavedEvents { dropped: self.dropped, events })
    }

    fn load(&mut self, saved: &RawValue, registry: &EventRegistry) -> Result<(), String> {
        let saved: SavedEvents =
            serde_json::from_str(saved.get()).map_err(|error| error.to_string())?;
        let read = |event: SavedEvent| -> Result<ReceivedEvent<E>, String> {
            let envelope = event.read(E::TYPE)?;
            let event = registry.decode::<E>(&envelope).map_err(|error| error.to_string())?;
            Ok(ReceivedEvent { event, envelope: Arc::new(envelope) })
        };
        let events = saved.events.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
        self.events.clear();
        (self.bytes, self.dropped) = (0, saved.dropped);
        events.into_iter().for_each(|event| self.push(event));
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn boxed(&self) -> Box<dyn AnyFold> {
        Box::new(Self {
            name: self.name.clone(),
            max: self.max,
            max_bytes: self.max_bytes,
            bytes: self.bytes,
            events: self.events.clone(),
            dropped: self.dropped,
        })
    }
}

/// Approximate size of an event in a snapshot, in bytes.
fn saved_bytes(envelope: &Envelope) -> usize {
    // The payload is a JSON string there: an escaped character takes two bytes.
    let escaped = envelope.payload.iter().filter(|byte| matches!(byte, 0..0x20 | b'"' | b'\\'));
    let origin = envelope.origin.as_ref().map_or(0, String::len);
    let stream = envelope.stream.as_ref().map_or(0, |stream| stream.as_str().len());
    let names = envelope.event_id.as_str().len() + origin + stream;
    AROUND_BYTES + names + envelope.payload.len() + escaped.count()
}

/// Overhead per event besides names and payload: field names, numbers, trace and entry ids.
const AROUND_BYTES: usize = 256;

impl SavedEvent {
    fn new(envelope: &Envelope) -> Self {
        Self {
            id: envelope.event_id.to_string(),
            version: envelope.version,
            at: envelope.timestamp.map(Timestamp::as_millis),
            origin: envelope.origin.clone(),
            trace_id: envelope.trace_id.clone(),
            span_id: envelope.span_id.clone(),
            stream: envelope.stream.as_ref().map(ToString::to_string),
            entry_id: envelope.entry_id.map(|id| id.to_string()),
            payload: String::from_utf8_lossy(&envelope.payload).into_owned(),
        }
    }

    fn read(self, event_type: &str) -> Result<Envelope, String> {
        let entry_id = self.entry_id.map(|id| id.parse::<EntryId>()).transpose();
        let stream = self.stream.map(StreamName::new).transpose();
        Ok(Envelope {
            event_id: EventId::new(&self.id).map_err(|error| error.to_string())?,
            event_type: event_type.to_owned(),
            version: self.version,
            timestamp: self.at.map(Timestamp::from_millis),
            origin: self.origin,
            trace_id: self.trace_id,
            span_id: self.span_id,
            payload: self.payload.into_bytes().into(),
            stream: stream.map_err(|error| error.to_string())?,
            entry_id: entry_id.map_err(|error| error.to_string())?,
            copy_of: None,
            deliveries: 1,
        })
    }
}

//! Events: typed facts, their envelope, and how both are encoded in a stream entry.
//!
//! Upstream: applications. Downstream: entries of `headwater-stream`, with the field names of the wire format.
//! Guarantees: payload bytes are never re-encoded; an entry of another program needs only `type` and `payload`.
//! Not here: which types are allowed, and upcasting of old versions (see `registry`).

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;
use headwater_queue::TraceContext;
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Fields, StreamName};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{BusError, DecodeError, Result};
use crate::limits::PAYLOAD_BYTES_MAX;
use crate::name::{EventId, SessionId};
use crate::trace;

pub(crate) const TYPE: &str = "type";
pub(crate) const PAYLOAD: &str = "payload";
const TIMESTAMP: &str = "timestamp";
pub(crate) const EVENT_ID: &str = "event_id";
const VERSION: &str = "version";
const ORIGIN: &str = "origin";
const TRACE_ID: &str = "trace_id";
const SPAN_ID: &str = "span_id";
/// Written by consumers of `headwater-queue` when they re-append a delayed message.
const ORIGINAL_MESSAGE_ID: &str = "originalMessageId";

/// A fact with a stable name and a version, as JSON.
///
/// ```
/// use headwater_bus::{Event, Scope};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, JsonSchema)]
/// struct TicketClosed {
///     ticket_id: String,
///     session_id: String,
/// }
///
/// impl Event for TicketClosed {
///     const TYPE: &'static str = "desk.TicketClosed";
///     const SCOPE: Scope = Scope::Session;
///     fn session(&self) -> Option<&str> {
///         Some(&self.session_id)
///     }
/// }
/// ```
pub trait Event: Serialize + DeserializeOwned + JsonSchema + Send + Sync + 'static {
    /// The stable name of the type, shared by all programs. Renaming the Rust type does not change it.
    const TYPE: &'static str;

    /// Version of the payload, from 1. Increment it for changes that older readers cannot decode.
    const VERSION: u32 = 1;

    /// Where events of this type are stored.
    const SCOPE: Scope = Scope::Namespace;

    /// The session of the event, for [`Scope::Session`]; `None`: the session of the bus.
    fn session(&self) -> Option<&str> {
        None
    }
}

/// Where events of a type are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// In the stream of a session: the event's, otherwise that of the bus.
    Session,
    /// In the control stream of the bus's namespace.
    Namespace,
}

/// An event to be published.
#[derive(Clone)]
pub struct OutgoingEvent {
    pub(crate) event_type: &'static str,
    pub(crate) version: u32,
    pub(crate) scope: Scope,
    pub(crate) session: Option<SessionId>,
    pub(crate) payload: Bytes,
    pub(crate) value: EventValue,
    pub(crate) event_id: Option<EventId>,
    pub(crate) trace: Option<TraceContext>,
}

/// A decoded event with its type erased.
pub(crate) type EventValue = Arc<dyn Any + Send + Sync>;

impl OutgoingEvent {
    /// Encodes the event as JSON and checks its size and session.
    pub fn new<E: Event>(event: E) -> Result<Self> {
        let payload = serde_json::to_vec(&event).map_err(|error| {
            let problem = format!("it cannot be encoded as JSON: {error}");
            BusError::invalid(format!("event `{}`", E::TYPE), problem)
        })?;
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(BusError::TooLarge {
                event_type: E::TYPE.to_owned(),
                bytes: payload.len(),
                limit: PAYLOAD_BYTES_MAX,
            });
        }
        let session = event.session().map(SessionId::new).transpose()?;
        if session.is_some() && E::SCOPE == Scope::Namespace {
            let problem = "it has a session, but its `SCOPE` is `Namespace`";
            return Err(BusError::invalid(format!("event type `{}`", E::TYPE), problem));
        }
        Ok(Self {
            event_type: E::TYPE,
            version: E::VERSION,
            scope: E::SCOPE,
            session,
            payload: payload.into(),
            value: Arc::new(event),
            event_id: None,
            trace: None,
        })
    }

    /// Sets the event id. Publishing again under the same id within the dedup window of the bus is idempotent.
    pub fn with_id(mut self, event_id: EventId) -> Self {
        self.event_id = Some(event_id);
        self
    }

    /// Sets the trace. Default: the trace of the event being handled, otherwise a new one.
    pub fn with_trace(mut self, trace: TraceContext) -> Self {
        self.trace = Some(trace);
        self
    }
}

impl OutgoingEvent {
    /// Joins the current trace, unless a trace is set.
    pub(crate) fn join_trace(&mut self) {
        self.trace.get_or_insert_with(trace::next_span);
    }
}

impl fmt::Debug for OutgoingEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutgoingEvent")
            .field("event_type", &self.event_type)
            .field("version", &self.version)
            .field("session", &self.session)
            .field("event_id", &self.event_id)
            .finish_non_exhaustive()
    }
}

/// Metadata and payload of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// Id of the event. An entry of another program without one is identified by its stream and entry id.
    pub event_id: EventId,
    /// The registered name of the event type.
    pub event_type: String,
    /// Version of the payload; 1 if the entry has no version.
    pub version: u32,
    /// Time of publication, if the entry has one.
    pub timestamp: Option<Timestamp>,
    /// The bus that published it; different after every restart.
    pub origin: Option<String>,
    /// Id of the trace.
    pub trace_id: Option<String>,
    /// Id of the span.
    pub span_id: Option<String>,
    /// The payload as JSON, unchanged.
    pub payload: Bytes,
    /// Its stream; `None` if it is not stored.
    pub stream: Option<StreamName>,
    /// Its entry; `None` if it is not stored.
    pub entry_id: Option<EntryId>,
    /// The entry that this one repeats for a consumer group that failed on it. Readers of the whole stream skip it.
    pub copy_of: Option<EntryId>,
    /// Number of deliveries to the group, including those to crashed processes; 1 without a group.
    pub deliveries: u64,
}

impl Envelope {
    /// The envelope of an event to be published.
    pub(crate) fn outgoing(
        event: &OutgoingEvent,
        event_id: EventId,
        origin: &str,
        trace: TraceContext,
        now: Timestamp,
    ) -> Self {
        let (trace_id, span_id) = trace::to_ids(trace);
        Self {
            event_id,
            event_type: event.event_type.to_owned(),
            version: event.version,
            timestamp: Some(now),
            origin: Some(origin.to_owned()),
            trace_id: Some(trace_id),
            span_id: Some(span_id),
            payload: event.payload.clone(),
            stream: None,
            entry_id: None,
            copy_of: None,
            deliveries: 1,
        }
    }

    /// Encodes it as entry fields.
    pub fn to_fields(&self) -> Fields {
        let mut pairs: Vec<(Bytes, Bytes)> = Vec::with_capacity(8);
        let mut put = |name: &'static str, value: Bytes| {
            pairs.push((Bytes::from_static(name.as_bytes()), value));
        };
        put(TYPE, self.event_type.clone().into());
        put(PAYLOAD, self.payload.clone());
        if let Some(timestamp) = self.timestamp {
            put(TIMESTAMP, timestamp.to_rfc3339().into());
        }
        put(EVENT_ID, Bytes::copy_from_slice(self.event_id.as_str().as_bytes()));
        put(VERSION, self.version.to_string().into());
        for (name, value) in
            [(ORIGIN, &self.origin), (TRACE_ID, &self.trace_id), (SPAN_ID, &self.span_id)]
        {
            if let Some(value) = value {
                put(name, value.clone().into());
            }
        }
        Fields::new(pairs)
    }

    /// Decodes an entry. Fields written only by this library may be missing or invalid; `type` and `payload` may not.
    pub fn from_entry(
        stream: &StreamName,
        entry_id: EntryId,
        fields: &Fields,
    ) -> Result<Self, DecodeError> {
        let text = |name: &str| fields.get(name).and_then(|value| std::str::from_utf8(value).ok());
        let event_type = match fields.get(TYPE) {
            None => return Err(malformed(TYPE, "is missing")),
            Some(value) => std::str::from_utf8(value)
                .map_err(|_| malformed(TYPE, "is not valid UTF-8"))?
                .to_owned(),
        };
        let payload = fields.get(PAYLOAD).ok_or_else(|| malformed(PAYLOAD, "is missing"))?.clone();
        let version = match fields.get(VERSION) {
            None => 1,
            Some(_) => text(VERSION)
                .and_then(|number| number.parse().ok())
                .ok_or_else(|| malformed(VERSION, "is not a number"))?,
        };
        let event_id = text(EVENT_ID).and_then(|id| EventId::new(id).ok());
        Ok(Self {
            event_id: event_id.unwrap_or_else(|| id_by_place(stream, entry_id)),
            event_type,
            version,
            timestamp: text(TIMESTAMP).and_then(Timestamp::from_rfc3339),
            origin: text(ORIGIN).map(str::to_owned),
            trace_id: text(TRACE_ID).map(str::to_owned),
            span_id: text(SPAN_ID).map(str::to_owned),
            payload,
            stream: Some(stream.clone()),
            entry_id: Some(entry_id),
            copy_of: text(ORIGINAL_MESSAGE_ID).and_then(|id| id.parse().ok()),
            deliveries: 1,
        })
    }

    /// Its trace context, if the ids are valid.
    pub fn trace(&self) -> Option<TraceContext> {
        trace::from_ids(self.trace_id.as_deref()?, self.span_id.as_deref()?)
    }
}

fn malformed(field: &'static str, problem: &str) -> DecodeError {
    DecodeError::Malformed { field, problem: problem.to_owned() }
}

/// The id of an entry without a valid one: stream and entry id, or the entry id if the stream's name is too long.
fn id_by_place(stream: &StreamName, entry_id: EntryId) -> EventId {
    let place = format!("{stream}/{entry_id}");
    EventId::new(&place)
        .or_else(|_| EventId::new(entry_id.to_string()))
        .expect("an entry id is a valid event id")
}

/// An event as a handler receives it. Clones share the event.
pub struct ReceivedEvent<E> {
    /// The event; also available by dereferencing.
    pub event: Arc<E>,
    /// Its envelope.
    pub envelope: Arc<Envelope>,
}

impl<E> Clone for ReceivedEvent<E> {
    fn clone(&self) -> Self {
        Self { event: Arc::clone(&self.event), envelope: Arc::clone(&self.envelope) }
    }
}

impl<E> Deref for ReceivedEvent<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.event
    }
}

impl<E: fmt::Debug> fmt::Debug for ReceivedEvent<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedEvent")
            .field("event", &self.event)
            .field("envelope", &self.envelope)
            .finish()
    }
}

/// The span of a publish, with the ids of the first event.
pub(crate) fn publish_span(first: Option<&Envelope>, events: usize) -> tracing::Span {
    tracing::debug_span!(
        "publish",
        events,
        event_type = first.map(|event| event.event_type.as_str()),
        event_id = first.map(|event| event.event_id.as_str()),
        trace_id = first.and_then(|event| event.trace_id.as_deref()),
        span_id = first.and_then(|event| event.span_id.as_deref()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> StreamName {
        StreamName::new("wink:events:s").unwrap()
    }

    #[test]
    fn an_envelope_survives_encoding_and_decoding() {
        let trace = TraceContext::root();
        let (trace_id, span_id) = trace::to_ids(trace);
        let envelope = Envelope {
            event_id: EventId::random(),
            event_type: "a.B".to_owned(),
            version: 3,
            timestamp: Some(Timestamp::from_millis(1_767_225_600_250)),
            origin: Some("bus:1".to_owned()),
            trace_id: Some(trace_id),
            span_id: Some(span_id),
            payload: Bytes::from_static(b"{ \"a\" : 1.50 }"),
            stream: Some(stream()),
            entry_id: Some(EntryId::new(5, 1)),
            copy_of: None,
            deliveries: 1,
        };
        let read = Envelope::from_entry(&stream(), EntryId::new(5, 1), &envelope.to_fields());
        assert_eq!(read.as_ref(), Ok(&envelope));
        assert_eq!(read.unwrap().trace(), Some(trace));
    }

    #[test]
    fn an_entry_of_another_program_needs_only_type_and_payload() {
        let fields = Fields::new([("type", "a.B"), ("payload", "{}")]);
        let read = Envelope::from_entry(&stream(), EntryId::new(5, 1), &fields).unwrap();
        assert_eq!((read.version, read.event_id.as_str()), (1, "wink:events:s/5-1"));
        assert_eq!((read.origin, read.timestamp, read.trace_id), (None, None, None));
    }

    #[test]
    fn an_invalid_entry_names_the_wrong_field() {
        for (fields, wrong) in [
            (Fields::new([("payload", "{}")]), TYPE),
            (Fields::new([("type", "a.B")]), PAYLOAD),
            (Fields::new([("type", &b"\xff"[..]), ("payload", b"{}")]), TYPE),
            (Fields::new([("type", "a.B"), ("payload", "{}"), ("version", "new")]), VERSION),
        ] {
            let error = Envelope::from_entry(&stream(), EntryId::new(5, 1), &fields).unwrap_err();
            assert!(
                matches!(error, DecodeError::Malformed { field, .. } if field == wrong),
                "{error}"
            );
        }
    }
}

//! Replies: as events, as stream entries, and as returned to the requester.
//!
//! Upstream: workers, and clients that cancel. Downstream: `reply_store`.

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Fields, StreamName};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::{FailedRequest, MainLoopError};
use crate::builtin_events::{MainLoopCompleted, MainLoopFailed, RequestUsage};
use crate::error::{BusError, Result};
use crate::event::{Envelope, Event, OutgoingEvent};
use crate::name::{EventId, RequestId, SessionId};
use crate::registry::EventRegistry;
use crate::trace;

/// Prefix of the event id of a reply.
const REPLY: &str = "reply:";

/// Result of a request.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Reply {
    Completed(MainLoopCompleted),
    Failed(MainLoopFailed),
}

/// A completed request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompletedRequest<O> {
    /// The request.
    pub request_id: RequestId,
    /// The output.
    pub output: O,
    /// The session in which it was executed.
    pub session: Option<SessionId>,
    /// Resources charged to the request.
    pub usage: RequestUsage,
}

/// The event id of the reply to a request; the same on the requester's stream and on the control stream.
pub(super) fn event_id(request: &RequestId) -> EventId {
    EventId::new(format!("{REPLY}{request}")).expect("request ids are limited so that it fits")
}

impl Reply {
    /// The reply as an event with its fixed id.
    pub(super) fn to_outgoing(&self, request: &RequestId) -> Result<OutgoingEvent> {
        let outgoing = match self {
            Self::Completed(event) => OutgoingEvent::new(event.clone()),
            Self::Failed(event) => OutgoingEvent::new(event.clone()),
        };
        Ok(outgoing?.with_id(event_id(request)))
    }

    /// The reply as entry fields.
    pub(super) fn to_fields(
        &self,
        request: &RequestId,
        origin: &str,
        now: Timestamp,
    ) -> Result<Fields> {
        let outgoing = self.to_outgoing(request)?;
        let span = trace::next_span();
        Ok(Envelope::outgoing(&outgoing, event_id(request), origin, span, now).to_fields())
    }

    /// Decodes an entry of a reply stream.
    pub(super) fn from_envelope(registry: &EventRegistry, envelope: &Envelope) -> Result<Self> {
        match envelope.event_type.as_str() {
            MainLoopCompleted::TYPE => {
                let event = registry.decode::<MainLoopCompleted>(envelope)?;
                Ok(Self::Completed((*event).clone()))
            }
            MainLoopFailed::TYPE => {
                let event = registry.decode::<MainLoopFailed>(envelope)?;
                Ok(Self::Failed((*event).clone()))
            }
            other => {
                let problem = format!("its type is `{other}`");
                Err(BusError::invalid("entry of a reply stream", problem))
            }
        }
    }

    pub(super) fn from_entry(
        registry: &EventRegistry,
        stream: &StreamName,
        entry_id: EntryId,
        fields: &Fields,
    ) -> Result<Self> {
        Self::from_envelope(registry, &Envelope::from_entry(stream, entry_id, fields)?)
    }

    /// Result label in metrics.
    pub(super) fn result(&self) -> &'static str {
        match self {
            Self::Completed(_) => "completed",
            Self::Failed(failed) => failed.kind.as_str(),
        }
    }

    pub(super) fn usage(&self) -> RequestUsage {
        match self {
            Self::Completed(event) => event.usage,
            Self::Failed(event) => event.usage,
        }
    }

    /// Converts it into the caller's result.
    pub(super) fn into_output<O: DeserializeOwned>(
        self,
        request_id: &RequestId,
    ) -> Result<CompletedRequest<O>, MainLoopError> {
        let session = |id: Option<String>| id.and_then(|id| SessionId::new(id).ok());
        match self {
            Self::Completed(event) => {
                let output = serde_json::from_value(event.response).map_err(|error| {
                    let problem = error.to_string();
                    MainLoopError::Unreadable { request_id: request_id.clone(), problem }
                })?;
                Ok(CompletedRequest {
                    request_id: request_id.clone(),
                    output,
                    session: session(event.session_id),
                    usage: event.usage,
                })
            }
            Self::Failed(event) => Err(MainLoopError::Failed(Box::new(FailedRequest {
                request_id: request_id.clone(),
                kind: event.kind,
                error: event.error,
                session: session(event.session_id),
                usage: event.usage,
            }))),
        }
    }
}

/// The request that an entry replies to. Events of other programs have no event id.
pub(super) fn request_of(envelope: &Envelope) -> Option<RequestId> {
    #[derive(Deserialize)]
    struct OnlyId {
        request_id: String,
    }
    if let Some(id) = envelope.event_id.as_str().strip_prefix(REPLY) {
        return RequestId::new(id).ok();
    }
    let only: OnlyId = serde_json::from_slice(&envelope.payload).ok()?;
    RequestId::new(only.request_id).ok()
}

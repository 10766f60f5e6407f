//! Replies: what came of a request, as an event, as an entry, and as its requester sees it.
//!
//! Upstream: workers, and clients that cancel. Downstream: `replies`, which keeps them.

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

/// The beginning of the id of an event that replies.
const REPLY: &str = "reply:";

/// What came of a request.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Reply {
    Completed(MainLoopCompleted),
    Failed(MainLoopFailed),
}

/// A request that was carried out, as its requester sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompletedRequest<O> {
    /// The request.
    pub request_id: RequestId,
    /// What came of it.
    pub output: O,
    /// The session in which it was carried out.
    pub session: Option<SessionId>,
    /// What it took, as far as it was charged.
    pub usage: RequestUsage,
}

/// The id of the event that replies to a request: the same on the stream of the requester and on the control stream.
pub(super) fn event_id(request: &RequestId) -> EventId {
    EventId::new(format!("{REPLY}{request}")).expect("the limit of request ids lets it fit")
}

impl Reply {
    /// The event, under the one id that a reply to this request has.
    pub(super) fn to_outgoing(&self, request: &RequestId) -> Result<OutgoingEvent> {
        let outgoing = match self {
            Self::Completed(event) => OutgoingEvent::new(event.clone()),
            Self::Failed(event) => OutgoingEvent::new(event.clone()),
        };
        Ok(outgoing?.with_id(event_id(request)))
    }

    /// The fields of its entry.
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

    /// Reads an entry of a stream of replies.
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
                Err(BusError::invalid("entry among the replies", problem))
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

    /// Its name in metrics.
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

    /// What the requester gets.
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

/// Which request an entry replies to. Other programs give their events no ids.
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

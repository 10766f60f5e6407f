//! A decoded request with validated names and limits.
//!
//! Upstream: `MainLoopRequest` events, of this library or another program. Downstream: `executor`.

use headwater_stream::clock::Timestamp;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use crate::builtin_events::{Budget, MainLoopRequest};
use crate::error::Result;
use crate::event::ReceivedEvent;
use crate::name::{Namespace, RequestId, Requester, SessionId};

/// A request to be executed.
#[derive(Clone, Debug)]
pub(super) struct ParsedRequest {
    pub(super) id: RequestId,
    pub(super) requester: Requester,
    pub(super) session: SessionId,
    pub(super) body: Json,
    pub(super) budget: Budget,
    pub(super) deadline: Option<Timestamp>,
    pub(super) resources: Json,
    /// Number of deliveries, including those to crashed processes.
    pub(super) deliveries: u64,
    /// Why the request is invalid; then it is not executed.
    pub(super) problem: Option<String>,
}

impl ParsedRequest {
    /// Decodes a request. Fails if its id is invalid, because it could not be replied to.
    pub(super) fn read(
        namespace: &Namespace,
        event: &ReceivedEvent<MainLoopRequest>,
    ) -> Result<Self> {
        let request_id = RequestId::new(&event.request_id)?;
        let mut problem = None;
        let requester = match event.reply_to.as_deref().map(Requester::new) {
            None => Requester::anonymous(),
            Some(Ok(requester)) => requester,
            Some(Err(error)) => {
                problem = Some(error.to_string());
                Requester::anonymous()
            }
        };
        let deadline = event.deadline.as_deref().map(|text| (text, Timestamp::from_rfc3339(text)));
        let deadline = match deadline {
            Some((text, None)) => {
                problem = Some(format!("deadline `{text}` is not an RFC 3339 time"));
                None
            }
            Some((_, deadline)) => deadline,
            None => None,
        };
        Ok(Self {
            session: session_of(namespace, &request_id),
            id: request_id,
            requester,
            body: event.request.clone(),
            budget: event.budget.unwrap_or_default(),
            deadline,
            resources: event.resources.clone(),
            deliveries: event.envelope.deliveries,
            problem,
        })
    }
}

/// The session of a request. It is derived from namespace and id, so that another worker finds what was done. Request
/// ids may be longer than session ids and may repeat in different namespaces.
pub(super) fn session_of(namespace: &Namespace, request: &RequestId) -> SessionId {
    let mut hash = Sha256::new();
    hash.update(namespace.as_str());
    hash.update([0]);
    hash.update(request.as_str());
    let id = format!("request-{}", hex::encode(&hash.finalize()[..16]));
    SessionId::new(id).expect("hexadecimal digits make a valid id")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::event::{Envelope, Event};
    use crate::name::EventId;

    fn received(event: MainLoopRequest) -> ReceivedEvent<MainLoopRequest> {
        let envelope = Envelope {
            event_id: EventId::random(),
            event_type: MainLoopRequest::TYPE.to_owned(),
            version: 1,
            timestamp: None,
            origin: None,
            trace_id: None,
            span_id: None,
            payload: Bytes::new(),
            stream: None,
            entry_id: None,
            copy_of: None,
            deliveries: 2,
        };
        ReceivedEvent { event: Arc::new(event), envelope: Arc::new(envelope) }
    }

    fn namespace() -> Namespace {
        Namespace::new("default").unwrap()
    }

    #[test]
    fn the_session_of_a_request_is_stable_and_unique() {
        let id = RequestId::new("r1").unwrap();
        let session = session_of(&namespace(), &id);
        // Must not change between versions.
        assert_eq!(session.as_str(), "request-c47f62af7f8041e214b646f87cabd202");
        assert_ne!(session, session_of(&Namespace::new("other").unwrap(), &id));
        assert_ne!(session, session_of(&namespace(), &RequestId::new("r2").unwrap()));
    }

    #[test]
    fn a_request_without_an_id_is_rejected_and_invalid_limits_are_reported() {
        let request =
            |id: &str| MainLoopRequest { request_id: id.to_owned(), ..Default::default() };
        assert!(ParsedRequest::read(&namespace(), &received(request(""))).is_err());
        let plain = ParsedRequest::read(&namespace(), &received(request("r"))).unwrap();
        assert_eq!((plain.problem, plain.deliveries), (None, 2));
        for invalid in [
            MainLoopRequest { deadline: Some("soon".to_owned()), ..request("r") },
            MainLoopRequest { reply_to: Some("a:b".to_owned()), ..request("r") },
        ] {
            let request = ParsedRequest::read(&namespace(), &received(invalid)).unwrap();
            assert!(request.problem.is_some());
            assert_eq!(request.requester, Requester::anonymous());
        }
    }
}

//! Tasks: requests as a worker sees them, with their names and limits checked.
//!
//! Upstream: an event `MainLoopRequest`, of ours or of another program. Downstream: `carry`.

use headwater_stream::clock::Timestamp;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use crate::builtin_events::{Budget, MainLoopRequest};
use crate::error::Result;
use crate::event::ReceivedEvent;
use crate::name::{Namespace, RequestId, Requester, SessionId};

/// A request to be carried out.
#[derive(Clone, Debug)]
pub(super) struct ParsedRequest {
    pub(super) id: RequestId,
    pub(super) requester: Requester,
    pub(super) session: SessionId,
    pub(super) body: Json,
    pub(super) budget: Budget,
    pub(super) deadline: Option<Timestamp>,
    pub(super) resources: Json,
    /// How often it was delivered, to processes that died as well.
    pub(super) deliveries: u64,
    /// Whether others can have it if it is given back.
    pub(super) is_stored: bool,
    /// What is wrong with it, if something is: then it is not carried out.
    pub(super) problem: Option<String>,
}

impl ParsedRequest {
    /// Reads a request. One without a valid id is none: nobody could tell its reply.
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
                problem = Some(format!("the deadline `{text}` is no time as in RFC 3339"));
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
            is_stored: event.envelope.entry_id.is_some(),
            problem,
        })
    }
}

/// The session of a request: always the same, so that whoever takes it over finds what was done. Ids of requests may be
/// longer than those of sessions, and the same in two namespaces.
pub(super) fn session_of(namespace: &Namespace, request: &RequestId) -> SessionId {
    let mut hash = Sha256::new();
    hash.update(namespace.as_str());
    hash.update([0]);
    hash.update(request.as_str());
    let hex: String = hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    SessionId::new(format!("request-{hex}")).expect("hexadecimal digits make a valid id")
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
    fn the_session_of_a_request_is_stable_and_its_own() {
        let id = RequestId::new("r1").unwrap();
        let session = session_of(&namespace(), &id);
        // Written by earlier versions, found by later ones.
        assert_eq!(session.as_str(), "request-c47f62af7f8041e214b646f87cabd202");
        assert_ne!(session, session_of(&Namespace::new("other").unwrap(), &id));
        assert_ne!(session, session_of(&namespace(), &RequestId::new("r2").unwrap()));
    }

    #[test]
    fn a_request_without_an_id_is_none_and_one_with_odd_limits_says_what_is_odd() {
        let request =
            |id: &str| MainLoopRequest { request_id: id.to_owned(), ..Default::default() };
        assert!(ParsedRequest::read(&namespace(), &received(request(""))).is_err());
        let plain = ParsedRequest::read(&namespace(), &received(request("r"))).unwrap();
        assert_eq!((plain.problem, plain.deliveries), (None, 2));
        for odd in [
            MainLoopRequest { deadline: Some("soon".to_owned()), ..request("r") },
            MainLoopRequest { reply_to: Some("a:b".to_owned()), ..request("r") },
        ] {
            let task = ParsedRequest::read(&namespace(), &received(odd)).unwrap();
            assert!(task.problem.is_some());
            assert_eq!(task.requester, Requester::anonymous());
        }
    }
}

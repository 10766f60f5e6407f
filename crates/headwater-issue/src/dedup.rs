//! The key under which an event is stored once, and the digest that tells "again" from "another".
//!
//! Upstream: a store, for every event it records. Promises: WIRE's hash to the byte; the same event, with other spaces
//! in its JSON, has the same digest. Not here: looking keys up.

use sha2::{Digest, Sha256};

use crate::issue::NewEvent;
use crate::json;

/// The key of an event: the provider's delivery id, or a hash of what the event says.
pub fn dedup_key(event: &NewEvent) -> String {
    match &event.dedup_key {
        Some(key) => key.clone(),
        None => computed_key(event, &json::compact(&event.payload)),
    }
}

/// `{source}:` and the hex SHA-256 of the compact JSON of source, type, issue and payload.
fn computed_key(event: &NewEvent, compact_payload: &str) -> String {
    let name = |text: &str| json::compact(&serde_json::Value::from(text).to_string());
    let text = format!(
        r#"{{"source":{},"event_type":{},"external_issue_id":{},"payload":{compact_payload}}}"#,
        name(&event.source),
        name(&event.event_type),
        name(&event.external_issue_id),
    );
    let mut key = format!("{}:", event.source);
    for byte in Sha256::digest(text) {
        key.push_str(&format!("{byte:02x}"));
    }
    key
}

/// Key and digest of an event as they are stored. Two events with one key are the same if their digests are.
///
/// A computed key says nothing of the project, and issues of two projects may well have the same number and events, so
/// the project follows it. A delivery id is the provider's word and stays as it is.
pub(crate) fn key_and_digest(event: &NewEvent) -> (String, Vec<u8>) {
    let payload = json::compact(&event.payload);
    let key = match &event.dedup_key {
        Some(key) => key.clone(),
        None => format!("{}:{}", computed_key(event, &payload), event.external_project_id),
    };
    let mut digest = Sha256::new();
    for part in [&event.external_project_id, &event.external_issue_id, &event.event_type, &payload]
    {
        // The length stands first, so that no two lists of parts read the same.
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    (key, digest.finalize().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(payload: &str) -> NewEvent {
        NewEvent {
            integration: "main".into(),
            external_project_id: "1".into(),
            external_issue_id: "42".into(),
            source: "gitlab".into(),
            event_type: "issue_created".into(),
            dedup_key: None,
            payload: payload.into(),
        }
    }

    #[test]
    fn a_computed_key_is_the_one_other_programs_compute() {
        let expected = "gitlab:b36d52b59ad798850c0d1088f0cbfc21a7ada605b3947098acbb500ce961eb49";
        assert_eq!(dedup_key(&event(r#"{"action":"open"}"#)), expected);
        assert_eq!(dedup_key(&event("{ \"action\" : \"open\" }\n")), expected);
    }

    #[test]
    fn the_providers_delivery_id_goes_before_a_hash() {
        let event = NewEvent { dedup_key: Some("delivery-1".into()), ..event("{}") };
        assert_eq!(dedup_key(&event), "delivery-1");
        assert_eq!(key_and_digest(&event).0, "delivery-1");
    }

    #[test]
    fn the_digest_tells_events_apart_by_payload_type_issue_and_project() {
        let digest = |event: &NewEvent| key_and_digest(event).1;
        let first = event("{}");
        assert_eq!(digest(&first), digest(&event(" { } ")));
        for other in [
            event("[]"),
            NewEvent { event_type: "closed".into(), ..event("{}") },
            NewEvent { external_issue_id: "43".into(), ..event("{}") },
            NewEvent { external_project_id: "2".into(), ..event("{}") },
        ] {
            assert_ne!(digest(&first), digest(&other));
        }
    }
}

//! De-duplication key of an event, and the digest that distinguishes a duplicate from a conflicting event.
//!
//! Upstream: a store, for every event it records. Guarantees: the computed key is a wire format; whitespace in the JSON
//! changes neither key nor digest. Not here: looking keys up.

use sha2::{Digest, Sha256};

use crate::issue::NewEvent;
use crate::json;

/// De-duplication key of an event: the provider's delivery id, or a hash of the event.
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
    format!("{}:{}", event.source, hex::encode(Sha256::digest(text)))
}

/// Key and digest of an event as stored. Two events with the same key are equal if their digests are.
///
/// A computed key does not contain the project, and issues of two projects can have the same number and events, so the
/// project is appended. A delivery id is stored unchanged.
pub(crate) fn key_and_digest(event: &NewEvent) -> (String, Vec<u8>) {
    let payload = json::compact(&event.payload);
    let key = match &event.dedup_key {
        Some(key) => key.clone(),
        None => format!("{}:{}", computed_key(event, &payload), event.external_project_id),
    };
    let mut digest = Sha256::new();
    for part in [&event.external_project_id, &event.external_issue_id, &event.event_type, &payload]
    {
        // The length prefix makes the concatenation unambiguous.
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
            trace: None,
        }
    }

    #[test]
    fn a_computed_key_matches_the_wire_format() {
        let expected = "gitlab:b36d52b59ad798850c0d1088f0cbfc21a7ada605b3947098acbb500ce961eb49";
        assert_eq!(dedup_key(&event(r#"{"action":"open"}"#)), expected);
        assert_eq!(dedup_key(&event("{ \"action\" : \"open\" }\n")), expected);
    }

    #[test]
    fn a_delivery_id_takes_precedence_over_a_hash() {
        let event = NewEvent { dedup_key: Some("delivery-1".into()), ..event("{}") };
        assert_eq!(dedup_key(&event), "delivery-1");
        assert_eq!(key_and_digest(&event).0, "delivery-1");
    }

    #[test]
    fn the_digest_depends_on_payload_type_issue_and_project() {
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

//! How things look in JSON: times as RFC 3339, durations as whole milliseconds, entry ids as text, bytes as text where
//! they are text.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_queue::{Headers, StoredMessage};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Fields};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::ApiError;

/// A message as it lies in its partition.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageView {
    /// The id of its entry.
    pub(crate) id: String,
    /// Its topic.
    pub(crate) topic: String,
    /// Its partition.
    pub(crate) partition: u16,
    /// What decides its order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
    #[serde(flatten)]
    pub(crate) payload: Payload,
    /// Names and values beside the payload.
    pub(crate) headers: Headers,
    /// Which try this is, from 1.
    pub(crate) attempt: u32,
    /// When it was stored.
    pub(crate) stored_at: String,
    /// All fields of an entry that another program wrote.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) fields: BTreeMap<String, String>,
    /// Why it is no message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
}

/// Bytes: as text where they are text, else as base64.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct Payload {
    /// The bytes, if they are text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) payload: Option<String>,
    /// The bytes, if they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) payload_base64: Option<String>,
}

impl Payload {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self { payload: Some(text.to_owned()), payload_base64: None },
            Err(_) => Self { payload: None, payload_base64: Some(STANDARD.encode(bytes)) },
        }
    }

    pub(crate) fn into_bytes(self) -> Result<Vec<u8>, ApiError> {
        match (self.payload, self.payload_base64) {
            (Some(text), None) => Ok(text.into_bytes()),
            (None, Some(text)) => STANDARD
                .decode(text)
                .map_err(|error| ApiError::invalid(format!("`payload_base64`: {error}"))),
            (None, None) => Ok(Vec::new()),
            (Some(_), Some(_)) => {
                Err(ApiError::invalid("give `payload` or `payload_base64`, not both"))
            }
        }
    }
}

impl MessageView {
    pub(crate) fn new(topic: &str, stored: StoredMessage) -> Self {
        let StoredMessage { partition, id, stored_at, message, fields } = stored;
        let (message, problem) = match message {
            Ok(message) => (Some(message), None),
            Err(malformed) => (None, Some(malformed.to_string())),
        };
        let is_ours = fields.get("payload").is_some();
        Self {
            id: id.to_string(),
            topic: topic.to_owned(),
            partition,
            key: message.as_ref().and_then(|message| message.key.clone()),
            payload: Payload::of(fields.get("payload").map_or(b"", |bytes| bytes)),
            headers: message.as_ref().map(|message| message.headers.clone()).unwrap_or_default(),
            attempt: message.as_ref().map_or(1, |message| message.attempt),
            stored_at: time(stored_at),
            fields: if is_ours && problem.is_none() { BTreeMap::new() } else { all(&fields) },
            problem,
        }
    }
}

/// All fields; bytes that are no text are shown as well as they can be.
pub(crate) fn all(fields: &Fields) -> BTreeMap<String, String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    fields.iter().map(|(name, value)| (text(name), text(value))).collect()
}

pub(crate) fn time(at: Timestamp) -> String {
    at.to_rfc3339()
}

pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn id(id: Option<EntryId>) -> Option<String> {
    id.map(|id| id.to_string())
}

/// A point that a caller names: `1700000000000-0`, or a time as RFC 3339.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    Id(EntryId),
    Time(Timestamp),
}

pub(crate) fn point(what: &str, text: &str) -> Result<Point, ApiError> {
    if let Some(at) = Timestamp::from_rfc3339(text) {
        return Ok(Point::Time(at));
    }
    text.parse().map(Point::Id).map_err(|_| {
        let allowed = "an entry id such as 1700000000000-0, or a time such as 2026-11-15T10:00:00Z";
        ApiError::invalid(format!("`{what}` is `{text}`; {allowed}"))
    })
}

pub(crate) fn entry_id(what: &str, text: &str) -> Result<EntryId, ApiError> {
    text.parse().map_err(|_| {
        ApiError::invalid(format!("`{what}` is `{text}`; an entry id such as 1700000000000-0"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_as_they_were() {
        for bytes in [&b"text"[..], b"", b"\xff\x00", "😀".as_bytes()] {
            let json = serde_json::to_string(&Payload::of(bytes)).unwrap();
            let payload: Payload = serde_json::from_str(&json).unwrap();
            assert_eq!(payload.into_bytes().unwrap(), bytes);
        }
    }

    #[test]
    fn a_payload_in_two_forms_or_in_none_that_can_be_read_is_refused() {
        for json in [r#"{"payload":"a","payload_base64":"YQ=="}"#, r#"{"payload_base64":"%"}"#] {
            let payload: Payload = serde_json::from_str(json).unwrap();
            assert_eq!(payload.into_bytes().unwrap_err().code(), "invalid");
        }
    }

    #[test]
    fn a_point_is_an_id_or_a_time() {
        assert_eq!(point("from", "5-1").unwrap(), Point::Id(EntryId::new(5, 1)));
        let at = Timestamp::from_rfc3339("2026-11-15T10:00:00Z").unwrap();
        assert_eq!(point("from", "2026-11-15T10:00:00Z").unwrap(), Point::Time(at));
        assert_eq!(point("from", "yesterday").unwrap_err().code(), "invalid");
    }
}

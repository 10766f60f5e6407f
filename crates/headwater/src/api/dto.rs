//! JSON representation of common types: times as RFC 3339, durations in milliseconds, entry ids as text, payloads as
//! text or base64.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_queue::{MessageHeaders, StoredMessage};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Fields};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::ApiError;

/// Why a topic or a partition could not be read. Details are in the log, because they may name servers.
pub(crate) const UNREAD: &str = "a server of the stream backend does not answer";

/// A stored message.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageDto {
    /// Entry id.
    pub(crate) id: String,
    /// Topic.
    pub(crate) topic: String,
    /// Partition.
    pub(crate) partition: u16,
    /// Ordering key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
    #[serde(flatten)]
    pub(crate) payload: PayloadDto,
    /// Headers: names and values.
    pub(crate) headers: MessageHeaders,
    /// Attempt number, starting at 1.
    pub(crate) attempt: u32,
    /// When it was stored.
    pub(crate) stored_at: String,
    /// All fields of an entry written by another program.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) fields: BTreeMap<String, String>,
    /// Why the entry is not a valid message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
}

/// A payload: text if it is UTF-8, else base64.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct PayloadDto {
    /// The payload as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) payload: Option<String>,
    /// The payload as base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) payload_base64: Option<String>,
}

impl PayloadDto {
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
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
                Err(ApiError::invalid("set `payload` or `payload_base64`, not both"))
            }
        }
    }
}

impl MessageDto {
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
            payload: PayloadDto::from_bytes(fields.get("payload").map_or(b"", |bytes| bytes)),
            headers: message.as_ref().map(|message| message.headers.clone()).unwrap_or_default(),
            attempt: message.as_ref().map_or(1, |message| message.attempt),
            stored_at: time(stored_at),
            fields: if is_ours && problem.is_none() {
                BTreeMap::new()
            } else {
                all_fields(&fields)
            },
            problem,
        }
    }
}

/// All fields as text; invalid UTF-8 is replaced.
pub(crate) fn all_fields(fields: &Fields) -> BTreeMap<String, String> {
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

/// A position given by a caller: an entry id such as `1700000000000-0`, or an RFC 3339 time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryPosition {
    Id(EntryId),
    Time(Timestamp),
}

pub(crate) fn parse_position(what: &str, text: &str) -> Result<EntryPosition, ApiError> {
    if let Some(at) = Timestamp::from_rfc3339(text) {
        return Ok(EntryPosition::Time(at));
    }
    text.parse().map(EntryPosition::Id).map_err(|_| {
        let allowed =
            "expected an entry id such as 1700000000000-0 or a time such as 2026-11-15T10:00:00Z";
        ApiError::invalid(format!("invalid `{what}` = `{text}`; {allowed}"))
    })
}

pub(crate) fn parse_entry_id(what: &str, text: &str) -> Result<EntryId, ApiError> {
    text.parse().map_err(|_| {
        ApiError::invalid(format!(
            "invalid `{what}` = `{text}`; expected an entry id such as 1700000000000-0"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_bytes_survive_a_round_trip() {
        for bytes in [&b"text"[..], b"", b"\xff\x00", "😀".as_bytes()] {
            let json = serde_json::to_string(&PayloadDto::from_bytes(bytes)).unwrap();
            let payload: PayloadDto = serde_json::from_str(&json).unwrap();
            assert_eq!(payload.into_bytes().unwrap(), bytes);
        }
    }

    #[test]
    fn a_payload_in_both_forms_or_with_invalid_base64_is_rejected() {
        for json in [r#"{"payload":"a","payload_base64":"YQ=="}"#, r#"{"payload_base64":"%"}"#] {
            let payload: PayloadDto = serde_json::from_str(json).unwrap();
            assert_eq!(payload.into_bytes().unwrap_err().code(), "invalid");
        }
    }

    #[test]
    fn a_position_is_an_entry_id_or_a_time() {
        assert_eq!(parse_position("from", "5-1").unwrap(), EntryPosition::Id(EntryId::new(5, 1)));
        let at = Timestamp::from_rfc3339("2026-11-15T10:00:00Z").unwrap();
        assert_eq!(
            parse_position("from", "2026-11-15T10:00:00Z").unwrap(),
            EntryPosition::Time(at)
        );
        assert_eq!(parse_position("from", "yesterday").unwrap_err().code(), "invalid");
    }
}

//! The JSON lines format of a session export.
//!
//! Upstream: `export` writes it. Downstream: `import` reads it.
//!
//! The first line is a header. If the beginning of the session was compacted, its snapshots follow. Then one line per
//! entry. The last line has their number and checksum.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{Result, SessionError};
use crate::name::SessionId;

/// Version of the file format.
pub(super) const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum JsonlLine {
    HeadwaterSession(ExportHeader),
    Snapshot(SavedSnapshot),
    Entry(SavedEntry),
    End(ExportEnd),
}

#[derive(Serialize, Deserialize)]
pub(super) struct ExportHeader {
    pub(super) format: u32,
    pub(super) session: String,
    pub(super) beginning: SavedBeginning,
    pub(super) parent: Option<(String, String)>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SavedBeginning {
    Whole,
    After(u64),
    Unknown,
}

#[derive(Serialize, Deserialize)]
pub(super) struct SavedSnapshot {
    pub(super) set: String,
    pub(super) fields: Vec<(String, JsonBytes)>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct SavedEntry {
    pub(super) id: String,
    pub(super) fields: Vec<(JsonBytes, JsonBytes)>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ExportEnd {
    pub(super) entries: u64,
    pub(super) crc32: u32,
}

/// Bytes, as text if they are valid UTF-8.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum JsonBytes {
    Text(String),
    Hex { hex: String },
}

impl JsonBytes {
    pub(super) fn new(bytes: &Bytes) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Hex { hex: hex::encode(bytes) },
        }
    }

    pub(super) fn read(self) -> Option<Bytes> {
        match self {
            Self::Text(text) => Some(text.into()),
            Self::Hex { hex } => hex::decode(hex).ok().map(Bytes::from),
        }
    }
}

pub(super) fn write(session: &SessionId, line: &JsonlLine) -> Result<String> {
    serde_json::to_string(line).map_err(|error| SessionError::Damaged {
        session: session.clone(),
        problem: error.to_string(),
    })
}

//! Parks entries that cannot be decoded (unknown type, unknown version or invalid payload) for an operator.
//!
//! Upstream: readers of streams. Downstream: the stream `wink:events:unknown`.
//! Guarantees: an entry is parked once, by any number of readers, with its bytes unchanged. The original stays in its
//! stream.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Backend, Direction, Entry, EntryId, Fields, IdempotentEntry, Range, Retention, StreamError,
    StreamName,
};
use tracing::warn;

use crate::error::{DecodeError, Result};
use crate::limits::PARKED_MAX;
use crate::metrics;

const STREAM: &str = "parked_stream";
const ENTRY_ID: &str = "parked_entry_id";
const REASON: &str = "parked_reason";
const AT: &str = "parked_at";
const PARKED_FIELDS: [&str; 4] = [STREAM, ENTRY_ID, REASON, AT];

/// Dedup window of parked entries. Several readers usually find an entry at about the same time.
const DEDUP_TTL: Duration = Duration::from_secs(60 * 60);

/// An entry that could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkedEntry {
    /// Its id in the stream of parked entries.
    pub id: EntryId,
    /// The stream of the original entry.
    pub stream: StreamName,
    /// The id of the original entry.
    pub entry_id: EntryId,
    /// Why it could not be decoded.
    pub reason: String,
    /// When it was parked.
    pub parked_at: Option<Timestamp>,
    /// The original fields. Empty if they are too large to be stored with the reason; then only the original has them.
    pub fields: Fields,
}

/// The stream of parked entries.
#[derive(Clone)]
pub(crate) struct UnknownEvents {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) stream: StreamName,
}

impl UnknownEvents {
    /// Parks an entry, unless it is parked already.
    pub(crate) async fn park(
        &self,
        stream: &StreamName,
        entry_id: EntryId,
        fields: &Fields,
        decode_error: &DecodeError,
        now: Timestamp,
    ) -> Result<(), StreamError> {
        let parked_fields = [
            (STREAM, stream.to_string()),
            (ENTRY_ID, entry_id.to_string()),
            (REASON, decode_error.to_string()),
            (AT, now.to_rfc3339()),
        ]
        .map(|(name, value)| (Bytes::from_static(name.as_bytes()), Bytes::from(value)));
        let all = Fields::new(fields.iter().cloned().chain(parked_fields.clone()));
        let id = format!("{stream}/{entry_id}");
        let appended = match self.append(&id, all).await {
            // The original is already at the limit of bytes or fields.
            Err(StreamError::Invalid { .. }) => {
                self.append(&id, Fields::new(parked_fields)).await?
            }
            other => other?,
        };
        if !appended {
            return Ok(());
        }
        metrics::parked();
        warn!(%stream, %entry_id, error = %decode_error, "entry cannot be decoded and was parked");
        Ok(())
    }

    /// Returns whether the entry is new.
    async fn append(&self, id: &str, fields: Fields) -> Result<bool, StreamError> {
        let once = [IdempotentEntry { id: id.to_owned(), fields }];
        let retention = Retention::max_len(PARKED_MAX);
        let appended = self.backend.append_once(&self.stream, &once, DEDUP_TTL, &retention).await?;
        Ok(appended.first().is_some_and(|appended| !appended.duplicate))
    }

    /// Parked entries after this one, oldest first.
    pub(crate) async fn list(&self, after: EntryId, count: usize) -> Result<Vec<ParkedEntry>> {
        let (from, to) = (after.next(), EntryId::MAX);
        let range = Range { from, to, direction: Direction::Forward, count };
        let entries = self.backend.range(&self.stream, range).await?;
        Ok(entries.into_iter().filter_map(read).collect())
    }

    /// One parked entry.
    pub(crate) async fn get(&self, id: EntryId) -> Result<Option<ParkedEntry>> {
        let range = Range { from: id, to: id, direction: Direction::Forward, count: 1 };
        Ok(self.backend.range(&self.stream, range).await?.into_iter().find_map(read))
    }

    pub(crate) async fn remove(&self, id: EntryId) -> Result<bool> {
        Ok(self.backend.delete_entries(&self.stream, &[id]).await? > 0)
    }

    pub(crate) async fn count(&self) -> Result<u64, StreamError> {
        Ok(self.backend.stats(&self.stream).await?.map_or(0, |stats| stats.length))
    }
}

/// Decodes a parked entry. An entry that another program appended here is shown unchanged.
fn read(entry: Entry) -> Option<ParkedEntry> {
    let Entry { id, fields } = entry;
    let text = |name: &str| fields.get(name).and_then(|value| std::str::from_utf8(value).ok());
    let stream = StreamName::new(text(STREAM).unwrap_or("?")).ok()?;
    let is_parked_field = |name: &Bytes| PARKED_FIELDS.iter().any(|our| our.as_bytes() == name);
    Some(ParkedEntry {
        id,
        stream,
        entry_id: text(ENTRY_ID).and_then(|id| id.parse().ok()).unwrap_or(id),
        reason: text(REASON).unwrap_or("appended by another program").to_owned(),
        parked_at: text(AT).and_then(Timestamp::from_rfc3339),
        fields: Fields::new(fields.iter().filter(|(name, _)| !is_parked_field(name)).cloned()),
    })
}

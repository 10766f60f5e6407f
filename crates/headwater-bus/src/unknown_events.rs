//! Parked entries: those of unknown types and versions, and payloads that do not fit, where an operator sees them.
//!
//! Upstream: whoever reads a stream and cannot read an entry. Downstream: the stream `wink:events:unknown`.
//! Promises: an entry is parked once, whoever meets it and however often; its bytes stay as they are. The entry itself
//! stays in its stream.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Backend, Direction, Entry, EntryId, Fields, Once, Range, Retention, StreamError, StreamName,
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

/// How long it is known that an entry is parked already. Readers meet an entry at about the same time.
const DEDUP_TTL: Duration = Duration::from_secs(60 * 60);

/// An entry that nobody could read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkedEntry {
    /// Its number among the parked ones.
    pub id: EntryId,
    /// The stream it lies in.
    pub stream: StreamName,
    /// Its id there.
    pub entry_id: EntryId,
    /// Why it could not be read.
    pub reason: String,
    /// When it was parked.
    pub parked_at: Option<Timestamp>,
    /// Its fields as they are. Empty if they left no room for the reason: then only the stream has them.
    pub fields: Fields,
}

/// The entries that nobody could read.
#[derive(Clone)]
pub(crate) struct UnknownEvents {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) stream: StreamName,
}

impl UnknownEvents {
    /// Parks an entry, unless it is parked.
    pub(crate) async fn park(
        &self,
        stream: &StreamName,
        entry_id: EntryId,
        fields: &Fields,
        decode_error: &DecodeError,
        now: Timestamp,
    ) -> Result<(), StreamError> {
        let ours = [
            (STREAM, stream.to_string()),
            (ENTRY_ID, entry_id.to_string()),
            (REASON, decode_error.to_string()),
            (AT, now.to_rfc3339()),
        ]
        .map(|(name, value)| (Bytes::from_static(name.as_bytes()), Bytes::from(value)));
        let whole = Fields::new(fields.iter().cloned().chain(ours.clone()));
        let id = format!("{stream}/{entry_id}");
        let appended = match self.append(&id, whole).await {
            // It is as large as an entry can be, or has as many fields.
            Err(StreamError::Invalid { .. }) => self.append(&id, Fields::new(ours)).await?,
            other => other?,
        };
        if !appended {
            return Ok(());
        }
        metrics::parked();
        warn!(%stream, %entry_id, error = %decode_error, "entry cannot be read and was parked");
        Ok(())
    }

    /// Returns whether it was not there before.
    async fn append(&self, id: &str, fields: Fields) -> Result<bool, StreamError> {
        let once = [Once { id: id.to_owned(), fields }];
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

/// An entry of another program in this stream is shown as it is, as if it had been parked there.
fn read(entry: Entry) -> Option<ParkedEntry> {
    let Entry { id, fields } = entry;
    let text = |name: &str| fields.get(name).and_then(|value| std::str::from_utf8(value).ok());
    let stream = StreamName::new(text(STREAM).unwrap_or("?")).ok()?;
    let ours = |name: &Bytes| PARKED_FIELDS.iter().any(|our| our.as_bytes() == name);
    Some(ParkedEntry {
        id,
        stream,
        entry_id: text(ENTRY_ID).and_then(|id| id.parse().ok()).unwrap_or(id),
        reason: text(REASON).unwrap_or("another program put it here").to_owned(),
        parked_at: text(AT).and_then(Timestamp::from_rfc3339),
        fields: Fields::new(fields.iter().filter(|(name, _)| !ours(name)).cloned()),
    })
}

//! Appends to one stream or several, in one request if one server holds all of them.
//!
//! Upstream: `streams`. On a cluster each stream gets its own request: a request is limited to one slot.

use futures_util::future::join_all;
use tracing::warn;

use super::RedisBackend;
use super::client::Idempotency;
use super::command::Commands;
use super::reply::Cursor;
use super::streaming_pipeline::StreamingPipeline;
use super::trim;
use crate::entry::{EntryId, EntrySize, Fields};
use crate::error::Result;
use crate::limits::BATCH_BYTES_MAX;
use crate::name::StreamName;
use crate::streams::AppendRequest;
use crate::validate;

impl RedisBackend {
    pub(super) async fn append_one(&self, append: &AppendRequest<'_>) -> Result<Vec<EntryId>> {
        let size = validate::append(append.entries, append.retention)?;
        if append.entries.is_empty() {
            return self.client.check_open().map(|()| Vec::new());
        }
        let slot = self.slot(append.stream);
        let mut call = StreamingPipeline::new(&self.client, slot, encoded_bytes(append, size))?;
        let trims = self.add_append(&mut call, append);
        let replies = call.finish(Idempotency::AtMostOnce).await?;
        self.read_append(append, trims, &mut replies.cursor())
    }

    pub(super) async fn append_each(
        &self,
        appends: &[AppendRequest<'_>],
    ) -> Vec<Result<Vec<EntryId>>> {
        if appends.len() > 1 && !self.client.is_cluster() {
            let check =
                |append: &AppendRequest<'_>| validate::append(append.entries, append.retention);
            let checked: Vec<Result<EntrySize>> = appends.iter().map(check).collect();
            let bytes = checked.iter().flatten().map(|size| size.bytes).sum::<usize>();
            if bytes <= BATCH_BYTES_MAX {
                return self.append_together(appends, checked).await;
            }
        }
        join_all(appends.iter().map(|append| self.append_one(append))).await
    }

    /// Sends all valid appends in one request.
    async fn append_together(
        &self,
        appends: &[AppendRequest<'_>],
        checked: Vec<Result<EntrySize>>,
    ) -> Vec<Result<Vec<EntryId>>> {
        let each = appends.iter().zip(&checked);
        let bytes =
            each.filter_map(|(append, size)| Some(encoded_bytes(append, *size.as_ref().ok()?)));
        let mut call = match StreamingPipeline::new(&self.client, 0, bytes.sum()) {
            Ok(call) => call,
            Err(error) => return appends.iter().map(|_| Err(error.duplicate())).collect(),
        };
        // For each append: whether a trim is included, or why it is invalid.
        let each = appends.iter().zip(checked);
        let sent: Vec<Result<bool>> = each
            .map(|(append, checked)| checked.map(|_| self.add_append(&mut call, append)))
            .collect();
        if call.commands.len() == 0 {
            return sent.into_iter().map(|sent| sent.map(|_| Vec::new())).collect();
        }
        let each = appends.iter().zip(sent);
        match call.finish(Idempotency::AtMostOnce).await {
            Ok(replies) => {
                let mut cursor = replies.cursor();
                each.map(|(append, trims)| self.read_append(append, trims?, &mut cursor)).collect()
            }
            Err(error) => each.map(|(_, sent)| sent.and_then(|_| Err(error.duplicate()))).collect(),
        }
    }

    /// Adds the commands of one append; large ones are partly sent when it returns. Returns whether a trim is included.
    fn add_append(&self, call: &mut StreamingPipeline<'_>, append: &AppendRequest<'_>) -> bool {
        let AppendRequest { stream, entries, retention } = *append;
        let mut previous = None;
        for at in 0..entries.len() {
            add_entry(&mut call.commands, stream, &entries.entry(at), &mut previous);
            call.flush_if_large();
        }
        !entries.is_empty() && self.add_trim(&mut call.commands, stream, entries.len(), retention)
    }

    /// Parses all replies of one append.
    fn read_append(
        &self,
        append: &AppendRequest<'_>,
        trims: bool,
        cursor: &mut Cursor<'_>,
    ) -> Result<Vec<EntryId>> {
        let mut ids = Ok(Vec::with_capacity(append.entries.len()));
        for _ in 0..append.entries.len() {
            match (cursor.id(), &mut ids) {
                (Ok(id), Ok(ids)) => ids.push(id),
                (Err(error), Ok(_)) => ids = Err(error.into_stream_error(append.stream)),
                (_, Err(_)) => {}
            }
        }
        if trims {
            self.record_trim(append.stream, cursor);
        }
        ids
    }

    /// Parses the reply of a trim that was part of an append. Errors are only logged: the entries are in the stream, and a
    /// failed call would make the caller append them twice.
    pub(super) fn record_trim(&self, stream: &StreamName, cursor: &mut Cursor<'_>) {
        match trim::read(cursor) {
            Ok(trimmed) => self.trim_schedule.held_back(stream, trimmed.held_back),
            Err(error) => {
                let error = error.into_stream_error(stream);
                warn!(%stream, %error, "stream not trimmed while appending");
            }
        }
    }
}

/// Approximate encoded size of an append.
fn encoded_bytes(append: &AppendRequest<'_>, size: EntrySize) -> usize {
    size.bytes + size.fields * 24 + append.entries.len() * (64 + append.stream.as_str().len())
}

/// Adds an `XADD` command for each entry.
pub(super) fn add_appends<'a>(
    commands: &mut Commands,
    stream: &StreamName,
    entries: impl IntoIterator<Item = &'a Fields>,
) {
    let mut last = None;
    entries.into_iter().for_each(|fields| add_entry(commands, stream, fields, &mut last));
}

/// Number of fields of the previous entry, and the byte range of its command's prefix.
type PreviousEntry = Option<(usize, std::ops::Range<usize>)>;

/// Consecutive entries usually have the same number of fields: their commands share a prefix, which is copied.
fn add_entry(
    commands: &mut Commands,
    stream: &StreamName,
    fields: &Fields,
    previous: &mut PreviousEntry,
) {
    match previous {
        Some((len, head)) if *len == fields.len() => {
            commands.begin_like(head.clone(), 2 * fields.len());
        }
        _ => {
            let start = commands.position();
            commands.begin(3 + 2 * fields.len());
            commands.arg("XADD");
            commands.arg(stream.as_str());
            commands.arg("*");
            *previous = Some((fields.len(), start..commands.position()));
        }
    }
    commands.arg_fields(fields);
}

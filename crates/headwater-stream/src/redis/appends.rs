//! Appends, to one stream or to several: one request where one server holds them all.
//!
//! Upstream: `streams`. On a cluster each stream gets a request of its own: the slots of a request must be one.

use futures_util::future::join_all;
use tracing::warn;

use super::RedisBackend;
use super::command::Commands;
use super::parts::PartedCall;
use super::reply::Cursor;
use super::servers::Effect;
use super::trim;
use crate::check;
use crate::entry::{EntryId, EntrySize, Fields};
use crate::error::Result;
use crate::limits::BATCH_BYTES_MAX;
use crate::name::StreamName;
use crate::streams::Append;

impl RedisBackend {
    pub(super) async fn append_one(&self, append: &Append<'_>) -> Result<Vec<EntryId>> {
        let size = check::append(append.entries, append.retention)?;
        if append.entries.is_empty() {
            return self.servers.check_open().map(|()| Vec::new());
        }
        let slot = self.slot(append.stream);
        let mut call = PartedCall::new(&self.servers, slot, packed_bytes(append, size))?;
        let trims = self.add_append(&mut call, append);
        let replies = call.finish(Effect::Once).await?;
        self.read_append(append, trims, &mut replies.cursor())
    }

    pub(super) async fn append_each(&self, appends: &[Append<'_>]) -> Vec<Result<Vec<EntryId>>> {
        if appends.len() > 1 && !self.servers.is_cluster() {
            let check = |append: &Append<'_>| check::append(append.entries, append.retention);
            let checked: Vec<Result<EntrySize>> = appends.iter().map(check).collect();
            let bytes = checked.iter().flatten().map(|size| size.bytes).sum::<usize>();
            if bytes <= BATCH_BYTES_MAX {
                return self.append_together(appends, checked).await;
            }
        }
        join_all(appends.iter().map(|append| self.append_one(append))).await
    }

    /// One request for those that are in order.
    async fn append_together(
        &self,
        appends: &[Append<'_>],
        checked: Vec<Result<EntrySize>>,
    ) -> Vec<Result<Vec<EntryId>>> {
        let each = appends.iter().zip(&checked);
        let bytes =
            each.filter_map(|(append, size)| Some(packed_bytes(append, *size.as_ref().ok()?)));
        let mut call = match PartedCall::new(&self.servers, 0, bytes.sum()) {
            Ok(call) => call,
            Err(error) => return appends.iter().map(|_| Err(error.again())).collect(),
        };
        // For each append whether a trim goes with it, or why it is refused.
        let each = appends.iter().zip(checked);
        let sent: Vec<Result<bool>> = each
            .map(|(append, checked)| checked.map(|_| self.add_append(&mut call, append)))
            .collect();
        if call.commands.len() == 0 {
            return sent.into_iter().map(|refused| refused.map(|_| Vec::new())).collect();
        }
        let each = appends.iter().zip(sent);
        match call.finish(Effect::Once).await {
            Ok(replies) => {
                let mut cursor = replies.cursor();
                each.map(|(append, trims)| self.read_append(append, trims?, &mut cursor)).collect()
            }
            Err(error) => each.map(|(_, sent)| sent.and_then(|_| Err(error.again()))).collect(),
        }
    }

    /// Adds the commands of one append; the first of them are on their way when it returns. Tells whether a trim goes with
    /// it.
    fn add_append(&self, call: &mut PartedCall<'_>, append: &Append<'_>) -> bool {
        let Append { stream, entries, retention } = *append;
        let mut before = None;
        for at in 0..entries.len() {
            add_entry(&mut call.commands, stream, &entries.entry(at), &mut before);
            call.send_some();
        }
        !entries.is_empty() && self.add_trim(&mut call.commands, stream, entries.len(), retention)
    }

    /// Reads what became of an append, to the end of its replies.
    fn read_append(
        &self,
        append: &Append<'_>,
        trims: bool,
        cursor: &mut Cursor<'_>,
    ) -> Result<Vec<EntryId>> {
        let mut ids = Ok(Vec::with_capacity(append.entries.len()));
        for _ in 0..append.entries.len() {
            match (cursor.id(), &mut ids) {
                (Ok(id), Ok(ids)) => ids.push(id),
                (Err(failure), Ok(_)) => ids = Err(failure.about(append.stream)),
                (_, Err(_)) => {}
            }
        }
        if trims {
            self.note_trim(append.stream, cursor);
        }
        ids
    }

    /// Reads what became of a trim that came with an append. The entries are in the stream: an error now would only make
    /// the caller append them twice.
    pub(super) fn note_trim(&self, stream: &StreamName, cursor: &mut Cursor<'_>) {
        match trim::read(cursor) {
            Ok(trimmed) => self.trims.held_back(stream, trimmed.held_back),
            Err(failure) => {
                let error = failure.about(stream);
                warn!(%stream, %error, "stream not trimmed while appending");
            }
        }
    }
}

/// About how many bytes an append of this size takes on the wire.
fn packed_bytes(append: &Append<'_>, size: EntrySize) -> usize {
    size.bytes + size.fields * 24 + append.entries.len() * (64 + append.stream.as_str().len())
}

/// Adds a command for each entry that appends it.
pub(super) fn add_appends<'a>(
    commands: &mut Commands,
    stream: &StreamName,
    entries: impl IntoIterator<Item = &'a Fields>,
) {
    let mut last = None;
    entries.into_iter().for_each(|fields| add_entry(commands, stream, fields, &mut last));
}

/// How many fields the entry before has, and where its command begins.
type Before = Option<(usize, std::ops::Range<usize>)>;

/// Entries of one stream mostly have as many fields: their commands begin with the same bytes.
fn add_entry(commands: &mut Commands, stream: &StreamName, fields: &Fields, before: &mut Before) {
    match before {
        Some((len, head)) if *len == fields.len() => {
            commands.begin_like(head.clone(), 2 * fields.len());
        }
        _ => {
            let start = commands.position();
            commands.begin(3 + 2 * fields.len());
            commands.arg("XADD");
            commands.arg(stream.as_str());
            commands.arg("*");
            *before = Some((fields.len(), start..commands.position()));
        }
    }
    commands.arg_fields(fields);
}

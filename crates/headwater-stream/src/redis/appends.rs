//! Appends to several streams at once: one request where one server holds them all.
//!
//! Upstream: `streams`. On a cluster each stream gets a request of its own: the slots of a request must be one.

use futures_util::future::join_all;
use tracing::warn;

use super::RedisBackend;
use super::parts::PartedCall;
use super::reply::Cursor;
use super::servers::Effect;
use super::streams::packing_bytes;
use super::trim;
use crate::check;
use crate::entry::EntryId;
use crate::error::Result;
use crate::limits::BATCH_BYTES_MAX;
use crate::name::StreamName;
use crate::streams::{Append, Streams};

impl RedisBackend {
    pub(super) async fn append_each(&self, appends: &[Append<'_>]) -> Vec<Result<Vec<EntryId>>> {
        if appends.len() > 1 && !self.servers.is_cluster() {
            let check = |append: &Append<'_>| check::append(append.entries, append.retention);
            let checked: Vec<Result<usize>> = appends.iter().map(check).collect();
            let bytes = checked.iter().flatten().sum::<usize>();
            if bytes <= BATCH_BYTES_MAX {
                return self.append_together(appends, checked, bytes).await;
            }
        }
        let each = appends.iter().map(|append| {
            let Append { stream, entries, retention } = append;
            self.append(stream, entries, retention)
        });
        join_all(each).await
    }

    /// One request for those that are in order, which hold so many bytes.
    async fn append_together(
        &self,
        appends: &[Append<'_>],
        checked: Vec<Result<usize>>,
        bytes: usize,
    ) -> Vec<Result<Vec<EntryId>>> {
        let packing = appends.iter().map(|append| packing_bytes(append.stream, append.entries));
        let mut call = match PartedCall::new(&self.servers, 0, bytes + packing.sum::<usize>()) {
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

    /// Adds the commands of one append. Returns whether a trim goes with it.
    fn add_append(&self, call: &mut PartedCall<'_>, append: &Append<'_>) -> bool {
        let Append { stream, entries, retention } = *append;
        call.add_appends(stream, entries);
        !entries.is_empty() && self.add_trim(&mut call.commands, stream, entries.len(), retention)
    }

    /// Reads what became of one of several appends, to the end of its replies.
    fn read_append(
        &self,
        append: &Append<'_>,
        trims: bool,
        cursor: &mut Cursor<'_>,
    ) -> Result<Vec<EntryId>> {
        let mut ids = Ok(Vec::with_capacity(append.entries.len()));
        for _ in append.entries {
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

//! Appends to several streams at once: one request where one server holds them all.
//!
//! Upstream: `streams`. On a cluster each stream gets a request of its own: the slots of a request must be one.

use futures_util::future::join_all;
use tracing::warn;

use super::RedisBackend;
use super::parts::PartedCall;
use super::reply::Cursor;
use super::servers::Effect;
use super::streams::packed_bytes;
use super::trim;
use crate::check;
use crate::entry::{EntryId, Fields};
use crate::error::Result;
use crate::limits::BATCH_BYTES_MAX;
use crate::name::StreamName;
use crate::streams::{Append, Streams, TrimGuard};

impl RedisBackend {
    pub(super) async fn append_each(&self, appends: &[Append<'_>]) -> Vec<Result<Vec<EntryId>>> {
        let bytes = |append: &Append<'_>| append.entries.iter().map(Fields::bytes).sum::<usize>();
        let fits = || appends.iter().map(bytes).sum::<usize>() <= BATCH_BYTES_MAX;
        if appends.len() > 1 && !self.servers.is_cluster() && fits() {
            return self.append_together(appends).await;
        }
        let each = appends.iter().map(|append| {
            let Append { stream, entries, retention } = append;
            self.append(stream, entries, retention)
        });
        join_all(each).await
    }

    async fn append_together(&self, appends: &[Append<'_>]) -> Vec<Result<Vec<EntryId>>> {
        let bytes = |append: &Append<'_>| {
            append.entries.iter().map(|fields| packed_bytes(append.stream, fields)).sum::<usize>()
        };
        let bytes = appends.iter().map(bytes).sum();
        let mut call = match PartedCall::new(&self.servers, 0, bytes) {
            Ok(call) => call,
            Err(error) => return appends.iter().map(|_| Err(error.again())).collect(),
        };
        // For each append whether a trim goes with it, or why it is refused.
        let sent: Vec<Result<bool>> =
            appends.iter().map(|append| self.add_append(&mut call, append)).collect();
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
    fn add_append(&self, call: &mut PartedCall<'_>, append: &Append<'_>) -> Result<bool> {
        let Append { stream, entries, retention } = *append;
        check::append(entries, retention)?;
        call.add_appends(stream, entries);
        let trims = !entries.is_empty() && self.trims.is_due(stream, entries.len(), retention);
        if trims {
            trim::add(&mut call.commands, stream, retention, TrimGuard::Safe, true);
        }
        Ok(trims)
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

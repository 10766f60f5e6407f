//! Appends to one stream or several, in one request if one server holds all of them and they are small.
//!
//! Upstream: `streams`. On a cluster each stream gets its own request: a request is limited to one slot.
//! Guarantees: the entries of an append keep their order, and after an error a prefix of them is in the stream. The server
//! can reject single commands in the middle of a request (out of memory, a script runs), so several entries are a
//! transaction. A large append is a sequence of transactions: the next one is encoded while the server executes the
//! previous one, and sent when the previous one has succeeded.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tracing::warn;

use super::RedisBackend;
use super::client::{Idempotency, StartedCall};
use super::command::Commands;
use super::error::{ReplyError, ServerError};
use super::keys::Key;
use super::reply::{Cursor, RespReplies, RespValue};
use super::streams::millis;
use super::{msgpack, scripts, trim};
use crate::entry::{EntryId, EntrySize};
use crate::error::Result;
use crate::name::StreamName;
use crate::streams::{AppendRequest, AppendedEntry, EntrySource, IdempotentEntry, Retention};
use crate::validate;

/// Bytes of one transaction, and of one request for several streams; a larger entry is a request of its own. The server
/// executes a transaction without interruption, so it must be small; each one costs a round trip, so not too small.
const CHUNK_BYTES: usize = 64 * 1024;

/// Whether the server permits transactions. Checked once, before the first one: a user that may open a transaction and not
/// execute it would block the shared connection.
#[derive(Default)]
pub(super) struct TransactionCheck(AtomicBool);

/// Some entries of an append, with a trim if it is due.
struct AppendChunk {
    entries: Range<usize>,
    trims: bool,
}

impl RedisBackend {
    pub(super) async fn append_one(&self, append: &AppendRequest<'_>) -> Result<Vec<EntryId>> {
        let size = validate::append(append.entries, append.retention)?;
        let slot = self.slot(append.stream);
        self.client.check_open()?;
        let mut ids = Vec::with_capacity(append.entries.len());
        let mut started = None;
        let mut next = 0;
        while next < append.entries.len() {
            let mut commands = Commands::with_capacity(encoded_bytes(append, size));
            let chunk = self.add_chunk(&mut commands, append, size, next);
            next = chunk.entries.end;
            if let Some((call, chunk)) = started.take() {
                ids.append(&mut self.finish_chunk(append, call, &chunk).await?);
            }
            self.check_transactions(append.stream, &commands).await?;
            // Each transaction has its own deadline: a large append takes as long as it makes progress.
            let deadline = self.client.deadline();
            let call = self.client.start(slot, commands, Idempotency::AtMostOnce, deadline)?;
            started = Some((call, chunk));
        }
        if let Some((call, chunk)) = started {
            ids.append(&mut self.finish_chunk(append, call, &chunk).await?);
        }
        Ok(ids)
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
            if bytes <= CHUNK_BYTES {
                return self.append_together(appends, checked).await;
            }
        }
        join_all(appends.iter().map(|append| self.append_one(append))).await
    }

    /// Sends all valid appends in one request, each as one transaction.
    async fn append_together(
        &self,
        appends: &[AppendRequest<'_>],
        checked: Vec<Result<EntrySize>>,
    ) -> Vec<Result<Vec<EntryId>>> {
        let sizes = appends.iter().zip(checked.iter().flatten());
        let bytes = sizes.map(|(append, size)| encoded_bytes(append, *size)).sum();
        let mut commands = Commands::with_capacity(bytes);
        // For each append what was added, or why it is invalid.
        let each = appends.iter().zip(checked);
        let chunks: Vec<Result<AppendChunk>> = each
            .map(|(append, checked)| {
                checked.map(|size| self.add_chunk(&mut commands, append, size, 0))
            })
            .collect();
        let sent = match appends.first() {
            Some(first) if commands.len() > 0 => self.append_all(first.stream, commands).await,
            _ => self.client.check_open().map(|()| RespReplies::joined(&[])),
        };
        let each = appends.iter().zip(chunks);
        match sent {
            Ok(replies) => {
                let mut cursor = replies.cursor();
                each.map(|(append, chunk)| self.read_chunk(append, &chunk?, &mut cursor)).collect()
            }
            Err(error) => each.map(|(_, chunk)| chunk.and(Err(error.duplicate()))).collect(),
        }
    }

    /// Sends appends in the slot of `stream`.
    pub(super) async fn append_all(
        &self,
        stream: &StreamName,
        commands: Commands,
    ) -> Result<RespReplies> {
        self.check_transactions(stream, &commands).await?;
        self.call(stream, commands, Idempotency::AtMostOnce).await
    }

    /// Appends the entries whose ids are new to the stream. At least one entry.
    pub(super) async fn append_new(
        &self,
        stream: &StreamName,
        entries: &[IdempotentEntry],
        keep: Duration,
        retention: &Retention,
    ) -> Result<Vec<AppendedEntry>> {
        let mut keys = vec![self.key(stream)];
        keys.extend(entries.iter().map(|entry| self.keys().once(stream, &entry.id)));
        let mut commands = Commands::new();
        commands.script(&scripts::APPEND_ONCE, &keys, 1 + entries.len());
        commands.arg_number(millis(keep));
        entries.iter().for_each(|entry| commands.arg(msgpack::fields(&entry.fields)));
        let trims = self.add_trim(&mut commands, stream, entries.len(), retention);
        let replies = self.call(stream, commands, Idempotency::Idempotent).await?;
        let mut cursor = replies.cursor();
        let appended = read_appended(&mut cursor, entries.len());
        let appended = appended.map_err(|error| error.into_stream_error(stream))?;
        if trims {
            self.record_trim(stream, &mut cursor);
        }
        Ok(appended)
    }

    /// Adds the commands for the entries from `start` on: as many as fit into one chunk, and the trim after the last one.
    /// `size` is the size of the whole append.
    fn add_chunk(
        &self,
        commands: &mut Commands,
        append: &AppendRequest<'_>,
        size: EntrySize,
        start: usize,
    ) -> AppendChunk {
        let AppendRequest { stream, entries, retention } = *append;
        let end = if size.bytes <= CHUNK_BYTES {
            entries.len()
        } else {
            let mut bytes = 0;
            let fits = |at: &usize| {
                bytes += entries.size(*at).bytes;
                bytes <= CHUNK_BYTES || *at == start
            };
            start + (start..entries.len()).take_while(fits).count()
        };
        add_appends(commands, &self.key(stream), entries, start..end);
        let is_last = end == entries.len() && !entries.is_empty();
        let trims = is_last && self.add_trim(commands, stream, entries.len(), retention);
        AppendChunk { entries: start..end, trims }
    }

    async fn finish_chunk(
        &self,
        append: &AppendRequest<'_>,
        call: StartedCall<'_>,
        chunk: &AppendChunk,
    ) -> Result<Vec<EntryId>> {
        let replies = call.finish().await?;
        self.read_chunk(append, chunk, &mut replies.cursor())
    }

    /// Parses all replies of one chunk.
    fn read_chunk(
        &self,
        append: &AppendRequest<'_>,
        chunk: &AppendChunk,
        cursor: &mut Cursor<'_>,
    ) -> Result<Vec<EntryId>> {
        let ids = read_appends(cursor, chunk.entries.len());
        if chunk.trims {
            self.record_trim(append.stream, cursor);
        }
        ids.map_err(|error| error.into_stream_error(append.stream))
    }

    /// Fails if the commands contain a transaction and the server does not permit it.
    async fn check_transactions(&self, name: &StreamName, commands: &Commands) -> Result<()> {
        let TransactionCheck(is_permitted) = &self.transaction_check;
        if !commands.has_transactions() || is_permitted.load(Ordering::Relaxed) {
            return Ok(());
        }
        let error_of = async |commands: Commands| {
            let replies = self.call(name, commands, Idempotency::Idempotent).await?;
            Ok(match replies.cursor().value() {
                Ok(RespValue::Error(text)) => Some(ServerError::new(text)),
                _ => None,
            })
        };
        // First without `MULTI`: if `EXEC` is denied, no transaction must be open.
        let exec = error_of(Commands::one(&["EXEC"])).await?;
        let denied = match exec.filter(|error| !error.text().contains("without MULTI")) {
            Some(error) => Some(error),
            None => {
                let mut empty = Commands::new();
                empty.transaction(|_| {});
                error_of(empty).await?
            }
        };
        if let Some(error) = denied {
            return Err(error.into_stream_error(name.as_str()));
        }
        is_permitted.store(true, Ordering::Relaxed);
        Ok(())
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

fn read_appended(
    cursor: &mut Cursor<'_>,
    entries: usize,
) -> Result<Vec<AppendedEntry>, ReplyError> {
    cursor.array_of(entries * 2)?;
    let mut read = || Ok(AppendedEntry { id: cursor.id()?, duplicate: cursor.number()? == 1 });
    (0..entries).map(|_| read()).collect()
}

/// Approximate encoded size of a chunk, at most of the whole append.
fn encoded_bytes(append: &AppendRequest<'_>, size: EntrySize) -> usize {
    let entries = append.entries.len() * (64 + append.stream.as_str().len());
    (size.bytes + size.fields * 24 + entries).min(2 * CHUNK_BYTES)
}

/// Adds an `XADD` command for each entry; several are a transaction.
fn add_appends(
    commands: &mut Commands,
    stream: &Key<'_>,
    entries: &dyn EntrySource,
    range: Range<usize>,
) {
    let mut last = None;
    let count = range.len();
    let add = |commands: &mut Commands| {
        for at in range {
            entries.parts(at, &mut |before, shared, after| {
                begin_entry(commands, stream, before.len() + shared.len() + after.len(), &mut last);
                before.iter().for_each(|field| commands.arg_field(*field));
                commands.arg_fields(shared);
                after.iter().for_each(|field| commands.arg_field(*field));
            });
        }
    };
    match count {
        0 => {}
        1 => add(commands),
        _ => commands.transaction(add),
    }
}

/// Parses the replies to the commands of [`add_appends`].
pub(super) fn read_appends(
    cursor: &mut Cursor<'_>,
    entries: usize,
) -> Result<Vec<EntryId>, ReplyError> {
    if entries > 1 {
        cursor.transaction(entries)?;
    }
    // All replies are read, whatever they are: others follow.
    let mut ids = Ok(Vec::with_capacity(entries));
    for _ in 0..entries {
        match (cursor.id(), &mut ids) {
            (Ok(id), Ok(ids)) => ids.push(id),
            (Err(error), Ok(_)) => ids = Err(error),
            (_, Err(_)) => {}
        }
    }
    ids
}

/// Number of fields of the previous entry, and the byte range of its command's prefix.
type PreviousEntry = Option<(usize, Range<usize>)>;

/// Begins the command of an entry with this many fields. Consecutive entries usually have the same number: their commands share a
/// prefix, which is copied.
fn begin_entry(
    commands: &mut Commands,
    stream: &Key<'_>,
    fields: usize,
    previous: &mut PreviousEntry,
) {
    match previous {
        Some((len, head)) if *len == fields => commands.begin_like(head.clone(), 2 * fields),
        _ => {
            let start = commands.position();
            commands.begin(3 + 2 * fields);
            commands.arg("XADD");
            commands.arg_key(stream);
            commands.arg("*");
            *previous = Some((fields, start..commands.position()));
        }
    }
}

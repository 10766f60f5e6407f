//! Creates a session as a copy of stored entries.
//!
//! Upstream: `fork` and `import`. Downstream: the stream and metadata of the new session.
//! Guarantees: a copy is written to a stream with a temporary name, so no reader ever sees a part of it. Once it is
//! whole, creating the metadata makes it the session, in one step and only if the id is still free. Then the stream is
//! renamed, in one step; if the process dies in between, the next reader of the metadata renames it. A copy that fails
//! or is killed earlier leaves its id free; `abandon` or maintenance removes its temporary stream.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use bytes::Bytes;
use headwater_stream::limits::{BATCH_MAX, ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{EntryId, Fields, GroupStart, RegistryMap, Retention, StreamName};
use tracing::warn;

use super::lifecycle::{CopyKeys, exists};
use super::meta::{self, FirstEntry, Parent, SessionMeta, SessionPoint};
use super::replay::ORIGINAL_ENTRY_ID;
use super::{Result, Session, SessionError, Sessions, read_meta, snapshot};
use crate::limits::REPLAY_PAGE_BYTES;
use crate::name::{SessionId, random_bits};

/// A copy in progress.
pub(super) struct CopyInProgress {
    sessions: Sessions,
    session: SessionId,
    keys: CopyKeys,
    meta: SessionMeta,
    /// Snapshots to copy, by their set of folds.
    snapshots: Vec<(String, RegistryMap)>,
    /// New ids of the entries that the snapshots refer to.
    new_ids: HashMap<EntryId, Option<EntryId>>,
    first: Option<EntryId>,
    pub(super) last: Option<EntryId>,
    pub(super) entries: u64,
    progress_at: Instant,
    /// Whether a commit was attempted, so that a lost reply leaves its outcome unknown.
    is_committing: bool,
}

/// Where the new session starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// At its first event.
    Whole,
    /// After this many compacted entries, which snapshots include.
    After(u64),
    /// Unknown.
    Unknown,
}

impl CopyInProgress {
    /// Creates the temporary stream. Fails if the id is in use.
    pub(super) async fn begin(
        sessions: &Sessions,
        session: &SessionId,
        parent: Option<Parent>,
        snapshots: Vec<(String, RegistryMap)>,
    ) -> Result<Self> {
        sessions.check_free(session).await?;
        let copy = format!("{:032x}", random_bits());
        let sets = snapshots.iter().map(|(set, _)| set.clone()).collect();
        let keys = CopyKeys { session: session.clone(), copy, sets };
        let created_at = sessions.now().await?;
        let index = sessions.add_to_list(session, Some(&keys)).await?;
        let storage = sessions.storage();
        let guard = storage.keys.session_guard(session);
        storage.backend.ensure_group(&keys.stream(sessions), &guard, GroupStart::Beginning).await?;
        let meta = SessionMeta {
            ttl: sessions.inner.config.ttl,
            parent,
            copied_by: keys.copy.clone(),
            renaming: keys.copy.clone(),
            ..SessionMeta::new(index, created_at)
        };
        let named: HashSet<EntryId> =
            snapshots.iter().flat_map(|(_, fields)| snapshot::entry_ids(fields)).collect();
        Ok(Self {
            sessions: sessions.clone(),
            session: session.clone(),
            keys,
            meta,
            snapshots,
            new_ids: named.into_iter().map(|id| (id, None)).collect(),
            first: None,
            last: None,
            entries: 0,
            progress_at: Instant::now(),
            is_committing: false,
        })
    }

    /// Appends entries, given with their original ids.
    pub(super) async fn add(&mut self, entries: &[(EntryId, Fields)]) -> Result<()> {
        let mut rest = entries;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(_, fields): &&(EntryId, Fields)| {
                bytes += fields.bytes();
                bytes <= REPLAY_PAGE_BYTES
            };
            let count = rest.iter().take(BATCH_MAX).take_while(fits).count().max(1);
            let (batch, after) = rest.split_at(count);
            self.add_batch(batch).await?;
            rest = after;
        }
        Ok(())
    }

    async fn add_batch(&mut self, entries: &[(EntryId, Fields)]) -> Result<()> {
        // An append to a removed stream would create a stream that nothing removes.
        if self.progress_at.elapsed() > self.sessions.inner.config.abandoned_after / 2 {
            self.check_not_removed().await?;
        }
        let copies: Vec<Fields> =
            entries.iter().map(|(id, fields)| copied_fields(*id, fields)).collect();
        let (stream, backend) = (self.stream(), &self.sessions.storage().backend);
        let ids = backend.append(&stream, &copies, &Retention::KEEP_ALL).await?;
        for ((old, _), new) in entries.iter().zip(ids) {
            self.first.get_or_insert(new);
            if let Some(new_ids) = self.new_ids.get_mut(old) {
                *new_ids = Some(new);
            }
            self.last = Some(*old);
            self.entries += 1;
        }
        self.progress_at = Instant::now();
        Ok(())
    }

    fn stream(&self) -> StreamName {
        self.keys.stream(&self.sessions)
    }

    /// Checks that maintenance has not removed the stream. Its guard group proves that: an append does not create one.
    async fn check_not_removed(&self) -> Result<()> {
        let guard = self.sessions.storage().keys.session_guard(&self.session);
        let stats = self.sessions.storage().backend.stats(&self.stream()).await?;
        let is_whole = stats.is_some_and(|stats| {
            stats.length == self.entries && stats.groups.iter().any(|group| group.name == guard)
        });
        match is_whole {
            true => Ok(()),
            false => Err(SessionError::CopyRemoved { session: self.session.clone() }),
        }
    }

    /// Whether a snapshot includes what came before the first entry.
    pub(super) fn has_snapshot(&self) -> bool {
        self.translated_snapshots().next().is_some()
    }

    /// The snapshots with translated entry ids, if all entries that they refer to were copied.
    fn translated_snapshots(&self) -> impl Iterator<Item = (&str, RegistryMap)> {
        let to = |id| self.new_ids.get(&id).copied().flatten();
        self.snapshots
            .iter()
            .filter_map(move |(set, fields)| Some((set.as_str(), snapshot::translate(fields, to)?)))
    }

    /// Commits the session and opens it.
    pub(super) async fn finish(mut self, beginning: Beginning) -> Result<Session> {
        self.commit(beginning).await?;
        self.open(beginning).await
    }

    /// Makes the copy the session, in one step. After an error it may be committed; `abandon` tells.
    pub(super) async fn commit(&mut self, beginning: Beginning) -> Result<()> {
        let storage = self.sessions.storage();
        let mut meta = self.meta.clone();
        if let (Some(parent), Some(last)) = (&mut meta.parent, self.last) {
            parent.entry_id = last;
        }
        meta.first = match (beginning, self.first) {
            (Beginning::Unknown, _) => FirstEntry::Unknown,
            (Beginning::After(_), _) => FirstEntry::Elsewhere,
            (Beginning::Whole, Some(first)) => FirstEntry::Entry(first),
            (Beginning::Whole, None) => FirstEntry::NoneYet,
        };
        if let (Beginning::After(entries), Some(entry_id)) = (beginning, self.first) {
            meta.compacted = Some(SessionPoint { entry_id, entries });
        }
        // With all events present, the snapshots are not needed: a replay yields a state that refers to the new
        // entries.
        let has_all_events = has_all_events(beginning);
        for (set, fields) in self.translated_snapshots().filter(|_| !has_all_events) {
            let map = storage.keys.copied_snapshot(&self.session, set, &self.keys.copy);
            storage.backend.map_create(&map, &fields).await?;
            if let Some(point) = snapshot::point_of(&fields) {
                meta.snapshots.insert(set.to_owned(), point);
            }
        }
        self.check_not_removed().await?;
        self.is_committing = true;
        if !self.sessions.commit_meta(&self.session, &meta).await? {
            return Err(exists(&self.session, "open it with `recover`, or choose another id"));
        }
        match self.sessions.rename_copy(&self.session, &meta).await? {
            true => Ok(()),
            false => {
                Err(exists(&self.session, "its stream has events of another program; recover it"))
            }
        }
    }

    /// Opens the committed session.
    pub(super) async fn open(self, beginning: Beginning) -> Result<Session> {
        let session = self.sessions.recover(&self.session).await?;
        let had_snapshot = self.snapshots.iter().any(|(set, _)| *set == self.sessions.inner.set);
        if has_all_events(beginning) && had_snapshot && session.position() != EntryId::MIN {
            session.snapshot_or_warn().await;
        }
        Ok(session)
    }

    /// Removes what was stored. Returns `true` if the copy was committed after all: only the reply was lost. An error
    /// means that this is unknown; retry. If the reply is `false`, the copy will not be committed any more.
    pub(super) async fn abandon(&self) -> Result<bool> {
        if self.is_committing {
            let meta = self.sessions.meta(&self.session).await?;
            if meta.is_some_and(|meta| meta.copied_by == self.keys.copy) {
                return Ok(true);
            }
        }
        let session = &self.session;
        match self.sessions.remove_copy(self.meta.index, &self.keys).await {
            Err(error) if self.is_committing => Err(error),
            Err(error) => {
                warn!(%session, %error, "entries of a failed copy could not be removed; maintenance removes them");
                Ok(false)
            }
            Ok(()) => Ok(false),
        }
    }
}

fn has_all_events(beginning: Beginning) -> bool {
    !matches!(beginning, Beginning::After(_))
}

impl Sessions {
    /// Gives the stream of a committed copy the name of the session. Idempotent. Returns `false` if that is not
    /// possible, because the stream of the session has other entries by now; then the copy is removed.
    pub(super) async fn rename_copy(
        &self,
        session: &SessionId,
        meta: &SessionMeta,
    ) -> Result<bool> {
        let storage = self.storage();
        let (backend, map) = (&storage.backend, storage.keys.session_meta(session));
        let sets = meta.snapshots.keys().cloned().collect();
        let keys = CopyKeys { session: session.clone(), copy: meta.copied_by.clone(), sets };
        for set in &keys.sets {
            let copied = storage.keys.copied_snapshot(session, set, &keys.copy);
            if let Some(fields) = backend.map_get(&copied).await? {
                let map = storage.keys.session_snapshot(session, set);
                snapshot::replace_older(&**backend, &map, &fields).await?;
            }
        }
        let expected = Some((meta::RENAMING, meta.renaming.as_bytes()));
        let (from, to) = (keys.stream(self), storage.keys.session(session));
        if !backend.rename_stream(&from, &to).await? && !self.was_renamed(session, &from).await? {
            // One process removes the copy: another could otherwise remove a later session of this name.
            let taken = meta::renaming_is(&format!("{:032x}", random_bits()));
            if backend.map_update(&map, expected, &taken).await? {
                for set in &keys.sets {
                    backend.map_delete(&storage.keys.session_snapshot(session, set)).await?;
                }
                self.remove_copy(meta.index, &keys).await?;
                backend.map_delete(&map).await?;
            }
            return Ok(false);
        }
        for set in &keys.sets {
            backend.map_delete(&storage.keys.copied_snapshot(session, set, &keys.copy)).await?;
        }
        if backend.map_update(&map, expected, &meta::renaming_is("")).await? {
            return Ok(true);
        }
        // Another process was faster.
        let meta = read_meta(storage, session).await?;
        Ok(meta.is_some_and(|meta| meta.renaming.is_empty()))
    }

    /// Whether another process has renamed the stream of a copy: it is gone, and the stream of the session has a
    /// guard.
    async fn was_renamed(&self, session: &SessionId, from: &StreamName) -> Result<bool> {
        let storage = self.storage();
        if storage.backend.stats(from).await?.is_some() {
            return Ok(false);
        }
        let guard = storage.keys.session_guard(session);
        let stats = storage.backend.stats(&storage.keys.session(session)).await?;
        Ok(stats.is_some_and(|stats| stats.groups.iter().any(|group| group.name == guard)))
    }

    /// Removes the temporary keys of a copy and its entry in the list.
    pub(super) async fn remove_copy(&self, index: EntryId, keys: &CopyKeys) -> Result<()> {
        let storage = self.storage();
        storage.backend.delete_stream(&keys.stream(self)).await?;
        for set in &keys.sets {
            let map = storage.keys.copied_snapshot(&keys.session, set, &keys.copy);
            storage.backend.map_delete(&map).await?;
        }
        storage.backend.delete_entries(&storage.keys.sessions(), &[index]).await?;
        Ok(())
    }
}

/// The entry with its original id.
fn copied_fields(id: EntryId, fields: &Fields) -> Fields {
    if fields.get(ORIGINAL_ENTRY_ID).is_some() {
        return fields.clone();
    }
    let name = Bytes::from_static(ORIGINAL_ENTRY_ID.as_bytes());
    let copy = Fields::new(fields.iter().cloned().chain([(name, id.to_string().into())]));
    // An entry of another program may already be at the limit; then it is copied without it.
    if copy.len() > FIELDS_MAX || copy.bytes() > ENTRY_BYTES_MAX {
        return fields.clone();
    }
    copy
}

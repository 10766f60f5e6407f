//! Creates, lists, describes and deletes sessions.
//!
//! Upstream: applications and operators. Downstream: `meta`, and a stream that lists all sessions.
//! Guarantees: of two processes that create the same session one wins; a session has a guard group on its stream from
//! the start, so that this library never trims entries before a snapshot includes them. A crash in the middle leaves
//! nothing that looks like a session.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, stream};
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Direction, Entry, EntryId, Fields, GroupStart, IdempotentEntry, Range, Retention, StreamName,
    StreamStats,
};
use tracing::warn;

use super::meta::{self, FirstEntry, Parent, SessionMeta, SessionPoint, SessionStage};
use super::{Result, Session, SessionError, Sessions};
use crate::error::BusError;
use crate::event::Envelope;
use crate::limits::LIST_PAGE_MAX;
use crate::name::SessionId;

/// Fields of an entry in the list of sessions: the session; its copy, and the sets of folds of the copied snapshots.
const SESSION: &str = "session";
const COPY: &str = "copy";
const COPIED_SETS: &str = "copied_sets";

/// Description of a session, without reading its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Its id.
    pub session: SessionId,
    /// Its entry in the list of sessions, which is in creation order.
    pub index: EntryId,
    /// Lifecycle stage.
    pub stage: SessionStage,
    /// Creation time.
    pub created_at: Timestamp,
    /// The session it was forked from.
    pub parent: Option<Parent>,
    /// Idle time after which it expires.
    pub ttl: Option<Duration>,
    /// Number of entries in its stream.
    pub length: u64,
    /// Number of entries removed by compaction or expiry.
    pub removed: u64,
    /// Its newest entry.
    pub last_entry: Option<EntryId>,
}

/// Sessions processed concurrently.
pub(super) const CONCURRENCY: usize = 32;

/// An entry of the list of sessions. An entry without a matching session is left over from a creation that crashed or
/// lost against another one, or belongs to a copy in progress.
pub(super) struct IndexEntry {
    pub(super) index: EntryId,
    pub(super) copy: Option<CopyKeys>,
    /// `Err` if the session could not be read.
    pub(super) lookup: Result<Option<SessionLookup>>,
}

/// What the temporary keys of a copy are derived from.
pub(super) struct CopyKeys {
    pub(super) session: SessionId,
    /// Unique id of the copy.
    pub(super) copy: String,
    /// Sets of folds whose snapshots are copied.
    pub(super) sets: Vec<String>,
}

impl CopyKeys {
    /// The temporary stream.
    pub(super) fn stream(&self, sessions: &Sessions) -> StreamName {
        sessions.storage().keys.session_copy(&self.session, &self.copy)
    }
}

/// A session with its metadata and stream statistics.
pub(super) struct SessionLookup {
    pub(super) session: SessionId,
    pub(super) meta: SessionMeta,
    pub(super) stats: Option<StreamStats>,
}

impl SessionLookup {
    pub(super) fn info(&self) -> SessionInfo {
        let Self { session, meta, stats } = self;
        let removed = meta.expired.or(meta.compacted).map_or(0, |point| point.entries);
        SessionInfo {
            session: session.clone(),
            index: meta.index,
            stage: meta.stage,
            created_at: meta.created_at,
            parent: meta.parent.clone(),
            ttl: meta.ttl,
            length: stats.as_ref().map_or(0, |stats| stats.length),
            removed,
            last_entry: stats.as_ref().and_then(|stats| stats.last_id),
        }
    }
}

impl Sessions {
    /// Creates a session. Fails if there is one with this id, or if its stream has events of another program, which
    /// [`recover`](Self::recover) takes over.
    pub async fn create(&self, session: &SessionId) -> Result<Session> {
        let base = self.check_free(session).await?;
        let meta = SessionMeta { base, ..self.register(session, FirstEntry::NoneYet).await? };
        if self.commit_meta(session, &meta).await? {
            return Ok(Session::empty(self.clone(), session.clone(), &meta));
        }
        self.remove_from_list(meta.index).await;
        Err(exists(session, "open it with `recover`, or choose another id"))
    }

    /// Checks that an id is free. Returns the last position of its stream, if that existed before.
    pub(super) async fn check_free(&self, session: &SessionId) -> Result<Option<SessionPoint>> {
        if self.meta(session).await?.is_some() {
            return Err(exists(session, "open it with `recover`, or choose another id"));
        }
        let storage = self.storage();
        let stats = storage.backend.stats(&storage.keys.session(session)).await?;
        if stats.as_ref().is_some_and(|stats| stats.length > 0) {
            return Err(exists(session, "its stream has events of another program; recover it"));
        }
        let once = stats.filter(|stats| stats.last_generated_id > EntryId::MIN);
        Ok(once.map(|stats| SessionPoint {
            entry_id: stats.last_generated_id,
            entries: stats.entries_added.unwrap_or(0),
        }))
    }

    /// Recovers a session, or creates it if there is none.
    pub async fn ensure(&self, session: &SessionId) -> Result<Session> {
        match self.recover(session).await {
            Err(SessionError::NotFound { .. }) => {}
            other => return other,
        }
        match self.create(session).await {
            // Another process created it meanwhile.
            Err(SessionError::Exists { .. }) => self.recover(session).await,
            other => other,
        }
    }

    /// Appends events that were encoded before, in order; creates the session if there is none. An event whose id was
    /// appended within `keep` is skipped. Idempotent: may be repeated after any error.
    pub async fn append_once(
        &self,
        session: &SessionId,
        events: &[Envelope],
        keep: Duration,
    ) -> Result<()> {
        match self.create(session).await {
            Ok(_) | Err(SessionError::Exists { .. }) => {}
            Err(error) => return Err(error),
        }
        let once = |event: &Envelope| IdempotentEntry {
            id: event.event_id.to_string(),
            fields: event.to_fields(),
        };
        let (stream, entries) = (self.storage().keys.session(session), events.iter().map(once));
        let entries: Vec<IdempotentEntry> = entries.collect();
        let backend = &self.storage().backend;
        backend.append_once(&stream, &entries, keep, &Retention::KEEP_ALL).await?;
        Ok(())
    }

    /// Takes over a stream of another program as a session.
    pub(super) async fn adopt_foreign(&self, session: &SessionId) -> Result<SessionMeta> {
        let meta = self.register(session, FirstEntry::Unknown).await?;
        if self.commit_meta(session, &meta).await? {
            return Ok(meta);
        }
        // Another process did so at the same time.
        self.remove_from_list(meta.index).await;
        let meta = self.meta(session).await?;
        meta.ok_or_else(|| SessionError::NotFound { session: session.clone() })
    }

    /// Adds a session to the list and a guard group to its stream. It becomes a session with `commit_meta`.
    async fn register(&self, session: &SessionId, first: FirstEntry) -> Result<SessionMeta> {
        let storage = self.storage();
        let now = self.now().await?;
        let index = self.add_to_list(session, None).await?;
        let (stream, guard) = (storage.keys.session(session), storage.keys.session_guard(session));
        storage.backend.ensure_group(&stream, &guard, GroupStart::Beginning).await?;
        Ok(SessionMeta { first, ttl: self.inner.config.ttl, ..SessionMeta::new(index, now) })
    }

    /// Adds an entry to the list of sessions. It counts if the metadata of the session names it.
    pub(super) async fn add_to_list(
        &self,
        session: &SessionId,
        copy: Option<&CopyKeys>,
    ) -> Result<EntryId> {
        let mut fields = vec![(SESSION, session.to_string())];
        if let Some(CopyKeys { copy, sets, .. }) = copy {
            fields.extend([(COPY, copy.clone()), (COPIED_SETS, sets.join(" "))]);
        }
        let (list, entry) = (self.storage().keys.sessions(), [Fields::new(fields)]);
        let ids = self.storage().backend.append(&list, &entry, &Retention::KEEP_ALL).await?;
        Ok(ids.first().copied().unwrap_or(EntryId::MIN))
    }

    /// If this fails, maintenance removes the entry.
    async fn remove_from_list(&self, index: EntryId) {
        let list = self.storage().keys.sessions();
        let _ = self.storage().backend.delete_entries(&list, &[index]).await;
    }

    /// Creates the metadata. Returns `false` if the session exists.
    pub(super) async fn commit_meta(
        &self,
        session: &SessionId,
        meta: &SessionMeta,
    ) -> Result<bool> {
        let storage = self.storage();
        let map = storage.keys.session_meta(session);
        let fields = meta.to_fields();
        if storage.backend.map_create(&map, &fields).await? {
            return Ok(true);
        }
        // The map may contain fields of another program; add ours.
        Ok(self.meta(session).await?.is_none()
            && storage.backend.map_update(&map, None, &fields).await?)
    }

    /// Sessions in creation order, after this entry of the list (`EntryId::MIN` for the first page). An empty page is
    /// the last one.
    pub async fn list(&self, after: EntryId, count: usize) -> Result<Vec<SessionInfo>> {
        if !(1..=LIST_PAGE_MAX).contains(&count) {
            let problem = format!("{count}; 1 to {LIST_PAGE_MAX}");
            return Err(BusError::invalid("page length", problem).into());
        }
        let (mut found, mut from) = (Vec::new(), after);
        while found.len() < count {
            let page = self.list_page(from, count - found.len()).await?;
            let Some(last) = page.last() else { break };
            from = last.index;
            for listed in page {
                match listed.lookup {
                    Ok(lookup) => found.extend(lookup.map(|lookup| lookup.info())),
                    Err(error) if error.is_transient() => return Err(error),
                    // A damaged session does not affect the others.
                    Err(_) => {}
                }
            }
        }
        Ok(found)
    }

    /// Entries of the list after this one, with their sessions.
    pub(super) async fn list_page(&self, after: EntryId, count: usize) -> Result<Vec<IndexEntry>> {
        let storage = self.storage();
        let (from, to) = (after.next(), EntryId::MAX);
        let range = Range { from, to, direction: Direction::Forward, count };
        let entries = storage.backend.range(&storage.keys.sessions(), range).await?;
        let each = entries.into_iter().map(|entry| self.lookup_entry(entry).boxed());
        let each: Vec<BoxFuture<'_, IndexEntry>> = each.collect();
        Ok(stream::iter(each).buffered(CONCURRENCY).collect().await)
    }

    async fn lookup_entry(&self, entry: Entry) -> IndexEntry {
        let text = |name| entry.fields.get(name).and_then(|value| std::str::from_utf8(value).ok());
        let index = entry.id;
        let Some(session) = text(SESSION).and_then(|id| SessionId::new(id).ok()) else {
            return IndexEntry { index, copy: None, lookup: Ok(None) };
        };
        let lookup = self.lookup(&session).await;
        let lookup = lookup
            .inspect_err(|error| warn!(%session, %error, "session could not be read"))
            .map(|lookup| lookup.filter(|lookup| lookup.meta.index == index));
        let sets = text(COPIED_SETS).unwrap_or("").split_whitespace().map(str::to_owned);
        let keys = |copy: &str| CopyKeys { session, copy: copy.to_owned(), sets: sets.collect() };
        IndexEntry { index, copy: text(COPY).map(keys), lookup }
    }

    async fn lookup(&self, session: &SessionId) -> Result<Option<SessionLookup>> {
        let Some(meta) = self.meta(session).await? else { return Ok(None) };
        let stats = self.storage().backend.stats(&self.storage().keys.session(session)).await?;
        Ok(Some(SessionLookup { session: session.clone(), meta, stats }))
    }

    /// Describes a session; `None` if there is none.
    pub async fn info(&self, session: &SessionId) -> Result<Option<SessionInfo>> {
        Ok(self.lookup(session).await?.map(|lookup| lookup.info()))
    }

    /// Describes a session, or a stream of another program without taking it over. The latter is not in the list: its
    /// `index` is [`EntryId::MIN`]. [`NotFound`](SessionError::NotFound) if there is neither.
    pub async fn info_including_foreign(&self, session: &SessionId) -> Result<SessionInfo> {
        if let Some(lookup) = self.lookup(session).await? {
            return Ok(lookup.info());
        }
        let mut meta = self.read_only_meta(session).await?;
        let stats = self.storage().backend.stats(&self.storage().keys.session(session)).await?;
        if let Some(first) = stats.as_ref().and_then(|stats| stats.first_id) {
            meta.created_at = Timestamp::from_millis(first.ms);
        }
        Ok(SessionLookup { session: session.clone(), meta, stats }.info())
    }

    /// Deletes a session with all its events, snapshots and groups, even if groups have not read them. Returns
    /// whether it existed. No tombstone is kept.
    pub async fn delete(&self, session: &SessionId) -> Result<bool> {
        let storage = self.storage();
        let Some(meta) = self.meta(session).await? else { return Ok(false) };
        // The metadata is deleted last, except for the list entry, which only counts together with it.
        for set in meta.snapshots.keys() {
            storage.backend.map_delete(&storage.keys.session_snapshot(session, set)).await?;
        }
        storage.backend.delete_stream(&storage.keys.session(session)).await?;
        let was_there = storage.backend.map_delete(&storage.keys.session_meta(session)).await?;
        storage.backend.delete_entries(&storage.keys.sessions(), &[meta.index]).await?;
        Ok(was_there)
    }

    /// Records the first entry of a session that was empty. Returns the first entry as recorded.
    pub(super) async fn record_first_entry(
        &self,
        session: &SessionId,
        first: EntryId,
    ) -> Result<FirstEntry> {
        let map = self.storage().keys.session_meta(session);
        let (unseen, seen) = (meta::first_text(FirstEntry::NoneYet), FirstEntry::Entry(first));
        let expected = Some((meta::FIRST, unseen.as_bytes()));
        if self.storage().backend.map_update(&map, expected, &meta::first_is(seen)).await? {
            return Ok(seen);
        }
        match self.meta(session).await? {
            Some(meta) => Ok(meta.first),
            None => Err(SessionError::NotFound { session: session.clone() }),
        }
    }
}

pub(super) fn exists(session: &SessionId, problem: &str) -> SessionError {
    SessionError::Exists { session: session.clone(), problem: problem.to_owned() }
}

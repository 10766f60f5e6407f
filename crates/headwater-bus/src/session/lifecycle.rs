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
    Direction, Entry, EntryId, Fields, GroupStart, Range, Retention, StreamStats,
};
use tracing::warn;

use super::meta::{self, FirstEntry, Parent, SessionMeta, SessionPoint, SessionStage};
use super::replay::ORIGINAL_ENTRY_ID;
use super::{Result, Session, SessionError, Sessions};
use crate::error::BusError;
use crate::limits::LIST_PAGE_MAX;
use crate::name::SessionId;

/// Field of an entry in the list of sessions.
const SESSION: &str = "session";

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
/// lost against another one.
pub(super) struct IndexEntry {
    pub(super) index: EntryId,
    /// `Err` if the session could not be read.
    pub(super) lookup: Result<Option<SessionLookup>>,
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
        self.commit_meta(session, &meta).await?;
        Ok(Session::empty(self.clone(), session.clone(), &meta))
    }

    /// Checks that an id is free. Returns the last position of its stream, if that existed before.
    pub(super) async fn check_free(&self, session: &SessionId) -> Result<Option<SessionPoint>> {
        let storage = self.storage();
        let stats = storage.backend.stats(&storage.keys.session(session)).await?;
        match self.meta(session).await? {
            Some(meta) if meta.stage == SessionStage::Copying => {
                let problem = format!(
                    "{} is unfinished; repeat it to replace the remains, or delete the session",
                    meta.copy_description
                );
                return Err(exists(session, &problem));
            }
            Some(_) => return Err(exists(session, "open it with `recover`, or choose another id")),
            None => {}
        }
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

    /// Takes over a stream of another program as a session.
    pub(super) async fn adopt_foreign(&self, session: &SessionId) -> Result<SessionMeta> {
        let meta = self.register(session, FirstEntry::Unknown).await?;
        match self.commit_meta(session, &meta).await {
            Ok(()) => Ok(meta),
            // Another process did so at the same time.
            Err(SessionError::Exists { .. }) => {
                let meta = self.meta(session).await?;
                meta.ok_or_else(|| SessionError::NotFound { session: session.clone() })
            }
            Err(error) => Err(error),
        }
    }

    /// Adds a session to the list and a guard group to its stream. It becomes a session with `commit_meta`.
    pub(super) async fn register(
        &self,
        session: &SessionId,
        first: FirstEntry,
    ) -> Result<SessionMeta> {
        let storage = self.storage();
        let now = self.now().await?;
        let entry = [Fields::new([(SESSION, session.to_string())])];
        let list = storage.keys.sessions();
        let ids = storage.backend.append(&list, &entry, &Retention::KEEP_ALL).await?;
        let index = ids.first().copied().unwrap_or(EntryId::MIN);
        let (stream, guard) = (storage.keys.session(session), storage.keys.session_guard(session));
        storage.backend.ensure_group(&stream, &guard, GroupStart::Beginning).await?;
        let ttl = self.inner.config.ttl;
        Ok(SessionMeta { first, ttl, ..SessionMeta::new(SessionStage::Open, index, now) })
    }

    /// Creates the metadata, unless the session exists.
    pub(super) async fn commit_meta(&self, session: &SessionId, meta: &SessionMeta) -> Result<()> {
        let storage = self.storage();
        let map = storage.keys.session_meta(session);
        let fields = meta.to_fields();
        if storage.backend.map_create(&map, &fields).await? {
            return Ok(());
        }
        // The map may contain fields of another program; add ours.
        if self.meta(session).await?.is_none()
            && storage.backend.map_update(&map, None, &fields).await?
        {
            return Ok(());
        }
        let _ = storage.backend.delete_entries(&storage.keys.sessions(), &[meta.index]).await;
        Err(exists(session, "open it with `recover`, or choose another id"))
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
        let name = entry.fields.get(SESSION).and_then(|id| std::str::from_utf8(id).ok());
        let lookup = match name.and_then(|id| SessionId::new(id).ok()) {
            None => Ok(None),
            Some(session) => self
                .lookup(&session)
                .await
                .inspect_err(|error| warn!(%session, %error, "session could not be read")),
        };
        let lookup = lookup.map(|lookup| lookup.filter(|lookup| lookup.meta.index == entry.id));
        IndexEntry { index: entry.id, lookup }
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
        let Some(meta) = self.meta(session).await? else {
            return match self.find_orphaned_copy(session).await? {
                Some(_) => {
                    Ok(storage.backend.delete_stream(&storage.keys.session(session)).await?)
                }
                None => Ok(false),
            };
        };
        // The metadata is deleted last, except for the list entry, which only counts together with it.
        for set in meta.snapshots.keys() {
            storage.backend.map_delete(&storage.keys.session_snapshot(session, set)).await?;
        }
        storage.backend.delete_stream(&storage.keys.session(session)).await?;
        let was_there = storage.backend.map_delete(&storage.keys.session_meta(session)).await?;
        storage.backend.delete_entries(&storage.keys.sessions(), &[meta.index]).await?;
        Ok(was_there)
    }

    /// Time of a copy that was appended after its session was deleted, if the stream is such an orphan; `None` if it
    /// is a stream of another program.
    pub(super) async fn find_orphaned_copy(
        &self,
        session: &SessionId,
    ) -> Result<Option<Timestamp>> {
        let storage = self.storage();
        let first = storage.backend.range(&storage.keys.session(session), Range::first(1)).await?;
        let is_copy = |entry: &Entry| entry.fields.get(ORIGINAL_ENTRY_ID).is_some();
        let copy = first.into_iter().find(is_copy);
        Ok(copy.map(|entry| Timestamp::from_millis(entry.id.ms)))
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

fn exists(session: &SessionId, problem: &str) -> SessionError {
    SessionError::Exists { session: session.clone(), problem: problem.to_owned() }
}

//! The life of sessions as a whole: made, listed, looked at, forgotten.
//!
//! Upstream: applications and operators. Downstream: `meta`, and a stream that lists all sessions.
//! Promises: of two that make the same session one wins; a session that is made has a guard on its stream from the
//! beginning, so that no trim of ours takes what no snapshot stands for. A crash in the middle leaves nothing that looks
//! like a session.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, stream};
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Direction, Entry, EntryId, Fields, GroupStart, Range, Retention, StreamError, StreamStats,
};
use tracing::warn;

use super::meta::{self, First, Meta, Parent, Point, Stage};
use super::replay::ORIGINAL_ENTRY_ID;
use super::{Result, Session, SessionError, Sessions};
use crate::error::BusError;
use crate::limits::LIST_MAX;
use crate::name::SessionId;

/// In an entry of the list of sessions.
const SESSION: &str = "session";

/// What there is to know of a session without reading its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Its id.
    pub session: SessionId,
    /// Its place in the list of sessions, which is in the order they were made.
    pub index: EntryId,
    /// Where it is in its life.
    pub stage: Stage,
    /// When it was made.
    pub created_at: Timestamp,
    /// The session it was forked from.
    pub parent: Option<Parent>,
    /// How long it lives after its last event.
    pub ttl: Option<Duration>,
    /// How many entries its stream holds.
    pub length: u64,
    /// How many entries were compacted, or went when it expired.
    pub gone: u64,
    /// Its newest entry.
    pub last_entry: Option<EntryId>,
}

/// Tries to change a number that others change at the same time.
const NOTE_TRIES: usize = 8;

/// Sessions that are looked at or dealt with at the same time.
pub(super) const AT_ONCE: usize = 32;

/// An entry of the list of sessions. Whoever began to make a session and died, or lost against another, left one that
/// counts for nothing.
pub(super) struct Listed {
    pub(super) index: EntryId,
    /// An error says why nobody can tell.
    pub(super) looked: Result<Option<Looked>>,
}

/// A session as it is found.
pub(super) struct Looked {
    pub(super) session: SessionId,
    pub(super) meta: Meta,
    pub(super) stats: Option<StreamStats>,
}

impl Looked {
    pub(super) fn info(&self) -> SessionInfo {
        let Self { session, meta, stats } = self;
        let gone = meta.expired.or(meta.compacted).map_or(0, |point| point.entries);
        SessionInfo {
            session: session.clone(),
            index: meta.index,
            stage: meta.stage,
            created_at: meta.created_at,
            parent: meta.parent.clone(),
            ttl: meta.ttl,
            length: stats.as_ref().map_or(0, |stats| stats.length),
            gone,
            last_entry: stats.as_ref().and_then(|stats| stats.last_id),
        }
    }
}

impl Sessions {
    /// Makes a session. It is an error if there is one with this id, or if its stream holds events already: those of
    /// another program, which [`recover`](Self::recover) takes over.
    pub async fn create(&self, session: &SessionId) -> Result<Session> {
        let base = self.check_free(session).await?;
        let meta = Meta { base, ..self.begin(session, First::Unseen).await? };
        self.found(session, &meta).await?;
        Ok(Session::empty(self.clone(), session.clone(), &meta))
    }

    /// Nothing may be there of a session that is to be made. Returns what its stream once held, if it is not new.
    pub(super) async fn check_free(&self, session: &SessionId) -> Result<Option<Point>> {
        let journal = self.journal();
        let stats = journal.backend.stats(&journal.keys.session(session)).await?;
        match self.meta(session).await? {
            Some(meta) if meta.stage == Stage::Filling => {
                let problem = format!(
                    "{} is not finished; repeat it to replace what is left, or forget it",
                    meta.filling
                );
                return Err(exists(session, &problem));
            }
            Some(_) => return Err(exists(session, "recover it")),
            None => {}
        }
        if stats.as_ref().is_some_and(|stats| stats.length > 0) {
            return Err(exists(session, "another program wrote events of it; recover it"));
        }
        let once = stats.filter(|stats| stats.last_generated_id > EntryId::MIN);
        Ok(once.map(|stats| Point {
            entry_id: stats.last_generated_id,
            entries: stats.entries_added.unwrap_or(0),
        }))
    }

    /// Recovers a session, or makes it if there is none.
    pub async fn ensure(&self, session: &SessionId) -> Result<Session> {
        match self.recover(session).await {
            Err(SessionError::NotFound { .. }) => {}
            other => return other,
        }
        match self.create(session).await {
            // Somebody else made it meanwhile.
            Err(SessionError::Exists { .. }) => self.recover(session).await,
            other => other,
        }
    }

    /// Takes over a stream that other programs wrote, as the session it is of.
    pub(super) async fn adopt(&self, session: &SessionId) -> Result<Meta> {
        let meta = self.begin(session, First::Unknown).await?;
        match self.found(session, &meta).await {
            Ok(()) => Ok(meta),
            // Somebody else did so at the same time.
            Err(SessionError::Exists { .. }) => {
                let meta = self.meta(session).await?;
                meta.ok_or_else(|| SessionError::NotFound { session: session.clone() })
            }
            Err(error) => Err(error),
        }
    }

    /// Puts a session into the list and a guard on its stream. It is a session only when its meta says so.
    pub(super) async fn begin(&self, session: &SessionId, first: First) -> Result<Meta> {
        let journal = self.journal();
        let now = self.now().await?;
        let entry = [Fields::new([(SESSION, session.to_string())])];
        let list = journal.keys.sessions();
        let ids = journal.backend.append(&list, &entry, &Retention::KEEP_ALL).await?;
        let index = ids.first().copied().unwrap_or(EntryId::MIN);
        let (stream, guard) = (journal.keys.session(session), journal.keys.session_guard(session));
        journal.backend.ensure_group(&stream, &guard, GroupStart::Beginning).await?;
        let ttl = self.inner.config.ttl;
        Ok(Meta { first, ttl, ..Meta::new(Stage::Open, index, now) })
    }

    /// Makes it a session, or finds that it is one.
    pub(super) async fn found(&self, session: &SessionId, meta: &Meta) -> Result<()> {
        let journal = self.journal();
        let map = journal.keys.session_meta(session);
        let fields = meta.to_fields();
        if journal.backend.map_create(&map, &fields).await? {
            return Ok(());
        }
        // Another program keeps things of its own there: both have room.
        if self.meta(session).await?.is_none()
            && journal.backend.map_update(&map, None, &fields).await?
        {
            return Ok(());
        }
        let _ = journal.backend.delete_entries(&journal.keys.sessions(), &[meta.index]).await;
        Err(exists(session, "recover it"))
    }

    /// Sessions in the order they were made, after this place in the list (`EntryId::MIN` for the first page). An empty
    /// page is the last one.
    pub async fn list(&self, after: EntryId, count: usize) -> Result<Vec<SessionInfo>> {
        if !(1..=LIST_MAX).contains(&count) {
            let problem = format!("{count}; 1 to {LIST_MAX}");
            return Err(BusError::invalid("the length of a page", problem).into());
        }
        let (mut found, mut from) = (Vec::new(), after);
        while found.len() < count {
            let page = self.page(from, count - found.len()).await?;
            let Some(last) = page.last() else { break };
            from = last.index;
            for listed in page {
                match listed.looked {
                    Ok(looked) => found.extend(looked.map(|looked| looked.info())),
                    Err(error) if error.is_transient() => return Err(error),
                    // Others are none the worse for it.
                    Err(_) => {}
                }
            }
        }
        Ok(found)
    }

    /// Entries of the list after this one, with what is known of their sessions.
    pub(super) async fn page(&self, after: EntryId, count: usize) -> Result<Vec<Listed>> {
        let journal = self.journal();
        let (from, to) = (after.next(), EntryId::MAX);
        let range = Range { from, to, direction: Direction::Forward, count };
        let entries = journal.backend.range(&journal.keys.sessions(), range).await?;
        let each = entries.into_iter().map(|entry| self.look_up(entry).boxed());
        let each: Vec<BoxFuture<'_, Listed>> = each.collect();
        Ok(stream::iter(each).buffered(AT_ONCE).collect().await)
    }

    async fn look_up(&self, entry: Entry) -> Listed {
        let name = entry.fields.get(SESSION).and_then(|id| std::str::from_utf8(id).ok());
        let looked = match name.and_then(|id| SessionId::new(id).ok()) {
            None => Ok(None),
            Some(session) => self
                .look(&session)
                .await
                .inspect_err(|error| warn!(%session, %error, "session cannot be looked at")),
        };
        let looked = looked.map(|looked| looked.filter(|looked| looked.meta.index == entry.id));
        Listed { index: entry.id, looked }
    }

    async fn look(&self, session: &SessionId) -> Result<Option<Looked>> {
        let Some(meta) = self.meta(session).await? else { return Ok(None) };
        let stats = self.journal().backend.stats(&self.journal().keys.session(session)).await?;
        Ok(Some(Looked { session: session.clone(), meta, stats }))
    }

    /// What there is to know of a session; `None` if there is none.
    pub async fn info(&self, session: &SessionId) -> Result<Option<SessionInfo>> {
        Ok(self.look(session).await?.map(|looked| looked.info()))
    }

    /// The same for a stream that other programs wrote: it is described, and stays what it is. It has no place in the list,
    /// `index` is [`EntryId::MIN`]. [`NotFound`](SessionError::NotFound) if there is nothing.
    pub async fn info_of_any(&self, session: &SessionId) -> Result<SessionInfo> {
        if let Some(looked) = self.look(session).await? {
            return Ok(looked.info());
        }
        let mut meta = self.look_at_meta(session).await?;
        let stats = self.journal().backend.stats(&self.journal().keys.session(session)).await?;
        if let Some(first) = stats.as_ref().and_then(|stats| stats.first_id) {
            meta.created_at = Timestamp::from_millis(first.ms);
        }
        Ok(Looked { session: session.clone(), meta, stats }.info())
    }

    /// Removes a session with all its events, snapshots and groups, read or not. Returns whether there was one. Nothing is
    /// left to say that it ever was.
    pub async fn forget(&self, session: &SessionId) -> Result<bool> {
        let journal = self.journal();
        let Some(meta) = self.meta(session).await? else {
            return match self.leftover(session).await? {
                Some(_) => {
                    Ok(journal.backend.delete_stream(&journal.keys.session(session)).await?)
                }
                None => Ok(false),
            };
        };
        // What looks like a session goes last but for the list, which only counts together with it.
        for set in meta.snapshots.keys() {
            journal.backend.map_delete(&journal.keys.session_snapshot(session, set)).await?;
        }
        journal.backend.delete_stream(&journal.keys.session(session)).await?;
        let was_there = journal.backend.map_delete(&journal.keys.session_meta(session)).await?;
        journal.backend.delete_entries(&journal.keys.sessions(), &[meta.index]).await?;
        Ok(was_there)
    }

    /// When a stream without a session was filled by somebody who did not notice that the session was removed; `None` if
    /// it is a stream of another program.
    pub(super) async fn leftover(&self, session: &SessionId) -> Result<Option<Timestamp>> {
        let journal = self.journal();
        let first = journal.backend.range(&journal.keys.session(session), Range::first(1)).await?;
        let is_copy = |entry: &Entry| entry.fields.get(ORIGINAL_ENTRY_ID).is_some();
        let copy = first.into_iter().find(is_copy);
        Ok(copy.map(|entry| Timestamp::from_millis(entry.id.ms)))
    }

    /// Notes that a main loop lost its lock over a request. Several may do so at once; it is an error if so many do that one
    /// is not counted.
    pub(crate) async fn note_lost_run(&self, session: &SessionId) -> Result<()> {
        let map = self.journal().keys.session_meta(session);
        for _ in 0..NOTE_TRIES {
            let Some(meta) = self.meta(session).await? else { return Ok(()) };
            let known = meta.lost_runs.to_string();
            let expected = Some((meta::LOST_RUNS, known.as_bytes()));
            let more = meta::lost_runs_are(meta.lost_runs + 1);
            if self.journal().backend.map_update(&map, expected, &more).await? {
                return Ok(());
            }
        }
        let problem = format!("others changed it {NOTE_TRIES} times meanwhile");
        Err(BusError::from(StreamError::Unavailable { problem, source: None }).into())
    }

    /// Notes the first entry of a session that was empty until now. Returns what is known of its beginning.
    pub(super) async fn note_first(&self, session: &SessionId, first: EntryId) -> Result<First> {
        let map = self.journal().keys.session_meta(session);
        let (unseen, seen) = (meta::first_text(First::Unseen), First::Entry(first));
        let expected = Some((meta::FIRST, unseen.as_bytes()));
        if self.journal().backend.map_update(&map, expected, &meta::first_is(seen)).await? {
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

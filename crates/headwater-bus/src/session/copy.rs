//! Filling: a new session is made of entries that were stored before, elsewhere.
//!
//! Upstream: `fork` and `import`. Downstream: the new session's stream and meta.
//! Promises: until all of it is there, nobody takes it for a session: it says that it is unfinished, and becomes one
//! in a single step. Whoever is taken for dead and goes on cannot finish it any more, and what it still copies counts
//! nowhere: copies say who made them, and a session says whose it is made of. A fork or import that failed or was
//! killed can be repeated at once: it replaces what the earlier one left.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use headwater_stream::limits::{BATCH_MAX, ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{EntryId, Fields, RegistryMap, Retention};
use tracing::{info, warn};

use super::meta::{self, FirstEntry, Parent, SessionMeta, SessionPoint, SessionStage};
use super::replay::ORIGINAL_ENTRY_ID;
use super::state::COPIED_BY;
use super::{Result, Session, SessionError, Sessions, snapshot};
use crate::limits::REPLAY_PAGE_BYTES;
use crate::name::{SessionId, random_bits};

/// A session that is being made.
pub(super) struct CopyInProgress {
    sessions: Sessions,
    session: SessionId,
    meta: SessionMeta,
    /// Snapshots that move along, by their set of folds.
    snapshots: Vec<(String, RegistryMap)>,
    /// Entries that the snapshots name, and what they are called here.
    new_ids: HashMap<EntryId, Option<EntryId>>,
    first: Option<EntryId>,
    pub(super) last: Option<EntryId>,
    pub(super) entries: u64,
}

/// Result of abandoning a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AbandonOutcome {
    /// Nothing is left of it.
    Removed,
    /// It had become a session already: only the reply that said so was lost.
    Finished,
}

/// What the new session begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// The first event there ever was.
    Whole,
    /// What came after so many entries that are gone; snapshots stand for them.
    After(u64),
    /// Nobody knows.
    Unknown,
}

impl CopyInProgress {
    /// Takes the id for a session that is to be filled.
    pub(super) async fn begin(
        sessions: &Sessions,
        session: &SessionId,
        what: String,
        parent: Option<Parent>,
        snapshots: Vec<(String, RegistryMap)>,
    ) -> Result<Self> {
        sessions.remove_previous_attempt(session, &what).await?;
        let base = sessions.check_free(session).await?;
        let mut meta = sessions.register(session, FirstEntry::NoneYet).await?;
        meta.stage = SessionStage::Copying;
        meta.base = base;
        meta.copy_description = what;
        meta.copier = format!("{:032x}", random_bits());
        meta.parent = parent;
        sessions.commit_meta(session, &meta).await?;
        let named: HashSet<EntryId> =
            snapshots.iter().flat_map(|(_, fields)| snapshot::entry_ids(fields)).collect();
        Ok(Self {
            sessions: sessions.clone(),
            session: session.clone(),
            meta,
            snapshots,
            new_ids: named.into_iter().map(|id| (id, None)).collect(),
            first: None,
            last: None,
            entries: 0,
        })
    }

    /// Adds entries under the ids that they had where they come from.
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
        self.heartbeat().await?;
        let storage = self.sessions.storage();
        let stream = storage.keys.session(&self.session);
        let copier = &self.meta.copier;
        let copies = entries.iter().map(|(id, fields)| copied_fields(*id, fields, copier));
        let copies: Vec<Fields> = copies.collect();
        let ids = storage.backend.append(&stream, &copies, &Retention::KEEP_ALL).await?;
        for ((old, _), new) in entries.iter().zip(ids) {
            self.first.get_or_insert(new);
            if let Some(new_ids) = self.new_ids.get_mut(old) {
                *new_ids = Some(new);
            }
            self.last = Some(*old);
            self.entries += 1;
        }
        Ok(())
    }

    /// Shows that somebody still works on it.
    async fn heartbeat(&self) -> Result<()> {
        let now = self.sessions.now().await?;
        if self.update_meta(&meta::progress_is(now)).await? {
            return Ok(());
        }
        Err(self.superseded_error())
    }

    async fn update_meta(&self, fields: &RegistryMap) -> Result<bool> {
        let storage = self.sessions.storage();
        let map = storage.keys.session_meta(&self.session);
        let expected = Some((meta::COPIER, self.meta.copier.as_bytes()));
        Ok(storage.backend.map_update(&map, expected, fields).await?)
    }

    fn superseded_error(&self) -> SessionError {
        SessionError::Unfinished {
            session: self.session.clone(),
            what: format!("{}, which somebody removed,", self.meta.copy_description),
            since: self.meta.progress_at,
        }
    }

    /// Whether there is a snapshot that stands for what came before the first entry.
    pub(super) fn has_snapshot(&self) -> bool {
        self.translated_snapshots().next().is_some()
    }

    /// The snapshots as they are here, if all entries that they name came along.
    fn translated_snapshots(&self) -> impl Iterator<Item = (&str, RegistryMap)> {
        let to = |id| self.new_ids.get(&id).copied().flatten();
        self.snapshots
            .iter()
            .filter_map(move |(set, fields)| Some((set.as_str(), snapshot::translate(fields, to)?)))
    }

    /// Makes it a session, and opens it.
    pub(super) async fn finish(self, beginning: Beginning) -> Result<Session> {
        self.commit(beginning).await?;
        self.open(beginning).await
    }

    /// Makes it a session: all of it, in one step. May be repeated after an error.
    pub(super) async fn commit(&self, beginning: Beginning) -> Result<()> {
        let storage = self.sessions.storage();
        let mut meta = self.meta.clone();
        meta.stage = SessionStage::Open;
        meta.copied_by.clone_from(&meta.copier);
        meta.progress_at = self.sessions.now().await?;
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
        // If all events are there, they make the state anew: only then it names the entries that are here.
        let has_all_events = has_all_events(beginning);
        for (set, fields) in self.translated_snapshots().filter(|_| !has_all_events) {
            let map = storage.keys.session_snapshot(&self.session, set);
            // One that is there is left over from a session that was removed.
            if !storage.backend.map_create(&map, &fields).await? {
                storage.backend.map_update(&map, None, &fields).await?;
            }
            if let Some(point) = snapshot::point_of(&fields) {
                meta.snapshots.insert(set.to_owned(), point);
            }
        }
        let mut fields = meta.to_fields();
        // Whoever filled it is done.
        fields.insert(meta::COPIER.to_owned(), Bytes::new());
        let changed = self.update_meta(&fields).await;
        if matches!(changed, Ok(true)) {
            return Ok(());
        }
        // A change whose reply was lost, and that was repeated, does not find what it expects.
        match self.is_finished().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(changed.err().unwrap_or_else(|| self.superseded_error())),
            Err(error) => Err(changed.err().unwrap_or(error)),
        }
    }

    /// Whether it is a session by now.
    async fn is_finished(&self) -> Result<bool> {
        let meta = self.sessions.meta(&self.session).await?;
        let is_ours = |meta: SessionMeta| {
            meta.stage != SessionStage::Copying
                && meta.index == self.meta.index
                && meta.copied_by == self.meta.copier
        };
        Ok(meta.is_some_and(is_ours))
    }

    /// Opens what was made.
    pub(super) async fn open(self, beginning: Beginning) -> Result<Session> {
        let session = self.sessions.recover(&self.session).await?;
        let had_snapshot = self.snapshots.iter().any(|(set, _)| *set == self.sessions.inner.set);
        if has_all_events(beginning) && had_snapshot && session.position() != EntryId::MIN {
            session.snapshot_or_warn().await;
        }
        Ok(session)
    }

    /// Removes what was made so far. May be repeated after an error; until then it stays unfinished, is replaced if the
    /// same fork or import is repeated, and is swept later.
    pub(super) async fn abandon(&self) -> Result<AbandonOutcome> {
        let Self { sessions, session, meta, .. } = self;
        let removed = async {
            let is_removed = sessions.remove_unfinished(session, &meta.copier).await?;
            Ok(match !is_removed && self.is_finished().await? {
                true => AbandonOutcome::Finished,
                false => AbandonOutcome::Removed,
            })
        };
        removed.await.inspect_err(|error: &SessionError| {
            warn!(%session, %error, "an unfinished session is left behind");
        })
    }
}

fn has_all_events(beginning: Beginning) -> bool {
    !matches!(beginning, Beginning::After(_))
}

impl Sessions {
    /// Removes what an earlier run of the same fork or import left when it failed or was killed. If that run still goes
    /// on, it cannot finish any more.
    async fn remove_previous_attempt(&self, session: &SessionId, what: &str) -> Result<()> {
        let Some(meta) = self.meta(session).await? else { return Ok(()) };
        if meta.stage == SessionStage::Copying
            && meta.copy_description == what
            && self.remove_unfinished(session, &meta.copier).await?
        {
            info!(%session, what, "what an earlier attempt left was removed");
        }
        Ok(())
    }

    /// Removes an unfinished session, if it is still in the hands of this filler. Returns whether it was.
    pub(super) async fn remove_unfinished(
        &self,
        session: &SessionId,
        copier: &str,
    ) -> Result<bool> {
        // First the token: whoever fills it cannot finish it any more, and what somebody else made meanwhile stays.
        let map = self.storage().keys.session_meta(session);
        let expected = Some((meta::COPIER, copier.as_bytes()));
        // Of two who remove it one does: the other could take away what somebody made of this name right afterwards.
        let taken = meta::claimed_by(&format!("{:032x}", random_bits()), self.now().await?);
        if !self.storage().backend.map_update(&map, expected, &taken).await? {
            return Ok(false);
        }
        self.delete(session).await
    }
}

/// The same entry, with a note of the id it had when it was first stored, and of who copied it.
fn copied_fields(id: EntryId, fields: &Fields, copier: &str) -> Fields {
    let note = |name: &str, value: String| (Bytes::copy_from_slice(name.as_bytes()), value.into());
    let bare = fields.iter().filter(|(name, _)| name != COPIED_BY.as_bytes()).cloned();
    let has_id = fields.get(ORIGINAL_ENTRY_ID).is_some();
    let id = (!has_id).then(|| note(ORIGINAL_ENTRY_ID, id.to_string()));
    let by = note(COPIED_BY, copier.to_owned());
    let copy = Fields::new(bare.clone().chain(id).chain([by]));
    // An entry of another program may be as large as an entry can be; then it does without.
    if copy.len() > FIELDS_MAX || copy.bytes() > ENTRY_BYTES_MAX {
        return Fields::new(bare);
    }
    copy
}

//! Creates a session as a copy of stored entries.
//!
//! Upstream: `fork` and `import`. Downstream: the stream and metadata of the new session.
//! Guarantees: the session is reported as unfinished until it is complete, and then committed in one step. A copier
//! that was presumed dead cannot commit, and the entries it still appends do not count: each copied entry names its
//! copier, and the metadata names the copier whose entries count. A failed or killed copy can be repeated at once; it
//! replaces the remains.

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

/// A copy in progress.
pub(super) struct CopyInProgress {
    sessions: Sessions,
    session: SessionId,
    meta: SessionMeta,
    /// Snapshots to copy, by their set of folds.
    snapshots: Vec<(String, RegistryMap)>,
    /// New ids of the entries that the snapshots refer to.
    new_ids: HashMap<EntryId, Option<EntryId>>,
    first: Option<EntryId>,
    pub(super) last: Option<EntryId>,
    pub(super) entries: u64,
}

/// Result of abandoning a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AbandonOutcome {
    /// The copy was removed.
    Removed,
    /// The copy had already been committed; only the reply was lost.
    Finished,
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
    /// Reserves the id of the new session.
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

    /// Records progress, so that the copy is not considered abandoned.
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
            what: format!("{}, which was removed meanwhile", self.meta.copy_description),
            since: self.meta.progress_at,
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
    pub(super) async fn finish(self, beginning: Beginning) -> Result<Session> {
        self.commit(beginning).await?;
        self.open(beginning).await
    }

    /// Commits the session in one step. May be retried after an error.
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
        // With all events present, the snapshots are not needed: a replay yields a state that refers to the new
        // entries.
        let has_all_events = has_all_events(beginning);
        for (set, fields) in self.translated_snapshots().filter(|_| !has_all_events) {
            let map = storage.keys.session_snapshot(&self.session, set);
            // An existing one is left over from a deleted session.
            if !storage.backend.map_create(&map, &fields).await? {
                storage.backend.map_update(&map, None, &fields).await?;
            }
            if let Some(point) = snapshot::point_of(&fields) {
                meta.snapshots.insert(set.to_owned(), point);
            }
        }
        let mut fields = meta.to_fields();
        // The copy is done: clear its owner.
        fields.insert(meta::COPIER.to_owned(), Bytes::new());
        let changed = self.update_meta(&fields).await;
        if matches!(changed, Ok(true)) {
            return Ok(());
        }
        // A retried update whose first reply was lost does not find the expected value any more.
        match self.is_finished().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(changed.err().unwrap_or_else(|| self.superseded_error())),
            Err(error) => Err(changed.err().unwrap_or(error)),
        }
    }

    /// Whether this copy has been committed.
    async fn is_finished(&self) -> Result<bool> {
        let meta = self.sessions.meta(&self.session).await?;
        let is_ours = |meta: SessionMeta| {
            meta.stage != SessionStage::Copying
                && meta.index == self.meta.index
                && meta.copied_by == self.meta.copier
        };
        Ok(meta.is_some_and(is_ours))
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

    /// Removes the copy. May be retried after an error; until then it stays unfinished, is replaced if the same fork or
    /// import is repeated, and is swept later.
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
            warn!(%session, %error, "unfinished session could not be removed");
        })
    }
}

fn has_all_events(beginning: Beginning) -> bool {
    !matches!(beginning, Beginning::After(_))
}

impl Sessions {
    /// Removes the remains of an earlier attempt of the same fork or import. If that attempt is still running, it can
    /// no longer commit.
    async fn remove_previous_attempt(&self, session: &SessionId, what: &str) -> Result<()> {
        let Some(meta) = self.meta(session).await? else { return Ok(()) };
        if meta.stage == SessionStage::Copying
            && meta.copy_description == what
            && self.remove_unfinished(session, &meta.copier).await?
        {
            info!(%session, what, "remains of an earlier attempt were removed");
        }
        Ok(())
    }

    /// Removes an unfinished session if it still belongs to this copier. Returns whether it did.
    pub(super) async fn remove_unfinished(
        &self,
        session: &SessionId,
        copier: &str,
    ) -> Result<bool> {
        // Take over the token first: the copier can no longer commit, and a session created meanwhile is not affected.
        let map = self.storage().keys.session_meta(session);
        let expected = Some((meta::COPIER, copier.as_bytes()));
        // Only one of several removers wins; another could otherwise delete a new session of the same name.
        let taken = meta::claimed_by(&format!("{:032x}", random_bits()), self.now().await?);
        if !self.storage().backend.map_update(&map, expected, &taken).await? {
            return Ok(false);
        }
        self.delete(session).await
    }
}

/// The entry with its original id and its copier.
fn copied_fields(id: EntryId, fields: &Fields, copier: &str) -> Fields {
    let note = |name: &str, value: String| (Bytes::copy_from_slice(name.as_bytes()), value.into());
    let bare = fields.iter().filter(|(name, _)| name != COPIED_BY.as_bytes()).cloned();
    let has_id = fields.get(ORIGINAL_ENTRY_ID).is_some();
    let id = (!has_id).then(|| note(ORIGINAL_ENTRY_ID, id.to_string()));
    let by = note(COPIED_BY, copier.to_owned());
    let copy = Fields::new(bare.clone().chain(id).chain([by]));
    // An entry of another program may already be at the limit; then it is copied without them.
    if copy.len() > FIELDS_MAX || copy.bytes() > ENTRY_BYTES_MAX {
        return Fields::new(bare);
    }
    copy
}

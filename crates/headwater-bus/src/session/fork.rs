//! Forks: a new session with a copy of another session's events.
//!
//! Upstream: applications and operators. Downstream: `copy`.
//! Guarantees: the parent is only read. The fork has its own copy of the events, so it stays complete whatever happens
//! to the parent; it records its parent and the last copied entry. If the parent is compacted meanwhile, the fork
//! restarts from the new snapshot.

use headwater_stream::{Entry, EntryId, RegistryMap, StreamStats};

use super::copy::{Beginning, CopyInProgress};
use super::deleted_entries::{Extent, find_deleted};
use super::error::{MissingEntries, MissingReason};
use super::meta::{FirstEntry, Parent, SessionMeta, SessionPoint};
use super::replay::{ReplayPage, ReplayPages, ReplayUntil};
use super::{Result, Session, SessionError, Sessions};
use crate::error::BusError;
use crate::metrics;
use crate::name::SessionId;

/// Restarts of a fork because of compaction. Each compaction leaves less to copy, so a second restart is rare.
const COMPACTION_RETRIES_MAX: usize = 20;

/// A session to be copied.
pub(super) struct CopySource {
    pub(super) meta: SessionMeta,
    pub(super) beginning: Beginning,
    /// The stream when the copy started: entries up to its last one are copied.
    pub(super) stats: Option<StreamStats>,
    /// Missing entries that a snapshot must include.
    pub(super) missing: Option<MissingEntries>,
    /// Snapshots of all sets of folds.
    pub(super) snapshots: Vec<(String, RegistryMap)>,
}

impl Sessions {
    /// Forks a session, optionally up to an entry or time. The parent is not changed.
    ///
    /// The fork becomes visible when it is complete. If the call is dropped or fails before, the id stays free.
    pub async fn fork(
        &self,
        parent: &SessionId,
        until: ReplayUntil,
        session: &SessionId,
    ) -> Result<Session> {
        let mut source = self.copy_source(parent).await?;
        for _ in 0..COMPACTION_RETRIES_MAX {
            let origin = Parent { session: parent.clone(), entry_id: EntryId::MIN };
            let snapshots = source.snapshots.clone();
            let mut copying = CopyInProgress::begin(self, session, Some(origin), snapshots).await?;
            let error = match self.copy(parent, until, &source, &mut copying).await {
                Ok(()) => {
                    let forked = copying.finish(source.beginning).await?;
                    metrics::copied("fork");
                    return Ok(forked);
                }
                Err(error) => error,
            };
            // If this fails, maintenance removes the copy.
            let _ = copying.abandon().await;
            if !self.was_compacted_meanwhile(parent, &source, &error).await? {
                return Err(error);
            }
            source = self.copy_source(parent).await?;
        }
        Err(SessionError::CompactedWhileReading { session: parent.clone() })
    }

    /// Whether our own compaction removed entries that were about to be read. It records what it removes before it
    /// does so: the record may be older than the source.
    pub(super) async fn was_compacted_meanwhile(
        &self,
        session: &SessionId,
        source: &CopySource,
        error: &SessionError,
    ) -> Result<bool> {
        let SessionError::Incomplete { missing, .. } = error else { return Ok(false) };
        let compacted = self.open_meta(session).await?.compacted;
        let explains = |point: SessionPoint| missing.before <= point.entry_id;
        let is_explained =
            missing.reason == MissingReason::Trimmed && compacted.is_some_and(explains);
        Ok(is_explained || compacted != source.meta.compacted)
    }

    /// Reads what is needed to copy a session.
    pub(super) async fn copy_source(&self, session: &SessionId) -> Result<CopySource> {
        let mut attempts = 0;
        loop {
            let (meta, sourced) = self.try_copy_source(session).await?;
            attempts += 1;
            match sourced {
                // A compaction records what it is about to remove. If it did so meanwhile, read again.
                Err(_)
                    if attempts < COMPACTION_RETRIES_MAX
                        && self.open_meta(session).await?.compacted != meta.compacted => {}
                Err(missing) => {
                    return Err(SessionError::Incomplete { session: session.clone(), missing });
                }
                Ok(source) => return Ok(source),
            }
        }
    }

    async fn try_copy_source(
        &self,
        session: &SessionId,
    ) -> Result<(SessionMeta, Result<CopySource, MissingEntries>)> {
        let storage = self.storage();
        let meta = self.open_meta(session).await?;
        let mut snapshots = Vec::new();
        for set in meta.snapshots.keys() {
            let map = storage.keys.session_snapshot(session, set);
            if let Some(fields) = storage.backend.map_get(&map).await? {
                snapshots.push((set.clone(), fields));
            }
        }
        // Read after the snapshots, so that the entry of each snapshot is within the copied range.
        let stats = storage.backend.stats(&storage.keys.session(session)).await?;
        let (beginning, missing) = match self.beginning(session, &meta, stats.as_ref()).await? {
            Ok(_) if meta.first == FirstEntry::Unknown => (Beginning::Unknown, None),
            Ok(_) => (Beginning::Whole, None),
            Err(missing) => (Beginning::After(missing.count.unwrap_or(0)), Some(missing)),
        };
        if let Some(missing) = missing.clone().filter(|_| snapshots.is_empty()) {
            return Ok((meta, Err(missing)));
        }
        let source = CopySource { meta: meta.clone(), beginning, stats, missing, snapshots };
        Ok((meta, Ok(source)))
    }

    async fn copy(
        &self,
        parent: &SessionId,
        until: ReplayUntil,
        source: &CopySource,
        copying: &mut CopyInProgress,
    ) -> Result<()> {
        let storage = self.storage();
        let stream = storage.keys.session(parent);
        let mut pages = ReplayPages::new(storage, &stream, source.end());
        let (mut position, mut read) = (EntryId::MIN, 0);
        let mut is_done = false;
        while !is_done {
            let entries = match pages.next(position, until.last_id()).await? {
                ReplayPage::Gap(before) => return Err(trimmed_error(parent, position, before)),
                ReplayPage::Entries(entries) => entries,
            };
            source.check_first(parent, position, until, &entries)?;
            let Some(last) = entries.last() else { break };
            position = last.id;
            read += entries.len() as u64;
            let count = entries.len();
            let wanted = entries.into_iter().take_while(|entry| until.includes(entry));
            let wanted: Vec<_> = wanted.map(|entry| (entry.id, entry.fields)).collect();
            is_done = pages.is_at_end() || wanted.len() < count;
            copying.add(&wanted).await?;
        }
        source.check_deleted(parent, position, read, until)?;
        if let ReplayUntil::Entry(id) = until
            && copying.last != Some(id)
        {
            let problem = format!("session `{parent}` has no entry {id}");
            return Err(BusError::invalid("entry", problem).into());
        }
        match &source.missing {
            Some(missing) if !copying.has_snapshot() => {
                Err(SessionError::Incomplete { session: parent.clone(), missing: missing.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl CopySource {
    /// The first page must start with the first entry known from `stats`.
    pub(super) fn check_first(
        &self,
        session: &SessionId,
        position: EntryId,
        until: ReplayUntil,
        entries: &[Entry],
    ) -> Result<()> {
        let expected = self.stats.as_ref().and_then(|stats| stats.first_id);
        if position == EntryId::MIN && !until.begins_with(expected, entries) {
            let first = entries.first().map_or(EntryId::MAX, |entry| entry.id);
            return Err(trimmed_error(session, EntryId::MIN, first));
        }
        Ok(())
    }

    /// Last entry of the session when it was read.
    pub(super) fn end(&self) -> Option<EntryId> {
        self.stats.as_ref().and_then(|stats| stats.last_id)
    }

    /// Checks that none of the `read` entries up to `position` was deleted.
    pub(super) fn check_deleted(
        &self,
        session: &SessionId,
        position: EntryId,
        read: u64,
        until: ReplayUntil,
    ) -> Result<()> {
        let Some(stats) = &self.stats else { return Ok(()) };
        let compacted = match &self.missing {
            None => Some(0),
            Some(missing) => missing.count,
        };
        let entries = compacted.map(|compacted| compacted + read);
        let extent = Extent { from: EntryId::MIN, to: position, entries };
        match find_deleted(&self.meta, stats, extent, until) {
            Some(missing) => Err(SessionError::Incomplete { session: session.clone(), missing }),
            None => Ok(()),
        }
    }
}

/// Entries were trimmed while they were read.
pub(super) fn trimmed_error(session: &SessionId, after: EntryId, before: EntryId) -> SessionError {
    let reason = MissingReason::Trimmed;
    let missing = MissingEntries { after, before, count: None, reason };
    SessionError::Incomplete { session: session.clone(), missing }
}

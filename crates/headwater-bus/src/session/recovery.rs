//! Recovers the state of a session from its newest snapshot and later events, or from all events.
//!
//! Upstream: `Sessions::recover`, and open sessions whose position was compacted. Downstream: `snapshot`, `replay`.
//! Guarantees: the state is complete, or the caller learns what is missing. An unusable snapshot (other folds, newer
//! version, corrupt) is skipped, and all events are replayed if they still exist.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use headwater_stream::{Direction, EntryId, Range, StreamStats};
use tracing::{Instrument, info, warn};

use super::deleted_entries::{Extent, find_deleted};
use super::error::{MissingEntries, MissingReason};
use super::lifecycle::CONCURRENCY;
use super::meta::{FirstEntry, SessionMeta, SessionStage};
use super::replay::{self, Parking, ReplayOutcome, ReplayUntil};
use super::snapshot;
use super::state::{self, DecodedEntry, SessionState};
use super::{Result, Session, SessionError, Sessions};
use crate::error::BusError;
use crate::metrics;
use crate::name::SessionId;

/// `index` of a stream that is not in the list of sessions.
const UNLISTED: EntryId = EntryId::MIN;

/// Attempts of a recovery that is interrupted by compactions.
const ATTEMPTS_MAX: usize = 5;

/// How a session was recovered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// The entry of the snapshot that was used.
    pub from_snapshot: Option<EntryId>,
    /// Why the existing snapshot was not used.
    pub snapshot_problem: Option<String>,
    /// Number of entries replayed.
    pub replayed: u64,
    /// Missing entries. Only with [`recover_incomplete`](Sessions::recover_incomplete), or if it is unknown.
    pub missing: Option<MissingEntries>,
    /// Duration of the recovery.
    pub took: Duration,
}

/// Why a session is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadPurpose {
    /// To use it; it must be complete.
    Use,
    /// To use what remains of it.
    UseIncomplete,
    /// To read it without changing anything.
    ReadOnly,
}

/// A loaded session.
pub(super) struct LoadedSession {
    /// Its entry in the list of sessions, which is unique.
    pub(super) index: EntryId,
    pub(super) ttl: Option<Duration>,
    pub(super) state: SessionState,
    pub(super) recovery: Recovery,
}

/// Result of one recovery attempt.
struct RecoveryAttempt {
    state: SessionState,
    recovery: Recovery,
    /// Entries were removed meanwhile; another attempt may succeed.
    was_compacted_meanwhile: bool,
}

impl Sessions {
    /// Recovers a session: the state is the same as in any other process. Fails if events are missing that no snapshot
    /// includes.
    ///
    /// A stream written by other programs is taken over as a session; [`Session::recovery`] then reports that it is
    /// unknown whether its beginning is complete.
    pub async fn recover(&self, session: &SessionId) -> Result<Session> {
        let loaded = self.load(session, ReplayUntil::End, LoadPurpose::Use).await?;
        Ok(Session::recovered(self.clone(), loaded))
    }

    /// Recovers what remains of a session; [`Session::recovery`] tells what is missing. No snapshots are taken of it,
    /// because they would hide that.
    pub async fn recover_incomplete(&self, session: &SessionId) -> Result<Session> {
        let loaded = self.load(session, ReplayUntil::End, LoadPurpose::UseIncomplete).await?;
        Ok(Session::recovered(self.clone(), loaded))
    }

    /// The state of a session at an entry or time. Read-only.
    pub async fn state_at(&self, session: &SessionId, until: ReplayUntil) -> Result<SessionState> {
        let LoadedSession { state, .. } = self.load(session, until, LoadPurpose::ReadOnly).await?;
        if let ReplayUntil::Entry(id) = until
            && state.position != id
        {
            let problem = format!("session `{session}` has no entry {id}");
            return Err(BusError::invalid("entry", problem).into());
        }
        Ok(state)
    }

    pub(super) async fn load(
        &self,
        session: &SessionId,
        until: ReplayUntil,
        purpose: LoadPurpose,
    ) -> Result<LoadedSession> {
        let began = Instant::now();
        let mut attempts = 0;
        let span = tracing::debug_span!("recover", %session);
        loop {
            attempts += 1;
            let meta = match purpose {
                LoadPurpose::ReadOnly => self.read_only_meta(session).await?,
                LoadPurpose::Use | LoadPurpose::UseIncomplete => self.open_meta(session).await?,
            };
            let parking = match purpose {
                LoadPurpose::ReadOnly => Parking::No,
                LoadPurpose::Use | LoadPurpose::UseIncomplete => {
                    Parking::After(meta.parked_through)
                }
            };
            let attempt = self.attempt(session, &meta, until, parking);
            let mut attempt = attempt.instrument(span.clone()).await?;
            if attempt.was_compacted_meanwhile && attempts < ATTEMPTS_MAX {
                continue;
            }
            match attempt.recovery.missing.clone() {
                Some(missing) if missing.reason != MissingReason::Unknown => {
                    if purpose != LoadPurpose::UseIncomplete {
                        return Err(SessionError::Incomplete { session: session.clone(), missing });
                    }
                    warn!(%session, %missing, "session recovered without some of its events");
                    self.skip_missing(&mut attempt, &missing, until, parking).await?;
                }
                _ => {}
            }
            let RecoveryAttempt { state, mut recovery, .. } = attempt;
            recovery.took = began.elapsed();
            metrics::recovered(recovery.from_snapshot.is_some(), recovery.took);
            info!(
                %session,
                from_snapshot = recovery.from_snapshot.map(tracing::field::display),
                replayed = recovery.replayed,
                elapsed_ms = recovery.took.as_millis() as u64,
                "session recovered"
            );
            let SessionMeta { index, ttl, .. } = meta;
            return Ok(LoadedSession { index, ttl, state, recovery });
        }
    }

    /// Metadata of an open session; a stream of another program is taken over.
    pub(super) async fn open_meta(&self, session: &SessionId) -> Result<SessionMeta> {
        match self.existing_meta(session).await? {
            Some(meta) => Ok(meta),
            None => check_open(session, self.adopt_foreign(session).await?),
        }
    }

    /// Metadata of an open session; a stream of another program is not changed.
    pub(super) async fn read_only_meta(&self, session: &SessionId) -> Result<SessionMeta> {
        match self.existing_meta(session).await? {
            Some(meta) => Ok(meta),
            None => {
                let meta = SessionMeta::new(UNLISTED, self.now().await?);
                Ok(SessionMeta { first: FirstEntry::Unknown, ..meta })
            }
        }
    }

    /// Metadata of an open session; `None` for a stream of another program.
    pub(super) async fn existing_meta(&self, session: &SessionId) -> Result<Option<SessionMeta>> {
        if let Some(meta) = self.meta(session).await? {
            return check_open(session, meta).map(Some);
        }
        let storage = self.storage();
        let stats = storage.backend.stats(&storage.keys.session(session)).await?;
        if stats.is_none_or(|stats| stats.length == 0) {
            return Err(SessionError::NotFound { session: session.clone() });
        }
        Ok(None)
    }

    /// Checks that a session is still the same one, and not a later session of the same name.
    pub(super) async fn check_same_session(
        &self,
        session: &SessionId,
        index: EntryId,
    ) -> Result<()> {
        if self.meta(session).await?.is_some_and(|meta| meta.index == index) {
            return Ok(());
        }
        let stream = self.storage().keys.session(session);
        let stats = self.storage().backend.stats(&stream).await?;
        let before = stats.and_then(|stats| stats.first_id).unwrap_or(EntryId::MAX);
        let (after, reason) = (EntryId::MIN, MissingReason::Lost);
        let missing = MissingEntries { after, before, count: None, reason };
        Err(SessionError::Incomplete { session: session.clone(), missing })
    }

    async fn attempt(
        &self,
        session: &SessionId,
        meta: &SessionMeta,
        until: ReplayUntil,
        parking: Parking,
    ) -> Result<RecoveryAttempt> {
        let (storage, registry) = (self.storage(), self.inner.bus.registry());
        let mut recovery = Recovery::default();
        let stats = storage.backend.stats(&storage.keys.session(session)).await?;
        // Read only up to here, because the result is compared with these statistics.
        let end = stats.as_ref().and_then(|stats| stats.last_id);
        let deleted = |from, state: &SessionState| {
            let read = Extent { from, to: state.position, entries: Some(state.entries) };
            find_deleted(meta, stats.as_ref()?, read, until)
        };
        let from_snapshot = self.load_snapshot(session, meta, until, &mut recovery).await?;
        let mut gap = None;
        if let Some(mut state) = from_snapshot {
            let (position, entries) = (state.position, state.entries);
            recovery.from_snapshot = Some(position);
            match replay::replay(storage, registry, &mut state, (None, end), until, parking).await?
            {
                ReplayOutcome::Done => {
                    recovery.replayed = state.entries - entries;
                    let is_unknown = meta.first == FirstEntry::Unknown;
                    recovery.missing =
                        deleted(position, &state).or_else(|| is_unknown.then(unknown_beginning));
                    return Ok(RecoveryAttempt { state, recovery, was_compacted_meanwhile: false });
                }
                ReplayOutcome::Gap(before) => gap = Some((state, before)),
            }
        }
        let mut begins = self.beginning(session, meta, stats.as_ref()).await?;
        // All remaining entries are after the snapshot: something is missing, unless it is a snapshot of a deleted
        // session.
        if let (Ok(first), Some((state, before))) = (&begins, &gap)
            && meta.snapshots.contains_key(&self.inner.set)
            && first.is_none_or(|first| first > state.position)
        {
            let reason = MissingReason::Trimmed;
            begins =
                Err(MissingEntries { after: state.position, before: *before, count: None, reason });
        }
        if let Ok(first) = begins {
            let mut state = SessionState::new(session.clone(), self.inner.folds.clone());
            let replayed =
                replay::replay(storage, registry, &mut state, (first, end), until, parking).await?;
            recovery = Recovery { from_snapshot: None, replayed: state.entries, ..recovery };
            recovery.missing = match replayed {
                ReplayOutcome::Gap(before) => {
                    let (after, reason) = (state.position, MissingReason::Trimmed);
                    Some(MissingEntries { after, before, count: None, reason })
                }
                ReplayOutcome::Done => {
                    let lost = match &gap {
                        Some((snapshot, _)) => self.find_lost(snapshot, &state, until).await?,
                        None => None,
                    };
                    lost.or_else(|| deleted(EntryId::MIN, &state))
                        .or_else(|| (meta.first == FirstEntry::Unknown).then(unknown_beginning))
                }
            };
            let is_lost = recovery
                .missing
                .as_ref()
                .is_some_and(|missing| missing.reason == MissingReason::Lost);
            let was_compacted_meanwhile = replayed != ReplayOutcome::Done || is_lost;
            return Ok(RecoveryAttempt { state, recovery, was_compacted_meanwhile });
        }
        let mut missing = begins.err().unwrap_or_else(unknown_beginning);
        let state = match gap {
            Some((state, before)) => {
                missing = MissingEntries { after: state.position, before, count: None, ..missing };
                if missing.reason == MissingReason::Compacted {
                    missing.reason = MissingReason::Trimmed;
                }
                state
            }
            None => SessionState::new(session.clone(), self.inner.folds.clone()),
        };
        recovery.missing = Some(missing);
        Ok(RecoveryAttempt { state, recovery, was_compacted_meanwhile: true })
    }

    /// Missing entries, if the entry of a snapshot is gone and the beginning is not. Streams are trimmed from the
    /// beginning only, so these entries were lost, for example in a failover to a replica that lagged behind.
    async fn find_lost(
        &self,
        snapshot: &SessionState,
        replayed: &SessionState,
        until: ReplayUntil,
    ) -> Result<Option<MissingEntries>> {
        let storage = self.storage();
        let stream = storage.keys.session(&snapshot.session);
        let before = Range { from: EntryId::MIN, ..single_entry(snapshot.position) };
        let before = Range { direction: Direction::Backward, ..before };
        let last = storage.backend.range(&stream, before).await?.pop();
        // A snapshot of a deleted session, or of a time after the requested one.
        let Some(last) = last.filter(|last| until.includes(last)) else { return Ok(None) };
        // It exists again.
        if last.id == snapshot.position {
            return Ok(None);
        }
        let after = Range { to: EntryId::MAX, ..single_entry(snapshot.position) };
        let next = storage.backend.range(&stream, after).await?.pop();
        let count = match replayed.position <= last.id {
            true => snapshot.entries.checked_sub(replayed.entries),
            false => None,
        };
        let before = next.map_or(EntryId::MAX, |next| next.id);
        Ok(Some(MissingEntries { after: last.id, before, count, reason: MissingReason::Lost }))
    }

    /// Checks that all entries from the first on exist: `Ok` with the first (`None` if empty), or the missing entries.
    pub(super) async fn beginning(
        &self,
        session: &SessionId,
        meta: &SessionMeta,
        stats: Option<&StreamStats>,
    ) -> Result<Result<Option<EntryId>, MissingEntries>> {
        let first = stats.and_then(|stats| stats.first_id);
        let guard = self.storage().keys.session_guard(session);
        let is_guarded =
            stats.is_some_and(|stats| stats.groups.iter().any(|group| group.name == guard));
        let gone = |reason, count| MissingEntries {
            after: EntryId::MIN,
            before: first.unwrap_or(EntryId::MAX),
            count,
            reason,
        };
        if !is_guarded && meta.index != UNLISTED {
            return Ok(Err(gone(MissingReason::Lost, None)));
        }
        let known = match (meta.first, first) {
            (FirstEntry::NoneYet, Some(first)) => self.record_first_entry(session, first).await?,
            (known, _) => known,
        };
        let is_compacted =
            meta.compacted.is_some_and(|point| first.is_none_or(|first| first >= point.entry_id));
        Ok(match (known, first) {
            (FirstEntry::NoneYet, first) => Ok(first),
            // Earlier entries are unknown, but everything known since is still there.
            (FirstEntry::Unknown, first) if !is_compacted => Ok(first),
            (FirstEntry::Entry(known), Some(first)) if first <= known => Ok(Some(first)),
            _ => Err(match meta.compacted {
                Some(point) => {
                    let count = (first == Some(point.entry_id)).then_some(point.entries);
                    gone(MissingReason::Compacted, count)
                }
                None => gone(MissingReason::Trimmed, None),
            }),
        })
    }

    /// The state of the newest snapshot, if it is usable.
    async fn load_snapshot(
        &self,
        session: &SessionId,
        meta: &SessionMeta,
        until: ReplayUntil,
        recovery: &mut Recovery,
    ) -> Result<Option<SessionState>> {
        let storage = self.storage();
        let map = storage.keys.session_snapshot(session, &self.inner.set);
        let Some(fields) = storage.backend.map_get(&map).await? else {
            if !meta.snapshots.is_empty() {
                recovery.snapshot_problem = Some("only snapshots of other folds exist".to_owned());
            }
            return Ok(None);
        };
        let registry = self.inner.bus.registry();
        let folds = &self.inner.folds;
        let problem = match snapshot::decode(&fields, session, folds, registry) {
            Err(problem) => problem,
            Ok(state) if self.is_beyond(&state, until).await? => {
                "it is after the requested entry or time".to_owned()
            }
            // After a compaction there is no alternative.
            Ok(state) if !is_compacted(meta) && self.can_decode_more(&state).await? => {
                "entries that were undecodable when it was taken can be decoded now".to_owned()
            }
            Ok(state) => return Ok(Some(state)),
        };
        info!(%session, problem, "snapshot not used");
        recovery.snapshot_problem = Some(problem);
        Ok(None)
    }

    async fn is_beyond(&self, state: &SessionState, until: ReplayUntil) -> Result<bool> {
        match until {
            ReplayUntil::End => Ok(false),
            ReplayUntil::Entry(id) => Ok(state.position > id),
            ReplayUntil::Time(_) => {
                let stream = self.storage().keys.session(&state.session);
                let range = single_entry(state.position);
                let entries = self.storage().backend.range(&stream, range).await?;
                // Without the entry this is unknown; the replay will detect the gap.
                Ok(entries.first().is_some_and(|entry| !until.includes(entry)))
            }
        }
    }

    /// Whether entries that this snapshot could not decode can be decoded now.
    async fn can_decode_more(&self, state: &SessionState) -> Result<bool> {
        let registry = self.inner.bus.registry();
        // More entries were undecodable than were remembered: assume yes.
        if state.unreadable.is_truncated || state.unreadable.has_newly_registered_type(registry) {
            return Ok(true);
        }
        let stream = self.storage().keys.session(&state.session);
        let read = |id: EntryId| self.storage().backend.range(&stream, single_entry(id));
        let reading: Vec<_> =
            state.unreadable.invalid_payloads.iter().map(|id| read(*id)).collect();
        let mut reading = stream::iter(reading).buffer_unordered(CONCURRENCY);
        while let Some(entries) = reading.next().await {
            let is_read =
                |entry| matches!(state::read(registry, &stream, entry), DecodedEntry::Event(_));
            if entries?.iter().any(is_read) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Continues after the missing entries.
    async fn skip_missing(
        &self,
        attempt: &mut RecoveryAttempt,
        missing: &MissingEntries,
        until: ReplayUntil,
        parking: Parking,
    ) -> Result<()> {
        let (storage, registry) = (self.storage(), self.inner.bus.registry());
        let state = &mut attempt.state;
        // The replay has already passed the gap.
        if state.position >= missing.before {
            return Ok(());
        }
        let before = state.entries;
        let stream = storage.keys.session(&state.session);
        let mut next = missing.before;
        // Another gap may appear meanwhile.
        for _ in 0..ATTEMPTS_MAX {
            let range = Range { count: 1, from: next, ..single_entry(EntryId::MAX) };
            let entries = storage.backend.range(&stream, range).await?;
            let Some(entry) = entries.first().filter(|entry| until.includes(entry)) else { break };
            replay::apply(storage, registry, state, std::slice::from_ref(entry), parking).await?;
            match replay::replay(storage, registry, state, (None, None), until, parking).await? {
                ReplayOutcome::Done => break,
                ReplayOutcome::Gap(before) => next = before,
            }
        }
        attempt.recovery.replayed += state.entries - before;
        Ok(())
    }
}

/// The metadata of an open session; an error for other stages.
fn check_open(session: &SessionId, meta: SessionMeta) -> Result<SessionMeta> {
    match meta.stage {
        SessionStage::Open => Ok(meta),
        SessionStage::Expired => {
            let point = meta.expired;
            Err(SessionError::Expired {
                session: session.clone(),
                entries: point.map_or(0, |point| point.entries),
                through: point.map_or(EntryId::MIN, |point| point.entry_id),
            })
        }
    }
}

/// Whether a full replay is impossible.
fn is_compacted(meta: &SessionMeta) -> bool {
    meta.compacted.is_some() || meta.first == FirstEntry::Elsewhere
}

/// A range of one entry.
fn single_entry(id: EntryId) -> Range {
    Range { from: id, to: id, direction: Direction::Forward, count: 1 }
}

fn unknown_beginning() -> MissingEntries {
    MissingEntries {
        after: EntryId::MIN,
        before: EntryId::MIN,
        count: None,
        reason: MissingReason::Unknown,
    }
}

//! An open session: publish events to it and read its state.
//!
//! Upstream: applications and the main loop. Downstream: the bus, to publish; `replay`, to read stored events back.
//! Guarantees: the state is computed from the stream in stream order, whichever process published the events: an event
//! published here counts after it was read back. Calls may be concurrent. If known events are lost in the backend,
//! that is an error and the state stays unchanged.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::{Entry, EntryId};
use tracing::{Instrument, warn};

use super::error::{MissingEntries, MissingReason};
use super::meta::{FirstEntry, SessionMeta};
use super::recovery::{LoadPurpose, LoadedSession, Recovery};
use super::replay::{self, ReplayPage, ReplayPages, ReplayUntil};
use super::snapshot;
use super::state::{self, DecodedEntry, SessionState};
use super::{Result, SessionError, Sessions};
use crate::bus::PublishResult;
use crate::error::{BusError, Result as BusResult};
use crate::event::{Event, OutgoingEvent, ReceivedEvent, Scope};
use crate::fold::{AllEvents, Fold};
use crate::metrics;
use crate::name::SessionId;

/// An open session.
pub struct Session {
    sessions: Sessions,
    id: SessionId,
    /// Its entry in the list of sessions; distinguishes it from a later session of the same name.
    index: EntryId,
    ttl: Option<Duration>,
    cached: Mutex<CachedState>,
}

struct CachedState {
    state: SessionState,
    recovery: Recovery,
    /// Number of entries in the newest known snapshot, or in the last attempt to take one.
    snapshot_entries: u64,
    /// A fold panicked: the state is no longer updated.
    broken: Option<SessionError>,
}

impl CachedState {
    /// Whether events are known to be missing.
    fn is_incomplete(&self) -> bool {
        let missing = self.recovery.missing.as_ref();
        missing.is_some_and(|missing| missing.reason != MissingReason::Unknown)
    }
}

impl Session {
    pub(super) fn empty(sessions: Sessions, id: SessionId, meta: &SessionMeta) -> Self {
        let state = SessionState::new(id, sessions.inner.folds.clone());
        let (index, ttl, recovery) = (meta.index, meta.ttl, Recovery::default());
        Self::recovered(sessions, LoadedSession { index, ttl, state, recovery })
    }

    pub(super) fn recovered(sessions: Sessions, loaded: LoadedSession) -> Self {
        let LoadedSession { index, ttl, state, recovery } = loaded;
        let id = state.session.clone();
        let snapshot_entries = match recovery.from_snapshot {
            Some(_) => state.entries.saturating_sub(recovery.replayed),
            None => 0,
        };
        let cached = CachedState { state, recovery, snapshot_entries, broken: None };
        Self { sessions, id, index, ttl, cached: Mutex::new(cached) }
    }

    /// Its id.
    pub fn id(&self) -> &SessionId {
        &self.id
    }

    /// The [`Sessions`] that opened it.
    pub fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// How it was recovered, or reloaded after a compaction; the default for a new session.
    pub fn recovery(&self) -> Recovery {
        self.cached().recovery.clone()
    }

    /// The newest event of type `E`, if [`Folds::latest`](crate::Folds::latest) or [`Folds::all`](crate::Folds::all)
    /// keeps it.
    pub fn latest<E: Event>(&self) -> Option<ReceivedEvent<E>> {
        self.cached().state.latest()
    }

    /// The events of type `E` kept by [`Folds::all`](crate::Folds::all); `None` if there is no such fold.
    pub fn all<E: Event>(&self) -> Option<AllEvents<E>> {
        self.cached().state.all()
    }

    /// The state of a custom fold; `None` if there is no such fold.
    pub fn get<F: Fold>(&self) -> Option<F> {
        self.cached().state.get::<F>().cloned()
    }

    /// A copy of its state.
    pub fn state(&self) -> SessionState {
        self.cached().state.clone()
    }

    /// Why the state is no longer updated: a fold panicked on the next event. The state is that before this event.
    pub fn problem(&self) -> Option<SessionError> {
        self.cached().broken.clone()
    }

    /// The last entry applied to the state; `EntryId::MIN` before the first.
    pub fn position(&self) -> EntryId {
        self.cached().state.position
    }

    /// Publishes an event of this session. The event need not set its session.
    pub async fn publish<E: Event>(&self, event: E) -> Result<PublishResult> {
        let outgoing = OutgoingEvent::new(event)?;
        let mut results = self.publish_all(vec![outgoing]).await?;
        Ok(results.pop().unwrap_or(Err(BusError::Closed))?)
    }

    /// Publishes events of this session in order and updates its state. There is one result per event. `Err` means
    /// that no event was published, or that the session has expired or was deleted.
    ///
    /// If the state cannot be updated (the backend is unavailable, a fold panicked), the events are stored anyway;
    /// the next [`refresh`](Self::refresh) tries again or returns the error.
    pub async fn publish_all(
        &self,
        mut events: Vec<OutgoingEvent>,
    ) -> Result<Vec<BusResult<PublishResult>>> {
        for event in &mut events {
            self.assign_session(event)?;
        }
        let before = self.position();
        let results = self.sessions.inner.bus.publish_all(events).await?;
        let stored = results.iter().filter_map(|result| result.as_ref().ok()?.entry_id());
        // While the backend is unavailable, reading would only delay the caller.
        let Some(last) = stored.max() else { return Ok(results) };
        self.check_not_expired(before, last).await?;
        if let Err(error) = self.refresh_to(Some(last)).await {
            if matches!(error, SessionError::Expired { .. }) {
                return Err(error);
            }
            warn!(session = %self.id, %error, "session state could not be updated after publishing");
        }
        Ok(results)
    }

    /// An idle session may be about to expire. The sweep checks for new events after it marks the session as expired;
    /// this checks for the mark after publishing. So one of the two detects the race.
    async fn check_not_expired(&self, before: EntryId, last: EntryId) -> Result<()> {
        let Some(ttl) = self.ttl else { return Ok(()) };
        let last_used_at = Timestamp::from_millis(before.max(self.index).ms);
        // Half of the TTL, because clocks of different cluster nodes may differ.
        if Timestamp::from_millis(last.ms).since(last_used_at) < ttl / 2 {
            return Ok(());
        }
        match self.sessions.existing_meta(&self.id).await? {
            Some(_) => Ok(()),
            None => Err(SessionError::NotFound { session: self.id.clone() }),
        }
    }

    /// Sets the session of an event.
    fn assign_session(&self, event: &mut OutgoingEvent) -> BusResult<()> {
        let problem = match (event.scope, &event.session) {
            (Scope::Namespace, _) => "its scope is the namespace, not a session".to_owned(),
            (Scope::Session, Some(other)) if *other != self.id => {
                format!("its session is `{other}`, not `{}`", self.id)
            }
            (Scope::Session, _) => {
                event.session = Some(self.id.clone());
                return Ok(());
            }
        };
        Err(BusError::invalid(format!("event `{}`", event.event_type), problem))
    }

    /// Applies events published since, by any process. Takes a snapshot if one is due.
    pub async fn refresh(&self) -> Result<()> {
        self.refresh_to(None).await
    }

    /// Refreshes up to an entry that is known to exist; later entries may be applied, too.
    async fn refresh_to(&self, end: Option<EntryId>) -> Result<()> {
        let span = tracing::debug_span!("refresh", session = %self.id);
        self.catch_up(end).instrument(span).await?;
        self.snapshot_if_due().await;
        Ok(())
    }

    async fn catch_up(&self, end: Option<EntryId>) -> Result<()> {
        let storage = self.sessions.storage();
        let stream = storage.keys.session(&self.id);
        let mut pages = ReplayPages::new(storage, &stream, end);
        loop {
            let (after, known, parking_capacity) = {
                let cached = self.cached();
                cached.broken.clone().map_or(Ok(()), Err)?;
                let state = &cached.state;
                (state.position, state.entries, state.unreadable.parking_capacity())
            };
            let entries = match pages.next(after, EntryId::MAX).await? {
                ReplayPage::Entries(entries) if entries.is_empty() => return Ok(()),
                ReplayPage::Entries(entries) => entries,
                ReplayPage::Gap(before) => return self.reload(after, before, known).await,
            };
            if after == EntryId::MIN {
                self.check_first(entries[0].id).await?;
            }
            let registry = self.sessions.inner.bus.registry();
            let read = |entry| state::read(registry, &stream, entry);
            let read: Vec<DecodedEntry> = entries.iter().map(read).collect();
            // Park first: entries before the position are not read again.
            let id = &self.id;
            replay::park(storage, id, &entries, &read, EntryId::MIN, parking_capacity).await?;
            if let Err(error) = self.apply(&entries, read) {
                self.reload_after_panic().await;
                return Err(error);
            }
            if pages.is_at_end() {
                return Ok(());
            }
        }
    }

    /// Applies entries to the state. A concurrent call may have applied some of them.
    fn apply(&self, entries: &[Entry], read: Vec<DecodedEntry>) -> Result<()> {
        let mut cached = self.cached();
        for (entry, read) in entries.iter().zip(read) {
            if entry.id <= cached.state.position {
                continue;
            }
            if let Err(error) = cached.state.apply_decoded(entry.id, read) {
                cached.broken = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    /// After a fold panicked, some folds have applied an entry that others have not. Reloads the state from before it.
    async fn reload_after_panic(&self) {
        let position = self.position();
        let before = match position {
            EntryId::MIN => {
                Ok(SessionState::new(self.id.clone(), self.sessions.inner.folds.clone()))
            }
            position => self.sessions.state_at(&self.id, ReplayUntil::Entry(position)).await,
        };
        match before {
            Ok(state) => {
                let mut cached = self.cached();
                if cached.broken.is_some() && cached.state.position == state.position {
                    cached.state = state;
                }
            }
            Err(error) => {
                warn!(session = %self.id, %error, "state could not be reloaded after a fold panicked; some folds are ahead");
            }
        }
    }

    /// Checks that the first entry read by an empty session is the session's first.
    async fn check_first(&self, first: EntryId) -> Result<()> {
        match self.sessions.record_first_entry(&self.id, first).await? {
            FirstEntry::Entry(known) if first > known => {
                let missing = MissingEntries {
                    after: EntryId::MIN,
                    before: first,
                    count: None,
                    reason: MissingReason::Trimmed,
                };
                Err(SessionError::Incomplete { session: self.id.clone(), missing })
            }
            _ => Ok(()),
        }
    }

    /// The entry at the position is gone. If a compaction removed it, a snapshot includes everything applied here.
    /// Otherwise entries were lost, and the state must not be replaced by what remains.
    async fn reload(&self, after: EntryId, before: EntryId, entries: u64) -> Result<()> {
        self.sessions.check_same_session(&self.id, self.index).await?;
        let missing = MissingEntries { after, before, count: None, reason: MissingReason::Lost };
        let lost = || SessionError::Incomplete { session: self.id.clone(), missing };
        let loaded = match self.sessions.load(&self.id, ReplayUntil::End, LoadPurpose::Use).await {
            // The entry at the position is lost, whatever else is missing.
            Err(SessionError::Incomplete { missing, .. })
                if missing.reason == MissingReason::Deleted =>
            {
                return Err(lost());
            }
            loaded => loaded?,
        };
        let LoadedSession { index, state, recovery, .. } = loaded;
        let snapshot_entries = state.entries.saturating_sub(recovery.replayed);
        let is_past_position = recovery.from_snapshot.is_some_and(|position| position >= after);
        if index != self.index || !is_past_position || snapshot_entries < entries {
            return Err(lost());
        }
        let mut cached = self.cached();
        if state.position >= cached.state.position {
            *cached = CachedState { state, recovery, snapshot_entries, broken: None };
        }
        Ok(())
    }

    /// Takes a snapshot of the current state. Returns `false` if there is already one of this or a later entry.
    pub async fn snapshot(&self) -> Result<bool> {
        let failed = |problem: &str| SessionError::Snapshot {
            session: self.id.clone(),
            problem: problem.to_owned(),
        };
        let now = self.sessions.now().await?;
        let (fields, entries) = {
            let cached = self.cached();
            cached.broken.clone().map_or(Ok(()), Err)?;
            if cached.is_incomplete() {
                return Err(failed("events are missing, and a snapshot would hide that"));
            }
            if cached.state.position == EntryId::MIN {
                return Err(failed("it has no events"));
            }
            (snapshot::encode(&cached.state, now)?, cached.state.entries)
        };
        let storage = self.sessions.storage();
        let saved =
            snapshot::save(storage, &self.id, self.index, &self.sessions.inner.set, &fields);
        let saved = saved.await?;
        let mut cached = self.cached();
        cached.snapshot_entries = cached.snapshot_entries.max(entries);
        metrics::snapshot(saved);
        Ok(saved)
    }

    async fn snapshot_if_due(&self) {
        let Some(every) = self.sessions.inner.config.snapshot_every else { return };
        {
            let mut cached = self.cached();
            let is_due = cached.state.entries.saturating_sub(cached.snapshot_entries) >= every;
            if !is_due || self.sessions.inner.folds.is_empty() || cached.is_incomplete() {
                return;
            }
            // Set before the attempt: a failed snapshot is retried after `every` further entries.
            cached.snapshot_entries = cached.state.entries;
        }
        self.snapshot_or_warn().await;
    }

    pub(super) async fn snapshot_or_warn(&self) {
        if let Err(error) = self.snapshot().await {
            metrics::snapshot_failed();
            warn!(session = %self.id, %error, "snapshot failed; the session continues without it");
        }
    }

    fn cached(&self) -> MutexGuard<'_, CachedState> {
        // Application code that clones or encodes the state may panic here. It cannot change the state.
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("id", &self.id).finish_non_exhaustive()
    }
}

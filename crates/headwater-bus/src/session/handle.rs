//! A session in the hands of this process: publish to it, read its state.
//!
//! Upstream: applications and the main loop. Downstream: the bus, to publish; `replay`, to read back what was stored.
//! Promises: the state is made of what is in the stream, in its order, whoever published it: an event that is published
//! here counts after it was read back. Calls may be made at the same time. Events that it knows and that are lost in the
//! backend are an error, and its state stays as it was.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::{Entry, EntryId};
use tracing::{Instrument, warn};

use super::error::{Missing, MissingReason};
use super::meta::{First, Meta};
use super::recovery::{Loaded, Purpose, Recovery};
use super::replay::{self, Page, Pages, Until};
use super::snapshot::{self, Saved};
use super::state::{self, Read, SessionState};
use super::{Result, SessionError, Sessions};
use crate::bus::PublishResult;
use crate::error::{BusError, Result as BusResult};
use crate::event::{Event, Outgoing, Received, Scope};
use crate::fold::{AllEvents, Fold};
use crate::metrics;
use crate::name::SessionId;

/// A session.
pub struct Session {
    sessions: Sessions,
    id: SessionId,
    /// Its place in the list of sessions: what it is known by if there ever is another one of this name.
    index: EntryId,
    ttl: Option<Duration>,
    lost_runs: u64,
    held: Mutex<Held>,
}

struct Held {
    state: SessionState,
    recovery: Recovery,
    /// How many entries the newest snapshot that is known here has, or was tried with.
    snapshot_entries: u64,
    /// A fold panicked: the state does not get on any more.
    broken: Option<SessionError>,
}

impl Held {
    /// Whether events are known to be missing.
    fn is_incomplete(&self) -> bool {
        let missing = self.recovery.missing.as_ref();
        missing.is_some_and(|missing| missing.why != MissingReason::Unknown)
    }
}

impl Session {
    pub(super) fn empty(sessions: Sessions, id: SessionId, meta: &Meta) -> Self {
        let state = SessionState::new(id, sessions.inner.folds.clone());
        let (index, ttl, recovery) = (meta.index, meta.ttl, Recovery::default());
        Self::recovered(sessions, Loaded { index, ttl, lost_runs: 0, state, recovery })
    }

    pub(super) fn recovered(sessions: Sessions, loaded: Loaded) -> Self {
        let Loaded { index, ttl, lost_runs, state, recovery } = loaded;
        let id = state.session.clone();
        let snapshot_entries = match recovery.from_snapshot {
            Some(_) => state.entries.saturating_sub(recovery.replayed),
            None => 0,
        };
        let held = Held { state, recovery, snapshot_entries, broken: None };
        Self { sessions, id, index, ttl, lost_runs, held: Mutex::new(held) }
    }

    /// How often a main loop had lost its lock over it when it was opened.
    pub(crate) fn lost_runs(&self) -> u64 {
        self.lost_runs
    }

    /// Its id.
    pub fn id(&self) -> &SessionId {
        &self.id
    }

    /// The sessions it is one of.
    pub fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// How it was recovered, or read anew after a compaction; of a new session, that nothing had to be.
    pub fn recovery(&self) -> Recovery {
        self.held().recovery.clone()
    }

    /// The newest event of type `E`, if [`Folds::latest`](crate::Folds::latest) or [`Folds::all`](crate::Folds::all) keep
    /// it and there was one.
    pub fn latest<E: Event>(&self) -> Option<Received<E>> {
        self.held().state.latest()
    }

    /// The events of type `E` that [`Folds::all`](crate::Folds::all) keeps; `None` if no such fold was chosen.
    pub fn all<E: Event>(&self) -> Option<AllEvents<E>> {
        self.held().state.all()
    }

    /// The state of a fold of the application's; `None` if it was not chosen.
    pub fn get<F: Fold>(&self) -> Option<F> {
        self.held().state.get::<F>().cloned()
    }

    /// All of its state as it is now.
    pub fn state(&self) -> SessionState {
        self.held().state.clone()
    }

    /// Why its state stays as it is for good, whatever is published: a fold panicked on the next event. What it knows is
    /// what was before that event.
    pub fn problem(&self) -> Option<SessionError> {
        self.held().broken.clone()
    }

    /// The last entry that its state knows; `EntryId::MIN` before the first.
    pub fn position(&self) -> EntryId {
        self.held().state.position
    }

    /// Publishes an event of this session. It need not name the session.
    pub async fn publish<E: Event>(&self, event: E) -> Result<PublishResult> {
        let outgoing = Outgoing::new(event)?;
        let mut results = self.publish_all(vec![outgoing]).await?;
        Ok(results.pop().unwrap_or(Err(BusError::Closed))?)
    }

    /// Publishes events of this session in order, and brings its state forward. There is a result for each event; an error
    /// means that none was published, or that those that were count for nothing, because the session has expired or was
    /// forgotten.
    ///
    /// If the state cannot be brought forward (the backend went away, a fold panicked), the events are stored all the
    /// same; the next [`refresh`](Self::refresh) tries again, or says why not.
    pub async fn publish_all(
        &self,
        mut events: Vec<Outgoing>,
    ) -> Result<Vec<BusResult<PublishResult>>> {
        for event in &mut events {
            self.claim(event)?;
        }
        let before = self.position();
        let results = self.sessions.inner.bus.publish_all(events).await?;
        let stored = results.iter().filter_map(|result| result.as_ref().ok()?.entry_id());
        // While the backend is away, reading would only make the caller wait.
        let Some(last) = stored.max() else { return Ok(results) };
        self.check_in_use(before, last).await?;
        if let Err(error) = self.refresh_to(Some(last)).await {
            if matches!(error, SessionError::Expired { .. }) {
                return Err(error);
            }
            warn!(session = %self.id, %error, "session could not be brought forward after publishing");
        }
        Ok(results)
    }

    /// A session that nobody used for long may be about to end. Whoever ends it looks for new events after it said so; this
    /// looks whether somebody said so after there was one. So one of the two notices.
    async fn check_in_use(&self, before: EntryId, last: EntryId) -> Result<()> {
        let Some(ttl) = self.ttl else { return Ok(()) };
        let used_at = Timestamp::from_millis(before.max(self.index).ms);
        // Half of it: the clocks of two servers of a cluster may differ.
        if Timestamp::from_millis(last.ms).since(used_at) < ttl / 2 {
            return Ok(());
        }
        match self.sessions.known_meta(&self.id).await? {
            Some(_) => Ok(()),
            None => Err(SessionError::NotFound { session: self.id.clone() }),
        }
    }

    /// Makes an event one of this session.
    fn claim(&self, event: &mut Outgoing) -> BusResult<()> {
        let problem = match (event.scope, &event.session) {
            (Scope::Namespace, _) => "it is one of a namespace, not of a session".to_owned(),
            (Scope::Session, Some(other)) if *other != self.id => {
                format!("it names the session `{other}`, not `{}`", self.id)
            }
            (Scope::Session, _) => {
                event.session = Some(self.id.clone());
                return Ok(());
            }
        };
        Err(BusError::invalid(format!("an event `{}`", event.event_type), problem))
    }

    /// Takes into account what was published since, here and elsewhere. Takes a snapshot if it is time for one.
    pub async fn refresh(&self) -> Result<()> {
        self.refresh_to(None).await
    }

    /// The same, up to an entry that is known to be there; what came after it may be taken into account, too.
    async fn refresh_to(&self, end: Option<EntryId>) -> Result<()> {
        let span = tracing::debug_span!("refresh", session = %self.id);
        self.catch_up(end).instrument(span).await?;
        self.snapshot_if_due().await;
        Ok(())
    }

    async fn catch_up(&self, end: Option<EntryId>) -> Result<()> {
        let journal = self.sessions.journal();
        let stream = journal.keys.session(&self.id);
        let mut pages = Pages::new(journal, &stream, end);
        loop {
            let (after, known, to_be_parked, copied_by) = {
                let held = self.held();
                held.broken.clone().map_or(Ok(()), Err)?;
                let state = &held.state;
                let to_be_parked = state.unreadable.to_be_parked();
                (state.position, state.entries, to_be_parked, state.copied_by.clone())
            };
            let entries = match pages.next(after, EntryId::MAX).await? {
                Page::Entries(entries) if entries.is_empty() => return Ok(()),
                Page::Entries(entries) => entries,
                Page::Gap(before) => return self.reload(after, before, known).await,
            };
            if after == EntryId::MIN {
                self.check_first(entries[0].id).await?;
            }
            let registry = self.sessions.inner.bus.registry();
            let read = |entry| state::read(registry, &stream, &copied_by, entry);
            let read: Vec<Read> = entries.iter().map(read).collect();
            // Parked first: an entry that is behind the state is not looked at again.
            let id = &self.id;
            replay::park(journal, id, &entries, &read, EntryId::MIN, to_be_parked).await?;
            if let Err(error) = self.take(&entries, read) {
                self.restore().await;
                return Err(error);
            }
            if pages.is_at_end() {
                return Ok(());
            }
        }
    }

    /// Takes entries into the state. Another call may have taken some of them meanwhile.
    fn take(&self, entries: &[Entry], read: Vec<Read>) -> Result<()> {
        let mut held = self.held();
        for (entry, read) in entries.iter().zip(read) {
            if entry.id <= held.state.position {
                continue;
            }
            if let Err(error) = held.state.take(entry.id, read) {
                held.broken = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    /// After a fold panicked, some folds know an entry that others do not. Their state is read anew as it was before it.
    async fn restore(&self) {
        let position = self.position();
        let before = match position {
            EntryId::MIN => {
                let copied_by = self.held().state.copied_by.clone();
                let folds = self.sessions.inner.folds.clone();
                Ok(SessionState { copied_by, ..SessionState::new(self.id.clone(), folds) })
            }
            position => self.sessions.state_at(&self.id, Until::Entry(position)).await,
        };
        match before {
            Ok(state) => {
                let mut held = self.held();
                if held.broken.is_some() && held.state.position == state.position {
                    held.state = state;
                }
            }
            Err(error) => {
                warn!(session = %self.id, %error, "what a fold changed before it panicked stays changed");
            }
        }
    }

    /// The first entry that a session without entries sees must be its first.
    async fn check_first(&self, first: EntryId) -> Result<()> {
        match self.sessions.note_first(&self.id, first).await? {
            First::Entry(known) if first > known => {
                let missing = Missing {
                    after: EntryId::MIN,
                    before: first,
                    count: None,
                    why: MissingReason::Trimmed,
                };
                Err(SessionError::Incomplete { session: self.id.clone(), missing })
            }
            _ => Ok(()),
        }
    }

    /// The entry that this state stood at is gone. If a compaction went past it, a snapshot has all that it had. If not,
    /// entries are lost: what is left must not take the place of what is known here.
    async fn reload(&self, after: EntryId, before: EntryId, entries: u64) -> Result<()> {
        self.sessions.check_same(&self.id, self.index).await?;
        let missing = Missing { after, before, count: None, why: MissingReason::Lost };
        let lost = || SessionError::Incomplete { session: self.id.clone(), missing };
        let loaded = match self.sessions.load(&self.id, Until::End, Purpose::Use).await {
            // What this session stood at is gone, whatever else is.
            Err(SessionError::Incomplete { missing, .. })
                if missing.why == MissingReason::Deleted =>
            {
                return Err(lost());
            }
            loaded => loaded?,
        };
        let Loaded { index, state, recovery, .. } = loaded;
        let snapshot_entries = state.entries.saturating_sub(recovery.replayed);
        let went_past = recovery.from_snapshot.is_some_and(|position| position >= after);
        if index != self.index || !went_past || snapshot_entries < entries {
            return Err(lost());
        }
        let mut held = self.held();
        if state.position >= held.state.position {
            *held = Held { state, recovery, snapshot_entries, broken: None };
        }
        Ok(())
    }

    /// Takes a snapshot of the state as it is now. Returns whether it was kept: `false` if there is one of this entry or
    /// a later one.
    pub async fn snapshot(&self) -> Result<bool> {
        let refuse = |problem: &str| SessionError::Snapshot {
            session: self.id.clone(),
            problem: problem.to_owned(),
        };
        let now = self.sessions.now().await?;
        let (fields, entries) = {
            let held = self.held();
            held.broken.clone().map_or(Ok(()), Err)?;
            if held.is_incomplete() {
                return Err(refuse("events are missing, and a snapshot would hide that"));
            }
            if held.state.position == EntryId::MIN {
                return Err(refuse("it has no events"));
            }
            (snapshot::encode(&held.state, now)?, held.state.entries)
        };
        let journal = self.sessions.journal();
        let saved =
            snapshot::save(journal, &self.id, self.index, &self.sessions.inner.set, &fields);
        let saved = saved.await?;
        let mut held = self.held();
        held.snapshot_entries = held.snapshot_entries.max(entries);
        metrics::snapshot(saved == Saved::Yes);
        Ok(saved == Saved::Yes)
    }

    async fn snapshot_if_due(&self) {
        let Some(every) = self.sessions.inner.config.snapshot_every else { return };
        {
            let mut held = self.held();
            let is_due = held.state.entries.saturating_sub(held.snapshot_entries) >= every;
            if !is_due || self.sessions.inner.folds.is_empty() || held.is_incomplete() {
                return;
            }
            // Noted before it is taken: one that fails is tried again after as many entries more.
            held.snapshot_entries = held.state.entries;
        }
        self.snapshot_or_warn().await;
    }

    pub(super) async fn snapshot_or_warn(&self) {
        if let Err(error) = self.snapshot().await {
            metrics::snapshot_failed();
            warn!(session = %self.id, %error, "snapshot failed, the session goes on without it");
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Code of the application that clones or writes a state may panic here. It cannot change the state.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("id", &self.id).finish_non_exhaustive()
    }
}

//! A session in the hands of this process: publish to it, read its state.
//!
//! Upstream: applications and the main loop. Downstream: the bus, to publish; `replay`, to read back what was stored.
//! Promises: the state is made of what is in the stream, in its order, whoever published it: an event that is published
//! here counts after it was read back. Calls may be made at the same time. Events that it knows and that are lost in the
//! backend are an error, and its state stays as it was.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use headwater_stream::{Entry, EntryId};
use tracing::{Instrument, warn};

use super::error::{Missing, MissingReason};
use super::meta::First;
use super::recovery::{Gaps, Loaded, Recovery};
use super::replay::{self, Page, Pages, Until};
use super::snapshot::{self, Saved};
use super::state::SessionState;
use super::{Result, SessionError, Sessions};
use crate::bus::PublishResult;
use crate::error::{BusError, Misfit, Result as BusResult};
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
    pub(super) fn empty(sessions: Sessions, id: SessionId, index: EntryId) -> Self {
        let state = SessionState::new(id, sessions.inner.folds.clone());
        Self::recovered(sessions, Loaded { index, state, recovery: Recovery::default() })
    }

    pub(super) fn recovered(sessions: Sessions, loaded: Loaded) -> Self {
        let Loaded { index, state, recovery } = loaded;
        let id = state.session.clone();
        let snapshot_entries = match recovery.from_snapshot {
            Some(_) => state.entries.saturating_sub(recovery.replayed),
            None => 0,
        };
        let held = Held { state, recovery, snapshot_entries, broken: None };
        Self { sessions, id, index, held: Mutex::new(held) }
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

    /// Publishes events of this session in order, and brings its state forward. An error means that none was published;
    /// else there is a result for each event.
    ///
    /// If the state cannot be brought forward (the backend went away, a fold panicked), the events are stored all the
    /// same; the next [`refresh`](Self::refresh) tries again, or says why not. If the session has expired, that is an
    /// error: the events count for nothing, though they may lie in its stream.
    pub async fn publish_all(
        &self,
        mut events: Vec<Outgoing>,
    ) -> Result<Vec<BusResult<PublishResult>>> {
        for event in &mut events {
            self.claim(event)?;
        }
        let results = self.sessions.inner.bus.publish_all(events).await?;
        // While the backend is away, reading would only make the caller wait.
        let is_stored = |result: &BusResult<PublishResult>| {
            result.as_ref().is_ok_and(|result| result.entry_id().is_some())
        };
        if !results.iter().any(is_stored) {
            return Ok(results);
        }
        if let Err(error) = self.refresh().await {
            if matches!(error, SessionError::Expired { .. }) {
                return Err(error);
            }
            warn!(session = %self.id, %error, "session could not be brought forward after publishing");
        }
        Ok(results)
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
        let span = tracing::debug_span!("refresh", session = %self.id);
        self.catch_up().instrument(span).await?;
        self.snapshot_if_due().await;
        Ok(())
    }

    async fn catch_up(&self) -> Result<()> {
        let journal = self.sessions.journal();
        let stream = journal.keys.session(&self.id);
        let mut pages = Pages::new(journal, &stream);
        loop {
            let (after, known) = {
                let held = self.held();
                held.broken.clone().map_or(Ok(()), Err)?;
                (held.state.position, held.state.entries)
            };
            let entries = match pages.next(after, EntryId::MAX).await? {
                Page::Entries(entries) if entries.is_empty() => return Ok(()),
                Page::Entries(entries) => entries,
                Page::Gap(before) => return self.reload(after, before, known).await,
            };
            if after == EntryId::MIN {
                self.check_first(entries[0].id).await?;
            }
            let misfits = match self.take(&entries) {
                Ok(misfits) => misfits,
                Err(error) => {
                    self.restore().await;
                    return Err(error);
                }
            };
            for (index, misfit) in misfits {
                replay::park(journal, &stream, &entries[index], &misfit).await?;
            }
            if pages.is_at_end() {
                return Ok(());
            }
        }
    }

    /// Takes entries into the state. Another call may have taken some of them meanwhile.
    fn take(&self, entries: &[Entry]) -> Result<Vec<(usize, Misfit)>> {
        let stream = self.sessions.journal().keys.session(&self.id);
        let registry = self.sessions.inner.bus.registry();
        let mut held = self.held();
        let mut misfits = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            if entry.id <= held.state.position {
                continue;
            }
            match held.state.take(registry, &stream, entry) {
                Ok(None) => {}
                Ok(Some(misfit)) if held.state.unreadable.is_to_be_parked() => {
                    misfits.push((index, misfit));
                }
                Ok(Some(_)) => {}
                Err(error) => {
                    held.broken = Some(error.clone());
                    return Err(error);
                }
            }
        }
        Ok(misfits)
    }

    /// After a fold panicked, some folds know an entry that others do not. Their state is read anew as it was before it.
    async fn restore(&self) {
        let position = self.position();
        let before = match position {
            EntryId::MIN => {
                Ok(SessionState::new(self.id.clone(), self.sessions.inner.folds.clone()))
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
        let loaded = self.sessions.load(&self.id, Until::End, Gaps::Refuse).await?;
        let Loaded { index, state, recovery } = loaded;
        let snapshot_entries = state.entries.saturating_sub(recovery.replayed);
        let went_past = recovery.from_snapshot.is_some_and(|position| position >= after);
        if index != self.index || !went_past || snapshot_entries < entries {
            let missing = Missing { after, before, count: None, why: MissingReason::Lost };
            return Err(SessionError::Incomplete { session: self.id.clone(), missing });
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
        if let Err(error) = self.snapshot().await {
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

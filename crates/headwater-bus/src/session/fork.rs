//! Forks: a session that begins like another one, and goes on by itself.
//!
//! Upstream: applications and operators. Downstream: `filling`.
//! Promises: the parent is only read. The fork has copies of its events, so that whatever becomes of the parent, the fork
//! stays whole; it knows its parent and the entry it left it at.

use headwater_stream::{Entry, EntryId, RegistryMap};

use super::error::MissingReason;
use super::filling::{Beginning, Filling};
use super::meta::{First, Meta, Parent};
use super::replay::{Page, Pages, Until};
use super::state::is_stray;
use super::{Result, Session, SessionError, Sessions};
use crate::error::BusError;
use crate::metrics;
use crate::name::SessionId;

/// What a copy of a session needs.
pub(super) struct Source {
    pub(super) meta: Meta,
    pub(super) beginning: Beginning,
    /// The first entry that is there.
    pub(super) first: Option<EntryId>,
    /// Why it cannot be copied without a snapshot.
    pub(super) missing: Option<super::Missing>,
    /// Snapshots of all sets of folds, as they are.
    pub(super) snapshots: Vec<(String, RegistryMap)>,
}

impl Sessions {
    /// Makes a session of the events of another one, up to an entry or a time, and leaves that one as it is.
    ///
    /// If this is not carried out to its end, what there is of the new session is no session: it is
    /// [`Unfinished`](SessionError::Unfinished), and swept away later.
    pub async fn fork(
        &self,
        parent: &SessionId,
        until: Until,
        session: &SessionId,
    ) -> Result<Session> {
        let source = self.source(parent).await?;
        let origin = Parent { session: parent.clone(), entry_id: EntryId::MIN };
        let what = format!("a fork of `{parent}`");
        let snapshots = source.snapshots.clone();
        let mut filling = Filling::begin(self, session, what, Some(origin), snapshots).await?;
        let copied = self.copy(parent, until, &source, &mut filling).await;
        match copied {
            Ok(()) => {
                let forked = filling.finish(source.beginning).await?;
                metrics::filled("fork");
                Ok(forked)
            }
            Err(error) => {
                filling.abandon().await;
                Err(error)
            }
        }
    }

    /// What there is to copy of a session.
    pub(super) async fn source(&self, session: &SessionId) -> Result<Source> {
        let journal = self.journal();
        let meta = self.open_meta(session).await?;
        let stats = journal.backend.stats(&journal.keys.session(session)).await?;
        let mut snapshots = Vec::new();
        for set in meta.snapshots.keys() {
            let map = journal.keys.session_snapshot(session, set);
            if let Some(fields) = journal.backend.map_get(&map).await? {
                snapshots.push((set.clone(), fields));
            }
        }
        let (beginning, missing) = match self.beginning(session, &meta, stats.as_ref()).await? {
            Ok(_) if meta.first == First::Unknown => (Beginning::Unknown, None),
            Ok(_) => (Beginning::Whole, None),
            Err(missing) => (Beginning::After(missing.count.unwrap_or(0)), Some(missing)),
        };
        if let Some(missing) = missing.clone().filter(|_| snapshots.is_empty()) {
            return Err(SessionError::Incomplete { session: session.clone(), missing });
        }
        let first = stats.and_then(|stats| stats.first_id);
        Ok(Source { meta, beginning, first, missing, snapshots })
    }

    async fn copy(
        &self,
        parent: &SessionId,
        until: Until,
        source: &Source,
        filling: &mut Filling,
    ) -> Result<()> {
        let journal = self.journal();
        let stream = journal.keys.session(parent);
        let mut pages = Pages::new(journal, &stream, None);
        let mut position = EntryId::MIN;
        let mut is_done = false;
        while !is_done {
            let entries = match pages.next(position, until.last_id()).await? {
                Page::Gap(before) => return Err(overtaken(parent, position, before)),
                Page::Entries(entries) => entries,
            };
            source.check_first(parent, position, until, &entries)?;
            let Some(last) = entries.last() else { break };
            position = last.id;
            let is_ours = |entry: &&Entry| !is_stray(&source.meta.copied_by, &entry.fields);
            let ours = entries.iter().filter(is_ours).count();
            let wanted: Vec<_> = entries
                .into_iter()
                .filter(|entry| is_ours(&entry))
                .take_while(|entry| until.includes(entry))
                .map(|entry| (entry.id, entry.fields))
                .collect();
            is_done = pages.is_at_end() || wanted.len() < ours;
            filling.add(&wanted).await?;
        }
        if let Until::Entry(id) = until
            && filling.last != Some(id)
        {
            let problem = format!("session `{parent}` has no entry {id}");
            return Err(BusError::invalid("the entry", problem).into());
        }
        match &source.missing {
            Some(missing) if !filling.has_snapshot() => {
                Err(SessionError::Incomplete { session: parent.clone(), missing: missing.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl Source {
    /// The first page must begin where the session did when it was looked at.
    pub(super) fn check_first(
        &self,
        session: &SessionId,
        position: EntryId,
        until: Until,
        entries: &[Entry],
    ) -> Result<()> {
        if position == EntryId::MIN && !until.begins_with(self.first, entries) {
            let first = entries.first().map_or(EntryId::MAX, |entry| entry.id);
            return Err(overtaken(session, EntryId::MIN, first));
        }
        Ok(())
    }
}

/// Entries went away while they were read.
pub(super) fn overtaken(session: &SessionId, after: EntryId, before: EntryId) -> SessionError {
    let why = MissingReason::Trimmed;
    let missing = super::Missing { after, before, count: None, why };
    SessionError::Incomplete { session: session.clone(), missing }
}

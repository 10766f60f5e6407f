//! The upkeep of sessions: ends those that nobody uses any more, and compacts those that grew long.
//!
//! Upstream: whoever runs a server, once in a while. Downstream: the list of sessions, `compaction`, `life`.
//! Promises: each thing is done once, however many processes look; a session that cannot be dealt with holds up no
//! other; a crash anywhere is made up for by the next look. An expired session leaves a note that it was, for a
//! while.
//! Refuses: to end what a group still needs, or what was published to meanwhile.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, stream};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, GroupStart, GroupStats, Retention, StreamStats, TrimGuard};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, info, warn};

use super::compaction::UnreadableEntries;
use super::lifecycle::{CONCURRENCY, IndexEntry, SessionLookup};
use super::meta::{self, SessionMeta, SessionPoint, SessionStage};
use super::{Result, SessionError, Sessions};
use crate::error::BusError;
use crate::limits::LIST_PAGE_MAX;
use crate::metrics;
use crate::name::{SessionId, random_bits};

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionSweepReport {
    /// Sessions looked at.
    pub checked: u64,
    /// Sessions whose time was up.
    pub expired: u64,
    /// Sessions whose time is up, but whose events some group still needs.
    pub held_back: u64,
    /// Abandoned forks and imports that were removed.
    pub abandoned: u64,
    /// Expired sessions that were forgotten, after `tombstone_ttl`.
    pub deleted: u64,
    /// Sessions that could not be dealt with; the log says why.
    pub failed: u64,
}

/// What one run of the upkeep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionMaintenanceReport {
    /// What became of sessions.
    pub swept: SessionSweepReport,
    /// Sessions that were compacted.
    pub compacted: u64,
    /// Entries that went by that.
    pub removed: u64,
    /// Sessions that are long, but cannot be compacted: such as those with entries that nobody can read.
    pub refused: u64,
}

impl SessionMaintenanceReport {
    fn add(&mut self, other: Self) {
        let Self { swept, compacted, removed, refused } = other;
        self.swept.checked += swept.checked;
        self.swept.expired += swept.expired;
        self.swept.held_back += swept.held_back;
        self.swept.abandoned += swept.abandoned;
        self.swept.deleted += swept.deleted;
        self.swept.failed += swept.failed;
        self.compacted += compacted;
        self.removed += removed;
        self.refused += refused;
    }
}

impl Sessions {
    /// Does what is to be done [once](Self::run_once), then again every so often, until `shutdown` is done. One
    /// process is enough; several do no harm. A backend that is away is asked again.
    pub async fn run(&self, every: Duration, shutdown: impl Future<Output = ()>) -> Result<()> {
        if every.is_zero() {
            return Err(BusError::invalid("every", "must be greater than zero").into());
        }
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let running = async {
            loop {
                ticks.tick().await;
                if let Err(error) = self.run_once().await {
                    warn!(%error, "sessions were not lookup after, trying again");
                }
            }
        };
        // What is dropped half way is gone on with by the next run, as after a crash.
        tokio::select! {
            () = shutdown => Ok(()),
            () = running => Ok(()),
        }
    }

    /// [Sweeps](Self::sweep) once, and compacts the sessions that have at least `compact_min_entries` entries before
    /// the oldest of their snapshots. Entries that nobody could read are kept, and their sessions with them.
    pub async fn run_once(&self) -> Result<SessionMaintenanceReport> {
        self.maintain_all(self.inner.config.compact_min_entries).await
    }

    /// Ends sessions whose time is up, and removes abandoned forks and imports. Run it now and then, in any process and
    /// in several: it does each thing once.
    ///
    /// An expired session keeps a note of how many entries it had ([`SessionError::Expired`]) for `tombstone_ttl`;
    /// then it is [forgotten](Self::forget). Entries that a group has not read or acknowledged stay, and so does
    /// their session.
    pub async fn sweep(&self) -> Result<SessionSweepReport> {
        Ok(self.maintain_all(None).await?.swept)
    }

    /// Walks over all sessions, some at once.
    async fn maintain_all(
        &self,
        compact_min_entries: Option<u64>,
    ) -> Result<SessionMaintenanceReport> {
        let mut all = SessionMaintenanceReport::default();
        let now = self.now().await?;
        let mut after = EntryId::MIN;
        loop {
            let page = self.list_page(after, LIST_PAGE_MAX).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = last.index;
            let each = page.into_iter();
            let each =
                each.map(|listed| self.maintain_one(listed, now, compact_min_entries).boxed());
            let each: Vec<BoxFuture<'_, SessionMaintenanceReport>> = each.collect();
            let mut done = stream::iter(each).buffer_unordered(CONCURRENCY);
            while let Some(one) = done.next().await {
                all.add(one);
            }
        }
    }

    /// Deals with one entry of the list. One that fails is logged, and left to the next time.
    async fn maintain_one(
        &self,
        listed: IndexEntry,
        now: Timestamp,
        compact_min_entries: Option<u64>,
    ) -> SessionMaintenanceReport {
        let mut done = SessionMaintenanceReport::default();
        let lookup = &match listed.lookup {
            Ok(Some(lookup)) => lookup,
            Ok(None) => {
                if let Err(error) = self.sweep_index(listed.index, now).await {
                    warn!(%error, "the list of sessions could not be swept");
                }
                return done;
            }
            Err(_) => {
                done.swept.failed = 1;
                return done;
            }
        };
        done.swept.checked = 1;
        let session = &lookup.session;
        if let Err(error) = self.sweep_one(lookup, now, &mut done.swept).await {
            done.swept.failed = 1;
            warn!(%session, %error, "session could not be swept");
        } else if done.swept.expired == 0 && lookup.should_compact(compact_min_entries) {
            self.compact_one(session, &mut done).await;
        }
        done
    }

    /// Removes an entry of the list that counts for nothing, once nobody can be about to make it count.
    async fn sweep_index(&self, index: EntryId, now: Timestamp) -> Result<()> {
        let age = now.since(Timestamp::from_millis(index.ms));
        if age > self.inner.config.abandoned_after {
            let list = self.storage().keys.sessions();
            self.storage().backend.delete_entries(&list, &[index]).await?;
        }
        Ok(())
    }

    async fn sweep_one(
        &self,
        lookup: &SessionLookup,
        now: Timestamp,
        swept: &mut SessionSweepReport,
    ) -> Result<()> {
        let SessionLookup { session, meta, stats } = lookup;
        match meta.stage {
            SessionStage::Copying => {
                let is_abandoned = now.since(meta.progress_at) > self.inner.config.abandoned_after;
                if is_abandoned && self.remove_unfinished(session, &meta.copier).await? {
                    swept.abandoned += 1;
                    info!(%session, "an abandoned fork or import was removed");
                }
            }
            SessionStage::Open => {
                if meta.ttl.is_some_and(|ttl| now.since(lookup.last_used_at()) > ttl) {
                    match self.expire(lookup, now).await? {
                        true => swept.expired += 1,
                        false => swept.held_back += 1,
                    }
                }
            }
            SessionStage::Expired => {
                // Whoever expired it may still be about to clear it, or to see that it is in use.
                let ended = now.since(lookup.ended_at());
                if ended <= self.inner.config.abandoned_after {
                    return Ok(());
                }
                // Or has died before either.
                if self.was_used_after_expiry(lookup).await? {
                    self.reopen(session).await?;
                    return Ok(());
                }
                if stats.as_ref().is_some_and(|stats| stats.length > 0) {
                    self.trim_expired(session, meta).await?;
                }
                if ended > self.inner.config.tombstone_ttl
                    && self.delete_expired(lookup, now).await?
                {
                    swept.deleted += 1;
                }
            }
        }
        Ok(())
    }

    /// Ends a session. Returns `false` if a group still needs some of its events, or if it is in use after all.
    async fn expire(&self, lookup: &SessionLookup, now: Timestamp) -> Result<bool> {
        let SessionLookup { session, meta, stats } = lookup;
        if self.is_needed_by_group(session, stats.as_ref()) {
            return Ok(false);
        }
        let storage = self.storage();
        let info = lookup.info();
        let point = SessionPoint {
            entry_id: info.last_entry.unwrap_or(EntryId::MIN),
            entries: info.length + info.removed,
        };
        let open = meta::stage_text(SessionStage::Open);
        let expected = Some((meta::STAGE, open.as_bytes()));
        let map = storage.keys.session_meta(session);
        if !storage.backend.map_update(&map, expected, &meta::expired_is(point, now)).await? {
            return Ok(false);
        }
        // Somebody published or began to read between the look and the end. Nothing has gone yet: it is in use after
        // all.
        let stats = storage.backend.stats(&storage.keys.session(session)).await?;
        if stats.as_ref().and_then(|stats| stats.last_id) != info.last_entry
            || self.is_needed_by_group(session, stats.as_ref())
        {
            self.reopen(session).await?;
            return Ok(false);
        }
        self.trim_expired(session, &SessionMeta { expired: Some(point), ..meta.clone() }).await?;
        metrics::expired();
        info!(%session, entries = point.entries, "session expired");
        Ok(true)
    }

    async fn reopen(&self, session: &SessionId) -> Result<()> {
        let map = self.storage().keys.session_meta(session);
        let expired = meta::stage_text(SessionStage::Expired);
        let expected = Some((meta::STAGE, expired.as_bytes()));
        self.storage().backend.map_update(&map, expected, &meta::reopened()).await?;
        Ok(())
    }

    /// Whether something came after an end of which nothing has been done yet.
    async fn was_used_after_expiry(&self, lookup: &SessionLookup) -> Result<bool> {
        let SessionLookup { session, meta, stats } = lookup;
        let (Some(point), Some(stats)) = (meta.expired, stats) else { return Ok(false) };
        let is_whole = stats.first_id.is_some_and(|first| first <= point.entry_id);
        if !is_whole || stats.last_id <= Some(point.entry_id) {
            return Ok(false);
        }
        for set in meta.snapshots.keys() {
            let map = self.storage().keys.session_snapshot(session, set);
            if self.storage().backend.map_get(&map).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a group still needs entries of its stream.
    fn is_needed_by_group(&self, session: &SessionId, stats: Option<&StreamStats>) -> bool {
        let guard = self.storage().keys.session_guard(session);
        let needs =
            |group: &GroupStats| group.name != guard && (group.pending > 0 || group.lag != Some(0));
        stats.is_some_and(|stats| stats.groups.iter().any(needs))
    }

    /// Removes what an expired session had. An event that came after its end stays, for whoever wonders.
    async fn trim_expired(&self, session: &SessionId, meta: &SessionMeta) -> Result<()> {
        let Some(point) = meta.expired else { return Ok(()) };
        let storage = self.storage();
        let (stream, guard) = (storage.keys.session(session), storage.keys.session_guard(session));
        for set in meta.snapshots.keys() {
            storage.backend.map_delete(&storage.keys.session_snapshot(session, set)).await?;
        }
        let start = GroupStart::After(point.entry_id);
        if storage.backend.reset_group(&stream, &guard, start).await? {
            storage.backend.trim(&stream, &Retention::max_len(0), TrimGuard::Safe).await?;
        }
        Ok(())
    }

    /// Forgets a session that expired long ago. Returns `false` if a group still needs what came after its end, or if
    /// somebody else was quicker.
    async fn delete_expired(&self, lookup: &SessionLookup, now: Timestamp) -> Result<bool> {
        let session = &lookup.session;
        if self.is_needed_by_group(session, lookup.stats.as_ref()) {
            return Ok(false);
        }
        // One of all who want to wins, and until it is done nobody can make another session of this name, which would
        // go, too. If it dies, what is left is taken for an abandoned copy, and goes later.
        let map = self.storage().keys.session_meta(session);
        let expired = meta::stage_text(SessionStage::Expired);
        let expected = Some((meta::STAGE, expired.as_bytes()));
        let copier = format!("{:032x}", random_bits());
        let deleting = meta::deleting(&copier, now);
        if !self.storage().backend.map_update(&map, expected, &deleting).await? {
            return Ok(false);
        }
        let is_deleted = self.delete(session).await?;
        debug!(%session, "expired session deleted");
        Ok(is_deleted)
    }

    async fn compact_one(&self, session: &SessionId, done: &mut SessionMaintenanceReport) {
        match self.compact(session, UnreadableEntries::Keep).await {
            Ok(compacted) if compacted.removed > 0 => {
                done.compacted = 1;
                done.removed = compacted.removed;
            }
            Ok(_) => {}
            Err(error @ SessionError::Compaction { .. }) => {
                done.refused = 1;
                debug!(%session, %error, "session is long and cannot be compacted");
            }
            Err(error) => {
                done.swept.failed = 1;
                warn!(%session, %error, "session could not be compacted");
            }
        }
    }
}

impl SessionLookup {
    /// When it was last used, as far as anybody knows.
    fn last_used_at(&self) -> Timestamp {
        let last = self.stats.as_ref().and_then(|stats| stats.last_id);
        let snapshots = self.meta.snapshots.values().map(|point| point.entry_id);
        let ids = last.into_iter().chain(snapshots).map(|id| Timestamp::from_millis(id.ms));
        ids.fold(self.meta.created_at, Timestamp::max)
    }

    /// When it expired. Sessions that earlier versions ended do not say; those were in use no longer than this.
    fn ended_at(&self) -> Timestamp {
        let last = self.meta.expired.map_or(0, |point| point.entry_id.ms);
        let at = self.meta.expired_at;
        at.unwrap_or_else(|| self.meta.created_at.max(Timestamp::from_millis(last)))
    }

    /// Whether there is enough before its snapshots to be worth a compaction.
    fn should_compact(&self, from: Option<u64>) -> bool {
        let gone = self.meta.compacted.map_or(0, |point| point.entries);
        let oldest = self.meta.snapshots.values().map(|point| point.entries).min();
        let removable = oldest.unwrap_or(0).saturating_sub(gone + 1);
        self.meta.stage == SessionStage::Open && from.is_some_and(|from| removable >= from.max(1))
    }
}

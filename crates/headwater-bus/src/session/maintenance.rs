//! Periodic maintenance of sessions: expires unused ones, removes abandoned copies, compacts long ones.
//!
//! Upstream: a server, at intervals. Downstream: the list of sessions, `compaction`, `lifecycle`.
//! Guarantees: each step is done once, also if several processes run maintenance; a session that fails does not block
//! others; a crash at any point is repaired by the next run. An expired session leaves a tombstone for a while.
//! Refuses: to expire a session that a group still needs, or that was published to meanwhile.

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
use crate::name::SessionId;

/// Result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionSweepReport {
    /// Sessions checked.
    pub checked: u64,
    /// Sessions expired.
    pub expired: u64,
    /// Sessions past their TTL whose events a group still needs.
    pub held_back: u64,
    /// Abandoned forks and imports that were removed.
    pub abandoned: u64,
    /// Tombstones of expired sessions that were deleted after `tombstone_ttl`.
    pub deleted: u64,
    /// Sessions that failed; the log has the errors.
    pub failed: u64,
}

/// Result of one maintenance run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionMaintenanceReport {
    /// Result of the sweep.
    pub swept: SessionSweepReport,
    /// Sessions compacted.
    pub compacted: u64,
    /// Entries removed by compaction.
    pub removed: u64,
    /// Long sessions that cannot be compacted, for example because of undecodable entries.
    pub uncompactable: u64,
}

impl SessionMaintenanceReport {
    fn add(&mut self, other: Self) {
        let Self { swept, compacted, removed, uncompactable } = other;
        self.swept.checked += swept.checked;
        self.swept.expired += swept.expired;
        self.swept.held_back += swept.held_back;
        self.swept.abandoned += swept.abandoned;
        self.swept.deleted += swept.deleted;
        self.swept.failed += swept.failed;
        self.compacted += compacted;
        self.removed += removed;
        self.uncompactable += uncompactable;
    }
}

impl Sessions {
    /// [Runs maintenance](Self::run_once) at this interval until `shutdown` resolves. One process is enough; several
    /// are safe. Errors are logged and retried.
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
                    warn!(%error, "session maintenance failed; retrying at the next interval");
                }
            }
        };
        // A run that is dropped half way is continued by the next one, as after a crash.
        tokio::select! {
            () = shutdown => Ok(()),
            () = running => Ok(()),
        }
    }

    /// [Sweeps](Self::sweep) once, and compacts sessions that have at least `compact_min_entries` entries before
    /// their oldest snapshot. Sessions with undecodable entries are not compacted.
    pub async fn run_once(&self) -> Result<SessionMaintenanceReport> {
        self.maintain_all(self.inner.config.compact_min_entries).await
    }

    /// Expires sessions past their TTL and removes abandoned forks and imports. May run in several processes: each
    /// step is done once.
    ///
    /// An expired session keeps a tombstone ([`SessionError::Expired`]) for `tombstone_ttl`; then it is
    /// [deleted](Self::delete). A session with entries that a group has not read or acknowledged does not expire.
    pub async fn sweep(&self) -> Result<SessionSweepReport> {
        Ok(self.maintain_all(None).await?.swept)
    }

    /// Maintains all sessions, several concurrently.
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

    /// Maintains one entry of the list. A failure is logged and left to the next run.
    async fn maintain_one(
        &self,
        listed: IndexEntry,
        now: Timestamp,
        compact_min_entries: Option<u64>,
    ) -> SessionMaintenanceReport {
        let mut done = SessionMaintenanceReport::default();
        let lookup = match &listed.lookup {
            Ok(Some(lookup)) => lookup,
            Ok(None) => {
                match self.sweep_index(&listed, now).await {
                    Ok(is_abandoned) => done.swept.abandoned = is_abandoned.into(),
                    Err(error) => warn!(%error, "list of sessions could not be swept"),
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

    /// Removes a stale entry of the list, once no process can still be creating its session, and the temporary keys of
    /// an abandoned copy. Returns whether there was such a copy.
    async fn sweep_index(&self, listed: &IndexEntry, now: Timestamp) -> Result<bool> {
        let storage = self.storage();
        let mut progress_at = listed.index;
        if let Some(copy) = &listed.copy {
            let stats = storage.backend.stats(&copy.stream(self)).await?;
            progress_at =
                progress_at.max(stats.map_or(EntryId::MIN, |stats| stats.last_generated_id));
        }
        if now.since(Timestamp::from_millis(progress_at.ms)) <= self.inner.config.abandoned_after {
            return Ok(false);
        }
        let Some(copy) = &listed.copy else {
            storage.backend.delete_entries(&storage.keys.sessions(), &[listed.index]).await?;
            return Ok(false);
        };
        self.remove_copy(listed.index, copy).await?;
        info!(session = %copy.session, "abandoned fork or import removed");
        Ok(true)
    }

    async fn sweep_one(
        &self,
        lookup: &SessionLookup,
        now: Timestamp,
        swept: &mut SessionSweepReport,
    ) -> Result<()> {
        let SessionLookup { session, meta, stats } = lookup;
        match meta.stage {
            SessionStage::Open => {
                if meta.ttl.is_some_and(|ttl| now.since(lookup.last_used_at()) > ttl) {
                    match self.expire(lookup, now).await? {
                        true => swept.expired += 1,
                        false => swept.held_back += 1,
                    }
                }
            }
            SessionStage::Expired => {
                // The process that expired it may still be about to trim it, or to reopen it.
                let ended = now.since(meta.expired_at);
                if ended <= self.inner.config.abandoned_after {
                    return Ok(());
                }
                // Or it crashed before doing either.
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

    /// Expires a session. Returns `false` if a group still needs its events, or if it was used meanwhile.
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
        // An event was published, or a group was created, since the lookup. Nothing has been removed yet: reopen it.
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

    /// Whether events were published after the expiry mark, and nothing has been removed yet.
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

    /// Whether a group still needs entries of the stream.
    fn is_needed_by_group(&self, session: &SessionId, stats: Option<&StreamStats>) -> bool {
        let guard = self.storage().keys.session_guard(session);
        let needs =
            |group: &GroupStats| group.name != guard && (group.pending > 0 || group.lag != Some(0));
        stats.is_some_and(|stats| stats.groups.iter().any(needs))
    }

    /// Removes the entries and snapshots of an expired session. Events published after its expiry are kept.
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

    /// Deletes the tombstone of a session. Returns `false` if a group still needs events published after its expiry,
    /// or if another process was first.
    async fn delete_expired(&self, lookup: &SessionLookup, now: Timestamp) -> Result<bool> {
        let session = &lookup.session;
        if self.is_needed_by_group(session, lookup.stats.as_ref()) {
            return Ok(false);
        }
        // Only one process wins: a later one could delete a new session of this name. If it crashes, the tombstone is
        // kept for another `tombstone_ttl`.
        let map = self.storage().keys.session_meta(session);
        let known = lookup.meta.expired_at.to_rfc3339();
        let expected = Some((meta::EXPIRED_AT, known.as_bytes()));
        if !self.storage().backend.map_update(&map, expected, &meta::expired_at_is(now)).await? {
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
                done.uncompactable = 1;
                debug!(%session, %error, "long session cannot be compacted");
            }
            Err(error) => {
                done.swept.failed = 1;
                warn!(%session, %error, "session could not be compacted");
            }
        }
    }
}

impl SessionLookup {
    /// Time of its last known use.
    fn last_used_at(&self) -> Timestamp {
        let last = self.stats.as_ref().and_then(|stats| stats.last_id);
        let snapshots = self.meta.snapshots.values().map(|point| point.entry_id);
        let ids = last.into_iter().chain(snapshots).map(|id| Timestamp::from_millis(id.ms));
        ids.fold(self.meta.created_at, Timestamp::max)
    }

    /// Whether enough entries precede its snapshots to be worth a compaction.
    fn should_compact(&self, from: Option<u64>) -> bool {
        let gone = self.meta.compacted.map_or(0, |point| point.entries);
        let oldest = self.meta.snapshots.values().map(|point| point.entries).min();
        let removable = oldest.unwrap_or(0).saturating_sub(gone + 1);
        self.meta.stage == SessionStage::Open && from.is_some_and(|from| removable >= from.max(1))
    }
}

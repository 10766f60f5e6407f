//! The upkeep of sessions: ends those that nobody uses any more, and compacts those that grew long.
//!
//! Upstream: whoever runs a server, once in a while. Downstream: the list of sessions, `compaction`, `life`.
//! Promises: each thing is done once, however many processes look; a session that cannot be dealt with holds up no other;
//! a crash anywhere is made up for by the next look. An expired session leaves a note that it was, for a while.
//! Refuses: to end what a group still needs, or what was published to meanwhile.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, stream};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, GroupStart, GroupStats, Retention, StreamStats, TrimGuard};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, info, warn};

use super::compaction::UnreadableEntries;
use super::life::{AT_ONCE, Listed, Looked};
use super::meta::{self, Meta, Point, Stage};
use super::{Result, SessionError, Sessions};
use crate::error::BusError;
use crate::limits::LIST_MAX;
use crate::metrics;
use crate::name::{SessionId, random_bits};

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// Sessions looked at.
    pub seen: u64,
    /// Sessions whose time was up.
    pub expired: u64,
    /// Sessions whose time is up, but whose events some group still needs.
    pub held_back: u64,
    /// Abandoned forks and imports that were removed.
    pub unfinished: u64,
    /// Expired sessions that were forgotten, after `note_kept_for`.
    pub forgotten: u64,
    /// Sessions that could not be dealt with; the log says why.
    pub failed: u64,
}

/// What one run of the upkeep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Upkeep {
    /// What became of sessions.
    pub swept: Swept,
    /// Sessions that were compacted.
    pub compacted: u64,
    /// Entries that went by that.
    pub removed: u64,
    /// Sessions that are long, but cannot be compacted: such as those with entries that nobody can read.
    pub refused: u64,
}

impl Upkeep {
    fn add(&mut self, other: Self) {
        let Self { swept, compacted, removed, refused } = other;
        self.swept.seen += swept.seen;
        self.swept.expired += swept.expired;
        self.swept.held_back += swept.held_back;
        self.swept.unfinished += swept.unfinished;
        self.swept.forgotten += swept.forgotten;
        self.swept.failed += swept.failed;
        self.compacted += compacted;
        self.removed += removed;
        self.refused += refused;
    }
}

impl Sessions {
    /// Does what is to be done [once](Self::run_once), then again every so often, until `shutdown` is done. One process is
    /// enough; several do no harm. A backend that is away is asked again.
    pub async fn run(&self, every: Duration, shutdown: impl Future<Output = ()>) -> Result<()> {
        if every.is_zero() {
            return Err(BusError::invalid("every", "it is zero").into());
        }
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let running = async {
            loop {
                ticks.tick().await;
                if let Err(error) = self.run_once().await {
                    warn!(%error, "sessions were not looked after, trying again");
                }
            }
        };
        // What is dropped half way is gone on with by the next run, as after a crash.
        tokio::select! {
            () = shutdown => Ok(()),
            () = running => Ok(()),
        }
    }

    /// [Sweeps](Self::sweep) once, and compacts the sessions that have at least `compact_from` entries before the oldest of
    /// their snapshots. Entries that nobody could read are kept, and their sessions with them.
    pub async fn run_once(&self) -> Result<Upkeep> {
        self.walk(self.inner.config.compact_from).await
    }

    /// Ends sessions whose time is up, and removes abandoned forks and imports. Run it now and then, in any process and
    /// in several: it does each thing once.
    ///
    /// An expired session keeps a note of how many entries it had ([`SessionError::Expired`]) for `note_kept_for`; then it
    /// is [forgotten](Self::forget). Entries that a group has not read or acknowledged stay, and so does their session.
    pub async fn sweep(&self) -> Result<Swept> {
        Ok(self.walk(None).await?.swept)
    }

    /// Walks over all sessions, some at once.
    async fn walk(&self, compact_from: Option<u64>) -> Result<Upkeep> {
        let mut all = Upkeep::default();
        let now = self.now().await?;
        let mut after = EntryId::MIN;
        loop {
            let page = self.page(after, LIST_MAX).await?;
            let Some(last) = page.last() else { return Ok(all) };
            after = last.index;
            let each = page.into_iter();
            let each = each.map(|listed| self.look_after(listed, now, compact_from).boxed());
            let each: Vec<BoxFuture<'_, Upkeep>> = each.collect();
            let mut done = stream::iter(each).buffer_unordered(AT_ONCE);
            while let Some(one) = done.next().await {
                all.add(one);
            }
        }
    }

    /// Deals with one entry of the list. One that fails is logged, and left to the next time.
    async fn look_after(
        &self,
        listed: Listed,
        now: Timestamp,
        compact_from: Option<u64>,
    ) -> Upkeep {
        let mut done = Upkeep::default();
        let looked = &match listed.looked {
            Ok(Some(looked)) => looked,
            Ok(None) => {
                if let Err(error) = self.sweep_list(listed.index, now).await {
                    warn!(%error, "the list of sessions could not be swept");
                }
                return done;
            }
            Err(_) => {
                done.swept.failed = 1;
                return done;
            }
        };
        done.swept.seen = 1;
        let session = &looked.session;
        if let Err(error) = self.sweep_one(looked, now, &mut done.swept).await {
            done.swept.failed = 1;
            warn!(%session, %error, "session could not be swept");
        } else if done.swept.expired == 0 && looked.is_long(compact_from) {
            self.compact_long(session, &mut done).await;
        }
        done
    }

    /// Removes an entry of the list that counts for nothing, once nobody can be about to make it count.
    async fn sweep_list(&self, index: EntryId, now: Timestamp) -> Result<()> {
        let age = now.since(Timestamp::from_millis(index.ms));
        if age > self.inner.config.unfinished_after {
            let list = self.journal().keys.sessions();
            self.journal().backend.delete_entries(&list, &[index]).await?;
        }
        Ok(())
    }

    async fn sweep_one(&self, looked: &Looked, now: Timestamp, swept: &mut Swept) -> Result<()> {
        let Looked { session, meta, stats } = looked;
        match meta.stage {
            Stage::Filling => {
                let is_abandoned = now.since(meta.progress_at) > self.inner.config.unfinished_after;
                if is_abandoned && self.remove_unfinished(session, &meta.filler).await? {
                    swept.unfinished += 1;
                    info!(%session, "an abandoned fork or import was removed");
                }
            }
            Stage::Open => {
                if meta.ttl.is_some_and(|ttl| now.since(looked.used_at()) > ttl) {
                    match self.expire(looked, now).await? {
                        true => swept.expired += 1,
                        false => swept.held_back += 1,
                    }
                }
            }
            Stage::Expired => {
                // Whoever expired it may still be about to clear it, or to see that it is in use.
                let ended = now.since(looked.ended_at());
                if ended <= self.inner.config.unfinished_after {
                    return Ok(());
                }
                // Or has died before either.
                if self.is_in_use_after_all(looked).await? {
                    self.open_again(session).await?;
                    return Ok(());
                }
                if stats.as_ref().is_some_and(|stats| stats.length > 0) {
                    self.clear(session, meta).await?;
                }
                if ended > self.inner.config.note_kept_for
                    && self.forget_expired(looked, now).await?
                {
                    swept.forgotten += 1;
                }
            }
        }
        Ok(())
    }

    /// Ends a session. Returns `false` if a group still needs some of its events, or if it is in use after all.
    async fn expire(&self, looked: &Looked, now: Timestamp) -> Result<bool> {
        let Looked { session, meta, stats } = looked;
        if self.is_needed(session, stats.as_ref()) {
            return Ok(false);
        }
        let journal = self.journal();
        let info = looked.info();
        let point = Point {
            entry_id: info.last_entry.unwrap_or(EntryId::MIN),
            entries: info.length + info.gone,
        };
        let open = meta::stage_text(Stage::Open);
        let expected = Some((meta::STAGE, open.as_bytes()));
        let map = journal.keys.session_meta(session);
        if !journal.backend.map_update(&map, expected, &meta::expired_is(point, now)).await? {
            return Ok(false);
        }
        // Somebody published or began to read between the look and the end. Nothing has gone yet: it is in use after all.
        let stats = journal.backend.stats(&journal.keys.session(session)).await?;
        if stats.as_ref().and_then(|stats| stats.last_id) != info.last_entry
            || self.is_needed(session, stats.as_ref())
        {
            self.open_again(session).await?;
            return Ok(false);
        }
        self.clear(session, &Meta { expired: Some(point), ..meta.clone() }).await?;
        metrics::expired();
        info!(%session, entries = point.entries, "session expired");
        Ok(true)
    }

    async fn open_again(&self, session: &SessionId) -> Result<()> {
        let map = self.journal().keys.session_meta(session);
        let expired = meta::stage_text(Stage::Expired);
        let expected = Some((meta::STAGE, expired.as_bytes()));
        self.journal().backend.map_update(&map, expected, &meta::open_again()).await?;
        Ok(())
    }

    /// Whether something came after an end of which nothing has been done yet.
    async fn is_in_use_after_all(&self, looked: &Looked) -> Result<bool> {
        let Looked { session, meta, stats } = looked;
        let (Some(point), Some(stats)) = (meta.expired, stats) else { return Ok(false) };
        let is_whole = stats.first_id.is_some_and(|first| first <= point.entry_id);
        if !is_whole || stats.last_id <= Some(point.entry_id) {
            return Ok(false);
        }
        for set in meta.snapshots.keys() {
            let map = self.journal().keys.session_snapshot(session, set);
            if self.journal().backend.map_get(&map).await?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a group still needs entries of its stream.
    fn is_needed(&self, session: &SessionId, stats: Option<&StreamStats>) -> bool {
        let guard = self.journal().keys.session_guard(session);
        let needs =
            |group: &GroupStats| group.name != guard && (group.pending > 0 || group.lag != Some(0));
        stats.is_some_and(|stats| stats.groups.iter().any(needs))
    }

    /// Removes what an expired session had. An event that came after its end stays, for whoever wonders.
    async fn clear(&self, session: &SessionId, meta: &Meta) -> Result<()> {
        let Some(point) = meta.expired else { return Ok(()) };
        let journal = self.journal();
        let (stream, guard) = (journal.keys.session(session), journal.keys.session_guard(session));
        for set in meta.snapshots.keys() {
            journal.backend.map_delete(&journal.keys.session_snapshot(session, set)).await?;
        }
        let start = GroupStart::After(point.entry_id);
        if journal.backend.reset_group(&stream, &guard, start).await? {
            journal.backend.trim(&stream, &Retention::max_len(0), TrimGuard::Safe).await?;
        }
        Ok(())
    }

    /// Forgets a session that expired long ago. Returns `false` if a group still needs what came after its end, or if
    /// somebody else was quicker.
    async fn forget_expired(&self, looked: &Looked, now: Timestamp) -> Result<bool> {
        let session = &looked.session;
        if self.is_needed(session, looked.stats.as_ref()) {
            return Ok(false);
        }
        // One of all who want to wins, and until it is done nobody can make another session of this name, which would go,
        // too. If it dies, what is left is taken for an abandoned copy, and goes later.
        let map = self.journal().keys.session_meta(session);
        let expired = meta::stage_text(Stage::Expired);
        let expected = Some((meta::STAGE, expired.as_bytes()));
        let filler = format!("{:032x}", random_bits());
        let going = meta::going(&filler, now);
        if !self.journal().backend.map_update(&map, expected, &going).await? {
            return Ok(false);
        }
        let is_forgotten = self.forget(session).await?;
        debug!(%session, "expired session forgotten");
        Ok(is_forgotten)
    }

    async fn compact_long(&self, session: &SessionId, done: &mut Upkeep) {
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

impl Looked {
    /// When it was last used, as far as anybody knows.
    fn used_at(&self) -> Timestamp {
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
    fn is_long(&self, from: Option<u64>) -> bool {
        let gone = self.meta.compacted.map_or(0, |point| point.entries);
        let oldest = self.meta.snapshots.values().map(|point| point.entries).min();
        let removable = oldest.unwrap_or(0).saturating_sub(gone + 1);
        self.meta.stage == Stage::Open && from.is_some_and(|from| removable >= from.max(1))
    }
}

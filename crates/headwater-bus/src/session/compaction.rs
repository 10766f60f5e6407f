//! Compaction: trims what snapshots stand for. And the end of sessions that nobody uses any more.
//!
//! Upstream: applications and operators. Downstream: the guard of a session, a group that never reads, and a safe trim.
//! Promises: only entries before the newest snapshot of *every* set of folds go, and of them only those that every group
//! has read and acknowledged: the guard stands at the snapshot, and a safe trim stops at the slowest group. The entry
//! of the snapshot itself stays, as a witness that nothing after it is gone. A crash anywhere leaves the session whole.
//! An expired session leaves a note that it was.

use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, GroupStart, Retention, TrimGuard};
use tracing::{info, warn};

use super::life::Listed;
use super::meta::{self, Meta, Point, Stage};
use super::{Result, Session, SessionError, SessionInfo, Sessions, snapshot};
use crate::limits::LIST_MAX;
use crate::metrics;
use crate::name::SessionId;

/// What a compaction did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// How many entries went.
    pub removed: u64,
    /// Entries before this one may go: the oldest of the snapshots.
    pub before: EntryId,
    /// Whether entries stayed that snapshots stand for, because a group still needs them.
    pub held_back: bool,
}

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
    /// Sessions that could not be dealt with; the log says why.
    pub failed: u64,
}

/// What to do with entries that could not be read when a snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadableEntries {
    /// Trim nothing while there are any: a later version may read them, and then needs all events.
    Keep,
    /// They are given up, like all others that the snapshot stands for.
    GiveUp,
}

impl Session {
    /// Takes a snapshot and trims what the snapshots of all sets of folds stand for.
    pub async fn compact(&self) -> Result<Compacted> {
        self.refresh().await?;
        self.snapshot().await?;
        self.sessions().compact(self.id(), UnreadableEntries::Keep).await
    }
}

impl Sessions {
    /// Trims what the snapshots of all sets of folds stand for. It is an error if there is no snapshot.
    pub async fn compact(
        &self,
        session: &SessionId,
        unreadable: UnreadableEntries,
    ) -> Result<Compacted> {
        let refuse =
            |problem: String| SessionError::Compaction { session: session.clone(), problem };
        let meta = self.open_meta(session).await?;
        if meta.snapshots.is_empty() {
            return Err(refuse("there is no snapshot".to_owned()));
        }
        // What the meta says was there once; what counts is there now.
        let mut before: Option<Point> = None;
        for set in meta.snapshots.keys() {
            let map = self.journal().keys.session_snapshot(session, set);
            let Some(fields) = self.journal().backend.map_get(&map).await? else {
                return Err(refuse(format!("the snapshot of the folds {set} is gone")));
            };
            let point = snapshot::verify(&fields).map_err(|problem| {
                refuse(format!("the snapshot of the folds {set} cannot be used: {problem}"))
            })?;
            if unreadable == UnreadableEntries::Keep && snapshot::has_unreadable(&fields) {
                let problem = "entries could not be read when its snapshot was taken; register \
                               their types, or give them up";
                return Err(refuse(problem.to_owned()));
            }
            before = Some(before.map_or(point, |other| earlier(other, point)));
        }
        let Some(before) = before else { return Err(refuse("there is no snapshot".to_owned())) };
        self.trim_before(session, &meta, before).await
    }

    async fn trim_before(
        &self,
        session: &SessionId,
        meta: &Meta,
        before: Point,
    ) -> Result<Compacted> {
        let journal = self.journal();
        let (stream, guard) = (journal.keys.session(session), journal.keys.session_guard(session));
        let map = journal.keys.session_meta(session);
        // Why entries will be missing is known before they are. All up to the snapshot's own are in its count.
        if meta.compacted.is_none_or(|point| point.entry_id < before.entry_id) {
            let point = Point { entries: before.entries.saturating_sub(1), ..before };
            let open = meta::stage_text(Stage::Open);
            let expected = Some((meta::STAGE, open.as_bytes()));
            journal.backend.map_update(&map, expected, &meta::compacted_is(point)).await?;
        }
        let start = GroupStart::After(previous(before.entry_id));
        if !journal.backend.reset_group(&stream, &guard, start).await? {
            let problem = "its stream is lost".to_owned();
            return Err(SessionError::Compaction { session: session.clone(), problem });
        }
        // The guard has read exactly what may go.
        let retention = Retention::max_len(0);
        let trimmed = journal.backend.trim(&stream, &retention, TrimGuard::Safe).await?;
        let stats = journal.backend.stats(&stream).await?;
        let first = stats.and_then(|stats| stats.first_id);
        let held_back = first.is_some_and(|first| first < before.entry_id);
        metrics::compacted(trimmed.removed);
        info!(%session, removed = trimmed.removed, held_back, "session compacted");
        Ok(Compacted { removed: trimmed.removed, before: before.entry_id, held_back })
    }

    /// Removes the snapshot of a set of folds that nobody uses any more: compactions need not heed it then.
    pub async fn forget_snapshots(&self, session: &SessionId, set: &str) -> Result<bool> {
        let meta = self.open_meta(session).await?;
        if !meta.snapshots.contains_key(set) {
            return Ok(false);
        }
        let journal = self.journal();
        let map = journal.keys.session_meta(session);
        journal.backend.map_update(&map, None, &meta::snapshot_is_gone(set)).await?;
        journal.backend.map_delete(&journal.keys.session_snapshot(session, set)).await?;
        Ok(true)
    }

    /// Ends sessions whose time is up, and removes abandoned forks and imports. Run it now and then, in any process and
    /// in several: it does each thing once.
    ///
    /// An expired session keeps a note of how many entries it had ([`SessionError::Expired`]) until it is
    /// [forgotten](Self::forget). Entries that a group has not read or acknowledged stay, and so does their session.
    pub async fn sweep(&self) -> Result<Swept> {
        let mut swept = Swept::default();
        let now = self.now().await?;
        let mut after = EntryId::MIN;
        loop {
            let page = self.page(after, LIST_MAX).await?;
            let Some(last) = page.last() else { return Ok(swept) };
            after = last.index;
            for Listed { index, info } in &page {
                let Ok(info) = info else {
                    swept.failed += 1;
                    continue;
                };
                let Some(info) = info else {
                    self.sweep_list(*index, now).await?;
                    continue;
                };
                swept.seen += 1;
                if let Err(error) = self.sweep_one(info, now, &mut swept).await {
                    swept.failed += 1;
                    warn!(session = %info.session, %error, "session could not be swept");
                }
            }
        }
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

    async fn sweep_one(&self, info: &SessionInfo, now: Timestamp, swept: &mut Swept) -> Result<()> {
        let session = &info.session;
        match info.stage {
            Stage::Filling => {
                let Some(meta) = self.meta(session).await? else { return Ok(()) };
                let is_abandoned = now.since(meta.progress_at) > self.inner.config.unfinished_after;
                if meta.stage == Stage::Filling
                    && is_abandoned
                    && self.remove_unfinished(session, &meta.filler).await?
                {
                    swept.unfinished += 1;
                    info!(%session, "an abandoned fork or import was removed");
                }
            }
            Stage::Open => {
                let last = info.last_entry.map_or(0, |id| id.ms);
                let used_at = info.created_at.max(Timestamp::from_millis(last));
                if info.ttl.is_some_and(|ttl| now.since(used_at) > ttl) {
                    match self.expire(session, info).await? {
                        true => swept.expired += 1,
                        false => swept.held_back += 1,
                    }
                }
            }
            // Whoever expired it may have died before all of it was gone.
            Stage::Expired if info.length > 0 => {
                let Some(meta) = self.meta(session).await? else { return Ok(()) };
                self.clear(session, &meta).await?;
            }
            Stage::Expired => {}
        }
        Ok(())
    }

    /// Ends a session. Returns `false` if a group still needs some of its events.
    async fn expire(&self, session: &SessionId, info: &SessionInfo) -> Result<bool> {
        let journal = self.journal();
        let stream = journal.keys.session(session);
        let guard = journal.keys.session_guard(session);
        let Some(stats) = journal.backend.stats(&stream).await? else { return Ok(true) };
        let needs = |group: &headwater_stream::GroupStats| {
            group.name != guard && (group.pending > 0 || group.lag != Some(0))
        };
        if stats.groups.iter().any(needs) {
            return Ok(false);
        }
        // Somebody published meanwhile: it is in use.
        if stats.last_id != info.last_entry {
            return Ok(false);
        }
        let point = Point {
            entry_id: info.last_entry.unwrap_or(EntryId::MIN),
            entries: info.length + info.gone,
        };
        let open = meta::stage_text(Stage::Open);
        let expected = Some((meta::STAGE, open.as_bytes()));
        let map = journal.keys.session_meta(session);
        if !journal.backend.map_update(&map, expected, &meta::expired_is(point)).await? {
            return Ok(true);
        }
        // Somebody published between the look and the end. Nothing has gone yet: it is in use after all.
        let last = journal.backend.stats(&stream).await?.and_then(|stats| stats.last_id);
        if last != info.last_entry {
            let expired = meta::stage_text(Stage::Expired);
            let expected = Some((meta::STAGE, expired.as_bytes()));
            journal.backend.map_update(&map, expected, &meta::open_again()).await?;
            return Ok(false);
        }
        let Some(meta) = self.meta(session).await? else { return Ok(true) };
        self.clear(session, &meta).await?;
        metrics::expired();
        info!(%session, entries = point.entries, "session expired");
        Ok(true)
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
}

fn earlier(one: Point, other: Point) -> Point {
    if one.entry_id <= other.entry_id { one } else { other }
}

/// The largest id before this one.
fn previous(id: EntryId) -> EntryId {
    match (id.ms, id.seq) {
        (0, 0) => EntryId::MIN,
        (ms, 0) => EntryId::new(ms - 1, u64::MAX),
        (ms, seq) => EntryId::new(ms, seq - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_previous_id_is_the_one_whose_next_it_is() {
        for id in [EntryId::new(0, 1), EntryId::new(5, 0), EntryId::new(5, 7), EntryId::MAX] {
            assert_eq!(previous(id).next(), id);
        }
        assert_eq!(previous(EntryId::MIN), EntryId::MIN);
    }
}

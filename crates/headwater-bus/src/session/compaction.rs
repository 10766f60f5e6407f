//! Compaction: trims entries that are included in snapshots.
//!
//! Upstream: applications, operators and `maintenance`. Downstream: the guard group of a session, and a safe trim.
//! Guarantees: only entries before the newest snapshot of *every* set of folds are trimmed, and of these only entries
//! that every group has read and acknowledged: the guard group stands at the snapshot, and a safe trim stops at the
//! slowest group. The entry of the snapshot itself is kept, as proof that nothing after it is missing. A crash at any
//! point leaves the session complete.

use headwater_stream::{EntryId, GroupStart, Retention, TrimGuard};
use tracing::info;

use super::meta::{self, SessionMeta, SessionPoint, SessionStage};
use super::{Result, Session, SessionError, Sessions, snapshot};
use crate::metrics;
use crate::name::SessionId;

/// Result of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactionReport {
    /// Number of entries removed.
    pub removed: u64,
    /// Position of the oldest snapshot; entries before it may be removed.
    pub before: EntryId,
    /// Whether a group still needs some of these entries.
    pub held_back: bool,
}

/// What to do with entries that could not be decoded when a snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadableEntries {
    /// Trim nothing: a later version may decode them, and then needs all events.
    Keep,
    /// Trim them with the others.
    Trim,
}

impl Session {
    /// Takes a snapshot and trims the entries that the snapshots of all sets of folds include.
    pub async fn compact(&self) -> Result<CompactionReport> {
        self.refresh().await?;
        self.snapshot().await?;
        self.sessions().compact(self.id(), UnreadableEntries::Keep).await
    }
}

impl Sessions {
    /// Trims the entries that the snapshots of all sets of folds include. Fails if there is no snapshot.
    pub async fn compact(
        &self,
        session: &SessionId,
        unreadable: UnreadableEntries,
    ) -> Result<CompactionReport> {
        let failed =
            |problem: String| SessionError::Compaction { session: session.clone(), problem };
        let meta = self.open_meta(session).await?;
        if meta.snapshots.is_empty() {
            return Err(failed("there is no snapshot".to_owned()));
        }
        // The metadata lists snapshots that existed once; check that they still exist.
        let mut before: Option<SessionPoint> = None;
        for set in meta.snapshots.keys() {
            let map = self.storage().keys.session_snapshot(session, set);
            let Some(fields) = self.storage().backend.map_get(&map).await? else {
                return Err(failed(format!("the snapshot of fold set `{set}` does not exist")));
            };
            let point = snapshot::verify(&fields).map_err(|problem| {
                failed(format!("the snapshot of fold set `{set}` cannot be used: {problem}"))
            })?;
            if unreadable == UnreadableEntries::Keep && snapshot::has_unreadable(&fields) {
                let problem = "entries could not be read when its snapshot was taken; register \
                               their types, or compact with `UnreadableEntries::Trim`";
                return Err(failed(problem.to_owned()));
            }
            before = Some(before.map_or(point, |other| earlier(other, point)));
        }
        let Some(before) = before else { return Err(failed("there is no snapshot".to_owned())) };
        self.trim_before(session, &meta, before).await
    }

    async fn trim_before(
        &self,
        session: &SessionId,
        meta: &SessionMeta,
        before: SessionPoint,
    ) -> Result<CompactionReport> {
        let storage = self.storage();
        let (stream, guard) = (storage.keys.session(session), storage.keys.session_guard(session));
        let map = storage.keys.session_meta(session);
        // Recorded before the trim, so that missing entries are always explained. The count excludes the snapshot's
        // own entry.
        if meta.compacted.is_none_or(|point| point.entry_id < before.entry_id) {
            let point = SessionPoint { entries: before.entries.saturating_sub(1), ..before };
            let open = meta::stage_text(SessionStage::Open);
            let expected = Some((meta::STAGE, open.as_bytes()));
            if !storage.backend.map_update(&map, expected, &meta::compacted_is(point)).await? {
                // The session expired or was deleted meanwhile; report that instead.
                self.open_meta(session).await?;
                let problem = "it changed meanwhile; retry".to_owned();
                return Err(SessionError::Compaction { session: session.clone(), problem });
            }
        }
        let start = GroupStart::After(previous(before.entry_id));
        if !storage.backend.reset_group(&stream, &guard, start).await? {
            let problem = "its stream was deleted".to_owned();
            return Err(SessionError::Compaction { session: session.clone(), problem });
        }
        // The guard group has now read exactly the entries that may be trimmed.
        let retention = Retention::max_len(0);
        let trimmed = storage.backend.trim(&stream, &retention, TrimGuard::Safe).await?;
        let stats = storage.backend.stats(&stream).await?;
        let first = stats.and_then(|stats| stats.first_id);
        let held_back = first.is_some_and(|first| first < before.entry_id);
        metrics::compacted(trimmed.removed);
        info!(%session, removed = trimmed.removed, held_back, "session compacted");
        Ok(CompactionReport { removed: trimmed.removed, before: before.entry_id, held_back })
    }

    /// Deletes the snapshot of an unused set of folds, so that it no longer limits compaction.
    pub async fn delete_snapshots(&self, session: &SessionId, set: &str) -> Result<bool> {
        let meta = self.open_meta(session).await?;
        if !meta.snapshots.contains_key(set) {
            return Ok(false);
        }
        let storage = self.storage();
        let map = storage.keys.session_meta(session);
        storage.backend.map_update(&map, None, &meta::snapshot_is_gone(set)).await?;
        storage.backend.map_delete(&storage.keys.session_snapshot(session, set)).await?;
        Ok(true)
    }
}

fn earlier(one: SessionPoint, other: SessionPoint) -> SessionPoint {
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
    use std::sync::Arc;

    use headwater_stream::clock::Timestamp;

    use super::*;
    use crate::builtin_events::PromptExecuted;
    use crate::fold::Folds;
    use crate::registry::EventRegistry;
    use crate::session::SessionsConfig;
    use crate::streamed::StreamedBus;

    #[tokio::test]
    async fn a_session_that_expired_meanwhile_is_not_trimmed() {
        let bus = Arc::new(StreamedBus::in_memory(EventRegistry::builtin()).await.unwrap());
        let folds = Folds::none().all::<PromptExecuted>(10);
        let sessions = Sessions::new(bus, folds, SessionsConfig::default()).await.unwrap();
        let id = SessionId::random();
        let session = sessions.create(&id).await.unwrap();
        for _ in 0..3 {
            session.publish(PromptExecuted::default()).await.unwrap();
        }
        session.snapshot().await.unwrap();
        let meta = sessions.open_meta(&id).await.unwrap();
        let before = *meta.snapshots.values().next().unwrap();

        // A sweep marked it as expired and has not removed its entries yet; it may still be reopened.
        let storage = sessions.storage();
        let map = storage.keys.session_meta(&id);
        let ended = meta::expired_is(before, Timestamp::from_millis(1_767_225_600_000));
        assert!(storage.backend.map_update(&map, None, &ended).await.unwrap());
        let error = sessions.trim_before(&id, &meta, before).await.unwrap_err();
        assert!(matches!(error, SessionError::Expired { .. }), "{error}");
        let stats = storage.backend.stats(&storage.keys.session(&id)).await.unwrap().unwrap();
        assert_eq!(stats.length, 3);

        // Once reopened, it can be compacted.
        assert!(storage.backend.map_update(&map, None, &meta::reopened()).await.unwrap());
        assert_eq!(sessions.trim_before(&id, &meta, before).await.unwrap().removed, 2);
    }

    #[test]
    fn the_previous_id_precedes_its_successor() {
        for id in [EntryId::new(0, 1), EntryId::new(5, 0), EntryId::new(5, 7), EntryId::MAX] {
            assert_eq!(previous(id).next(), id);
        }
        assert_eq!(previous(EntryId::MIN), EntryId::MIN);
    }
}

//! Sessions: ordered streams of events about one run or conversation, and the state computed from them.
//!
//! Upstream: applications and the main loop. Downstream: the bus stores the events; its session backend reads them
//! back.
//! Guarantees: the state of a session is a fold of its stream and of nothing else, the same in every process. Missing
//! events are reported: a session is never silently incomplete.

// In dependency order: each module uses only those above it.
mod error;
mod meta;

mod state;

mod replay;
mod snapshot;

mod deleted_entries;

mod lifecycle;
mod recovery;

mod handle;

mod compaction;
mod copy;

mod maintenance;

mod fork;

mod jsonl;

mod export;
mod import;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::limits::KEEP_MAX;

pub use self::compaction::{CompactionReport, UnreadableEntries};
pub use self::error::{MissingEntries, MissingReason, SessionError};
pub use self::export::Export;
pub use self::handle::Session;
pub use self::import::Import;
pub use self::lifecycle::SessionInfo;
pub use self::maintenance::{SessionMaintenanceReport, SessionSweepReport};
use self::meta::SessionMeta;
pub use self::meta::{Parent, SessionStage};
pub use self::recovery::Recovery;
pub use self::replay::ReplayUntil;
pub use self::state::SessionState;
use crate::bus::EventBus;
use crate::error::{BusError, Result as BusResult};
use crate::fold::Folds;
use crate::name::SessionId;
use crate::session_backend::SessionBackend;

type Result<T, E = SessionError> = std::result::Result<T, E>;

/// Settings of [`Sessions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionsConfig {
    /// Entries between automatic snapshots, which are taken when a session is published to or refreshed. Default: 1000;
    /// `None`: never.
    pub snapshot_every: Option<u64>,
    /// Idle time after which sessions created here expire; needs [maintenance](Sessions::run). Default: `None`, never.
    pub ttl: Option<Duration>,
    /// How long the tombstone of an expired session is kept; at least `abandoned_after`. Default: 30 days.
    pub tombstone_ttl: Duration,
    /// Time without progress after which a fork, an import or an expiry is considered abandoned. Default: 1 h.
    pub abandoned_after: Duration,
    /// Maintenance compacts a session with at least this many entries before its oldest snapshot; earlier states can
    /// then no longer be read. Default: 10 000; `None`: never.
    pub compact_min_entries: Option<u64>,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        Self {
            snapshot_every: Some(1000),
            ttl: None,
            tombstone_ttl: Duration::from_secs(30 * 24 * 60 * 60),
            abandoned_after: Duration::from_secs(60 * 60),
            compact_min_entries: Some(10_000),
        }
    }
}

impl SessionsConfig {
    fn validate(&self) -> BusResult<()> {
        for (name, count) in [
            ("snapshot_every", self.snapshot_every),
            ("compact_min_entries", self.compact_min_entries),
        ] {
            if count == Some(0) {
                return Err(BusError::invalid(name, "must be greater than zero"));
            }
        }
        for (name, time) in [
            ("ttl", self.ttl),
            ("tombstone_ttl", Some(self.tombstone_ttl)),
            ("abandoned_after", Some(self.abandoned_after)),
        ] {
            if time.is_some_and(|time| time.as_millis() == 0 || time > KEEP_MAX) {
                let problem = format!("{time:?}; 1 ms to {KEEP_MAX:?}");
                return Err(BusError::invalid(name, problem));
            }
        }
        Ok(())
    }
}

/// The sessions of a bus, with the folds of an application. Clones share them.
#[derive(Clone)]
pub struct Sessions {
    inner: Arc<Inner>,
}

struct Inner {
    bus: Arc<dyn EventBus>,
    storage: SessionBackend,
    folds: Folds,
    /// Id of the set of folds.
    set: String,
    config: SessionsConfig,
}

impl Sessions {
    /// The sessions of a bus.
    pub async fn new(bus: Arc<dyn EventBus>, folds: Folds, config: SessionsConfig) -> Result<Self> {
        config.validate()?;
        folds.check(bus.registry())?;
        let folds = folds.limited();
        let storage = bus.session_backend().await?;
        let set = snapshot::fold_set_id(&folds);
        Ok(Self { inner: Arc::new(Inner { bus, storage, folds, set, config }) })
    }

    /// The bus that events are published on.
    pub fn bus(&self) -> &Arc<dyn EventBus> {
        &self.inner.bus
    }

    fn storage(&self) -> &SessionBackend {
        &self.inner.storage
    }

    async fn now(&self) -> Result<Timestamp> {
        Ok(self.storage().backend.now().await?)
    }

    /// Metadata of a session; `None` if there is none. If it is a copy whose process died before it renamed the
    /// stream, the stream is renamed now.
    async fn meta(&self, session: &SessionId) -> Result<Option<SessionMeta>> {
        match read_meta(self.storage(), session).await? {
            Some(meta) if !meta.renaming.is_empty() => {
                Ok(self.rename_copy(session, &meta).await?.then_some(meta))
            }
            found => Ok(found),
        }
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("session_backend", &self.inner.storage)
            .field("folds", &self.inner.folds)
            .finish_non_exhaustive()
    }
}

async fn read_meta(storage: &SessionBackend, session: &SessionId) -> Result<Option<SessionMeta>> {
    let map = storage.keys.session_meta(session);
    let Some(fields) = storage.backend.map_get(&map).await? else { return Ok(None) };
    let damaged = |problem| SessionError::Damaged { session: session.clone(), problem };
    SessionMeta::from_fields(&fields).map_err(damaged)
}

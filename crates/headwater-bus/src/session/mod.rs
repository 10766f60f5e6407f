//! Sessions: ordered streams of events about one run or conversation, and the state that is made of them.
//!
//! Upstream: applications and the main loop. Downstream: the bus, which stores the events; its `journal`, where they
//! are read back.
//! Promises: the state of a session is a fold of its stream and of nothing else, the same in every process. A session
//! whose events are gone says so: it is never silently incomplete.

// In dependency order: each module uses only those above it.
mod error;
mod meta;

mod state;

mod replay;
mod snapshot;

mod life;
mod recovery;

mod opened;

mod compaction;
mod filling;

mod fork;

mod lines;

mod export;
mod import;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::limits::KEEP_MAX;

pub use self::compaction::{Compacted, Swept, UnreadableEntries};
pub use self::error::{Missing, MissingReason, SessionError};
pub use self::export::Export;
pub use self::import::Import;
pub use self::life::SessionInfo;
use self::meta::Meta;
pub use self::meta::{Parent, Stage};
pub use self::opened::Session;
pub use self::recovery::Recovery;
pub use self::replay::Until;
pub use self::state::SessionState;
use crate::bus::EventBus;
use crate::error::{BusError, Result as BusResult};
use crate::fold::Folds;
use crate::journal::Journal;
use crate::name::SessionId;

type Result<T, E = SessionError> = std::result::Result<T, E>;

/// Settings of [`Sessions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionsConfig {
    /// After how many entries a session takes a snapshot by itself, when it is published to or refreshed. Default: 1000;
    /// `None` never.
    pub snapshot_every: Option<u64>,
    /// How long a session that is made here lives after its last event, if somebody sweeps. Default: `None`, for ever.
    pub ttl: Option<Duration>,
    /// How long after the last step of a fork or import it is taken for abandoned. Default: 1 h.
    pub unfinished_after: Duration,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        Self {
            snapshot_every: Some(1000),
            ttl: None,
            unfinished_after: Duration::from_secs(60 * 60),
        }
    }
}

impl SessionsConfig {
    fn validate(&self) -> BusResult<()> {
        if self.snapshot_every == Some(0) {
            return Err(BusError::invalid("snapshot_every", "it is zero"));
        }
        for (name, time) in [("ttl", self.ttl), ("unfinished_after", Some(self.unfinished_after))] {
            if time.is_some_and(|time| time.as_millis() == 0 || time > KEEP_MAX) {
                let problem = format!("{time:?}; 1 ms to {KEEP_MAX:?}");
                return Err(BusError::invalid(name, problem));
            }
        }
        Ok(())
    }
}

/// The sessions of a bus, with the folds of an application. Clones are the same.
#[derive(Clone)]
pub struct Sessions {
    inner: Arc<Inner>,
}

struct Inner {
    bus: Arc<dyn EventBus>,
    journal: Journal,
    folds: Folds,
    /// What the set of folds is known by.
    set: String,
    config: SessionsConfig,
}

impl Sessions {
    /// The sessions of a bus. A local bus begins to keep the events of sessions, in memory.
    pub async fn new(bus: Arc<dyn EventBus>, folds: Folds, config: SessionsConfig) -> Result<Self> {
        config.validate()?;
        folds.check(bus.registry())?;
        let journal = bus.journal().await?;
        let set = snapshot::set_of(&folds);
        Ok(Self { inner: Arc::new(Inner { bus, journal, folds, set, config }) })
    }

    /// The bus that events are published on.
    pub fn bus(&self) -> &Arc<dyn EventBus> {
        &self.inner.bus
    }

    fn journal(&self) -> &Journal {
        &self.inner.journal
    }

    async fn now(&self) -> Result<Timestamp> {
        Ok(self.journal().backend.now().await?)
    }

    /// What is known of a session; `None` if there is none.
    async fn meta(&self, session: &SessionId) -> Result<Option<Meta>> {
        read_meta(self.journal(), session).await
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("journal", &self.inner.journal)
            .field("folds", &self.inner.folds)
            .finish_non_exhaustive()
    }
}

async fn read_meta(journal: &Journal, session: &SessionId) -> Result<Option<Meta>> {
    let map = journal.keys.session_meta(session);
    let Some(fields) = journal.backend.map_get(&map).await? else { return Ok(None) };
    let damaged = |problem| SessionError::Damaged { session: session.clone(), problem };
    Meta::from_fields(&fields).map_err(damaged)
}

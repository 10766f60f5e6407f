//! Registers sessions of runs that started while streams were unavailable, once their events have arrived.
//!
//! Upstream: `session` could not create them; their events are in the spool meanwhile. Downstream: the session index
//! of the bus.
//! Guarantees: at most [`PENDING_MAX`] sessions are tracked, in memory only. After a crash an untracked session can
//! still be read by its id, but is not listed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_bus::{SessionError, SessionId, Sessions};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

/// Maximum number of tracked sessions.
const PENDING_MAX: usize = 10_000;

/// How often pending sessions are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Checks before a session is dropped while streams are available: 720, an hour. Its events are lost by then.
const CHECKS_MAX: u32 = 720;

/// Sessions that are not registered yet.
pub(crate) struct PendingSessions {
    sessions: Arc<Sessions>,
    /// Each session with its number of checks.
    pending: Mutex<VecDeque<(SessionId, u32)>>,
}

impl PendingSessions {
    pub(crate) fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions, pending: Mutex::default() }
    }

    /// Tracks a session. If there are too many, the session is logged and not tracked.
    pub(crate) fn add(&self, session: SessionId) {
        let mut pending = self.pending();
        if pending.len() >= PENDING_MAX {
            warn!(%session, "too many pending sessions; this one can be read by its id but is not listed");
            return;
        }
        pending.push_back((session, 0));
    }

    /// Checks periodically until `shutdown` completes.
    pub(crate) async fn run(&self, shutdown: impl Future<Output = ()>) {
        let mut ticks = interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return,
                _ = ticks.tick() => {}
            }
            tokio::select! {
                () = &mut shutdown => return,
                () = self.run_once() => {}
            }
        }
    }

    /// Registers the sessions whose events have arrived. If cancelled, the session being checked is no longer tracked.
    async fn run_once(&self) {
        let count = self.pending().len();
        for _ in 0..count {
            let Some((session, checks)) = self.pending().pop_front() else { return };
            // Recovering a session that is not in the index registers it.
            match self.sessions.recover(&session).await {
                Ok(_) => debug!(%session, "pending session registered"),
                Err(SessionError::NotFound { .. }) if checks < CHECKS_MAX => {
                    self.pending().push_back((session, checks + 1));
                }
                Err(error) if error.is_transient() => {
                    self.pending().push_back((session, checks));
                    return;
                }
                Err(error) => warn!(%session, %error, "pending session could not be registered"),
            }
        }
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<(SessionId, u32)>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
